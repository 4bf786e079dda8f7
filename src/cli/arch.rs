//! Architectures of GPUs on the command line.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use unweight::{codegen::spec::Arch, rt::Device};

/// The architecture of a command.
#[derive(Args)]
pub struct ArchArg {
    /// GPU architecture [default: this machine's GPU, or sm_90a]
    #[arg(long, value_name = "ARCH", value_parser = arch_parser())]
    pub arch: Option<Arch>,
}

/// The architectures, as the compiler calls them.
pub fn arch_parser() -> impl TypedValueParser<Value = Arch> {
    PossibleValuesParser::new(Arch::ALL.iter().map(|arch| arch.compiler_name()))
        .map(|name| Arch::of_compiler_name(&name).unwrap_or(Arch::Sm90a))
}

/// The architecture of this machine's GPU, if it has one that kernels are made for.
pub fn own_arch() -> Option<Arch> {
    Device::arch_of(0).ok()
}

/// The architecture whose names begin as this one does.
pub fn arch_in(name: &str) -> Option<Arch> {
    Arch::from_tag(name.strip_prefix("uw_")?.split('_').next()?)
}
