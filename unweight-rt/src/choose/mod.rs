//! From a problem to a kernel: which pipeline a stored weight takes, which variants that needs, and the kernels themselves.
//!
//! ```text
//! StoredWeight, m --pipelines()--> Pipeline {decoder, matmul}  --KernelSet::get--> Arc<LoadedKernel>
//! weights of a bundle --reachable()--> every variant that any batch can ask for --KernelSet::prepare--> compiled, in parallel
//! ```
//! The choice is a pure function of shapes and statistics, for use before anything has been measured on the machine at hand. It is the
//! report's heuristic (section 8.4) as far as measurements on an H200 bear it out (docs/adr/0003-matmul-log.md).

pub mod model;

use std::{collections::BTreeSet, ops::RangeInclusive};

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Arch, CodeLimit, DecodeOutput, Epilogue, NTiles, Stages, VerbatimRows, WeightSource, catalog},
};
use unweight_format::{
    FormId, HuffmanTensor, PackedTensor, PaletteTensor, StoredTensor,
    bundle::{Bundle, BundleError},
};

use self::model::{PackedChooser, PackedUse};

/// Multiprocessors of an H100 or H200 (SXM). While one-tile columns of a problem do not outnumber them, the narrow and deep N1P6
/// is fastest: anything wider leaves some of them idle (4096x14336 at batch 1: 69 us, N2P4 94).
const SMS: u32 = 132;

/// Batches above this decode whole matrices for cuBLAS: decoding and multiplying 14336x4096 takes 147 us by exponents and 157 us whole
/// at 512, 243 and 224 at 1024 (H200, docs/benchmarks.md).
pub const WHOLE_BATCH: u32 = 512;

/// What dispatch has to know of a stored weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoredWeight {
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// How it is stored.
    pub form: StoredForm,
}

/// The stored form of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredForm {
    /// BF16.
    Raw,
    /// Huffman-coded exponents.
    Huffman {
        /// Longest code, bits.
        code_bits: u32,
        /// Most verbatim rows of a tile.
        max_verbatim_rows: u32,
    },
    /// Palette indices.
    Palette {
        /// Most verbatim rows of a tile.
        max_verbatim_rows: u32,
    },
    /// The resident form.
    Packed {
        /// Whether an element may lie outside the window.
        escapes: bool,
    },
}

impl StoredWeight {
    /// Of a Huffman tensor.
    pub fn huffman<B: AsRef<[u8]>>(tensor: &HuffmanTensor<B>) -> Self {
        let form = StoredForm::Huffman {
            code_bits: tensor.code().max_length(),
            max_verbatim_rows: tensor.max_verbatim_rows(),
        };
        // A grid's dimensions fit 32 bits.
        Self { n: tensor.grid().rows() as u32, k: tensor.grid().cols() as u32, form }
    }

    /// Of a palette tensor.
    pub fn palette<B: AsRef<[u8]>>(tensor: &PaletteTensor<B>) -> Self {
        let form = StoredForm::Palette { max_verbatim_rows: tensor.max_verbatim_rows() };
        Self { n: tensor.grid().rows() as u32, k: tensor.grid().cols() as u32, form }
    }

    /// Of a packed tensor.
    pub fn packed<B: AsRef<[u8]>>(tensor: &PackedTensor<B>) -> Self {
        let form = StoredForm::Packed { escapes: tensor.escape_heads().iter().any(|byte| *byte != 0) };
        Self { n: tensor.grid().rows() as u32, k: tensor.grid().cols() as u32, form }
    }

    /// Of a tensor that needs kernels; `None` for a raw one.
    pub fn of<B: AsRef<[u8]>>(tensor: &StoredTensor<B>) -> Option<Self> {
        let view = tensor.borrowed();
        match tensor.form() {
            FormId::HUFFMAN => HuffmanTensor::of(view).map(|tensor| Self::huffman(&tensor)),
            FormId::PALETTE => PaletteTensor::of(view).map(|tensor| Self::palette(&tensor)),
            FormId::PACKED => PackedTensor::of(view).map(|tensor| Self::packed(&tensor)),
            _ => None,
        }
    }
}

/// How a stored weight becomes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pipeline {
    /// BF16 as stored, cuBLAS.
    RawCublas,
    /// Decoded whole, cuBLAS.
    FullDecodeCublas {
        /// Huffman to bf16.
        decode: VariantSpec,
    },
    /// Decoded exponents, reconstructive matmul.
    ExponentMatmul {
        /// Huffman to exponents.
        decode: VariantSpec,
        /// Exponent source.
        matmul: VariantSpec,
    },
    /// Transcoded to palette indices, reconstructive matmul.
    TranscodeMatmul {
        /// Huffman to palette indices.
        decode: VariantSpec,
        /// Palette source.
        matmul: VariantSpec,
    },
    /// Palette indices as stored, reconstructive matmul.
    PaletteMatmul {
        /// Palette source.
        matmul: VariantSpec,
    },
    /// Packed weights as stored, register-sourced matmul.
    PackedMatmul {
        /// The matmul.
        matmul: VariantSpec,
    },
    /// Decoded on the host when it is loaded, then cuBLAS: a palette tensor of a shape that no matmul takes.
    HostDecodeCublas,
}

