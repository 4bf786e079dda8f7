//! `unweight budget`.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use serde::Serialize;
use unweight::{
    codegen::spec::Arch,
    engine::{
        KvCache,
        budget::{self, BudgetError, BudgetPlan, BudgetRequest, Tensor},
        raw::memory,
    },
    format::{
        EncodingId,
        bundle::{self, CompressOptions, PlanFile, Profile, Scope, Selection, TensorReport},
        raw::glob::matches,
    },
    model::{ModelConfig, TensorHeader, bind},
    rt::raw::choose::candidates::has_compact_gemms,
};

use super::{
    arch::{ArchArg, local_arch},
    common::Threads,
    failure::{Failure, Result},
    output::{self, Console, Table},
    pipelines::{KvCacheArg, ranges, sequences},
    scratch, size,
    source::{LocatedModel, Source, quoted},
};

/// Arguments of `budget`.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("limit").required(true).multiple(true).args(["memory", "max_slowdown"]))]
pub struct Budget {
    #[command(flatten)]
    source: Source,
    /// GPU memory, as for `generate --memory`, such as 21G (GiB) [default: the least that --max-slowdown allows]
    #[arg(long, value_name = "SIZE", value_parser = size::memory)]
    memory: Option<u64>,
    /// Largest predicted slowdown of matmuls against the fastest plan, such as 5%
    #[arg(long, value_name = "PERCENT", value_parser = percent, allow_hyphen_values = true)]
    max_slowdown: Option<f64>,
    /// Concurrent sequences, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = sequences())]
    batch: u32,
    /// Tokens per sequence [default: 4096, at most the model's limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Encoding of the KV cache; auto is packed if that makes products faster or the plan smaller, else bf16
    #[arg(long, value_name = "CACHE", default_value = "auto")]
    kv_cache: KvCacheArg,
    #[command(flatten)]
    arch: ArchArg,
    /// Write the plan to this file for `compress --plan`; replaces only a plan file
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct Report {
    /// GPU architecture of the plan.
    arch: &'static str,
    /// `--memory`.
    memory_bytes: Option<u64>,
    /// Concurrent sequences.
    batch: u32,
    /// Tokens per sequence.
    context: u32,
    /// GPU memory: `weight_bytes`, `cache_bytes`, `working_bytes` and `slot_bytes`.
    total_bytes: u64,
    /// Free GPU memory needed if `--memory` is not set: 10/9 of `total_bytes`.
    free_bytes: u64,
    /// Weights.
    weight_bytes: u64,
    /// KV cache.
    cache_bytes: u64,
    /// `bf16` or `packed`.
    kv_cache: &'static str,
    /// KV cache capacity, tokens.
    cache_tokens: u64,
    /// KV cache per token.
    cache_token_bytes: u64,
    /// Activations, logits, tables, workspaces.
    working_bytes: u64,
    /// Buffers for decoded or expanded weights.
    slot_bytes: u64,
    /// Modelled time of a step's products, us.
    linear_us: f64,
    /// Modelled time of products without a memory limit, us.
    fastest_us: f64,
    /// `linear_us / fastest_us`.
    slowdown: f64,
    /// Whether the plan is exactly optimal.
    exact: bool,
    /// Weights with the same encoding.
    groups: Vec<Group>,
    /// File written.
    plan: Option<PathBuf>,
}

#[derive(Serialize)]
struct Group {
    /// `qkv`, `o`, `gate_up`, `down`, `lm_head` or `embed`.
    unit: &'static str,
    /// Encoding of the weights.
    encoding: EncodingId,
    /// Number of units.
    units: u32,
    /// Layers of the units.
    layers: Vec<u32>,
    /// Size of the weights.
    bytes: u64,
    /// Modelled time of the products, us.
    us: f64,
}

impl Budget {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        if let Some(plan) = &self.plan {
            check_can_write(plan)?;
        }
        let model = self.source.find(None, console)?;
        let config = config(&model.root)?;
        let mut tensors = self.tensors(&model, &config)?;
        let context = self.context.unwrap_or_else(|| {
            if config.max_positions < CONTEXT {
                console.note(format_args!("using a context of {}, the maximum of the model", config.max_positions));
            }
            CONTEXT.min(config.max_positions)
        });
        let arch = self.arch.arch.or_else(local_arch).unwrap_or(Arch::Sm90a);
        if !has_compact_gemms(arch) {
            // It would be packed when loaded, and larger.
            tensors
                .iter_mut()
                .for_each(|tensor| tensor.encodings.retain(|(encoding, _)| *encoding != EncodingId::COMPACT));
        }
        let Self { memory, max_slowdown, batch, kv_cache, .. } = *self;
        let mut request = BudgetRequest::new(batch, context, arch);
        (request.memory, request.max_slowdown, request.kv_cache) = (memory, max_slowdown, kv_cache.0);
        let fitted = budget::fit(&config, &tensors, &request);
        let fitted = fitted.map_err(|error| with_units(error, config.mixture.is_some()))?;
        if let Some(plan) = &self.plan {
            write_plan(plan, &fitted.plan)?;
        }
        if has(&fitted, EncodingId::HUFFMAN) {
            console.note(
                "note: Huffman-coded weights are decoded in every step of `--placement stored`; without this option, \
                 `generate` and `serve` pack them and need more memory",
            );
        }
        if has(&fitted, EncodingId::COMPACT) {
            console.note(
                "note: compact weights stay compact with `--placement compact`, or with `auto` if memory is short",
            );
        }
        let groups = fitted.groups.iter().map(|group| Group {
            unit: group.name,
            encoding: group.encoding,
            units: group.units,
            layers: group.layers.clone(),
            bytes: group.bytes,
            us: group.us,
        });
        let report = Report {
            arch: arch.compiler_name(),
            memory_bytes: memory,
            batch,
            context,
            total_bytes: fitted.total(),
            free_bytes: memory::free_for(fitted.total()),
            weight_bytes: fitted.weights,
            cache_bytes: fitted.cache,
            kv_cache: fitted.kv_cache.tag(),
            cache_tokens: fitted.cache_tokens,
            cache_token_bytes: fitted.cache_token_bytes,
            working_bytes: fitted.working,
            slot_bytes: fitted.slots,
            linear_us: fitted.us,
            fastest_us: fitted.fastest_us,
            slowdown: fitted.slowdown(),
            exact: fitted.exact,
            groups: groups.collect(),
            plan: self.plan.clone(),
        };
        console.result("budget", &report, |out| write_text(&fitted, &report, &self.source.quoted(), out))
    }

