//! The cost of each code limit: bits per element of whole Huffman tensors, and of codes alone.
//!
//! ```text
//! code_limits                    N(0, 0.02^2), [4096, 4096]
//! code_limits FILE N,K           a matrix of little-endian BF16
//! ```

use std::{error::Error, process::ExitCode};

use unweight_format::{
    CodeLimit, Histogram, Matrix,
    raw::{Code, huffman},
    testing::Weights,
};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("code_limits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (bytes, rows, cols) = match arguments.as_slice() {
        [] => (Weights::TRAINED.bytes(4096 * 4096, 0), 4096, 4096),
        [file, shape] => {
            let (rows, cols) = shape.split_once(',').ok_or("write the shape as N,K")?;
            (std::fs::read(file).map_err(|error| format!("{file}: {error}"))?, rows.parse()?, cols.parse()?)
        }
        _ => return Err("usage: code_limits [FILE N,K]".into()),
    };
    let matrix = Matrix::new(&bytes, rows, cols)?;
    let histogram = Histogram::of(&bytes);
    println!("entropy of the exponents: {:.4} bits", histogram.entropy_bits());
    println!("| limit | code bits | whole tensor, bits/element | verbatim rows |");
    println!("|---|---|---|---|");
    for bits in 6..=15 {
        let code = Code::from_histogram(&histogram, CodeLimit::new(bits)?).ok_or("no elements")?;
        let tensor = huffman::encode_with(matrix, &code)?;
        let whole = tensor.coded_bytes() as f64 * 8.0 / matrix.grid().elements() as f64;
        let verbatim = tensor.verbatim_exponents().len() / 64;
        println!("| {bits} | {:.4} | {whole:.4} | {verbatim} |", code.mean_bits(&histogram));
    }
    Ok(())
}