impl Pipeline {
    /// The kernels that it runs, in order.
    pub fn variants(&self) -> impl Iterator<Item = VariantSpec> {
        let (first, second) = match *self {
            Self::RawCublas | Self::HostDecodeCublas => (None, None),
            Self::FullDecodeCublas { decode } => (Some(decode), None),
            Self::ExponentMatmul { decode, matmul } | Self::TranscodeMatmul { decode, matmul } => {
                (Some(decode), Some(matmul))
            }
            Self::PaletteMatmul { matmul } | Self::PackedMatmul { matmul } => (Some(matmul), None),
        };
        first.into_iter().chain(second)
    }
}

/// The source of a matmul, as far as dispatch cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Exponent bytes.
    Exponent,
    /// Palette indices.
    Palette {
        /// Most verbatim rows of a tile.
        max_verbatim_rows: u32,
    },
}

/// The matmul variants that can compute a problem, best guess first.
///
/// N1P6 comes first where it keeps all multiprocessors at most once busy, else the report's small-batch order N2P4, N2P3, N2P2: its
/// wide rings for batches from 256 on (N4P2, N3P2) were never best here. The rest of Table 5 follows in its order, so that every `n`
/// that is a multiple of 64 has one. Empty if no variant takes the shape: `n` or `k` is no multiple of 64.
///
/// ```
/// use unweight_codegen::{plan::GemmShape, spec::{Arch, Epilogue}};
/// use unweight_rt::choose::{Source, candidates};
/// let names = |m, n| -> Vec<String> {
///     let problem = GemmShape { m, n, k: 4096 };
///     candidates(Arch::Sm90a, Source::Palette { max_verbatim_rows: 5 }, problem, Epilogue::Store)
///         .iter().map(|spec| spec.to_string()).collect()
/// };
/// assert_eq!(names(1, 14336)[0], "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// assert_eq!(names(1024, 14336)[0], "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// assert_eq!(names(256, 4096)[0], "uw_sm90a_gemm_recon_palette_n1p6_v8_store");
/// assert!(names(1, 100).is_empty());
/// ```
pub fn candidates(arch: Arch, source: Source, problem: GemmShape, epilogue: Epilogue) -> Vec<VariantSpec> {
    let GemmShape { m, n, k } = problem;
    if n == 0 || k == 0 || !k.is_multiple_of(64) {
        return Vec::new();
    }
    let source = match source {
        Source::Exponent => WeightSource::Exponent,
        Source::Palette { max_verbatim_rows } => match VerbatimRows::at_least(max_verbatim_rows) {
            Some(verbatim) => WeightSource::Palette { verbatim },
            None => return Vec::new(),
        },
    };
    let preferred: [(u32, u32); 4] =
        if m <= narrow_batch(n) { [(1, 6), (2, 4), (2, 3), (2, 2)] } else { [(2, 4), (2, 3), (2, 2), (1, 6)] };
    let rank = |ring: &(NTiles, Stages)| {
        preferred
            .iter()
            .position(|(n, stages)| (ring.0.get(), ring.1.get()) == (*n, *stages))
            .unwrap_or(preferred.len())
    };
    let mut rings = catalog::TABLE_5;
    // Stable: what the heuristic does not name keeps Table 5's order.
    rings.sort_by_key(rank);
    rings
        .into_iter()
        .filter(|(tiles, _)| n.is_multiple_of(64 * tiles.get()))
        .map(|(tiles, stages)| VariantSpec::gemm_recon(arch, source, tiles, stages, epilogue))
        .filter(|spec| Plan::new(spec).is_ok())
        .collect()
}

/// The largest batch whose tasks of 128 rows by one tile do not outnumber the multiprocessors.
fn narrow_batch(n: u32) -> u32 {
    128 * (SMS / n.div_ceil(64).max(1))
}

/// The decoder for codes of up to `code_bits` bits: of all that can, the one with the smallest table. `None` above 15 bits.
pub fn decoder(arch: Arch, output: DecodeOutput, code_bits: u32) -> Option<VariantSpec> {
    let limit = CodeLimit::new(code_bits.max(CodeLimit::MIN.get())).ok()?;
    Some(VariantSpec::decode(arch, output, limit))
}