    /// Returns every tensor that an engine loads, with the bytes per encoding, predicted from samples as in `plan`.
    /// Fails as an engine would: on missing weights, and on weights that the configuration lacks.
    fn tensors(&self, model: &LocatedModel, config: &ModelConfig) -> Result<Vec<Tensor>> {
        let of = |profile: Profile| {
            let selection = model.select(Selection::default());
            let options =
                CompressOptions::new(profile).scope(Scope::All).selection(selection).threads(self.threads.count);
            bundle::plan(&model.root, &options)
        };
        let (packed, coded, compact) = (of(Profile::Packed)?, of(Profile::Distribution)?, of(Profile::Compact)?);
        // Some models contain their weights a second time, in files that are never loaded.
        let of_model = bundle::model_files(packed.tensors.iter().map(|tensor| tensor.file.as_str()));
        let loaded = |tensor: &TensorReport| matches(of_model, &tensor.file);
        let headers = packed.tensors.iter().filter(|tensor| loaded(tensor)).map(|tensor| {
            let dtype = tensor.dtype.parse().map_err(Failure::other)?;
            Ok(TensorHeader { name: &tensor.name, dtype, shape: &tensor.shape })
        });
        bind(config, headers.collect::<Result<Vec<_>>>()?).map_err(Failure::other)?;
        let all = packed.tensors.into_iter().zip(coded.tensors).zip(compact.tensors);
        let all = all.filter(|((packed, _), _)| loaded(packed));
        let tensors = all.map(|((packed, coded), compact)| {
            let mut encodings = vec![(EncodingId::RAW, packed.original_bytes)];
            let others =
                [(EncodingId::PACKED, &packed), (EncodingId::HUFFMAN, &coded), (EncodingId::COMPACT, &compact)];
            encodings.extend(
                others
                    .iter()
                    .filter(|(encoding, of)| of.encoding == *encoding)
                    .map(|(encoding, of)| (*encoding, of.stored_bytes)),
            );
            let (rows, cols) = match &packed.shape[..] {
                [rest @ .., cols] if !rest.is_empty() => (packed.elements / (*cols as u64).max(1), *cols as u64),
                _ => (packed.elements, 1),
            };
            Tensor { name: packed.name, role: packed.role, layer: packed.layer, rows, cols, encodings }
        });
        Ok(tensors.collect())
    }
}

/// Converts the error; sizes get units.
fn with_units(error: BudgetError, is_mixture: bool) -> Failure {
    let BudgetError::TooSmall { have, least, weights, cache, working, slots } = error else {
        return Failure::other(error);
    };
    Failure::new(
        "budget-too-small",
        format!(
            "the smallest plan needs {} ({least} bytes; weights {}, KV cache {}, working memory {}, slots {}), but \
             --memory is {}",
            output::bytes(least),
            output::bytes(weights),
            output::bytes(cache),
            output::bytes(working),
            output::bytes(slots),
            output::bytes(have)
        ),
        match is_mixture {
            true => {
                "give more memory, a shorter --context or a smaller --batch; `generate` and `serve` can also keep \
                 experts in host memory (--resident-experts), which is not planned here"
            }
            false => "give more memory, a shorter --context or a smaller --batch",
        },
    )
}

/// Default number of tokens per sequence.
const CONTEXT: u32 = 4096;
/// The maximum size of a `config.json`, bytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

