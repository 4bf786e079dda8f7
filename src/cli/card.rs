//! `unweight card`: the model card of a bundle.

mod speed;

use std::{
    fmt::Write as _,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use unweight::format::{
    bundle::{
        self, Bundle, VerifyOptions,
        manifest::{FILE_NAME, FileEntry},
    },
    raw::{self, CARD_NAME as CARD, CARD_SOURCE_NAME as SOURCE_CARD},
};

use super::{
    archive,
    common::{Force, Ram, Threads},
    failure::{Failure, Result, refuse},
    output::Console,
    progress::Bar,
    scratch, source,
};
use speed::Speed;

/// Marks cards of this command, which it may replace.
const MARK: &str = "<!-- `unweight card` wrote this file and replaces it. -->";
/// Maximum size of a card, bytes.
const CARD_MAX: u64 = 4 << 20;
/// Keys of the source's card that hold for the bundle, too.
const KEPT: [&str; 5] = ["license", "license_name", "license_link", "language", "pipeline_tag"];

/// Arguments of `card`.
#[derive(Args)]
pub struct Card {
    /// Bundle directory
    bundle: PathBuf,
    /// Source of the bundle, such as org/name [default: `_name_or_path` of config.json]
    #[arg(long, value_name = "NAME")]
    base_model: Option<String>,
    /// Name on the Hub, for the commands in the card [default: name of the directory]
    #[arg(long, value_name = "NAME")]
    repository: Option<String>,
    /// Also compare with the source: a directory, file, quoted glob or Hugging Face model
    #[arg(long, value_name = "SOURCE")]
    against: Option<PathBuf>,
    /// Add a table of speeds from the JSON output of `unweight-bench decode BUNDLE`
    #[arg(long, value_name = "FILE")]
    speed: Option<PathBuf>,
    /// File to write; - is stdout [default: README.md of the bundle]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Report {
    /// The file; null for stdout.
    card: Option<PathBuf>,
    /// The model that the bundle was made from.
    base_model: Option<String>,
    /// License in the source's card.
    license: Option<String>,
    /// Bytes of all source files.
    original_bytes: u64,
    /// Bytes of all files of the bundle.
    stored_bytes: u64,
    /// Weights in GPU memory, if all are packed or raw.
    weight_bytes: Option<u64>,
    /// Identifies the bundle.
    manifest_digest: String,
}

/// What the card states besides the report.
struct Facts {
    verified: bundle::VerifyReport,
    /// The share of the source's bytes that the bundle takes.
    ratio: f64,
    memory: GpuMemory,
    /// SHA-256 of `unweight.json`.
    manifest_sha256: String,
    /// Lines of the source's front matter.
    kept: Vec<String>,
    speed: Option<Speed>,
}

/// What an engine needs on a GPU.
#[derive(Default)]
struct GpuMemory {
    weight_bytes: Option<u64>,
    cache_token_bytes: Option<u64>,
}

impl Card {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        if console.json && self.output.as_deref().is_some_and(archive::is_stream) {
            let help = "with -o -, the card goes to stdout; use -o FILE with --json";
            return Err(Failure::new("usage", "-o - cannot be combined with --json", help));
        }
        let bundle = Bundle::open(&self.bundle)?;
        let target = self.target(&bundle)?;
        let digest = bundle.manifest().manifest_digest.to_string();
        let speed = self.speed.as_deref().map(|file| Speed::read(file, &digest)).transpose()?;
        let source_card = bundle.copied(CARD, CARD_MAX)?.unwrap_or_default();
        let verified = self.verify(console)?;
        let manifest = bundle.manifest();
        let text = bundle.copied("config.json", CARD_MAX)?.unwrap_or_default();
        let config: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        let named = config["_name_or_path"].as_str().filter(|name| is_name(name)).map(str::to_owned);
        let original_bytes = manifest.files.iter().map(FileEntry::size).sum();
        let json = fs::read(self.bundle.join(FILE_NAME)).map_err(Failure::io(FILE_NAME))?;
        let facts = Facts {
            ratio: verified.stored_bytes as f64 / (original_bytes as f64).max(1.0),
            verified,
            memory: gpu_memory(&bundle),
            manifest_sha256: Sha256::digest(&json).iter().map(|byte| format!("{byte:02x}")).collect(),
            kept: kept_lines(&String::from_utf8_lossy(&source_card)),
            speed,
        };
        let report = Report {
            card: target.clone(),
            base_model: self.base_model.clone().or(named),
            license: value_of(&facts.kept, "license"),
            original_bytes,
            stored_bytes: facts.verified.stored_bytes,
            weight_bytes: facts.memory.weight_bytes,
            manifest_digest: digest,
        };
        if let Some(name) = report.base_model.as_ref().filter(|name| !is_name(name)) {
            let help = "give --base-model org/name";
            return Err(Failure::new("usage", format!("'{name}' is not the name of a model"), help));
        }
        let card = self.text(&bundle, &report, &facts);
        match &target {
            None => {
                io::stdout().write_all(card.as_bytes())?;
                return Ok(());
            }
            Some(file) => self.write(&bundle, file, &card)?,
        }
        if report.base_model.is_none() {
            console.note("note: the card names no base model; --base-model org/name adds it");
        }
        console.summary("card", &report, |out| {
            let file = target.as_deref().unwrap_or(Path::new(CARD)).display();
            writeln!(out, "{file}: written; the bundle is sound, {:.1} % of its source", facts.ratio * 100.0)
        })
    }

    /// Returns the file to write. Fails if it is not to be replaced.
    fn target(&self, bundle: &Bundle) -> Result<Option<PathBuf>> {
        let (file, is_bundle_card) = match &self.output {
            Some(file) if archive::is_stream(file) => return Ok(None),
            Some(file) => (file.clone(), false),
            None => (self.bundle.join(CARD), true),
        };
        let listed = |name: &str| bundle.manifest().files.iter().any(|file| file.name() == name);
        if is_bundle_card && listed(SOURCE_CARD) {
            let message = format!("{SOURCE_CARD}: a file of the source has the name that the bundle's card needs");
            return Err(Failure::new("file-name-reserved", message, "write the card elsewhere with -o FILE"));
        }
        let is_of_source = is_bundle_card && listed(CARD) && !self.bundle.join(SOURCE_CARD).exists();
        let is_ours = || fs::read_to_string(&file).is_ok_and(|text| text.contains(MARK));
        if file.symlink_metadata().is_ok() && !is_of_source && !self.force.is_set && !is_ours() {
            let message = format!("{}: exists, and is not a card of this command", file.display());
            return Err(Failure::new("output-exists", message, "choose another name, or replace it with --force"));
        }
        Ok(Some(file))
    }

    /// Decodes and compares all of the bundle. A card only states what is true.
    fn verify(&self, console: Console) -> Result<bundle::VerifyReport> {
        let against = self.against.as_ref();
        let against = against.map(|source| source::find(std::slice::from_ref(source), console)).transpose()?;
        let options = VerifyOptions::default()
            .against(against.as_ref().map(|found| found.root.clone()))
            .ram_bytes(self.ram.bytes)
            .threads(self.threads.count);
        let bar = Bar::new(console, "verifying")?;
        let report = bundle::verify_with(&self.bundle, &options, &bar)?;
        bar.finish();
        refuse(report.problems.first(), "`unweight verify` lists all problems; the card was not written")?;
        Ok(report)
    }

    /// Writes the card. That of the source makes room, and keeps its bytes.
    fn write(&self, bundle: &Bundle, file: &Path, card: &str) -> Result<()> {
        let kept = self.bundle.join(SOURCE_CARD);
        let listed = bundle.manifest().files.iter().any(|entry| entry.name() == CARD);
        if self.output.is_none() && listed && !kept.exists() {
            fs::rename(file, &kept).map_err(Failure::io(file.display()))?;
        }
        scratch::write(file, card.as_bytes()).map_err(Failure::io(file.display()))
    }

    fn name(&self) -> String {
        self.repository.clone().unwrap_or_else(|| {
            let dir = std::path::absolute(&self.bundle).ok();
            let name = dir.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
            name.unwrap_or_else(|| "bundle".to_owned())
        })
    }

    /// Returns the text of the card.
    fn text(&self, bundle: &Bundle, report: &Report, facts: &Facts) -> String {
        let (name, options) = (self.name(), &bundle.manifest().options);
        let mut text = String::from("---\n");
        // Writing to a string does not fail.
        if let Some(base) = &report.base_model {
            _ = writeln!(text, "base_model: {base}\nbase_model_relation: quantized");
        }
        text += "library_name: unweight\n";
        facts.kept.iter().for_each(|line| _ = writeln!(text, "{line}"));
        _ = write!(text, "tags:\n- unweight\n- lossless\n- compression\n---\n\n{MARK}\n\n# {name}\n\n");
        let of = report.base_model.as_ref().map_or_else(
            || "a model".to_owned(),
            |base| if base.contains('/') { format!("[{base}](https://huggingface.co/{base})") } else { base.clone() },
        );
        _ = write!(
            text,
            "{of}, losslessly compressed by [Unweight](https://crates.io/crates/unweight): every file of the source \
             is restored byte for byte, and GPUs compute from the compressed weights.\n\n\
             | | source | this bundle |\n|---|---:|---:|\n| all files | {} | {} ({:.1} %) |\n",
            size(report.original_bytes),
            size(report.stored_bytes),
            facts.ratio * 100.0,
        );
        let tensors: Vec<_> = bundle.tensors().map(|tensor| tensor.report()).collect();
        for total in raw::encoding_totals(&tensors) {
            _ = writeln!(
                text,
                "| {} tensors, `{}` | {} | {} |",
                total.tensors,
                total.encoding,
                size(total.original_bytes),
                size(total.stored_bytes)
            );
        }
        _ = writeln!(text, "\nProfile `{}`, scope `{}`.", options.profile, options.scope);
        if facts.memory.weight_bytes.is_some() || facts.memory.cache_token_bytes.is_some() {
            text += "\n## GPU memory\n\n| | |\n|---|---:|\n";
        }
        if let Some(bytes) = facts.memory.weight_bytes {
            _ = writeln!(text, "| weights | {} |", size(bytes));
        }
        if let Some(bytes) = facts.memory.cache_token_bytes {
            _ = writeln!(text, "| KV cache, per token, BF16 | {bytes} bytes |");
        }
        text += &facts.speed.as_ref().map(Speed::section).unwrap_or_default();
        _ = write!(
            text,
            "\n## Run\n\n```sh\nunweight generate {name} --chat --prompt \"Why is the sky blue?\"\n\
             unweight serve {name} --port 8000      # OpenAI-compatible HTTP API\n\
             vllm serve {name}                      # with the Python package `unweight`\n```\n\n\
             ## Restore the source\n\n```sh\nhf download {name} --local-dir bundle\n\
             unweight decompress bundle -o model\n```\n\n## Verification\n\n\
             `unweight {}` decoded all {} tensors and compared every digest{}: sound. Repeat it with\n\
             `unweight verify bundle`.\n\n| | |\n|---|---|\n| manifest digest | `{}` |\n\
             | SHA-256 of `{FILE_NAME}` | `{}` |\n| written by | `{}` |\n",
            env!("CARGO_PKG_VERSION"),
            facts.verified.tensors,
            if facts.verified.against_source { ", and all files with the source" } else { "" },
            report.manifest_digest,
            facts.manifest_sha256,
            super::printable::one_line(&bundle.manifest().creator),
        );
        text
    }
}

