//! The report's runtime for MLPs whose weights stay in their stored encodings on the device. The report's five
//! pipelines (section 5) or packed weights multiply; decoders run in the same step on other streams. The code takes a
//! `&mut Forward` and never an engine.
//!
//! ```text
//! encoding, shape --loads_as--> weights on the device --variants--> variants at a batch, best guess first
//!     --Setting--> one variant a projection --step_graph--> streams, events, slots --runner--> launches
//! ```
//! | stored | on the device | pipelines |
//! |---|---|---|
//! | raw | BF16 | cuBLAS |
//! | palette | palette indices | reconstructive matmul |
//! | huffman | Huffman codes; easy: palette indices | full decode for cuBLAS, or exponents or indices for the matmul |
//! | packed | packed | packed matmul |
//! | another | packed, or BF16 if it cannot be packed | packed, or cuBLAS |
//!
//! A weight with a side that is not a multiple of 64 is loaded as BF16, because no kernel reads it. A layer is
//! called hard if weights of a projection are decoded before their product (Huffman codes), and easy otherwise. Only
//! steps with hard layers run decoders.
//!
//! | module | contents |
//! |---|---|
//! | [`step_graph`] | a step as data: streams, events, slots; its check; pure |
//! | [`tune`] | coordinate descent over settings, with a journal; names no device |
//! | [`space`] | settings as points of a search |
//! | [`tuned`] | the text form of measured settings |
//! | `weights` | loads MLPs in their stored encodings |
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
        Op::GemmRecon(op) => {
            Some(Ring::Recon { tiles: op.n_tiles.get(), stages: op.stages.get(), splits: op.splits.get() })
        }
        Op::GemmJoin(op) => Some(Ring::Join {
            batch_tile: op.batch_tile.get(),
            row_blocks: op.row_blocks.get(),
            warps: op.warps.get(),
            stages: op.stages.get(),
            cluster: op.cluster.get(),
        }),
        _ => None,
    }
}

/// Returns whether a variant is worth measuring at this batch: a block of `gemm_join` reads all weights again for each
/// batch tile.
fn suits(ring: &Ring, m: u32) -> bool {
    match ring {
        Ring::Recon { .. } => true,
        Ring::Join { batch_tile, .. } => m <= *batch_tile,
    }
}

/// Returns how a stored projection `[n, k]` is held on the device; with `easy`, Huffman codes become palette indices.
pub fn loads_as(encoding: EncodingId, [n, k]: [u32; 2], easy: bool, arch: Arch) -> LoadedAs {
    let problem = GemmShape { m: 1, n, k };
    let has_matmul = |source| !recon::candidates(arch, source, problem, 1, Epilogue::Store).is_empty();
    let reads_palettes = || has_matmul(Source::Palette { max_verbatim_rows: 64 });
    match encoding {
        EncodingId::RAW => LoadedAs::Bf16,
        EncodingId::PALETTE if reads_palettes() => LoadedAs::Palette,
        EncodingId::HUFFMAN if easy && reads_palettes() => LoadedAs::Palette,
        // Decoders need whole tiles; the host decodes all other weights.
        EncodingId::HUFFMAN if n.is_multiple_of(64) && k.is_multiple_of(64) => LoadedAs::Huffman,
        EncodingId::PALETTE | EncodingId::HUFFMAN => LoadedAs::Bf16,
        _ => LoadedAs::Linear,
    }
}

/// The properties of a projection on the device that the choice of its variant depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadedProjection {
    /// How the projection is held.
    pub loaded_as: LoadedAs,
    /// Whether the projection is a packed linear layer of the loader, or half of a gate and an up that are one product.
    pub packed: bool,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// The maximum number of verbatim rows of a tile, over all layers.
    pub verbatim_rows: u32,
}

impl LoadedProjection {
    /// Whether the projection must be decoded before its product.
    pub fn is_hard(&self) -> bool {
        self.loaded_as == LoadedAs::Huffman
    }

    /// Returns the variant of the reconstructive matmul for `variant`; `None` if this weight does not have that
    /// variant.
    pub fn kernel(&self, arch: Arch, variant: PipelineVariant, epilogue: Epilogue) -> Option<VariantSpec> {
        let source = match (variant.pipeline, self.loaded_as) {
            (Pipeline::Palette, LoadedAs::Palette) | (Pipeline::Transcode, LoadedAs::Huffman) => {
                Source::Palette { max_verbatim_rows: self.verbatim_rows }
            }
            (Pipeline::Exponents, LoadedAs::Huffman) => Source::Exponent,
            _ => return None,
        };
        let problem = GemmShape { m: 1, n: self.n, k: self.k };
        // Batch and multiprocessors affect only the order of the candidates.
        let candidates = recon::candidates(arch, source, problem, 1, epilogue);
        candidates.into_iter().find(|spec| ring_of(spec) == variant.ring)
    }

