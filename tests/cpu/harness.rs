//! Builds a kernel source against the CPU prelude (`templates/cpu`) and runs it.
//!
//! Needs `g++` (or the compiler named by `CXX`). A missing compiler is an error, not a skip: these tests are the only ones that run the
//! kernels' function without a GPU.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use unweight_codegen::abi::TensorMap;

type LaunchFn = unsafe extern "C" fn(u32, u32, u32, u32, u64, *const c_void) -> c_int;
type ErrorFn = unsafe extern "C" fn() -> *const c_char;
type RegisterFn = unsafe extern "C" fn(*const c_void, u64, *const c_char);
type ClearFn = unsafe extern "C" fn();
type TensorMapFn = unsafe extern "C" fn(*mut c_void, *const c_void, u32, u64, u64, u64, u32, u32, u32);

/// A change to one header, for planting a bug. `from` must occur exactly once.
pub struct Edit {
    /// Path below `templates/include`.
    pub header: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// A row-major matrix as a tensor map sees it.
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

/// A compiled kernel. The machine inside is one per library and not reentrant: `&mut` everywhere.
pub struct CpuKernel {
    launch: LaunchFn,
    last_error: ErrorFn,
    register: RegisterFn,
    clear_registered: ClearFn,
    tensor_map: TensorMapFn,
    _library: libloading::Library,
    _directory: tempfile::TempDir,
}

fn templates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("templates")
}

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

impl CpuKernel {
    /// `source` is a complete kernel translation unit; `kernel` its entry, taking `args` (a C++ type).
    pub fn build(source: &str, kernel: &str, args: &str, edits: &[Edit]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut include = templates().join("include");
        if !edits.is_empty() {
            let copy = directory.path().join("include");
            copy_tree(&include, &copy);
            for edit in edits {
                let path = copy.join(edit.header);
                let text = std::fs::read_to_string(&path).unwrap();
                assert_eq!(text.matches(edit.from).count(), 1, "`{}` must occur once in {}", edit.from, edit.header);
                std::fs::write(&path, text.replace(edit.from, edit.to)).unwrap();
            }
            include = copy;
        }
        let file = directory.path().join("kernel.cu");
        std::fs::write(&file, format!("{source}\nUW_CPU_EXPORT(uw_test_launch, {kernel}, {args})\n")).unwrap();
        let library = directory.path().join("kernel.so");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
        let output = Command::new(&compiler)
            .args(["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-x", "c++", "-include", "prelude.hpp", "-I"])
            .arg(templates().join("cpu"))
            .arg("-I")
            .arg(&include)
            .arg("-o")
            .arg(&library)
            .arg(&file)
            .output()
            .unwrap_or_else(|e| panic!("cannot run `{compiler}`: {e}; install g++ (C++17) or set CXX"));
        assert!(output.status.success(), "{compiler} failed:\n{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the library was just built from the prelude, which exports these five functions with these signatures;
        // its only initialisers are C++ static objects.
        unsafe {
            let loaded = libloading::Library::new(&library).unwrap();
            CpuKernel {
                launch: *loaded.get::<LaunchFn>(b"uw_test_launch").unwrap(),
                last_error: *loaded.get::<ErrorFn>(b"uw_cpu_last_error").unwrap(),
                register: *loaded.get::<RegisterFn>(b"uw_cpu_register").unwrap(),
                clear_registered: *loaded.get::<ClearFn>(b"uw_cpu_clear_registered").unwrap(),
                tensor_map: *loaded.get::<TensorMapFn>(b"uw_cpu_tensor_map_2d").unwrap(),
                _library: loaded,
                _directory: directory,
            }
        }
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

    /// A tensor map over a dense row-major matrix.
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

    /// Runs the kernel to its end, or says what stopped it.
    ///
    /// # Safety
    /// Every address in `args` must be valid for the accesses the kernel makes through plain pointers; accesses through wrappers are
    /// checked against registered buffers.
    pub unsafe fn launch<A: bytemuck::Pod>(&mut self, launch: &Launch, args: &A) -> Result<(), String> {
        // SAFETY: `args` has the layout of the kernel's argument struct (abi.rs); the rest is the caller's promise.
        let status = unsafe {
            (self.launch)(
                launch.grid,
                launch.block,
                launch.smem_bytes,
                launch.cluster,
                launch.seed,
                (&raw const *args).cast(),
            )
        };
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a NUL-terminated string that lives until the next launch.
        Err(unsafe { CStr::from_ptr((self.last_error)()) }.to_string_lossy().into_owned())
    }
}

/// xorshift64*: the tests need numbers, not quality.
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 33) % limit
    }
}

/// The value of BF16 bits.
pub fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// A buffer whose start is 128-byte aligned, as device allocations are.
pub struct Aligned {
    words: Vec<[u64; 16]>,
    bytes: usize,
}

impl Aligned {
    /// A copy of `data`.
    pub fn new(data: &[u8]) -> Self {
        // One line of slack: the vector itself is only 8-byte aligned.
        let words = vec![[0u64; 16]; data.len().div_ceil(128) + 1];
        let mut aligned = Aligned { words, bytes: data.len() };
        let shift = aligned.shift();
        bytemuck::cast_slice_mut(&mut aligned.words)[shift..shift + data.len()].copy_from_slice(data);
        aligned
    }
    fn shift(&self) -> usize {
        self.words.as_ptr().cast::<u8>().align_offset(128)
    }
    /// The bytes.
    pub fn slice(&self) -> &[u8] {
        let shift = self.shift();
        &bytemuck::cast_slice(&self.words)[shift..shift + self.bytes]
    }
    /// Where the kernel finds them.
    pub fn address(&self) -> u64 {
        self.slice().as_ptr() as u64
    }
}
