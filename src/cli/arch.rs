//! GPU architectures as command-line arguments.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use unweight::{codegen::spec::Arch, rt::Device};

/// The argument `--arch`.
#[derive(Args)]
pub struct ArchArg {
    /// GPU architecture [default: this machine's GPU, or sm_90a]
    #[arg(long, value_name = "ARCH", value_parser = arch_parser())]
    pub arch: Option<Arch>,
}

/// Parses an architecture by its compiler name, such as `sm_90a`.
pub fn arch_parser() -> impl TypedValueParser<Value = Arch> {
    PossibleValuesParser::new(Arch::ALL.iter().map(|arch| arch.compiler_name()))
        .map(|name| Arch::of_compiler_name(&name).unwrap_or(Arch::Sm90a))
}

/// Returns the architecture of this machine's first GPU, if kernels support it.
pub fn local_arch() -> Option<Arch> {
    Device::arch_of(0).ok()
}

/// Returns the architecture that a kernel name or pattern begins with, as in `uw_sm90a_*`.
pub fn arch_in(name: &str) -> Option<Arch> {
    Arch::from_tag(name.strip_prefix("uw_")?.split('_').next()?)
}
