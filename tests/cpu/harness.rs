//! Builds kernels for the simulator (`tests/simulator`) and runs them.
//!
//! A kernel is the rendered source of its spec, launched as its plan says: the same source as the device compiler
//! compiles, with the same block, shared memory, cluster and grid. Only [`CpuKernel::source`] accepts other source, for
//! the tests of the simulator itself.
//!
//! Needs `g++` (or the compiler named by `CXX`). A missing compiler is an error, not a skip: these tests are the only
//! ones that run the kernels without a GPU.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use unweight_codegen::abi::{KernelArgs, TensorMap};
use unweight_codegen::plan::{GemmShape, Plan};
use unweight_codegen::spec::Op;
use unweight_codegen::{ExternalSource, VariantSpec, render};
use unweight_format::Digest;

type LaunchFn = unsafe extern "C" fn(u32, u32, u32, u32, u64, *const c_void) -> c_int;
type ErrorFn = unsafe extern "C" fn() -> *const c_char;
type RegisterFn = unsafe extern "C" fn(*const c_void, u64, *const c_char);
type ClearFn = unsafe extern "C" fn();
type TensorMapFn = unsafe extern "C" fn(*mut c_void, *const c_void, u32, u64, u64, u64, u32, u32, u32);

/// A change to one header, for planting a bug. `from` must occur exactly once.
pub struct Edit {
    /// Path below `templates/include`, or the name of an external kernel's header.
    pub header: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

impl Edit {
    /// Returns a bug to plant, unless this run leaves it out ([`Edit::is_left_out`]).
    pub fn planted(header: &'static str, from: &'static str, to: &'static str) -> Option<Self> {
        let edit = Self { header, from, to };
        (!edit.is_left_out()).then_some(edit)
    }

    /// Returns whether this run leaves the edit out: eleven of twelve, chosen by their text, unless `UNWEIGHT_TEST_ALL`
    /// is set. For these, only checks that `from` occurs.
    pub fn is_left_out(&self) -> bool {
        let Self { header, from, to } = self;
        let text = unweight_templates::header(header).unwrap();
        assert_eq!(text.matches(from).count(), 1, "`{from}` must occur once in {header}");
        let chosen = Digest::of([from.as_bytes(), to.as_bytes()].concat().as_slice()).to_string();
        std::env::var_os("UNWEIGHT_TEST_ALL").is_none() && chosen.bytes().map(u32::from).sum::<u32>() % 12 != 0
    }
}

/// A row-major matrix for a tensor map.
pub struct MapSpec<'a> {
    pub data: &'a [u8],
    pub element_bytes: u32,
    pub columns: u64,
    pub rows: u64,
    pub box_columns: u32,
    pub box_rows: u32,
    pub swizzle_bytes: u32,
}

/// Launch geometry.
pub struct Launch {
    pub grid: u32,
    pub block: u32,
    pub smem_bytes: u32,
    pub cluster: u32,
    /// Chooses the interleaving and the moments at which asynchronous work completes.
    pub seed: u64,
}

/// A problem on a device with this many SMs.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub problem: GemmShape,
    pub sms: u32,
    /// See [`Launch::seed`].
    pub seed: u64,
}

/// Compiled kernels. Each library contains one simulator, which is not reentrant, so methods need `&mut`.
pub struct CpuKernel {
    /// Empty for a hand-written source.
    plans: Vec<Plan>,
    /// External kernels; empty for others.
    external: Vec<ExternalSource>,
    launch: Vec<LaunchFn>,
    last_error: ErrorFn,
    register: RegisterFn,
    clear_registered: ClearFn,
    tensor_map: TensorMapFn,
    _library: libloading::Library,
    _directory: tempfile::TempDir,
}

/// Shared by all kernels: the headers, the precompiled header of the simulator, and its other sources as objects.
/// Reading the standard library's headers and compiling the simulator take longer than most kernels.
struct Common {
    directory: PathBuf,
    /// Selects the linker.
    linker: &'static [&'static str],
}

