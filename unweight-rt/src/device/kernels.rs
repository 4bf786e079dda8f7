//! The kernels of a device, indexed by variant.

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

/// The kernels of one device: each is compiled or found at most once, loaded at most once, and shared.
pub struct KernelSet {
    device: Device,
    cache: KernelCache,
    threads: usize,
    chooser: PackedChooser,
    /// A table from the caller; overrides the cache's table.
    supplied_table: Option<MeasuredTable>,
    /// Why the cache's table is not used.
    table_error: Option<TableError>,
    loaded: Mutex<BTreeMap<VariantSpec, Arc<LoadedKernel>>>,
}

/// The result of [`KernelSet::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prepared {
    /// Kernels that this call loaded; the others were already loaded.
    pub loaded: usize,
    /// Kernels among them that were compiled; the others were in the cache.
    pub compiled: usize,
    /// Duration of the whole call.
    pub elapsed: Duration,
}

impl KernelSet {
    /// Opens the user's cache and compiler, as configured by the environment.
    pub fn open(device: &Device, env: &Env) -> Self {
        Self::new(device, KernelCache::open(env), env.jit_threads)
    }

    /// Uses the given cache and compiles up to `threads` kernels at a time. Dispatch uses the measurements for this
    /// kind of device that the cache contains.
    pub fn new(device: &Device, cache: KernelCache, threads: usize) -> Self {
        let (chooser, table_error) = chooser(device.info(), &cache, Registered::default());
        Self {
            device: device.clone(),
            cache,
            threads,
            chooser,
            supplied_table: None,
            table_error,
            loaded: Mutex::default(),
        }
    }

    /// Adds a table that was measured on this kind of device; it overrides the table in the cache. A table of another
    /// device has no effect.
    #[must_use]
    pub fn with_table(mut self, table: MeasuredTable) -> Self {
        self.chooser = self.chooser.with_table(&self.device.info().name, table.clone());
        if table.device == self.device.info().name {
            self.supplied_table = Some(match &self.supplied_table {
                Some(before) => table.over(before),
                None => table,
            });
        }
        self
    }

    /// Makes a declared variant a candidate of dispatch. Layers loaded from now on use it where a measured table or the
    /// GPU model finds it fastest, and tables may name it. Only its shape matters; escapes, dependent launch and
    /// epilogue follow the layer.
    ///
    /// A layer chooses its kernels when it is loaded: register variants before the first layer.
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
    /// The device's architecture cannot run the variant, or dispatch does not choose among kernels of its family.
    pub fn register<V: Variant>(&mut self) -> Result<(), RegisterError> {
        self.register_spec(V::SPEC)
    }

    /// Registers a variant like [`KernelSet::register`], but as a value at run time.
    ///
    /// # Errors
    /// As for [`KernelSet::register`].
    pub fn register_spec(&mut self, spec: VariantSpec) -> Result<(), RegisterError> {
        self.chooser.register(spec)?;
        // The cache's table may name this variant.
        if matches!(self.table_error, Some(TableError::Unregistered { .. })) {
            let info = self.device.info();
            let (chooser, table_error) = chooser(info, &self.cache, self.chooser.registered().clone());
            let supplied_table = self.supplied_table.clone().unwrap_or_default();
            (self.chooser, self.table_error) = (chooser.with_table(&info.name, supplied_table), table_error);
        }
        Ok(())
    }

    /// Returns the registered variants as they were declared.
    pub fn registered(&self) -> impl Iterator<Item = &VariantSpec> {
        self.chooser.registered().variants()
    }

    /// Returns the chooser of matmuls for layers on this device, from built-in and registered variants. It uses
    /// measurements if there are any, else the GPU model.
    pub fn chooser(&self) -> &PackedChooser {
        &self.chooser
    }

    /// Returns why the cache's table for this kind of device is not used, if it is not.
    pub fn table_error(&self) -> Option<&TableError> {
        self.table_error.as_ref()
    }

    /// Returns the cache of compiled kernels.
    pub fn cache(&self) -> &KernelCache {
        &self.cache
    }

