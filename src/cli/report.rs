//! Notes and tables that `plan`, `compress`, `demo`, `merge` and `inspect` print about a bundle.

use std::collections::BTreeMap;

use unweight::format::{
    EncodingId,
    bundle::{EncodingTotal, LargeCopy, TensorReport, UnmarkedConfig},
    raw::RawReason,
};

use super::output::{self, Note, Table};

/// Returns the warning that no tensor "was" or "would be" compressed: why most bytes are raw, and the next step.
pub fn nothing_compressed(tensors: &[TensorReport], auxiliary: &str) -> Option<Note> {
    if tensors.iter().any(|tensor| tensor.encoding != EncodingId::RAW) {
        return None;
    }
    let mut bytes: BTreeMap<&str, (u64, Option<RawReason>)> = BTreeMap::new();
    for tensor in tensors {
        let text = tensor.reason.as_deref().unwrap_or("raw");
        bytes.entry(text).or_insert_with(|| (0, RawReason::of(tensor))).0 += tensor.original_bytes;
    }
    let all: u64 = bytes.values().map(|(bytes, _)| bytes).sum();
    let (text, (raw_bytes, reason)) = bytes.into_iter().max_by_key(|(_, (bytes, _))| *bytes)?;
    let help = match reason {
        Some(RawReason::Dtype) => {
            "BF16, F16, F32 and FP8 are compressed: use weights of this model in one of these types"
        }
        Some(RawReason::NotIncluded) => {
            "no tensor that could be compressed matches --include; `unweight plan` lists the names"
        }
        Some(RawReason::Excluded) => {
            "--exclude matches every tensor that could be compressed; `unweight plan` lists the names"
        }
        Some(RawReason::PlanFile) => "the rules of --plan keep every tensor raw",
        Some(RawReason::Scope) => {
            "a wider --scope may cover more (linear, or all); `unweight plan` lists the reason for each tensor"
        }
        _ => "`unweight plan` lists the reason for each tensor",
    };
    let text =
        format!("warning: nothing {auxiliary} compressed: {} of the bytes are raw ({text})", percent(raw_bytes, all));
    Some(Note { text, help: help.to_owned() })
}

/// Returns the note on large copied files that may be unwanted.
pub fn large_copies(copies: &[LargeCopy]) -> Option<Note> {
    let first = copies.first()?;
    let named: Vec<String> =
        copies.iter().take(4).map(|copy| format!("{} ({})", copy.name, output::bytes(copy.bytes))).collect();
    let more = if copies.len() > 4 { format!(" and {} more", copies.len() - 4) } else { String::new() };
    let pattern = first.name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty());
    let pattern = pattern.map_or_else(|| first.name.clone(), |(_, extension)| format!("*.{extension}"));
    Some(Note {
        text: format!("note: copied unchanged: {}{more}", named.join(", ")),
        help: format!("--skip '{pattern}' leaves such files out"),
    })
}

/// Returns the note on configurations that do not mark their weights as those of a bundle.
pub fn unmarked_configs(configs: &[UnmarkedConfig]) -> Option<Note> {
    let UnmarkedConfig { name, reason, .. } = configs.first()?;
    let more = if configs.len() > 1 { format!(", and {} more", configs.len() - 1) } else { String::new() };
    Some(Note {
        text: format!(
            "note: {name} is copied unchanged ({reason}){more}: it does not mark its weights as those of a bundle"
        ),
        help: "decompress the bundle for readers that do not know bundles; some initialize missing weights at random"
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
