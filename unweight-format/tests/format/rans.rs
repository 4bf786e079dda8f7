//! The rANS encoding: fast codec against the oracle, sizes, hostile sections.

use proptest::prelude::*;
use unweight_format::{
    CodeLimit, CodecError, EncodingId, Float, FloatMatrix, Histogram, Matrix, StoredTensor, Survey, TileGrid,
    raw::{RansTensor, Section, oracle, rans},
    testing::{Random, Weights, sprinkle},
};

use crate::common;

fn check(bytes: &[u8], rows: usize, cols: usize) -> RansTensor<Vec<u8>> {
    let matrix = Matrix::new(bytes, rows, cols).unwrap();
    let tensor = rans::encode(matrix, &Histogram::of(bytes));
    assert!(oracle::encode_rans(matrix, &tensor) == tensor, "encoders differ: {tensor:?}");
    let read = RansTensor::from_sections(tensor.grid(), |s| tensor.section(s).unwrap().into_owned()).unwrap();
    assert!(read == tensor, "stored sections read back");
    assert!(rans::decode(&tensor).unwrap() == bytes, "fast decoder");
    assert!(oracle::decode_rans(&tensor).unwrap() == bytes, "oracle decoder");
    tensor
}

/// Normal weights whose rows and columns have scales of their own.
fn scaled(rows: usize, cols: usize, spread: f64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut scales = |count: usize| (0..count).map(|_| (random.normal() * spread).exp2()).collect::<Vec<f64>>();
    let (row_scales, col_scales) = (scales(rows), scales(cols));
    let mut random = Random::new(seed ^ 1);
    (0..rows * cols)
        .flat_map(|i| {
            let weight = random.normal() * 0.02 * row_scales[i / cols] * col_scales[i % cols];
            unweight_format::testing::bf16(weight as f32).to_le_bytes()
        })
        .collect()
}

fn bits(tensor: &RansTensor<Vec<u8>>) -> f64 {
    StoredTensor::from(tensor.clone()).stored_bytes() as f64 * 8.0 / tensor.grid().elements() as f64
}

/// The number of tables, and whether rows and columns have classes.
fn contexts(tensor: &RansTensor<Vec<u8>>) -> (u32, bool, bool) {
    let model = tensor.section(Section::RANS_MODEL).unwrap();
    let starts = u32::from_le_bytes(model[4..8].try_into().unwrap());
    (starts.count_ones(), model[8] == 1, model[9] == 1)
}

/// Elements of a chunk.
const CHUNK: usize = 1 << 19;

#[test]
fn every_kind_of_weights_round_trips() {
    for kind in Weights::ALL {
        for (rows, cols) in [(260, 256), (1, 1), (3, 5), (1, 64), (64, 1), (70, 130), (5, 1100), (33, 31)] {
            check(&kind.bytes(rows * cols, 1), rows, cols);
        }
    }
}

#[test]
fn chunks_and_blocks_end_anywhere() {
    for elements in [CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 33, 2 * CHUNK + 4096] {
        check(&common::weights(elements, 2), 1, elements);
    }
    check(&scaled(700, 1021, 0.4, 3), 700, 1021);
}

#[test]
fn rows_and_columns_of_different_scale_get_tables_of_their_own() {
    let plain = check(&scaled(768, 768, 0.0, 4), 768, 768);
    assert_eq!(contexts(&plain), (1, false, false));
    let tensor = check(&scaled(768, 768, 0.4, 4), 768, 768);
    assert!(matches!(contexts(&tensor), (4.., true, true)), "{:?}", contexts(&tensor));
    // Unconditioned, the mixture of scales costs 0.3 bits more.
    assert!(bits(&tensor) < bits(&plain) + 0.09, "{} {}", bits(&tensor), bits(&plain));
}

/// The entropy of normal weights is 10.463 bits, whatever their scale: the differential entropy of the normal
/// distribution, less the mean logarithm of the distance between neighbouring numbers of BF16.
#[test]
fn normal_weights_are_coded_close_to_their_entropy() {
    for sigma in [0.02, 0.0137, 3.0] {
        let weights = Weights::Gaussian { sigma }.bytes(1 << 20, 5);
        let tensor = rans::encode(Matrix::new(&weights, 1024, 1024).unwrap(), &Histogram::of(&weights));
        assert!((10.46..10.475).contains(&bits(&tensor)), "{sigma}: {}", bits(&tensor));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn fast_and_slow_agree(
        rows in 1usize..150,
        cols in 1usize..200,
        spread in 0.0f64..2.0,
        one_in in 1u64..500,
        seed: u64,
    ) {
        let mut bytes = scaled(rows, cols, spread, seed);
        sprinkle(&mut bytes, one_in, Weights::Noise, seed ^ 2);
        check(&bytes, rows, cols);
    }
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    let bytes = scaled(1200, 1000, 0.3, 6);
    let encode = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| rans::encode(Matrix::new(&bytes, 1200, 1000).unwrap(), &Histogram::of(&bytes)))
    };
    assert!(encode(1) == encode(5));
}

