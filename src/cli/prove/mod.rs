//! `unweight prove`: a certificate that a bundle has every bit of its source.

mod certificate;
#[cfg(feature = "gpu")]
mod logits;

use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use unweight::format::{
    bundle::{
        self, Bundle, DecompressOptions, Progress, VerifyOptions,
        manifest::{FILE_NAME, FileEntry, WeightsFile},
    },
    raw::{CARD_NAME, CARD_SOURCE_NAME, Input},
};

use super::{
    common::{Force, Ram},
    failure::{Failure, Result, refuse},
    output::{self, Console},
    printable::one_line,
    progress::Bar,
    scratch, sign, source,
};
use certificate::{BYTES_MAX, Certificate, FORMAT, FileDigest, Logits, PROMPTS_MAX, TensorDigest, VERSION, hex};

/// Arguments of `prove`.
#[derive(Args)]
pub struct Prove {
    /// Model and bundle; with --check, an optional bundle
    #[arg(value_name = "PATH", num_args = 0..=2)]
    paths: Vec<PathBuf>,
    /// Certificate to write
    #[arg(short, long, value_name = "FILE", default_value = "certificate.json", conflicts_with = "check")]
    output: PathBuf,
    /// Certificate to check
    #[arg(long, value_name = "CERTIFICATE")]
    check: Option<PathBuf>,
    /// Device that computes logits; cpu only for small models
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Prompts whose logits are recorded
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(PROMPTS_MAX)))]
    prompts: u16,
    /// Sign with this minisign secret key, to FILE.minisig
    #[arg(long, value_name = "KEY", conflicts_with = "check")]
    sign: Option<PathBuf>,
    /// File with the password of the key
    #[arg(long, value_name = "FILE", requires = "sign")]
    password_file: Option<PathBuf>,
    /// Check the signature, CERTIFICATE.minisig, with this minisign public key or key file
    #[arg(long, value_name = "KEY", requires = "check")]
    key: Option<String>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    ram: Ram,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    Cpu,
    Cuda,
    None,
}

#[derive(Serialize)]
struct Report {
    /// The certificate.
    certificate: PathBuf,
    /// Its own SHA-256.
    certificate_sha256: String,
    /// Identifies the bundle.
    manifest_digest: String,
    /// Files of the source.
    files: usize,
    /// Tensors with equal bits.
    tensors: usize,
    /// Device of the recorded logits.
    logits: Option<String>,
    /// Whether a signature was written, or checked with `--key`.
    signed: bool,
    /// Whether a bundle was compared.
    bundle_compared: bool,
    /// Whether the source was compared.
    source_compared: bool,
    /// Whether logits were computed.
    logits_compared: bool,
}

