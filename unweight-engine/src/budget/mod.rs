//! Chooses an encoding per tensor so that a model fits in the given GPU memory. Sizes come from the functions that the
//! engine reserves memory with, times from formulas that are fitted to measurements (`docs/benchmarks.md`). Needs no
//! device.
//!
//! ```text
//! tensors with the bytes of each encoding --units--> choices --frontier--> least time within a memory,
//!                                                                      or least bytes within a slowdown
//! ```
//! A unit is a set of tensors that one product multiplies with: queries, keys and values; output; gate and up; down;
//! the head; the embedding. MLP units may stay Huffman-coded. Their layers are then spread evenly over the model, and
//! they need buffers for decoded weights. Alternatively, units stay compact, with one buffer for the largest of them. A
//! plan never has both, because no engine runs both. Experts are packed, or BF16 if they cannot be packed.

pub(crate) mod sizes;
mod solve;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use solve::{Candidate, Frontier, spread};
use unweight_codegen::{kv::packed, plan::GemmShape, spec::Arch};
use unweight_format::{
    EncodingId, Role, TileGrid,
    bundle::{PlanFile, Rule},
};
use unweight_model::{Mixture, ModelConfig};
use unweight_rt::{
    ContextSize,
    raw::choose::{cost, policy::PackedChooser, route::SlotPlan},
};

use crate::{
    error::UnsupportedSize,
    memory::{self, Memory, Shared},
    options::{EngineOptions, KvCache, OptionError, Placement, runs_pipelines},
};

/// A tensor with its size in every encoding that it can be stored in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name of the tensor.
    pub name: String,
    /// The role of the tensor in the model.
    pub role: Role,
    /// The layer of the tensor; `None` for embedding, head and final norm.
    pub layer: Option<u32>,
    /// Output features of a matrix; the number of elements of any other tensor.
    pub rows: u64,
    /// Input features of a matrix; 1 for any other tensor.
    pub cols: u64,
    /// The possible encodings with their bytes; `raw` is always among them.
    pub encodings: Vec<(EncodingId, u64)>,
}

impl Tensor {
    /// Bytes on a device. Those of a compact tensor include the heads of its packed encoding.
    fn resident_bytes(&self, encoding: EncodingId) -> Option<u64> {
        let heads =
            if encoding == EncodingId::COMPACT { self.rows.saturating_mul(self.cols) / HEAD_WEIGHTS } else { 0 };
        Some(self.bytes(encoding)?.saturating_add(heads))
    }

    fn bytes(&self, encoding: EncodingId) -> Option<u64> {
        self.encodings.iter().find(|(candidate, _)| *candidate == encoding).map(|(_, bytes)| *bytes)
    }
}

/// The limits of a plan, at least one of `memory` and `max_slowdown`, and the load that it is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BudgetRequest {
    /// Limit of the device memory for weights, KV cache and working memory, bytes; `None` requests the smallest plan
    /// within `max_slowdown`.
    pub memory: Option<u64>,
    /// Limit of the time of a step's products, as the share by which it may exceed the fastest plan's: 0.1 for 10 %.
    /// `None`: no limit.
    pub max_slowdown: Option<f64>,
    /// Sequences that run at the same time.
    pub batch: u32,
    /// Tokens of each sequence, the prompt included.
    pub context: u32,
    /// The architecture of the GPU.
    pub arch: Arch,
    /// How the KV cache is held; `None` chooses packed if that gives a better plan, else BF16.
    pub kv_cache: Option<KvCache>,
}

impl BudgetRequest {
    /// A request without limits: set `memory`, `max_slowdown` or both.
    pub fn new(batch: u32, context: u32, arch: Arch) -> Self {
        Self { memory: None, max_slowdown: None, batch, context, arch, kv_cache: None }
    }
}

