//! Packed pages of the KV cache: 12 bits per value, lossless. The slow encoder and decoder here define the format.
//!
//! A unit is K or V of one KV head in one page of one layer: 64 tokens of `head_dim` values. `head_dim` is a multiple
//! of 16 in 16..=128, and `steps` is `head_dim / 16`.
//!
//! ```text
//! page      [kv_head][tile 0..4][K | V][24 * head_dim bytes]; a tile is 16 tokens
//! operand   3 * steps words of 32 bits for each of 32 lanes; words 3s, 3s + 1 and 3s + 2 are the quad of step s
//! word q    of lane l: 16-byte groups of 4 words, `(q / 4) * 512 + l * 16 + (q % 4) * 4`; a remainder of 1, 2 or 3
//!           words is a group of 4, of 8, or of 8 and then 4 bytes per lane
//! record    [page][kv_head][K | V] of 32 bytes (head_dim <= 80) or 48 bytes
//! bf16      [unit][tile 0..4][step][lane][4 registers] of 32 bits: a unit that does not pack
//! ```
//!
//! A quad is the four registers that a lane of `mma.m16n8k16` needs ([`place`]), so a decoder needs no `ldmatrix`. Each
//! bf16 becomes sign, nibble and mantissa. The nibble is the exponent minus the base of the step, 0 for an escape:
//!
//! ```text
//! half    15    14..11       10..7    6..0
//!         sign  P3's piece   nibble   mantissa
//! w0: P3 bits 10..7 (nibble)         w1: P3 bits 6..3         w2: P3 bits 15 and 2..0, rotated
//! ```
//!
//! Step `s` is channels `16 * s..16 * (s + 1)` of K or V. Its base is its largest exponent, or 15 if that is less,
//! minus 15. A value with an exponent below the base is an escape: the record holds its position and its exponent. A
//! unit is stored as a bf16 unit if an escape has no code, or if it has more escapes than its record has slots.
//!
//! ```text
//! record    8 bases, kind, 0, 0, 0, then by kind 4 bytes, then slots of 2 bytes up to the end; unused bytes are zero
//! kind      0: packed; the 4 bytes are the number of escapes in tiles 0..=i
//!           1: bf16; the 4 bytes are the index of the bf16 unit, little-endian; the bases are 0
//!           2: lost: no bf16 unit was free; the 4 bytes and the bases are 0
//! slot      little-endian; bits 0..11: (step * 32 + lane) * 8 + register * 2 + (1: the high half); bits 11..16: code
//! code      0..=30: exponent base - 31 + code;  31: exponent 0
//! ```
//!
//! Slots are ordered by tile and then by element.

use super::{KvHalf, PAGE_TOKENS};

#[cfg(test)]
mod tests;

/// Tokens of a tile: the rows of V, or the columns of K transposed, of one `mma`.
pub const TILE_TOKENS: u32 = 16;

/// Tiles of a page.
pub const PAGE_TILES: u32 = PAGE_TOKENS / TILE_TOKENS;

/// The largest `head_dim`: an element of a tile has 11 bits in a slot.
pub const HEAD_DIM_MAX: u32 = 128;

/// The largest base: `base + 15` is the largest exponent, 255.
pub const BASE_MAX: u8 = 240;

/// Steps of the largest head, and bases of a record.
pub const STEPS_MAX: usize = (HEAD_DIM_MAX / STEP) as usize;

/// The base of each step of a unit; 0 for steps that a head does not have.
pub type Bases = [u8; STEPS_MAX];

/// [`Record`] of a unit whose tiles hold its values.
pub const KIND_PACKED: u8 = 0;
/// [`Record`] of a unit whose values are in a bf16 unit.
pub const KIND_BF16: u8 = 1;
/// [`Record`] of a unit whose values were not stored, because no bf16 unit was free.
pub const KIND_LOST: u8 = 2;

/// Byte of a record that holds its kind.
pub const RECORD_KIND: usize = STEPS_MAX;
/// First of the four bytes of a record that hold the number of escapes up to each tile, or the index of a bf16 unit.
pub const RECORD_ENDS: usize = 12;
/// Bytes of a record before its slots.
pub const RECORD_HEAD: usize = 16;

