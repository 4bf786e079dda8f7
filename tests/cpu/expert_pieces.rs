//! Compact experts in host memory, fetched piece by piece in the simulator: the tiles of a slot have the bytes of the
//! packed tensor, and a piece with any bytes stays within its staging buffer.

use std::ops::Range;

use unweight_codegen::{
    abi::DecodeCompactArgs,
    plan::GemmShape,
    spec::{Arch, DecodeCompactStage},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{
        CompactTensor, PackedTensor,
        compact::encode,
        layout::DENSE_TILE_BYTES,
        packed::{TILE_BYTES, pack},
    },
    testing::{Random, Weights},
};
use unweight_rt::raw::{
    layer::experts::{
        self,
        offload::pieces::{Piece, Pieces},
    },
    ops::decode_compact::TilesAt,
};

use crate::compact_sections::Sections;
use crate::decode_compact::{SPECIAL, variant};
use crate::harness::{Buffer, CpuKernel, Run};

/// Experts of one product, concatenated by rows.
struct Case {
    experts: usize,
    /// Tiles per expert.
    each: usize,
    tensor: CompactTensor<Vec<u8>>,
    packed: PackedTensor<Vec<u8>>,
    class_tiles: Vec<u32>,
    pieces: Pieces,
    /// Host memory as the runtime fills it.
    host: Vec<u8>,
}

impl Case {
    /// Makes experts of `rows x cols` from `weight(expert, tile of the expert, usual weight)`, in pieces of up to
    /// `tiles_max` tiles.
    fn new(
        (experts, rows, cols): (usize, usize, usize),
        tiles_max: usize,
        weight: &mut dyn FnMut(usize, usize, u16) -> u16,
    ) -> Self {
        let (tile_cols, mut bytes) = (cols / 64, Weights::TRAINED.bytes(experts * rows * cols, 7));
        for (at, element) in bytes.chunks_exact_mut(2).enumerate() {
            let (row, col) = (at / cols, at % cols);
            let usual = u16::from_le_bytes([element[0], element[1]]);
            let tile = row % rows / 64 * tile_cols + col / 64;
            element.copy_from_slice(&weight(row / rows, tile, usual).to_le_bytes());
        }
        let (matrix, histogram) = (Matrix::new(&bytes, experts * rows, cols).unwrap(), Histogram::of(&bytes));
        let (tensor, packed) = (encode(matrix, &histogram).unwrap(), pack(matrix, &histogram).unwrap());
        let each = rows / 64 * tile_cols;
        let class_tiles: Vec<u32> =
            tensor.tiles().chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let pieces = Pieces::new(&class_tiles, (experts, each), tiles_max).unwrap();
        let mut host = vec![Buffer::POISON; pieces.bytes()];
        for piece in pieces.all() {
            let scaled = |range: &Range<usize>, unit: usize| range.start * unit..range.end * unit;
            let table: Vec<u8> = piece.table(&class_tiles).into_iter().flat_map(u32::to_le_bytes).collect();
            for (at, part) in [
                (0, &tensor.dense()[scaled(&piece.tiles, DENSE_TILE_BYTES)]),
                (piece.heads_at(), &packed.escape_heads()[scaled(&piece.tiles, 16)]),
                (piece.table_at(), &table[..]),
                (piece.streams_at(), &tensor.streams()[scaled(&piece.words, 4)]),
            ] {
                host[piece.at + at..][..part.len()].copy_from_slice(part);
            }
        }
        Self { experts, each, tensor, packed, class_tiles, pieces, host }
    }

