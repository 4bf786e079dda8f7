//! Options of an engine: the placement of weights, the KV cache, and the plan for MLPs that `tune` saved.

use std::path::PathBuf;

use clap::{
    Args, ValueEnum,
    builder::{PossibleValue, RangedI64ValueParser},
};
use unweight::{
    engine::{
        Engine, EngineOptions, KvCache, LoadProgress, Plan,
        raw::{options::MAX_BATCH, pipelines::tuned},
    },
    format::{
        Placement,
        bundle::{ATTACHED_NAME, Bundle},
        raw::{compact::Uncompact, packed::Unpackable},
    },
    rt::DeviceInfo,
};

use super::{
    common::{Gpu, Memory},
    output::Console,
};

/// Parses the maximum number of concurrent sequences.
pub fn sequences() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=MAX_BATCH.into())
}

/// The placement of weights and the KV cache.
#[derive(Args)]
pub struct PlacementArgs {
    /// Placement of weights in GPU memory; experts of an MoE model are packed, or BF16
    #[arg(long, value_name = "PLACEMENT", default_value = "auto")]
    pub placement: PlacementArg,
    /// KV cache encoding; logits do not change; auto is bf16
    #[arg(long, value_name = "CACHE", default_value = "auto")]
    pub kv_cache: KvCacheArg,
    /// Experts per layer in GPU memory; the others are fetched from host memory when chosen [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub resident_experts: Option<u32>,
}

/// The default number of tokens that a draft model drafts.
const DRAFTED: u32 = 4;

/// The engine options that `generate` and `serve` share.
#[derive(Args)]
pub struct EngineArgs {
    #[command(flatten)]
    pub placement_args: PlacementArgs,
    /// Maximum tokens per sequence, prompt included [default: the model's limit, or what fits]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Draft up to N tokens (at most 15) per step from earlier text; 0 is off [default: 0, or 4 with --draft-model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=15))]
    speculate: Option<u32>,
    /// Bundle of a smaller model with the same vocabulary that drafts instead
    #[arg(long, value_name = "BUNDLE")]
    pub draft_model: Option<PathBuf>,
    #[command(flatten)]
    memory: Memory,
    #[command(flatten)]
    pub gpu: Gpu,
}

impl EngineArgs {
    /// Applies these options to `options`.
    pub fn set(&self, options: &mut EngineOptions) {
        options.placement = self.placement_args.placement.0;
        options.kv_cache = self.placement_args.kv_cache.0;
        options.resident_experts = self.placement_args.resident_experts;
        options.context = self.context;
        options.speculate = self.speculate.unwrap_or(if self.draft_model.is_some() { DRAFTED } else { 0 });
        options.memory = self.memory.bytes;
    }
}

/// `--placement`: a placement, or `None` for `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementArg(pub Option<Placement>);

impl ValueEnum for PlacementArg {
    fn value_variants<'a>() -> &'a [Self] {
        const {
            &[
                Self(None),
                Self(Some(Placement::Packed)),
                Self(Some(Placement::Compact)),
                Self(Some(Placement::Bf16)),
                Self(Some(Placement::Stored)),
                Self(Some(Placement::Alternate)),
            ]
        }
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self.0 {
            None => "packed if a sequence of 8192 or --context tokens still fits, else compact",
            Some(Placement::Packed) => "12 bits per weight",
            Some(Placement::Compact) => "compact tensors at 10.9 bits per weight, others packed",
            Some(Placement::Bf16) => "the BF16 baseline, on cuBLAS",
            Some(Placement::Stored) => "MLPs as stored, with the plan of `tune --save` if there is one",
            Some(Placement::Alternate) => "as stored, but every other Huffman-coded layer as a palette",
            Some(_) => return None,
        };
        Some(PossibleValue::new(self.0.map_or("auto", Placement::name)).help(help))
    }
}

impl PlacementArg {
    /// Whether MLPs run through pipelines.
    pub fn has_pipelines(self) -> bool {
        self.0.is_some_and(Placement::has_pipelines)
    }
}

/// `--kv-cache`: the encoding of keys and values, or `None` for `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheArg(pub Option<KvCache>);

impl ValueEnum for KvCacheArg {
    fn value_variants<'a>() -> &'a [Self] {
        const { &[Self(None), Self(Some(KvCache::Packed)), Self(Some(KvCache::Bf16))] }
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        // The meaning of `auto` depends on the command; its help explains it.
        let Some(kv_cache) = self.0 else { return Some(PossibleValue::new("auto")) };
        let help = match kv_cache {
            KvCache::Packed => "12 bits per element, up to a third more tokens",
            KvCache::Bf16 => "16 bits per element",
        };
        Some(PossibleValue::new(kv_cache.tag()).help(help))
    }
}