/// The pipelines that a weight can take at batch `m`, the default first.
pub fn pipelines(arch: Arch, weight: &StoredWeight, m: u32) -> Vec<Pipeline> {
    let problem = GemmShape { m, n: weight.n, k: weight.k };
    let matmul = |source| candidates(arch, source, problem, Epilogue::Store).into_iter().next();
    match weight.form {
        StoredForm::Raw => vec![Pipeline::RawCublas],
        StoredForm::Palette { max_verbatim_rows } => match matmul(Source::Palette { max_verbatim_rows }) {
            Some(matmul) => vec![Pipeline::PaletteMatmul { matmul }],
            None => vec![Pipeline::HostDecodeCublas],
        },
        StoredForm::Packed { escapes } => {
            let choice = PackedChooser::model(arch, SMS).choose(problem, packed_use(escapes));
            choice.map(|matmul| Pipeline::PackedMatmul { matmul }).into_iter().collect()
        }
        StoredForm::Huffman { code_bits, max_verbatim_rows } => {
            let decode = |output| decoder(arch, output, code_bits);
            let full = decode(DecodeOutput::Full).map(|decode| Pipeline::FullDecodeCublas { decode });
            let exponent = decode(DecodeOutput::Exponent)
                .zip(matmul(Source::Exponent))
                .map(|(decode, matmul)| Pipeline::ExponentMatmul { decode, matmul });
            let transcode = decode(DecodeOutput::Palette)
                .zip(matmul(Source::Palette { max_verbatim_rows }))
                .map(|(decode, matmul)| Pipeline::TranscodeMatmul { decode, matmul });
            let order = if m > WHOLE_BATCH { [full, exponent, transcode] } else { [exponent, transcode, full] };
            order.into_iter().flatten().collect()
        }
    }
}

/// Packed weights in a pipeline: nothing is known of the kernel before it.
fn packed_use(escapes: bool) -> PackedUse {
    PackedUse { escapes, pdl: false, epilogue: Epilogue::Store }
}

/// Every variant that the default pipelines of these weights run for some batch in `batches`: exactly what must be compiled.
///
/// Ordered and without repetition.
pub fn reachable<'a>(
    arch: Arch,
    weights: impl IntoIterator<Item = &'a StoredWeight>,
    batches: RangeInclusive<u32>,
) -> Vec<VariantSpec> {
    let weights: std::collections::HashSet<&StoredWeight> = weights.into_iter().collect();
    let mut variants = BTreeSet::new();
    for weight in weights {
        if let StoredForm::Packed { escapes } = weight.form {
            let choices =
                PackedChooser::model(arch, SMS).choices(weight.n, weight.k, *batches.end(), packed_use(escapes));
            variants.extend(choices.into_iter().filter(|(most, _)| most >= batches.start()).map(|(_, spec)| spec));
            continue;
        }
        // The choice changes at these batches only.
        let narrow = narrow_batch(weight.n);
        let turns = [*batches.start(), *batches.end(), narrow, narrow + 1, WHOLE_BATCH, WHOLE_BATCH + 1];
        for m in turns.into_iter().filter(|m| batches.contains(m)) {
            variants.extend(pipelines(arch, weight, m).first().into_iter().flat_map(Pipeline::variants));
        }
    }
    variants.into_iter().collect()
}