impl Prove {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        match (&self.check, &self.paths[..]) {
            (None, [model, bundle]) => self.write(model, bundle, console),
            (Some(certificate), []) => self.check(certificate, None, None, console),
            (Some(certificate), [bundle]) => self.check(certificate, None, Some(bundle), console),
            (Some(certificate), [model, bundle]) => self.check(certificate, Some(model), Some(bundle), console),
            _ => Err(Failure::new("usage", "MODEL and BUNDLE are needed", "run: unweight prove MODEL BUNDLE")),
        }
    }

    fn write(&self, model: &Path, bundle: &Path, console: Console) -> Result<()> {
        let outputs = [Some(self.output.clone()), self.sign.as_ref().map(|_| signature_of(&self.output))];
        let existing = outputs.into_iter().flatten().find(|file| file.symlink_metadata().is_ok());
        if let Some(path) = existing.filter(|_| !self.force.is_set) {
            return Err(bundle::BundleError::OutputExists { path }.into());
        }
        let secret =
            self.sign.as_deref().map(|key| sign::Secret::read(key, self.password_file.as_deref())).transpose()?;
        let opened = Bundle::open(bundle)?;
        let source = source::find(&[model.to_owned()], console)?;
        let mut certificate = self.examine(&opened, bundle, Some(&source.root), console)?;
        certificate.logits = self.logits(&opened, Some(&source.root), None, console)?;
        let text = certificate.seal()?;
        let write =
            |file: &Path, text: &str| scratch::write(file, text.as_bytes()).map_err(Failure::io(file.display()));
        let signature = secret.as_ref().map(|secret| secret.sign(text.as_bytes(), "certificate")).transpose()?;
        write(&self.output, &text)?;
        if let Some(signature) = &signature {
            write(&signature_of(&self.output), signature)?;
        }
        let report = self.report(&self.output, &certificate, (true, true), signature.is_some());
        print(&report, false, console)
    }

    fn check(&self, file: &Path, model: Option<&Path>, bundle: Option<&Path>, console: Console) -> Result<()> {
        let bytes = read(file)?;
        if let Some(key) = &self.key {
            sign::check(key, &bytes, &read(&signature_of(file))?, &signature_of(file))?;
        }
        let certificate = Certificate::parse(&file.display().to_string(), &bytes)?;
        let mut logits_compared = false;
        if let Some(dir) = bundle {
            let opened = Bundle::open(dir)?;
            let source = model.map(|model| source::find(&[model.to_owned()], console)).transpose()?;
            let root = source.as_ref().map(|found| &*found.root);
            let mut found = self.examine(&opened, dir, root, console)?;
            if let Some(recorded) = &certificate.logits {
                found.logits = self.logits(&opened, root, Some(recorded), console)?;
            }
            logits_compared = found.logits.is_some();
            if let Some(difference) = certificate.difference(&found, model.is_some()) {
                let message = format!("{}: {}", file.display(), one_line(&difference));
                let help = "use the bundle and the model that the certificate was made for";
                return Err(Failure::mismatch("certificate-mismatch", message, help));
            }
        }
        let compared = (bundle.is_some(), model.is_some());
        let mut report = self.report(file, &certificate, compared, self.key.is_some());
        report.logits_compared = logits_compared;
        if let Some(logits) = certificate.logits.as_ref().filter(|_| bundle.is_some() && !logits_compared) {
            console.note(format_args!("the logits on {} were not computed again", one_line(&logits.device)));
        }
        if self.key.is_none() && signature_of(file).exists() {
            let name = signature_of(file);
            console.note(format_args!("{} was not checked; give the maker's public key with --key", name.display()));
        }
        print(&report, true, console)
    }

    fn report(&self, file: &Path, certificate: &Certificate, compared: (bool, bool), signed: bool) -> Report {
        Report {
            certificate: file.to_owned(),
            certificate_sha256: certificate.certificate_sha256.clone(),
            manifest_digest: certificate.manifest_digest.clone(),
            files: certificate.source_files.len(),
            tensors: certificate.tensors.len(),
            logits: certificate.logits.as_ref().map(|logits| logits.device.clone()),
            signed,
            bundle_compared: compared.0,
            source_compared: compared.1,
            logits_compared: certificate.logits.is_some(),
        }
    }

    /// Restores every file, compares it with the source's, and records all digests.
    fn examine(&self, bundle: &Bundle, dir: &Path, root: Option<&Path>, console: Console) -> Result<Certificate> {
        self.check_lists(dir, root, console)?;
        let manifest = bundle.manifest();
        let bar = Bar::new(console, "proving")?;
        bar.start(manifest.files.iter().map(FileEntry::size).sum());
        let options = DecompressOptions::default().ram_bytes(self.ram.bytes);
        let (mut source_files, mut tensors) = (Vec::new(), Vec::new());
        for file in &manifest.files {
            let mut compare = Compare::new(file, root)?;
            let restored = bundle.write_file(file.name(), &mut compare, &options, &bar);
            let (bytes, sha256, parts) = compare.finish(restored.map(|_| ()))?;
            source_files.push(FileDigest { name: file.name().to_owned(), bytes, sha256 });
            let entries = file.weights().map_or(&[][..], |weights| &weights.tensors);
            tensors.extend(entries.iter().zip(parts).map(|(entry, sha256)| TensorDigest {
                file: file.name().to_owned(),
                name: entry.name.clone(),
                dtype: entry.dtype.to_string(),
                shape: entry.shape.clone(),
                encoding: entry.encoding.to_string(),
                sha256,
            }));
        }
        let mut stored: Vec<_> = manifest.files.iter().flat_map(FileEntry::stored).collect();
        stored.push((FILE_NAME.to_owned(), 0));
        stored.sort();
        let bundle_files = stored.iter().map(|(name, bytes)| {
            // The bundle's own card replaces the source's.
            let is_replaced =
                name == CARD_NAME && dir.join(CARD_SOURCE_NAME).metadata().is_ok_and(|found| found.len() == *bytes);
            let path = dir.join(if is_replaced { CARD_SOURCE_NAME } else { name });
            digest(&path, name, &bar)
        });
        let bundle_files = bundle_files.collect::<Result<Vec<_>>>()?;
        bar.finish();
        Ok(Certificate {
            format: FORMAT.to_owned(),
            version: VERSION,
            creator: concat!("unweight ", env!("CARGO_PKG_VERSION")).to_owned(),
            manifest_digest: manifest.manifest_digest.to_string(),
            source_files,
            bundle_files,
            tensors,
            logits: None,
            certificate_sha256: String::new(),
        })
    }

    /// Compares names and sizes first: a file that only the source has would not be proven.
    fn check_lists(&self, dir: &Path, root: Option<&Path>, console: Console) -> Result<()> {
        let options = VerifyOptions::default().quick(true).against(root.map(Path::to_path_buf));
        let report = bundle::verify_with(dir, &options, &Bar::new(console, "checking")?)?;
        let problem = report.problems.iter().find(|problem| !problem.is_extra);
        refuse(problem, "`unweight verify BUNDLE --against MODEL` lists all problems; nothing was proven")
    }

    /// Computes logits, on the prompts of `recorded` if its device is here.
    #[cfg(feature = "gpu")]
    fn logits(
        &self,
        bundle: &Bundle,
        root: Option<&Path>,
        recorded: Option<&Logits>,
        console: Console,
    ) -> Result<Option<Logits>> {
        let bar = Bar::new(console, "computing")?;
        let prompts = || -> Result<Vec<Vec<u32>>> {
            let config = unweight::model::ModelConfig::of_bundle(bundle).map_err(Failure::other)?;
            let Some(recorded) = recorded else { return Ok(logits::prompts(&config, self.prompts.into())) };
            let prompts: Vec<_> = recorded.prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
            let limit = config.max_positions as usize;
            if prompts.iter().any(|tokens| tokens.len() > limit) {
                let message = format!("the certificate has a prompt of more than the model's {limit} positions");
                let help = "make it again with `unweight prove MODEL BUNDLE`";
                return Err(Failure::mismatch("certificate-invalid", message, help));
            }
            Ok(prompts)
        };
        let is_of = |cpu: bool| recorded.is_none_or(|recorded| (recorded.device == logits::CPU) == cpu);
        match self.device {
            Device::Cpu if is_of(true) && logits::runs_on_cpu(bundle) => {
                logits::on_cpu(bundle, root, &prompts()?, &bar).map(Some)
            }
            Device::Cuda if is_of(false) => logits::on_gpu(bundle, &prompts()?, &bar).map(Some),
            _ => Ok(None),
        }
    }

    #[cfg(not(feature = "gpu"))]
    fn logits(&self, _: &Bundle, _: Option<&Path>, _: Option<&Logits>, _: Console) -> Result<Option<Logits>> {
        match self.device {
            Device::Cuda => Err(super::absent::option("--device cuda", "gpu")),
            _ => Ok(None),
        }
    }
}

