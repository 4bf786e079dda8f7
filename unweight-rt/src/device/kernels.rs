//! The kernels of a device, by variant.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use unweight_codegen::VariantSpec;

use crate::{
    choose::{
        model::PackedChooser,
        table::{MeasuredTable, TableError},
    },
    device::{Device, DeviceError, DeviceInfo, module::LoadedKernel},
    env::Env,
    jit::{
        cache::{Artifact, CacheState, KernelCache, Progress},
        compiler::CompileRequest,
    },
};

/// The kernels of one device: compiled or found at most once, loaded at most once, shared.
pub struct KernelSet {
    device: Device,
    cache: KernelCache,
    threads: usize,
    chooser: PackedChooser,
    /// Why a table that the cache has is not followed.
    table_error: Option<TableError>,
    loaded: Mutex<BTreeMap<VariantSpec, Arc<LoadedKernel>>>,
}

/// What [`KernelSet::prepare`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Kernels that were loaded; the others were already.
    pub loaded: usize,
    /// Kernels among them that were compiled; the others were in the cache.
    pub compiled: usize,
    /// How long it all took.
    pub elapsed: Duration,
}

impl KernelSet {
    /// The user's cache and compiler, as the environment has them.
    pub fn open(device: &Device, env: &Env) -> Self {
        Self::new(device, KernelCache::open(env), env.jit_threads)
    }

    /// A given cache; up to `threads` kernels are compiled at a time. What was measured on such a device and is kept in
    /// the cache is followed.
    pub fn new(device: &Device, cache: KernelCache, threads: usize) -> Self {
        let (chooser, table_error) = chooser(device.info(), &cache);
        Self { device: device.clone(), cache, threads, chooser, table_error, loaded: Mutex::default() }
    }

    /// Follows a table that was measured on such a device, ahead of what is kept in the cache. A table of another
    /// device changes nothing.
    #[must_use]
    pub fn with_table(mut self, table: MeasuredTable) -> Self {
        self.chooser = self.chooser.with_table(&self.device.info().name, table);
        self
    }

    /// What chooses the matmuls of layers on this device: what was measured, else the model of the machine.
    pub fn chooser(&self) -> &PackedChooser {
        &self.chooser
    }

    /// Why a table that the cache keeps for such a device is not followed, if it is not.
    pub fn table_error(&self) -> Option<&TableError> {
        self.table_error.as_ref()
    }

