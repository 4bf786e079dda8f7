//! How each projection of an MLP is multiplied with where its weights stay as they are stored: the report's five paths
//! (section 5), and packed weights. Pure, but for `weights` and [`oracle`].
//!
//! ```text
//! form, shape --loads_as--> what lies on the device --ways--> ways of a batch, best guess first --Setting--> one each
//! ```
//! | stored | on the device | paths |
//! |---|---|---|
//! | raw | BF16 | cuBLAS |
//! | palette | palette indices | reconstructive matmul |
//! | huffman | as stored; easy: palette indices | decode whole for cuBLAS, or exponents or indices for the matmul |
//! | packed | packed | register-sourced matmul |
//! | another | as [`Linears`](crate::Linears) has it | packed, or cuBLAS |
//!
//! What no kernel reads, because a side is no multiple of 64, lies as BF16.

pub mod oracle;
pub mod plan;
#[cfg(test)]
mod tests;
pub(crate) mod weights;

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};
use unweight_codegen::{
    VariantSpec,
    plan::GemmShape,
    spec::{Arch, DecodeOutput, Epilogue, Op},
};
use unweight_format::FormId;
use unweight_rt::choose::{
    cost,
    recon::{self, Source},
};

pub use self::plan::{Measured, Plan, PlanError};
use crate::program::{self, Path, Projection};

/// What the weights of MLPs lie as on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MlpWeights {
    /// As all linears ([`Linears`](crate::Linears)): gate and up are one product.
    #[default]
    Linears,
    /// As they are stored. Layers with Huffman-coded weights are decoded in every step, beside the others' products.
    Stored,
    /// The same, but of layers with Huffman-coded weights every other one becomes easy: its weights are transcoded to
    /// palette indices when the model is loaded.
    Alternate,
}

impl MlpWeights {
    /// As options name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linears => "linears",
            Self::Stored => "stored",
            Self::Alternate => "alternate",
        }
    }
}

/// A ring of the reconstructive matmul, as its variants are named: `n2p4`, `n1p6s2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ring {
    /// Tiles of 64 output features that a block multiplies at a time.
    pub tiles: u32,
    /// Stages.
    pub stages: u32,
    /// Blocks that share k; 1 for none, which names leave out.
    pub splits: u32,
}

impl Ring {
    fn of(spec: &VariantSpec) -> Option<Self> {
        match spec.op {
            Op::GemmRecon(op) => {
                Some(Self { tiles: op.n_tiles.get(), stages: op.stages.get(), splits: op.splits.get() })
            }
            _ => None,
        }
    }
}

/// One way to multiply with a projection: a path and, where the reconstructive matmul multiplies, its ring.
///
/// ```
/// use unweight_engine::{paths::Way, program::Path};
/// let way: Way = "exponents/n2p4".parse()?;
/// assert_eq!((way.path, way.to_string().as_str()), (Path::Exponents, "exponents/n2p4"));
/// assert!("raw/n2p4".parse::<Way>().is_err() && "exponents".parse::<Way>().is_err());
/// # Ok::<(), unweight_engine::paths::NoWay>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// The path.
    pub path: Path,
    /// The ring.
    pub ring: Option<Ring>,
}

impl Way {
    /// A path without a ring.
    const fn plain(path: Path) -> Self {
        Self { path, ring: None }
    }
}

/// Whether the reconstructive matmul multiplies.
fn reconstructs(path: Path) -> bool {
    matches!(path, Path::Palette | Path::Exponents | Path::Transcode)
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path.name())?;
        match self.ring {
            Some(Ring { tiles, stages, splits: 1 }) => write!(f, "/n{tiles}p{stages}"),
            Some(Ring { tiles, stages, splits }) => write!(f, "/n{tiles}p{stages}s{splits}"),
            None => Ok(()),
        }
    }
}

/// As its text.
impl Serialize for Way {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A text that names no way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no path, such as raw, full-decode or exponents/n2p4")]
pub struct NoWay(String);

impl NoWay {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        "mlp-path-unknown"
    }
}

impl FromStr for Way {
    type Err = NoWay;

