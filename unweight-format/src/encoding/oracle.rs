//! The slow, obvious codec: one element, one bit at a time, directly from `docs/format.md`. Tests compare the fast
//! codec with it.

use crate::{
    Code, CodeLimit, CodecError, CompactTensor, ExponentsTensor, FloatMatrix, HuffmanTensor, Matrix, PackedTensor,
    PaletteTensor, RansTensor, Section, StoredTensor, TileMetadata, bf16,
    bitstream::{BitReader, BitWriter},
    compact,
    histogram::Histogram,
    huffman::CodedExponents,
    layout::{DENSE_TILE_BYTES, ROW_BITS_MAX, ROW_BITS_MIN, TILE, WORDS_ALIGN},
    packed::{self, Unpackable, Window},
    palette::Palette,
    rans::{self, Symbols},
};

/// Encodes the Huffman encoding element by element.
///
/// # Errors
/// As [`crate::huffman::encode`].
pub fn encode_huffman(matrix: Matrix<'_>, limit: CodeLimit) -> Result<HuffmanTensor<Vec<u8>>, CodecError> {
    let (code, [words, row_lengths, metadata, verbatim]) = encode_exponents_of(matrix.into(), limit)?;
    let sections = [sign_mantissa(matrix), words, row_lengths, metadata, verbatim];
    Ok(HuffmanTensor::from_encoder(matrix.grid(), code, sections))
}

/// Encodes a type other than BF16 element by element, and its fractions bit by bit.
///
/// # Errors
/// As [`exponents::encode`](super::exponents::encode).
pub fn encode_exponents(matrix: FloatMatrix<'_>, limit: CodeLimit) -> Result<ExponentsTensor<Vec<u8>>, CodecError> {
    let (float, grid) = (matrix.float(), matrix.grid());
    let (code, sections) = encode_exponents_of(matrix, limit)?;
    let exponents = CodedExponents::from_encoder(grid, code, sections);
    let elements = || (0..grid.rows()).flat_map(|row| (0..grid.cols()).map(move |col| (row, col)));
    let rests = elements().map(|(row, col)| float.sign_fraction(matrix.get(row, col)));
    let bits = 1 + float.fraction_bits();
    let (mut lower, mut upper) = (BitWriter::default(), BitWriter::default());
    for rest in rests {
        for bit in 0..bits {
            let writer = if bit < bits / 8 * 8 { &mut lower } else { &mut upper };
            writer.push(rest >> bit & 1, 1);
        }
    }
    // The last group has eight elements, too.
    (grid.elements()..grid.elements().next_multiple_of(8)).for_each(|_| upper.push(0, bits % 8));
    let padded = |writer: BitWriter| {
        let mut bytes: Vec<u8> = writer.into_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(4 * WORDS_ALIGN), 0);
        bytes
    };
    Ok(ExponentsTensor::from_parts(float, exponents, padded(lower), padded(upper)))
}

/// The code of a matrix, with its coded words, row lengths, metadata and verbatim rows.
fn encode_exponents_of(matrix: FloatMatrix<'_>, limit: CodeLimit) -> Result<(Code, [Vec<u8>; 4]), CodecError> {
    let grid = matrix.grid();
    let code = code_of(matrix, limit);
    let index = code.palette().index();
    let mut writer = BitWriter::default();
    let (mut row_lengths, mut metadata, mut verbatim) = (Vec::new(), Vec::new(), Vec::new());
    for tile_row in 0..grid.tile_rows() {
        for tile_col in 0..grid.tile_cols() {
            let start = u32::try_from(writer.bits() / 32)
                .map_err(|_| CodecError::TooManyWords { words: writer.bits() / 32 })?;
            let offset = (verbatim.len() / TILE) as u32;
            let mut bitmask = 0u64;
            for row in 0..TILE {
                match row_of(matrix, &code, tile_row, tile_col, row) {
                    Row::Pad => row_lengths.push(0),
                    Row::Verbatim(exponents) => {
                        row_lengths.push(0);
                        bitmask |= 1 << row;
                        verbatim.extend(exponents);
                    }
                    Row::Coded(exponents, bits) => {
                        row_lengths.push((bits - ROW_BITS_MIN) as u8);
                        for exponent in exponents {
                            let i = index[usize::from(exponent)].expect("a coded row is in the palette");
                            let (value, length) = code.code(i.into());
                            writer.push(value, length);
                        }
                    }
                }
            }
            writer.align_to_word();
            metadata.extend(TileMetadata::new(start, offset, bitmask).to_bytes());
        }
    }
    let mut words = writer.into_words();
    words.resize(words.len().next_multiple_of(WORDS_ALIGN), 0);
    let encoded = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    Ok((code, [encoded, row_lengths, metadata, verbatim]))
}

