//! Which tensor is stored in which form, and what that will cost.
//!
//! [`Planner::decide`] decides by name, type and shape alone; the encoder may still turn a coded tensor back to raw, if it would not
//! shrink. [`predict_bytes`] says how large a coded tensor becomes, from a histogram.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    Code, CodeLimit, Grid, Histogram, Section, TileMetadata,
    bundle::{BundleError, CompressOptions, Encoding, Profile, Scope},
    layout::{ROW_BITS_MAX, TILE},
    manifest::{Layer, LayerMode},
    packed::{self, Unpackable, Window},
    roles::{self, Role},
    safetensors::Dtype,
};

/// Why a tensor is stored raw, or as palette in place of packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Not BF16.
    Dtype(Dtype),
    /// Rank 0 or 1.
    Rank(usize),
    /// No elements.
    Empty,
    /// Dimensions beyond the format's.
    TooLarge,
    /// The scope does not cover its role.
    Scope(Scope, Role),
    /// An exclude pattern names it.
    Excluded,
    /// No include pattern names it.
    NotIncluded,
    /// The plan file says so.
    PlanFile,
    /// The inference profile keeps the first layer ready.
    Bootstrap,
    /// The inference profile keeps down projections raw.
    Down,
    /// The inference profile keeps what is in no layer raw.
    NoLayer,
    /// Coded it would not be smaller.
    NotSmaller,
    /// It cannot be packed, and is palette.
    Unpackable(Unpackable),
    /// It cannot be packed, and as palette it would not be smaller.
    UnpackableNotSmaller(Unpackable),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dtype(dtype) => write!(f, "{dtype}, not BF16"),
            Self::Rank(rank) => write!(f, "rank {rank}"),
            Self::Empty => f.write_str("no elements"),
            Self::TooLarge => f.write_str("a dimension above 2^32 - 1"),
            Self::Scope(scope, role) => write!(f, "role {role} is outside scope {scope}"),
            Self::Excluded => f.write_str("excluded"),
            Self::NotIncluded => f.write_str("not included"),
            Self::PlanFile => f.write_str("plan file"),
            Self::Bootstrap => f.write_str("bootstrap layer"),
            Self::Down => f.write_str("down projection"),
            Self::NoLayer => f.write_str("in no layer"),
            Self::NotSmaller => f.write_str("not smaller when coded"),
            Self::Unpackable(why) => write!(f, "not packed: {why}"),
            Self::UnpackableNotSmaller(why) => write!(f, "not packed: {why}; not smaller as palette"),
        }
    }
}

/// What is decided for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// By its name.
    pub role: Role,
    /// By its name.
    pub layer: Option<u32>,
    /// The form, and the matrix it is coded as.
    pub form: Form,
}

/// A form with what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Raw, and why.
    Raw(Reason),
    /// Huffman.
    Huffman(Grid),
    /// Palette.
    Palette(Grid),
    /// Packed.
    Packed(Grid),
    /// Palette in place of packed, and why.
    NotPacked(Grid, Unpackable),
}

impl Form {
    /// Its encoding.
    pub fn encoding(self) -> Encoding {
        match self {
            Self::Raw(_) => Encoding::Raw,
            Self::Huffman(_) => Encoding::Huffman,
            Self::Palette(_) | Self::NotPacked(..) => Encoding::Palette,
            Self::Packed(_) => Encoding::Packed,
        }
    }

    /// Why it is raw, or palette in place of packed.
    pub fn reason(self) -> Option<Reason> {
        match self {
            Self::Raw(reason) => Some(reason),
            Self::NotPacked(_, why) => Some(Reason::Unpackable(why)),
            Self::Huffman(_) | Self::Palette(_) | Self::Packed(_) => None,
        }
    }

    /// Raw, because this form would not be smaller.
    pub fn not_smaller(self) -> Self {
        Self::Raw(match self {
            Self::NotPacked(_, why) => Reason::UnpackableNotSmaller(why),
            _ => Reason::NotSmaller,
        })
    }

    /// The packed form, or what takes its place for a shape that cannot be packed.
    fn packed(grid: Grid) -> Self {
        packed::packable_shape(grid).map_or_else(|why| Self::NotPacked(grid, why), |()| Self::Packed(grid))
    }