/// Sources of the simulator.
const SIMULATOR: [&str; 2] = ["simulator", "ptx"];

impl Common {
    /// Returns the shared part. Built once per version of the headers, and kept in the target directory.
    fn get() -> &'static Self {
        static COMMON: OnceLock<Common> = OnceLock::new();
        COMMON.get_or_init(|| {
            let mut key = Key::default();
            // This file defines how kernels are compiled.
            key.add(include_str!("harness.rs")).add(compiler_version());
            for (name, text) in unweight_templates::headers() {
                key.add(name).add(text);
            }
            for name in ["prelude.hpp", "simulator.hpp", "ptx.hpp", "state.hpp", "simulator.cpp", "ptx.cpp"] {
                key.add(std::fs::read(simulator().join(name)).unwrap());
            }
            let home = Path::new(env!("CARGO_TARGET_TMPDIR"));
            let complete = Self { directory: home.join(format!("simulator-{}", key.digest())), linker: linker() };
            if complete.directory.exists() {
                return complete;
            }
            remove_old_simulators(home);
            let made = tempfile::tempdir_in(home).unwrap();
            let common = Self { directory: made.path().to_owned(), ..complete };
            for (name, text) in unweight_templates::headers() {
                let path = common.include().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            std::fs::create_dir(common.compiled()).unwrap();
            std::fs::create_dir(common.kernels()).unwrap();
            let make = |from: &str, to: &str, kind: &[&str]| {
                let mut command = Self::command();
                command.arg("-I").arg(common.include()).args(kind);
                let output = command.arg(simulator().join(from)).arg("-o").arg(common.compiled().join(to)).output();
                let output = output
                    .unwrap_or_else(|e| panic!("cannot run the C++ compiler: {e}; install g++ (C++17) or set CXX"));
                assert!(output.status.success(), "compiling failed:\n{}", String::from_utf8_lossy(&output.stderr));
            };
            make("prelude.hpp", "prelude.hpp.gch", &["-x", "c++-header"]);
            for source in SIMULATOR {
                make(&format!("{source}.cpp"), &format!("{source}.o"), &["-c", "-O3"]);
            }
            // If another process was first, its directory is equivalent.
            match std::fs::rename(made.path(), &complete.directory) {
                Err(_) if !complete.directory.exists() => panic!("{}", complete.directory.display()),
                _ => complete,
            }
        })
    }

    fn include(&self) -> PathBuf {
        self.directory.join("include")
    }

    fn compiled(&self) -> PathBuf {
        self.directory.join("compiled")
    }

    /// Returns the directory of compiled kernels from earlier runs, keyed by the digest of all their inputs.
    fn kernels(&self) -> PathBuf {
        self.directory.join("kernels")
    }

    /// Returns the compiler with the options that the simulator and a kernel must share.
    fn command() -> Command {
        let mut command = Command::new(compiler());
        // Objects of several libraries must stay separate; the loader would merge GNU unique symbols. Only explicit fma
        // calls are fused, never a product and a sum.
        command.args(["-O1", "-ffp-contract=off", "-std=c++17", "-fPIC", "-fno-gnu-unique", "-w"]);
        command
    }
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "g++".into())
}

/// Returns the first line of the compiler's version.
fn compiler_version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let output = Command::new(compiler()).arg("--version").output();
        let output =
            output.unwrap_or_else(|e| panic!("cannot run the C++ compiler: {e}; install g++ (C++17) or set CXX"));
        format!("{} {}", compiler(), String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default())
    })
}

/// Returns the option for gold, where the compiler has it: it links a kernel in a fourth of the time.
fn linker() -> &'static [&'static str] {
    const GOLD: &[&str] = &["-fuse-ld=gold"];
    let made = tempfile::NamedTempFile::new().unwrap();
    let mut command = Command::new(compiler());
    let output = command.args(GOLD).args(["-shared", "-x", "c++", "/dev/null", "-o"]).arg(made.path()).output();
    if output.is_ok_and(|output| output.status.success()) { GOLD } else { &[] }
}

