//! The kernel cache with many processes: a cold start, kills during a compile, a full disk.
//!
//! Each test starts this binary again as [`child`], a test that does nothing unless environment variables enable it.
//! The compiler is fake and appends a line to a shared log per compile: the tests check which process compiles, how
//! often, and what is left on disk.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use unweight_rt::{
    Error,
    cache::{CacheState, Miss},
    env::JitMode,
    raw::jit::{
        cache::{CachePolicy, Kept, KernelCache, Store},
        compiler::{CompileRequest, Compiled, Compiler, CompilerId, FakeCompiler},
    },
};

/// Kernels that a child requests.
const KERNELS: usize = 6;

fn request(index: usize) -> CompileRequest {
    CompileRequest {
        name: format!("uw_test_{index}"),
        source: format!("// kernel {index}\n"),
        headers: Vec::new(),
        options: Vec::new(),
        arch: "sm_90a".to_owned(),
    }
}

/// The fake compiler, which logs each compile.
struct Noting {
    fake: FakeCompiler,
    log: PathBuf,
}

impl Compiler for Noting {
    fn identity(&self) -> Result<CompilerId, Error> {
        self.fake.identity()
    }

    fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error> {
        let mut log = File::options().append(true).create(true).open(&self.log).unwrap();
        // A write of a few bytes to a file opened for appending is atomic.
        log.write_all(format!("{}\n", request.name).as_bytes()).unwrap();
        self.fake.compile(request)
    }
}

/// The process that the tests start. Prints one line per kernel: `name state`.
#[test]
#[ignore = "started by the other tests"]
fn child() {
    let Some(root) = std::env::var_os("CHILD_CACHE") else { return };
    let variable = |name: &str| std::env::var(name).unwrap();
    let delay = Duration::from_millis(variable("CHILD_DELAY_MS").parse().unwrap());
    let start_at: u128 = variable("CHILD_START_MS").parse().unwrap();
    let compiler = Noting { fake: FakeCompiler::new("1.0", delay), log: variable("CHILD_LOG").into() };
    let policy = CachePolicy { mode: JitMode::Auto, lock_timeout: Duration::from_secs(120) };
    // All children start at the same moment, independent of their start-up time.
    while now_ms() < start_at {
        std::thread::sleep(Duration::from_micros(200));
    }
    let cache = KernelCache::new(policy, Some(Path::new(&root)), Arc::new(compiler));
    let requests: Vec<_> = (0..KERNELS).map(request).collect();
    let artifacts = cache.compile_all(&requests, 2, &|_| {}).unwrap();
    for (request, artifact) in requests.iter().zip(&artifacts) {
        assert_eq!(&*artifact.cubin, FakeCompiler::output(request), "{}", request.name);
        let state = match &artifact.state {
            CacheState::Hit => "hit".to_owned(),
            CacheState::Attached => "attached".to_owned(),
            CacheState::HitAfterWait => "waited".to_owned(),
            CacheState::Compiled { why, kept } => format!("compiled why={why:?} kept={kept:?}"),
            other => format!("{other:?}"),
        };
        println!("KERNEL {} {state}", artifact.name);
    }
}

fn now_ms() -> u128 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis()
}

