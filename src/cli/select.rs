//! Options and reports that `plan`, `compress` and `demo` share: which tensors get which encoding.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use unweight::format::{
    CodeLimit, EncodingId,
    bundle::{CompressOptions, EncodingTotal, LargeCopy, Profile, Scope, Selection, TensorReport, UnmarkedConfig},
};

use super::{
    common::Threads,
    completions,
    output::{self, Remark, Table},
    source::LocatedModel,
};

/// Options that decide the encoding of each tensor.
#[derive(Args)]
pub struct Select {
    /// What to optimise for: distribution (smallest), packed (12 bits, fastest on a GPU), compact (small, runs directly
    /// up to batch 32), inference (the report's pipelines) or palette
    #[arg(long, value_name = "PROFILE", default_value = "distribution", value_parser = profile,
          add = ArgValueCandidates::new(completions::profiles))]
    profile: Profile,
    /// Tensors to compress: mlp, linear (MLP and attention) or all [default: all, or mlp with --profile inference]
    #[arg(long, value_name = "SCOPE", value_parser = scope,
          add = ArgValueCandidates::new(completions::scopes))]
    scope: Option<Scope>,
    /// Longest Huffman code, 6 to 15 bits; shorter decodes faster, longer compresses better
    #[arg(long, value_name = "BITS", value_parser = code_limit, default_value_t = CodeLimit::DEFAULT.bits())]
    code_limit: u32,
    /// Compress only matching tensors; * and ? are wildcards; repeatable
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Leave matching tensors raw; repeatable
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Leave out matching files and directories next to the weights; repeatable
    #[arg(long, value_name = "GLOB")]
    skip: Vec<String>,
    /// JSON file with an encoding per tensor (docs/reference/plan-files.md)
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
}

impl Select {
    /// Returns options for every profile and every effective code limit. The scope is `--scope` or the profile's
    /// default.
    pub fn all_options(&self, model: &LocatedModel) -> Vec<CompressOptions> {
        let limits = || (0..=32).filter_map(|bits| CodeLimit::new(bits).ok());
        let of = |&profile: &Profile| {
            let options = self.options_for(model).profile(profile);
            let options = options.scope(self.scope.unwrap_or(profile.default_scope()));
            let limits: Vec<CodeLimit> = match profile {
                Profile::Distribution | Profile::Inference => limits().collect(),
                _ => vec![options.code_limit],
            };
            limits.into_iter().map(move |limit| options.clone().code_limit(limit))
        };
        Profile::ALL.iter().flat_map(of).collect()
    }

    /// Returns the library's options for the files of a model.
    pub fn options_for(&self, model: &LocatedModel) -> CompressOptions {
        let options = self.options();
        let selection = model.select(options.selection.clone());
        options.selection(selection)
    }

    /// Returns the library's options.
    pub fn options(&self) -> CompressOptions {
        CompressOptions::new(self.profile)
            .scope(self.scope.unwrap_or(self.profile.default_scope()))
            .code_limit(
                u8::try_from(self.code_limit)
                    .ok()
                    .and_then(|bits| CodeLimit::new(bits.into()).ok())
                    .unwrap_or(CodeLimit::DEFAULT),
            )
            .include(self.include.clone())
            .exclude(self.exclude.clone())
            .selection(Selection::default().skip(self.skip.clone()))
            .plan_file(self.plan.clone())
            .threads(self.threads.threads)
    }
}

pub fn profile(text: &str) -> Result<Profile, String> {
    text.parse().map_err(|error: unweight::format::UnknownName| error.to_string())
}

fn scope(text: &str) -> Result<Scope, String> {
    text.parse().map_err(|error: unweight::format::UnknownName| error.to_string())
}

fn code_limit(text: &str) -> Result<u32, String> {
    let bits: u32 = text.parse().map_err(|_| "write a number from 6 to 15".to_owned())?;
    CodeLimit::new(bits).map(CodeLimit::bits).map_err(|error| error.to_string())
}

