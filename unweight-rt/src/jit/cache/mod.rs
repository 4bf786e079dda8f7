//! The kernel cache: finds compiled kernels by content, and compiles each at most once. An unusable directory is not an
//! error.
//!
//! ```text
//! get(request) -- look --> hit
//!                  |absent or damaged
//!                  v
//!            lock the key (or continue without a lock) -- look again --> hit, stored meanwhile
//!                  v
//!            evict a damaged entry, compile, build aside + rename, unlock --> the bytes just compiled
//! ```
//!
//! A directory that cannot be used (read-only, full, damaged, owned by another user, left by a killed process) is a
//! miss with a reason in [`CacheState`], never an error. The caller of a compile always receives the bytes of its own
//! compile, even if another process stored the same kernel first. docs/cache.md describes the cache.
//!
//! Kernels attached to a bundle take precedence over the store, if the caller trusts them ([`KernelCache::trust`]).

mod key;
mod lock;
mod prune;
mod store;

use std::{
    collections::HashMap,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use unweight_format::bundle::{Attached, AttachedBy, AttachedKernel};

use crate::{
    env::{Env, JitMode},
    jit::{
        compiler::{Compiler, NvrtcCompiler},
        cubin::{self, KernelResources},
        error::{Error, MissingKernel, NotCompiled},
        request::{CompileRequest, CompilerId},
    },
};
use lock::Lock;

pub use crate::jit::miss::{Miss, Unusable};
pub use key::{Key, SCHEMA, SourceKey};
pub use prune::{Listed, Removed, Verified};
pub use store::{Entry, FileRecord, Kept, KernelMeta, Lookup, Store};

/// Creates the entry of a kernel to be attached to a bundle. Lookups find it as in the store, by the digest of
/// `request` and by its name.
pub fn attachable(request: &CompileRequest, artifact: &Artifact) -> AttachedKernel {
    let CompilerId { name, version, build } = artifact.compiler.clone();
    let by = AttachedBy { name, version, build };
    let source = SourceKey::of(request).to_string();
    AttachedKernel::new(artifact.name.clone(), request.arch.clone(), source, by, &artifact.cubin)
}

/// A compiled kernel that can be loaded.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Artifact {
    /// The canonical name of the variant, which is its symbol.
    pub name: String,
    /// The binary for one architecture.
    pub cubin: Arc<[u8]>,
    /// The registers and memory of the kernel.
    pub resources: KernelResources,
    /// The compiler's log.
    pub log: String,
    /// The compiler of the kernel.
    pub compiler: CompilerId,
    /// Origin of the artifact.
    pub state: CacheState,
    /// Duration of the lookup and, if needed, of the compile.
    pub elapsed: Duration,
}

/// The origin of an artifact: cache or compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheState {
    /// The kernel was in the store.
    Hit,
    /// The kernel was attached to the bundle.
    Attached,
    /// Another thread or process stored the kernel while this one waited for the lock.
    HitAfterWait,
    /// The kernel was compiled.
    Compiled {
        /// Why the kernel was not in the store.
        why: Miss,
        /// Whether the kernel was stored.
        kept: Kept,
    },
}

impl CacheState {
    /// Returns whether no compile was needed.
    pub fn is_hit(&self) -> bool {
        !matches!(self, CacheState::Compiled { .. })
    }
}

/// Progress report: one more kernel is ready.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// The number of ready kernels, including this one.
    pub done: usize,
    /// The number of requested kernels.
    pub total: usize,
    /// The kernel that is ready.
    pub artifact: &'a Artifact,
}

/// The options of a [`KernelCache`].
#[derive(Clone, Debug)]
pub struct CachePolicy {
    /// What to do with a kernel that is not in the store.
    pub mode: JitMode,
    /// How long to wait for another process that is compiling the same kernel.
    pub lock_timeout: Duration,
}

/// A store of compiled kernels, with the compiler for missing kernels.
pub struct KernelCache {
    policy: CachePolicy,
    store: Result<Store, Unusable>,
    compiler: Arc<dyn Compiler>,
    /// Kernels attached to a bundle; searched first.
    attached: Option<Attached>,
}

impl KernelCache {
    /// Opens the user's cache, with NVRTC as its compiler. NVRTC is loaded when the first kernel is compiled.
    pub fn open(env: &Env) -> Self {
        let policy = CachePolicy { mode: env.jit, lock_timeout: env.lock_timeout };
        KernelCache::new(policy, env.cache_dir.as_deref(), Arc::new(NvrtcCompiler::new(env)))
    }

