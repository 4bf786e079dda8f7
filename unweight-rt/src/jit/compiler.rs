//! The compiler interface and NVRTC's implementation.
//!
//! [`Compiler`] is a trait so that the cache and its callers can be tested without a compiler (`FakeCompiler`, feature
//! `fake`). [`NvrtcCompiler`] compiles kernels.

use std::sync::OnceLock;

use unweight_codegen::spec::Arch;

pub use crate::jit::{
    failure::{CompileFailure, Excerpt},
    request::{CompileRequest, CompilerId},
};
use crate::{
    env::Env,
    jit::{
        cubin::{self, KernelResources},
        error::Error,
        nvrtc::Nvrtc,
        toolchain::{MissingLibrary, OldNvrtc},
    },
};

/// The output of a compiler.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// The binary for one architecture.
    pub cubin: Vec<u8>,
    /// The log of the compiler, including warnings; often empty.
    pub log: String,
    /// The resources of the kernel.
    pub resources: KernelResources,
}

/// Compiles sources to cubins.
pub trait Compiler: Send + Sync {
    /// Returns the compiler's name and version. Fails if this machine has no compiler.
    fn identity(&self) -> Result<CompilerId, Error>;

    /// Compiles one kernel. Several threads may call it at once.
    fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error>;
}

/// NVRTC, searched for on first use.
#[derive(Debug)]
pub struct NvrtcCompiler {
    env: Env,
    nvrtc: OnceLock<Result<Nvrtc, MissingLibrary>>,
}

impl NvrtcCompiler {
    /// Stores the search paths; loads nothing yet.
    pub fn new(env: &Env) -> Self {
        Self { env: env.clone(), nvrtc: OnceLock::new() }
    }

    /// Returns the library; the first call loads it.
    pub fn nvrtc(&self) -> Result<&Nvrtc, Error> {
        self.nvrtc.get_or_init(|| Nvrtc::find(&self.env)).as_ref().map_err(|missing| missing.clone().into())
    }
}

impl Compiler for NvrtcCompiler {
    fn identity(&self) -> Result<CompilerId, Error> {
        let nvrtc = self.nvrtc()?;
        Ok(CompilerId {
            name: "nvrtc".to_owned(),
            version: nvrtc.version().to_string(),
            build: nvrtc.build().to_owned(),
        })
    }

    fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error> {
        let nvrtc = self.nvrtc()?;
        // NVRTC's own message for an unknown architecture suggests no next step.
        if let Some(arch) = Arch::of_compiler_name(&request.arch) {
            OldNvrtc::check(arch, nvrtc.version(), &nvrtc.found().path)?;
        }
        let output = nvrtc
            .compile(&request.file_name(), &request.source, &request.headers, &request.canonical_options())
            .map_err(|error| CompileFailure::new(request, self.identity().ok(), error))?;
        let bad_cubin = |source| Error::Cubin { name: request.name.clone(), source };
        let info = cubin::read(&output.cubin).map_err(bad_cubin)?;
        let kernel = info.kernel(&request.name).map_err(bad_cubin)?;
        Ok(Compiled { resources: kernel.resources.clone(), cubin: output.cubin, log: output.log })
    }
}

#[cfg(any(test, feature = "fake"))]
pub use fake::FakeCompiler;

#[cfg(any(test, feature = "fake"))]
mod fake {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use super::*;
    use crate::jit::nvrtc::NvrtcError;

    /// A compiler that makes no kernels: its output depends only on the request, and it counts calls.
    ///
    /// For tests of the cache. The output is not a cubin, and no driver would load it.
    #[derive(Debug)]
    pub struct FakeCompiler {
        version: String,
        delay: Duration,
        calls: AtomicUsize,
    }

    impl Default for FakeCompiler {
        fn default() -> Self {
            FakeCompiler::new("1.0", Duration::ZERO)
        }
    }

    impl FakeCompiler {
        /// Creates a compiler that claims this version and sleeps for `delay` in each compile.
        pub fn new(version: &str, delay: Duration) -> FakeCompiler {
            FakeCompiler { version: version.to_owned(), delay, calls: AtomicUsize::new(0) }
        }

        /// Returns the number of compiles so far.
        pub fn calls(&self) -> usize {
            self.calls.load(Ordering::SeqCst)
        }

        /// Returns the output for `request`, at least 4096 bytes.
        pub fn output(request: &CompileRequest) -> Vec<u8> {
            let mut bytes = format!("not a cubin: {}\n{}", request.name, request.source).into_bytes();
            bytes.resize(bytes.len().max(4096), b'.');
            bytes
        }
    }

    impl Compiler for FakeCompiler {
        fn identity(&self) -> Result<CompilerId, Error> {
            Ok(CompilerId { name: "fake".to_owned(), version: self.version.clone(), build: String::new() })
        }

        fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(self.delay);
            // Allows tests of failing compiles.
            if request.source.contains("#error") {
                let log = format!("{}.cu(1): error: #error directive\n", request.name);
                return Err(
                    CompileFailure::new(request, self.identity().ok(), NvrtcError::InvalidSource { log }).into()
                );
            }
            Ok(Compiled {
                cubin: FakeCompiler::output(request),
                log: String::new(),
                resources: KernelResources { registers: 32, ..KernelResources::default() },
            })
        }
    }
}
