//! Finds the NVIDIA libraries of this machine with their versions, and reports why one is missing.
//!
//! Libraries are loaded on demand: [`find`] searches for one library and keeps it loaded for the life of the process.
//! cudarc opens libraries by name and panics if one is missing, so code that calls cudarc calls
//! [`process::require`](super::process::require) first. A library outside of the loader's path (usually in a Python
//! wheel) is loaded here by its absolute path. A later `dlopen` by SONAME, by cudarc or by NVRTC for its builtins, then
//! finds the loaded library.
//!
//! Search order, first usable wins: the variable (`UNWEIGHT_NVRTC`, ...; if it is set, nothing else is tried), Python
//! wheels of the active environment, CUDA toolkits, `LD_LIBRARY_PATH`, the loader by name. Python itself is never run.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use unweight_codegen::spec::Arch;

use crate::env::Env;

/// A library that Unweight can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Library {
    /// libcuda: the driver.
    Driver,
    /// libnvrtc: the compiler.
    Nvrtc,
    /// libcublasLt, which cuBLAS needs.
    CublasLt,
    /// libcublas: BF16 matrix products.
    Cublas,
}

impl Library {
    /// All libraries, in the order of a report.
    pub const ALL: [Library; 4] = [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Cublas];

    /// Returns the file name before `.so`.
    pub const fn stem(self) -> &'static str {
        match self {
            Library::Driver => "libcuda",
            Library::Nvrtc => "libnvrtc",
            Library::CublasLt => "libcublasLt",
            Library::Cublas => "libcublas",
        }
    }

    /// Features that are unavailable without the library.
    pub const fn disables(self) -> &'static str {
        match self {
            Library::Driver => "everything on the GPU; compression and decompression on the CPU still work",
            Library::Nvrtc => "compiling kernels; kernels that are in the cache still run",
            Library::CublasLt | Library::Cublas => {
                "the matmul of raw tensors, the faster route above 64 rows on GPUs other than Hopper, the BF16 baseline \
                 and `--placement bf16`"
            }
        }
    }

    /// Returns the instruction that installs the library.
    pub const fn remedy(self) -> &'static str {
        match self {
            Library::Driver => "install the NVIDIA driver, or start the container with the GPU passed through",
            Library::Nvrtc => {
                "`pip install -U nvidia-cuda-nvrtc` (13.0 or newer for a CUDA 13 driver, nvidia-cuda-nvrtc-cu12 for a \
                 CUDA 12 driver), or set UNWEIGHT_NVRTC to a libnvrtc.so"
            }
            Library::CublasLt | Library::Cublas => {
                "`pip install nvidia-cublas`, or set UNWEIGHT_CUBLAS to a directory that contains it"
            }
        }
    }

    /// Returns the SONAMEs to request from the loader, newest first.
    const fn sonames(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Library::Cublas => &["libcublas.so.13", "libcublas.so.12", "libcublas.so"],
        }
    }

    /// Directories below `site-packages` where wheels install the library.
    const fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &[],
            Library::Nvrtc => &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
            Library::CublasLt | Library::Cublas => &["nvidia/cu13/lib", "nvidia/cublas/lib"],
        }
    }

    /// Returns required symbols, which an old version may lack (cudarc would panic on the call).
    const fn symbols(self) -> &'static [&'static str] {
        match self {
            Library::Driver => {
                &["cuDriverGetVersion", "cuModuleLoadData", "cuTensorMapEncodeTiled", "cuLaunchKernelEx"]
            }
            Library::Nvrtc => &["nvrtcVersion", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"],
            Library::CublasLt => &["cublasLtMatmul"],
            Library::Cublas => &["cublasGemmEx"],
        }
    }

    fn variable(self, env: &Env) -> Option<(&'static str, &Path)> {
        match self {
            Library::Driver => None,
            Library::Nvrtc => env.nvrtc.as_deref().map(|path| ("UNWEIGHT_NVRTC", path)),
            Library::CublasLt => env
                .cublas
                .as_deref()
                // If the path is a file, it is libcublas; libcublasLt is in the same directory.
                .map(|path| if path.is_file() { path.parent().unwrap_or(path) } else { path })
                .map(|path| ("UNWEIGHT_CUBLAS", path)),
            Library::Cublas => env.cublas.as_deref().map(|path| ("UNWEIGHT_CUBLAS", path)),
        }
    }
}

/// The first version that supports Hopper's `sm_90a`. Some architectures require a later compiler: [`OldNvrtc`].
const MIN_VERSION: Version = Version { major: 12, minor: 0 };