/// The reason why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// An option is out of range.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The kernels do not support a size of the model.
    #[error(transparent)]
    Geometry(#[from] UnsupportedSize),
    /// The context exceeds the limit of the model.
    #[error("a context of {context} tokens exceeds the model's limit of {most}; request a shorter one")]
    Context {
        /// The requested context in tokens.
        context: u32,
        /// The limit of the model in tokens.
        most: u32,
    },
    /// The request has no limit: neither a memory nor a slowdown.
    #[error("no limit is given; set a memory, a maximum slowdown or both")]
    Nothing,
    /// The slowdown is negative or not a finite number.
    #[error("the maximum slowdown {0} is not a number of at least 0; correct it")]
    Slowdown(f64),
    /// A packed KV cache was requested, and heads are too large for it.
    #[error("a packed KV cache supports heads of up to 128 elements, this model has {head_dim}; use a bf16 KV cache")]
    PackedHeads {
        /// The number of elements of a head.
        head_dim: u32,
    },
    /// The model lacks a tensor.
    #[error(
        "{} has no tensor of role {role}; fetch the missing files",
        .layer.map_or_else(|| "the model".to_owned(), |layer| format!("layer {layer}"))
    )]
    Missing {
        /// The layer.
        layer: Option<u32>,
        /// The role.
        role: Role,
    },
    /// No plan fits the given memory.
    #[error(
        "the smallest plan needs {least} bytes (weights {weights}, KV cache {cache}, working memory {working}, slots \
         {slots}), but the limit is {have}; allow more memory, a shorter context or a smaller batch"
    )]
    TooSmall {
        /// Bytes of the given memory.
        have: u64,
        /// Bytes of the smallest plan.
        least: u64,
        /// Bytes of the weights in that plan.
        weights: u64,
        /// Bytes of the KV cache in that plan.
        cache: u64,
        /// Bytes of activations, tables and memory that kernels share in that plan.
        working: u64,
        /// Bytes of the buffers for decoded weights in that plan.
        slots: u64,
    },
    /// Every plan within the given memory is slower than the given limit.
    #[error(
        "the fastest plan within {have} bytes takes {slowdown:.3} times as long as the fastest plan, but the limit \
         is {limit:.3}; allow {least} bytes"
    )]
    TooSlow {
        /// Bytes of the given memory.
        have: u64,
        /// The time of the fastest plan that fits, as a multiple of the fastest plan's.
        slowdown: f64,
        /// The limit of that multiple.
        limit: f64,
        /// Bytes of the smallest plan that is fast enough.
        least: u64,
    },
}

impl BudgetError {
    /// Bytes of the smallest plan that would meet the request, if the error contains them.
    fn min_bytes(&self) -> u64 {
        match self {
            Self::TooSmall { least, .. } | Self::TooSlow { least, .. } => *least,
            _ => u64::MAX,
        }
    }

    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Option(error) => error.code(),
            Self::Geometry(error) => error.code(),
            Self::Context { .. } => "context-above-model-limit",
            Self::Nothing => "no-limit-given",
            Self::PackedHeads { .. } => "heads-not-packed",
            Self::Slowdown(_) => "slowdown-out-of-range",
            Self::Missing { .. } => "model-tensor-missing",
            Self::TooSmall { .. } => "budget-too-small",
            Self::TooSlow { .. } => "slowdown-unreachable",
        }
    }
}

/// The units of one kind that have the same encoding in a plan. A unit is a set of tensors that one product multiplies
/// with.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Group {
    /// The kind in reports: `qkv`, `o`, `gate_up`, `down`, `lm_head` or `embed`.
    pub name: &'static str,
    /// The encoding of the units' tensors.
    pub encoding: EncodingId,
    /// The number of units.
    pub units: u32,
    /// The layers of the units, ascending; empty for `lm_head` and `embed`.
    pub layers: Vec<u32>,
    /// Bytes of all tensors of the units.
    pub bytes: u64,
    /// Estimated time of the units' products in a step, in microseconds.
    pub us: f64,
}

