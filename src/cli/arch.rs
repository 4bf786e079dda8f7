//! Architectures of GPUs on the command line.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use unweight::{codegen::spec::Arch, rt::Device};

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
