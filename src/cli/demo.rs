//! `unweight demo`: compresses, verifies and restores a generated model.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use serde::Serialize;
use unweight::format::{
    bundle::{self, CompressReport, DecompressOptions, DecompressReport, VerifyAfter, VerifyReport},
    testing::demo_model::{self, DemoOptions, DemoReport},
};

use super::{
    common::Ram,
    failure::{Failure, Result},
    output::{self, Console, Table},
    progress::Bar,
    report,
    scratch::Scratch,
    select::Select,
    size,
};

/// Arguments of `demo`.
#[derive(Args)]
pub struct Demo {
    /// Size of the model
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "128M")]
    size: u64,
    /// Keep model, bundle and restored files in this directory [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Random seed for the weights
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    ram: Ram,
}

#[derive(Serialize)]
struct Report {
    /// The model that was written.
    model: DemoReport,
    /// Time to write the model.
    write_seconds: f64,
    /// Report of `compress`.
    compress: CompressReport,
    /// Report of `verify`.
    verify: VerifyReport,
    /// Report of `decompress`.
    decompress: DecompressReport,
    /// Files compared.
    compared_files: u64,
    /// Bytes compared.
    compared_bytes: u64,
    /// Time to compare.
    compare_seconds: f64,
    /// True; otherwise the command fails.
    identical: bool,
}

impl Demo {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let temporary;
        check_free_space(self.dir.as_deref(), self.size)?;
        let home = match &self.dir {
            Some(dir) => {
                fs::create_dir_all(dir).map_err(Failure::io(dir.display()))?;
                if fs::read_dir(dir).map_err(Failure::io(dir.display()))?.next().is_some() {
                    return Err(Failure::new(
                        "directory-not-empty",
                        format!("{}: not empty", dir.display()),
                        "choose a new directory",
                    ));
                }
                dir.as_path()
            }
            None => {
                temporary = Scratch::new(&std::env::temp_dir(), "unweight-demo-")
                    .map_err(Failure::io("cannot create a temporary directory"))?;
                temporary.path()
            }
        };
        let report = self.steps(home, console)?;
        console.result("demo", &report, |out| {
            let mut table = Table::new(&["step", ">bytes", ">time", ">speed", "result"]);
            let mut row = |step: &str, bytes: u64, seconds: f64, result: String| {
                table.row([
                    step.to_owned(),
                    output::bytes(bytes),
                    output::seconds(seconds),
                    output::rate(bytes, seconds),
                    result,
                ]);
            };
            let Report { model, compress, verify, decompress, .. } = &report;
            let parameters = format!("{:.1} M parameters, {} tensors", model.parameters as f64 / 1e6, model.tensors);
            row("write a model", model.bytes, report.write_seconds, parameters);
            let smaller = format!(
                "{}, {} of the original",
                output::bytes(compress.stored_bytes),
                report::percent(compress.stored_bytes, compress.original_bytes)
            );
            row("compress", compress.original_bytes, compress.seconds, smaller);
            row("verify", verify.original_bytes, verify.seconds, format!("{} tensors, sound", verify.tensors));
            row("decompress", decompress.bytes, decompress.seconds, format!("{} files", decompress.files.len()));
            row("compare", report.compared_bytes, report.compare_seconds, "identical, byte for byte".to_owned());
            table.write(out)?;
            writeln!(out)?;
            report::totals(&compress.encodings, compress.original_bytes, compress.stored_bytes).write(out)?;
            if let Some(peak) = decompress.peak_rss_bytes {
                writeln!(out, "\npeak memory: {}", output::bytes(peak))?;
            }
            if let Some(dir) = &self.dir {
                writeln!(out, "kept in {}: model, bundle, restored", dir.display())?;
            }
            Ok(())
        })
    }

    fn steps(&self, home: &Path, console: Console) -> Result<Report> {
        let [model_dir, bundle_dir, restored_dir] = ["model", "bundle", "restored"].map(|name| home.join(name));
        let start = Instant::now();
        console.note(format_args!("writing a model of about {} ...", output::bytes(self.size)));
        let model = demo_model::write(&model_dir, &shape(self.size, self.seed))?;
        let write_seconds = start.elapsed().as_secs_f64();

        let options = self.select.options().ram_bytes(self.ram.bytes).verify(VerifyAfter::None);
        let bar = Bar::new(console, "compressing")?;
        let compress = bundle::compress(&model_dir, &bundle_dir, &options, &bar)?;
        bar.finish();

        let bar = Bar::new(console, "verifying")?;
        let verify = bundle::verify(&bundle_dir, None, &bar)?;
        bar.finish();
        if let Some(problem) = verify.problems.first() {
            return Err(Failure::mismatch(
                "self-check-failed",
                problem.message.clone(),
                "this is a bug in Unweight: please report it",
            ));
        }

        let bar = Bar::new(console, "decompressing")?;
        let options = DecompressOptions::default().threads(options.threads).ram_bytes(self.ram.bytes);
        let decompress = bundle::decompress(&bundle_dir, &restored_dir, &options, &bar)?;
        bar.finish();

        let start = Instant::now();
        let (compared_files, compared_bytes) = compare(&model_dir, &restored_dir)?;
        let compare_seconds = start.elapsed().as_secs_f64();
        Ok(Report {
            model,
            write_seconds,
            compress,
            verify,
            decompress,
            compared_files,
            compared_bytes,
            compare_seconds,
            identical: true,
        })
    }
}