/// A version as reported by the library itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The major version.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The search rule that found a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An environment variable named the path.
    Variable(&'static str),
    /// A Python wheel below this `site-packages`.
    Wheel(PathBuf),
    /// A CUDA toolkit.
    Toolkit(PathBuf),
    /// `LD_LIBRARY_PATH` or the loader's own search.
    Loader,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Variable(name) => write!(f, "{name}"),
            Origin::Wheel(site) => write!(f, "Python wheel in {}", site.display()),
            Origin::Toolkit(root) => write!(f, "CUDA toolkit {}", root.display()),
            Origin::Loader => write!(f, "the dynamic loader"),
        }
    }
}

/// A loaded, usable library.
#[derive(Debug)]
pub struct Found {
    /// The name of the library.
    pub library: Library,
    /// The file, as far as it is known.
    pub path: PathBuf,
    /// The search rule that found the library.
    pub origin: Origin,
    /// Version of the library. For the driver, the newest CUDA version it supports.
    pub version: Version,
    handle: &'static Handle,
}

impl Found {
    /// Returns the address of a function. `T` must be a function pointer type.
    ///
    /// # Safety
    /// `T` is the symbol's true signature. The library stays loaded for the life of the process.
    pub(crate) unsafe fn symbol<T: Copy>(&self, name: &str) -> Option<T> {
        // SAFETY: the caller vouches for the type; the handle is never closed.
        unsafe { symbol(self.handle, name) }
    }
}

/// A place that was tried without success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// The file or SONAME.
    pub what: String,
    /// Why the file was not used.
    pub why: String,
}

/// A library that is missing or not usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct MissingLibrary {
    /// The name of the library.
    pub library: Library,
    /// All places that were tried, in order.
    pub tried: Vec<Tried>,
}

impl MissingLibrary {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "library-missing"
    }
}

impl fmt::Display for MissingLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} not usable (disables {}); {}",
            self.library.stem(),
            self.library.disables(),
            self.library.remedy()
        )?;
        for Tried { what, why } in &self.tried {
            write!(f, "\n  tried {what}: {why}")?;
        }
        Ok(())
    }
}

/// The found NVRTC is too old for an architecture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "NVRTC {version} ({}) does not support {}: the first version that does is {first}; {}, then check the found \
     version with `unweight doctor`",
    .path.display(),
    .arch.compiler_name(),
    Library::Nvrtc.remedy()
)]
pub struct OldNvrtc {
    /// The architecture to compile for.
    pub arch: Arch,
    /// The first NVRTC version that supports it.
    pub first: Version,
    /// The version that was found.
    pub version: Version,
    /// The path of the library.
    pub path: PathBuf,
}

impl OldNvrtc {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "nvrtc-too-old"
    }

    /// Checks that NVRTC of this version supports an architecture
    /// ([`first_nvrtc`](unweight_codegen::limits::ArchLimits::first_nvrtc)).
    ///
    /// # Errors
    /// The version is older than the first version that supports it.
    pub fn check(arch: Arch, version: Version, path: &Path) -> Result<(), Self> {
        let (major, minor) = arch.limits().first_nvrtc;
        let first = Version { major, minor };
        if version < first { Err(Self { arch, first, version, path: path.to_owned() }) } else { Ok(()) }
    }
}

/// Searches for `library` and loads it for the life of the process.
pub fn find(library: Library, env: &Env) -> Result<Found, MissingLibrary> {
    let mut tried = Vec::new();
    let missing = |tried| MissingLibrary { library, tried };
    if library == Library::Cublas {
        // libcublas loads libcublasLt by name; loading that first allows any directory.
        if let Err(error) = find(Library::CublasLt, env) {
            tried.extend(error.tried);
        }
    }
    if let Some((name, path)) = library.variable(env) {
        let files = files_at(library, path);
        if files.is_empty() {
            tried.push(Tried {
                what: format!("{name}={}", path.display()),
                why: format!("no {}.so* found", library.stem()),
            });
        }
        return first_usable(library, files, &Origin::Variable(name), &mut tried).ok_or_else(|| missing(tried));
    }
    for site in site_packages(env) {
        for directory in library.wheel_folders() {
            let files = files_in(&site.join(directory), library.stem());
            if let Some(found) = first_usable(library, files, &Origin::Wheel(site.clone()), &mut tried) {
                return Ok(found);
            }
        }
    }
    // The driver belongs to the machine; a toolkit contains only a stub.
    if library != Library::Driver {
        for root in &env.search.toolkits {
            for directory in ["lib64", "lib", "targets/x86_64-linux/lib"] {
                let files = files_in(&root.join(directory), library.stem());
                if let Some(found) = first_usable(library, files, &Origin::Toolkit(root.clone()), &mut tried) {
                    return Ok(found);
                }
            }
        }
    }
    // Search by directory first, because the loader only tries the requested SONAMEs. Not for the driver: a directory
    // may contain a toolkit's stub.
    for directory in env.search.loader_path.iter().filter(|_| library != Library::Driver) {
        if let Some(found) = first_usable(library, files_in(directory, library.stem()), &Origin::Loader, &mut tried) {
            return Ok(found);
        }
    }
    let names = library.sonames().iter().map(PathBuf::from).collect();
    first_usable(library, names, &Origin::Loader, &mut tried).ok_or_else(|| missing(tried))
}

