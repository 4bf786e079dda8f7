//! Huffman-coded exponents of types other than BF16 (`docs/format.md` A.12): FP8, F16 and F32.
//!
//! The exponents have the layout and the sections of the Huffman encoding, so its decoders decode them. Two more
//! sections store sign and fraction, 3 to 24 bits: one their whole bytes, one the remaining bits.

use std::borrow::Cow;

use super::{
    Encoding, EncodingId, Extent, NotEncodable, ReadTileRows, Sample, Section, Sections, StoredTensor, Survey,
    TileRows,
    huffman::{
        CodedExponents,
        decode::{Join, decode_rows, tile_rows},
        encode_exponents,
    },
    sample::fixed_bytes,
    tiles::{check_out_bytes, debug_sizes, fixed_section},
};
use crate::{
    Code, CodeLimit, CodecError, Float, FloatMatrix, TileGrid,
    bits::zeroed,
    layout::{FLOAT_FORMAT_BYTES, SECTION_ALIGN},
    parallel,
    safetensors::Dtype,
};

/// The encoding `exponents`.
#[derive(Debug, Clone, Copy)]
pub struct Exponents;

impl EncodingId {
    /// Huffman-coded exponents of a type that is not BF16.
    pub const EXPONENTS: Self = Self::new("exponents");
}

impl Section {
    /// u8 `[16]`: bits of the exponent, bits of the fraction, then zeros.
    pub const FLOAT_FORMAT: Self = Self::new("float_format", Dtype::U8, &[Extent::Fixed(FLOAT_FORMAT_BYTES)]);
    /// u8 `[bytes]`: the lower bytes of sign and fraction, element by element.
    pub const FRACTION_BYTES: Self = Self::new("fraction_bytes", Dtype::U8, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u8 `[bytes]`: the bits of sign and fraction above those bytes, eight elements at a time.
    pub const FRACTION_BITS: Self = Self::new("fraction_bits", Dtype::U8, &[Extent::Open]).padded_to(SECTION_ALIGN);
}

impl Exponents {
    /// The sections in stored order.
    const SECTIONS: &'static [Section] = &[
        Section::FLOAT_FORMAT,
        Section::PALETTE,
        Section::CODE_LENGTHS,
        Section::TILE_METADATA,
        Section::ROW_LENGTHS,
        Section::VERBATIM_EXPONENTS,
        Section::ENCODED_EXP,
        Section::FRACTION_BYTES,
        Section::FRACTION_BITS,
    ];
    /// The types that the encoding supports.
    const FLOATS: &'static [Float] = &[Float::E4M3, Float::E5M2, Float::F16, Float::F32];
}

impl Encoding for Exponents {
    fn id(&self) -> EncodingId {
        EncodingId::EXPONENTS
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn floats(&self) -> &'static [Float] {
        Self::FLOATS
    }

    fn fits(&self, _: TileGrid) -> Result<(), NotEncodable> {
        Ok(())
    }

    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        let rest = Rest::of(sample.float());
        let dense = rest.section_bytes(grid).iter().sum::<usize>() as u64;
        let exponents = (sample.verbatim_bytes(grid) + sample.coded_bytes(grid)) as u64;
        Ok(fixed_bytes(Self::SECTIONS, grid) + dense + exponents)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        ExponentsTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, limit: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        let code = Code::from_histogram(&survey.histogram, limit).expect("a matrix has elements");
        Ok(encode_with(matrix, &code)?.into_sections())
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&ExponentsTensor::from_sections(grid, |section| sections.get(section))?, out)
    }

    fn tile_rows(&self) -> Option<ReadTileRows> {
        Some(read_tile_rows)
    }
}

/// See [`Encoding::tile_rows`].
fn read_tile_rows<'a>(grid: TileGrid, sections: &Sections<'a>) -> Result<TileRows<'a>, CodecError> {
    let tensor = ExponentsTensor::from_sections(grid, |section| sections.get(section))?;
    let rest = Fractions { float: tensor.float, bytes: tensor.bytes, bits: tensor.bits };
    Ok(tile_rows(tensor.exponents, rest))
}

/// How the `1 + fraction` bits of sign and fraction of an element are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rest {
    /// Number of lower bytes.
    bytes: usize,
    /// Number of bits above those bytes.
    bits: usize,
}

/// Elements whose upper bits are stored together: they fill whole bytes.
const GROUP: usize = 8;
/// Elements that one task splits.
const PIECE: usize = 1 << 16;

impl Rest {
    const fn of(float: Float) -> Self {
        let bits = 1 + float.fraction_bits() as usize;
        Self { bytes: bits / 8, bits: bits % 8 }
    }