    /// Decodes a piece whose bytes are in `staging`.
    fn decode(&self, kernel: &mut CpuKernel, piece: &Piece, staging: &Buffer) -> Result<Vec<u8>, String> {
        let (count, sections) = (piece.tiles.len(), Sections::of(&self.tensor));
        let (tiles, heads) = (Buffer::new(count * TILE_BYTES), Buffer::new(count * 16));
        let (group_words, inexact) = (Buffer::new(count.div_ceil(16) * 4), Buffer::new(8));
        let part = |range: Range<usize>| &staging.slice()[range];
        let dense = part(0..piece.heads_at());
        let table = part(piece.table_at()..piece.table_at() + 8 * (count + 1));
        let streams = part(piece.streams_at()..piece.bytes());
        let from = TilesAt {
            count: count as u32,
            dense: dense.as_ptr() as u64,
            tiles: table.as_ptr() as u64,
            streams: streams.as_ptr() as u64,
            stream_words: piece.words.len() as u32,
        };
        let args = DecodeCompactArgs {
            records: sections.records.address(),
            record_words: (sections.records.slice().len() / 4) as u32,
            table: sections.table.address(),
            class_base: self.tensor.window().base().into(),
            base: self.packed.window().base().into(),
            packed: tiles.address(),
            escape_heads: heads.address(),
            group_words: group_words.address(),
            inexact: inexact.address(),
            ..from.args()
        };
        let run = Run { problem: GemmShape { m: 0, n: args.n, k: args.k }, sms: 2, seed: 3 };
        let buffers = [
            ("dense", dense),
            ("tiles", table),
            ("streams", streams),
            ("records", sections.records.slice()),
            ("table", sections.table.slice()),
            ("packed", tiles.slice()),
            ("heads", heads.slice()),
            ("group_words", group_words.slice()),
            ("inexact", inexact.slice()),
        ];
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(&variant(DecodeCompactStage::Packed), run, &args, &buffers) }?;
        Ok(tiles.slice().to_vec())
    }

    /// Fetches experts into a slot, the last one first, and compares the slot with the packed tensor.
    fn check(&self, kernel: &mut CpuKernel, what: &str) {
        for expert in (0..self.experts).rev() {
            let mut slot = vec![0x5a; self.each * TILE_BYTES];
            for piece in self.pieces.of(expert as u32) {
                let staging = Buffer::of(&self.host[piece.at..piece.at + piece.bytes()]);
                let tiles = self.decode(kernel, piece, &staging).unwrap();
                let first = (piece.tiles.start - expert * self.each) * TILE_BYTES;
                slot[first..first + tiles.len()].copy_from_slice(&tiles);
            }
            let bytes = self.each * TILE_BYTES;
            let expected = &self.packed.packed()[expert * bytes..][..bytes];
            let wrong = slot.iter().zip(expected).position(|(got, expected)| got != expected);
            assert_eq!(wrong, None, "{what}: expert {expert}");
        }
    }
}

fn build() -> CpuKernel {
    CpuKernel::of(&variant(DecodeCompactStage::Packed), &[])
}

#[test]
fn pieces_of_experts_decode_to_the_tiles_of_the_packed_tensor() {
    let mut kernel = build();
    let mut random = Random::new(3);
    // Lists in the first and the last tile of each of an odd number of experts.
    let ends = &mut |_: usize, tile: usize, usual: u16| match tile {
        0 | 11 if random.below(100) == 0 => SPECIAL[random.below(SPECIAL.len() as u64) as usize],
        _ => usual,
    };
    let case = Case::new((7, 256, 192), 5, ends);
    assert!(case.pieces.of(6).len() == 3 && case.class_tiles.iter().skip(1).step_by(2).any(|head| head >> 31 == 1));
    case.check(&mut kernel, "escapes at the ends");
    // One expert of zeros, all of whose elements are escapes, and a piece per expert.
    let case = Case::new((320, 64, 64), 1024, &mut |expert, _, usual| if expert == 123 { 0 } else { usual });
    case.check(&mut kernel, "an expert of zeros");
    // Streams of one word per lane next to long ones.
    let case = Case::new((3, 128, 64), 1, &mut |expert, _, usual| if expert == 1 { 0x3d00 } else { usual });
    case.check(&mut kernel, "an expert of one value");
}

#[test]
fn pieces_of_any_bytes_stay_in_their_buffer() {
    let mut kernel = build();
    let mut random = Random::new(21);
    let case = Case::new((3, 128, 128), 3, &mut |_, _, usual| usual);
    for piece in case.pieces.all() {
        let mut staging = random.bytes(piece.bytes());
        case.decode(&mut kernel, piece, &Buffer::of(&staging)).unwrap();
        // Any streams with the table of this piece, and with that of another one.
        let table: Vec<u8> = piece.table(&case.class_tiles).into_iter().flat_map(u32::to_le_bytes).collect();
        staging[piece.table_at()..][..table.len()].copy_from_slice(&table);
        case.decode(&mut kernel, piece, &Buffer::of(&staging)).unwrap();
        let other = &case.host[case.pieces.all()[1].at..];
        staging[piece.table_at()..][..24].copy_from_slice(&other[case.pieces.all()[1].table_at()..][..24]);
        case.decode(&mut kernel, piece, &Buffer::of(&staging)).unwrap();
    }
}

#[test]
fn offloading_needs_the_kernel_of_these_tests() {
    assert!(experts::offload_variants(Arch::Sm90a).contains(&variant(DecodeCompactStage::Packed)));
}