/// The body of `unweight doctor`: found libraries, and what is unavailable without the missing ones.
#[derive(Debug)]
pub struct Report {
    /// One result per library, in the order of [`Library::ALL`].
    pub libraries: Vec<Result<Found, MissingLibrary>>,
    /// Combinations of found libraries that are incompatible.
    pub warnings: Vec<String>,
}

/// Searches for every library.
pub fn report(env: &Env) -> Report {
    let libraries: Vec<_> = Library::ALL.into_iter().map(|library| find(library, env)).collect();
    let version = |library: Library| libraries[library as usize].as_ref().ok().map(|found| found.version);
    let mut warnings = Vec::new();
    for library in [Library::Nvrtc, Library::Cublas] {
        // A cubin of CUDA 13 does not load on a CUDA 12 driver; within one major version, it loads.
        if let (Some(found), Some(driver)) = (version(library), version(Library::Driver))
            && found.major > driver.major
        {
            warnings.push(format!(
                "{} {found} is newer than the driver's CUDA {driver}; its output may not load: \
                 update the driver, or install {}'s {}.x version",
                library.stem(),
                library.stem(),
                driver.major
            ));
        }
    }
    Report { libraries, warnings }
}

/// Returns the existing directories of Python packages of the environment's interpreters.
fn site_packages(env: &Env) -> Vec<PathBuf> {
    let mut sites: Vec<PathBuf> = env.search.python_path.clone();
    for prefix in &env.search.python_prefixes {
        for lib in ["lib", "lib64"] {
            let mut versions: Vec<PathBuf> = list(&prefix.join(lib))
                .into_iter()
                .filter(|path| {
                    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("python3"))
                })
                .collect();
            // python3.12 before python3.9.
            versions.sort_by_key(|path| std::cmp::Reverse(numbers(&path.to_string_lossy())));
            for version in versions {
                sites.push(version.join("site-packages"));
                sites.push(version.join("dist-packages"));
            }
        }
    }
    sites.retain(|site| site.join("nvidia").is_dir());
    sites.dedup();
    sites
}

/// Returns candidates for a variable's value: the file itself, or files in the directory, its `lib`, or wheels below
/// it.
fn files_at(library: Library, path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return if path.exists() { vec![path.to_owned()] } else { Vec::new() };
    }
    let below = ["", "lib64", "lib"].iter().chain(library.wheel_folders()).map(|directory| path.join(directory));
    below.flat_map(|directory| files_in(&directory, library.stem())).collect()
}

