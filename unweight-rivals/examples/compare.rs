//! Measures the CPU columns of docs/rivals.md: bits per element and speed of every format here, and of the encodings of
//! unweight-format.
//!
//! `cargo run --release -p unweight-rivals --example compare [ROUNDS]` uses one thread. It measures the thread's CPU
//! time, so other processes affect it less, and reports the fastest round. Rounds of all formats are interleaved.

use std::{error::Error, fs};

use unweight_format::{
    CodeLimit, ENCODINGS, Encoding, EncodingId, Float, FloatMatrix, Matrix, Survey,
    raw::exponents,
    testing::{Random, Weights, float_weights, round_to},
};
use unweight_rivals::{
    dfloat11::{THREADS, Unit},
    matvans::{self, Layout},
    tans, zipserv,
};

/// A format to compare. `run` encodes, decodes the result, and returns its size and both times.
struct Contender {
    name: String,
    elements: usize,
    element_bytes: usize,
    run: Box<dyn Fn() -> Result<Round, Box<dyn Error>>>,
}

struct Round {
    bytes: u64,
    encode: f64,
    decode: f64,
}

/// Returns the CPU time of this thread in seconds.
fn cpu_seconds() -> Result<f64, Box<dyn Error>> {
    let account = fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = account.split_whitespace().next().unwrap_or_default().parse()?;
    Ok(nanoseconds / 1e9)
}

/// Times an encoder and its decoder, and checks the decoded data.
fn round<E, T: PartialEq>(
    original: &T,
    encode: impl FnOnce() -> Result<E, Box<dyn Error>>,
    bytes: impl FnOnce(&E) -> u64,
    decode: impl FnOnce(&E) -> Result<T, Box<dyn Error>>,
) -> Result<Round, Box<dyn Error>> {
    let start = cpu_seconds()?;
    let encoded = encode()?;
    let middle = cpu_seconds()?;
    let decoded = decode(&encoded)?;
    let end = cpu_seconds()?;
    assert!(decoded == *original, "the decoded data differs from the original");
    Ok(Round { bytes: bytes(&encoded), encode: middle - start, decode: end - middle })
}

fn add_bf16(contenders: &mut Vec<Contender>) {
    let (rows, cols) = (2048, 4096);
    let weights: &'static [u8] = Weights::TRAINED.bytes(rows * cols, 11).leak();
    let original: &'static Vec<u8> = Box::leak(Box::new(weights.to_vec()));
    let mut add = |name: &str, run: Box<dyn Fn() -> Result<Round, Box<dyn Error>>>| {
        contenders.push(Contender { name: name.into(), elements: rows * cols, element_bytes: 2, run });
    };
    let supports_bf16 =
        |encoding: &&&dyn Encoding| encoding.id() != EncodingId::RAW && encoding.floats().contains(&Float::Bf16);
    for encoding in ENCODINGS.iter().filter(supports_bf16) {
        let run = move || {
            let matrix = Matrix::new(weights, rows, cols)?;
            let encode = || {
                let survey = Survey::of(Float::Bf16, weights);
                Ok(encoding.encode(matrix.into(), &survey, CodeLimit::DEFAULT)?)
            };
            let bytes = |sections: &Vec<Vec<u8>>| sections.iter().map(|section| section.len() as u64).sum();
            let decode = |sections: &Vec<Vec<u8>>| {
                let tensor = unweight_format::StoredTensor::new(encoding.id(), matrix.grid(), sections.clone())?;
                let mut out = vec![0; weights.len()];
                tensor.decode(&mut out)?;
                Ok(out)
            };
            round(original, encode, bytes, decode)
        };
        add(&format!("Unweight {}", encoding.id().name()), Box::new(run));
    }
    add(
        "DFloat11",
        Box::new(move || {
            let bytes = |unit: &Unit| {
                let parts =
                    [&unit.luts, &unit.encoded_exponent, &unit.sign_mantissa, &unit.output_positions, &unit.gaps];
                parts.iter().map(|part| part.len() as u64).sum()
            };
            round(original, || Ok(Unit::encode(weights, THREADS)?), bytes, |unit| Ok(unit.decode()?))
        }),
    );
    add(
        "ZipServ TCA-TBE",
        Box::new(move || {
            let encode = || Ok(zipserv::encode(weights, rows, cols)?);
            round(original, encode, zipserv::Encoded::bytes, |encoded| Ok(encoded.decode()?))
        }),
    );
}

