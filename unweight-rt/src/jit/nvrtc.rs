//! A small safe wrapper of libnvrtc.
//!
//! cudarc's NVRTC wrapper is not used for three reasons. It opens the library by name, so it may open another library
//! than [`crate::jit::toolchain`] reported. It panics if a symbol is missing. It converts status codes to a Rust enum,
//! which is undefined behaviour for newer codes. Only nine functions are needed. Several threads may call NVRTC at
//! once, on different programs.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::Path,
};

use object::Object;

use crate::{
    env::Env,
    jit::toolchain::{self, Found, Library, MissingLibrary, Tried, Version},
};

type Program = *mut c_void;
type Status = c_int;

/// A loaded libnvrtc.
#[derive(Debug)]
pub struct Nvrtc {
    found: Found,
    build: String,
    functions: Functions,
}

#[derive(Debug)]
struct Functions {
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// The cubin and the log of an NVRTC compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The compiled binary.
    pub cubin: Vec<u8>,
    /// Warnings; empty if there are none.
    pub log: String,
}

/// Why NVRTC produced no cubin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvrtcError {
    /// The source or an option is invalid.
    #[error("the source does not compile")]
    InvalidSource {
        /// The whole log.
        log: String,
    },
    /// NVRTC failed in another way.
    #[error("{call} failed with status {status} ({text})")]
    Failed {
        /// The function.
        call: &'static str,
        /// NVRTC's status.
        status: c_int,
        /// NVRTC's text for the status.
        text: String,
        /// The log; empty if NVRTC returns none.
        log: String,
    },
    /// A string contains a zero byte.
    #[error("{what} contains a zero byte at offset {offset}")]
    ZeroByte {
        /// The string: a source, a header or an option.
        what: String,
        /// Byte offset in the string.
        offset: usize,
    },
    /// The options name a virtual architecture, for which NVRTC produces no binary.
    #[error(
        "NVRTC produced no binary; the options must name a real architecture such as sm_90a (a virtual one such as \
         compute_90a gives PTX only)"
    )]
    NoBinary,
}

impl NvrtcError {
    /// Returns the compiler's log; empty if there is none.
    pub fn log(&self) -> &str {
        match self {
            NvrtcError::InvalidSource { log } | NvrtcError::Failed { log, .. } => log,
            NvrtcError::ZeroByte { .. } | NvrtcError::NoBinary => "",
        }
    }
}

/// `NVRTC_ERROR_COMPILATION`.
const COMPILATION: Status = 6;
/// `NVRTC_ERROR_INVALID_OPTION`.
const INVALID_OPTION: Status = 5;

impl Nvrtc {
    /// Finds and loads the library.
    pub fn find(env: &Env) -> Result<Self, MissingLibrary> {
        let found = toolchain::find(Library::Nvrtc, env)?;
        let Some(functions) = Functions::of(&found) else {
            return Err(MissingLibrary {
                library: Library::Nvrtc,
                tried: vec![Tried {
                    what: found.path.display().to_string(),
                    why: "lacks a function of NVRTC 12".to_owned(),
                }],
            });
        };
        let build = build_id(&found.path).unwrap_or_default();
        Ok(Self { found, build, functions })
    }

    /// Returns the library's version.
    pub fn version(&self) -> Version {
        self.found.version
    }

    /// Returns the first 16 hexadecimal digits of the library's build id, which distinguishes builds of one version;
    /// empty if there is none.
    pub fn build(&self) -> &str {
        &self.build
    }