/// A digest of parts, each with its length.
#[derive(Default)]
struct Key(Vec<u8>);

impl Key {
    fn add(&mut self, part: impl AsRef<[u8]>) -> &mut Self {
        self.0.extend((part.as_ref().len() as u64).to_le_bytes());
        self.0.extend(part.as_ref());
        self
    }

    fn digest(&self) -> String {
        Digest::of(&self.0).to_string().replace(':', "-")
    }
}

/// Removes old simulators. Each version of the headers leaves a directory with all kernels compiled against it; only
/// the newest stay.
fn remove_old_simulators(home: &Path) {
    const MAX_SIMULATORS: usize = 3;
    let entries = std::fs::read_dir(home).into_iter().flatten().flatten();
    let simulators = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("simulator-"));
    let mut simulators: Vec<_> =
        simulators.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    simulators.sort();
    let old = simulators.len().saturating_sub(MAX_SIMULATORS);
    for (_, directory) in simulators.drain(..old) {
        // Another process may remove the directory at the same time.
        _ = std::fs::remove_dir_all(directory);
    }
}

/// Returns the directory of headers that replace the device.
fn simulator() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulator")
}

impl CpuKernel {
    /// Compiles the rendered kernel of a variant.
    pub fn of(spec: &VariantSpec, edits: &[Edit]) -> Self {
        Self::all(&[*spec], edits)
    }

    /// Compiles the kernels of several variants into one library.
    pub fn all(specs: &[VariantSpec], edits: &[Edit]) -> Self {
        let (mut includes, mut bodies, mut exports) = (BTreeSet::new(), String::new(), String::new());
        for (i, spec) in specs.iter().enumerate() {
            let text = render(spec).unwrap_or_else(|error| panic!("{error}")).text;
            includes.extend(text.lines().filter(|line| line.starts_with("#include")).map(str::to_owned));
            // Each source has its own `Config`. The headers are included before the first of these namespaces opens.
            _ = writeln!(bodies, "namespace k{i} {{\n{text}}}");
            _ = writeln!(exports, "UW_CPU_EXPORT(uw_test_launch_{i}, k{i}::{spec}, uw::{})", spec.op.info().args.name);
        }
        let includes: Vec<_> = includes.into_iter().collect();
        let mut built = Self::build(&format!("{}\n{bodies}{exports}", includes.join("\n")), specs.len(), edits, &[]);
        built.plans = specs.iter().map(|spec| Plan::new(spec).unwrap()).collect();
        built
    }

    /// Compiles external kernels into one library.
    pub fn external(kernels: &[ExternalSource], edits: &[Edit]) -> Self {
        let (mut includes, mut bodies, mut exports) = (BTreeSet::new(), String::new(), String::new());
        let mut headers: Vec<(&str, &str)> = Vec::new();
        for (i, kernel) in kernels.iter().enumerate() {
            let source = kernel.render().unwrap_or_else(|error| panic!("{error}"));
            includes.extend(source.text.lines().filter(|line| line.starts_with("#include")).map(str::to_owned));
            _ = writeln!(bodies, "namespace k{i} {{\n{}}}", source.text);
            _ = writeln!(exports, "UW_CPU_EXPORT(uw_test_launch_{i}, k{i}::{kernel}, uw::{})", kernel.args.name);
            headers.extend(kernel.headers);
        }
        let includes: Vec<_> = includes.into_iter().collect();
        let source = format!("{}\n{bodies}{exports}", includes.join("\n"));
        let mut built = Self::build(&source, kernels.len(), edits, &headers);
        built.external = kernels.to_vec();
        built
    }

