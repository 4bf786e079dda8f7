//! Pipelines and settings of MLP projections by name, as in options and saved plans. Needs no device.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};
use unweight_codegen::spec::DecodeOutput;
use unweight_format::EncodingId;
use unweight_model::ModelConfig;

/// Whether pipelines can run the MLPs of a model: three tensors, whose product is added unchanged.
pub(crate) fn runs_pipelines(config: &ModelConfig) -> bool {
    let is_plain = !config.merges_gate_up() && !config.norms_what_is_added() && !config.parallel;
    is_plain && config.factors.residual == 1.0
}

/// A projection of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// Hidden to intermediate size; its product is activated.
    Gate,
    /// Hidden to intermediate size; its product is multiplied by the activated gate.
    Up,
    /// Intermediate back to hidden size.
    Down,
}

impl Projection {
    /// All projections, in the order of their products.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The name in tensor names and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// The way to multiply with a projection: one of the report's five pipelines (its Table 3), or packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pipeline {
    /// BF16 weights, multiplied by cuBLAS.
    Raw,
    /// Palette indices, multiplied by the reconstructive matmul.
    Palette,
    /// Packed weights, multiplied by the matmuls that read them from registers.
    Packed,
    /// Huffman-coded weights, decoded to BF16 and multiplied by cuBLAS.
    FullDecode,
    /// Huffman-coded weights, decoded to exponent bytes and multiplied by the reconstructive matmul.
    Exponents,
    /// Huffman-coded weights, decoded to palette indices and multiplied by the reconstructive matmul.
    Transcode,
}

impl Pipeline {
    /// All pipelines, in the order of the report, `packed` after `palette`.
    pub const ALL: [Self; 6] =
        [Self::Raw, Self::Palette, Self::Packed, Self::FullDecode, Self::Exponents, Self::Transcode];

    /// The pipelines for weights of an encoding, by the report's Table 3. Empty for an encoding that no pipeline reads.
    pub fn of(encoding: EncodingId) -> &'static [Self] {
        match encoding {
            EncodingId::RAW => &[Self::Raw],
            EncodingId::PALETTE => &[Self::Palette],
            EncodingId::PACKED => &[Self::Packed],
            EncodingId::HUFFMAN => &[Self::FullDecode, Self::Exponents, Self::Transcode],
            _ => &[],
        }
    }

    /// The encoding that the weights are decoded to before the product; `None` if the product reads them as stored. A
    /// layer with a decoded projection is called hard, any other easy.
    pub fn decodes(self) -> Option<DecodeOutput> {
        match self {
            Self::Raw | Self::Palette | Self::Packed => None,
            Self::FullDecode => Some(DecodeOutput::Full),
            Self::Exponents => Some(DecodeOutput::Exponent),
            Self::Transcode => Some(DecodeOutput::Palette),
        }
    }

    /// Whether cuBLAS computes the product. Its kernels do not support programmatic dependent launch.
    pub fn is_cublas(self) -> bool {
        matches!(self, Self::Raw | Self::FullDecode)
    }

    /// Whether blocks of its matmul wait for each other, so that all of them must be resident at once.
    pub fn waits_for_own_blocks(self) -> bool {
        self == Self::Packed
    }

    /// The name in options, plans and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Palette => "palette",
            Self::Packed => "packed",
            Self::FullDecode => "full-decode",
            Self::Exponents => "exponents",
            Self::Transcode => "transcode",
        }
    }

    /// Whether the reconstructive matmul computes the product.
    fn reconstructs(self) -> bool {
        matches!(self, Self::Palette | Self::Exponents | Self::Transcode)
    }
}

/// The tile and ring of a reconstructive matmul, written like its variants' names: `n2p4`, `n1p6s2`, `b8_r4w8p2c1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ring {
    /// A variant of `gemm_recon`.
    Recon {
        /// Tiles of 64 output features per block.
        tiles: u32,
        /// Stages of the shared-memory ring.
        stages: u32,
        /// Blocks that share the k dimension of one product; 1, which names omit, for no split.
        splits: u32,
    },
    /// A variant of `gemm_join`, for small batches.
    Join {
        /// Batch rows of a block.
        batch_tile: u32,
        /// Blocks of 16 output features per block.
        row_blocks: u32,
        /// Warps of a block.
        warps: u32,
        /// Stages of each warp's ring.
        stages: u32,
        /// Blocks that share the k dimension of one product.
        cluster: u32,
    },
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recon { tiles, stages, splits: 1 } => write!(f, "n{tiles}p{stages}"),
            Self::Recon { tiles, stages, splits } => write!(f, "n{tiles}p{stages}s{splits}"),
            Self::Join { batch_tile, row_blocks, warps, stages, cluster } => {
                write!(f, "b{batch_tile}_r{row_blocks}w{warps}p{stages}c{cluster}")
            }
        }
    }
}

impl Ring {
    /// Returns the ring with this text form.
    fn parse(text: &str) -> Option<Self> {
        if text.starts_with('b') {
            let [batch_tile, row_blocks, warps, stages, cluster] = numbers(text, ["b", "_r", "w", "p", "c"])?;
            return Some(Self::Join { batch_tile, row_blocks, warps, stages, cluster });
        }
        if let Some([tiles, stages, splits]) = numbers(text, ["n", "p", "s"]) {
            return (splits > 1).then_some(Self::Recon { tiles, stages, splits });
        }
        let [tiles, stages] = numbers(text, ["n", "p"])?;
        Some(Self::Recon { tiles, stages, splits: 1 })
    }
}