fn add_int8(contenders: &mut Vec<Contender>) {
    let (rows, cols) = (2048, 4096);
    let mut random = Random::new(12);
    // A normal distribution with four bits of entropy.
    let deviation = 16.0 / (2.0 * std::f64::consts::PI * std::f64::consts::E).sqrt();
    let values = (0..rows * cols).map(|_| (random.normal() * deviation).round().clamp(-127.0, 127.0) as i8);
    let values: &'static Vec<i8> = Box::leak(Box::new(values.collect()));
    for (name, layout) in [
        ("MatVANS warp-rows", Layout::Rows),
        ("MatVANS warp-stripes", Layout::Stripes),
        ("MatVANS WarpPerRow", Layout::Lanes),
    ] {
        let run = move || {
            let encode = || Ok(matvans::encode(values, rows, cols, layout)?);
            round(values, encode, matvans::Encoded::bytes, |encoded| Ok(encoded.decode()?))
        };
        contenders.push(Contender { name: name.into(), elements: rows * cols, element_bytes: 1, run: Box::new(run) });
    }
}

/// Returns E4M3 bytes whose exponents have the shares of Qwen3-14B-FP8.
fn qwen_fp8(count: usize) -> Vec<u8> {
    let mut random = Random::new(13);
    let sum: f64 = tans::QWEN3_14B.iter().map(|&share| f64::from(share)).sum();
    let bytes = (0..count).map(|_| {
        let mut left = random.uniform() * sum;
        let exponent = tans::QWEN3_14B.iter().position(|&share| {
            left -= f64::from(share);
            left < 0.0
        });
        (random.below(2) as u8) << 7 | (exponent.unwrap_or(15) as u8) << 3 | random.below(8) as u8
    });
    bytes.collect()
}

fn add_fp8(contenders: &mut Vec<Contender>) {
    let count = 8 << 20;
    let bytes: &'static Vec<u8> = Box::leak(Box::new(qwen_fp8(count)));
    for per_stream in [128, 512, 1024] {
        let run = move || {
            let encode = || Ok(tans::encode(bytes, per_stream, &tans::QWEN3_14B)?);
            round(bytes, encode, tans::Encoded::bytes, |encoded| Ok(encoded.decode()?))
        };
        let name = format!("tANS, {per_stream} bytes per stream");
        contenders.push(Contender { name, elements: count, element_bytes: 1, run: Box::new(run) });
    }
}

/// Returns the entropy of a distribution, and the mean length of its Huffman code, in bits.
fn bits(counts: &[u64]) -> (f64, f64) {
    let total: u64 = counts.iter().sum();
    let share = |count: u64| count as f64 / total as f64;
    let entropy = counts.iter().filter(|&&c| c > 0).map(|&c| -share(c) * share(c).log2()).sum();
    let mut open: Vec<u64> = counts.iter().copied().filter(|&count| count > 0).collect();
    let mut coded = 0;
    while open.len() > 1 {
        open.sort_unstable_by_key(|&count| std::cmp::Reverse(count));
        let pair = open.pop().unwrap_or(0) + open.pop().unwrap_or(0);
        coded += pair;
        open.push(pair);
    }
    (entropy, coded as f64 / total as f64)
}