/// A plan that meets a [`BudgetRequest`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BudgetPlan {
    /// The encoding of each tensor, as a plan file of `compress`.
    pub plan: PlanFile,
    /// The plan by kind of unit and encoding.
    pub groups: Vec<Group>,
    /// Bytes of the weights on the device.
    pub weights: u64,
    /// Bytes of the KV cache.
    pub cache: u64,
    /// How the KV cache is held.
    pub kv_cache: KvCache,
    /// The number of tokens that the KV cache holds.
    pub cache_tokens: u64,
    /// Bytes of the KV cache per token.
    pub cache_token_bytes: u64,
    /// Bytes of activations, tables and memory that kernels share, without `slots`.
    pub working: u64,
    /// Bytes of the buffers for decoded or expanded weights.
    pub slots: u64,
    /// Estimated time of all products of a step, in microseconds.
    pub us: f64,
    /// Estimated time of the fastest plan without a memory limit, in microseconds.
    pub fastest_us: f64,
    /// Whether the plan is the optimum for these sizes and estimated times. If false, the search dropped states, and a
    /// slightly better plan may exist.
    pub exact: bool,
}

impl BudgetPlan {
    /// Bytes of weights, KV cache, working memory and slots together.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.working).saturating_add(self.slots)
    }

    /// The estimated time of the products as a multiple of the fastest plan's; 1.0 for the fastest plan.
    pub fn slowdown(&self) -> f64 {
        if self.fastest_us > 0.0 { self.us / self.fastest_us } else { 1.0 }
    }
}

/// The kinds of units, with the roles of their tensors.
const KINDS: [(&str, &[Role]); 6] = [
    ("qkv", &[Role::Q, Role::K, Role::V]),
    ("o", &[Role::O]),
    ("gate_up", &[Role::Gate, Role::Up]),
    ("down", &[Role::Down]),
    ("lm_head", &[Role::LmHead]),
    ("embed", &[Role::Embedding]),
];

/// Weights of the packed encoding per byte of its heads, which are 16 bytes per tile.
const HEAD_WEIGHTS: u64 = 256;

/// The number of buffers of decoded weights: one is read while the next is filled.
const SLOTS: u64 = 2;

/// The tensors of one product.
struct Unit<'a> {
    kind: usize,
    layer: Option<u32>,
    tensors: Vec<&'a Tensor>,
    /// The encodings of `choices`.
    encodings: Vec<EncodingId>,
    choices: Vec<Candidate>,
}

impl<'a> Unit<'a> {
    fn new(
        kind: usize,
        layer: Option<u32>,
        tensors: Vec<&'a Tensor>,
        product_us: impl Fn(&[&Tensor], EncodingId) -> Option<f64>,
    ) -> Self {
        let (mut encodings, mut choices) = (Vec::new(), Vec::new());
        for encoding in [EncodingId::PACKED, EncodingId::RAW, EncodingId::HUFFMAN, EncodingId::COMPACT] {
            // An engine packs raw tensors if it can, so BF16 is a choice only for tensors that cannot be packed.
            if encoding == EncodingId::RAW && encodings.contains(&EncodingId::PACKED) {
                continue;
            }
            // A unit has only the encodings that all of its tensors have.
            let bytes: Option<u64> = tensors.iter().map(|tensor| tensor.resident_bytes(encoding)).sum();
            if let (Some(bytes), Some(us)) = (bytes, product_us(&tensors, encoding)) {
                encodings.push(encoding);
                choices.push(Candidate { bytes, us });
            }
        }
        Self { kind, layer, tensors, encodings, choices }
    }

    /// Bytes of the slot that the unit is expanded into if it stays compact; 0 if it cannot.
    fn expanded_bytes(&self) -> u64 {
        if !self.encodings.contains(&EncodingId::COMPACT) {
            return 0;
        }
        let rows = self.tensors.iter().map(|tensor| tensor.rows).fold(0_u64, u64::saturating_add);
        let cols = self.tensors.first().map_or(0, |tensor| tensor.cols);
        let grid =
            TileGrid::new(usize::try_from(rows).unwrap_or(usize::MAX), usize::try_from(cols).unwrap_or(usize::MAX));
        grid.map_or(u64::MAX, |grid| SlotPlan::of(grid).bytes)
    }
}

fn is_mlp(kind: usize) -> bool {
    KINDS[kind].1.iter().any(|role| role.is_mlp())
}

fn shape(tensor: &Tensor, m: u32) -> GemmShape {
    let extent = |extent: u64| u32::try_from(extent).unwrap_or(u32::MAX);
    GemmShape { m, n: extent(tensor.rows), k: extent(tensor.cols) }
}