/// Encodes the palette encoding element by element.
///
/// # Errors
/// As [`crate::palette::encode`].
pub fn encode_palette(matrix: Matrix<'_>, limit: CodeLimit) -> Result<PaletteTensor<Vec<u8>>, CodecError> {
    let grid = matrix.grid();
    let code = code_of(matrix.into(), limit);
    let index = code.palette().index();
    let (mut packed, mut metadata, mut verbatim) = (Vec::new(), Vec::new(), Vec::new());
    for tile_row in 0..grid.tile_rows() {
        for tile_col in 0..grid.tile_cols() {
            let offset = (verbatim.len() / TILE) as u32;
            let mut bitmask = 0u64;
            for row in 0..TILE {
                match row_of(matrix.into(), &code, tile_row, tile_col, row) {
                    Row::Pad => packed.extend([0; TILE / 2]),
                    Row::Verbatim(exponents) => {
                        packed.extend([0; TILE / 2]);
                        bitmask |= 1 << row;
                        verbatim.extend(exponents);
                    }
                    Row::Coded(exponents, _) => {
                        let nibble = |e: u8| index[usize::from(e)].expect("a coded row is in the palette");
                        packed.extend(exponents.chunks_exact(2).map(|e| nibble(e[0]) | nibble(e[1]) << 4));
                    }
                }
            }
            metadata.extend(TileMetadata::new(0, offset, bitmask).to_bytes());
        }
    }
    Ok(PaletteTensor::from_encoder(grid, *code.palette(), [sign_mantissa(matrix), packed, metadata, verbatim]))
}

/// Packs element by element, in the order of the records.
///
/// # Errors
/// As [`packed::pack`].
pub fn pack(matrix: Matrix<'_>) -> Result<PackedTensor<Vec<u8>>, Unpackable> {
    let grid = matrix.grid();
    packed::packable_shape(grid)?;
    let window = Window::covering(&histogram_of(matrix.into()))?;
    for (row, col) in (0..grid.rows()).flat_map(|row| (0..grid.cols()).map(move |col| (row, col))) {
        let weight = matrix.get(row, col);
        if window.nibble(bf16::exponent(weight)).is_none() && window.operand(weight).is_none() {
            return Err(Unpackable::Operand { row, col });
        }
    }
    let mut container = vec![0u8; grid.tiles() * packed::TILE_BYTES];
    let (mut heads, mut lists) = (Vec::new(), Vec::<u32>::new());
    for tile in 0..grid.tiles() {
        for block in 0..packed::ROW_BLOCKS {
            let mut records = Vec::new();
            for (step, register, lane, half) in element_positions() {
                let (row, col) = packed::element_at(block, step, lane, register, half);
                let weight = matrix.get(tile / grid.tile_cols() * TILE + row, tile % grid.tile_cols() * TILE + col);
                let nibble = window.nibble(bf16::exponent(weight)).unwrap_or_else(|| {
                    let operand = u32::from(window.operand(weight).expect("looked at above"));
                    let position = 4 * step + register;
                    records.push(operand | (lane as u32) << 16 | (position as u32) << 21 | (half as u32) << 25);
                    0
                });
                let packed_half = u32::from(weight & 0x807f | u16::from(nibble) << 7) << (16 * half);
                let parts: &[(usize, u32)] = match register {
                    3 => &[
                        (0, packed_half << 4 & packed::FREE),
                        (1, packed_half << 8 & packed::FREE),
                        (2, packed_half.rotate_right(4) & packed::FREE),
                    ],
                    _ => &[(register, packed_half)],
                };
                for &(word, bits) in parts {
                    let at = tile * packed::TILE_BYTES + packed::word_offset(block, 3 * step + word, lane);
                    container[at..at + 4].iter_mut().zip(bits.to_le_bytes()).for_each(|(byte, bits)| *byte |= bits);
                }
            }
            heads.push(match records.as_slice() {
                [] => 0,
                [one] => 1 << 30 | one,
                _ => 1 << 31 | lists.len() as u32,
            });
            if records.len() > 1 {
                lists.push(records.len() as u32);
                lists.extend(records);
            }
        }
    }
    lists.resize(lists.len().next_multiple_of(WORDS_ALIGN), 0);
    let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect();
    Ok(PackedTensor::from_parts(grid, window, container, bytes(&heads), bytes(&lists)).expect("canonical"))
}