    /// Compiles a complete translation unit with the entry `kernel`, which takes `args` (a C++ type).
    pub fn source(source: &str, kernel: &str, args: &str) -> Self {
        Self::build(&format!("{source}\nUW_CPU_EXPORT(uw_test_launch_0, {kernel}, {args})\n"), 1, &[], &[])
    }

    fn build(source: &str, kernels: usize, edits: &[Edit], headers: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let common = Common::get();
        let (edited, external) = (directory.path().join("edited"), directory.path().join("outside"));
        for (name, text) in headers {
            let path = external.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        for edit in edits {
            // Several edits of one header are applied in order.
            let path = edited.join(edit.header);
            let candidates = [&path, &external.join(edit.header), &common.include().join(edit.header)];
            let text = std::fs::read_to_string(candidates.iter().find(|path| path.exists()).unwrap()).unwrap();
            assert_eq!(text.matches(edit.from).count(), 1, "`{}` must occur once in {}", edit.from, edit.header);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text.replace(edit.from, edit.to)).unwrap();
        }
        let library = directory.path().join("kernel.so");
        let mut key = Key::default();
        key.add(source);
        for (name, text) in headers {
            key.add(name).add(text);
        }
        for Edit { header, from, to } in edits {
            key.add("edit").add(header).add(from).add(to);
        }
        let compiled = common.kernels().join(format!("{}.so", key.digest()));
        // Each kernel needs its own simulator, but the loader treats two names of one file as one library, so load a
        // copy.
        if std::fs::copy(&compiled, &library).is_err() {
            Self::compile(source, common, directory.path(), edits, headers);
            // Rename the library into place only when it is complete.
            let whole = tempfile::NamedTempFile::new_in(common.kernels()).unwrap();
            std::fs::copy(&library, whole.path()).unwrap();
            whole.persist(&compiled).unwrap();
        }
        // SAFETY: the library was built with the simulator, which exports these functions with these signatures;
        // its only initialisers are C++ static objects.
        unsafe {
            let loaded = libloading::Library::new(&library).unwrap();
            let entry = |i| *loaded.get::<LaunchFn>(format!("uw_test_launch_{i}").as_bytes()).unwrap();
            CpuKernel {
                plans: Vec::new(),
                external: Vec::new(),
                launch: (0..kernels).map(entry).collect(),
                last_error: *loaded.get::<ErrorFn>(b"uw_cpu_last_error").unwrap(),
                register: *loaded.get::<RegisterFn>(b"uw_cpu_register").unwrap(),
                clear_registered: *loaded.get::<ClearFn>(b"uw_cpu_clear_registered").unwrap(),
                tensor_map: *loaded.get::<TensorMapFn>(b"uw_cpu_tensor_map_2d").unwrap(),
                _library: loaded,
                _directory: directory,
            }
        }
    }

