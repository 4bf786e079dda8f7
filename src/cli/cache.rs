//! `unweight cache`.

use std::{path::PathBuf, time::SystemTime};

use clap::{Args, Subcommand};
use serde::Serialize;
use unweight::rt::{
    env::Env,
    raw::jit::cache::{Removed, Store},
};

use super::{
    failure::{Failure, Result},
    output::{self, Console, Table},
    size,
};

/// Subcommands of `cache`.
#[derive(Subcommand)]
pub enum Cache {
    /// Print the directory of the cache
    Dir,
    /// List the kernels in the cache, least recently used first
    Ls,
    /// Read every kernel and compare digests; exit status 1 if one is damaged
    Verify(Verify),
    /// Remove damaged kernels, leftovers and, above a size, the least recently used kernels
    Prune(Prune),
    /// Remove every kernel
    Clear,
}

/// Arguments of `cache verify`.
#[derive(Args)]
pub struct Verify {
    /// Remove damaged kernels
    #[arg(long)]
    evict: bool,
}

/// Arguments of `cache prune`.
#[derive(Args)]
pub struct Prune {
    /// Size to shrink the cache to [default: UNWEIGHT_CACHE_MAX, or 1G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    max: Option<u64>,
}

#[derive(Serialize)]
struct Dir<'a> {
    /// Directory of the cache.
    dir: &'a PathBuf,
    /// Whether it exists.
    exists: bool,
}

#[derive(Serialize)]
struct Ls {
    /// The kernels in the cache.
    entries: Vec<Entry>,
    /// Size of all entries.
    bytes: u64,
}

#[derive(Serialize)]
struct Entry {
    /// Directory of the entry.
    directory: String,
    /// Size of the entry.
    bytes: u64,
    /// Time since its last use.
    idle_seconds: u64,
    /// Kernel, unless damaged.
    name: Option<String>,
    /// Compiler, unless damaged.
    compiler: Option<String>,
    /// Description of the damage.
    damage: Option<String>,
}

#[derive(Serialize)]
struct Verified {
    /// Undamaged kernels.
    good: usize,
    /// The damaged kernels.
    damaged: Vec<Damaged>,
    /// Damaged kernels removed.
    evicted: usize,
}

#[derive(Serialize)]
struct Damaged {
    /// Directory of a damaged kernel.
    directory: String,
    /// Description of the damage.
    reason: String,
}

#[derive(Serialize)]
struct RemovedReport {
    /// Kernels removed.
    entries: usize,
    /// Bytes removed.
    bytes: u64,
    /// Leftovers of dead processes removed.
    leftovers: usize,
    /// Kernels that could not be removed.
    failed: usize,
}