    /// The matrix it is coded as.
    pub fn grid(self) -> Option<Grid> {
        match self {
            Self::Raw(_) => None,
            Self::Huffman(grid) | Self::Palette(grid) | Self::Packed(grid) | Self::NotPacked(grid, _) => Some(grid),
        }
    }
}

/// Overrides from a file: `{"rules": [{"match": "model.layers.0.*", "encoding": "raw"}, ...]}`.
///
/// A later rule overrides an earlier one; a rule overrides profile, scope, include and exclude. Type and shape are stronger
/// than any rule: only BF16 tensors of rank 2 and up are ever coded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// The rules.
    pub rules: Vec<Rule>,
}

/// One override.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Pattern (`*`, `?`) over tensor names.
    #[serde(rename = "match")]
    pub pattern: String,
    /// The form to store matching tensors in.
    pub encoding: Encoding,
}

impl PlanFile {
    /// Reads a plan file.
    ///
    /// # Errors
    /// It cannot be read, or is not such JSON.
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        let text = std::fs::read(path).map_err(BundleError::io("read the plan file", path))?;
        serde_json::from_slice(&text).map_err(|error| BundleError::PlanFile {
            path: path.into(),
            reason: format!(
                "{error}; a plan file is {{\"rules\": [{{\"match\": \"model.layers.0.*\", \"encoding\": \"raw\"}}]}}"
            ),
        })
    }
}

/// Everything that decides about a tensor.
#[derive(Debug, Clone)]
pub struct Planner {
    profile: Profile,
    scope: Scope,
    include: Vec<String>,
    exclude: Vec<String>,
    rules: Vec<Rule>,
    plan_file: Option<PathBuf>,
}

impl Planner {
    /// Reads the plan file that the options name, if any.
    ///
    /// # Errors
    /// As [`PlanFile::read`].
    pub fn new(options: &CompressOptions) -> Result<Self, BundleError> {
        let rules = options.plan_file.as_deref().map(PlanFile::read).transpose()?.unwrap_or_default().rules;
        Ok(Self {
            profile: options.profile,
            scope: options.scope,
            include: options.include.clone(),
            exclude: options.exclude.clone(),
            rules,
            plan_file: options.plan_file.clone(),
        })
    }

