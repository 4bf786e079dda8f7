//! The CPU columns of docs/rivals.md: bits an element and speed of every format here, beside the forms of
//! unweight-format.
//!
//! `cargo run --release -p unweight-rivals --example compare [ROUNDS]`; one thread, the time that it ran by the
//! system's account, so that others on the machine count for less; the fastest of the rounds, all in turns.

use std::{error::Error, fs};

use unweight_format::{
    CodeLimit, Matrix, Survey,
    form::FORMS,
    testing::{Random, Weights},
};
use unweight_rivals::{
    dfloat11::{THREADS, Unit},
    matvans::{self, Layout},
    tans, zipserv,
};

/// A contender: encodes, and then decodes what it encoded; says how many bytes that was, and how long both took.
struct Contender {
    name: String,
    elements: usize,
    bytes_each: usize,
    run: Box<dyn Fn() -> Result<Round, Box<dyn Error>>>,
}

struct Round {
    bytes: u64,
    encode: f64,
    decode: f64,
}

/// Seconds that this thread has run.
fn ran() -> Result<f64, Box<dyn Error>> {
    let account = fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = account.split_whitespace().next().unwrap_or_default().parse()?;
    Ok(nanoseconds / 1e9)
}

/// Times an encoder and its decoder, and compares what comes back.
fn round<E, T: PartialEq>(
    original: &T,
    encode: impl FnOnce() -> Result<E, Box<dyn Error>>,
    bytes: impl FnOnce(&E) -> u64,
    decode: impl FnOnce(&E) -> Result<T, Box<dyn Error>>,
) -> Result<Round, Box<dyn Error>> {
    let start = ran()?;
    let encoded = encode()?;
    let middle = ran()?;
    let decoded = decode(&encoded)?;
    let end = ran()?;
    assert!(decoded == *original, "not what was encoded");
    Ok(Round { bytes: bytes(&encoded), encode: middle - start, decode: end - middle })
}