/// Returns the numbers of one or two digits, without leading zeros, that follow the marks.
fn numbers<const N: usize>(text: &str, marks: [&str; N]) -> Option<[u32; N]> {
    let (mut rest, mut found) = (text, [0; N]);
    for (mark, number) in marks.iter().zip(&mut found) {
        let marked = rest.strip_prefix(mark)?;
        let digits = marked.bytes().take_while(u8::is_ascii_digit).count();
        if !(1..=2).contains(&digits) || marked.starts_with('0') {
            return None;
        }
        let (value, after) = marked.split_at(digits);
        *number = value.parse().ok()?;
        rest = after;
    }
    rest.is_empty().then_some(found)
}

/// A pipeline with the variant of its matmul.
///
/// ```
/// use unweight_engine::raw::options::{Pipeline, PipelineVariant};
/// let variant: PipelineVariant = "exponents/n2p4".parse()?;
/// assert_eq!((variant.pipeline, variant.to_string().as_str()), (Pipeline::Exponents, "exponents/n2p4"));
/// assert!("raw/n2p4".parse::<PipelineVariant>().is_err() && "exponents".parse::<PipelineVariant>().is_err());
/// # Ok::<(), unweight_engine::raw::options::UnknownVariant>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PipelineVariant {
    /// The pipeline of the projection.
    pub pipeline: Pipeline,
    /// The ring of the reconstructive matmul; `None` for pipelines that use another kernel.
    pub ring: Option<Ring>,
}

impl PipelineVariant {
    /// A pipeline without a ring.
    #[cfg(feature = "pipelines")]
    pub(crate) const fn plain(pipeline: Pipeline) -> Self {
        Self { pipeline, ring: None }
    }
}

impl fmt::Display for PipelineVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pipeline.name())?;
        match self.ring {
            Some(ring) => write!(f, "/{ring}"),
            None => Ok(()),
        }
    }
}

/// Serializes as the text form.
impl Serialize for PipelineVariant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The error of parsing a text that does not name a [`PipelineVariant`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a pipeline variant; valid are, for example, raw, full-decode and exponents/n2p4")]
pub struct UnknownVariant(String);

impl UnknownVariant {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "mlp-pipeline-unknown"
    }
}

impl FromStr for PipelineVariant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        let unknown = || UnknownVariant(text.chars().take(64).collect());
        let (name, ring) = text.split_once('/').map_or((text, None), |(name, ring)| (name, Some(ring)));
        let pipeline = Pipeline::ALL.into_iter().find(|pipeline| pipeline.name() == name).ok_or_else(unknown)?;
        let ring = ring.map(|ring| Ring::parse(ring).ok_or_else(unknown)).transpose()?;
        if ring.is_some() == pipeline.reconstructs() { Ok(Self { pipeline, ring }) } else { Err(unknown()) }
    }
}

/// The pipelines of all MLP projections for steps of one batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Variants of gate, up and down in hard layers (Huffman-coded).
    pub hard: [PipelineVariant; 3],
    /// Variants in all other layers.
    pub easy: [PipelineVariant; 3],
    /// Multiprocessors that decode while the others multiply.
    pub decode_sms: u32,
    /// Streams that multiply in hard layers, 1 or 2.
    pub consumers: u8,
}

/// A setting with its measured step time.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The number of sequences of the measured steps.
    pub batch: u32,
    /// Identifies the model, the device and the program that were measured, 32 hexadecimal digits.
    pub key: String,
    /// The name of the GPU that the setting was measured on.
    pub device: String,
    /// The part of the key that depends on the model and the kernels only, 32 hexadecimal digits.
    pub basis: String,
    /// The fastest setting that was found.
    pub setting: Setting,
    /// The median time of a step in microseconds.
    pub step_us: f64,
    /// The gain over the first setting of the search, as a share of that setting's time.
    pub gain: f64,
}

impl Measured {
    /// The order of settings in a plan.
    pub(crate) fn sort_key(&self) -> (u32, &str) {
        (self.batch, &self.key)
    }
}

/// A tuned plan: measured settings by batch size (`docs/format.md` B.10).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    settings: Vec<Measured>,
}

impl Plan {
    /// A plan of settings in ascending order.
    #[cfg(feature = "pipelines")]
    pub(crate) fn of(settings: Vec<Measured>) -> Self {
        Self { settings }
    }

    /// The settings, ordered by batch size, then by key.
    pub fn settings(&self) -> &[Measured] {
        &self.settings
    }

    /// Adds a setting and replaces the one with the same batch size and key. Removes settings of the same device with
    /// another basis: they belong to another version, other kernels or another model. Settings of other devices and
    /// drivers stay, because another machine may read them.
    pub fn insert(&mut self, measured: Measured) {
        self.settings.retain(|existing| existing.device != measured.device || existing.basis == measured.basis);
        match self.settings.binary_search_by(|existing| existing.sort_key().cmp(&measured.sort_key())) {
            Ok(at) => self.settings[at] = measured,
            Err(at) => self.settings.insert(at, measured),
        }
    }

    /// The setting for a batch size, if it was measured for this key.
    pub fn setting(&self, batch: u32, key: &str) -> Option<&Setting> {
        let found = self.settings.iter().find(|existing| existing.batch == batch && existing.key == key);
        found.map(|measured| &measured.setting)
    }
}