/// Returns weights of types other than BF16, with their row names in both tables.
fn floats() -> Vec<(&'static str, Float, Vec<u8>)> {
    let count = 8 << 20;
    let mut random = Random::new(14);
    let values: Vec<f32> = (0..count).map(|_| (random.normal() * 0.02) as f32).collect();
    let largest = |values: &[f32]| values.iter().fold(0f32, |most, value| most.max(value.abs()));
    // E4M3 as in checkpoints: the largest weight of a row of 4096 is scaled to 448.
    let channel = |row: &[f32]| {
        let scale = 448.0 / largest(row);
        row.iter().map(|value| round_to(Float::E4M3, value * scale) as u8).collect::<Vec<u8>>()
    };
    let normal = |float| float_weights(float, count, 14);
    vec![
        ("E4M3 of N(0, 0.02^2), a scale per block of 128 x 128", Float::E4M3, normal(Float::E4M3)),
        ("E4M3 of N(0, 0.02^2), a scale per row of 4096", Float::E4M3, values.chunks(4096).flat_map(channel).collect()),
        ("E4M3 with the exponents of Qwen3-14B-FP8", Float::E4M3, qwen_fp8(count)),
        ("E5M2 of N(0, 0.02^2), a scale per block of 128 x 128", Float::E5M2, normal(Float::E5M2)),
        ("F16, N(0, 0.02^2)", Float::F16, normal(Float::F16)),
        ("F32, N(0, 0.02^2)", Float::F32, normal(Float::F32)),
    ]
}

fn add_floats(contenders: &mut Vec<Contender>) {
    for (name, float, bytes) in floats() {
        let bytes: &'static Vec<u8> = Box::leak(Box::new(bytes));
        let elements = bytes.len() / float.bytes();
        let run = move || {
            let matrix = FloatMatrix::new(float, bytes, elements / 4096, 4096)?;
            let encode = || Ok(exponents::encode(matrix, CodeLimit::DEFAULT)?);
            round(bytes, encode, exponents::ExponentsTensor::coded_bytes, |tensor| Ok(exponents::decode(tensor)?))
        };
        let name = format!("Unweight exponents: {name}");
        contenders.push(Contender { name, elements, element_bytes: float.bytes(), run: Box::new(run) });
    }
}

/// Prints what coding exponents saves for other types: in theory, and as stored.
fn print_exponent_savings() -> Result<(), Box<dyn Error>> {
    println!("\n| weights | exponent bits | entropy | Huffman | bits per element, all sections | saved |");
    println!("|---|---:|---:|---:|---:|---:|");
    for (name, float, bytes) in floats() {
        let (entropy, coded) = bits(Survey::of(float, &bytes).histogram.counts());
        let elements = bytes.len() / float.bytes();
        let matrix = FloatMatrix::new(float, &bytes, elements / 4096, 4096)?;
        let stored = exponents::encode(matrix, CodeLimit::DEFAULT)?.coded_bytes();
        let (bits_per_element, saved) =
            (stored as f64 * 8.0 / elements as f64, 100.0 - stored as f64 * 100.0 / bytes.len() as f64);
        println!(
            "| {name} | {} | {entropy:.3} | {coded:.3} | {bits_per_element:.3} | {saved:.1} % |",
            float.exponent_bits()
        );
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(7), |rounds| rounds.parse())?;
    // Everything runs on the pool's only thread, whose CPU time is measured.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    Ok(pool.install(|| compare(rounds).map_err(|error| error.to_string()))?)
}

fn compare(rounds: u32) -> Result<(), Box<dyn Error>> {
    let mut contenders = Vec::new();
    add_bf16(&mut contenders);
    add_int8(&mut contenders);
    add_fp8(&mut contenders);
    add_floats(&mut contenders);
    let mut best: Vec<Round> =
        contenders.iter().map(|_| Round { bytes: 0, encode: f64::MAX, decode: f64::MAX }).collect();
    for _ in 0..rounds {
        for (contender, best) in contenders.iter().zip(&mut best) {
            let round = (contender.run)().map_err(|error| format!("{}: {error}", contender.name))?;
            best.bytes = round.bytes;
            best.encode = best.encode.min(round.encode);
            best.decode = best.decode.min(round.decode);
        }
    }
    println!("| format | bits per element | encode, GiB/s | decode, GiB/s |\n|---|---:|---:|---:|");
    for (contender, best) in contenders.iter().zip(&best) {
        let rate = |seconds: f64| (contender.elements * contender.element_bytes) as f64 / seconds / f64::from(1 << 30);
        let bits = best.bytes as f64 * 8.0 / contender.elements as f64;
        println!("| {} | {bits:.2} | {:.3} | {:.3} |", contender.name, rate(best.encode), rate(best.decode));
    }
    print_exponent_savings()
}