fn print(report: &Report, is_check: bool, console: Console) -> Result<()> {
    console.summary("prove", report, |out| {
        let compared = match (report.bundle_compared, report.source_compared) {
            (_, true) => "source and bundle have the same bits",
            (true, false) => "the bundle matches the certificate",
            _ => "the certificate is undamaged; no bundle was compared",
        };
        let logits = report.logits.as_ref().filter(|_| report.logits_compared);
        writeln!(
            out,
            "{}: {}, {}{}, {}: {compared}",
            report.certificate.display(),
            output::count(report.files, "file"),
            output::count(report.tensors, "tensor"),
            logits.map_or(String::new(), |device| format!(", logits on {}", one_line(device))),
            match (report.signed, is_check) {
                (true, _) => "signed",
                (false, true) => "signature not checked",
                (false, false) => "not signed",
            },
        )
    })
}

fn signature_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".minisig");
    name.into()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let input = Input::open(path)?;
    if input.bytes() > BYTES_MAX {
        let message = format!("{}: {} bytes, limit {BYTES_MAX}", path.display(), input.bytes());
        return Err(Failure::new("file-too-large", message, "give a certificate of `unweight prove`"));
    }
    Ok(input.read(0, input.bytes())?)
}

/// Returns the SHA-256 of a file of the bundle.
fn digest(path: &Path, name: &str, progress: &dyn Progress) -> Result<FileDigest> {
    let input = Input::open(path)?;
    let mut sha = Sha256::new();
    input.stream(0, input.bytes(), |piece| {
        sha.update(piece);
        if progress.cancelled() { Err(bundle::BundleError::Cancelled) } else { Ok(()) }
    })?;
    Ok(FileDigest { name: name.to_owned(), bytes: input.bytes(), sha256: hex(sha) })
}