    /// Bytes of both sections without their fill.
    const fn used_bytes(self, elements: usize) -> [usize; 2] {
        [elements * self.bytes, elements.div_ceil(GROUP) * self.bits]
    }

    fn section_bytes(self, grid: TileGrid) -> [usize; 2] {
        self.used_bytes(grid.elements()).map(|bytes| bytes.next_multiple_of(SECTION_ALIGN))
    }
}

/// Bytes of `fraction_bytes` and `fraction_bits` of a matrix; `None` for a type that the encoding does not support.
pub fn fraction_sections(float: Float, grid: TileGrid) -> Option<[usize; 2]> {
    Exponents::FLOATS.contains(&float).then(|| Rest::of(float).section_bytes(grid))
}

/// Encodes a matrix with its own optimal code under `limit`.
///
/// # Errors
/// The matrix is BF16, which has its own encodings, or the coded words would exceed 2^32.
pub fn encode(matrix: FloatMatrix<'_>, limit: CodeLimit) -> Result<ExponentsTensor<Vec<u8>>, CodecError> {
    let histogram = Survey::of(matrix.float(), matrix.bytes()).histogram;
    encode_with(matrix, &Code::from_histogram(&histogram, limit).expect("a matrix has elements"))
}

/// Encodes a matrix with a given code, which need not be the tensor's own.
///
/// # Errors
/// As [`encode`].
pub fn encode_with(matrix: FloatMatrix<'_>, code: &Code) -> Result<ExponentsTensor<Vec<u8>>, CodecError> {
    let float = matrix.float();
    if !Exponents::FLOATS.contains(&float) {
        return Err(CodecError::Type { float });
    }
    // Encode the exponents first: their temporary memory is freed before sign and fraction are allocated.
    let (exponents, _) = encode_exponents(matrix, code)?;
    let [bytes, bits] = split(matrix);
    Ok(ExponentsTensor { float, exponents, bytes, bits })
}

/// Calls a function with the type as a constant, so that each type has its own loops.
macro_rules! with_float {
    ($function:ident($float:expr $(, $argument:expr)*)) => {
        match $float {
            Float::E4M3 => $function(Float::E4M3 $(, $argument)*),
            Float::E5M2 => $function(Float::E5M2 $(, $argument)*),
            Float::F16 => $function(Float::F16 $(, $argument)*),
            Float::Bf16 => $function(Float::Bf16 $(, $argument)*),
            Float::F32 => $function(Float::F32 $(, $argument)*),
        }
    };
}

/// Splits off sign and fraction of all elements: the two sections.
fn split(matrix: FloatMatrix<'_>) -> [Vec<u8>; 2] {
    let (float, rest, grid) = (matrix.float(), Rest::of(matrix.float()), matrix.grid());
    let [mut bytes, mut bits] = rest.section_bytes(grid).map(zeroed);
    let ([used_bytes, used_bits], [piece_bytes, piece_bits]) =
        (rest.used_bytes(grid.elements()), rest.used_bytes(PIECE));
    let sources: Vec<&[u8]> = matrix.bytes().chunks(PIECE * float.bytes()).collect();
    if rest.bytes > 0 {
        parallel::for_each_chunk(&mut bytes[..used_bytes], piece_bytes, &|piece, out| {
            with_float!(lower_bytes(float, sources[piece], out));
        });
    }
    if rest.bits > 0 {
        parallel::for_each_chunk(&mut bits[..used_bits], piece_bits, &|piece, out| {
            with_float!(upper_bits(float, sources[piece], out));
        });
    }
    [bytes, bits]
}

#[inline(always)]
fn lower_bytes(float: Float, source: &[u8], out: &mut [u8]) {
    let rest = Rest::of(float);
    for (element, out) in source.chunks_exact(float.bytes()).zip(out.chunks_exact_mut(rest.bytes)) {
        out.copy_from_slice(&float.sign_fraction(float.read(element)).to_le_bytes()[..rest.bytes]);
    }
}

#[inline(always)]
fn upper_bits(float: Float, source: &[u8], out: &mut [u8]) {
    let rest = Rest::of(float);
    for (group, out) in source.chunks(GROUP * float.bytes()).zip(out.chunks_exact_mut(rest.bits)) {
        let elements = group.chunks_exact(float.bytes()).enumerate();
        let bits = |element: &[u8]| float.sign_fraction(float.read(element)) >> (8 * rest.bytes);
        let word = elements.fold(0, |word, (i, element)| word | bits(element) << (rest.bits * i));
        out.copy_from_slice(&word.to_le_bytes()[..rest.bits]);
    }
}