const LANES: u32 = 32;
/// Channels of a step: the k dimension of K, the n dimension of V.
const STEP: u32 = 16;
/// Exponents of a window after the first.
const WINDOW_LAST: u32 = 15;
/// Codes for exponents below the window, which end at `base - 1`.
const CODES_BELOW: u32 = 31;
/// Code of exponent 0: zeros and subnormals.
const CODE_ZERO: u32 = 31;
const ELEMENT_BITS: u32 = 11;

/// Bytes of one tile of K, or of V, of one KV head.
pub const fn tile_bytes(head_dim: u32) -> u32 {
    24 * head_dim
}

/// Bytes of K and V of one KV head in one page.
pub const fn page_head_bytes(head_dim: u32) -> u32 {
    2 * PAGE_TILES * tile_bytes(head_dim)
}

/// Bytes of the record of one unit.
pub const fn record_bytes(head_dim: u32) -> u32 {
    if head_dim <= 80 { 32 } else { 48 }
}

/// Returns how many escapes fit in the record of one unit.
pub const fn slots(head_dim: u32) -> u32 {
    (record_bytes(head_dim) - RECORD_HEAD as u32) / 2
}

/// Bytes of a bf16 unit.
pub const fn unit_bytes(head_dim: u32) -> u32 {
    2 * PAGE_TOKENS * head_dim
}

/// Returns whether pages with heads of this size can be packed.
pub const fn takes(head_dim: u32) -> bool {
    head_dim >= STEP && head_dim <= HEAD_DIM_MAX && head_dim.is_multiple_of(STEP)
}

/// Returns the byte offset of word `q` (`0..3 * head_dim / 16`) of a lane (`0..32`) in a tile of K or V.
///
/// ```
/// # use unweight_codegen::kv::packed::word_offset;
/// // Three words of 16 elements: 8 bytes of every lane, then 4 bytes of every lane.
/// assert_eq!([0, 1, 2].map(|q| word_offset(16, q, 5)), [40, 44, 256 + 20]);
/// // 24 words are six groups of 16 bytes of every lane.
/// assert_eq!(word_offset(128, 23, 31), 5 * 512 + 31 * 16 + 12);
/// ```
pub const fn word_offset(head_dim: u32, q: u32, lane: u32) -> u32 {
    let words = 3 * (head_dim / STEP);
    let whole = words / 4 * 4;
    if q < whole {
        return q / 4 * 512 + lane * 16 + q % 4 * 4;
    }
    let (rest, i) = (whole * 128, q - whole);
    match words % 4 {
        1 => rest + lane * 4,
        3 if i == 2 => rest + 256 + lane * 4,
        _ => rest + lane * 8 + i * 4,
    }
}

/// Returns the token in its tile and the element in its head of one half of a register of an `mma.m16n8k16` operand.
///
/// `step` selects 16 elements of the head, `register` is 0..4, and `high` selects the half. The layout of K is that of
/// `ldmatrix.x4`, the layout of V that of `ldmatrix.x4.trans`.
///
/// ```
/// # use unweight_codegen::kv::{KvHalf, packed::place};
/// // Lane 5 is row 1, column pair 1. A register of K holds two elements of a token, one of V two tokens.
/// assert_eq!([false, true].map(|high| place(KvHalf::Key, 0, 5, 2, high)), [(9, 2), (9, 3)]);
/// assert_eq!([false, true].map(|high| place(KvHalf::Value, 0, 5, 2, high)), [(2, 9), (3, 9)]);
/// ```
pub const fn place(half: KvHalf, step: u32, lane: u32, register: u32, high: bool) -> (u32, u32) {
    let (group, pair) = (lane / 4, lane % 4 * 2 + high as u32);
    match half {
        KvHalf::Key => (group + register / 2 * 8, step * STEP + register % 2 * 8 + pair),
        KvHalf::Value => (register % 2 * 8 + pair, step * STEP + register / 2 * 8 + group),
    }
}