    /// Opens the cache in `dir`, with `compiler`. With `UNWEIGHT_JIT=off` the directory is not accessed.
    pub fn new(policy: CachePolicy, dir: Option<&Path>, compiler: Arc<dyn Compiler>) -> Self {
        let store = match (policy.mode, dir) {
            (JitMode::Off, _) => {
                Err(Unusable { root: dir.unwrap_or(Path::new("")).to_owned(), why: "UNWEIGHT_JIT=off".to_owned() })
            }
            (_, Some(dir)) => Store::open(dir),
            (_, None) => Err(Unusable {
                root: Path::new("").to_owned(),
                why: "UNWEIGHT_CACHE_DIR, XDG_CACHE_HOME and HOME are unset; set one of them".to_owned(),
            }),
        };
        Self { policy, store, compiler, attached: None }
    }

    /// Uses kernels that are attached to a bundle if they were compiled from the requested sources. The store and the
    /// compiler provide the others.
    ///
    /// **This runs code that the author of the bundle chose**, with the rights of this process: no digest proves its
    /// origin. Attached kernels are never copied into the store. `UNWEIGHT_JIT=off` ignores them, too.
    #[must_use]
    pub fn trust(self, attached: Attached) -> Self {
        Self { attached: Some(attached), ..self }
    }

    /// Returns the store, or why it cannot be used.
    pub fn store(&self) -> Result<&Store, &Unusable> {
        self.store.as_ref()
    }

    /// Returns the compiler.
    pub fn compiler(&self) -> &dyn Compiler {
        &*self.compiler
    }

    /// Returns one kernel, from the store or compiled.
    pub fn get(&self, request: &CompileRequest) -> Result<Artifact, Error> {
        // One request has one artifact.
        Ok(self.compile_all(std::slice::from_ref(request), 1, &|_| {})?.swap_remove(0))
    }