    /// Returns every variant, best guess first: pipelines of Huffman-coded weights in the order of docs/benchmarks.md,
    /// and within a pipeline its rings in their own order. `sms` is the number of multiprocessors of a product.
    pub fn variants(&self, arch: Arch, m: u32, sms: u32) -> Vec<PipelineVariant> {
        let problem = GemmShape { m, n: self.n, k: self.k };
        let rings = |pipeline, source| {
            let candidates = recon::candidates(arch, source, problem, sms, Epilogue::Store);
            candidates
                .iter()
                .filter_map(ring_of)
                .filter(|ring| suits(ring, m))
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

/// Up to this batch, transcoding to palette indices was faster than decoding to exponents in those cases in which
/// exponents were faster than whole weights (docs/benchmarks.md).
const TRANSCODE_BATCH: u32 = 16;

/// The gate, up and down projections of a layer.
pub type LoadedMlp = [LoadedProjection; 3];

/// Whether any projection of a layer must be decoded.
pub fn is_hard(mlp: &LoadedMlp) -> bool {
    mlp.iter().any(LoadedProjection::is_hard)
}

impl Setting {
    /// Returns the best guess without a measurement, for the layers of each kind ([`choices`]).
    pub fn guess(layers: &[LoadedMlp], arch: Arch, m: u32, sms: u32) -> Self {
        let [hard, easy] = choices(layers, arch, m, sms);
        let first = |variants: [Vec<PipelineVariant>; 3]| {
            variants.map(|variants| variants.first().copied().unwrap_or(PipelineVariant::plain(Pipeline::Raw)))
        };
        Self { hard: first(hard), easy: first(easy), decode_sms: decode_sms(sms), consumers: 2 }
    }

    /// Returns the variant of every projection of every layer: the one of this setting if the weight has it, else the
    /// best guess.
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

    /// Returns the layout of the setting's step graphs.
    pub fn layout(&self, sms: u32) -> step_graph::Layout {
        let Self { decode_sms, consumers, .. } = *self;
        step_graph::Layout { consumers, decode_sms, sms, ..step_graph::Layout::default() }
    }
}

/// The variants of gate, up and down, best guess first: of hard layers, then of easy ones. Empty if there are no such
/// layers.
pub type Choices = [[Vec<PipelineVariant>; 3]; 2];

/// Returns the choices for these layers at a batch, on a device of `sms` multiprocessors. For each kind of layer, the
/// choices of a projection are those of the first layer with the most variants; if the first layer is raw, later ones
/// count.
pub fn choices(layers: &[LoadedMlp], arch: Arch, m: u32, sms: u32) -> Choices {
    let sms = product_sms(layers, sms, decode_sms(sms));
    [true, false].map(|hard| {
        Projection::ALL.map(|projection| {
            let layers_of_kind = layers.iter().filter(|mlp| is_hard(mlp) == hard);
            let mut longest: Vec<PipelineVariant> = Vec::new();
            for loaded in layers_of_kind.map(|mlp| &mlp[projection as usize]) {
                let variants = loaded.variants(arch, m, sms);
                if variants.len() > longest.len() {
                    longest = variants;
                }
            }
            longest
        })
    })
}

/// The number of multiprocessors that decode if nothing was measured: a sixth, as in the report.
fn decode_sms(sms: u32) -> u32 {
    (sms / 6).max(Projection::ALL.len() as u32).min(sms.saturating_sub(1)).max(1)
}

/// The number of multiprocessors of a product: all but those that decode, if any do.
fn product_sms(layers: &[LoadedMlp], sms: u32, decode_sms: u32) -> u32 {
    if layers.iter().any(is_hard) { sms.saturating_sub(decode_sms).max(1) } else { sms }
}

/// Returns the reconstructive matmuls that variants of these layers can need, without duplicates.
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

/// The product of down is added to the residual stream.
pub(crate) fn epilogue(projection: Projection) -> Epilogue {
    if projection == Projection::Down { Epilogue::StoreAdd } else { Epilogue::Store }
}