/// The step, register, lane and half of every operand of a row block.
fn element_positions() -> impl Iterator<Item = (usize, usize, usize, usize)> {
    (0..packed::STEPS * 4 * packed::LANES * 2).map(|i| (i / 256, i / 64 % 4, i / 2 % 32, i % 2))
}

/// Unpacks element by element.
pub fn unpack<B: AsRef<[u8]>>(tensor: &PackedTensor<B>) -> Vec<u8> {
    let grid = tensor.grid();
    let base = u16::from(tensor.window().base()) << 7;
    let mut out = vec![0u8; grid.elements() * 2];
    for tile in 0..grid.tiles() {
        let mut put = |block, (step, register, lane, half), weight: u16| {
            let (row, col) = packed::element_at(block, step, lane, register, half);
            let (row, col) = (tile / grid.tile_cols() * TILE + row, tile % grid.tile_cols() * TILE + col);
            let at = (row * grid.cols() + col) * 2;
            out[at..at + 2].copy_from_slice(&weight.to_le_bytes());
        };
        for block in 0..packed::ROW_BLOCKS {
            for (step, register, lane, half) in element_positions() {
                let word = |i: usize| {
                    let at = tile * packed::TILE_BYTES + packed::word_offset(block, 3 * step + i, lane);
                    u32::from_le_bytes(tensor.packed()[at..at + 4].try_into().expect("4 bytes"))
                };
                let pair = if register == 3 {
                    let bits = |i: usize| word(i) & packed::FREE;
                    bits(0) >> 4 | bits(1) >> 8 | bits(2).rotate_left(4)
                } else {
                    word(register) & !packed::FREE
                };
                put(block, (step, register, lane, half), (pair >> (16 * half)) as u16 + base);
            }
            for record in tensor.records(tile * packed::ROW_BLOCKS + block) {
                let (lane, step, register, half) = packed::fields(record);
                let weight = tensor.window().weight(record as u16).expect("checked when it was read");
                put(block, (step, register, lane, half), weight);
            }
        }
    }
    out
}

