//! Compares the sizes of the compact and the Huffman encoding, tensor by tensor, for safetensors files or N(0, 0.02^2):
//! `cargo run --release -p unweight-format --example compact_sizes -- [FILES]`.

use std::{env, fs};

use unweight_format::{
    CodeLimit, Histogram, Matrix, TileGrid,
    raw::{compact, huffman},
    safetensors::{Dtype, Header, SOURCE_HEADER_MAX},
    testing::Weights,
};

fn main() {
    let files: Vec<String> = env::args().skip(1).collect();
    println!(
        "{:44} {:>13} {:>9} {:>9} {:>7} {:>8} {:>7}",
        "tensor", "shape", "compact", "huffman", "more", "escapes", "book"
    );
    let mut sums = (0, 0, 0);
    if files.is_empty() {
        let bytes = Weights::TRAINED.bytes(4096 * 4096, 1);
        row("N(0, 0.02^2)", &bytes, 4096, 4096, &mut sums);
    }
    for file in files {
        let bytes = fs::read(&file).expect("the file can be read");
        let header = Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX).expect("a safetensors file");
        for tensor in header.tensors.iter().filter(|tensor| tensor.dtype == Dtype::Bf16 && tensor.shape.len() > 1) {
            let grid = TileGrid::fold(&tensor.shape).expect("a matrix");
            let at = tensor.offset as usize;
            row(&tensor.name, &bytes[at..at + 2 * grid.elements()], grid.rows(), grid.cols(), &mut sums);
        }
    }
    let (elements, compact, huffman) = sums;
    let bits = |bytes: u64| bytes as f64 * 8.0 / elements as f64;
    println!(
        "all: {:.4} bits compact, {:.4} Huffman: {:+.3} %",
        bits(compact),
        bits(huffman),
        (compact as f64 / huffman as f64 - 1.0) * 100.0
    );
}

fn row(
    name: &str,
    bytes: &[u8],
    rows: usize,
    cols: usize,
    (elements, all_compact, all_huffman): &mut (usize, u64, u64),
) {
    let matrix = Matrix::new(bytes, rows, cols).expect("a matrix");
    let huffman = huffman::encode(matrix, CodeLimit::DEFAULT).expect("small").coded_bytes();
    let bits = |bytes: u64| bytes as f64 * 8.0 / (rows * cols) as f64;
    let shape = format!("{rows}x{cols}");
    match compact::encode(matrix, &Histogram::of(bytes)) {
        Ok(tensor) => {
            let compact = tensor.stored_bytes();
            let more = (compact as f64 / huffman as f64 - 1.0) * 100.0;
            println!(
                "{name:44} {shape:>13} {:9.4} {:9.4} {more:+6.2}% {:8} {:7}",
                bits(compact),
                bits(huffman),
                tensor.escape_count(),
                tensor.book().len()
            );
            *elements += rows * cols;
            *all_compact += compact;
            *all_huffman += huffman;
        }
        Err(why) => println!("{name:44} {shape:>13} {:>9} {:9.4}  {why}", "-", bits(huffman)),
    }
}