/// The coded tensors of a bundle, each kind once. Reads every tensor's metadata, and with it checks them.
///
/// # Errors
/// A tensor is damaged; the error names it.
pub fn bundle_weights(bundle: &Bundle) -> Result<Vec<StoredWeight>, BundleError> {
    let mut weights = Vec::new();
    for tensor in bundle.tensors() {
        let weight = StoredWeight::of(&bundle.tensor_in(tensor.file, &tensor.entry.name)?);
        weights.extend(weight.filter(|weight| !weights.contains(weight)));
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCH: Arch = Arch::Sm90a;

    fn rings(source: Source, m: u32, n: u32) -> Vec<String> {
        let specs = candidates(ARCH, source, GemmShape { m, n, k: 512 }, Epilogue::Store);
        specs.iter().map(|spec| spec.to_string().split('_').nth(5).unwrap().to_owned()).collect()
    }

    #[test]
    fn narrow_rings_where_they_fit_the_machine_else_the_reports_small_batch_order() {
        assert_eq!(rings(Source::Exponent, 1, 14336)[..3], ["n2p4", "n2p3", "n2p2"]);
        assert_eq!(rings(Source::Exponent, 1024, 14336)[..3], ["n2p4", "n2p3", "n2p2"]);
        // 64 one-tile columns: two rows of tasks fit 132 multiprocessors, three do not.
        assert_eq!(rings(Source::Exponent, 256, 4096)[..2], ["n1p6", "n2p4"]);
        assert_eq!(rings(Source::Exponent, 257, 4096)[..2], ["n2p4", "n2p3"]);
    }

    #[test]
    fn every_multiple_of_64_has_a_variant_and_nothing_else_has() {
        for n in 1..=1024 {
            for source in [Source::Exponent, Source::Palette { max_verbatim_rows: 64 }] {
                for m in [1, 256] {
                    let found = rings(source, m, n);
                    assert_eq!(found.is_empty(), n % 64 != 0, "n = {n}, {source:?}: {found:?}");
                }
            }
        }
        assert_eq!(rings(Source::Exponent, 1, 64), ["n1p6", "n1p4", "n1p2"]);
        let odd_k = GemmShape { m: 1, n: 64, k: 65 };
        assert!(candidates(ARCH, Source::Exponent, odd_k, Epilogue::Store).is_empty());
    }

    #[test]
    fn candidates_divide_n_exist_and_have_room_for_the_verbatim_rows() {
        for rows in 0..=64 {
            for n in [64, 128, 192, 256, 768, 14336] {
                let problem = GemmShape { m: 17, n, k: 4096 };
                for spec in candidates(ARCH, Source::Palette { max_verbatim_rows: rows }, problem, Epilogue::StoreAdd) {
                    let unweight_codegen::spec::Op::GemmRecon(matmul) = spec.op else { panic!("{spec} is no matmul") };
                    assert!(n % (64 * matmul.n_tiles.get()) == 0 && matmul.verbatim_rows() >= rows, "{spec}");
                    assert!(Plan::new(&spec).is_ok() && catalog::all().contains(&spec), "{spec}");
                }
            }
        }
        let problem = GemmShape { m: 1, n: 64, k: 64 };
        assert!(candidates(ARCH, Source::Palette { max_verbatim_rows: 65 }, problem, Epilogue::Store).is_empty());
    }

    #[test]
    fn odd_shapes_fall_back_to_cublas() {
        let form = StoredForm::Huffman { code_bits: 7, max_verbatim_rows: 3 };
        let decode = decoder(ARCH, DecodeOutput::Full, 7).unwrap();
        for (n, k) in [(100, 64), (64, 100)] {
            let found = pipelines(ARCH, &StoredWeight { n, k, form }, 1);
            assert_eq!(found, [Pipeline::FullDecodeCublas { decode }]);
        }
        let palette = StoredWeight { n: 100, k: 64, form: StoredForm::Palette { max_verbatim_rows: 0 } };
        assert_eq!(pipelines(ARCH, &palette, 1), [Pipeline::HostDecodeCublas]);
        let raw = StoredWeight { form: StoredForm::Raw, ..palette };
        assert_eq!(pipelines(ARCH, &raw, 1), [Pipeline::RawCublas]);
    }

    #[test]
    fn short_codes_take_the_smallest_decoder() {
        assert_eq!(decoder(ARCH, DecodeOutput::Full, 1).unwrap().to_string(), "uw_sm90a_decode_full_l6");
        assert_eq!(decoder(ARCH, DecodeOutput::Palette, 15).unwrap().to_string(), "uw_sm90a_decode_palette_l15");
        assert_eq!(decoder(ARCH, DecodeOutput::Full, 16), None);
    }

    #[test]
    fn reachable_is_what_dispatch_asks_for_at_any_batch_and_no_more() {
        let huffman = StoredForm::Huffman { code_bits: 7, max_verbatim_rows: 9 };
        let weights = [
            StoredWeight { n: 14336, k: 4096, form: huffman },
            StoredWeight { n: 14336, k: 4096, form: huffman },
            StoredWeight { n: 4096, k: 14336, form: StoredForm::Palette { max_verbatim_rows: 2 } },
            StoredWeight { n: 1000, k: 30, form: huffman },
            StoredWeight { n: 4096, k: 4096, form: StoredForm::Packed { escapes: true } },
            StoredWeight { n: 4096, k: 4096, form: StoredForm::Raw },
        ];
        let batches = 9..=1100;
        let mut asked = BTreeSet::new();
        for weight in &weights {
            for m in batches.clone() {
                asked.extend(pipelines(ARCH, weight, m)[0].variants());
            }
        }
        assert_eq!(reachable(ARCH, &weights, batches), asked.into_iter().collect::<Vec<_>>());
        assert!(reachable(ARCH, &weights[5..], 1..=1).is_empty());
        // Only small batches: the variants for wide ones are not compiled.
        let names: Vec<_> = reachable(ARCH, &weights[..1], 1..=64).iter().map(ToString::to_string).collect();
        assert_eq!(names, ["uw_sm90a_decode_exponent_l7", "uw_sm90a_gemm_recon_exponent_n2p4_store"]);
    }
}