/// Decodes the compact encoding bit by bit.
///
/// # Errors
/// The codes of a lane do not use its stored bits, or bits that belong to no code are not 0.
pub fn decode_compact<B: AsRef<[u8]>>(tensor: &CompactTensor<B>) -> Result<Vec<u8>, CodecError> {
    let (grid, table) = (tensor.grid(), tensor.book().table());
    let mut out = vec![0u8; grid.elements() * 2];
    for tile in 0..grid.tiles() {
        let stream = tensor.stream(tile);
        let bit = |at: usize| stream.get(at / 8).map(|byte| usize::from(byte >> (at % 8) & 1));
        let fail = |lane: usize| {
            let reason = "the codes of a lane do not use its stored bits";
            CodecError::Row { tile, row: lane / 4, reason }
        };
        let mut put = |block, step, lane, register, half, weight: u16| {
            let (row, col) = packed::element_at(block, step, lane, register, half);
            let (row, col) = (tile / grid.tile_cols() * TILE + row, tile % grid.tile_cols() * TILE + col);
            let at = (row * grid.cols() + col) * 2;
            out[at..at + 2].copy_from_slice(&weight.to_le_bytes());
        };
        let mut start = 8 * packed::LANES;
        for (lane, &length) in stream[..packed::LANES].iter().enumerate() {
            let bits = 2 * usize::from(length);
            // The bits used by the chain of blocks 0 and 1, and by that of blocks 2 and 3, which is read backwards from
            // the end.
            let mut used = [0, 0];
            for block in 0..packed::ROW_BLOCKS {
                let chain = block / 2;
                for quad in 0..8 {
                    // Up to nine bits.
                    let next = |i: usize| {
                        let at = used[chain] + i;
                        let at = if chain == 0 { start + at } else { (start + bits).checked_sub(at + 1)? };
                        bit(at)
                    };
                    let index: usize = (0..9).map(|i| next(i).unwrap_or(0) << i).sum();
                    let entry = table[index];
                    used[chain] += usize::from(entry >> 12);
                    for element in 0..4 {
                        let (step, register, half) = (quad / 2, 2 * (quad % 2) + element / 2, element % 2);
                        let dense = dense_half(tensor.dense(), tile, (block, step, lane, register, half));
                        let above = (entry >> (3 * element) & 7) << 2 | dense >> 7 & 3;
                        let exponent = u16::from(tensor.window().base()) + above;
                        put(block, step, lane, register, half, dense & 0x807f | exponent << 7);
                    }
                }
            }
            let left = bits.checked_sub(used[0] + used[1]).filter(|&left| left < 2).ok_or_else(|| fail(lane))?;
            if left == 1 && bit(start + used[0]) != Some(0) {
                return Err(fail(lane));
            }
            start += bits;
        }
        if (start..8 * stream.len()).any(|at| bit(at) == Some(1)) {
            return Err(CodecError::Row { tile, row: TILE - 1, reason: "bits after the last code are not 0" });
        }
        for record in tensor.records(tile) {
            let (block, lane, step, register, half) = compact::fields(record);
            let weight = tensor.window().weight(record as u16).expect("checked when it was read");
            put(block, step, lane, register, half, weight);
        }
    }
    Ok(out)
}

/// Sign, the exponent's lower two bits (8..7) and mantissa of an element in the dense part, bit by bit.
fn dense_half(
    dense: &[u8],
    tile: usize,
    (block, step, lane, register, half): (usize, usize, usize, usize, usize),
) -> u16 {
    // For the lower half of registers 5, 6 and 7 of two steps: bit, word, bit of the word. The rotation moves the sign
    // to the other half.
    const CARRIED: [[(u32, usize, u32); 10]; 3] = [
        [
            (0, 0, 10),
            (1, 0, 11),
            (2, 0, 12),
            (3, 0, 13),
            (4, 0, 14),
            (5, 1, 11),
            (6, 1, 12),
            (7, 1, 13),
            (8, 1, 14),
            (15, 0, 25),
        ],
        [
            (0, 2, 10),
            (1, 2, 11),
            (2, 2, 12),
            (3, 2, 13),
            (4, 2, 14),
            (5, 3, 9),
            (6, 3, 10),
            (7, 1, 9),
            (8, 1, 10),
            (15, 2, 25),
        ],
        [
            (0, 4, 10),
            (1, 4, 11),
            (2, 4, 12),
            (3, 4, 13),
            (4, 4, 14),
            (5, 3, 11),
            (6, 3, 12),
            (7, 3, 13),
            (8, 3, 14),
            (15, 4, 25),
        ],
    ];
    let word = |i: usize| {
        let at = tile * DENSE_TILE_BYTES + compact::dense_offset(block, step / 2, i, lane);
        u32::from_le_bytes(dense[at..at + 4].try_into().expect("4 bytes"))
    };
    let register = 4 * (step % 2) + register;
    if register < 5 {
        return (word(register) >> (16 * half)) as u16 & 0x81ff;
    }
    let moved =
        |&(bit, from, at): &(u32, usize, u32)| ((word(from) >> ((at + 16 * half as u32) % 32) & 1) as u16) << bit;
    CARRIED[register - 5].iter().map(moved).sum()
}

