//! Times the codec in memory on raw BF16 matrices, for comparison with peers (`cargo xtask bench-peers`).
//!
//! ```text
//! codec_speed FILE N,K[;N,K...] [--encoding NAME] [--threads T] [--rounds R] [--on-demand | --best]
//! ```
//! `FILE` contains the matrices without gaps; the encoding is `huffman` by default. Each round encodes and decodes all
//! of them into its own memory, with the matrices distributed over the threads as for bundles, and prints one line of
//! JSON. Encoding includes the digest of the original and those of every section; decoding includes validating the
//! sections and comparing the digest of the result. With `--on-demand` a round waits for a line on stdin, so that
//! rounds can be interleaved with those of another program.
//!
//! With `--best` a single line follows all rounds: bits per weight, and GB/s of weights per second of CPU time (all
//! threads of the process), of the best and of the median round. Another program on the processor affects CPU time less
//! than elapsed time.

use std::{
    error::Error,
    hint::black_box,
    io::BufRead,
    process::ExitCode,
    time::{Duration, Instant},
};

use rayon::prelude::*;
use unweight_format::{
    CodeLimit, Digest, EncodingId, Float, Matrix, StoredTensor, Survey, TileGrid,
    raw::{keep_freed_memory, zeroed},
};

struct Stored {
    tensor: StoredTensor<Vec<u8>>,
    digest: Digest,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("codec_speed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    // Like the command line.
    keep_freed_memory();
    let (mut threads, mut rounds, mut on_demand, mut best, mut encoding) = (1, 7, false, false, EncodingId::HUFFMAN);
    let mut positional = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--threads" => threads = arguments.next().ok_or("--threads needs a number")?.parse()?,
            "--rounds" => rounds = arguments.next().ok_or("--rounds needs a number")?.parse()?,
            "--on-demand" => on_demand = true,
            "--best" => best = true,
            "--encoding" => encoding = arguments.next().ok_or("--encoding needs a name")?.parse()?,
            _ => positional.push(argument),
        }
    }
    let [file, shapes] = positional.try_into().map_err(|_| "usage: codec_speed FILE N,K[;N,K...] [OPTIONS]")?;
    let bytes = std::fs::read(&file).map_err(|error| format!("{file}: {error}"))?;
    let matrices = split(&bytes, &shapes)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    // The first use of a pool starts its threads, which must not be timed.
    pool.broadcast(|_| ());
    if on_demand {
        for line in std::io::stdin().lock().lines() {
            line?;
            println!("{}", round(&pool, &matrices, encoding)?.json(threads));
        }
        return Ok(());
    }
    let mut all = Vec::new();
    for _ in 0..rounds {
        let round = round(&pool, &matrices, encoding)?;
        if !best {
            println!("{}", round.json(threads));
        }
        all.push(round);
    }
    if let (true, Some(first)) = (best, all.first()) {
        let bits = first.stored_bytes as f64 * 16.0 / first.original_bytes as f64;
        let (encode, decode) = (rates(&all, |round| round.encode), rates(&all, |round| round.decode));
        println!(
            "{bits:.4} bits per weight, GB/s of CPU time best (median): encode {:.3} ({:.3}), decode {:.3} ({:.3})",
            encode.0, encode.1, decode.0, decode.1
        );
    }
    Ok(())
}

/// Sizes and times of a round.
struct Round {
    original_bytes: usize,
    stored_bytes: u64,
    encode: Times,
    decode: Times,
}

/// Elapsed time, and CPU time of the process.
#[derive(Clone, Copy)]
struct Times {
    elapsed: Duration,
    cpu: Duration,
}

impl Round {
    fn json(&self, threads: usize) -> String {
        format!(
            "{{\"threads\": {threads}, \"original_bytes\": {}, \"stored_bytes\": {}, \"encode_seconds\": {}, \
             \"decode_seconds\": {}, \"encode_cpu_seconds\": {}, \"decode_cpu_seconds\": {}}}",
            self.original_bytes,
            self.stored_bytes,
            self.encode.elapsed.as_secs_f64(),
            self.decode.elapsed.as_secs_f64(),
            self.encode.cpu.as_secs_f64(),
            self.decode.cpu.as_secs_f64()
        )
    }
}