/// Returns the lines of the front matter that the bundle's card keeps: its keys, with the lines of their lists.
fn kept_lines(card: &str) -> Vec<String> {
    let Some((_, rest)) = card.split_once("---\n").filter(|(before, _)| before.trim().is_empty()) else {
        return Vec::new();
    };
    let (mut lines, mut keeps) = (Vec::new(), false);
    for line in rest.lines().take_while(|line| line.trim_end() != "---") {
        let continues = line.starts_with([' ', '-', '\t']);
        if !continues {
            keeps = line.split_once(':').is_some_and(|(key, _)| KEPT.contains(&key));
        }
        if keeps && !line.chars().any(char::is_control) {
            lines.push(line.trim_end().to_owned());
        }
    }
    lines
}

fn value_of(lines: &[String], key: &str) -> Option<String> {
    let value = lines.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(value.trim().trim_matches(['"', '\'']).to_owned()).filter(|value| !value.is_empty())
}

/// Whether a text is `name` or `org/name`.
fn is_name(text: &str) -> bool {
    let plain = |part: &str| {
        let usable = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(usable)
    };
    text.split('/').count() <= 2 && text.split('/').all(plain)
}

/// Formats bytes in the decimal unit of which there is at least one.
fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        // 999,995 and up would print as 1000.00.
        999_995_000.. => (1e9, "GB"),
        999_995.. => (1e6, "MB"),
        1000.. => (1e3, "KB"),
        _ => return format!("{bytes} bytes"),
    };
    format!("{:.2} {name}", bytes as f64 / unit)
}