/// Decodes the Huffman encoding bit by bit and checks invariant 4.
///
/// # Errors
/// A row's codes do not use its stored bits, or bits between tiles are not 0.
pub fn decode_huffman<B: AsRef<[u8]>>(tensor: &HuffmanTensor<B>) -> Result<Vec<u8>, CodecError> {
    Ok(joined(tensor.sign_mantissa(), &decode_exponents_of(tensor.exponents())?))
}

/// Decodes a type other than BF16 bit by bit and checks invariant 4.
///
/// # Errors
/// A row's codes do not use its stored bits, or bits between tiles are not 0.
pub fn decode_exponents<B: AsRef<[u8]>>(tensor: &ExponentsTensor<B>) -> Result<Vec<u8>, CodecError> {
    let (float, exponents) = (tensor.float(), decode_exponents_of(tensor.exponents())?);
    let bits = 1 + float.fraction_bits() as usize;
    let (lower, upper) = (bits / 8 * 8, bits % 8);
    let bit = |bytes: &[u8], at: usize| u32::from(bytes[at / 8] >> (at % 8) & 1);
    let mut out = Vec::new();
    for (i, &exponent) in exponents.iter().enumerate() {
        let below = (0..lower).map(|at| bit(tensor.fraction_bytes(), i * lower + at) << at);
        let above = (0..upper).map(|at| bit(tensor.fraction_bits(), i * upper + at) << (lower + at));
        let element = float.join(below.chain(above).sum(), exponent);
        out.extend_from_slice(&element.to_le_bytes()[..float.bytes()]);
    }
    Ok(out)
}

fn decode_exponents_of<B: AsRef<[u8]>>(tensor: &CodedExponents<B>) -> Result<Vec<u8>, CodecError> {
    let grid = tensor.grid();
    let mut exponents = vec![0u8; grid.elements()];
    for tile in 0..grid.tiles() {
        let metadata = tensor.metadata(tile);
        let bits = tensor.row_bits(tile);
        let mut reader = BitReader::new(tensor.encoded_exp(), u64::from(metadata.start_word) * 32);
        let mut verbatim_row = metadata.verbatim_row_offset as usize;
        let (tile_row, tile_col) = (tile / grid.tile_cols(), tile % grid.tile_cols());
        for (row, &row_bits) in bits.iter().enumerate().take(grid.rows_in(tile_row)) {
            let mut line = [0u8; TILE];
            if metadata.bitmask() >> row & 1 == 1 {
                line.copy_from_slice(&tensor.verbatim_exponents()[verbatim_row * TILE..][..TILE]);
                verbatim_row += 1;
            } else {
                let end = reader.position() + u64::from(row_bits);
                for exponent in &mut line {
                    *exponent = symbol(&mut reader, tensor.code(), tile, row)?;
                }
                if reader.position() != end {
                    return Err(CodecError::Row { tile, row, reason: "its codes do not use its stored bits" });
                }
            }
            let cols = grid.cols_in(tile_col);
            let at = (tile_row * TILE + row) * grid.cols() + tile_col * TILE;
            exponents[at..at + cols].copy_from_slice(&line[..cols]);
        }
        while !reader.position().is_multiple_of(32) {
            if reader.bit() == Some(1) {
                return Err(CodecError::Row { tile, row: TILE - 1, reason: "bits after the last code are not 0" });
            }
        }
    }
    Ok(exponents)
}