/// A unit as the kernels store it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedUnit {
    /// [`tile_bytes`] each. Zeros if the unit is not packed; the format does not specify them.
    pub tiles: [Vec<u8>; PAGE_TILES as usize],
    /// [`record_bytes`]. The index of the bf16 unit, if there is one, is 0.
    pub record: Vec<u8>,
    /// [`unit_bytes`], if the unit does not pack.
    pub bf16: Option<Vec<u8>>,
}

/// The reason why bytes are not a valid unit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvPageError {
    /// A head size that cannot be packed.
    #[error("head_dim = {head_dim} has no packed KV pages; use a multiple of 16 in 16..=128, or a BF16 KV cache")]
    HeadDim {
        /// Elements of a head.
        head_dim: u32,
    },
    /// A buffer of the wrong size.
    #[error("{what} of a packed KV page: {bytes} bytes instead of {expected}; pass the whole buffer")]
    Size {
        /// The name of the buffer.
        what: &'static str,
        /// Its size in bytes.
        bytes: usize,
        /// The required size in bytes.
        expected: usize,
    },
    /// A record that no encoder writes.
    #[error("record of a packed KV page: {what} is {value}, the limit is {limit}; recompute the page")]
    Record {
        /// The name of the field.
        what: &'static str,
        /// The value of the field.
        value: u32,
        /// The largest valid value.
        limit: u32,
    },
    /// Slots of a tile that are not in ascending order of their elements.
    #[error(
        "record of a packed KV page: element {element} follows element {before} of the same tile; recompute the page"
    )]
    Order {
        /// Element of the first slot.
        before: u32,
        /// Element of the next slot.
        element: u32,
    },
    /// The record refers to a bf16 unit, but none was passed.
    #[error("the values of this packed KV page are in BF16 unit {index}; pass the bytes of that unit")]
    UnitMissing {
        /// Index of the unit.
        index: u32,
    },
    /// The record says that the values were not stored.
    #[error("the values of this packed KV page were not stored, because no BF16 unit was free; recompute the page")]
    Lost,
}

impl KvPageError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::HeadDim { .. } => "kv-page-head-dim",
            Self::Size { .. } => "buffer-size-mismatch",
            Self::Record { .. } | Self::Order { .. } => "kv-page-invalid",
            Self::UnitMissing { .. } => "kv-page-unit-missing",
            Self::Lost => "kv-page-lost",
        }
    }
}

fn exponent(value: u16) -> u32 {
    u32::from(value >> 7 & 0xff)
}

/// Whether `exponent` has a nibble, an escape code, or neither.
enum Coded {
    Nibble(u32),
    Escape(u32),
    No,
}

fn code(exponent: u32, base: u32) -> Coded {
    if (base..=base + WINDOW_LAST).contains(&exponent) {
        Coded::Nibble(exponent - base)
    } else if exponent == 0 {
        Coded::Escape(CODE_ZERO)
    } else if exponent < base && exponent + CODES_BELOW >= base {
        Coded::Escape(exponent + CODES_BELOW - base)
    } else {
        Coded::No
    }
}

/// The inverse of [`code`].
fn exponent_of(code: u32, base: u32) -> Result<u8, KvPageError> {
    if code == CODE_ZERO {
        return Ok(0);
    }
    let below = CODES_BELOW - code;
    check("distance of an escape below the base", below, base.saturating_sub(1))?;
    // The result is below `base`, which fits a u8.
    Ok((base - below) as u8)
}

/// Returns the bases of a unit with these values, bf16 `[64 tokens][head_dim]`; `None` if the unit does not pack.
///
/// # Panics
/// If [`takes`] rejects `head_dim`, or `values` has another length.
pub fn choose_bases(head_dim: u32, values: &[u16]) -> Option<Bases> {
    assert!(takes(head_dim), "head_dim = {head_dim}");
    assert_eq!(values.len(), (PAGE_TOKENS * head_dim) as usize, "[64][head_dim] values");
    let step_of = |at: usize| at % head_dim as usize / STEP as usize;
    let mut largest = [WINDOW_LAST; STEPS_MAX];
    for (at, value) in values.iter().enumerate() {
        let step = &mut largest[step_of(at)];
        *step = exponent(*value).max(*step);
    }
    let bases = largest.map(|largest| largest - WINDOW_LAST);
    let mut escapes = 0;
    for (at, value) in values.iter().enumerate() {
        match code(exponent(*value), bases[step_of(at)]) {
            Coded::Nibble(_) => {}
            Coded::Escape(_) => escapes += 1,
            Coded::No => return None,
        }
    }
    // A base is at most 255 - 15.
    (escapes <= slots(head_dim)).then(|| bases.map(|base| base as u8))
}