/// The example of `docs/format.md` A.13.
#[test]
fn worked_example() {
    let bytes: Vec<u8> =
        [0x3f80u16, 0xbfc0, 0x3f00, 0x3e80, 0x3f80, 0x3f40].iter().flat_map(|b| b.to_le_bytes()).collect();
    let tensor = check(&bytes, 2, 3);
    let section = |section| tensor.section(section).unwrap().into_owned();
    let padded = |bytes: &[u8], len: usize| [bytes, &vec![0; len - bytes.len()]].concat();
    // Exponents 7d, 7e, 7f have the frequencies 683, 1365, 2048.
    let numbers = [0x00, 0xbc, 0x0a, 0x80, 0x55, 0x01, 0xf0, 0x2a];
    let model = [padded(&[0x7d, 3, 0, 0, 1], 16), padded(&numbers, 16)].concat();
    assert_eq!(section(Section::RANS_MODEL), model);
    let states = [0x0020_0800u32, 0x0020_0808, 0x0030_03ab, 0x005f_f0ab, 0x0020_0800, 0x0030_03b3];
    let states = states.into_iter().chain([1 << 16; 26]).flat_map(u32::to_le_bytes);
    let streams: Vec<u8> = [0; 4].into_iter().chain(states).collect();
    assert_eq!(section(Section::RANS_STREAMS), padded(&streams, 144));
    assert_eq!(section(Section::SIGN_MANTISSA_LOW), padded(&[0x80], 16));
}

/// The sections of a valid tensor of two chunks with one of them changed.
fn tampered(change: impl Fn(Section, &mut Vec<u8>)) -> Result<RansTensor<Vec<u8>>, CodecError> {
    static TENSOR: std::sync::LazyLock<RansTensor<Vec<u8>>> = std::sync::LazyLock::new(|| {
        let (rows, cols) = (801, 701);
        let weights = scaled(rows, cols, 0.4, 8);
        rans::encode(Matrix::new(&weights, rows, cols).unwrap(), &Histogram::of(&weights))
    });
    RansTensor::from_sections(TENSOR.grid(), |s| {
        let mut section = TENSOR.section(s).unwrap().into_owned();
        change(s, &mut section);
        section
    })
}

#[test]
fn each_broken_invariant_has_its_own_error() {
    let whole = tampered(|_, _| {}).unwrap();
    let fails = |section: Section, message: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let result = tampered(|s, bytes| {
            if s == section {
                change(bytes)
            }
        });
        let Err(CodecError::Code { section: named, reason }) = &result else { panic!("{message}: {result:?}") };
        assert!(*named == section.name() && reason.contains(message), "{message}: {named}: {reason}");
    };
    let model = Section::RANS_MODEL;
    fails(model, "less than 16 bytes", &|b| b.truncate(15));
    fails(model, "no exponents, or some above 255", &|b| b[1..4].fill(0));
    fails(model, "no exponents, or some above 255", &|b| b[0] = 255);
    fails(model, "more than 256 symbols", &|b| b[..3].copy_from_slice(&[0, 0, 17]));
    fails(model, "tables must be 1 to 8", &|b| b[4] &= !1);
    fails(model, "tables must be 1 to 8", &|b| b[7] |= 0x80);
    fails(model, "tables must be 1 to 8", &|b| b[4..6].fill(0xff));
    fails(model, "flags must be 0 or 1", &|b| b[8] = 2);
    fails(model, "flags must be 0 or 1", &|b| b[15] = 1);
    fails(model, "a number is missing or too long", &|b| b[16..].fill(0));
    fails(model, "a number is missing or too long", &|b| b.truncate(b.len() - 32));
    fails(model, "negative or above 4096", &|b| b[16..18].copy_from_slice(&[0b10, 0]));
    fails(model, "do not add up to 4096", &|b| b[16..].fill(0xff));
    fails(model, "only zeros up to a multiple of 16 bytes", &|b| b.extend([0; 16]));
    fails(model, "only zeros up to a multiple of 16 bytes", &|b| b[9] = 0);
    assert!(matches!(contexts(&whole), (_, true, true)));

    let streams = Section::RANS_STREAMS;
    let second = CHUNK_HEAD + 2 * whole_words(&whole).next_multiple_of(2);
    fails(streams, "ends before the last chunk", &|b| b.truncate(100));
    fails(streams, "ends before the last chunk", &|b| b.truncate(second + 16));
    fails(streams, "more words than elements, or than are stored", &|b| b[3] = 1);
    fails(streams, "more words than elements, or than are stored", &|b| b.truncate(b.len() - 1024));
    fails(streams, "a state is below 65536", &|b| b[6..8].fill(0));
    fails(streams, "only zeros up to a multiple of 16 bytes", &|b| b.extend([0; 16]));
    fails(streams, "only zeros up to a multiple of 16 bytes", &|b| b[second..second + 2].fill(8));

    let low = Section::SIGN_MANTISSA_LOW;
    fails(low, "its padding must be 0", &|b| *b.last_mut().unwrap() = 1);
    // The upper half of the byte of the last of 561,501 elements.
    fails(low, "its padding must be 0", &|b| b[561_501 / 2] |= 0x10);
    for length in [-16, 16] {
        let result = tampered(|s, b| {
            if s == low {
                b.resize(b.len().strict_add_signed(length), 0)
            }
        });
        assert!(matches!(result, Err(CodecError::SectionBytes { .. })), "{result:?}");
    }
}