    /// Compiles `directory/kernel.so`. `directory` contains edited headers and those of external kernels.
    fn compile(source: &str, common: &Common, directory: &Path, edits: &[Edit], headers: &[(&str, &str)]) {
        // A static assertion may reject a planted bug, but the test must find the bug by its behavior.
        let asserts = if edits.is_empty() { "" } else { "#define static_assert(...)\n" };
        let file = directory.join("kernel.cu");
        std::fs::write(&file, [asserts, source].concat()).unwrap();
        let mut command = Common::command();
        command.args(common.linker);
        command.args(["-shared", "-x", "c++", "-include", "prelude.hpp", "-I"]).arg(directory.join("edited"));
        // Edits have no effect on headers that the precompiled header includes.
        if !edits.iter().any(|edit| ["unweight/abi.cuh", "unweight/ptx/types.cuh"].contains(&edit.header)) {
            command.arg("-I").arg(common.compiled());
        } else {
            command.arg("-Dstatic_assert(...)=");
        }
        command.arg("-I").arg(directory.join("outside")).arg("-I").arg(common.include()).arg("-I").arg(simulator());
        if !headers.is_empty() && !edits.is_empty() {
            // These compile for longer than they run.
            command.arg("-O0");
        }
        command.arg("-o").arg(directory.join("kernel.so")).arg(&file).args(["-x", "none"]);
        command.args(SIMULATOR.map(|source| common.compiled().join(format!("{source}.o"))));
        let output = command.output().unwrap();
        assert!(output.status.success(), "compiling failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Declares a buffer that the kernel may touch. Once one is declared, accesses outside all of them fail the launch.
    pub fn register(&mut self, buffer: &[u8], name: &str) {
        let name = CString::new(name).unwrap();
        // SAFETY: the callee copies the name and only remembers the address and the length.
        unsafe { (self.register)(buffer.as_ptr().cast(), buffer.len() as u64, name.as_ptr()) }
    }

    /// Forgets all declared buffers.
    pub fn clear_registered(&mut self) {
        // SAFETY: no arguments, no preconditions.
        unsafe { (self.clear_registered)() }
    }

    /// Makes a tensor map over a dense row-major matrix.
    pub fn tensor_map(&mut self, spec: &MapSpec<'_>) -> TensorMap {
        let mut map = TensorMap([0; 16]);
        let row_bytes = spec.columns * u64::from(spec.element_bytes);
        assert_eq!(spec.data.len() as u64, row_bytes * spec.rows);
        // SAFETY: `map` is 128 bytes; the callee only remembers the data's address.
        unsafe {
            (self.tensor_map)(
                (&raw mut map).cast(),
                spec.data.as_ptr().cast(),
                spec.element_bytes,
                spec.columns,
                spec.rows,
                row_bytes,
                spec.box_columns,
                spec.box_rows,
                spec.swizzle_bytes,
            );
        }
        map
    }

    /// Runs the kernel of a hand-written source to its end. Returns the reason if it stops early.
    ///
    /// # Safety
    /// Every address in `args` must be valid for the accesses the kernel makes through plain pointers; accesses through
    /// wrappers are checked against registered buffers.
    pub unsafe fn launch<A: bytemuck::Pod>(&mut self, launch: &Launch, args: &A) -> Result<(), String> {
        assert!(self.plans.is_empty() && self.external.is_empty(), "only raw sources are launched without a plan");
        // SAFETY: the caller guarantees it.
        unsafe { self.enqueue(0, launch, args) }
    }

    /// Runs the kernel of a variant as its plan says. The kernel may access only `buffers`.
    ///
    /// # Safety
    /// As [`CpuKernel::launch`].
    pub unsafe fn run<A: KernelArgs>(
        &mut self,
        spec: &VariantSpec,
        run: Run,
        args: &A,
        buffers: &[(&str, &[u8])],
    ) -> Result<(), String> {
        assert!(spec.op.takes::<A>(), "{spec} does not accept {}", A::NAME);
        let at =
            self.plans.iter().position(|plan| plan.spec == *spec).unwrap_or_else(|| panic!("{spec} was not built"));
        let plan = self.plans[at].launch;
        let grid = plan.grid.blocks(run.problem, run.sms).unwrap_or_else(|| panic!("{spec}: {run:?} has no grid"));
        // Blocks that wait for each other must run concurrently, and blocks that communicate through memory must be
        // able to run in any order. The simulator does both within a cluster.
        let meet = plan.co_resident || matches!(spec.op, Op::Attention(op) if op.split);
        let cluster = if meet { grid } else { plan.cluster };
        let smem_bytes = self.plans[at].smem.bytes();
        self.clear_registered();
        for (name, buffer) in buffers.iter().filter(|(_, buffer)| !buffer.is_empty()) {
            self.register(buffer, name);
        }
        let launch = Launch { grid, block: plan.threads, smem_bytes, cluster, seed: run.seed };
        // SAFETY: the caller guarantees it.
        unsafe { self.enqueue(at, &launch, args) }
    }

    /// Runs an external kernel with this many blocks. The kernel may access only `buffers`.
    ///
    /// # Safety
    /// As [`CpuKernel::launch`].
    pub unsafe fn run_external<A: KernelArgs>(
        &mut self,
        kernel: &ExternalSource,
        (grid, seed): (u32, u64),
        args: &A,
        buffers: &[(&str, &[u8])],
    ) -> Result<(), String> {
        assert!(kernel.takes::<A>(), "{kernel} does not accept {}", A::NAME);
        let at =
            self.external.iter().position(|built| built == kernel).unwrap_or_else(|| panic!("{kernel} was not built"));
        self.clear_registered();
        for (name, buffer) in buffers.iter().filter(|(_, buffer)| !buffer.is_empty()) {
            self.register(buffer, name);
        }
        let launch = Launch { grid, block: kernel.threads, smem_bytes: kernel.smem.bytes(), cluster: 1, seed };
        // SAFETY: the caller guarantees it.
        unsafe { self.enqueue(at, &launch, args) }
    }

    /// # Safety
    /// As [`CpuKernel::launch`].
    unsafe fn enqueue<A: bytemuck::Pod>(&mut self, at: usize, launch: &Launch, args: &A) -> Result<(), String> {
        let Launch { grid, block, smem_bytes, cluster, seed } = *launch;
        // SAFETY: `args` has the layout of the kernel's argument struct; the caller guarantees the rest.
        let status = unsafe { (self.launch[at])(grid, block, smem_bytes, cluster, seed, (&raw const *args).cast()) };
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a NUL-terminated string that lives until the next launch.
        Err(unsafe { CStr::from_ptr((self.last_error)()) }.to_string_lossy().into_owned())
    }
}

/// Parses the variant with this name without its prefix `uw_sm90a_`.
pub fn spec(name: &str) -> VariantSpec {
    format!("uw_sm90a_{name}").parse().unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the value of BF16 bits.
pub fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Memory of an exact size, 128-byte aligned as device allocations are. Never null, so that an empty section has an
/// address.
pub struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(128))]
struct Line([u64; 16]);

impl Buffer {
    /// Fills memory that was not written yet.
    pub const POISON: u8 = 0xa5;