/// Estimated time of a unit's product in microseconds; `None` if no product runs from this encoding.
fn product_us(kind: usize, tensors: &[&Tensor], encoding: EncodingId, m: u32, tied: bool) -> Option<f64> {
    // A lookup reads few rows, whatever the encoding.
    let looked_up = KINDS[kind].0 == "embed";
    if looked_up && encoding == EncodingId::COMPACT {
        return None;
    }
    if looked_up && !tied {
        return (encoding != EncodingId::HUFFMAN).then_some(0.0);
    }
    let mut whole = shape(tensors.first()?, m);
    whole.n = tensors.iter().map(|tensor| shape(tensor, m).n).fold(0, u32::saturating_add);
    match encoding {
        EncodingId::PACKED => cost::packed_us(whole),
        EncodingId::COMPACT => cost::compact_us(whole),
        // The host decodes other Huffman-coded tensors, which are then held as BF16.
        EncodingId::HUFFMAN if is_mlp(kind) && tensors.iter().all(|tensor| has_whole_tiles(tensor)) => {
            Some(tensors.iter().map(|tensor| cost::huffman_us(shape(tensor, m)).0).sum())
        }
        EncodingId::HUFFMAN => None,
        _ => Some(cost::cublas_us(whole)),
    }
}

/// Estimated time of a mixture's products in microseconds; `None` unless the experts are packed or BF16.
fn experts_us(mixture: Mixture, tensors: &[&Tensor], encoding: EncodingId, m: u32) -> Option<f64> {
    let rows =
        tensors.iter().map(|tensor| tensor.rows).fold(0, u64::saturating_add) / u64::from(mixture.all_experts().max(1));
    let one = GemmShape { n: u32::try_from(rows).unwrap_or(u32::MAX), ..shape(tensors.first()?, m) };
    let bf16 = match encoding {
        EncodingId::PACKED => false,
        EncodingId::RAW => true,
        _ => return None,
    };
    Some(cost::experts_us(one, (mixture.all_experts(), mixture.places()), bf16))
}

/// Whether the MLP of a layer is a mixture of experts.
fn has_experts(config: &ModelConfig, layer: Option<u32>) -> bool {
    config.mixture.zip(layer).is_some_and(|(mixture, layer)| mixture.has_experts(layer))
}

/// Whether a device keeps the tensor Huffman-coded, as `pipelines::loads_as` decides.
fn has_whole_tiles(tensor: &Tensor) -> bool {
    tensor.rows.is_multiple_of(64) && tensor.cols.is_multiple_of(64)
}

/// Bytes of a decoded tensor in a slot: those of BF16, which prompts need, whatever steps decode it to.
fn slot_bytes(tensor: &Tensor) -> u64 {
    tensor.rows.saturating_mul(tensor.cols).saturating_mul(2)
}