/// Returns `stem.so`, `stem.so.13`, ... in `directory`, highest version first.
fn files_in(directory: &Path, stem: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = list(directory)
        .into_iter()
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            name.strip_prefix(stem).and_then(|rest| rest.strip_prefix(".so")).is_some_and(|rest| {
                rest.split('.').skip(1).all(is_number) && (rest.is_empty() || rest.starts_with('.'))
            })
        })
        .collect();
    files.sort_by_key(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        std::cmp::Reverse((numbers(&name), name))
    });
    // Links to one file are one candidate.
    let mut targets = Vec::new();
    files.retain(|path| {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        let new = !targets.contains(&real);
        targets.push(real);
        new
    });
    files
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the numbers in a name, for ordering versions.
fn numbers(text: &str) -> Vec<u64> {
    text.split(|character: char| !character.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

fn list(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory)
        .map_or_else(|_| Vec::new(), |entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
}

fn first_usable(library: Library, candidates: Vec<PathBuf>, origin: &Origin, tried: &mut Vec<Tried>) -> Option<Found> {
    for path in candidates {
        match load(library, &path, origin.clone()) {
            Ok(found) => return Some(found),
            Err(why) => tried.push(Tried { what: path.display().to_string(), why }),
        }
    }
    None
}

fn load(library: Library, path: &Path, origin: Origin) -> Result<Found, String> {
    // The loader would block on a FIFO. The loader itself resolves a bare name.
    if path.components().count() > 1 && std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err("not a regular file".to_owned());
    }
    // SAFETY: the libraries are NVIDIA's, named by their own file names or by the user; their initialisers have no
    // preconditions. RTLD_LOCAL hides their symbols from other libraries of the process.
    let handle = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| error.to_string())?;
    for name in library.symbols() {
        // SAFETY: only the presence is checked.
        if unsafe { symbol::<unsafe extern "C" fn()>(&handle, name) }.is_none() {
            return Err(format!("has no {name}: too old or not {}", library.stem()));
        }
    }
    let version = version_of(library, &handle).ok_or("does not report its version")?;
    if version < MIN_VERSION {
        return Err(format!("version {version} is older than {MIN_VERSION}"));
    }
    let path =
        if path.is_absolute() { path.to_owned() } else { mapped_file(library).unwrap_or_else(|| path.to_owned()) };
    // A rejected library is closed again, so that its SONAME is free for a better one. A used library is never closed:
    // these libraries start threads and register exit handlers, and cudarc keeps pointers into them.
    let handle: &'static Handle = Box::leak(Box::new(handle));
    if library == Library::Nvrtc {
        preload_builtins(&path, version);
    }
    Ok(Found { library, path, origin, version, handle })
}

/// Loads NVRTC's builtins. NVRTC opens them by SONAME at the first compile, which fails outside the loader's path.
fn preload_builtins(nvrtc: &Path, version: Version) {
    let Some(directory) = nvrtc.canonicalize().ok().and_then(|path| path.parent().map(Path::to_owned)) else {
        return;
    };
    let builtins = directory.join(format!("libnvrtc-builtins.so.{version}"));
    // SAFETY: as in `load`. A failure is not an error here: NVRTC's own search may still find them; if not, its log
    // reports it.
    if let Ok(handle) = unsafe { Handle::open(Some(&builtins), RTLD_NOW | RTLD_LOCAL) } {
        Box::leak(Box::new(handle));
    }
}

/// Returns the file that the loader chose for a library opened by name.
fn mapped_file(library: Library) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let prefix = format!("{}.so", library.stem());
    maps.lines()
        .filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])))
        .find(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&prefix)))
        .map(Path::to_owned)
}