    /// Decides about one tensor.
    pub fn decide(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Decision {
        let (role, layer) = roles::of(name);
        let form = match eligible(dtype, shape) {
            Err(reason) => Form::Raw(reason),
            Ok(grid) => match self.wanted(name, role, layer) {
                Err(reason) => Form::Raw(reason),
                Ok(Encoding::Raw) => Form::Raw(Reason::PlanFile),
                Ok(Encoding::Huffman) => Form::Huffman(grid),
                Ok(Encoding::Palette) => Form::Palette(grid),
                Ok(Encoding::Packed) => Form::packed(grid),
            },
        };
        Decision { role, layer, form }
    }

    fn wanted(&self, name: &str, role: Role, layer: Option<u32>) -> Result<Encoding, Reason> {
        if let Some(rule) = self.rules.iter().rev().find(|rule| matches(&rule.pattern, name)) {
            return Ok(rule.encoding);
        }
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        if any(&self.exclude) {
            return Err(Reason::Excluded);
        }
        if !self.include.is_empty() && !any(&self.include) {
            return Err(Reason::NotIncluded);
        }
        let in_scope = match self.scope {
            Scope::Mlp => role.is_mlp(),
            Scope::Linear => role.is_mlp() || role.is_attention(),
            Scope::All => true,
        };
        if !in_scope {
            return Err(Reason::Scope(self.scope, role));
        }
        match (self.profile, layer) {
            (Profile::Distribution, _) => Ok(Encoding::Huffman),
            (Profile::Palette, _) => Ok(Encoding::Palette),
            (Profile::Resident, _) => Ok(Encoding::Packed),
            (Profile::Inference, None) => Err(Reason::NoLayer),
            (Profile::Inference, Some(_)) if role == Role::Down => Err(Reason::Down),
            (Profile::Inference, Some(layer)) => match mode(layer) {
                LayerMode::Bootstrap => Err(Reason::Bootstrap),
                LayerMode::Hard => Ok(Encoding::Huffman),
                LayerMode::Easy => Ok(Encoding::Palette),
            },
        }
    }

    /// Refuses a plan file with a rule that no tensor matches: a misspelt name would silently do nothing.
    ///
    /// # Errors
    /// There is such a rule.
    pub fn check_rules<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Result<(), BundleError> {
        match self.rules.iter().find(|rule| !names.clone().any(|name| matches(&rule.pattern, name))) {
            None => Ok(()),
            Some(rule) => Err(BundleError::PlanFile {
                path: self.plan_file.clone().unwrap_or_default(),
                reason: format!("no tensor matches '{}'", rule.pattern),
            }),
        }
    }
}

fn eligible(dtype: Dtype, shape: &[usize]) -> Result<Grid, Reason> {
    if dtype != Dtype::Bf16 {
        return Err(Reason::Dtype(dtype));
    }
    if shape.contains(&0) {
        return Err(Reason::Empty);
    }
    if shape.len() < 2 {
        return Err(Reason::Rank(shape.len()));
    }
    Grid::fold(shape).ok_or(Reason::TooLarge)
}

/// How a layer runs, by its number (report section 6): the first is the bootstrap, then easy and hard ones take turns.
fn mode(layer: u32) -> LayerMode {
    match layer {
        0 => LayerMode::Bootstrap,
        n if n % 2 == 0 => LayerMode::Hard,
        _ => LayerMode::Easy,
    }
}

/// The layer plan of a model whose decisions are given. A palette or resident bundle has nothing to decode, so all its layers are easy.
pub fn layers<'a>(profile: Profile, decisions: impl Iterator<Item = &'a Decision>) -> Vec<Layer> {
    let indices: BTreeSet<u32> =
        decisions.filter(|d| d.role.is_mlp() || d.role.is_attention()).filter_map(|d| d.layer).collect();
    let mode = |index| match profile {
        Profile::Palette | Profile::Resident => LayerMode::Easy,
        Profile::Distribution | Profile::Inference => mode(index),
    };
    let mut next_hard = None;
    let mut layers: Vec<Layer> = indices
        .into_iter()
        .rev()
        .map(|index| {
            let layer = Layer { index, mode: mode(index), next_hard };
            if layer.mode == LayerMode::Hard {
                next_hard = Some(index);
            }
            layer
        })
        .collect();
    layers.reverse();
    layers
}