/// Returns the units of a model, and the bytes of the tensors outside of units.
fn units<'a>(config: &ModelConfig, tensors: &'a [Tensor], batch: u32) -> Result<(Vec<Unit<'a>>, u64), BudgetError> {
    let mut by_role: BTreeMap<(Option<u32>, Role), Vec<&Tensor>> = BTreeMap::new();
    let mut rest = 0_u64;
    // Layers that predict further tokens are not loaded.
    let is_loaded = |tensor: &&Tensor| tensor.layer.is_none_or(|layer| layer < config.layers) || config.mtp_layers == 0;
    for tensor in tensors.iter().filter(is_loaded) {
        // Stacked experts have gate and up in one tensor.
        let role = if config.mixture.is_some() && tensor.role == Role::GateUp { Role::Gate } else { tensor.role };
        let has_unit = KINDS.iter().any(|(_, roles)| roles.contains(&role)) && tensor.cols > 1;
        if has_unit {
            by_role.entry((tensor.layer, role)).or_default().push(tensor);
        } else {
            rest = rest.saturating_add(tensor.bytes(EncodingId::RAW).unwrap_or(0));
        }
    }
    // A tied model may store its single table under either name.
    let (embedding, head) = ((None, Role::Embedding), (None, Role::LmHead));
    if config.tied
        && !by_role.contains_key(&embedding)
        && let Some(table) = by_role.remove(&head)
    {
        by_role.insert(embedding, table);
    }
    let tied = config.tied && !by_role.contains_key(&head);
    let mut units = Vec::new();
    for layer in (0..config.layers).map(Some).chain([None]) {
        for (kind, (name, roles)) in KINDS.into_iter().enumerate() {
            let whole = matches!(name, "lm_head" | "embed");
            if whole != layer.is_none() {
                continue;
            }
            // A tied model also multiplies with its embedding.
            if name == "lm_head" && tied {
                continue;
            }
            let mut unit_tensors = Vec::new();
            for role in roles {
                let found = by_role.remove(&(layer, *role));
                let stacked = |first: &&Tensor| first.role == Role::GateUp;
                if found.is_none() && unit_tensors.first().is_some_and(stacked) {
                    continue;
                }
                unit_tensors.extend(found.ok_or(BudgetError::Missing { layer, role: *role })?);
            }
            let experts = config.mixture.filter(|_| is_mlp(kind));
            let unit = Unit::new(kind, layer, unit_tensors, |tensors, encoding| match experts {
                Some(mixture) if has_experts(config, layer) => experts_us(mixture, tensors, encoding, batch),
                // A mixture has no stored MLPs.
                Some(_) if encoding == EncodingId::HUFFMAN => None,
                _ => product_us(kind, tensors, encoding, batch, tied),
            });
            units.push(unit);
        }
    }
    // Tensors that have a role, but no place in this model.
    let unused = by_role.values().flatten().filter_map(|tensor| tensor.bytes(EncodingId::RAW));
    Ok((units, unused.fold(rest, u64::saturating_add)))
}

/// Computes the memory that an engine's kernels share, which depends on the weights that stay coded.
struct Contexts<'a> {
    config: &'a ModelConfig,
    options: &'a EngineOptions,
    /// The execution context with all weights packed, and with all compact.
    packed: ContextSize,
    compact: ContextSize,
}

impl<'a> Contexts<'a> {
    fn new(config: &'a ModelConfig, options: &'a EngineOptions, arch: Arch, units: &[Unit<'_>]) -> Self {
        let chooser = PackedChooser::usual(arch);
        let of = |placement| {
            let options = options.clone().placement(placement);
            memory::context_size(config, &options, &chooser, |_| placement == Placement::Compact)
        };
        // cuBLAS multiplies weights that cannot be packed, except experts. An untied embedding is only looked up.
        let multiplied = |unit: &&Unit<'_>| match KINDS[unit.kind].0 {
            "embed" => config.tied,
            _ => !is_mlp(unit.kind) || !has_experts(config, unit.layer),
        };
        let whole = units.iter().filter(multiplied).any(|unit| !unit.encodings.contains(&EncodingId::PACKED));
        let with = |ctx: ContextSize| if whole { ctx.with_cublas() } else { ctx };
        Self { config, options, packed: with(of(Placement::Packed)), compact: with(of(Placement::Compact)) }
    }

    /// Any weight may be packed. With a `slot`, the weights that fit in it may be compact.
    fn shared(&self, coded: bool, slot: u64) -> Shared {
        let mut ctx = self.packed;
        if slot > 0 {
            ctx = ctx.max(self.compact);
            ctx.slot_bytes = self.packed.slot_bytes.max(slot);
        }
        let placement = if coded { Placement::Stored } else { Placement::Packed };
        Shared::planned(self.config, &self.options.clone().placement(placement), ctx)
    }
}

/// A knapsack problem: a set of units that may be Huffman-coded, with the slots that they need.
struct Case<'a> {
    slots: u64,
    /// Bytes that kernels share, without the slots.
    shared: u64,
    /// Per unit, the indices of its allowed choices.
    allowed: Vec<Vec<usize>>,
    choices: Vec<Vec<Candidate>>,
    units: &'a [Unit<'a>],
}