/// Bytes of a chunk ahead of its words.
const CHUNK_HEAD: usize = 132;

/// Words of the first chunk.
fn whole_words(tensor: &RansTensor<Vec<u8>>) -> usize {
    u32::from_le_bytes(tensor.section(Section::RANS_STREAMS).unwrap()[..4].try_into().unwrap()) as usize
}

#[test]
fn chunks_that_do_not_end_with_their_elements_are_errors() {
    let changes: [fn(&mut [u8]); 3] = [
        |words| words[CHUNK_HEAD..CHUNK_HEAD + 4000].fill(0),
        |words| words[CHUNK_HEAD..CHUNK_HEAD + 4000].fill(0xff),
        // The lowest states.
        |words| words[4..CHUNK_HEAD].as_chunks_mut().0.iter_mut().for_each(|state| *state = [0, 0, 1, 0]),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let changed = |s, b: &mut Vec<u8>| {
            if s == Section::RANS_STREAMS {
                change(b)
            }
        };
        let tensor = tampered(changed).unwrap();
        let (fast, slow) = (rans::decode(&tensor).err(), oracle::decode_rans(&tensor).err());
        assert!(fast == slow && fast.is_some_and(|error| error.to_string().contains("chunk")), "{i}: {slow:?}");
    }
}

/// For any bytes, both decoders come to the same result or error.
#[test]
fn damaged_sections_never_panic() {
    let (mut refused, mut errors, mut decoded) = (0, 0, 0);
    let mut random = Random::new(10);
    for _ in 0..120 {
        let (at, bit) = (random.bits() as usize, random.below(8));
        let section = EncodingId::RANS.encoding().sections()[random.below(3) as usize];
        let result = tampered(|s, bytes| {
            if s == section {
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
            }
        });
        let Ok(tensor) = result else {
            refused += 1;
            continue;
        };
        let (fast, slow) = (rans::decode(&tensor), oracle::decode_rans(&tensor));
        assert_eq!(fast.is_ok(), slow.is_ok());
        match fast {
            Ok(fast) => {
                assert!(fast == slow.unwrap());
                decoded += 1;
            }
            Err(error) => {
                assert_eq!(Some(error), slow.err());
                errors += 1;
            }
        }
    }
    assert!(refused > 10 && errors > 10 && decoded > 10, "{refused} {errors} {decoded}");
}

#[test]
fn other_types_and_wrong_buffers_are_refused() {
    let weights = common::weights(64 * 64, 9);
    let matrix = Matrix::new(&weights, 64, 64).unwrap();
    let tensor = rans::encode(matrix, &Histogram::of(&weights));
    let stored = StoredTensor::from(tensor.clone());
    assert!(matches!(stored.decode(&mut [0; 8191]), Err(CodecError::MatrixBytes { .. })));
    let view = RansTensor::of(stored.borrowed()).unwrap();
    assert_eq!(view.section(Section::RANS_STREAMS), tensor.section(Section::RANS_STREAMS));
    let half = FloatMatrix::new(Float::F16, &weights, 64, 64).unwrap();
    let survey = Survey::of(Float::F16, &weights);
    assert!(StoredTensor::encode(EncodingId::RANS, half, &survey, CodeLimit::DEFAULT).is_err());
    // Classes are those of another shape.
    let scaled = scaled(768, 512, 0.4, 9);
    let tensor = rans::encode(Matrix::new(&scaled, 768, 512).unwrap(), &Histogram::of(&scaled));
    let other = TileGrid::new(512, 700).unwrap();
    let error = RansTensor::from_sections(other, |s| tensor.section(s).unwrap().into_owned()).unwrap_err();
    assert!(error.to_string().contains("rans_model: "), "{error}");
}