struct Bench {
    _dir: tempfile::TempDir,
    root: PathBuf,
    log: PathBuf,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        Bench { root: dir.path().join("cache"), log: dir.path().join("compiles.log"), _dir: dir }
    }

    /// Returns the command of a child that begins `in_ms` from now.
    fn command(&self, delay_ms: u64, in_ms: u128) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "cache_processes::child", "--ignored", "--nocapture", "--test-threads=1"]);
        self.prepare(&mut command, delay_ms, in_ms);
        command
    }

    fn prepare(&self, command: &mut Command, delay_ms: u64, in_ms: u128) {
        command
            .env("CHILD_CACHE", &self.root)
            .env("CHILD_LOG", &self.log)
            .env("CHILD_DELAY_MS", delay_ms.to_string())
            .env("CHILD_START_MS", (now_ms() + in_ms).to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    fn compiles(&self) -> Vec<String> {
        let mut lines: Vec<String> =
            std::fs::read_to_string(&self.log).unwrap_or_default().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    fn each_once(&self) -> Vec<String> {
        (0..KERNELS).map(|index| request(index).name).collect()
    }

    fn store(&self) -> Store {
        Store::open(&self.root).unwrap()
    }
}

/// Returns the lines that a child printed about the kernels. Panics with all of its output if it failed.
fn states(child: Child) -> Vec<String> {
    let output = child.wait_with_output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}\n{stdout}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    let states: Vec<String> =
        stdout.lines().filter_map(|line| Some(line.split_once("KERNEL ")?.1.to_owned())).collect();
    assert_eq!(states.len(), KERNELS, "{stdout}");
    states
}

#[test]
fn cold_cache_compiles_each_kernel_once_for_many_processes() {
    let bench = Bench::new();
    let children: Vec<Child> = (0..16).map(|_| bench.command(25, 400).spawn().unwrap()).collect();
    let states: Vec<String> = children.into_iter().flat_map(states).collect();
    assert_eq!(bench.compiles(), bench.each_once());
    let compiled: Vec<_> = states.iter().filter(|state| state.contains("compiled")).collect();
    assert_eq!(compiled.len(), KERNELS, "{compiled:?}");
    assert!(compiled.iter().all(|state| state.ends_with("why=Absent kept=Stored")), "{compiled:?}");
    // The processes overlapped: some waited for another's compile.
    assert!(states.iter().any(|state| state.ends_with("waited")), "{states:?}");
    let verified = bench.store().verify(false).unwrap();
    assert_eq!((verified.good, verified.damaged.len()), (KERNELS, 0), "{verified:?}");
    assert_eq!(std::fs::read_dir(bench.root.join("building")).unwrap().count(), 0);
}

#[test]
fn damaged_entry_is_rebuilt_once_by_many_processes() {
    let bench = Bench::new();
    states(bench.command(0, 0).spawn().unwrap());
    let entry = bench.store().ls().unwrap().remove(2);
    let path = bench.root.join("entries").join(&entry.directory).join("kernel.cubin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    std::fs::remove_file(&bench.log).unwrap();
    let children: Vec<Child> = (0..8).map(|_| bench.command(20, 300).spawn().unwrap()).collect();
    let states: Vec<String> = children.into_iter().flat_map(states).collect();
    assert_eq!(bench.compiles(), [entry.meta.unwrap().name]);
    assert_eq!(states.iter().filter(|state| state.contains("why=Damaged")).count(), 1, "{states:?}");
    assert_eq!(bench.store().verify(false).unwrap().good, KERNELS);
}

#[test]
fn killed_compile_leaves_no_lock() {
    let bench = Bench::new();
    // The child compiles two kernels at once, each for a minute.
    let mut victim = bench.command(60_000, 0).spawn().unwrap();
    let start = Instant::now();
    while bench.compiles().len() < 2 {
        assert!(start.elapsed() < Duration::from_secs(60), "the child did not start to compile");
        std::thread::sleep(Duration::from_millis(2));
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    let start = Instant::now();
    let states = states(bench.command(0, 0).spawn().unwrap());
    assert!(states.iter().all(|state| state.ends_with("why=Absent kept=Stored")), "{states:?}");
    assert!(start.elapsed() < Duration::from_secs(30), "a process waited for a dead one");
}

#[test]
fn killed_process_leaves_only_complete_entries() {
    let bench = Bench::new();
    let mut partial = 0;
    for round in 0..24u64 {
        let mut victim = bench.command(3, 0).spawn().unwrap();
        // Kill times range from before its first entry to after its last, in steps shorter than a store.
        let start = Instant::now();
        while bench.compiles().is_empty() && start.elapsed() < Duration::from_secs(20) {
            std::hint::spin_loop();
        }
        std::thread::sleep(Duration::from_micros(700 * round));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let verified = bench.store().verify(false).unwrap();
        assert!(verified.damaged.is_empty(), "round {round}: {verified:?}");
        partial += usize::from(verified.good > 0 && verified.good < KERNELS);
        // The next process gets every kernel, whatever the killed one left.
        let states = states(bench.command(0, 0).spawn().unwrap());
        assert!(states.iter().all(|state| !state.contains("NotStored")), "{states:?}");
        assert_eq!(bench.store().verify(false).unwrap().good, KERNELS);
        bench.store().clear().unwrap();
        assert_eq!(std::fs::read_dir(bench.root.join("building")).unwrap().count(), 0);
        let _ = std::fs::remove_file(&bench.log);
    }
    assert!(partial > 0, "no kill happened between the first entry and the last, so the test shows nothing");
}

#[test]
fn full_disk_is_a_miss_without_partial_entries() {
    let bench = Bench::new();
    // A limit on file sizes makes writes fail half-way as a full disk does, even for root. The shell sets it for itself
    // and its child. The child handles no signal, so the store itself must not raise one. The limit counts blocks of
    // 512 or 1024 bytes; a cubin of the fake compiler has 4096 bytes.
    let mut command = Command::new("sh");
    let exe = std::env::current_exe().unwrap();
    command
        .args(["-c", "ulimit -f 2; exec \"$0\" --exact cache_processes::child --ignored --nocapture --test-threads=1"])
        .arg(exe);
    bench.prepare(&mut command, 0, 0);
    let before = states(command.spawn().unwrap());
    for state in &before {
        assert!(state.contains("kept=NotStored(\"cannot write kernel.cubin: File too large"), "{state}");
    }
    assert!(bench.store().ls().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(bench.root.join("building")).unwrap().count(), 0);
    // With free space again, the cache works as before.
    assert!(states(bench.command(0, 0).spawn().unwrap()).iter().all(|state| state.ends_with("kept=Stored")));
}

#[test]
fn file_in_place_of_the_cache_folder_is_a_miss() {
    // A read-only directory would not stop root; a file in its place stops every user.
    let bench = Bench::new();
    std::fs::write(&bench.root, "not a directory").unwrap();
    for state in states(bench.command(0, 0).spawn().unwrap()) {
        assert!(state.contains("why=NoStore") && state.contains("kept=NotStored"), "{state}");
    }
    assert_eq!(std::fs::read_to_string(&bench.root).unwrap(), "not a directory");
}

#[test]
fn read_only_cache_is_read_and_not_written() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    states(bench.command(0, 0).spawn().unwrap());
    let store = bench.store();
    let gone = store.ls().unwrap().remove(0);
    std::fs::remove_dir_all(bench.root.join("entries").join(&gone.directory)).unwrap();
    let set = |mode: u32| {
        for folder in ["", "entries", "building", "locks"] {
            std::fs::set_permissions(bench.root.join(folder), std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    set(0o500);
    // Modes do not restrict root. Then the kernel is stored, and unit tests with files in place of directories cover
    // this case.
    let enforced = File::create(bench.root.join("entries/probe")).is_err();
    let cache = KernelCache::new(
        CachePolicy { mode: JitMode::Auto, lock_timeout: Duration::from_secs(5) },
        Some(&bench.root),
        Arc::new(FakeCompiler::default()),
    );
    let requests: Vec<_> = (0..KERNELS).map(request).collect();
    let artifacts = cache.compile_all(&requests, 2, &|_| {}).unwrap();
    set(0o700);
    assert_eq!(artifacts.iter().filter(|artifact| artifact.state == CacheState::Hit).count(), KERNELS - 1);
    let compiled = artifacts.iter().find(|artifact| !artifact.state.is_hit()).unwrap();
    let CacheState::Compiled { why: Miss::Absent, kept } = &compiled.state else { panic!("{:?}", compiled.state) };
    assert_eq!(matches!(kept, Kept::NotStored(_)), enforced, "{kept:?}");
}