impl<'a> Case<'a> {
    /// `slot` is the size in bytes of the slot that compact units are expanded into; 0 if no unit is compact.
    fn new(units: &'a [Unit<'a>], coded_kinds: &[usize], slot: u64, contexts: &Contexts<'_>) -> Self {
        let is_allowed = |unit: &Unit<'_>, encoding: EncodingId| match encoding {
            EncodingId::HUFFMAN => coded_kinds.contains(&unit.kind),
            EncodingId::COMPACT => unit.expanded_bytes() <= slot,
            _ => true,
        };
        let allowed: Vec<Vec<usize>> = units
            .iter()
            .map(|unit| (0..unit.encodings.len()).filter(|at| is_allowed(unit, unit.encodings[*at])).collect())
            .collect();
        let choices = units.iter().zip(&allowed);
        let choices = choices.map(|(unit, allowed)| allowed.iter().map(|at| unit.choices[*at]).collect()).collect();
        // A slot has room for the largest tensor of each projection.
        let mut largest: BTreeMap<Role, u64> = BTreeMap::new();
        for unit in units
            .iter()
            .filter(|unit| coded_kinds.contains(&unit.kind) && unit.encodings.contains(&EncodingId::HUFFMAN))
        {
            for tensor in &unit.tensors {
                let bytes = largest.entry(tensor.role).or_default();
                *bytes = (*bytes).max(slot_bytes(tensor));
            }
        }
        let slots = largest.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes)).saturating_mul(SLOTS);
        let Shared { bytes, expansion_bytes } = contexts.shared(!coded_kinds.is_empty(), slot);
        let (slots, shared) = (slots.saturating_add(expansion_bytes), bytes.saturating_sub(expansion_bytes));
        Self { slots, shared, allowed, choices, units }
    }

    /// Bytes in addition to the weights of the units.
    fn bytes(&self) -> u64 {
        self.slots.saturating_add(self.shared)
    }

    /// Returns the encodings of a solution. Hard units are spread evenly over the layers if that takes at most
    /// `weights` bytes.
    fn encodings(&self, solution: &[usize], weights: u64) -> Vec<usize> {
        let chosen: Vec<usize> = self.allowed.iter().zip(solution).map(|(allowed, at)| allowed[*at]).collect();
        let mut even = chosen.clone();
        for kind in 0..KINDS.len() {
            let of_kind: Vec<usize> = (0..self.units.len()).filter(|unit| self.units[*unit].kind == kind).collect();
            let is_coded = |unit: &usize| self.units[*unit].encodings[chosen[*unit]] == EncodingId::HUFFMAN;
            let coded_count = of_kind.iter().filter(|unit| is_coded(unit)).count();
            // Only units with the same encodings may be exchanged.
            let first = of_kind.first().map(|unit| &self.units[*unit].encodings);
            if coded_count == 0 || of_kind.iter().any(|unit| Some(&self.units[*unit].encodings) != first) {
                continue;
            }
            let code = of_kind.iter().find(|unit| is_coded(unit)).map(|unit| chosen[*unit]);
            let mut others = of_kind.iter().filter(|unit| !is_coded(unit)).map(|unit| chosen[*unit]);
            for (unit, coded) in of_kind.iter().zip(spread(of_kind.len(), coded_count)) {
                even[*unit] = if coded { code } else { others.next() }.unwrap_or(chosen[*unit]);
            }
        }
        let bytes = |encodings: &[usize]| {
            self.units.iter().zip(encodings).fold(0_u64, |sum, (unit, at)| sum.saturating_add(unit.choices[*at].bytes))
        };
        if bytes(&even) <= weights { even } else { chosen }
    }
}