impl Cache {
    /// The name of the command in the JSON output.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dir => "cache dir",
            Self::Ls => "cache ls",
            Self::Verify(_) => "cache verify",
            Self::Prune(_) => "cache prune",
            Self::Clear => "cache clear",
        }
    }

    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
        let dir = env.cache_dir.as_ref().ok_or_else(|| {
            Failure::new(
                "kernel-cache-unlocated",
                "the directory of the kernel cache is unknown",
                "set UNWEIGHT_CACHE_DIR, XDG_CACHE_HOME or HOME",
            )
        })?;
        if matches!(self, Self::Dir) {
            let report = Dir { dir, exists: dir.is_dir() };
            return console.result(self.name(), &report, |out| writeln!(out, "{}", dir.display()));
        }
        // A read-only command must not create the directory.
        let store = match dir.metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Ok(metadata) if !metadata.is_dir() => {
                let message = format!("{}: not a directory", dir.display());
                return Err(Failure::new("not-a-directory", message, "set UNWEIGHT_CACHE_DIR to a directory"));
            }
            Err(error) => return Err(Failure::io(dir.display())(error)),
            Ok(_) => Some(Store::open(dir).map_err(Failure::other)?),
        };
        let failed = || Failure::io(format!("{}: cannot be read", dir.display()));
        match self {
            Self::Dir => Ok(()),
            Self::Ls => {
                let report = ls(store.as_ref()).map_err(failed())?;
                console.result(self.name(), &report, |out| report.write(out))
            }
            Self::Verify(arguments) => {
                let found = store.map(|store| store.verify(arguments.evict)).transpose().map_err(failed())?;
                let found = found.unwrap_or_default();
                let damaged =
                    found.damaged.into_iter().map(|(directory, reason)| Damaged { directory, reason }).collect();
                let report = Verified { good: found.good, damaged, evicted: found.evicted };
                console.summary(self.name(), &report, |out| {
                    for entry in &report.damaged {
                        writeln!(out, "{}: {}", entry.directory, entry.reason)?;
                    }
                    let damaged = report.damaged.len();
                    writeln!(out, "{} good, {damaged} damaged, {} removed", report.good, report.evicted)
                })?;
                match report.damaged.len() - report.evicted {
                    0 => Ok(()),
                    left => Err(Failure::mismatch(
                        "kernels-damaged",
                        format!("{}: {left} damaged kernels", dir.display()),
                        "`unweight cache verify --evict` removes them; they are compiled again when needed",
                    )
                    .reported()),
                }
            }
            Self::Prune(arguments) => {
                let max = arguments.max.unwrap_or(env.cache_max_bytes);
                let removed = store.map(|store| store.prune(max)).transpose().map_err(failed())?;
                report_removed(self.name(), removed.unwrap_or_default(), dir, console)
            }
            Self::Clear => {
                let removed = store.map(|store| store.clear()).transpose().map_err(failed())?;
                report_removed(self.name(), removed.unwrap_or_default(), dir, console)
            }
        }
    }
}

fn ls(store: Option<&Store>) -> std::io::Result<Ls> {
    let stored = store.map(Store::ls).transpose()?.unwrap_or_default();
    let entries: Vec<_> = stored
        .into_iter()
        .map(|stored| {
            let idle = SystemTime::now().duration_since(stored.last_used).unwrap_or_default();
            let (meta, damage) = match stored.meta {
                Ok(meta) => (Some(meta), None),
                Err(damage) => (None, Some(damage)),
            };
            Entry {
                directory: stored.directory,
                bytes: stored.bytes,
                idle_seconds: idle.as_secs(),
                compiler: meta.as_ref().map(|meta| meta.compiler.to_string()),
                name: meta.map(|meta| meta.name),
                damage,
            }
        })
        .collect();
    Ok(Ls { bytes: entries.iter().map(|entry| entry.bytes).sum(), entries })
}

impl Ls {
    fn write(&self, out: &mut dyn std::io::Write) -> std::io::Result<()> {
        let mut table = Table::new(&["kernel", "compiler", ">size", ">last used"]);
        for entry in &self.entries {
            let damaged = || format!("{} (damaged: {})", entry.directory, entry.damage.as_deref().unwrap_or("unknown"));
            table.row([
                entry.name.clone().unwrap_or_else(damaged),
                entry.compiler.clone().unwrap_or_default(),
                output::bytes(entry.bytes),
                ago(entry.idle_seconds),
            ]);
        }
        table.write(out)?;
        writeln!(out, "{} kernels, {}", self.entries.len(), output::bytes(self.bytes))
    }
}

fn ago(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        7200..=172_799 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn report_removed(command: &str, removed: Removed, dir: &std::path::Path, console: Console) -> Result<()> {
    let Removed { entries, bytes, leftovers, failed } = removed;
    let report = RemovedReport { entries, bytes, leftovers, failed };
    console.summary(command, &report, |out| {
        writeln!(out, "{entries} kernels removed, {}; {leftovers} leftovers removed", output::bytes(bytes))
    })?;
    match failed {
        0 => Ok(()),
        _ => Err(Failure::new(
            "kernels-not-removed",
            format!("{}: {failed} kernels could not be removed", dir.display()),
            "check the owner of the directory; `unweight cache ls` lists the remaining kernels",
        )),
    }
}