    /// Returns a buffer filled with one byte.
    pub fn filled(bytes: usize, fill: u8) -> Self {
        Self { lines: vec![Line([u64::from_ne_bytes([fill; 8]); 16]); bytes.div_ceil(size_of::<Line>())], bytes }
    }

    /// Returns an unwritten buffer.
    pub fn new(bytes: usize) -> Self {
        Self::filled(bytes, Self::POISON)
    }

    /// Returns a buffer of zeros.
    pub fn zeroed(bytes: usize) -> Self {
        Self::filled(bytes, 0)
    }

    /// Returns a buffer with a copy of `data`.
    pub fn of(data: &[u8]) -> Self {
        let mut buffer = Self::new(data.len());
        bytemuck::cast_slice_mut(&mut buffer.lines)[..data.len()].copy_from_slice(data);
        buffer
    }

    /// Returns the bytes.
    pub fn slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }

    /// Returns the address for the kernel.
    pub fn address(&self) -> u64 {
        self.lines.as_ptr() as u64
    }

    /// Returns the bytes as little-endian u16.
    pub fn u16s(&self) -> Vec<u16> {
        self.numbers()
    }

    /// Returns the bytes as little-endian u32.
    pub fn u32s(&self) -> Vec<u32> {
        self.numbers()
    }

    /// Returns the bytes as little-endian u64.
    pub fn u64s(&self) -> Vec<u64> {
        self.numbers()
    }

    /// Returns the bytes as numbers of this machine, which is little-endian as the device is. Copies all at once: these
    /// tests are not optimised.
    fn numbers<T: bytemuck::Pod>(&self) -> Vec<T> {
        let whole = self.bytes / size_of::<T>() * size_of::<T>();
        bytemuck::cast_slice(&self.slice()[..whole]).to_vec()
    }
}