/// Packs the halves `F` of P0..P3, two bf16 per word, into three words.
fn weave(f: [u32; 4]) -> [u32; 3] {
    [f[0] | f[3] << 4 & 0x7800_7800, f[1] | f[3] << 8 & 0x7800_7800, f[2] | f[3].rotate_right(4) & 0x7800_7800]
}

/// The inverse of [`weave`].
fn unweave(w: [u32; 3]) -> [u32; 4] {
    let sign_mantissa = w.map(|word| word & 0x87ff_87ff);
    let last = w[0] >> 4 & 0x0780_0780 | w[1] >> 8 & 0x0078_0078 | w[2].rotate_left(4) & 0x8007_8007;
    [sign_mantissa[0], sign_mantissa[1], sign_mantissa[2], last]
}

/// Encodes K or V of one KV head in one page.
///
/// `values`: bf16 `[64 tokens][head_dim]`.
///
/// # Panics
/// If [`takes`] rejects `head_dim`, or `values` has another length.
pub fn encode_unit(head_dim: u32, half: KvHalf, values: &[u16]) -> EncodedUnit {
    match choose_bases(head_dim, values) {
        Some(bases) => encode_packed(head_dim, half, values, bases),
        None => encode_bf16(head_dim, half, values),
    }
}

fn encode_packed(head_dim: u32, half: KvHalf, values: &[u16], bases: Bases) -> EncodedUnit {
    let steps = head_dim / STEP;
    let mut record = [bases.as_slice(), &[KIND_PACKED, 0, 0, 0], &[0; 4]].concat();
    let tiles = std::array::from_fn(|tile| {
        let mut bytes = vec![0; tile_bytes(head_dim) as usize];
        for step in 0..steps {
            for lane in 0..LANES {
                let quad = std::array::from_fn(|register| {
                    [false, true].into_iter().fold(0, |word, high| {
                        let value = at(head_dim, half, values, tile as u32, (step, lane, register as u32, high));
                        let nibble = match code(exponent(value), bases[step as usize].into()) {
                            Coded::Nibble(nibble) => nibble,
                            Coded::Escape(code) => {
                                let element = (step * LANES + lane) * 8 + register as u32 * 2 + u32::from(high);
                                // 11 bits for the element, 5 for the code.
                                record.extend(((code << ELEMENT_BITS | element) as u16).to_le_bytes());
                                0
                            }
                            Coded::No => unreachable!("every value has a code with the chosen bases"),
                        };
                        let f = u32::from(value & 0x807f) | nibble << 7;
                        word | f << (16 * u32::from(high))
                    })
                });
                for (q, word) in (3 * step..).zip(weave(quad)) {
                    put(&mut bytes, word_offset(head_dim, q, lane), word);
                }
            }
        }
        // At most 16 slots.
        record[RECORD_ENDS + tile] = ((record.len() - RECORD_HEAD) / 2) as u8;
        bytes
    });
    record.resize(record_bytes(head_dim) as usize, 0);
    EncodedUnit { tiles, record, bf16: None }
}

fn encode_bf16(head_dim: u32, half: KvHalf, values: &[u16]) -> EncodedUnit {
    let mut record = vec![0; record_bytes(head_dim) as usize];
    record[RECORD_KIND] = KIND_BF16;
    let mut unit = Vec::with_capacity(unit_bytes(head_dim) as usize);
    for (tile, position) in positions(head_dim) {
        unit.extend(at(head_dim, half, values, tile, position).to_le_bytes());
    }
    let tiles = std::array::from_fn(|_| vec![0; tile_bytes(head_dim) as usize]);
    EncodedUnit { tiles, record, bf16: Some(unit) }
}

/// Step, lane, register, high half.
type Position = (u32, u32, u32, bool);