/// Receives the bytes of a restored file; compares them with the source's, and computes digests of file and tensors.
struct Compare {
    name: String,
    source: Option<fs::File>,
    whole: Sha256,
    bytes: u64,
    /// Where the parts end: the header, then each tensor.
    ends: Vec<u64>,
    part: Sha256,
    parts: Vec<String>,
    /// The first byte that differs.
    difference: Option<u64>,
    buffer: Vec<u8>,
}

impl Compare {
    fn new(file: &FileEntry, root: Option<&Path>) -> Result<Self> {
        let path = root.map(|root| root.join(file.name()));
        let source = path.map(|path| fs::File::open(&path).map_err(Failure::io(path.display()))).transpose()?;
        Ok(Self {
            name: file.name().to_owned(),
            source,
            whole: Sha256::new(),
            bytes: 0,
            ends: file.weights().map_or_else(Vec::new, ends),
            part: Sha256::new(),
            parts: Vec::new(),
            difference: None,
            buffer: Vec::new(),
        })
    }

    /// Ends the parts that end here, empty ones included.
    fn end_parts(&mut self) {
        while self.ends.get(self.parts.len()).is_some_and(|&end| end == self.bytes) {
            self.parts.push(hex(std::mem::take(&mut self.part)));
        }
    }

    /// Returns size, digest of the file, and digests of its tensors.
    fn finish(mut self, restored: std::result::Result<(), bundle::BundleError>) -> Result<(u64, String, Vec<String>)> {
        let differs = |at: u64| {
            let message = format!("{}: byte {at} differs between source and bundle", one_line(&self.name));
            Failure::mismatch("source-differs", message, "give the model that the bundle was made from")
        };
        if let Some(at) = self.difference {
            return Err(differs(at));
        }
        restored?;
        if let Some(source) = &mut self.source
            && source.read(&mut [0]).map_err(Failure::io(&self.name))? > 0
        {
            return Err(differs(self.bytes));
        }
        self.end_parts();
        // The first part is the header.
        let tensors = self.parts.split_off(1.min(self.parts.len()));
        Ok((self.bytes, hex(self.whole), tensors))
    }
}

impl Write for Compare {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.end_parts();
        let left = self.ends.get(self.parts.len()).map_or(u64::MAX, |end| end - self.bytes);
        let bytes = &bytes[..bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX)).min(1 << 20)];
        if let Some(source) = &mut self.source {
            self.buffer.resize(bytes.len(), 0);
            let same = source.read_exact(&mut self.buffer).map(|()| self.buffer == bytes);
            if !same.unwrap_or(false) {
                let differs = self.buffer.iter().zip(bytes).take_while(|(a, b)| a == b).count();
                self.difference = Some(self.bytes + differs as u64);
                return Err(io::Error::other("the source differs"));
            }
        }
        self.whole.update(bytes);
        self.part.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn ends(file: &WeightsFile) -> Vec<u64> {
    let mut end = file.header_bytes;
    let mut ends = vec![end];
    for tensor in &file.tensors {
        end += tensor.original_bytes().unwrap_or(0);
        ends.push(end);
    }
    ends
}