/// Encodes by rANS one element and one number at a time, with the model of a tensor, which an encoder chooses.
///
/// # Panics
/// The model is that of another shape, or a symbol of the matrix has no frequency in it.
pub fn encode_rans<B: AsRef<[u8]>>(matrix: Matrix<'_>, tensor: &RansTensor<B>) -> RansTensor<Vec<u8>> {
    let (grid, model) = (matrix.grid(), tensor.model());
    let elements: Vec<u16> =
        matrix.bytes().chunks_exact(2).map(|element| u16::from_le_bytes([element[0], element[1]])).collect();
    let mut streams = Vec::new();
    for first in (0..elements.len()).step_by(rans::CHUNK) {
        let (mut states, mut words) = ([1u64 << 16; 32], Vec::new());
        for i in (first..elements.len().min(first + rans::CHUNK)).rev() {
            let table = &model.tables[model.contexts.table(i / grid.cols(), i % grid.cols())];
            let (symbol, extra) = rans_symbol(model.symbols, elements[i]);
            let frequency = u64::from(table[symbol]);
            let start: u64 = table[..symbol].iter().map(|&earlier| u64::from(earlier)).sum();
            let factor = if extra.is_some() { 16 } else { 1 };
            let state = &mut states[(i - first) % 32];
            if *state >= (frequency << 20) / factor {
                words.push((*state % 65536) as u16);
                *state /= 65536;
            }
            let above = *state * factor + u64::from(extra.unwrap_or(0));
            *state = above / frequency * 4096 + above % frequency + start;
        }
        streams.extend((words.len() as u32).to_le_bytes());
        streams.extend(states.iter().flat_map(|&state| (state as u32).to_le_bytes()));
        streams.extend(words.iter().rev().flat_map(|word| word.to_le_bytes()));
        streams.resize(streams.len().next_multiple_of(4), 0);
    }
    let nibble = |element: u16| (element & 7 | element >> 15 << 3) as u8;
    let mut nibbles: Vec<u8> =
        elements.chunks(2).map(|pair| nibble(pair[0]) | pair.get(1).map_or(0, |&second| nibble(second) << 4)).collect();
    for section in [&mut streams, &mut nibbles] {
        section.resize(section.len().next_multiple_of(4 * WORDS_ALIGN), 0);
    }
    let sections = RansTensor::from_sections(grid, |section| match section {
        Section::RANS_MODEL => model.to_bytes(),
        Section::RANS_STREAMS => std::mem::take(&mut streams),
        _ => std::mem::take(&mut nibbles),
    });
    sections.expect("valid sections")
}

/// The symbol of a weight, and the four bits that follow it if it stands for a whole exponent.
fn rans_symbol(symbols: Symbols, element: u16) -> (usize, Option<u16>) {
    let Symbols { first, below, head, .. } = symbols;
    let exponent = usize::from(bf16::exponent(element)) - usize::from(first);
    let (below, head, top) = (usize::from(below), usize::from(head), element >> 3 & 15);
    match exponent {
        _ if exponent < below => (exponent, Some(top)),
        _ if exponent < below + head => (below + 16 * (exponent - below) + usize::from(top), None),
        _ => (exponent + 15 * head, Some(top)),
    }
}

/// Decodes rANS one element and one number at a time.
///
/// # Errors
/// The words of a chunk are not those of its elements.
pub fn decode_rans<B: AsRef<[u8]>>(tensor: &RansTensor<B>) -> Result<Vec<u8>, CodecError> {
    let (grid, model) = (tensor.grid(), tensor.model());
    let fail = |reason| Err(CodecError::Code { section: Section::RANS_STREAMS.name(), reason });
    let mut out = Vec::new();
    for first in (0..grid.elements()).step_by(rans::CHUNK) {
        let (mut states, words) = tensor.chunk(first / rans::CHUNK);
        let mut words = words.chunks_exact(2);
        for i in first..grid.elements().min(first + rans::CHUNK) {
            let table = &model.tables[model.contexts.table(i / grid.cols(), i % grid.cols())];
            let state = &mut states[(i - first) % 32];
            let (mut symbol, mut start) = (0, 0);
            while *state % 4096 >= start + u32::from(table[symbol]) {
                start += u32::from(table[symbol]);
                symbol += 1;
            }
            *state = u32::from(table[symbol]) * (*state / 4096) + *state % 4096 - start;
            let Symbols { first, below, head, .. } = model.symbols;
            let (first, below, head) = (usize::from(first), usize::from(below), usize::from(head));
            let (exponent, top) = if symbol >= below && symbol < below + 16 * head {
                (first + below + (symbol - below) / 16, ((symbol - below) % 16) as u32)
            } else {
                let top = *state % 16;
                *state /= 16;
                (first + if symbol < below { symbol } else { symbol - 15 * head }, top)
            };
            if *state < 1 << 16 {
                let Some(word) = words.next() else { return fail(rans::MISSING_WORDS) };
                *state = *state << 16 | u32::from(u16::from_le_bytes([word[0], word[1]]));
            }
            let nibble = u32::from(tensor.sign_mantissa_low()[i / 2] >> (i % 2 * 4) & 15);
            let element = nibble >> 3 << 15 | (exponent as u32) << 7 | top << 3 | nibble & 7;
            out.extend_from_slice(&(element as u16).to_le_bytes());
        }
        if words.next().is_some() || states != [1 << 16; 32] {
            return fail(rans::UNEQUAL_END);
        }
    }
    Ok(out)
}