/// Fails if a demo of this size cannot fit: the model, a bundle of at most the same size, and the restored files.
fn check_free_space(dir: Option<&Path>, size: u64) -> Result<()> {
    let home = dir.map_or_else(std::env::temp_dir, Path::to_path_buf);
    let existing = home.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("."));
    // If the system does not report free space, writing decides.
    let Ok(stat) = rustix::fs::statvfs(existing) else { return Ok(()) };
    let (free, needed) = (stat.f_bavail.saturating_mul(stat.f_frsize), size.saturating_mul(3));
    if free >= needed {
        return Ok(());
    }
    Err(Failure::new(
        "disk-full",
        format!(
            "{}: a demo of {} needs about {} of disk space, but {} are free",
            existing.display(),
            output::bytes(size),
            output::bytes(needed),
            output::bytes(free)
        ),
        "choose a smaller --size, or a --dir on another disk",
    ))
}

/// Returns the widest Llama shape with at least eight layers and about `bytes` bytes.
fn shape(bytes: u64, seed: u64) -> DemoOptions {
    // In units of hidden^2 elements: 2.5 for attention with a quarter as many key and value heads, 3 * 2.75 for the
    // MLP, and two embeddings of 8 * hidden rows.
    const PER_LAYER: f64 = 10.75;
    const EMBEDDINGS: f64 = 16.0;
    let layers = |hidden: u64| (bytes as f64 / 2.0 / (hidden * hidden) as f64 - EMBEDDINGS) / PER_LAYER;
    let hidden =
        [8192, 4096, 2048, 1024, 512, 256, 128].into_iter().find(|&hidden| layers(hidden) >= 8.0).unwrap_or(64);
    let heads = (hidden / 64).max(4) as usize;
    DemoOptions {
        layers: layers(hidden).round().max(2.0) as usize,
        hidden: hidden as usize,
        intermediate: hidden as usize * 11 / 4,
        heads,
        kv_heads: heads / 4,
        vocab: hidden as usize * 8,
        experts: 0,
        shards: (bytes >> 30).max(2) as usize,
        seed,
    }
}

/// Compares two directories, file by file and byte by byte.
fn compare(expected: &Path, got: &Path) -> Result<(u64, u64)> {
    let (names, rebuilt) = (files(expected)?, files(got)?);
    if names != rebuilt {
        return Err(Failure::mismatch(
            "self-check-failed",
            format!("{}: holds {rebuilt:?}, expected {names:?}", got.display()),
            "this is a bug in Unweight: please report it",
        ));
    }
    let mut total = 0;
    for name in &names {
        total += compare_file(&expected.join(name), &got.join(name))?;
    }
    Ok((names.len() as u64, total))
}

fn compare_file(expected: &Path, got: &Path) -> Result<u64> {
    let open = |path: &Path| File::open(path).map(BufReader::new).map_err(Failure::io(path.display()));
    let (mut expected_file, mut got_file) = (open(expected)?, open(got)?);
    let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut offset = 0;
    loop {
        let read = fill(&mut expected_file, &mut a).map_err(Failure::io(expected.display()))?;
        let again = fill(&mut got_file, &mut b).map_err(Failure::io(got.display()))?;
        if let Some(at) = (0..read.max(again)).find(|&at| at >= read || at >= again || a[at] != b[at]) {
            return Err(Failure::mismatch(
                "self-check-failed",
                format!("{}: differs from {} at byte {}", got.display(), expected.display(), offset + at as u64),
                "this is a bug in Unweight: please report it",
            ));
        }
        if read == 0 {
            return Ok(offset);
        }
        offset += read as u64;
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read(&mut buffer[done..])? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}

/// Returns the relative paths of all files below a directory, sorted.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(folder) = open.pop() {
        let path = root.join(&folder);
        for entry in fs::read_dir(&path).map_err(Failure::io(path.display()))? {
            let entry = entry.map_err(Failure::io(path.display()))?;
            let name = folder.join(entry.file_name());
            if entry.file_type().map_err(Failure::io(path.display()))?.is_dir() {
                open.push(name);
            } else {
                found.push(name);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_about_the_requested_size() {
        for bytes in [1 << 20, 16 << 20, 128 << 20, 2u64 << 30, 4 << 30, 16 << 30] {
            let options = shape(bytes, 1);
            let (hidden, layers) = (options.hidden as u64, options.layers as u64);
            let per_layer = hidden * hidden * 5 / 2 + 3 * hidden * options.intermediate as u64;
            let got = 2 * (layers * per_layer + 2 * hidden * options.vocab as u64);
            assert!((0.85..1.15).contains(&(got as f64 / bytes as f64)), "{bytes}: {got} with {options:?}");
            assert_eq!((options.hidden % options.heads, options.heads % options.kv_heads), (0, 0));
        }
    }

    #[test]
    fn differences_are_named() {
        let home = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| home.path().join(name));
        for folder in [&a, &b] {
            fs::create_dir_all(folder.join("deep")).unwrap();
            fs::write(folder.join("deep/file"), vec![7; (1 << 20) + 9]).unwrap();
        }
        assert_eq!(compare(&a, &b).unwrap(), (1, (1 << 20) + 9));
        let mut bytes = vec![7; (1 << 20) + 9];
        bytes[(1 << 20) + 3] = 8;
        fs::write(b.join("deep/file"), &bytes).unwrap();
        assert!(compare(&a, &b).unwrap_err().to_string().contains("byte 1048579"));
        fs::write(b.join("deep/file"), &bytes[..100]).unwrap();
        assert!(compare(&a, &b).unwrap_err().to_string().contains("byte 100"));
        fs::write(b.join("more"), "").unwrap();
        assert!(compare(&a, &b).unwrap_err().to_string().contains("more"));
    }
}