/// All halves of all registers of a unit with their tiles, in the order of a bf16 unit.
fn positions(head_dim: u32) -> impl Iterator<Item = (u32, Position)> {
    let in_tile = head_dim / STEP * LANES * 8;
    (0..PAGE_TILES * in_tile).map(move |index| {
        let (tile, element) = (index / in_tile, index % in_tile);
        (tile, (element / (LANES * 8), element / 8 % LANES, element / 2 % 4, element % 2 == 1))
    })
}

/// Returns the index in `[64 tokens][head_dim]`.
fn index(head_dim: u32, half: KvHalf, tile: u32, (step, lane, register, high): Position) -> usize {
    let (token, element) = place(half, step, lane, register, high);
    ((tile * TILE_TOKENS + token) * head_dim + element) as usize
}

fn at(head_dim: u32, half: KvHalf, values: &[u16], tile: u32, position: Position) -> u16 {
    values[index(head_dim, half, tile, position)]
}

fn put(bytes: &mut [u8], offset: u32, word: u32) {
    bytes[offset as usize..][..4].copy_from_slice(&word.to_le_bytes());
}

fn get(bytes: &[u8], offset: u32) -> u32 {
    let bytes = &bytes[offset as usize..][..4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn check_size(what: &'static str, bytes: &[u8], expected: u32) -> Result<(), KvPageError> {
    let expected = expected as usize;
    if bytes.len() == expected { Ok(()) } else { Err(KvPageError::Size { what, bytes: bytes.len(), expected }) }
}

fn check(what: &'static str, value: u32, limit: u32) -> Result<(), KvPageError> {
    if value <= limit { Ok(()) } else { Err(KvPageError::Record { what, value, limit }) }
}

/// The parsed record of a unit, which says where its values are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The tiles hold the values.
    Packed {
        /// The exponent of nibble 0 in each step.
        bases: Bases,
        /// The escapes of each tile, in the order of the slots.
        escapes: [Vec<Escape>; PAGE_TILES as usize],
    },
    /// A bf16 unit holds the values.
    Bf16 {
        /// Index of the unit.
        index: u32,
    },
    /// The values were not stored.
    Lost,
}

/// A value below the window of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Escape {
    /// `(step * 32 + lane) * 8 + register * 2 + (1 for the high half)`, in the escape's tile.
    pub element: u32,
    /// The exponent of the value.
    pub exponent: u8,
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    /// [`KvPageError::HeadDim`], [`KvPageError::Size`]; [`KvPageError::Record`] if no encoder writes these bytes.
    pub fn parse(head_dim: u32, bytes: &[u8]) -> Result<Self, KvPageError> {
        if !takes(head_dim) {
            return Err(KvPageError::HeadDim { head_dim });
        }
        check_size("record", bytes, record_bytes(head_dim))?;
        let kind = bytes[RECORD_KIND];
        check("kind", kind.into(), KIND_LOST.into())?;
        let mut bases = [0; STEPS_MAX];
        bases.copy_from_slice(&bytes[..STEPS_MAX]);
        for (step, base) in (0..).zip(bases) {
            let used = kind == KIND_PACKED && step < head_dim / STEP;
            check("base of a step", base.into(), if used { BASE_MAX.into() } else { 0 })?;
        }
        for byte in &bytes[RECORD_KIND + 1..RECORD_ENDS] {
            check("a byte after the kind", (*byte).into(), 0)?;
        }
        if kind == KIND_PACKED {
            return Ok(Self::Packed { bases, escapes: escapes(head_dim, &bases, bytes)? });
        }
        let index = get(bytes, RECORD_ENDS as u32);
        for byte in &bytes[RECORD_HEAD..] {
            check("a byte of an unused slot", (*byte).into(), 0)?;
        }
        if kind == KIND_BF16 {
            return Ok(Self::Bf16 { index });
        }
        check("index of a lost unit", index, 0)?;
        Ok(Self::Lost)
    }
}