fn config(root: &Path) -> Result<ModelConfig> {
    let path = root.join("config.json");
    let size = fs::metadata(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let message = format!("{}: the model has no config.json", root.display());
            Failure::new("config-missing", message, "give the directory of a model that contains it")
        }
        _ => Failure::io(path.display())(error),
    })?;
    if size.len() > CONFIG_BYTES_MAX {
        let message = format!("{}: {} bytes; a config.json has at most {CONFIG_BYTES_MAX}", path.display(), size.len());
        return Err(Failure::new("file-too-large", message, "give the directory of a model"));
    }
    let text = fs::read_to_string(&path).map_err(Failure::io(path.display()))?;
    ModelConfig::parse(&text, None).map_err(Failure::other)
}

/// Checks that a plan can be written to `path`, before sampling takes minutes. Rejects a path to an existing file that
/// is not a plan file.
fn check_can_write(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok() && PlanFile::read(path).is_err() {
        return Err(Failure::new(
            "output-not-replaceable",
            format!("{}: exists and is not a plan file", path.display()),
            "choose another name",
        ));
    }
    scratch::unfinished_or_failure(path).map(drop)
}

fn write_plan(path: &Path, plan: &PlanFile) -> Result<()> {
    let mut file = scratch::unfinished_or_failure(path)?;
    let mut text = serde_json::to_vec_pretty(plan).map_err(io::Error::from)?;
    text.push(b'\n');
    file.write_all(&text).map_err(Failure::io(path.display()))?;
    file.persist(path).map_err(|error| Failure::io(path.display())(error.error))?;
    Ok(())
}

fn has(fitted: &BudgetPlan, encoding: EncodingId) -> bool {
    fitted.groups.iter().any(|group| group.encoding == encoding)
}

fn write_text(fitted: &BudgetPlan, report: &Report, source: &str, out: &mut dyn Write) -> io::Result<()> {
    let mut table = Table::new(&["unit", "encoding", ">units", "layers", ">bytes", ">us"]);
    for group in &fitted.groups {
        table.row([
            group.name.to_owned(),
            group.encoding.to_string(),
            group.units.to_string(),
            ranges(&group.layers),
            output::bytes(group.bytes),
            format!("{:.0}", group.us),
        ]);
    }
    table.write(out)?;
    writeln!(out)?;
    writeln!(
        out,
        "{}: weights {}, {} KV cache {} ({} tokens of {} bytes), working memory {}, slots {}",
        output::bytes(report.total_bytes),
        output::bytes(report.weight_bytes),
        if fitted.kv_cache == KvCache::Packed { "packed" } else { "BF16" },
        output::bytes(report.cache_bytes),
        report.cache_tokens,
        report.cache_token_bytes,
        output::bytes(report.working_bytes),
        output::bytes(report.slot_bytes)
    )?;
    writeln!(
        out,
        "matmuls of a step at batch {}: {:.0} us, {:.3} times the fastest plan's; encodings that {} runs, times \
         modelled on measurements of an H200, sizes predicted from samples",
        report.batch, report.linear_us, report.slowdown, report.arch
    )?;
    if !report.exact {
        writeln!(out, "another plan may be slightly better: not all plans were compared")?;
    }
    let plan = match &report.plan {
        Some(plan) => quoted(plan),
        None => {
            writeln!(out, "to keep this plan, repeat the command with --plan plan.json; then")?;
            "plan.json".to_owned()
        }
    };
    let mut options = placement_option(has(fitted, EncodingId::HUFFMAN), has(fitted, EncodingId::COMPACT)).to_owned();
    if fitted.kv_cache == KvCache::Packed {
        options.push_str("--kv-cache packed ");
    }
    writeln!(
        out,
        "compress and run it (`generate` has the same options; --memory is not needed if {} of GPU memory are free):",
        output::bytes(report.free_bytes)
    )?;
    writeln!(out, "  unweight compress {source} -o bundle --plan {plan}")?;
    writeln!(
        out,
        "  unweight serve bundle {options}--max-batch {} --context {} --memory {}",
        report.batch, report.context, report.total_bytes
    )
}

/// Returns the engine option that keeps the plan's encodings in GPU memory. A plan never has both of them.
fn placement_option(huffman: bool, compact: bool) -> &'static str {
    match (huffman, compact) {
        (true, _) => "--placement stored ",
        (_, true) => "--placement compact ",
        _ => "",
    }
}

/// Parses `5%`, `2.5 %` or `5`.
fn percent(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    match number.parse::<f64>() {
        Ok(percent) if percent.is_finite() && (0.0..=100_000.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err(format!("'{text}' is not a percentage; write a number such as 5%")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages() {
        for (text, share) in [("5%", 0.05), ("2.5 %", 0.025), ("0", 0.0), ("100", 1.0)] {
            assert_eq!(percent(text), Ok(share), "{text}");
        }
        for text in ["", "%", "-1%", "x", "inf", "5%%"] {
            assert!(percent(text).is_err(), "{text}");
        }
    }

    #[test]
    fn coded_weights_need_an_engine_option() {
        assert_eq!(
            [placement_option(true, false), placement_option(false, true), placement_option(false, false)],
            ["--placement stored ", "--placement compact ", ""]
        );
    }
}