/// Returns the warning that no tensor `was` or `would be` compressed: why most bytes are raw, and the next step.
pub fn nothing_compressed(tensors: &[TensorReport], verb: &str) -> Option<Remark> {
    if tensors.iter().any(|tensor| tensor.encoding != EncodingId::RAW) {
        return None;
    }
    let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
    for tensor in tensors {
        *bytes.entry(tensor.reason.as_deref().unwrap_or("raw")).or_default() += tensor.original_bytes;
    }
    let all: u64 = bytes.values().sum();
    let (reason, raw_bytes) = bytes.into_iter().max_by_key(|(_, bytes)| *bytes)?;
    let help = match reason {
        reason if reason.ends_with("is not coded") => {
            "BF16, F16, F32 and FP8 are compressed: use weights of this model in one of these types"
        }
        "not included" => "no tensor that could be compressed matches --include; `unweight plan` lists the names",
        "excluded" => "--exclude matches every tensor that could be compressed; `unweight plan` lists the names",
        "plan file" => "the rules of --plan keep every tensor raw",
        reason if reason.contains("outside scope") => "a wider --scope covers more: linear, or all",
        _ => "`unweight plan` lists the reason for each tensor",
    };
    let text =
        format!("warning: nothing {verb} compressed: {} of the bytes are raw ({reason})", percent(raw_bytes, all));
    Some(Remark { text, help: help.to_owned() })
}

/// Returns the remark on large copied files that may be unwanted.
pub fn large_copies(copies: &[LargeCopy]) -> Option<Remark> {
    let first = copies.first()?;
    let named: Vec<String> =
        copies.iter().take(4).map(|copy| format!("{} ({})", copy.name, output::bytes(copy.bytes))).collect();
    let more = if copies.len() > 4 { format!(" and {} more", copies.len() - 4) } else { String::new() };
    let pattern = first.name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty());
    let pattern = pattern.map_or_else(|| first.name.clone(), |(_, extension)| format!("*.{extension}"));
    Some(Remark {
        text: format!("remark: copied unchanged: {}{more}", named.join(", ")),
        help: format!("--skip '{pattern}' leaves such files out"),
    })
}

/// Returns the remark on configurations that do not mark their weights as those of a bundle.
pub fn unmarked_configs(configs: &[UnmarkedConfig]) -> Option<Remark> {
    let UnmarkedConfig { name, reason, .. } = configs.first()?;
    let more = if configs.len() > 1 { format!(", and {} more", configs.len() - 1) } else { String::new() };
    Some(Remark {
        text: format!(
            "remark: {name} is copied unchanged ({reason}){more}: it does not mark its weights as those of a bundle"
        ),
        help: "decompress the bundle for readers that do not know bundles; some initialise missing weights at random"
            .to_owned(),
    })
}

/// Returns a table with a line per encoding and a total.
pub fn totals(encodings: &[EncodingTotal], original_bytes: u64, stored_bytes: u64) -> Table {
    let mut table = Table::new(&["encoding", ">tensors", ">original", ">stored", ">bits/element", ">ratio"]);
    for total in encodings {
        let bits = if total.elements == 0 { 0.0 } else { total.stored_bytes as f64 * 8.0 / total.elements as f64 };
        table.row([
            total.encoding.to_string(),
            total.tensors.to_string(),
            output::bytes(total.original_bytes),
            output::bytes(total.stored_bytes),
            format!("{bits:.3}"),
            percent(total.stored_bytes, total.original_bytes),
        ]);
    }
    table.row([
        "all files".to_owned(),
        encodings.iter().map(|total| total.tensors).sum::<u64>().to_string(),
        output::bytes(original_bytes),
        output::bytes(stored_bytes),
        String::new(),
        percent(stored_bytes, original_bytes),
    ]);
    table
}

/// Returns a table with a line per tensor.
pub fn tensors(tensors: &[TensorReport]) -> Table {
    let mut table = Table::new(&[
        "tensor",
        "role",
        ">layer",
        "dtype",
        "shape",
        "encoding",
        ">original",
        ">stored",
        ">bits/element",
        "reason",
    ]);
    for tensor in tensors {
        table.row([
            tensor.name.clone(),
            tensor.role.to_string(),
            tensor.layer.map_or_else(String::new, |layer| layer.to_string()),
            tensor.dtype.clone(),
            output::shape(&tensor.shape),
            tensor.encoding.to_string(),
            output::bytes(tensor.original_bytes),
            output::bytes(tensor.stored_bytes),
            format!("{:.3}", tensor.bits_per_element),
            tensor.reason.clone().unwrap_or_default(),
        ]);
    }
    table
}

/// Formats `part` as a percentage of `whole`.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}