/// # Safety
/// `T` is a function pointer type and the symbol's true signature.
unsafe fn symbol<T: Copy>(handle: &Handle, name: &str) -> Option<T> {
    // SAFETY: the caller vouches for the type.
    unsafe { handle.get::<T>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

fn version_of(library: Library, handle: &Handle) -> Option<Version> {
    type IntOut = unsafe extern "C" fn(*mut i32) -> i32;
    type TwoOut = unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
    type Property = unsafe extern "C" fn(i32, *mut i32) -> i32;
    let property = |name: &str, which: i32| -> Option<u32> {
        let mut value = 0;
        // SAFETY: `cublas[Lt]GetProperty(libraryPropertyType, int*)` writes one int and needs no handle.
        let status = unsafe { symbol::<Property>(handle, name)?(which, &mut value) };
        (status == 0).then(|| u32::try_from(value).ok()).flatten()
    };
    let (major, minor) = match library {
        Library::Driver => {
            let mut packed = 0;
            // SAFETY: `cuDriverGetVersion(int*)` writes one int and needs no initialisation.
            let status = unsafe { symbol::<IntOut>(handle, "cuDriverGetVersion")?(&mut packed) };
            let packed = u32::try_from(packed).ok().filter(|_| status == 0)?;
            (packed / 1000, packed % 1000 / 10)
        }
        Library::Nvrtc => {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: `nvrtcVersion(int*, int*)` writes both.
            let status = unsafe { symbol::<TwoOut>(handle, "nvrtcVersion")?(&mut major, &mut minor) };
            if status != 0 {
                return None;
            }
            (u32::try_from(major).ok()?, u32::try_from(minor).ok()?)
        }
        Library::CublasLt => (property("cublasLtGetProperty", 0)?, property("cublasLtGetProperty", 1)?),
        Library::Cublas => (property("cublasGetProperty", 0)?, property("cublasGetProperty", 1)?),
    };
    Some(Version { major, minor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_nvrtc_is_reported() {
        let old = |arch, major, minor| OldNvrtc::check(arch, Version { major, minor }, Path::new("/lib/nvrtc.so"));
        for arch in Arch::ALL.iter().copied() {
            let first = match arch {
                Arch::Sm103a => Some(8),
                Arch::Sm100a | Arch::Sm120a => Some(7),
                _ => None,
            };
            if let Some(minor) = first {
                let text = old(arch, 12, minor).unwrap_err().to_string();
                let first = format!("the first version that does is 12.{}", minor + 1);
                let found = format!("NVRTC 12.{minor} (/lib/nvrtc.so)");
                for part in [&found, arch.compiler_name(), &first, "pip install -U nvidia-cuda-nvrtc"] {
                    assert!(text.contains(part), "{text}");
                }
            }
            assert_eq!(old(arch, 12, first.map_or(0, |minor| minor + 1)), Ok(()), "{arch:?}");
            assert_eq!(old(arch, 13, 0), Ok(()), "{arch:?}");
        }
    }

    #[test]
    fn all_libraries_are_listed_in_order() {
        for (index, library) in Library::ALL.into_iter().enumerate() {
            assert_eq!(library as usize, index);
        }
    }

    #[test]
    fn file_names_are_chosen_by_version_and_not_by_prefix() {
        let directory = tempfile::tempdir().unwrap();
        for name in [
            "libnvrtc.so",
            "libnvrtc.so.9",
            "libnvrtc.so.13",
            "libnvrtc.so.12.4.127",
            "libnvrtc.alt.so.13",
            "libnvrtc-builtins.so.13.0",
            "libnvrtc.so.13.bak",
            "libnvrtc.sox",
            "libnvrtc_static.a",
        ] {
            std::fs::write(directory.path().join(name), name).unwrap();
        }
        let names: Vec<String> = files_in(directory.path(), "libnvrtc")
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["libnvrtc.so.13", "libnvrtc.so.12.4.127", "libnvrtc.so.9", "libnvrtc.so"]);
    }

    #[test]
    fn wheels_are_found_under_a_prefix_of_any_python_version() {
        let prefix = tempfile::tempdir().unwrap();
        for version in ["python3.9", "python3.12"] {
            let directory = prefix.path().join("lib").join(version).join("site-packages/nvidia/cu13/lib");
            std::fs::create_dir_all(&directory).unwrap();
            // Not a library: the loader rejects it, and the reason must be reported.
            std::fs::write(directory.join("libnvrtc.so.13"), "not an ELF file").unwrap();
        }
        let mut env = Env::parse(|_| None).unwrap();
        env.search.python_prefixes = vec![prefix.path().to_owned()];
        let sites = site_packages(&env);
        assert_eq!(sites.len(), 2);
        assert!(sites[0].ends_with("python3.12/site-packages"), "{sites:?}");
        if let Err(missing) = find(Library::Nvrtc, &env) {
            let text = missing.to_string();
            assert!(text.contains("python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13"), "{text}");
            assert!(text.contains("pip install -U nvidia-cuda-nvrtc"), "{text}");
        }
    }

    #[test]
    fn wrong_library_variable_is_final() {
        let directory = tempfile::tempdir().unwrap();
        let mut env = Env::parse(|name| std::env::var_os(name)).unwrap();
        env.nvrtc = Some(directory.path().join("absent.so"));
        let missing = find(Library::Nvrtc, &env).unwrap_err();
        assert_eq!(missing.tried.len(), 1);
        assert!(missing.to_string().contains("UNWEIGHT_NVRTC="), "{missing}");
        env.nvrtc = Some(directory.path().to_owned());
        let missing = find(Library::Nvrtc, &env).unwrap_err();
        assert!(missing.to_string().contains("no libnvrtc.so* found"), "{missing}");
    }

    #[test]
    fn another_library_under_the_name_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        // Every Linux has libc, which has none of the symbols.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .filter_map(|line| line.find('/').map(|start| &line[start..]))
            .find(|path| path.contains("libc.so") || path.contains("libc-"))
            .expect("libc is mapped");
        std::os::unix::fs::symlink(libc, directory.path().join("libnvrtc.so.13")).unwrap();
        let mut env = Env::parse(|_| None).unwrap();
        env.nvrtc = Some(directory.path().to_owned());
        let missing = find(Library::Nvrtc, &env).unwrap_err();
        assert!(missing.tried[0].why.contains("has no nvrtcVersion"), "{missing}");
    }
}
