//! The kernels of a device, by variant.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use unweight_codegen::{Variant, VariantSpec};

use crate::{
    choose::{
        candidates::{RegisterError, Registered},
        policy::PackedChooser,
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
    /// A table that is followed ahead of the cache's.
    given: Option<MeasuredTable>,
    /// Why a table that the cache has is not followed.
    table_error: Option<TableError>,
    loaded: Mutex<BTreeMap<VariantSpec, Arc<LoadedKernel>>>,
}

/// The result of [`KernelSet::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prepared {
    /// Kernels that were loaded; the others were already.
    pub loaded: usize,
    /// Kernels among them that were compiled; the others were in the cache.
    pub compiled: usize,
    /// Duration of the whole call.
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
        let (chooser, table_error) = chooser(device.info(), &cache, Registered::default());
        Self { device: device.clone(), cache, threads, chooser, given: None, table_error, loaded: Mutex::default() }
    }

    /// Follows a table that was measured on such a device, ahead of what is kept in the cache. A table of another
    /// device changes nothing.
    #[must_use]
    pub fn with_table(mut self, table: MeasuredTable) -> Self {
        self.chooser = self.chooser.with_table(&self.device.info().name, table.clone());
        if table.device == self.device.info().name {
            self.given = Some(match &self.given {
                Some(before) => table.over(before),
                None => table,
            });
        }
        self
    }

    /// Makes a declared variant a candidate of dispatch: layers that are loaded from now on are multiplied by it where
    /// a measured table or the model of the GPU finds it fastest, and tables may name it. Its shape counts; escapes,
    /// dependent launch and epilogue follow the layer.
    ///
    /// A layer chooses its kernels when it is loaded: register before the first.
    ///
    /// ```no_run
    /// use unweight_codegen::unweight_variant;
    /// use unweight_rt::{Device, KernelSet, env::Env};
    ///
    /// #[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 10, stages = 2)]
    /// struct GateUp;
    ///
    /// let mut kernels = KernelSet::open(&Device::open(0)?, Env::process()?);
    /// kernels.register::<GateUp>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The device's architecture cannot run it, or dispatch does not choose among kernels of its family.
    pub fn register<V: Variant>(&mut self) -> Result<(), RegisterError> {
        self.register_spec(V::SPEC)
    }

    /// As [`KernelSet::register`], of a variant that is known at run time.
    ///
    /// # Errors
    /// As for [`KernelSet::register`].
    pub fn register_spec(&mut self, spec: VariantSpec) -> Result<(), RegisterError> {
        self.chooser.register(spec)?;
        // The cache's table may name it.
        if matches!(self.table_error, Some(TableError::Unregistered { .. })) {
            let info = self.device.info();
            let (chooser, table_error) = chooser(info, &self.cache, self.chooser.registered().clone());
            let given = self.given.clone().unwrap_or_default();
            (self.chooser, self.table_error) = (chooser.with_table(&info.name, given), table_error);
        }
        Ok(())
    }

    /// The registered variants, as they were declared.
    pub fn registered(&self) -> impl Iterator<Item = &VariantSpec> {
        self.chooser.registered().variants()
    }

    /// What chooses the matmuls of layers on this device, of the variants that ship and those that are registered: what
    /// was measured, else the model of the GPU.
    pub fn chooser(&self) -> &PackedChooser {
        &self.chooser
    }

    /// Why a table that the cache keeps for such a device is not followed, if it is not.
    pub fn table_error(&self) -> Option<&TableError> {
        self.table_error.as_ref()
    }

    /// Returns the cache that kernels are compiled into.
    pub fn cache(&self) -> &KernelCache {
        &self.cache
    }

    /// Returns the device that kernels are loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Loads every variant, and compiles in parallel those that the cache lacks. `progress` receives each variant that
    /// was not loaded yet.
    ///
    /// # Errors
    /// [`DeviceError`] that names every kernel that could not be made. The others are in the cache.
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
fn chooser(info: &DeviceInfo, cache: &KernelCache, registered: Registered) -> (PackedChooser, Option<TableError>) {
    let chooser = PackedChooser::of(info.into(), &info.name).with_registered(registered);
    let Ok(store) = cache.store() else { return (chooser, None) };
    let path = store.table_path(&info.name);
    let table = match store.table(&info.name) {
        Ok(None) => return (chooser, None),
        Ok(Some(text)) => MeasuredTable::parse(&text, &path, &info.name, info.arch, chooser.registered()),
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
        choose::{candidates::PackedUse, table::MeasuredRow},
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
        let chooser = |info: &DeviceInfo, cache: &KernelCache| chooser(info, cache, Registered::default());
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
    /// The cache's table is followed as soon as the variants that it names are registered.
    #[test]
    fn a_kept_table_waits_for_the_variants_that_it_names() {
        let info = DeviceInfo {
            ordinal: 0,
            name: "NVIDIA H200".to_owned(),
            arch: Arch::Sm90a,
            sms: 132,
            clock_mhz: 1980,
            memory_mb_per_s: 4_814_304,
            l2_bytes: 50 << 20,
            smem_bytes_per_block: 232_448,
            memory_bytes: 141 << 30,
            driver: "13.0".to_owned(),
        };
        let home = tempfile::tempdir().unwrap();
        let cache = cache(&home.path().join("cache"), JitMode::Auto);
        let variant: VariantSpec = "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store".parse().unwrap();
        let row = MeasuredRow { n: 4096, k: 4096, m: 8, pdl: false, variant };
        let table = MeasuredTable { device: info.name.clone(), rows: vec![row] };
        cache.store().unwrap().keep_table(&info.name, table.to_json().as_bytes()).unwrap();
        let wanted = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
        let problem = GemmShape { m: 8, n: 4096, k: 4096 };
        let (before, error) = chooser(&info, &cache, Registered::default());
        assert!(matches!(error, Some(TableError::Unregistered { row: 0, .. })), "{error:?}");
        assert_ne!(before.choose(problem, wanted), Some(variant));
        let mut registered = Registered::default();
        registered.add(info.arch, variant).unwrap();
        let (after, error) = chooser(&info, &cache, registered);
        assert!(error.is_none(), "{error:?}");
        assert_eq!(after.choose(problem, wanted), Some(variant));
    }
}
