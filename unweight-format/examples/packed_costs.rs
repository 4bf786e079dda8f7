//! The cost of the packed encoding: bits per element, escapes and speed by distribution of the weights.
//!
//! ```text
//! packed_costs           generated weights, [4096, 4096]
//! packed_costs BUNDLE    the packed tensors of a bundle: bits and escapes
//! ```

use std::{error::Error, path::Path, time::Instant};

use unweight_format::{
    CodeLimit, Histogram, Matrix,
    bundle::Bundle,
    raw::{Code, PackedTensor, huffman, packed, palette},
    testing::Random,
};

const ROWS: usize = 4096;
const COLS: usize = 4096;
const ROUNDS: usize = 41;

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        Some(bundle) => print_bundle(Path::new(&bundle)),
        None => print_distributions(),
    }
}

fn print_bundle(path: &Path) -> Result<(), Box<dyn Error>> {
    let bundle = Bundle::open(path)?;
    let (mut elements, mut bytes, mut escapes, mut max_escapes) = (0, 0, 0, 0);
    for tensor in bundle.tensors() {
        if let Some(packed) = PackedTensor::of(tensor.stored()?) {
            elements += packed.grid().elements() as u64;
            bytes += packed.stored_bytes();
            escapes += packed.escape_count();
            max_escapes = max_escapes.max(packed.max_escapes());
            println!("{}: {}", tensor.name(), row(&packed));
        }
    }
    let bits = bytes as f64 * 8.0 / elements as f64;
    println!("all: {elements} elements, {bits:.4} bits, {escapes} escapes, at most {max_escapes} per row block");
    Ok(())
}

fn row<B: AsRef<[u8]>>(tensor: &PackedTensor<B>) -> String {
    let elements = tensor.grid().elements() as f64;
    let bits = tensor.stored_bytes() as f64 * 8.0 / elements;
    let escapes = tensor.escape_count() as f64 * 1e6 / elements;
    format!("{bits:.4} | {escapes:.1} | {}", tensor.max_escapes())
}

type Sampler = fn(&mut Random) -> f64;

fn print_distributions() -> Result<(), Box<dyn Error>> {
    let cases: [(&str, Sampler); 9] = [
        ("N(0, 0.02^2)", |r| r.normal() * 0.02),
        ("Student t, 5 degrees of freedom", |r| r.student(5) * 0.02),
        ("Student t, 3", |r| r.student(3) * 0.02),
        ("Student t, 2", |r| r.student(2) * 0.02),
        ("Student t, 1", |r| r.student(1) * 0.02),
        ("normal, 0.1 % exact zeros", |r| if r.uniform() < 0.001 { 0.0 } else { r.normal() * 0.02 }),
        ("normal, 0.38 % exact zeros", |r| if r.uniform() < 0.0038 { 0.0 } else { r.normal() * 0.02 }),
        ("normal, 1 % exact zeros", |r| if r.uniform() < 0.01 { 0.0 } else { r.normal() * 0.02 }),
        ("normal, 0.1 % subnormals", |r| if r.uniform() < 0.001 { r.normal() * 1e-39 } else { r.normal() * 0.02 }),
    ];
    println!(
        "| weights | packed: bits | escapes per million | max per row block | palette: bits | |\n|---|---|---|---|---|---|"
    );
    for (name, draw) in cases {
        let mut random = Random::new(1);
        let bytes: Vec<u8> =
            (0..ROWS * COLS).flat_map(|_| half::bf16::from_f64(draw(&mut random)).to_le_bytes()).collect();
        let matrix = Matrix::new(&bytes, ROWS, COLS)?;
        let histogram = Histogram::of(&bytes);
        let palette = palette::encode(matrix, CodeLimit::DEFAULT)?.coded_bytes() as f64 * 8.0 / (ROWS * COLS) as f64;
        match packed::pack(matrix, &histogram) {
            Ok(tensor) => {
                assert!(tensor.unpack() == bytes, "{name}: the unpacked weights differ");
                println!("| {name} | {} | {palette:.4} | packed |", row(&tensor));
                if name.starts_with("N(") || name.contains("0.38") {
                    speed(name, matrix, &histogram, &tensor)?;
                }
            }
            Err(why) => println!("| {name} | | | | {palette:.4} | {why} |"),
        }
    }
    Ok(())
}

/// Times interleaved rounds of all contenders, and prints the fastest. Histogram and code are precomputed.
fn speed(
    name: &str,
    matrix: Matrix<'_>,
    histogram: &Histogram,
    tensor: &PackedTensor<Vec<u8>>,
) -> Result<(), Box<dyn Error>> {
    let mut out = vec![0; matrix.bytes().len()];
    let code = Code::from_histogram(histogram, CodeLimit::DEFAULT).ok_or("no elements")?;
    let huffman = huffman::encode_with(matrix, &code)?;
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let mut seconds = [const { Vec::new() }; 4];
        for _ in 0..ROUNDS {
            let mut time = |at: usize, work: &mut (dyn FnMut() + Send)| {
                let start = Instant::now();
                pool.install(work);
                seconds[at].push(start.elapsed().as_secs_f64());
            };
            time(0, &mut || drop(packed::pack(matrix, histogram)));
            time(1, &mut || drop(huffman::encode_with(matrix, &code)));
            time(2, &mut || packed::decode_into(tensor, &mut out).expect("the size is right"));
            time(3, &mut || huffman::decode_into(&huffman, &mut out).expect("the size is right"));
        }
        let [pack, encode, unpack, decode] = seconds.map(|mut seconds| {
            seconds.sort_by(f64::total_cmp);
            matrix.bytes().len() as f64 / f64::from(1 << 30) / seconds[0]
        });
        println!(
            "{name}, {threads} threads, GiB/s: pack {pack:.2}, encode huffman {encode:.2}, unpack {unpack:.2}, decode huffman {decode:.2}"
        );
    }
    Ok(())
}