/// True if `name` matches a pattern where `*` is any text and `?` any one character.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Greedy with one point of return: where the last `*` was, and how much it has taken.
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
        } else if pattern.get(p).is_some_and(|&c| c == '?' || c == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((at, taken)) = star {
            star = Some((at, taken + 1));
            (p, n) = (at + 1, taken + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

/// What a sample of a tensor tells about all of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    histogram: Histogram,
    /// Rows of 64 elements in the sample.
    rows: u64,
    /// Of these, how many the code of the sample makes verbatim.
    verbatim_rows: u64,
    /// Coded bits of the others.
    coded_bits: u64,
}

impl Sample {
    /// Samples contiguous pieces of BF16 elements; each is cut in rows of 64, an incomplete one at its end is not counted.
    pub fn of(pieces: &[&[u8]], limit: CodeLimit) -> Self {
        let mut histogram = Histogram::default();
        pieces.iter().for_each(|piece| histogram.merge(&Histogram::of(piece)));
        let mut sample = Self { histogram, rows: 0, verbatim_rows: 0, coded_bits: 0 };
        let Some(code) = Code::from_histogram(&sample.histogram, limit) else { return sample };
        let table = code.encode_table();
        for row in pieces.iter().flat_map(|piece| piece.chunks_exact(2 * TILE)) {
            let mut coded = true;
            let bits: u32 = row
                .chunks_exact(2)
                .map(|e| table[usize::from(crate::bf16::exponent(u16::from_le_bytes([e[0], e[1]])))].1)
                .inspect(|&length| coded &= length > 0)
                .map(u32::from)
                .sum();
            sample.rows += 1;
            if coded && bits <= ROW_BITS_MAX {
                sample.coded_bits += u64::from(bits);
            } else {
                sample.verbatim_rows += 1;
            }
        }
        if sample.rows == 0 {
            // Less than a row: as many bits as its elements' codes.
            sample.rows = 1;
            sample.coded_bits = (code.mean_bits(&sample.histogram) * TILE as f64) as u64;
        }
        sample
    }
}

/// What a form becomes if all of the tensor is like the sample. Single escapes without an operand are not looked for.
pub fn predict_form(form: Form, sample: &Sample) -> Form {
    match form {
        Form::Packed(grid) => match Window::covering(&sample.histogram) {
            Ok(_) => form,
            Err(why) => Form::NotPacked(grid, why),
        },
        _ => form,
    }
}

/// Bytes of the sections of a tensor of this shape in this form, if all of it is like the sample.
pub fn predict_bytes(grid: Grid, encoding: Encoding, sample: &Sample) -> u64 {
    let rows = (grid.rows() * grid.tile_cols()) as f64;
    let share = |part: u64| rows * part as f64 / sample.rows.max(1) as f64;
    let fixed = |sections: &[Section]| -> u64 {
        sections.iter().filter_map(|s| s.fixed_bytes(grid)).map(|bytes| bytes as u64).sum()
    };
    let verbatim = share(sample.verbatim_rows) * TILE as f64;
    // A tile ends on a word: 16 bits are lost on average.
    let words = share(sample.coded_bits) / 8.0 + grid.tiles() as f64 * 2.0;
    match encoding {
        Encoding::Raw => grid.elements() as u64 * 2,
        Encoding::Huffman => fixed(&Section::HUFFMAN) + (verbatim + words) as u64,
        Encoding::Palette => fixed(&Section::PALETTE) + verbatim as u64,
        Encoding::Packed => fixed(&Section::PACKED) + escape_bytes(grid, &sample.histogram),
    }
}

/// Bytes of the lists of escapes, if escapes are scattered evenly: clustered ones take less.
fn escape_bytes(grid: Grid, histogram: &Histogram) -> u64 {
    let (_, outside) = Window::best(histogram);
    let row_blocks = (grid.tiles() * packed::ROW_BLOCKS) as f64;
    let mean = grid.elements() as f64 / row_blocks * outside as f64 / histogram.total().max(1) as f64;
    // Poisson: a row block with two and more has a word for each and one for their number.
    let (none, one) = ((-mean).exp(), mean * (-mean).exp());
    (row_blocks * (mean - one + (1.0 - none - one))) as u64 * 4
}

const _: () = assert!(TileMetadata::BYTES == 16, "stated in docs/format.md A.6");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a*c", "abbc", true),
            ("a*c", "abbcd", false),
            ("*.mlp.*", "model.layers.0.mlp.up_proj.weight", true),
            ("layers.?.x", "layers.1.x", true),
            ("layers.?.x", "layers.12.x", false),
            ("**a**b", "xxaxxb", true),
            ("?é", "éé", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    fn planner(profile: Profile, scope: Scope, rules: &[(&str, Encoding)]) -> Planner {
        let rules = rules.iter().map(|&(pattern, encoding)| Rule { pattern: pattern.into(), encoding }).collect();
        Planner { profile, scope, include: vec![], exclude: vec![], rules, plan_file: None }
    }

    #[test]
    fn type_and_shape_come_first() {
        let all = planner(Profile::Distribution, Scope::All, &[("*", Encoding::Huffman)]);
        let form = |dtype, shape: &[usize]| all.decide("x", dtype, shape).form;
        assert_eq!(form(Dtype::F16, &[64, 64]), Form::Raw(Reason::Dtype(Dtype::F16)));
        assert_eq!(form(Dtype::Bf16, &[64]), Form::Raw(Reason::Rank(1)));
        assert_eq!(form(Dtype::Bf16, &[]), Form::Raw(Reason::Rank(0)));
        assert_eq!(form(Dtype::Bf16, &[0, 64]), Form::Raw(Reason::Empty));
        assert_eq!(form(Dtype::Bf16, &[1 << 40, 1]), Form::Raw(Reason::TooLarge));
        assert_eq!(form(Dtype::Bf16, &[8, 4, 64]), Form::Huffman(Grid::new(32, 64).unwrap()));
    }

    #[test]
    fn rules_override_patterns_and_patterns_narrow() {
        let mut planner =
            planner(Profile::Palette, Scope::Mlp, &[("*.0.*", Encoding::Raw), ("*.0.mlp.*", Encoding::Huffman)]);
        planner.exclude = vec!["*up_proj*".into()];
        planner.include = vec!["*_proj*".into()];
        let form = |name: &str| planner.decide(name, Dtype::Bf16, &[64, 64]).form;
        let grid = Grid::new(64, 64).unwrap();
        assert_eq!(form("layers.0.mlp.up_proj"), Form::Huffman(grid), "the later rule wins");
        assert_eq!(form("layers.0.x"), Form::Raw(Reason::PlanFile));
        assert_eq!(form("layers.1.mlp.up_proj"), Form::Raw(Reason::Excluded));
        assert_eq!(form("layers.1.mlp.gate_proj"), Form::Palette(grid));
        assert_eq!(form("layers.1.self_attn.q_proj"), Form::Raw(Reason::Scope(Scope::Mlp, Role::Q)));
        assert_eq!(form("lm_head"), Form::Raw(Reason::NotIncluded));
        assert!(planner.check_rules(["layers.0.mlp.x"].into_iter()).is_ok());
        let error = planner.check_rules(["layers.0.x"].into_iter()).unwrap_err().to_string();
        assert!(error.contains("no tensor matches '*.0.mlp.*'"), "{error}");
    }

    /// Names and shapes of Llama 3.1 8B.
    fn llama_8b() -> Vec<(String, Vec<usize>)> {
        let mut tensors = vec![
            ("model.embed_tokens.weight".into(), vec![128_256, 4096]),
            ("lm_head.weight".into(), vec![128_256, 4096]),
            ("model.norm.weight".into(), vec![4096]),
        ];
        for layer in 0..32 {
            for (name, shape) in [
                ("self_attn.q_proj", vec![4096, 4096]),
                ("self_attn.k_proj", vec![1024, 4096]),
                ("self_attn.v_proj", vec![1024, 4096]),
                ("self_attn.o_proj", vec![4096, 4096]),
                ("mlp.gate_proj", vec![14336, 4096]),
                ("mlp.up_proj", vec![14336, 4096]),
                ("mlp.down_proj", vec![4096, 14336]),
                ("input_layernorm", vec![4096]),
                ("post_attention_layernorm", vec![4096]),
            ] {
                tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
            }
        }
        tensors
    }

    /// Report, Table 8: the inference bundle has 87.3 % of the size, the distribution bundle of the MLP 78.4 %.
    #[test]
    fn table_8_of_the_report() {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let weights: Vec<u8> = (0..1 << 18)
            .flat_map(|_| {
                let normal = (-2.0 * uniform().max(1e-300).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
                half::bf16::from_f64(normal * 0.02).to_le_bytes()
            })
            .collect();
        let sample = Sample::of(&[&weights], CodeLimit::DEFAULT);
        let tensors = llama_8b();
        let ratio = |profile, scope| {
            let planner = planner(profile, scope, &[]);
            let (mut original, mut stored) = (0, 0);
            let decisions: Vec<Decision> =
                tensors.iter().map(|(name, shape)| planner.decide(name, Dtype::Bf16, shape)).collect();
            for ((_, shape), decision) in tensors.iter().zip(&decisions) {
                let bytes = Dtype::Bf16.tensor_bytes(shape).unwrap();
                original += bytes;
                stored += decision.form.grid().map_or(bytes, |g| predict_bytes(g, decision.form.encoding(), &sample));
            }
            assert!((original as f64 / (1u64 << 30) as f64 - 14.97).abs() < 0.02, "the report's GB are GiB");
            (stored as f64 / original as f64 * 100.0, layers(profile, decisions.iter()))
        };
        let (inference, layers) = ratio(Profile::Inference, Scope::Mlp);
        assert!((inference - 87.3).abs() < 0.2, "inference: {inference}");
        // The report's own 68.1 - 68.6 % per projection give 77.8; ours stores 8 bits a row less (docs/adr/0001).
        let (distribution, _) = ratio(Profile::Distribution, Scope::Mlp);
        assert!((78.4 - 1.3..=78.4).contains(&distribution), "distribution: {distribution}");

        let count = |mode| layers.iter().filter(|l| l.mode == mode).count();
        assert_eq!((count(LayerMode::Bootstrap), count(LayerMode::Hard), count(LayerMode::Easy)), (1, 15, 16));
        let next: Vec<Option<u32>> = layers.iter().map(|l| l.next_hard).collect();
        assert_eq!(
            (next[0], next[1], next[2], next[29], next[30], next[31]),
            (Some(2), Some(2), Some(4), Some(30), None, None)
        );
    }
}
