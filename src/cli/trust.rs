//! Options for code and tables from outside of this program: attached kernels and measured dispatch tables.

use std::path::PathBuf;

use clap::Args;
use unweight::{
    format::bundle::{ATTACHED_NAME, Bundle},
    rt::{
        Device, KernelSet, Remedy,
        env::Env,
        raw::{choose::table::MeasuredTable, jit::cache::KernelCache},
    },
};

use super::{
    failure::{Failure, Result},
    output::Console,
};

/// Whether to run kernels from a bundle, and which dispatch table to use.
#[derive(Args)]
pub struct Trust {
    /// Run attached kernels that match this program and GPU; this runs code from the bundle's maker
    #[arg(long, help_heading = "Kernels")]
    trust_attached_kernels: bool,
    #[command(flatten)]
    table: Table,
}

/// A measured dispatch table.
#[derive(Args)]
pub struct Table {
    /// Dispatch table of `unweight-bench matmul --save-table` for this GPU model [default: the tables in the kernel
    /// cache and this program, and a cost model]
    #[arg(long, value_name = "FILE", help_heading = "Kernels")]
    table: Option<PathBuf>,
}

impl Table {
    /// Applies the table of `--table`; without one, the table in the cache applies.
    pub fn apply(&self, kernels: KernelSet, console: Console) -> Result<KernelSet> {
        note_table(&kernels, console);
        let Some(path) = &self.table else { return Ok(kernels) };
        let info = kernels.device().info();
        let table = MeasuredTable::read(path, &info.name, info.arch, kernels.chooser().registered())
            .map_err(|error| Failure::remedied(error, Remedy::MeasureTable))?;
        Ok(kernels.with_table(table))
    }
}

/// Prints a note if a table in the cache is not used.
pub fn note_table(kernels: &KernelSet, console: Console) {
    if let Some(error) = kernels.table_error() {
        console.note(format_args!(
            "dispatch table not used: {error}; measure a new one with `unweight-bench matmul --save-table`, or remove \
             it with `unweight cache clear`"
        ));
    }
}

impl Trust {
    /// Returns the kernels of a GPU: from the bundle if it is trusted, from the user's cache, or compiled.
    pub fn kernels(&self, device: usize, bundle: Option<&Bundle>, console: Console) -> Result<KernelSet> {
        let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
        let cache = self.cache(env, bundle, console);
        self.table.apply(KernelSet::new(&Device::open(device)?, cache, env.jit_threads), console)
    }

    fn cache(&self, env: &Env, bundle: Option<&Bundle>, console: Console) -> KernelCache {
        let cache = KernelCache::open(env);
        let Some(bundle) = bundle else { return cache };
        match (bundle.attached(), self.trust_attached_kernels) {
            (Ok(Some(attached)), true) => return cache.trust(attached),
            (Ok(None), true) => {
                console.note("the bundle has no attached kernels: kernels that the cache lacks are compiled")
            }
            (Err(error), true) => console.note(format_args!("attached kernels are not used: {error}")),
            (Ok(None), false) => {}
            // A plan contains no code.
            (Ok(Some(attached)), false) if attached.kernels().is_empty() => {}
            // Whether undamaged or not.
            (Ok(Some(_)) | Err(_), false) => console
                .note(format_args!("{ATTACHED_NAME}: attached kernels are run only with --trust-attached-kernels")),
        }
        cache
    }
}
