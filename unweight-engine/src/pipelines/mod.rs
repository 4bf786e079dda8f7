//! The report's runtime: MLPs whose weights stay on the device as they are stored, multiplied by the report's five
//! pipelines (section 5) or from packed weights, decoded in the same step on other streams. Takes a `&mut Forward` and
//! never an engine.
//!
//! ```text
//! encoding, shape --loads_as--> weights on the device --variants--> variants at a batch, best guess first
//!     --Setting--> one variant a projection --step_graph--> streams, events, slots --runner--> launches
//! ```
//! | stored | on the device | pipelines |
//! |---|---|---|
//! | raw | BF16 | cuBLAS |
//! | palette | palette indices | reconstructive matmul |
//! | huffman | as stored; easy: palette indices | decode whole for cuBLAS, or exponents or indices for the matmul |
//! | packed | packed | packed matmul |
//! | another | packed, or BF16 where it cannot be packed | packed, or cuBLAS |
//!
//! A weight with a side that is not a multiple of 64 is loaded as BF16, because no kernel reads it.
//!
//! | module | contents |
//! |---|---|
//! | [`step_graph`] | a step as data: streams, events, slots; its check; pure |
//! | [`tune`] | coordinate descent over settings, with a journal; names no device |
//! | [`space`] | settings as points of a search |
//! | [`tuned`] | the text of measured settings |
//! | `weights` | MLPs to the device as they are stored |
//! | `runner` | launches the steps of a graph |

pub(crate) mod runner;
pub mod space;
pub mod step_graph;
#[cfg(test)]
mod tests;
pub mod tune;
pub mod tuned;
pub(crate) mod weights;

use unweight_codegen::{
    VariantSpec,
    plan::GemmShape,
    spec::{Arch, DecodeOutput, Epilogue, Op},
};
use unweight_format::EncodingId;
use unweight_rt::raw::choose::{
    cost,
    recon::{self, Source},
};

pub(crate) use self::runner::{BoundGraph, Pipelines, Work};
pub use self::{runner::GraphError, space::SettingSpace, tuned::PlanError};
use crate::options::{LoadedAs, Pipeline, PipelineVariant, Projection, Ring, Setting};

/// The ring of a variant of the reconstructive matmul.
fn ring_of(spec: &VariantSpec) -> Option<Ring> {
    match spec.op {
        Op::GemmRecon(op) => Some(Ring { tiles: op.n_tiles.get(), stages: op.stages.get(), splits: op.splits.get() }),
        _ => None,
    }
}

/// How a stored projection `[n, k]` is held on the device; `easy`: Huffman codes become palette indices.
pub fn loads_as(encoding: EncodingId, [n, k]: [u32; 2], easy: bool, arch: Arch) -> LoadedAs {
    let problem = GemmShape { m: 1, n, k };
    let takes = |source| !recon::candidates(arch, source, problem, 1, Epilogue::Store).is_empty();
    let palettes = || takes(Source::Palette { max_verbatim_rows: 64 });
    match encoding {
        EncodingId::RAW => LoadedAs::Bf16,
        EncodingId::PALETTE if palettes() => LoadedAs::Palette,
        EncodingId::HUFFMAN if easy && palettes() => LoadedAs::Palette,
        // Decoders take whole tiles; what else there is, the host decodes.
        EncodingId::HUFFMAN if n.is_multiple_of(64) && k.is_multiple_of(64) => LoadedAs::Huffman,
        EncodingId::PALETTE | EncodingId::HUFFMAN => LoadedAs::Bf16,
        _ => LoadedAs::Linear,
    }
}

/// A projection on the device, as far as the choice of its variant cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadedProjection {
    /// How it is held.
    pub loaded_as: LoadedAs,
    /// Whether it is a packed linear layer of the loader, or half of a gate and an up that are one product.
    pub packed: bool,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Most verbatim rows of a tile, over all layers.
    pub verbatim_rows: u32,
}

impl LoadedProjection {
    /// Whether it has to be decoded before it is multiplied with.
    pub fn is_hard(&self) -> bool {
        self.loaded_as == LoadedAs::Huffman
    }

    /// The variant of the reconstructive matmul that a variant asks for; `None` if it is not of the variants of this
    /// weight.
    pub fn kernel(&self, arch: Arch, variant: PipelineVariant, epilogue: Epilogue) -> Option<VariantSpec> {
        let source = match (variant.pipeline, self.loaded_as) {
            (Pipeline::Palette, LoadedAs::Palette) | (Pipeline::Transcode, LoadedAs::Huffman) => {
                Source::Palette { max_verbatim_rows: self.verbatim_rows }
            }
            (Pipeline::Exponents, LoadedAs::Huffman) => Source::Exponent,
            _ => return None,
        };
        let problem = GemmShape { m: 1, n: self.n, k: self.k };
        // Whatever the batch and the multiprocessors: they order them.
        let candidates = recon::candidates(arch, source, problem, 1, epilogue);
        candidates.into_iter().find(|spec| ring_of(spec) == variant.ring)
    }