/// Chooses an encoding per tensor: the fastest plan within `wanted.memory`, or without it the smallest plan within
/// `wanted.max_slowdown`. `tensors` are all tensors of the model.
///
/// # Errors
/// [`BudgetError`]; if no plan meets the request, it holds the memory of the smallest plan that would.
pub fn fit(config: &ModelConfig, tensors: &[Tensor], wanted: &BudgetRequest) -> Result<BudgetPlan, BudgetError> {
    let BudgetRequest { memory, max_slowdown, batch, context, arch, .. } = *wanted;
    let options = EngineOptions::default().max_batch(batch).context(context);
    options.check()?;
    sizes::check(config)?;
    if context > config.max_positions {
        return Err(BudgetError::Context { context, most: config.max_positions });
    }
    if memory.is_none() && max_slowdown.is_none() {
        return Err(BudgetError::Nothing);
    }
    if wanted.kv_cache == Some(KvCache::Packed) && !packed::takes(config.head_dim) {
        return Err(BudgetError::PackedHeads { head_dim: config.head_dim });
    }
    if let Some(slowdown) = max_slowdown.filter(|slowdown| !(slowdown.is_finite() && *slowdown >= 0.0)) {
        return Err(BudgetError::Slowdown(slowdown));
    }
    let (units, rest) = units(config, tensors, batch)?;
    let contexts = Contexts::new(config, &options, arch, &units);
    let kinds: Vec<usize> = (0..KINDS.len()).filter(|kind| is_mlp(*kind) && runs_pipelines(config)).collect();
    let coded_cases = (0..1 << kinds.len()).map(|set: usize| {
        let coded_kinds: Vec<usize> = (0..kinds.len()).filter(|at| set >> at & 1 == 1).map(|at| kinds[at]).collect();
        Case::new(&units, &coded_kinds, 0, &contexts)
    });
    // The larger the slot, the more units may stay compact.
    let slots: BTreeSet<u64> = units.iter().map(Unit::expanded_bytes).filter(|bytes| *bytes > 0).collect();
    let compact_cases = slots.into_iter().map(|slot| Case::new(&units, &[], slot, &contexts));
    let cases: Vec<Case<'_>> = coded_cases.chain(compact_cases).collect();
    let frontiers: Vec<Frontier<'_>> = cases.iter().map(|case| Frontier::new(&case.choices)).collect();
    let solved = Solved { rest, cases: &cases, frontiers: &frontiers, units: &units };
    let plans = kv_caches(config, wanted).into_iter().map(|kv_cache| {
        // What the engine reserves in addition to weights, given unlimited memory.
        let with_cache = options.clone().kv_cache(kv_cache);
        let reserved = memory::plan(config, &with_cache, (0, Shared::default()), u64::MAX).ok();
        solved.plan(reserved.as_ref(), kv_cache, (memory, max_slowdown))
    });
    let best = plans.reduce(|best, plan| if is_better(&plan, &best, memory) { plan } else { best });
    best.unwrap_or(Err(BudgetError::Nothing))
}

/// The KV caches to compare. BF16 comes first, because it is preferred if both are equally good.
fn kv_caches(config: &ModelConfig, request: &BudgetRequest) -> Vec<KvCache> {
    match request.kv_cache {
        Some(kv_cache) => vec![kv_cache],
        None if packed::takes(config.head_dim) => vec![KvCache::Bf16, KvCache::Packed],
        None => vec![KvCache::Bf16],
    }
}

/// Whether a plan is faster than another, or smaller if no memory is given. Of two failures, the better one needs less.
fn is_better(
    plan: &Result<BudgetPlan, BudgetError>,
    than: &Result<BudgetPlan, BudgetError>,
    memory: Option<u64>,
) -> bool {
    match (plan, than) {
        (Ok(plan), Ok(than)) if memory.is_some() => plan.us < than.us,
        (Ok(plan), Ok(than)) => plan.total() < than.total(),
        (Ok(_), Err(_)) => true,
        (Err(_), Ok(_)) => false,
        (Err(plan), Err(than)) => plan.min_bytes() < than.min_bytes(),
    }
}

/// The frontiers of all cases, which do not depend on the KV cache.
struct Solved<'a> {
    rest: u64,
    cases: &'a [Case<'a>],
    frontiers: &'a [Frontier<'a>],
    units: &'a [Unit<'a>],
}