/// GB/s of CPU time of the best and of the median round.
fn rates(rounds: &[Round], times: impl Fn(&Round) -> Times) -> (f64, f64) {
    let rate = |round: &Round| round.original_bytes as f64 / times(round).cpu.as_secs_f64() / 1e9;
    let mut rates: Vec<f64> = rounds.iter().map(rate).collect();
    rates.sort_by(f64::total_cmp);
    (rates[rates.len() - 1], rates[rates.len() / 2])
}

/// Runs `work` and times it.
fn timed<T>(work: impl FnOnce() -> T) -> (T, Times) {
    let (start, cpu) = (Instant::now(), cpu_time());
    let result = work();
    (result, Times { elapsed: start.elapsed(), cpu: cpu_time().saturating_sub(cpu) })
}

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a `timespec`, which the call writes; the clock exists on every Unix system.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0, "the clock of CPU time exists");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn round(pool: &rayon::ThreadPool, matrices: &[Matrix<'_>], encoding: EncodingId) -> Result<Round, Box<dyn Error>> {
    let store = |&matrix: &Matrix<'_>| store(matrix, encoding);
    let (stored, encode) = timed(|| pool.install(|| matrices.par_iter().map(store).collect::<Result<Vec<_>, _>>()));
    let stored = stored?;
    let stored_bytes = stored.iter().map(|stored| stored.tensor.stored_bytes()).sum();
    let (restored, decode) = timed(|| pool.install(|| stored.par_iter().map(restore).collect::<Result<Vec<_>, _>>()));
    for (matrix, restored) in matrices.iter().zip(&restored?) {
        if matrix.bytes() != black_box(restored.as_slice()) {
            return Err("a decoded matrix differs from the original".into());
        }
    }
    let original_bytes = matrices.iter().map(|matrix| matrix.bytes().len()).sum();
    Ok(Round { original_bytes, stored_bytes, encode, decode })
}

fn store(matrix: Matrix<'_>, encoding: EncodingId) -> Result<Stored, String> {
    let survey = Survey::of(Float::Bf16, matrix.bytes());
    let tensor = StoredTensor::encode(encoding, matrix.into(), &survey, CodeLimit::DEFAULT);
    let tensor = tensor.map_err(|error| error.to_string())?;
    let sections: Vec<&[u8]> = tensor.sections().map(|(_, bytes)| bytes).collect();
    black_box(sections.par_iter().map(|bytes| Digest::of(bytes)).collect::<Vec<_>>());
    Ok(Stored { tensor, digest: survey.digest })
}

fn restore(stored: &Stored) -> Result<Vec<u8>, String> {
    // Like a reader: into memory on huge pages, and decoding validates the sections first.
    let mut bytes = zeroed(stored.tensor.grid().map_or(0, |grid| grid.elements() * 2));
    stored.tensor.decode(&mut bytes).map_err(|error| error.to_string())?;
    if Digest::of(&bytes) == stored.digest { Ok(bytes) } else { Err("digest mismatch".to_owned()) }
}

fn split<'a>(mut bytes: &'a [u8], shapes: &str) -> Result<Vec<Matrix<'a>>, Box<dyn Error>> {
    let mut matrices = Vec::new();
    for shape in shapes.split(';') {
        let (rows, cols) = shape.split_once(',').ok_or_else(|| format!("shape '{shape}': expected N,K"))?;
        let grid = TileGrid::new(rows.trim().parse()?, cols.trim().parse()?)?;
        let (matrix_bytes, rest) = bytes.split_at_checked(grid.elements() * 2).ok_or_else(|| {
            format!("shape {shape}: needs {} bytes, but {} are left", grid.elements() * 2, bytes.len())
        })?;
        matrices.push(Matrix::new(matrix_bytes, grid.rows(), grid.cols())?);
        bytes = rest;
    }
    if bytes.is_empty() {
        Ok(matrices)
    } else {
        Err(format!("{} bytes belong to no shape; add a shape", bytes.len()).into())
    }
}