    fn from_str(text: &str) -> Result<Self, NoWay> {
        let no = || NoWay(text.chars().take(64).collect());
        let (name, ring) = text.split_once('/').map_or((text, None), |(name, ring)| (name, Some(ring)));
        let path = Path::ALL.into_iter().find(|path| path.name() == name).ok_or_else(no)?;
        let number = |text: &str| -> Option<u32> {
            let digits = (1..=2).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
            if digits && !text.starts_with('0') { text.parse().ok() } else { None }
        };
        let ring = match ring {
            None => None,
            Some(ring) => {
                let (tiles, stages) = ring.strip_prefix('n').and_then(|ring| ring.split_once('p')).ok_or_else(no)?;
                let (stages, splits) = match stages.split_once('s') {
                    None => (stages, 1),
                    Some((stages, splits)) => (stages, number(splits).filter(|splits| *splits > 1).ok_or_else(no)?),
                };
                Some(Ring { tiles: number(tiles).ok_or_else(no)?, stages: number(stages).ok_or_else(no)?, splits })
            }
        };
        if ring.is_some() == reconstructs(path) { Ok(Self { path, ring }) } else { Err(no()) }
    }
}

/// What a projection lies as on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lies {
    /// BF16.
    Raw,
    /// Palette indices.
    Palette,
    /// Huffman-coded.
    Huffman,
    /// A linear of the loader's: packed, or BF16 where it cannot be.
    Linear,
}

/// What a stored projection `[n, k]` becomes; `easy`: Huffman codes are to go.
pub fn loads_as(form: FormId, [n, k]: [u32; 2], easy: bool, arch: Arch) -> Lies {
    let problem = GemmShape { m: 1, n, k };
    let takes = |source| !recon::candidates(arch, source, problem, 1, Epilogue::Store).is_empty();
    let palettes = || takes(Source::Palette { max_verbatim_rows: 64 });
    match form {
        FormId::RAW => Lies::Raw,
        FormId::PALETTE if palettes() => Lies::Palette,
        FormId::HUFFMAN if easy && palettes() => Lies::Palette,
        // Decoders take whole tiles; what else there is, the host decodes.
        FormId::HUFFMAN if n.is_multiple_of(64) && k.is_multiple_of(64) => Lies::Huffman,
        FormId::PALETTE | FormId::HUFFMAN => Lies::Raw,
        _ => Lies::Linear,
    }
}

/// A projection on the device, as far as the choice of its way cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lying {
    /// What it lies as.
    pub as_what: Lies,
    /// Whether a linear of the loader's is packed, or half of a gate and an up that are one product.
    pub packed: bool,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Most verbatim rows of a tile, over all layers.
    pub verbatim_rows: u32,
}

impl Lying {
    /// Whether it has to be decoded before it is multiplied with.
    pub fn is_hard(&self) -> bool {
        self.as_what == Lies::Huffman
    }

    /// The variant of the reconstructive matmul that a way asks for; `None` if it is not of the ways of this weight.
    pub fn variant(&self, arch: Arch, way: Way, epilogue: Epilogue) -> Option<VariantSpec> {
        let source = match (way.path, self.as_what) {
            (Path::Palette, Lies::Palette) | (Path::Transcode, Lies::Huffman) => {
                Source::Palette { max_verbatim_rows: self.verbatim_rows }
            }
            (Path::Exponents, Lies::Huffman) => Source::Exponent,
            _ => return None,
        };
        let problem = GemmShape { m: 1, n: self.n, k: self.k };
        // Whatever the batch and the multiprocessors: they order them.
        let candidates = recon::candidates(arch, source, problem, 1, epilogue);
        candidates.into_iter().find(|spec| Ring::of(spec) == way.ring)
    }