    /// Returns every kernel of `requests` in order, and compiles missing kernels on up to `threads` threads.
    ///
    /// Equal requests are compiled once. `progress` is called once per distinct kernel when it is ready, from the
    /// thread that provides it, but never concurrently. If several kernels fail, all failures are reported
    /// ([`Error::Several`]); kernels that are ready by then are in the store. If kernels must not or cannot be
    /// compiled, [`Error::NotCached`] lists *every* missing kernel, and `progress` is not called.
    pub fn compile_all(
        &self,
        requests: &[CompileRequest],
        threads: usize,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Vec<Artifact>, Error> {
        self.provide_all(requests, self.attached.as_ref(), threads, progress)
    }

    /// Like [`KernelCache::compile_all`], but ignores attached kernels: for kernels that the driver rejected.
    pub(crate) fn compile_without_attached(
        &self,
        requests: &[CompileRequest],
        threads: usize,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Vec<Artifact>, Error> {
        self.provide_all(requests, None, threads, progress)
    }

    fn provide_all(
        &self,
        requests: &[CompileRequest],
        attached: Option<&Attached>,
        threads: usize,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Vec<Artifact>, Error> {
        let mut unique: Vec<RequestedKernel<'_>> = Vec::new();
        let mut index_of: HashMap<SourceKey, usize> = HashMap::new();
        let mut order = Vec::with_capacity(requests.len());
        for request in requests {
            let source = SourceKey::of(request);
            order.push(*index_of.entry(source).or_insert_with(|| {
                unique.push(RequestedKernel { request, source, damage: None });
                unique.len() - 1
            }));
        }
        let total = unique.len();
        let attached = attached.filter(|_| self.policy.mode != JitMode::Off);
        let mut results: Vec<Option<Artifact>> = unique.iter_mut().map(|kernel| kernel.find_in(attached)).collect();
        let (missing, indices): (Vec<RequestedKernel<'_>>, Vec<usize>) =
            unique.into_iter().zip(0..).filter(|(_, index)| results[*index].is_none()).unzip();
        let found = total - missing.len();
        let report = |artifacts: &[&Artifact], before: usize| {
            for (index, artifact) in artifacts.iter().enumerate() {
                progress(&Progress { done: before + index + 1, total, artifact });
            }
        };
        let ready: Vec<&Artifact> = results.iter().flatten().collect();
        // If no kernel is missing, no compiler is searched for.
        let provided = if missing.is_empty() {
            report(&ready, 0);
            Vec::new()
        } else {
            match self.provider() {
                Provider::StoreOnly(why) => {
                    let stored = self.all_from_store(&missing, why)?;
                    report(&ready, 0);
                    report(&stored.iter().collect::<Vec<_>>(), found);
                    stored
                }
                Provider::Compiler(compiler) => {
                    report(&ready, 0);
                    let report_compiled = |ready: &Progress<'_>| {
                        progress(&Progress { done: found + ready.done, total, artifact: ready.artifact });
                    };
                    self.all_compiled(&missing, &compiler, threads, &report_compiled)?
                }
            }
        };
        for (index, artifact) in indices.into_iter().zip(provided) {
            results[index] = Some(artifact);
        }
        // Each kernel was found, or was among the missing kernels.
        Ok(order.into_iter().filter_map(|index| results[index].clone()).collect())
    }

    /// Returns who provides the kernels that are not attached.
    fn provider(&self) -> Provider {
        if self.policy.mode == JitMode::CacheOnly {
            return Provider::StoreOnly(NotCompiled::CacheOnly);
        }
        match self.compiler.identity() {
            Ok(compiler) => Provider::Compiler(compiler),
            // Without a compiler, it is unknown which compiler version is right. Any compiler's kernel of exactly this
            // source is accepted.
            Err(error) => Provider::StoreOnly(NotCompiled::NoCompiler(Box::new(error))),
        }
    }

    fn all_from_store(&self, unique: &[RequestedKernel<'_>], why: NotCompiled) -> Result<Vec<Artifact>, Error> {
        let mut missing = Vec::new();
        let mut found = Vec::new();
        for kernel @ RequestedKernel { request, source, .. } in unique {
            let start = Instant::now();
            let why = match self.store.as_ref().map(|store| store.get_any(&request.name, source)) {
                Ok(Lookup::Hit(entry)) => {
                    found.push(from_entry(*entry, CacheState::Hit, start));
                    continue;
                }
                Ok(Lookup::Absent) => kernel.miss(),
                Ok(Lookup::Damaged(damage)) => Miss::Damaged(damage),
                Err(unusable) => Miss::NoStore(unusable.clone()),
            };
            missing.push(MissingKernel { name: request.name.clone(), why });
        }
        if missing.is_empty() {
            return Ok(found);
        }
        let cache_dir = self.store.as_ref().ok().map(|store| store.root().to_owned());
        Err(Error::NotCached { missing, cache_dir, why })
    }

    fn all_compiled(
        &self,
        unique: &[RequestedKernel<'_>],
        compiler: &CompilerId,
        threads: usize,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Vec<Artifact>, Error> {
        let total = unique.len();
        let next = AtomicUsize::new(0);
        let done = Mutex::new(0usize);
        let results: Vec<Mutex<Option<Result<Artifact, Error>>>> = (0..total).map(|_| Mutex::new(None)).collect();
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(kernel) = unique.get(index) else { break };
                let result = self.provide(kernel, compiler);
                if let Ok(artifact) = &result {
                    let mut done = done.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    *done += 1;
                    progress(&Progress { done: *done, total, artifact });
                }
                *results[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(result);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads.clamp(1, 256).min(total) {
                // NVRTC recurses deeply on nested templates and was not tested with the default stack of 2 MiB. If a
                // thread cannot be started, the other threads do its work.
                let _ = std::thread::Builder::new()
                    .name("unweight-jit".to_owned())
                    .stack_size(16 << 20)
                    .spawn_scoped(scope, work);
            }
        });
        // For the case that no thread could be started, or that a thread left work over.
        work();
        let mut artifacts = Vec::with_capacity(total);
        let mut failures = Vec::new();
        for result in results {
            match result.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
                Some(Ok(artifact)) => artifacts.push(artifact),
                Some(Err(error)) => failures.push(error),
                // A worker took every index below `total`, and writes its result or panics.
                None => unreachable!("a kernel was neither compiled nor refused"),
            }
        }
        // A compiler that is too old is reported once, not once per kernel.
        if let Some(index) = failures.iter().position(|failure| matches!(failure, Error::OldNvrtc(_))) {
            return Err(failures.swap_remove(index));
        }
        match failures.len() {
            0 => Ok(artifacts),
            1 => Err(failures.remove(0)),
            _ => Err(Error::Several(failures)),
        }
    }

    fn provide(&self, kernel: &RequestedKernel<'_>, compiler: &CompilerId) -> Result<Artifact, Error> {
        let start = Instant::now();
        let (request, source) = (kernel.request, kernel.source);
        let name = request.checked_name().map_err(Error::BadName)?.to_owned();
        let key = Key { name, source, compiler: compiler.clone() };
        let store = match &self.store {
            Ok(store) => store,
            Err(_) if self.policy.mode == JitMode::Off => return self.compile(request, &key, None, Miss::Off, start),
            Err(unusable) => return self.compile(request, &key, None, Miss::NoStore(unusable.clone()), start),
        };
        if let Lookup::Hit(entry) = store.get(&key) {
            return Ok(from_entry(*entry, CacheState::Hit, start));
        }
        let folder = key.directory();
        let lock = lock::acquire(&store.lock_path(&folder), self.policy.lock_timeout);
        // Most likely, the lock's previous holder has stored the kernel.
        let why = match store.get(&key) {
            Lookup::Hit(entry) => {
                let waited = !matches!(lock, Lock::Held { waited: false, .. } | Lock::Unavailable);
                let state = if waited { CacheState::HitAfterWait } else { CacheState::Hit };
                return Ok(from_entry(*entry, state, start));
            }
            Lookup::Damaged(damage) => {
                store.evict(&folder);
                Miss::Damaged(damage)
            }
            Lookup::Absent => match &lock {
                Lock::TimedOut(timeout) => Miss::LockTimeout(*timeout),
                Lock::Held { .. } | Lock::Unavailable => kernel.miss(),
            },
        };
        // `lock` is held until here, so that waiting processes find the entry.
        let result = self.compile(request, &key, Some(store), why, start);
        drop(lock);
        result
    }

    fn compile(
        &self,
        request: &CompileRequest,
        key: &Key,
        store: Option<&Store>,
        why: Miss,
        start: Instant,
    ) -> Result<Artifact, Error> {
        let compile_start = Instant::now();
        let compiled = match self.compiler.compile(request) {
            Ok(compiled) => compiled,
            Err(Error::Compile(mut failure)) => {
                failure.kept = store.and_then(|store| store.keep_failure(key, request, &failure));
                return Err(Error::Compile(failure));
            }
            Err(other) => return Err(other),
        };
        let compile_us = u64::try_from(compile_start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let kept = match store {
            Some(store) => store.put(key, request, &compiled, compile_us),
            None => Kept::NotStored("no store".to_owned()),
        };
        Ok(Artifact {
            name: key.name.clone(),
            cubin: compiled.cubin.into(),
            resources: compiled.resources,
            log: compiled.log,
            compiler: key.compiler.clone(),
            state: CacheState::Compiled { why, kept },
            elapsed: start.elapsed(),
        })
    }
}

/// A requested kernel.
struct RequestedKernel<'a> {
    request: &'a CompileRequest,
    source: SourceKey,
    /// The defect of the attached kernel, if any.
    damage: Option<String>,
}

impl RequestedKernel<'_> {
    /// Returns the attached kernel with this name and source, if its digest matches and its cubin contains the kernel.
    /// Otherwise records the defect.
    fn find_in(&mut self, attached: Option<&Attached>) -> Option<Artifact> {
        let start = Instant::now();
        let attached = attached?;
        let entry = attached.find(&self.request.name, &self.source.to_string())?;
        match from_attached(attached, entry, start) {
            Ok(artifact) => Some(artifact),
            Err(damage) => {
                self.damage = Some(format!("attached kernel: {damage}"));
                None
            }
        }
    }

    /// Returns why the kernel is compiled if the store does not have it.
    fn miss(&self) -> Miss {
        self.damage.clone().map_or(Miss::Absent, Miss::Damaged)
    }
}

fn from_attached(attached: &Attached, entry: &AttachedKernel, start: Instant) -> Result<Artifact, String> {
    let cubin = attached.read(entry).map_err(|error| error.to_string())?;
    // The driver accepts a pointer without a length, so everything that it would follow is checked first.
    let info = cubin::read(&cubin).map_err(|error| error.to_string())?;
    let resources = info.kernel(&entry.name).map_err(|error| error.to_string())?.resources.clone();
    let by = &entry.compiler;
    Ok(Artifact {
        name: entry.name.clone(),
        cubin: cubin.into(),
        resources,
        log: String::new(),
        compiler: CompilerId { name: by.name.clone(), version: by.version.clone(), build: by.build.clone() },
        state: CacheState::Attached,
        elapsed: start.elapsed(),
    })
}

/// Who provides the kernels that are not attached.
enum Provider {
    /// The store alone, because nothing can be compiled.
    StoreOnly(NotCompiled),
    /// This compiler; the store has what it compiled before.
    Compiler(CompilerId),
}

fn from_entry(entry: Entry, state: CacheState, start: Instant) -> Artifact {
    Artifact {
        name: entry.meta.name,
        cubin: entry.cubin.into(),
        resources: entry.meta.resources,
        log: entry.meta.log,
        compiler: entry.meta.compiler,
        state,
        elapsed: start.elapsed(),
    }
}

#[cfg(test)]
mod tests;