/// Returns the plan that is saved in a bundle: names of pipelines, no code. A damaged plan is ignored with a note.
pub fn saved_plan(bundle: &Bundle, console: Console) -> Plan {
    let attached = match bundle.attached() {
        Ok(attached) => attached,
        Err(error) => {
            console.note(format_args!("the saved plan is not used: {error}"));
            return Plan::default();
        }
    };
    let Some(text) = attached.as_ref().and_then(|attached| attached.plan()) else { return Plan::default() };
    match Plan::parse(text.as_bytes()) {
        Ok(plan) => plan,
        Err(error) => {
            console.note(format_args!("{ATTACHED_NAME}: the saved plan is not used: {error}"));
            Plan::default()
        }
    }
}

/// Prints a note if a plan does not apply to this device.
pub fn note_unused(plan: &Plan, placement: PlacementArg, bundle: &Bundle, device: &DeviceInfo, console: Console) {
    let Some(placement) = placement.0 else { return };
    let model = bundle.manifest().manifest_digest.to_string();
    let fits = |batch| plan.setting(batch, &tuned::key(&model, placement, batch, device)).is_some();
    if !plan.settings().is_empty() && !plan.settings().iter().any(|measured| fits(measured.batch)) {
        console.note(
            "the saved plan is not used: it was measured on another device, driver or program version, or for another \
             --placement; `unweight tune --save` measures a plan for this device",
        );
    }
}

/// Prints the progress of loading: compiled kernels, and layers with `-vv`.
pub fn note_load(console: Console, loaded: &LoadProgress<'_>) {
    match loaded {
        LoadProgress::Kernel(kernel) if !kernel.artifact.state.is_hit() => {
            console.note(format_args!("[{}/{}] {} compiled", kernel.done, kernel.total, kernel.artifact.name));
        }
        LoadProgress::Layers { done, total } if console.verbose > 1 => {
            console.note(format_args!("{done} of {total} layers"));
        }
        _ => {}
    }
}

/// Prints which experts run as BF16, and why.
pub fn note_bf16_experts(console: Console, engine: &Engine) {
    if let Some((layers, why)) = engine.bf16_experts() {
        console.note(bf16_experts(&layers, &why));
    }
}

/// Prints which experts are packed in host memory because they cannot be compact, and why.
pub fn note_packed_experts(console: Console, engine: &Engine) {
    if let Some((layers, why)) = engine.packed_in_host_memory() {
        console.note(packed_experts(&layers, &why));
    }
}

/// Returns a line on layers whose experts cannot be compact; `why` is the reason of the first layer.
fn packed_experts(layers: &[u32], why: &Uncompact) -> String {
    let first = layers.first().copied().unwrap_or_default();
    let word = if layers.len() == 1 { "layer" } else { "layers" };
    format!("experts of {word} {} stay packed in host memory (layer {first}: {why})", ranges(layers))
}

/// Returns a line on layers whose experts cannot be packed; `why` is the reason of the first layer.
fn bf16_experts(layers: &[u32], why: &Unpackable) -> String {
    let first = layers.first().copied().unwrap_or_default();
    let word = if layers.len() == 1 { "layer" } else { "layers" };
    format!("the experts of {word} {} cannot be packed and run as BF16 (layer {first}: {why})", ranges(layers))
}

/// Formats layers as ranges: `0-3,5,7-9`.
pub fn ranges(layers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &layer in layers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == layer => *last = layer,
            _ => parts.push((layer, layer)),
        }
    }
    let part = |(first, last): (u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn one_line_says_which_experts_are_bf16_and_why() {
        let why = Unpackable::Escapes { outside: 58, elements: 10_000 };
        assert_eq!(
            bf16_experts(&[0, 1, 2, 7], &why),
            "the experts of layers 0-2,7 cannot be packed and run as BF16 (layer 0: 0.58 % of the elements lie outside \
             the best window of 16 exponents, the limit is 0.39 %)"
        );
        let why = Unpackable::Operand { row: 3, col: 4 };
        let line =
            "the experts of layer 5 cannot be packed and run as BF16 (layer 5: element [3, 4] has no exact operand)";
        assert_eq!(bf16_experts(&[5], &why), line);
        let why = Uncompact::Escapes { escapes: 58, elements: 10_000 };
        assert_eq!(
            packed_experts(&[0, 1, 7], &why),
            "experts of layers 0-1,7 stay packed in host memory (layer 0: 0.58 % of the elements have no code, the \
             limit is 0.39 %)"
        );
    }
}
