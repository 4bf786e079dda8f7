//! The kernels of a device, by variant.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use unweight_codegen::VariantSpec;

use crate::{
    device::{Device, DeviceError, module::LoadedKernel},
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

    /// A given cache; up to `threads` kernels are compiled at a time.
    pub fn new(device: &Device, cache: KernelCache, threads: usize) -> Self {
        Self { device: device.clone(), cache, threads, loaded: Mutex::default() }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Makes every variant ready, compiling what the cache lacks in parallel; `progress` hears of each that was not loaded yet.
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

impl fmt::Debug for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelSet({} loaded on device {})", self.lock().len(), self.device.info().ordinal)
    }
}