fn of_bf16(contenders: &mut Vec<Contender>) {
    let (rows, cols) = (2048, 4096);
    let weights: &'static [u8] = Weights::TRAINED.bytes(rows * cols, 11).leak();
    let original: &'static Vec<u8> = Box::leak(Box::new(weights.to_vec()));
    let mut add = |name: &str, run: Box<dyn Fn() -> Result<Round, Box<dyn Error>>>| {
        contenders.push(Contender { name: name.into(), elements: rows * cols, bytes_each: 2, run });
    };
    for form in FORMS.iter().filter(|form| form.id().name() != "raw") {
        let run = move || {
            let matrix = Matrix::new(weights, rows, cols)?;
            let encode = || {
                let survey = Survey::of(weights);
                Ok(form.encode(matrix, &survey, CodeLimit::DEFAULT)?)
            };
            let bytes = |sections: &Vec<Vec<u8>>| sections.iter().map(|section| section.len() as u64).sum();
            let decode = |sections: &Vec<Vec<u8>>| {
                let tensor = unweight_format::StoredTensor::new(form.id(), matrix.grid(), sections.clone())?;
                let mut out = vec![0; weights.len()];
                tensor.decode(&mut out)?;
                Ok(out)
            };
            round(original, encode, bytes, decode)
        };
        add(&format!("Unweight {}", form.id().name()), Box::new(run));
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

fn of_int8(contenders: &mut Vec<Contender>) {
    let (rows, cols) = (2048, 4096);
    let mut random = Random::new(12);
    // Four bits of entropy.
    let deviation = 16.0 / (2.0 * std::f64::consts::PI * std::f64::consts::E).sqrt();
    let values = (0..rows * cols).map(|_| (random.normal() * deviation).round().clamp(-127.0, 127.0) as i8);
    let values: &'static Vec<i8> = Box::leak(Box::new(values.collect()));
    for (name, layout) in [("MatVANS warp-rows", Layout::Rows), ("MatVANS warp-stripes", Layout::Stripes)] {
        let run = move || {
            let encode = || Ok(matvans::encode(values, rows, cols, layout)?);
            round(values, encode, matvans::Encoded::bytes, |encoded| Ok(encoded.decode()?))
        };
        contenders.push(Contender { name: name.into(), elements: rows * cols, bytes_each: 1, run: Box::new(run) });
    }
}

fn of_fp8(contenders: &mut Vec<Contender>) {
    let count = 8 << 20;
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
    let bytes: &'static Vec<u8> = Box::leak(Box::new(bytes.collect()));
    for per_stream in [128, 512, 1024] {
        let run = move || {
            let encode = || Ok(tans::encode(bytes, per_stream, &tans::QWEN3_14B)?);
            round(bytes, encode, tans::Encoded::bytes, |encoded| Ok(encoded.decode()?))
        };
        let name = format!("tANS, {per_stream} bytes a stream");
        contenders.push(Contender { name, elements: count, bytes_each: 1, run: Box::new(run) });
    }
}

/// Bits of a distribution: its entropy, and Huffman's code of it.
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

/// The nearest E4M3 number, ties to even: sign, exponent and mantissa as stored. Above 448 is 448.
fn e4m3(value: f32) -> u8 {
    let sign = u8::from(value.is_sign_negative()) << 7;
    let size = value.abs().min(448.0);
    // Spacing of its binade, subnormals included.
    let exponent = (size.to_bits() >> 23) as i32 - 127;
    let step = 2f32.powi(exponent.max(-6) - 3);
    let steps = (size / step).round_ties_even();
    // A carry into the next exponent adds up by itself.
    let code = if exponent < -6 { steps as u8 } else { (((exponent + 7) as u8) << 3) + (steps as u8 - 8) };
    sign | code
}

/// What coded exponents would save of tensors that no form holds yet.
fn study() {
    println!("\n| weights | exponent bits stored | entropy | Huffman | of all bits saved |\n|---|---:|---:|---:|---:|");
    let line = |name: &str, stored: u32, all: f64, counts: &[u64]| {
        let (entropy, coded) = bits(counts);
        let saved = 100.0 * (f64::from(stored) - coded) / all;
        println!("| {name} | {stored} | {entropy:.3} | {coded:.3} | {saved:.1} % |");
    };
    let gaussian = || {
        let mut random = Random::new(14);
        (0..1 << 22).map(move |_| (random.normal() * 0.02) as f32)
    };
    let values: Vec<f32> = gaussian().collect();
    let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
    let mut whole = vec![0; 16];
    values.iter().for_each(|value| whole[usize::from(e4m3(value / most * 448.0) >> 3 & 15)] += 1);
    line("E4M3 of N(0, 0.02^2), one scale a tensor", 4, 8.0, &whole);
    let mut blocks = vec![0; 16];
    for block in values.chunks(128 * 128) {
        let most = block.iter().fold(0f32, |most, value| most.max(value.abs()));
        block.iter().for_each(|value| blocks[usize::from(e4m3(value / most * 448.0) >> 3 & 15)] += 1);
    }
    line("E4M3 of N(0, 0.02^2), a scale a block of 128 x 128", 4, 8.0, &blocks);
    let qwen: Vec<u64> = tans::QWEN3_14B.iter().map(|&share| (share * 10_000.0).round() as u64).collect();
    line("Qwen3-14B-FP8, as its exponents were counted", 4, 8.0, &qwen);
    let mut half = vec![0; 32];
    // Binades of F16, whose rounding moves next to nothing between them.
    gaussian().for_each(|value| half[((value.to_bits() >> 23 & 255) as i32 - 127 + 15).clamp(0, 31) as usize] += 1);
    line("F16, N(0, 0.02^2)", 5, 16.0, &half);
    let mut single = vec![0; 256];
    gaussian().for_each(|value| single[(value.to_bits() >> 23 & 255) as usize] += 1);
    line("F32, N(0, 0.02^2)", 8, 32.0, &single);
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(7), |rounds| rounds.parse())?;
    // All of it on the pool's one thread, whose time is looked at.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    Ok(pool.install(|| compare(rounds).map_err(|error| error.to_string()))?)
}

fn compare(rounds: u32) -> Result<(), Box<dyn Error>> {
    let mut contenders = Vec::new();
    of_bf16(&mut contenders);
    of_int8(&mut contenders);
    of_fp8(&mut contenders);
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
    println!("| format | bits an element | encode, GiB/s | decode, GiB/s |\n|---|---:|---:|---:|");
    for (contender, best) in contenders.iter().zip(&best) {
        let rate = |seconds: f64| (contender.elements * contender.bytes_each) as f64 / seconds / f64::from(1 << 30);
        let bits = best.bytes as f64 * 8.0 / contender.elements as f64;
        println!("| {} | {bits:.2} | {:.3} | {:.3} |", contender.name, rate(best.encode), rate(best.decode));
    }
    study();
    Ok(())
}