/// Decodes the encoding `planes` byte by byte; `None` if the tensor has another encoding.
///
/// # Errors
/// The words of a chunk are not those of any bytes.
pub fn decode_planes<B: AsRef<[u8]>>(tensor: &StoredTensor<B>) -> Option<Result<Vec<u8>, CodecError>> {
    let (model, streams) = (tensor.section(Section::PLANE_TABLES)?, tensor.section(Section::PLANE_STREAMS)?);
    let width = usize::from(model[0]);
    let mut bits = model[16..].iter().flat_map(|byte| (0..8).map(move |bit| u32::from(byte >> bit & 1)));
    let mut number = || {
        let lower = bits.by_ref().take_while(|&bit| bit == 0).count();
        let u = (0..lower).fold(1 << lower, |u, place| u | bits.next().unwrap_or(0) << place) as i32;
        if u % 2 == 1 { (u - 1) / 2 } else { -u / 2 }
    };
    let mut table = || -> Vec<u32> {
        let mut frequency = 0;
        (0..256)
            .map(|_| {
                frequency += number();
                frequency as u32
            })
            .collect()
    };
    let tables: Vec<Vec<u32>> = (0..width).map(|_| table()).collect();
    let bytes = tensor.grid()?.elements() * width;
    let mut words = streams.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word).into());
    Some(planes_of(&tables, bytes, &mut words))
}

/// Decodes chunks of bytes, of which byte `i` has table `i mod tables`.
fn planes_of(tables: &[Vec<u32>], bytes: usize, words: &mut dyn Iterator<Item = u32>) -> Result<Vec<u8>, CodecError> {
    let fail = |reason| Err(CodecError::Code { section: Section::PLANE_STREAMS.name(), reason });
    let mut out = Vec::new();
    for first in (0..bytes).step_by(rans::CHUNK) {
        let mut long = || words.next().unwrap_or(0) | words.next().unwrap_or(0) << 16;
        let mut left = long();
        let fill = left % 2;
        let mut states = [0; 32].map(|_: u32| long());
        for i in first..bytes.min(first + rans::CHUNK) {
            let (table, state) = (&tables[i % tables.len()], &mut states[(i - first) % 32]);
            let (mut symbol, mut start) = (0, 0);
            while *state % 4096 >= start + table[symbol] {
                start += table[symbol];
                symbol += 1;
            }
            *state = table[symbol] * (*state / 4096) + *state % 4096 - start;
            if *state < 1 << 16 {
                if left == 0 {
                    return fail(rans::MISSING_WORDS);
                }
                left -= 1;
                *state = *state << 16 | words.next().unwrap_or(0);
            }
            out.push(symbol as u8);
        }
        if left > 0 || states != [1 << 16; 32] {
            return fail(rans::UNEQUAL_END);
        }
        if fill == 1 {
            _ = words.next();
        }
    }
    Ok(out)
}