    /// Every variant, best guess first: the records' order for Huffman-coded weights (docs/benchmarks.md), the rings'
    /// own within a pipeline. `sms`: the multiprocessors of a product.
    pub fn variants(&self, arch: Arch, m: u32, sms: u32) -> Vec<PipelineVariant> {
        let problem = GemmShape { m, n: self.n, k: self.k };
        let rings = |pipeline, source| {
            let candidates = recon::candidates(arch, source, problem, sms, Epilogue::Store);
            candidates
                .iter()
                .filter_map(ring_of)
                .map(|ring| PipelineVariant { pipeline, ring: Some(ring) })
                .collect::<Vec<_>>()
        };
        let palette = Source::Palette { max_verbatim_rows: self.verbatim_rows };
        match self.loaded_as {
            LoadedAs::Bf16 => vec![PipelineVariant::plain(Pipeline::Raw)],
            LoadedAs::Linear if self.packed => vec![PipelineVariant::plain(Pipeline::Packed)],
            LoadedAs::Linear => vec![PipelineVariant::plain(Pipeline::Raw)],
            LoadedAs::Palette => rings(Pipeline::Palette, palette),
            LoadedAs::Huffman => {
                let full = vec![PipelineVariant::plain(Pipeline::FullDecode)];
                let (exponents, transcode) =
                    (rings(Pipeline::Exponents, Source::Exponent), rings(Pipeline::Transcode, palette));
                match cost::huffman_us(problem).1 {
                    DecodeOutput::Full => [full, exponents, transcode].concat(),
                    _ if m <= TRANSCODE_BATCH => [transcode, exponents, full].concat(),
                    _ => [exponents, transcode, full].concat(),
                }
            }
        }
    }
}

/// Up to this batch the time of palette indices that are transcoded first was below that of exponents, where
/// exponents were ahead of whole weights (docs/benchmarks.md).
const TRANSCODE_BATCH: u32 = 16;

/// The projections of a layer, gate, up and down.
pub type LoadedMlp = [LoadedProjection; 3];

/// Whether one of them has to be decoded.
pub fn is_hard(mlp: &LoadedMlp) -> bool {
    mlp.iter().any(LoadedProjection::is_hard)
}

impl Setting {
    /// The best guess without a measurement, for the layers of each kind ([`choices`]).
    pub fn guess(layers: &[LoadedMlp], arch: Arch, m: u32, sms: u32) -> Self {
        let [hard, easy] = choices(layers, arch, m, sms);
        let first = |variants: [Vec<PipelineVariant>; 3]| {
            variants.map(|variants| variants.first().copied().unwrap_or(PipelineVariant::plain(Pipeline::Raw)))
        };
        Self { hard: first(hard), easy: first(easy), decode_sms: decode_sms(sms), consumers: 2 }
    }

    /// The variant of every projection of every layer: what is set where the weight can be multiplied so, else the best
    /// guess.
    pub fn variants(&self, layers: &[LoadedMlp], arch: Arch, m: u32, sms: u32) -> Vec<[PipelineVariant; 3]> {
        let sms = product_sms(layers, sms, self.decode_sms);
        let of = |mlp: &LoadedMlp| {
            let set = if is_hard(mlp) { &self.hard } else { &self.easy };
            Projection::ALL.map(|projection| {
                let (loaded, variant) = (&mlp[projection as usize], set[projection as usize]);
                let variants = loaded.variants(arch, m, sms);
                if variants.contains(&variant) {
                    variant
                } else {
                    variants.first().copied().unwrap_or(PipelineVariant::plain(Pipeline::Raw))
                }
            })
        };
        layers.iter().map(of).collect()
    }

    /// What step graphs are built for.
    pub fn layout(&self, sms: u32) -> step_graph::Layout {
        let Self { decode_sms, consumers, .. } = *self;
        step_graph::Layout { consumers, decode_sms, sms, ..step_graph::Layout::default() }
    }
}

/// The variants of the projections, gate, up and down, best guesses first: of hard layers, then of easy ones. Nothing
/// where there are no such layers.
pub type Choices = [[Vec<PipelineVariant>; 3]; 2];

/// What can be chosen for these layers at a batch, on a device of `sms` multiprocessors. Of the layers of a kind each
/// projection's is that of the first with the most variants: where the first layer is raw, those behind it count.
pub fn choices(layers: &[LoadedMlp], arch: Arch, m: u32, sms: u32) -> Choices {
    let sms = product_sms(layers, sms, decode_sms(sms));
    [true, false].map(|hard| {
        Projection::ALL.map(|projection| {
            let own = layers.iter().filter(|mlp| is_hard(mlp) == hard);
            let mut most: Vec<PipelineVariant> = Vec::new();
            for loaded in own.map(|mlp| &mlp[projection as usize]) {
                let variants = loaded.variants(arch, m, sms);
                if variants.len() > most.len() {
                    most = variants;
                }
            }
            most
        })
    })
}

/// Multiprocessors that decode where nobody has measured: a sixth, as the report's.
fn decode_sms(sms: u32) -> u32 {
    (sms / 6).max(Projection::ALL.len() as u32).min(sms.saturating_sub(1)).max(1)
}

/// Multiprocessors of a product: what those that decode leave, if any do.
fn product_sms(layers: &[LoadedMlp], sms: u32, decode_sms: u32) -> u32 {
    if layers.iter().any(is_hard) { sms.saturating_sub(decode_sms).max(1) } else { sms }
}

/// The variants of the reconstructive matmul that variants of these layers can ask for, each once.
pub fn reachable(layers: &[LoadedMlp], arch: Arch) -> Vec<VariantSpec> {
    let mut all = Vec::new();
    for mlp in layers {
        for (projection, loaded) in Projection::ALL.into_iter().zip(mlp) {
            let epilogue = epilogue(projection);
            let specs =
                loaded.variants(arch, 1, 1).into_iter().filter_map(|variant| loaded.kernel(arch, variant, epilogue));
            all.extend(specs);
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// Down is added to the residual.
pub(crate) fn epilogue(projection: Projection) -> Epilogue {
    if projection == Projection::Down { Epilogue::StoreAdd } else { Epilogue::Store }
}