/// The escapes of each tile of a packed unit.
fn escapes(head_dim: u32, bases: &Bases, record: &[u8]) -> Result<[Vec<Escape>; PAGE_TILES as usize], KvPageError> {
    let slots = record[RECORD_HEAD..].chunks_exact(2).map(|slot| u32::from(u16::from_le_bytes([slot[0], slot[1]])));
    let slots: Vec<u32> = slots.collect();
    let mut found: [Vec<Escape>; PAGE_TILES as usize] = Default::default();
    let mut first = 0;
    for (tile, tile_escapes) in found.iter_mut().enumerate() {
        let end = record[RECORD_ENDS + tile];
        check("escapes up to a tile", end.into(), slots.len() as u32)?;
        check("escapes up to the tile before", first as u32, end.into())?;
        for slot in &slots[first..end.into()] {
            let (element, code) = (slot & ((1 << ELEMENT_BITS) - 1), slot >> ELEMENT_BITS);
            check("element of an escape", element, TILE_TOKENS * head_dim - 1)?;
            if let Some(&Escape { element: before, .. }) = tile_escapes.last()
                && element <= before
            {
                return Err(KvPageError::Order { before, element });
            }
            let base = bases[(element / (STEP * TILE_TOKENS)) as usize];
            tile_escapes.push(Escape { element, exponent: exponent_of(code, base.into())? });
        }
        first = end.into();
    }
    for slot in &slots[first..] {
        check("an unused slot", *slot, 0)?;
    }
    Ok(found)
}

/// Decodes K or V of one KV head in one page to bf16 `[64 tokens][head_dim]`.
///
/// `tiles` and `record` are the output of [`encode_unit`], `bf16` the bytes of the bf16 unit that the record refers to.
/// The tiles of a unit with a bf16 unit are not read.
///
/// # Errors
/// [`KvPageError`] if no encoder writes these bytes, the bf16 unit is missing, or the unit was not stored.
pub fn decode_unit(
    head_dim: u32,
    half: KvHalf,
    tiles: &[Vec<u8>; PAGE_TILES as usize],
    record: &[u8],
    bf16: Option<&[u8]>,
) -> Result<Vec<u16>, KvPageError> {
    let record = Record::parse(head_dim, record)?;
    for tile in tiles {
        check_size("tile", tile, tile_bytes(head_dim))?;
    }
    let mut values = vec![0; (PAGE_TOKENS * head_dim) as usize];
    match record {
        Record::Packed { bases, escapes } => {
            for (tile, (bytes, escapes)) in (0..).zip(tiles.iter().zip(&escapes)) {
                let decoded = decode_tile(head_dim, bytes, &bases, escapes);
                for (at, position) in positions(head_dim).filter(|(of, _)| *of == 0).enumerate() {
                    values[index(head_dim, half, tile, position.1)] = decoded[at];
                }
            }
        }
        Record::Bf16 { index: unit } => {
            let unit = bf16.ok_or(KvPageError::UnitMissing { index: unit })?;
            check_size("BF16 unit", unit, unit_bytes(head_dim))?;
            for ((tile, position), value) in positions(head_dim).zip(unit.chunks_exact(2)) {
                values[index(head_dim, half, tile, position)] = u16::from_le_bytes([value[0], value[1]]);
            }
        }
        Record::Lost => return Err(KvPageError::Lost),
    }
    Ok(values)
}

/// Returns the halves of a tile, in the element order of slots.
fn decode_tile(head_dim: u32, bytes: &[u8], bases: &Bases, escapes: &[Escape]) -> Vec<u16> {
    let mut values = Vec::with_capacity((TILE_TOKENS * head_dim) as usize);
    for (step, base) in (0..head_dim / STEP).zip(bases) {
        let shift = u32::from(*base) * 0x0080_0080;
        for lane in 0..LANES {
            let words = [0, 1, 2].map(|i| get(bytes, word_offset(head_dim, 3 * step + i, lane)));
            // A nibble plus a base of at most 240 does not carry into the sign.
            let registers = unweave(words).map(|f| f + shift);
            values.extend(registers.iter().flat_map(|register| [*register as u16, (register >> 16) as u16]));
        }
    }
    for Escape { element, exponent } in escapes {
        let value = &mut values[*element as usize];
        *value = *value & 0x807f | u16::from(*exponent) << 7;
    }
    values
}