/// Decodes to little-endian bytes.
///
/// # Errors
/// The codes of coded rows do not use exactly their stored bits.
pub fn decode<B: AsRef<[u8]> + Sync>(tensor: &ExponentsTensor<B>) -> Result<Vec<u8>, CodecError> {
    let mut out = zeroed(tensor.grid().elements() * tensor.float.bytes());
    decode_into(tensor, &mut out)?;
    Ok(out)
}

/// Decodes into `out` on the current rayon pool.
///
/// # Errors
/// `out` does not have the size of the matrix, or the errors of [`decode`].
pub fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &ExponentsTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out_bytes(tensor.float, tensor.grid(), out)?;
    let rest = Fractions { float: tensor.float, bytes: tensor.bytes.as_ref(), bits: tensor.bits.as_ref() };
    decode_rows(&tensor.exponents, &rest, out)
}

/// Sign and fraction of all elements, joined with the exponents.
struct Fractions<'a> {
    float: Float,
    bytes: &'a [u8],
    bits: &'a [u8],
}

impl Join for Fractions<'_> {
    fn bytes(&self) -> usize {
        self.float.bytes()
    }

    #[inline(always)]
    fn join(&self, first: usize, exponents: &[u8], out: &mut [u8]) {
        with_float!(join_run(self.float, self, first, exponents, out));
    }
}

/// Joins consecutive elements, of which `first` is the index of the first.
#[inline(always)]
fn join_run(float: Float, fractions: &Fractions<'_>, first: usize, exponents: &[u8], out: &mut [u8]) {
    let size = float.bytes();
    // A row need not begin with a whole group: join single elements up to one, then whole groups, then the rest.
    let ahead = (first.next_multiple_of(GROUP) - first).min(exponents.len());
    let behind = ahead + (exponents.len() - ahead) / GROUP * GROUP;
    for i in (0..ahead).chain(behind..exponents.len()) {
        join_some::<1>(float, fractions, first + i, &exponents[i..], &mut out[i * size..]);
    }
    for i in (ahead..behind).step_by(GROUP) {
        join_some::<GROUP>(float, fractions, first + i, &exponents[i..], &mut out[i * size..]);
    }
}

/// Joins `COUNT` elements of one group.
///
/// This is a function because a closure was called for each element without knowing the type, which made decoding 12 to
/// 19 times as slow. Inlined, lengths and shifts are constants.
#[inline(always)]
fn join_some<const COUNT: usize>(
    float: Float,
    fractions: &Fractions<'_>,
    first: usize,
    exponents: &[u8],
    out: &mut [u8],
) {
    let (rest, size) = (Rest::of(float), float.bytes());
    let mut group = [0; 4];
    group[..rest.bits].copy_from_slice(&fractions.bits[first / GROUP * rest.bits..][..rest.bits]);
    let upper = u32::from_le_bytes(group) >> (rest.bits * (first % GROUP));
    let (lower, out) = (&fractions.bytes[first * rest.bytes..][..COUNT * rest.bytes], &mut out[..COUNT * size]);
    for (i, &exponent) in exponents[..COUNT].iter().enumerate() {
        let mut bits = [0; 4];
        bits[..rest.bytes].copy_from_slice(&lower[i * rest.bytes..][..rest.bytes]);
        let upper = upper >> (rest.bits * i) & ((1 << rest.bits) - 1);
        let sign_fraction = u32::from_le_bytes(bits) | upper << (8 * rest.bytes);
        out[i * size..][..size].copy_from_slice(&float.join(sign_fraction, exponent).to_le_bytes()[..size]);
    }
}

/// A tensor of this encoding. `B` owns (`Vec<u8>`) or borrows (`&[u8]`) the section bytes.
///
/// Construction validates the sections (`docs/format.md` A.12), so every offset in them can be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct ExponentsTensor<B> {
    float: Float,
    exponents: CodedExponents<B>,
    bytes: B,
    bits: B,
}