impl Solved<'_> {
    /// Returns the plan next to a KV cache and the working memory of `reserved`; `None`: even these do not fit.
    fn plan(
        &self,
        reserved: Option<&Memory>,
        kv_cache: KvCache,
        (memory, max_slowdown): (Option<u64>, Option<f64>),
    ) -> Result<BudgetPlan, BudgetError> {
        let Self { rest, cases, frontiers, units } = *self;
        let (cache, working) = reserved.map_or((u64::MAX, u64::MAX), |reserved| (reserved.cache, reserved.working));
        let fixed = rest.saturating_add(cache).saturating_add(working);
        let exact = frontiers.iter().all(Frontier::is_exact);
        // Of equal plans the first is taken: its case comes first and has the fewest bytes in addition to the weights.
        let fastest_within = |have: u64| {
            let solution = cases.iter().zip(frontiers).filter_map(|(case, frontier)| {
                let available = have.checked_sub(fixed)?.checked_sub(case.bytes())?;
                Some((case, frontier.fastest(available)?))
            });
            solution.min_by(|a, b| a.1.us.total_cmp(&b.1.us))
        };
        let fastest_us = frontiers.iter().filter_map(|frontier| Some(frontier.fastest(u64::MAX)?.us));
        let fastest_us = fastest_us.fold(f64::INFINITY, f64::min);
        let limit_us = max_slowdown.map_or(f64::INFINITY, |slowdown| fastest_us * (1.0 + slowdown) * (1.0 + 1e-9));
        // The smallest plan that is fast enough; at least the fastest plan is.
        let smallest =
            cases.iter().zip(frontiers).filter_map(|(case, frontier)| Some((case, frontier.smallest(limit_us)?)));
        let smallest = smallest.min_by_key(|(case, solution)| solution.bytes.saturating_add(case.bytes()));
        let (smallest_case, smallest) = smallest.ok_or(BudgetError::Nothing)?;
        let least = fixed.saturating_add(smallest_case.bytes()).saturating_add(smallest.bytes);
        let (case, solution) = match memory {
            None => (smallest_case, smallest),
            Some(have) => match fastest_within(have) {
                Some((case, solution)) if solution.us <= limit_us => (case, solution),
                Some((_, solution)) => {
                    let (slowdown, limit) = (solution.us / fastest_us, 1.0 + max_slowdown.unwrap_or(0.0));
                    return Err(BudgetError::TooSlow { have, slowdown, limit, least });
                }
                None => {
                    let (slots, weights) = (smallest_case.slots, smallest.bytes.saturating_add(rest));
                    let working = working.saturating_add(smallest_case.shared);
                    return Err(BudgetError::TooSmall { have, least, weights, cache, working, slots });
                }
            },
        };
        let available = memory.map_or(solution.bytes, |have| have.saturating_sub(fixed).saturating_sub(case.bytes()));
        let encodings = case.encodings(&solution.choices, available.max(solution.bytes));
        let (cache_tokens, cache_token_bytes) = reserved.map_or((0, 0), |reserved| (reserved.tokens(), reserved.token));
        let Assigned { rules, groups, bytes, us } = Assigned::of(units, &encodings);
        Ok(BudgetPlan {
            plan: PlanFile { rules },
            groups,
            weights: rest + bytes,
            cache,
            kv_cache,
            cache_tokens,
            cache_token_bytes,
            working: working.saturating_add(case.shared),
            slots: case.slots,
            us,
            fastest_us,
            exact,
        })
    }
}

/// The result of a solution: rules and groups, and the bytes and the time of all units.
struct Assigned {
    rules: Vec<Rule>,
    groups: Vec<Group>,
    bytes: u64,
    us: f64,
}

impl Assigned {
    fn of(units: &[Unit<'_>], encodings: &[usize]) -> Self {
        let mut groups: BTreeMap<(usize, EncodingId), Group> = BTreeMap::new();
        let mut rules = vec![Rule { pattern: "*".to_owned(), encoding: EncodingId::RAW }];
        let (mut bytes, mut us) = (0, 0.0);
        for (unit, at) in units.iter().zip(encodings) {
            let (encoding, choice) = (unit.encodings[*at], unit.choices[*at]);
            let group = groups.entry((unit.kind, encoding)).or_insert_with(|| Group {
                name: KINDS[unit.kind].0,
                encoding,
                units: 0,
                layers: Vec::new(),
                bytes: 0,
                us: 0.0,
            });
            group.units += 1;
            group.layers.extend(unit.layer);
            group.bytes += choice.bytes;
            group.us += choice.us;
            bytes += choice.bytes;
            us += choice.us;
            if encoding != EncodingId::RAW {
                rules.extend(unit.tensors.iter().map(|tensor| Rule { pattern: tensor.name.clone(), encoding }));
            }
        }
        Self { rules, groups: groups.into_values().collect(), bytes, us }
    }
}
