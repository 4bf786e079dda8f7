//! Tests the cache in one process. tests/jit/cache_processes.rs uses many.

use std::{path::PathBuf, sync::atomic::AtomicBool};

use tempfile::TempDir;

use super::*;
use crate::jit::compiler::FakeCompiler;

fn request(name: &str) -> CompileRequest {
    CompileRequest {
        name: name.to_owned(),
        source: format!("source of {name}"),
        headers: vec![("unweight/h.cuh".to_owned(), "header".to_owned()), ("../evil.cuh".to_owned(), "x".to_owned())],
        options: Vec::new(),
        arch: "sm_90a".to_owned(),
    }
}

fn policy(mode: JitMode) -> CachePolicy {
    CachePolicy { mode, lock_timeout: Duration::from_secs(20) }
}

struct Fixture {
    _dir: TempDir,
    root: PathBuf,
    compiler: Arc<FakeCompiler>,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cache");
        Fixture { _dir: dir, root, compiler: Arc::new(FakeCompiler::default()) }
    }

    fn cache(&self) -> KernelCache {
        self.with(JitMode::Auto)
    }

    fn with(&self, mode: JitMode) -> KernelCache {
        KernelCache::new(policy(mode), Some(&self.root), self.compiler.clone())
    }

    /// Returns the directory of the only entry.
    fn entry(&self) -> PathBuf {
        let mut entries: Vec<_> =
            std::fs::read_dir(self.root.join("entries")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries.remove(0)
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn cold_then_warm() {
    let fixture = Fixture::new();
    let first = fixture.cache().get(&request("uw_a")).unwrap();
    assert_eq!(first.state, CacheState::Compiled { why: Miss::Absent, kept: Kept::Stored });
    let second = fixture.cache().get(&request("uw_a")).unwrap();
    assert_eq!(second.state, CacheState::Hit);
    assert_eq!(&*second.cubin, FakeCompiler::output(&request("uw_a")));
    assert_eq!((&second.cubin, &second.resources, &second.name), (&first.cubin, &first.resources, &first.name));
    assert_eq!(fixture.compiler.calls(), 1);
    assert_eq!(names(&fixture.entry()), ["kernel.cu", "kernel.cubin", "meta.json"]);
    assert_eq!(std::fs::read_to_string(fixture.entry().join("kernel.cu")).unwrap(), "source of uw_a");
    assert!(names(&fixture.root.join("building")).is_empty());
}

#[test]
fn the_root_belongs_to_its_user_alone() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let fixture = Fixture::new();
    fixture.cache().get(&request("uw_a")).unwrap();
    assert_eq!(std::fs::metadata(&fixture.root).unwrap().mode() & 0o777, 0o700);
    // Once the directory is writable for group or world, its content is no longer trusted.
    for mode in [0o702, 0o720, 0o2770] {
        std::fs::set_permissions(&fixture.root, std::fs::Permissions::from_mode(mode)).unwrap();
        let artifact = fixture.cache().get(&request("uw_a")).unwrap();
        let CacheState::Compiled { why: Miss::NoStore(why), kept: Kept::NotStored(_) } = artifact.state else {
            panic!("{:?}", artifact.state)
        };
        assert!(why.to_string().contains("chmod go-w"), "{mode:o}: {why}");
    }
}

#[test]
fn every_kind_of_damage_is_evicted_and_rebuilt_once() {
    type Damage = fn(&Path);
    let cases: &[(&str, Damage)] = &[
        ("flipped cubin bit", |entry| flip(&entry.join("kernel.cubin"), 17)),
        ("short cubin", |entry| truncate(&entry.join("kernel.cubin"), 100)),
        ("empty cubin", |entry| truncate(&entry.join("kernel.cubin"), 0)),
        ("no cubin", |entry| std::fs::remove_file(entry.join("kernel.cubin")).unwrap()),
        ("truncated meta", |entry| truncate(&entry.join("meta.json"), 40)),
        ("empty meta", |entry| truncate(&entry.join("meta.json"), 0)),
        ("no meta", |entry| std::fs::remove_file(entry.join("meta.json")).unwrap()),
        ("changed number in meta", |entry| {
            let path = entry.join("meta.json");
            let text = std::fs::read_to_string(&path).unwrap();
            let changed = text.replace("\"registers\": 32", "\"registers\": 33");
            assert_ne!(text, changed);
            std::fs::write(path, changed).unwrap();
        }),
        ("huge meta", |entry| {
            std::fs::File::options().write(true).open(entry.join("meta.json")).unwrap().set_len(1 << 40).unwrap()
        }),
        ("a directory for the cubin", |entry| {
            std::fs::remove_file(entry.join("kernel.cubin")).unwrap();
            std::fs::create_dir(entry.join("kernel.cubin")).unwrap();
        }),
        ("a file for the entry", |entry| {
            std::fs::remove_dir_all(entry).unwrap();
            std::fs::write(entry, "x").unwrap();
        }),
        ("a dangling link for the entry", |entry| {
            std::fs::remove_dir_all(entry).unwrap();
            std::os::unix::fs::symlink("/nonexistent", entry).unwrap();
        }),
    ];
    for (what, damage) in cases {
        let fixture = Fixture::new();
        fixture.cache().get(&request("uw_a")).unwrap();
        damage(&fixture.entry());
        let rebuilt = fixture.cache().get(&request("uw_a")).unwrap();
        assert!(
            matches!(&rebuilt.state, CacheState::Compiled { why: Miss::Damaged(_), kept: Kept::Stored }),
            "{what}: {:?}",
            rebuilt.state
        );
        assert_eq!(&*rebuilt.cubin, FakeCompiler::output(&request("uw_a")), "{what}");
        assert_eq!(fixture.cache().get(&request("uw_a")).unwrap().state, CacheState::Hit, "{what}");
        assert_eq!(fixture.compiler.calls(), 2, "{what}");
        assert!(names(&fixture.root.join("building")).is_empty(), "{what}");
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 4;
    std::fs::write(path, bytes).unwrap();
}

fn truncate(path: &Path, len: u64) {
    std::fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn an_entry_under_another_kernels_name_is_damage() {
    let fixture = Fixture::new();
    fixture.cache().get(&request("uw_a")).unwrap();
    let a = fixture.entry();
    let key = Key {
        name: "uw_b".to_owned(),
        source: SourceKey::of(&request("uw_b")),
        compiler: fixture.compiler.identity().unwrap(),
    };
    std::fs::rename(&a, fixture.root.join("entries").join(key.directory())).unwrap();
    let cache = fixture.cache();
    let verified = cache.store().unwrap().verify(false).unwrap();
    assert_eq!((verified.good, verified.damaged.len()), (0, 1));
    let artifact = cache.get(&request("uw_b")).unwrap();
    assert!(matches!(artifact.state, CacheState::Compiled { why: Miss::Damaged(_), kept: Kept::Stored }));
    assert_eq!(artifact.name, "uw_b");
}

#[test]
fn unusable_cache_root_is_a_miss_with_a_reason() {
    let fixture = Fixture::new();
    // A file in place of the directory; unlike a mode, this also stops root.
    std::fs::write(&fixture.root, "").unwrap();
    for dir in [Some(fixture.root.clone()), Some(fixture.root.join("below")), None] {
        let cache = KernelCache::new(policy(JitMode::Auto), dir.as_deref(), fixture.compiler.clone());
        let artifact = cache.get(&request("uw_a")).unwrap();
        assert!(
            matches!(&artifact.state, CacheState::Compiled { why: Miss::NoStore(_), kept: Kept::NotStored(_) }),
            "{:?}",
            artifact.state
        );
        assert_eq!(&*artifact.cubin, FakeCompiler::output(&request("uw_a")));
    }
}

#[test]
fn a_store_that_cannot_be_written_still_serves() {
    let fixture = Fixture::new();
    fixture.cache().get(&request("uw_a")).unwrap();
    // Like a read-only file system, also for root: nothing can be created below a file.
    for folder in ["building", "locks"] {
        std::fs::remove_dir_all(fixture.root.join(folder)).unwrap();
        std::fs::write(fixture.root.join(folder), "").unwrap();
    }
    assert_eq!(fixture.cache().get(&request("uw_a")).unwrap().state, CacheState::Hit);
    let other = fixture.cache().get(&request("uw_b")).unwrap();
    assert!(
        matches!(&other.state, CacheState::Compiled { why: Miss::Absent, kept: Kept::NotStored(_) }),
        "{:?}",
        other.state
    );
    // A damaged entry that cannot be removed is not used; the kernel is compiled.
    flip(&fixture.entry().join("kernel.cubin"), 0);
    let damaged = fixture.cache().get(&request("uw_a")).unwrap();
    assert!(
        matches!(&damaged.state, CacheState::Compiled { why: Miss::Damaged(_), kept: Kept::NotStored(_) }),
        "{:?}",
        damaged.state
    );
    assert_eq!(&*damaged.cubin, FakeCompiler::output(&request("uw_a")));
}

#[test]
fn threads_compile_each_kernel_once() {
    let mut fixture = Fixture::new();
    fixture.compiler = Arc::new(FakeCompiler::new("1.0", Duration::from_millis(3)));
    // Every kernel is requested twice.
    let requests: Vec<_> = (0..40).map(|index| request(&format!("uw_{}", index % 20))).collect();
    let reported = Mutex::new(Vec::new());
    let inside = AtomicBool::new(false);
    let artifacts = fixture
        .cache()
        .compile_all(&requests, 8, &|progress| {
            assert!(!inside.swap(true, Ordering::SeqCst), "two callbacks at a time");
            assert_eq!(progress.total, 20);
            reported.lock().unwrap().push((progress.done, progress.artifact.name.clone()));
            inside.store(false, Ordering::SeqCst);
        })
        .unwrap();
    for (request, artifact) in requests.iter().zip(&artifacts) {
        assert_eq!(artifact.name, request.name);
        assert_eq!(&*artifact.cubin, FakeCompiler::output(request));
    }
    assert_eq!(fixture.compiler.calls(), 20);
    let reported = reported.into_inner().unwrap();
    assert_eq!(reported.iter().map(|(done, _)| *done).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
    // The second time, exactly the two missing ones are compiled.
    let more: Vec<_> = (0..22).map(|index| request(&format!("uw_{index}"))).collect();
    let artifacts = fixture.cache().compile_all(&more, 8, &|_| {}).unwrap();
    assert_eq!(artifacts.iter().filter(|artifact| artifact.state.is_hit()).count(), 20);
    assert_eq!(fixture.compiler.calls(), 22);
}

#[test]
fn threads_with_a_cache_each_share_one_compile() {
    let mut fixture = Fixture::new();
    fixture.compiler = Arc::new(FakeCompiler::new("1.0", Duration::from_millis(50)));
    let states: Vec<CacheState> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..16).map(|_| scope.spawn(|| fixture.cache().get(&request("uw_a")).unwrap().state)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(fixture.compiler.calls(), 1, "{states:?}");
    assert_eq!(states.iter().filter(|state| !state.is_hit()).count(), 1);
    assert!(states.contains(&CacheState::HitAfterWait), "{states:?}");
}

/// A process that finds a partially created directory must neither reject it nor ignore it, which would compile
/// everything again.
#[test]
fn concurrent_creation_of_a_store() {
    let home = tempfile::tempdir().unwrap();
    for round in 0..400 {
        let root = home.path().join(round.to_string());
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            let open = || {
                barrier.wait();
                Store::open(&root)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            for opened in threads.into_iter().map(|thread| thread.join().unwrap()) {
                assert!(opened.is_ok(), "round {round}: {:?}", opened.err());
            }
        });
    }
}

#[test]
fn lock_timeout_compiles_without_the_lock() {
    let fixture = Fixture::new();
    let cache = KernelCache::new(
        CachePolicy { mode: JitMode::Auto, lock_timeout: Duration::from_millis(20) },
        Some(&fixture.root),
        fixture.compiler.clone(),
    );
    let key = Key {
        name: "uw_a".to_owned(),
        source: SourceKey::of(&request("uw_a")),
        compiler: fixture.compiler.identity().unwrap(),
    };
    let lock = lock::acquire(&cache.store().unwrap().lock_path(&key.directory()), Duration::ZERO);
    assert!(matches!(lock, Lock::Held { .. }));
    let artifact = cache.get(&request("uw_a")).unwrap();
    let expected = Miss::LockTimeout(Duration::from_millis(20));
    assert_eq!(artifact.state, CacheState::Compiled { why: expected, kept: Kept::Stored });
}

#[test]
fn losing_a_publish_race_keeps_own_bytes() {
    let fixture = Fixture::new();
    let cache = fixture.cache();
    let store = cache.store().unwrap();
    let key = Key {
        name: "uw_a".to_owned(),
        source: SourceKey::of(&request("uw_a")),
        compiler: fixture.compiler.identity().unwrap(),
    };
    let compiled = fixture.compiler.compile(&request("uw_a")).unwrap();
    assert_eq!(store.put(&key, &request("uw_a"), &compiled, 1), Kept::Stored);
    assert_eq!(store.put(&key, &request("uw_a"), &compiled, 1), Kept::LostRace);
    assert!(names(&store.building()).is_empty());
}

#[test]
fn cache_only_names_every_missing_kernel_and_compiles_none() {
    let fixture = Fixture::new();
    fixture.cache().get(&request("uw_b")).unwrap();
    let requests = [request("uw_a"), request("uw_b"), request("uw_c")];
    let error = fixture.with(JitMode::CacheOnly).compile_all(&requests, 4, &|_| panic!("called")).unwrap_err();
    let Error::NotCached { missing, why: NotCompiled::CacheOnly, .. } = &error else { panic!("{error}") };
    let absent = |name: &str| MissingKernel { name: name.to_owned(), why: Miss::Absent };
    assert_eq!(missing, &[absent("uw_a"), absent("uw_c")]);
    assert!(error.to_string().contains("UNWEIGHT_JIT=cache-only"), "{error}");
    assert_eq!(fixture.compiler.calls(), 1);
    assert_eq!(fixture.with(JitMode::CacheOnly).get(&request("uw_b")).unwrap().state, CacheState::Hit);
}

#[test]
fn without_a_compiler_any_cached_kernel_of_the_source_is_used() {
    let mut fixture = Fixture::new();
    for version in ["1.9", "1.10", "1.2"] {
        fixture.compiler = Arc::new(FakeCompiler::new(version, Duration::ZERO));
        fixture.cache().get(&request("uw_a")).unwrap();
    }
    let cache = KernelCache::new(policy(JitMode::Auto), Some(&fixture.root), Arc::new(NoCompiler));
    assert_eq!(cache.get(&request("uw_a")).unwrap().compiler.version, "1.10");
    let error = cache.get(&request("uw_b")).unwrap_err().to_string();
    assert!(error.contains("uw_b") && error.contains("the compiler is missing"), "{error}");
    // The newest one is damaged: the next newest is used.
    let newest = names(&fixture.root.join("entries")).into_iter().find(|name| name.contains("1.10")).unwrap();
    flip(&fixture.root.join("entries").join(newest).join("kernel.cubin"), 3);
    assert_eq!(cache.get(&request("uw_a")).unwrap().compiler.version, "1.9");
}

#[test]
fn off_touches_no_disk() {
    let fixture = Fixture::new();
    for _ in 0..2 {
        let artifact = fixture.with(JitMode::Off).get(&request("uw_a")).unwrap();
        assert!(matches!(artifact.state, CacheState::Compiled { why: Miss::Off, .. }));
    }
    assert_eq!(fixture.compiler.calls(), 2);
    assert!(!fixture.root.exists());
}

#[test]
fn all_compile_failures_are_reported_and_kept() {
    let fixture = Fixture::new();
    let bad = |name: &str| CompileRequest { source: "#error\n".to_owned(), ..request(name) };
    let error = fixture.cache().compile_all(&[bad("uw_x"), request("uw_a"), bad("uw_y")], 2, &|_| {}).unwrap_err();
    let Error::Several(errors) = &error else { panic!("{error}") };
    assert_eq!(errors.len(), 2);
    let Error::Compile(failure) = &errors[0] else { panic!("{error}") };
    assert_eq!(failure.name, "uw_x");
    let kept = failure.kept.as_ref().unwrap();
    assert_eq!(std::fs::read_to_string(kept.join("kernel.cu")).unwrap(), "#error\n");
    assert_eq!(std::fs::read_to_string(kept.join("include/unweight/h.cuh")).unwrap(), "header");
    assert!(std::fs::read_to_string(kept.join("log.txt")).unwrap().contains("#error directive"));
    assert!(!kept.join("evil.cuh").exists(), "a header was written outside its directory");
    assert!(error.to_string().contains("uw_y"), "{error}");
    // The valid one was stored, and a failure is not remembered but tried again.
    assert_eq!(fixture.cache().get(&request("uw_a")).unwrap().state, CacheState::Hit);
    assert!(fixture.cache().get(&bad("uw_x")).is_err());
    assert_eq!(fixture.compiler.calls(), 4);
    assert!(matches!(fixture.cache().get(&bad("../x")), Err(Error::BadName(_))));
}

#[test]
fn listing_verifying_pruning_clearing() {
    let fixture = Fixture::new();
    let cache = fixture.cache();
    let store = cache.store().unwrap();
    assert!(store.ls().unwrap().is_empty());
    let all: Vec<_> = (0..4).map(|index| request(&format!("uw_{index}"))).collect();
    cache.compile_all(&all, 1, &|_| {}).unwrap();
    // uw_2 is the most recently used entry, uw_0 the least recently used.
    let now = std::time::SystemTime::now();
    for (age, name) in [(400, "uw_0."), (300, "uw_1."), (100, "uw_2."), (200, "uw_3.")] {
        let folder = names(&store.entries()).into_iter().find(|folder| folder.starts_with(name)).unwrap();
        let meta = std::fs::File::options().append(true).open(store.entries().join(folder).join("meta.json")).unwrap();
        meta.set_modified(now - Duration::from_secs(age)).unwrap();
    }
    let order = |store: &Store| -> Vec<String> {
        store.ls().unwrap().into_iter().map(|listed| listed.meta.unwrap().name).collect()
    };
    assert_eq!(order(store), ["uw_0", "uw_1", "uw_3", "uw_2"]);
    // A hit counts as use.
    cache.get(&request("uw_0")).unwrap();
    assert_eq!(order(store), ["uw_1", "uw_3", "uw_2", "uw_0"]);

    // Entries differ by a few bytes, because the digits of the compile time differ.
    let bytes: Vec<u64> = store.ls().unwrap().iter().map(|listed| listed.bytes).collect();
    assert!(bytes.iter().all(|bytes| *bytes > 4096));
    assert_eq!(store.prune(u64::MAX).unwrap(), Removed::default());
    let removed = store.prune(bytes[1..].iter().sum()).unwrap();
    assert_eq!((removed.entries, removed.bytes, removed.failed), (1, bytes[0], 0));
    assert_eq!(order(store), ["uw_3", "uw_2", "uw_0"]);

    let victim = store.ls().unwrap().remove(1);
    flip(&store.entries().join(&victim.directory).join("kernel.cu"), 2);
    let verified = store.verify(false).unwrap();
    assert_eq!((verified.good, verified.evicted), (2, 0));
    assert_eq!(verified.damaged[0].0, victim.directory);
    assert!(verified.damaged[0].1.starts_with("kernel.cu: SHA-256"), "{verified:?}");
    assert_eq!(store.verify(true).unwrap().evicted, 1);
    assert_eq!(store.verify(true).unwrap(), Verified { good: 2, ..Verified::default() });

    // A foreign file in the root is never removed.
    std::fs::write(fixture.root.join("README"), "mine").unwrap();
    std::fs::create_dir(store.building().join("uw_9.dead")).unwrap();
    let removed = store.clear().unwrap();
    assert_eq!((removed.entries, removed.leftovers, removed.failed), (2, 1, 0));
    assert_eq!(names(&fixture.root), ["CACHEDIR.TAG", "README", "building", "entries", "locks"]);
    for folder in ["building", "entries", "locks"] {
        assert!(names(&fixture.root.join(folder)).is_empty(), "{folder}");
    }
    assert!(!cache.get(&request("uw_0")).unwrap().state.is_hit());
}

#[test]
fn a_table_is_kept_by_the_name_of_its_device_until_the_cache_is_cleared() {
    let fixture = Fixture::new();
    let cache = fixture.cache();
    let store = cache.store().unwrap();
    assert_eq!(store.table("NVIDIA GeForce RTX 4090").unwrap(), None);
    let path = store.keep_table("NVIDIA GeForce RTX 4090", b"first").unwrap();
    assert_eq!(path, fixture.root.join("tables/uw_nvidia-geforce-rtx-4090.json"));
    assert_eq!(store.keep_table("NVIDIA GeForce RTX 4090", b"second").unwrap(), path);
    assert_eq!(store.table("NVIDIA GeForce RTX 4090").unwrap().as_deref(), Some(&b"second"[..]));
    assert_eq!(store.table("../../etc/passwd").unwrap(), None, "a name leads nowhere else");
    assert_eq!(names(&fixture.root.join("tables")), ["uw_nvidia-geforce-rtx-4090.json"], "nothing half-written");
    assert_eq!(store.prune(0).unwrap(), Removed::default(), "it is not a kernel");
    std::fs::write(fixture.root.join("tables/notes"), "mine").unwrap();
    assert_eq!(store.clear().unwrap().leftovers, 1);
    assert_eq!(names(&fixture.root.join("tables")), ["notes"]);
    // A link is reported, not followed.
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    assert!(store.table("NVIDIA GeForce RTX 4090").is_err());
}

#[test]
fn leftovers_of_dead_processes_are_removed() {
    let fixture = Fixture::new();
    let cache = fixture.cache();
    let store = cache.store().unwrap();
    for name in ["uw_young", "uw_old", "uw_busy"] {
        std::fs::create_dir(store.building().join(name)).unwrap();
    }
    let busy = std::fs::File::open(store.building().join("uw_busy")).unwrap();
    busy.try_lock().unwrap();
    for name in ["uw_old", "uw_busy"] {
        let folder = std::fs::File::open(store.building().join(name)).unwrap();
        folder.set_modified(std::time::SystemTime::now() - Duration::from_secs(3600)).unwrap();
    }
    assert_eq!(store.prune(u64::MAX).unwrap().leftovers, 1);
    assert_eq!(names(&store.building()), ["uw_busy", "uw_young"]);
}

#[test]
fn foreign_folder_is_not_used_as_cache() {
    let home = tempfile::tempdir().unwrap();
    let foreign = home.path().join("thesis");
    for folder in ["entries/chapter", "failed/attempt", "building/uw_house", "locks"] {
        std::fs::create_dir_all(foreign.join(folder)).unwrap();
    }
    std::fs::write(foreign.join("locks/door"), "").unwrap();
    let unusable = Store::open(&foreign).unwrap_err();
    assert!(unusable.why.contains("not a kernel cache") && unusable.why.contains("UNWEIGHT_CACHE_DIR"), "{unusable}");
    assert_eq!(names(&foreign).len(), 4);
    // With the tag, still only items that the store could have created are touched.
    let root = home.path().join("cache");
    let store = Store::open(&root).unwrap();
    assert!(root.join("CACHEDIR.TAG").is_file());
    for folder in ["entries/chapter", "failed/attempt", "failed/uw_x", "building/house", "building/uw_dead"] {
        std::fs::create_dir_all(root.join(folder)).unwrap();
    }
    std::fs::write(root.join("locks/door"), "").unwrap();
    store.prune(0).unwrap();
    store.clear().unwrap();
    for kept in ["entries/chapter", "failed/attempt", "building/house", "locks/door"] {
        assert!(root.join(kept).exists(), "{kept}");
    }
    assert!(!root.join("failed/uw_x").exists() && !root.join("building/uw_dead").exists());
    // A tag of another program.
    std::fs::write(root.join("CACHEDIR.TAG"), "Signature: 8a477f597d28d172789f06886806bc55").unwrap();
    assert!(Store::open(&root).is_err());
}

#[test]
fn world_writable_entries_are_not_loaded() {
    use std::os::unix::fs::PermissionsExt;
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("cache");
    Store::open(&root).unwrap();
    std::fs::set_permissions(root.join("entries"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let unusable = Store::open(&root).unwrap_err();
    assert!(unusable.why.contains("other users can write") && unusable.why.contains("entries"), "{unusable}");
}

#[test]
fn fifos_and_link_loops_do_not_block() {
    let fixture = Fixture::new();
    let cache = fixture.cache();
    let request = request("uw_a");
    cache.get(&request).unwrap();
    let fifo = |path: &Path| {
        let _ = std::fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let start = Instant::now();
    for file in ["meta.json", "kernel.cubin"] {
        fifo(&fixture.entry().join(file));
        assert!(
            matches!(cache.get(&request).unwrap().state, CacheState::Compiled { why: Miss::Damaged(_), .. }),
            "{file}"
        );
        assert!(cache.get(&request).unwrap().state.is_hit(), "{file}");
    }
    let store = cache.store().unwrap();
    let folder = names(&store.entries()).remove(0);
    let lock = store.lock_path(&folder);
    for obstruct in [&fifo as &dyn Fn(&Path), &|path: &Path| {
        let _ = std::fs::remove_file(path);
        std::os::unix::fs::symlink("elsewhere", path).unwrap();
    }] {
        obstruct(&lock);
        assert!(store.evict(&folder));
        let state = cache.get(&request).unwrap().state;
        assert!(matches!(state, CacheState::Compiled { why: Miss::Absent, kept: Kept::Stored }), "{state:?}");
    }
    assert!(!store.root().join("locks/elsewhere").exists(), "the link was followed");
    assert!(start.elapsed() < Duration::from_secs(20));
}

// ---- kernels attached to a bundle ----

/// A cubin that NVRTC 13.0 compiled for sm_90a; its kernel is named `k`.
const CUBIN: &[u8] = include_bytes!("../../../testdata/shared.cubin");

/// A machine without a compiler.
struct NoCompiler;

impl Compiler for NoCompiler {
    fn identity(&self) -> Result<CompilerId, Error> {
        Err(Error::BadName("the compiler is missing".to_owned()))
    }
    fn compile(&self, _: &CompileRequest) -> Result<crate::jit::compiler::Compiled, Error> {
        panic!("compile must not be called")
    }
}

/// Returns an entry as if `cubin` had been compiled from the request.
fn entry<'a>(request: &CompileRequest, cubin: &'a [u8]) -> (AttachedKernel, &'a [u8]) {
    let artifact = Artifact {
        name: request.name.clone(),
        cubin: cubin.into(),
        resources: KernelResources::default(),
        log: String::new(),
        compiler: CompilerId { name: "nvrtc".to_owned(), version: "13.0".to_owned(), build: String::new() },
        state: CacheState::Hit,
        elapsed: Duration::ZERO,
    };
    (attachable(request, &artifact), cubin)
}

fn attached(folder: &Path, kernels: &[(AttachedKernel, &[u8])]) -> Attached {
    let path = folder.join("kernels");
    std::fs::write(&path, Attached::encode(kernels).unwrap()).unwrap();
    Attached::open(&path).unwrap().unwrap()
}

#[test]
fn attached_kernels_are_found_without_a_compiler_and_stay_out_of_the_store() {
    let fixture = Fixture::new();
    let home = fixture._dir.path();
    let cache = |trusted: bool| {
        let cache = KernelCache::new(policy(JitMode::Auto), Some(&fixture.root), Arc::new(NoCompiler));
        if trusted { cache.trust(attached(home, &[entry(&request("k"), CUBIN)])) } else { cache }
    };
    let reported = Mutex::new(Vec::new());
    let artifacts = cache(true)
        .compile_all(&[request("k"), request("k")], 2, &|progress| {
            reported.lock().unwrap().push((progress.done, progress.total, progress.artifact.name.clone()));
        })
        .unwrap();
    assert_eq!(reported.into_inner().unwrap(), [(1, 1, "k".to_owned())]);
    assert_eq!(artifacts.len(), 2);
    assert_eq!((&*artifacts[1].cubin, &artifacts[1].state), (CUBIN, &CacheState::Attached));
    // Resources are read from the cubin, not from the attached entry.
    assert_eq!((artifacts[0].resources.max_threads, artifacts[0].resources.static_smem_bytes), (96, 256));
    assert!(artifacts[0].state.is_hit());
    assert!(names(&fixture.root.join("entries")).is_empty());
    // Untrusted attached kernels are ignored.
    let error = cache(false).get(&request("k")).unwrap_err();
    assert!(matches!(&error, Error::NotCached { missing, .. } if missing[0].why == Miss::Absent), "{error}");
    // Another version of the library requests another source.
    let newer = CompileRequest { source: "another".to_owned(), ..request("k") };
    assert!(matches!(cache(true).get(&newer), Err(Error::NotCached { .. })));
    let other_arch = CompileRequest { arch: "sm_80".to_owned(), ..request("k") };
    assert!(matches!(cache(true).get(&other_arch), Err(Error::NotCached { .. })));
}

#[test]
fn missing_attached_kernels_are_compiled() {
    let fixture = Fixture::new();
    let cache = fixture.cache().trust(attached(fixture._dir.path(), &[entry(&request("k"), CUBIN)]));
    let reported = Mutex::new(Vec::new());
    let requests = [request("uw_a"), request("k"), request("uw_b")];
    let artifacts = cache
        .compile_all(&requests, 2, &|progress| reported.lock().unwrap().push((progress.done, progress.total)))
        .unwrap();
    assert_eq!(reported.into_inner().unwrap(), [(1, 3), (2, 3), (3, 3)]);
    for (request, artifact) in requests.iter().zip(&artifacts) {
        assert_eq!(artifact.name, request.name);
        assert_eq!(artifact.state == CacheState::Attached, request.name == "k");
    }
    assert_eq!(fixture.compiler.calls(), 2);
    // A kernel that the driver rejects is compiled.
    let compiled = cache.compile_without_attached(&[request("k")], 1, &|_| {}).unwrap();
    assert_eq!(compiled[0].state, CacheState::Compiled { why: Miss::Absent, kept: Kept::Stored });
    // `off` ignores attached kernels, `cache-only` treats them as part of the cache.
    let off = fixture.with(JitMode::Off).trust(attached(fixture._dir.path(), &[entry(&request("k"), CUBIN)]));
    assert!(!off.get(&request("k")).unwrap().state.is_hit());
    let only = fixture.with(JitMode::CacheOnly).trust(attached(fixture._dir.path(), &[entry(&request("k"), CUBIN)]));
    assert_eq!(only.get(&request("k")).unwrap().state, CacheState::Attached);
}

#[test]
fn damaged_attached_kernel_is_compiled_instead() {
    let fixture = Fixture::new();
    let home = fixture._dir.path();
    // The entries have digests that an attacker could compute.
    let mut machine = CUBIN.to_vec();
    machine[18] = 62;
    let cases: [(&str, &[u8], &str); 4] = [
        ("uw_swapped", CUBIN, "contains no kernel uw_swapped, only k"),
        ("k", b"text", "not a readable cubin"),
        ("k", &CUBIN[..CUBIN.len() / 2], "not a readable cubin"),
        ("k", &machine, "ELF machine 62"),
    ];
    for (name, cubin, reason) in cases {
        let _ = std::fs::remove_dir_all(&fixture.root);
        let cache = fixture.cache().trust(attached(home, &[entry(&request(name), cubin)]));
        let artifact = cache.get(&request(name)).unwrap();
        let CacheState::Compiled { why: Miss::Damaged(why), kept: Kept::Stored } = &artifact.state else {
            panic!("{name}: {:?}", artifact.state)
        };
        assert!(why.starts_with("attached kernel: ") && why.contains(reason), "{why}");
        assert_eq!(&*artifact.cubin, FakeCompiler::output(&request(name)));
    }
    // The bytes change after the file was opened.
    let _ = std::fs::remove_dir_all(&fixture.root);
    let cache = fixture.cache().trust(attached(home, &[entry(&request("k"), CUBIN)]));
    let path = home.join("kernels");
    let end = std::fs::metadata(&path).unwrap().len() as usize;
    flip(&path, end - 1);
    let artifact = cache.get(&request("k")).unwrap();
    assert!(matches!(artifact.state, CacheState::Compiled { why: Miss::Damaged(_), .. }), "{:?}", artifact.state);
    let alone = KernelCache::new(policy(JitMode::Auto), Some(&home.join("empty")), Arc::new(NoCompiler));
    let error = alone.trust(Attached::open(&path).unwrap().unwrap()).get(&request("k")).unwrap_err().to_string();
    assert!(error.contains("k (damaged: attached kernel: ") && error.contains("the compiler is missing"), "{error}");
}