    /// Every way, best guess first: the records' order for Huffman-coded weights (docs/benchmarks.md), the rings'
    /// own within a path. `sms`: the multiprocessors of a product.
    pub fn ways(&self, arch: Arch, m: u32, sms: u32) -> Vec<Way> {
        let problem = GemmShape { m, n: self.n, k: self.k };
        let rings = |path, source| {
            let candidates = recon::candidates(arch, source, problem, sms, Epilogue::Store);
            candidates.iter().filter_map(Ring::of).map(|ring| Way { path, ring: Some(ring) }).collect::<Vec<_>>()
        };
        let palette = Source::Palette { max_verbatim_rows: self.verbatim_rows };
        match self.as_what {
            Lies::Raw => vec![Way::plain(Path::Raw)],
            Lies::Linear if self.packed => vec![Way::plain(Path::Packed)],
            Lies::Linear => vec![Way::plain(Path::Raw)],
            Lies::Palette => rings(Path::Palette, palette),
            Lies::Huffman => {
                let full = vec![Way::plain(Path::FullDecode)];
                let (exponents, transcode) =
                    (rings(Path::Exponents, Source::Exponent), rings(Path::Transcode, palette));
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

/// How the projections of a step of one batch are multiplied with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// In layers with something to decode: gate, up, down.
    pub hard: [Way; 3],
    /// In the others.
    pub easy: [Way; 3],
    /// Multiprocessors that decode while the others multiply.
    pub decode_sms: u32,
    /// Streams that multiply in hard layers, 1 or 2.
    pub consumers: u8,
}

/// The projections of a layer, gate, up and down.
pub type LyingMlp = [Lying; 3];

/// Whether one of them has to be decoded.
pub fn is_hard(mlp: &LyingMlp) -> bool {
    mlp.iter().any(Lying::is_hard)
}

impl Setting {
    /// What nobody has measured: the best guess for the layers of each kind ([`choices`]).
    pub fn guess(layers: &[LyingMlp], arch: Arch, m: u32, sms: u32) -> Self {
        let [hard, easy] = choices(layers, arch, m, sms);
        let first = |ways: [Vec<Way>; 3]| ways.map(|ways| ways.first().copied().unwrap_or(Way::plain(Path::Raw)));
        Self { hard: first(hard), easy: first(easy), decode_sms: decode_sms(sms), consumers: 2 }
    }

    /// The way of every projection of every layer: what is set where the weight can be multiplied so, else the best
    /// guess.
    pub fn ways(&self, layers: &[LyingMlp], arch: Arch, m: u32, sms: u32) -> Vec<[Way; 3]> {
        let sms = product_sms(layers, sms, self.decode_sms);
        let of = |mlp: &LyingMlp| {
            let set = if is_hard(mlp) { &self.hard } else { &self.easy };
            Projection::ALL.map(|projection| {
                let (lying, way) = (&mlp[projection as usize], set[projection as usize]);
                let ways = lying.ways(arch, m, sms);
                if ways.contains(&way) { way } else { ways.first().copied().unwrap_or(Way::plain(Path::Raw)) }
            })
        };
        layers.iter().map(of).collect()
    }

    /// What programs are built for.
    pub fn layout(&self, sms: u32) -> program::Layout {
        let Self { decode_sms, consumers, .. } = *self;
        program::Layout { consumers, decode_sms, sms, ..program::Layout::default() }
    }
}

/// The ways of the projections, gate, up and down, best guesses first: of hard layers, then of easy ones. Nothing where
/// there are no such layers.
pub type Choices = [[Vec<Way>; 3]; 2];

/// What can be chosen for these layers at a batch, on a device of `sms` multiprocessors. Of the layers of a kind each
/// projection's is that of the first with the most ways: where the first layer is raw, those behind it count.
pub fn choices(layers: &[LyingMlp], arch: Arch, m: u32, sms: u32) -> Choices {
    let sms = product_sms(layers, sms, decode_sms(sms));
    [true, false].map(|hard| {
        Projection::ALL.map(|projection| {
            let own = layers.iter().filter(|mlp| is_hard(mlp) == hard);
            let mut most: Vec<Way> = Vec::new();
            for lying in own.map(|mlp| &mlp[projection as usize]) {
                let ways = lying.ways(arch, m, sms);
                if ways.len() > most.len() {
                    most = ways;
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
fn product_sms(layers: &[LyingMlp], sms: u32, decode_sms: u32) -> u32 {
    if layers.iter().any(is_hard) { sms.saturating_sub(decode_sms).max(1) } else { sms }
}

/// The variants of the reconstructive matmul that ways of these layers can ask for, each once.
pub fn reachable(layers: &[LyingMlp], arch: Arch) -> Vec<VariantSpec> {
    let mut all = Vec::new();
    for mlp in layers {
        for (projection, lying) in Projection::ALL.into_iter().zip(mlp) {
            let epilogue = epilogue(projection);
            let specs = lying.ways(arch, 1, 1).into_iter().filter_map(|way| lying.variant(arch, way, epilogue));
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