/// Decodes the palette encoding nibble by nibble.
pub fn decode_palette<B: AsRef<[u8]>>(tensor: &PaletteTensor<B>) -> Vec<u8> {
    let grid = tensor.grid();
    let palette = tensor.palette();
    let mut exponents = vec![0u8; grid.elements()];
    for tile in 0..grid.tiles() {
        let metadata = tensor.metadata(tile);
        let mut verbatim_row = metadata.verbatim_row_offset as usize;
        let (tile_row, tile_col) = (tile / grid.tile_cols(), tile % grid.tile_cols());
        for row in 0..grid.rows_in(tile_row) {
            let verbatim = metadata.bitmask() >> row & 1 == 1;
            for col in 0..grid.cols_in(tile_col) {
                let packed = tensor.palette_index()[(tile * TILE + row) * (TILE / 2) + col / 2];
                let exponent = if verbatim {
                    tensor.verbatim_exponents()[verbatim_row * TILE + col]
                } else {
                    palette[usize::from(packed >> (4 * (col % 2)) & 15)]
                };
                exponents[(tile_row * TILE + row) * grid.cols() + tile_col * TILE + col] = exponent;
            }
            verbatim_row += usize::from(verbatim);
        }
    }
    joined(tensor.sign_mantissa(), &exponents)
}

enum Row {
    Pad,
    Verbatim([u8; TILE]),
    Coded([u8; TILE], u32),
}

fn row_of(matrix: FloatMatrix<'_>, code: &Code, tile_row: usize, tile_col: usize, row: usize) -> Row {
    let grid = matrix.grid();
    if row >= grid.rows_in(tile_row) {
        return Row::Pad;
    }
    let cols = grid.cols_in(tile_col);
    let float = matrix.float();
    let exponent = |col: usize| float.exponent(matrix.get(tile_row * TILE + row, tile_col * TILE + col));
    let index = code.palette().index();
    let lengths = code.lengths();
    let bits: Option<u32> = (0..TILE)
        .map(|col| if col < cols { index[usize::from(exponent(col))] } else { Some(0) })
        .map(|i| i.map(|i| u32::from(lengths[usize::from(i)])))
        .sum();
    match bits {
        Some(bits) if bits <= ROW_BITS_MAX => Row::Coded(
            std::array::from_fn(|c| if c < cols { exponent(c) } else { code.palette().exponents()[0] }),
            bits,
        ),
        _ => Row::Verbatim(std::array::from_fn(|c| if c < cols { exponent(c) } else { 0 })),
    }
}

fn code_of(matrix: FloatMatrix<'_>, limit: CodeLimit) -> Code {
    let histogram = histogram_of(matrix);
    debug_assert!(Palette::from_histogram(&histogram).is_some());
    Code::from_histogram(&histogram, limit).expect("a matrix has elements")
}

fn histogram_of(matrix: FloatMatrix<'_>) -> Histogram {
    let (mut histogram, float) = (Histogram::default(), matrix.float());
    for element in matrix.bytes().chunks_exact(float.bytes()) {
        histogram.add(float.exponent(float.read(element)), 1);
    }
    histogram
}

fn sign_mantissa(matrix: Matrix<'_>) -> Vec<u8> {
    matrix.bytes().chunks_exact(2).map(|e| bf16::sign_mantissa(u16::from_le_bytes([e[0], e[1]]))).collect()
}

fn joined(sign_mantissa: &[u8], exponents: &[u8]) -> Vec<u8> {
    sign_mantissa.iter().zip(exponents).flat_map(|(&s, &e)| bf16::join(s, e).to_le_bytes()).collect()
}

fn symbol(reader: &mut BitReader<'_>, code: &Code, tile: usize, row: usize) -> Result<u8, CodecError> {
    let (mut value, mut length) = (0, 0);
    loop {
        let bit = reader.bit().ok_or(CodecError::Row { tile, row, reason: "the coded words end inside it" })?;
        value |= bit << length;
        length += 1;
        for (i, &exponent) in code.palette().exponents().iter().enumerate() {
            if code.code(i) == (value, length) {
                return Ok(exponent);
            }
        }
        if length > 15 {
            return Err(CodecError::Row { tile, row, reason: "it has bits that are not a code" });
        }
    }
}