    /// Returns the library's file and how it was found.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// Compiles `source` to a cubin.
    ///
    /// `name` identifies the source in messages. `headers` are pairs of a name, as in `#include "name"`, and a text.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(String, String)],
        options: &[String],
    ) -> Result<Output, NvrtcError> {
        let name = c_string("the name", name)?;
        let source = c_string("the source", source)?;
        let mut header_names = Vec::with_capacity(headers.len());
        let mut header_texts = Vec::with_capacity(headers.len());
        for (header, text) in headers {
            header_names.push(c_string("a header's name", header)?);
            header_texts.push(c_string(header, text)?);
        }
        let mut options = options.iter().map(|option| c_string("an option", option)).collect::<Result<Vec<_>, _>>()?;
        // With a driver present, NVRTC uses a cache of its own. It would only duplicate our cache, which is checked
        // first.
        if self.version() >= (Version { major: 13, minor: 0 }) {
            options.push(c"--no-cache".to_owned());
        }
        let header_name_pointers = pointers(&header_names);
        let header_text_pointers = pointers(&header_texts);
        let option_pointers = pointers(&options);

        let mut raw: Program = std::ptr::null_mut();
        // SAFETY: every pointer is a NUL-terminated string or an array of as many as its count, and all of them outlive
        // `program`, which is dropped before them (declared after them).
        let status = unsafe {
            (self.functions.create)(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                count(headers.len()),
                header_text_pointers.as_ptr(),
                header_name_pointers.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        let program = OwnedProgram { nvrtc: self, raw };

        // SAFETY: the program was created above; the options are NUL-terminated strings.
        let status = unsafe { (self.functions.compile)(program.raw, count(options.len()), option_pointers.as_ptr()) };
        let log = program.log();
        if status == COMPILATION || status == INVALID_OPTION {
            return Err(NvrtcError::InvalidSource { log });
        }
        self.check("nvrtcCompileProgram", status).map_err(|error| match error {
            NvrtcError::Failed { call, status, text, .. } => {
                NvrtcError::Failed { call, status, text, log: log.clone() }
            }
            other => other,
        })?;

        let mut size = 0usize;
        // SAFETY: writes one size.
        let status = unsafe { (self.functions.cubin_size)(program.raw, &mut size) };
        self.check("nvrtcGetCUBINSize", status)?;
        if size == 0 {
            return Err(NvrtcError::NoBinary);
        }
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC requested.
        let status = unsafe { (self.functions.cubin)(program.raw, cubin.as_mut_ptr().cast()) };
        self.check("nvrtcGetCUBIN", status)?;
        Ok(Output { cubin, log })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), NvrtcError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for any status, or null.
        let text = unsafe { (self.functions.error_string)(status) };
        let text = if text.is_null() {
            "unknown".to_owned()
        } else {
            // SAFETY: not null, so NVRTC's static NUL-terminated string.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(NvrtcError::Failed { call, status, text, log: String::new() })
    }
}

impl Functions {
    fn of(found: &Found) -> Option<Self> {
        // SAFETY: the types are those of nvrtc.h, the same since NVRTC 11.
        unsafe {
            Some(Self {
                error_string: found.symbol("nvrtcGetErrorString")?,
                create: found.symbol("nvrtcCreateProgram")?,
                compile: found.symbol("nvrtcCompileProgram")?,
                destroy: found.symbol("nvrtcDestroyProgram")?,
                cubin_size: found.symbol("nvrtcGetCUBINSize")?,
                cubin: found.symbol("nvrtcGetCUBIN")?,
                log_size: found.symbol("nvrtcGetProgramLogSize")?,
                log: found.symbol("nvrtcGetProgramLog")?,
            })
        }
    }
}

struct OwnedProgram<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl OwnedProgram<'_> {
    /// Returns the log without its final NUL and line ends. Empty if NVRTC returns none, because the log only
    /// accompanies a result.
    fn log(&self) -> String {
        let mut size = 0usize;
        // SAFETY: writes one size.
        if unsafe { (self.nvrtc.functions.log_size)(self.raw, &mut size) } != 0 || size == 0 {
            return String::new();
        }
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC requested.
        if unsafe { (self.nvrtc.functions.log)(self.raw, bytes.as_mut_ptr().cast()) } != 0 {
            return String::new();
        }
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).trim_end().to_owned()
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `nvrtcCreateProgram`, destroyed once. A failure could only leak; there is nothing to act
        // on.
        unsafe { (self.nvrtc.functions.destroy)(&mut self.raw) };
    }
}

fn c_string(what: &str, text: &str) -> Result<CString, NvrtcError> {
    CString::new(text).map_err(|error| NvrtcError::ZeroByte { what: what.to_owned(), offset: error.nul_position() })
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

/// Converts a count to a C int. Saturating: NVRTC itself rejects two billion headers.
fn count(len: usize) -> c_int {
    c_int::try_from(len).unwrap_or(c_int::MAX)
}

/// Returns the first 8 bytes of a library's GNU build id in hexadecimal. Reads the section table and one note, not the
/// whole library.
fn build_id(path: &Path) -> Option<String> {
    let file = std::fs::File::open(path).ok()?;
    let cache = object::ReadCache::new(file);
    let elf = object::read::elf::ElfFile64::<object::Endianness, _>::parse(&cache).ok()?;
    let id = elf.build_id().ok()??;
    Some(id.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}