impl<B: AsRef<[u8]>> ExponentsTensor<B> {
    /// Reads and validates stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, or does not satisfy an invariant that a reader must check.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let format = fixed_section(section(Section::FLOAT_FORMAT), Section::FLOAT_FORMAT, grid)?;
        let float = float_of(format)?;
        let (bytes, bits) = (section(Section::FRACTION_BYTES), section(Section::FRACTION_BITS));
        let rest = Rest::of(float);
        let ([all_bytes, all_bits], [used_bytes, used_bits]) =
            (rest.section_bytes(grid), rest.used_bytes(grid.elements()));
        filled(Section::FRACTION_BYTES, bytes.as_ref(), used_bytes, all_bytes)?;
        filled(Section::FRACTION_BITS, bits.as_ref(), used_bits, all_bits)?;
        let in_group = grid.elements() % GROUP;
        if in_group > 0 && rest.bits > 0 {
            let mut word = [0; 4];
            word[..rest.bits].copy_from_slice(&bits.as_ref()[used_bits - rest.bits..used_bits]);
            if u32::from_le_bytes(word) >> (rest.bits * in_group) != 0 {
                return Err(not_zero(Section::FRACTION_BITS));
            }
        }
        let exponents = CodedExponents::from_sections(grid, section)?;
        let most = u8::MAX >> (8 - float.exponent_bits());
        for (section, exponents) in [
            (Section::PALETTE, exponents.code().palette().exponents()),
            (Section::VERBATIM_EXPONENTS, exponents.verbatim_exponents()),
        ] {
            if exponents.iter().copied().max().is_some_and(|exponent| exponent > most) {
                let reason = "it has an exponent that the type does not have";
                return Err(CodecError::Code { section: section.name(), reason });
            }
        }
        Ok(Self { float, exponents, bytes, bits })
    }

    /// The matrix's shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.exponents.grid()
    }

    /// Type of the elements.
    pub fn float(&self) -> Float {
        self.float
    }

    /// The coded exponents of the tensor.
    pub fn exponents(&self) -> &CodedExponents<B> {
        &self.exponents
    }

    /// The section `fraction_bytes`.
    pub fn fraction_bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// The section `fraction_bits`.
    pub fn fraction_bits(&self) -> &[u8] {
        self.bits.as_ref()
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        match section {
            Section::FLOAT_FORMAT => Some(Cow::Owned(format_of(self.float).to_vec())),
            Section::FRACTION_BYTES => Some(Cow::Borrowed(self.bytes.as_ref())),
            Section::FRACTION_BITS => Some(Cow::Borrowed(self.bits.as_ref())),
            _ => self.exponents.section(section),
        }
    }

    /// Bytes of all sections together.
    pub fn coded_bytes(&self) -> u64 {
        Exponents::SECTIONS.iter().filter_map(|&s| self.section(s)).map(|b| b.len() as u64).sum()
    }

    /// The typed view of a stored tensor; `None` if it has another encoding. To keep the tensor, pass
    /// [`StoredTensor::borrowed`].
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(EncodingId::EXPONENTS)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }

    /// Assembles the oracle's output without validation.
    pub(crate) fn from_parts(float: Float, exponents: CodedExponents<B>, bytes: B, bits: B) -> Self {
        Self { float, exponents, bytes, bits }
    }
}

/// The `float_format` section of a type.
pub(crate) fn format_of(float: Float) -> [u8; FLOAT_FORMAT_BYTES] {
    let mut format = [0; FLOAT_FORMAT_BYTES];
    (format[0], format[1]) = (float.exponent_bits() as u8, float.fraction_bits() as u8);
    format
}

/// The type of a `float_format` section.
fn float_of(format: [u8; FLOAT_FORMAT_BYTES]) -> Result<Float, CodecError> {
    let found = Exponents::FLOATS.iter().copied().find(|&float| format_of(float) == format);
    let reason = "it must be 4 and 3, 5 and 2, 5 and 10 or 8 and 23 bits, and zeros";
    found.ok_or(CodecError::Code { section: Section::FLOAT_FORMAT.name(), reason })
}

/// Checks that a section has the expected size, and zeros after the used bytes.
fn filled(section: Section, bytes: &[u8], used: usize, expected: usize) -> Result<(), CodecError> {
    if bytes.len() != expected {
        let (expected, got) = (expected as u64, bytes.len() as u64);
        return Err(CodecError::SectionBytes { section: section.name(), expected, got });
    }
    if bytes[used..].iter().any(|&byte| byte != 0) { Err(not_zero(section)) } else { Ok(()) }
}

fn not_zero(section: Section) -> CodecError {
    CodecError::Code { section: section.name(), reason: "its padding must be 0" }
}

impl ExponentsTensor<Vec<u8>> {
    /// The sections in stored order.
    fn into_sections(self) -> Vec<Vec<u8>> {
        let mut sections = vec![format_of(self.float).to_vec()];
        sections.extend(self.exponents.into_sections());
        sections.extend([self.bytes, self.bits]);
        sections
    }
}

impl From<ExponentsTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: ExponentsTensor<Vec<u8>>) -> Self {
        Self::trusted(EncodingId::EXPONENTS, tensor.grid(), tensor.into_sections())
    }
}

debug_sizes!(ExponentsTensor, Exponents::SECTIONS);