/// Returns the GPU memory of a bundle. Only packed and raw weights stay as they are stored.
#[cfg(feature = "gpu")]
fn gpu_memory(bundle: &Bundle) -> GpuMemory {
    use unweight::format::EncodingId;

    // The engine does not run other families.
    let Ok(config) = unweight::model::ModelConfig::of_bundle(bundle) else { return GpuMemory::default() };
    let tensors = bundle.tensors().map(|tensor| tensor.report()).filter(|tensor| bundle.is_of_model(&tensor.file));
    let stays = |encoding| [EncodingId::PACKED, EncodingId::RAW].contains(&encoding);
    let sum = tensors.map(|tensor| stays(tensor.encoding).then_some(tensor.stored_bytes)).sum();
    GpuMemory { weight_bytes: sum, cache_token_bytes: Some(config.kv_bytes_per_token()) }
}

#[cfg(not(feature = "gpu"))]
fn gpu_memory(_: &Bundle) -> GpuMemory {
    GpuMemory::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn front_matter_keeps_the_license() {
        let card = "---\nlicense: other\nlicense_name: \"x y\"\ntags:\n- a\nlanguage:\n- en\n- de\nextra: 1\n---\nlicense: no\n";
        let kept = kept_lines(card);
        assert_eq!(kept, ["license: other", "license_name: \"x y\"", "language:", "- en", "- de"]);
        assert_eq!(value_of(&kept, "license").as_deref(), Some("other"));
        assert_eq!(value_of(&kept, "license_name").as_deref(), Some("x y"));
        for none in ["", "license: mit\n", "text\n---\nlicense: mit\n---\n"] {
            assert!(kept_lines(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn sizes_have_a_fitting_unit() {
        let sizes = [999, 1000, 14_000, 999_994, 999_995, 16_000_000, 999_994_999, 999_995_000, 16_060_000_000];
        let texts = [
            "999 bytes",
            "1.00 KB",
            "14.00 KB",
            "999.99 KB",
            "1.00 MB",
            "16.00 MB",
            "999.99 MB",
            "1.00 GB",
            "16.06 GB",
        ];
        assert_eq!(sizes.map(size), texts);
    }

    #[test]
    fn names_of_models() {
        assert!(is_name("org/name-1.5") && is_name("gpt2"));
        for name in ["", "/a", "a/", "a/b/c", "../x", "a b", "a\nb", ".x"] {
            assert!(!is_name(name), "{name}");
        }
    }
}