    /// Returns the device on which kernels are loaded.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Loads every variant, and compiles missing ones in parallel. `progress` receives each variant that was not loaded
    /// yet.
    ///
    /// # Errors
    /// [`DeviceError`] that names every kernel that could not be compiled. The others are in the cache.
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
                // Attached for another driver, or invalid.
                Err(_) if artifact.state == CacheState::Attached => refused.push((spec, request)),
                loaded => drop(loaded?),
            }
        }
        let (specs, requests): (Vec<_>, Vec<_>) = refused.into_iter().unzip();
        let recompiled = self.cache.compile_without_attached(&requests, self.threads, progress)?;
        compiled += recompiled.iter().filter(|artifact| !artifact.state.is_hit()).count();
        for (spec, artifact) in specs.into_iter().zip(&recompiled) {
            self.load(spec, artifact)?;
        }
        Ok(Prepared { loaded: missing.len(), compiled, elapsed: start.elapsed() })
    }

    /// Returns a kernel; compiles or loads it if necessary.
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
            // As in `prepare`. One request has one artifact.
            Err(_) if artifact.state == CacheState::Attached => {
                self.load(spec, &self.cache.compile_without_attached(&[request], 1, &|_| {})?.swap_remove(0))
            }
            loaded => loaded,
        }
    }

    /// Returns the number of loaded kernels.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Returns whether no kernel is loaded.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Returns a kernel if it is loaded; never compiles.
    pub fn try_get(&self, spec: &VariantSpec) -> Option<Arc<LoadedKernel>> {
        self.lock().get(spec).cloned()
    }

    fn load(&self, spec: &VariantSpec, artifact: &Artifact) -> Result<Arc<LoadedKernel>, DeviceError> {
        let kernel = Arc::new(LoadedKernel::load(&self.device, spec, artifact)?);
        // Another thread may have been faster. The first kernel stays, so that equal specs share one kernel.
        Ok(self.lock().entry(*spec).or_insert(kernel).clone())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VariantSpec, Arc<LoadedKernel>>> {
        // A panic while holding the lock leaves the map valid: inserting an entry is atomic.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the chooser of a device with the cache's table, or with the reason why that table is not used.
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
        jit::{cache::CachePolicy, compiler::FakeCompiler},
    };

    fn cache(root: &Path, mode: JitMode) -> KernelCache {
        let policy = CachePolicy { mode, lock_timeout: Duration::from_secs(1) };
        KernelCache::new(policy, Some(root), Arc::new(FakeCompiler::default()))
    }

    /// The cache's table for a device of this name is used there; a damaged table, or one of another device, is
    /// reported and ignored.
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
            let packed_use = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::StoreAdd };
            chooser.choose(GemmShape { m, n: 4096, k: 4096 }, packed_use).unwrap().to_string()
        };
        let chooser = |info: &DeviceInfo, cache: &KernelCache| chooser(info, cache, Registered::default());
        let (model, error) = chooser(&info, &cache(JitMode::Auto));
        assert!(error.is_none());
        // A shape that the model would not choose.
        let shape =
            ["b8_r2w8p3c1", "b8_r4w8p1c1"].into_iter().find(|shape| !choice(&model, 8).contains(shape)).unwrap();
        let variant = format!("uw_sm89_gemm_mma_{shape}_async_esc_store").parse().unwrap();
        let row = MeasuredRow { n: 4096, k: 4096, m: 8, pdl: false, variant };
        let table = MeasuredTable { device: info.name.clone(), rows: vec![row] };
        let store_table =
            |text: &str| _ = cache(JitMode::Auto).store().unwrap().keep_table(&info.name, text.as_bytes()).unwrap();
        store_table(&table.to_json());
        let (measured, error) = chooser(&info, &cache(JitMode::Auto));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(choice(&measured, 8), format!("uw_sm89_gemm_mma_{shape}_async_esc_store_add"));
        assert_eq!(choice(&measured, 9), choice(&model, 9), "not measured");
        // With the cache off, its table is not used.
        assert_eq!(choice(&chooser(&info, &cache(JitMode::Off)).0, 8), choice(&model, 8));
        let other = DeviceInfo { name: "NVIDIA L40S".to_owned(), ..info.clone() };
        assert_eq!(
            choice(&chooser(&other, &cache(JitMode::Auto)).0, 8),
            choice(&PackedChooser::model((&other).into()), 8)
        );
        let foreign = table.to_json().replace("NVIDIA L4", "nvidia l4");
        for (text, code) in [("{", "dispatch-table-invalid"), (&*foreign, "dispatch-table-of-another-gpu")] {
            store_table(text);
            let (ignored, error) = chooser(&info, &cache(JitMode::Auto));
            assert_eq!(error.map(|error| error.code()), Some(code), "{text}");
            assert_eq!(choice(&ignored, 8), choice(&model, 8));
        }
    }
    /// The cache's table is used as soon as the variants that it names are registered.
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
        let packed_use = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
        let problem = GemmShape { m: 8, n: 4096, k: 4096 };
        let (before, error) = chooser(&info, &cache, Registered::default());
        assert!(matches!(error, Some(TableError::Unregistered { row: 0, .. })), "{error:?}");
        assert_ne!(before.choose(problem, packed_use), Some(variant));
        let mut registered = Registered::default();
        registered.add(info.arch, variant).unwrap();
        let (after, error) = chooser(&info, &cache, registered);
        assert!(error.is_none(), "{error:?}");
        assert_eq!(after.choose(problem, packed_use), Some(variant));
    }
}