    /// The cache.
    pub fn cache(&self) -> &KernelCache {
        &self.cache
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Makes every variant ready, compiling what the cache lacks in parallel; `progress` hears of each that was not
    /// loaded yet.
    ///
    /// # Errors
    /// Every kernel that could not be made is told; those that could are in the cache.
    pub fn prepare(
        &self,
        specs: &[VariantSpec],
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Prepared, DeviceError> {
        let start = Instant::now();
        let missing: BTreeSet<VariantSpec> = {
            let loaded = self.lock();
            specs.iter().filter(|spec| !loaded.contains_key(spec)).copied().collect()
        };
        let missing: Vec<VariantSpec> = missing.into_iter().collect();
        let requests = missing.iter().map(CompileRequest::render).collect::<Result<Vec<_>, _>>()?;
        let artifacts = self.cache.compile_all(&requests, self.threads, progress)?;
        let mut compiled = artifacts.iter().filter(|artifact| !artifact.state.is_hit()).count();
        let mut refused = Vec::new();
        for ((spec, request), artifact) in missing.iter().zip(requests).zip(&artifacts) {
            match self.load(spec, artifact) {
                // Attached for another driver, or by whoever knows no better.
                Err(_) if artifact.state == CacheState::Attached => refused.push((spec, request)),
                loaded => drop(loaded?),
            }
        }
        let (specs, requests): (Vec<_>, Vec<_>) = refused.into_iter().unzip();
        let own = self.cache.compile_own(&requests, self.threads, progress)?;
        compiled += own.iter().filter(|artifact| !artifact.state.is_hit()).count();
        for (spec, artifact) in specs.into_iter().zip(&own) {
            self.load(spec, artifact)?;
        }
        Ok(Prepared { loaded: missing.len(), compiled, elapsed: start.elapsed() })
    }

    /// A kernel, compiled or loaded now if it has to be.
    ///
    /// # Errors
    /// As for [`KernelSet::prepare`].
    pub fn get(&self, spec: &VariantSpec) -> Result<Arc<LoadedKernel>, DeviceError> {
        if let Some(kernel) = self.try_get(spec) {
            return Ok(kernel);
        }
        let request = CompileRequest::render(spec)?;
        let artifact = self.cache.get(&request)?;
        match self.load(spec, &artifact) {
            // As in `prepare`. One request gives one artifact.
            Err(_) if artifact.state == CacheState::Attached => {
                self.load(spec, &self.cache.compile_own(&[request], 1, &|_| {})?.swap_remove(0))
            }
            loaded => loaded,
        }
    }

    /// Kernels that are loaded.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// A kernel that is ready; never compiles.
    pub fn try_get(&self, spec: &VariantSpec) -> Option<Arc<LoadedKernel>> {
        self.lock().get(spec).cloned()
    }

    fn load(&self, spec: &VariantSpec, artifact: &Artifact) -> Result<Arc<LoadedKernel>, DeviceError> {
        let kernel = Arc::new(LoadedKernel::load(&self.device, spec, artifact)?);
        // Another thread may have been faster: the first stays, so that equal specs give one kernel.
        Ok(self.lock().entry(*spec).or_insert(kernel).clone())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VariantSpec, Arc<LoadedKernel>>> {
        // A thread that died while it held the lock has left the map whole: an entry is there or not.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What chooses for a device, with the table that the cache keeps of it, or why that is not followed.
fn chooser(info: &DeviceInfo, cache: &KernelCache) -> (PackedChooser, Option<TableError>) {
    let chooser = PackedChooser::of(info.into(), &info.name);
    let Ok(store) = cache.store() else { return (chooser, None) };
    let path = store.table_path(&info.name);
    let table = match store.table(&info.name) {
        Ok(None) => return (chooser, None),
        Ok(Some(text)) => MeasuredTable::parse(&text, &path, &info.name, info.arch),
        Err(source) => Err(TableError::Read { path, source }),
    };
    match table {
        Ok(table) => (chooser.with_table(&info.name, table), None),
        Err(error) => (chooser, Some(error)),
    }
}

impl fmt::Debug for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelSet({} loaded on device {})", self.lock().len(), self.device.info().ordinal)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use unweight_codegen::{
        plan::GemmShape,
        spec::{Arch, Epilogue},
    };

    use super::*;
    use crate::{
        choose::{model::PackedUse, table::MeasuredRow},
        env::JitMode,
        jit::{cache::Policy, compiler::FakeCompiler},
    };

    fn cache(root: &Path, mode: JitMode) -> KernelCache {
        let policy = Policy { mode, lock_timeout: Duration::from_secs(1) };
        KernelCache::new(policy, Some(root), Arc::new(FakeCompiler::default()))
    }

    /// A table that the cache keeps for a device of this name is followed there; one that is damaged, or another's, is
    /// told and passed over.
    #[test]
    fn kept_table_is_used_on_its_gpu() {
        let info = DeviceInfo {
            ordinal: 0,
            name: "NVIDIA L4".to_owned(),
            arch: Arch::Sm89,
            sms: 58,
            clock_mhz: 2040,
            memory_mb_per_s: 300_000,
            l2_bytes: 48 << 20,
            smem_bytes_per_block: 101_376,
            memory_bytes: 24 << 30,
            driver: "13.0".to_owned(),
        };
        let home = tempfile::tempdir().unwrap();
        let cache = |mode| cache(&home.path().join("cache"), mode);
        let choice = |chooser: &PackedChooser, m| {
            let wanted = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::StoreAdd };
            chooser.choose(GemmShape { m, n: 4096, k: 4096 }, wanted).unwrap().to_string()
        };
        let (model, error) = chooser(&info, &cache(JitMode::Auto));
        assert!(error.is_none());
        // Some shape that the model would not take.
        let ours = ["b8_r2w8p3c1", "b8_r4w8p1c1"].into_iter().find(|shape| !choice(&model, 8).contains(shape)).unwrap();
        let variant = format!("uw_sm89_gemm_mma_{ours}_async_esc_store").parse().unwrap();
        let row = MeasuredRow { n: 4096, k: 4096, m: 8, pdl: false, variant };
        let table = MeasuredTable { device: info.name.clone(), rows: vec![row] };
        let keep =
            |text: &str| _ = cache(JitMode::Auto).store().unwrap().keep_table(&info.name, text.as_bytes()).unwrap();
        keep(&table.to_json());
        let (measured, error) = chooser(&info, &cache(JitMode::Auto));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(choice(&measured, 8), format!("uw_sm89_gemm_mma_{ours}_async_esc_store_add"));
        assert_eq!(choice(&measured, 9), choice(&model, 9), "not measured");
        // Whoever touches no cache follows none of it.
        assert_eq!(choice(&chooser(&info, &cache(JitMode::Off)).0, 8), choice(&model, 8));
        let other = DeviceInfo { name: "NVIDIA L40S".to_owned(), ..info.clone() };
        assert_eq!(
            choice(&chooser(&other, &cache(JitMode::Auto)).0, 8),
            choice(&PackedChooser::model((&other).into()), 8)
        );
        let foreign = table.to_json().replace("NVIDIA L4", "nvidia l4");
        for (text, code) in [("{", "dispatch-table-invalid"), (&*foreign, "dispatch-table-of-another-gpu")] {
            keep(text);
            let (passed_over, error) = chooser(&info, &cache(JitMode::Auto));
            assert_eq!(error.map(|error| error.code()), Some(code), "{text}");
            assert_eq!(choice(&passed_over, 8), choice(&model, 8));
        }
    }
}
