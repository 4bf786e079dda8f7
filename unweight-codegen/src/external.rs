//! Kernels defined by other crates (docs/adr/0008-families.md, "From outside").
//!
//! ```text
//! ExternalSource {names, constants, shared memory, headers} --tera, lint--> Source
//! ```
//! A family in this crate is a spec with a plan. A kernel of another crate is a value of [`ExternalSource`] with its
//! own headers; its entry point comes from the same template. This crate does not know which crates define such
//! kernels.

use std::fmt;

use crate::{
    args::{ArgsInfo, KernelArgs},
    axes::Arch,
    block::SmemPlan,
};

/// A kernel whose headers are in another crate.
///
/// In `uw::<family>`, its header must define `Smem<Config>` with a constant for each section and `kBytes`,
/// `kThreads<Config>`, and `<function><Config>(args)`. It declares the argument struct in `uw`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExternalSource {
    /// The family: part of the name, and the namespace of its header.
    pub family: &'static str,
    /// Distinguishes the family's kernels in names: ASCII letters, digits and `_`.
    pub variant: String,
    /// Architecture that the kernel is compiled for.
    pub arch: Arch,
    /// A line that describes the kernel.
    pub summary: &'static str,
    /// The grid rule, in words.
    pub grid: &'static str,
    /// The function that its entry point calls.
    pub function: &'static str,
    /// Name of the kernel's header, one of `headers`.
    pub header: &'static str,
    /// `(name, text)` of the other crate's headers, which may include headers of this crate.
    pub headers: &'static [(&'static str, &'static str)],
    /// Fields of `Config`, all u32.
    pub constants: Vec<(&'static str, u32)>,
    /// The kernel's argument struct.
    pub args: ArgsInfo,
    /// Dynamic shared memory of a block.
    pub smem: SmemPlan,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that must fit one SM.
    pub blocks_per_sm: u32,
}

impl ExternalSource {
    /// Returns the name that identifies the kernel: its symbol and its cache directory.
    pub fn name(&self) -> String {
        let arch = self.arch.compiler_name().replace('_', "");
        format!("uw_{arch}_{}_{}", self.family, self.variant)
    }

    /// Returns whether the kernel's argument struct is `A`.
    pub fn takes<A: KernelArgs>(&self) -> bool {
        self.args == ArgsInfo::of::<A>()
    }
}

impl fmt::Display for ExternalSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::args! {
        /// Arguments of the kernel below.
        pub struct CopyArgs {
            /// u32 `[count]`.
            pub to: u64,
            /// Elements.
            pub count: u32,
            /// Must be 0.
            pub reserved: u32,
        }
    }

    const HEADER: &str = "#pragma once\n#include \"unweight/ptx/memory.cuh\"\nnamespace uw {\nstruct CopyArgs {\n    u32* to;\n    u32 count;\n    u32 reserved;\n};\n}\n";

    fn copy(headers: &'static [(&'static str, &'static str)]) -> ExternalSource {
        ExternalSource {
            family: "copy",
            variant: "v1".to_owned(),
            arch: Arch::Sm90a,
            summary: "Counts.",
            grid: "1",
            function: "run",
            header: "other/copy.cuh",
            headers,
            constants: vec![("kStep", 4)],
            args: ArgsInfo::of::<CopyArgs>(),
            smem: SmemPlan::new().section("counts", 1, 64, 16),
            threads: 128,
            blocks_per_sm: 2,
        }
    }

    #[test]
    fn an_entry_point_is_rendered_around_a_header_of_its_own() {
        let kernel = copy(&[("other/copy.cuh", HEADER)]);
        let source = kernel.render().unwrap();
        assert_eq!(source, kernel.render().unwrap());
        assert_eq!(source.name, "uw_sm90a_copy_v1");
        for line in [
            "#include \"other/copy.cuh\"",
            "    static constexpr uw::u32 kStep = 4;",
            "static_assert(Smem::kCounts == 0, \"shared memory: plan and kernel disagree\");",
            "uw_sm90a_copy_v1(const __grid_constant__ uw::CopyArgs args) {",
            "    uw::copy::run<Config>(args);",
        ] {
            assert!(source.text.lines().any(|found| found == line), "{line}\n{}", source.text);
        }
        let names: Vec<_> = source.headers.iter().map(|(name, _)| *name).collect();
        assert!(names.contains(&"other/copy.cuh") && names.contains(&"unweight/ptx/core.cuh"), "{names:?}");
        assert!(kernel.takes::<CopyArgs>() && !kernel.takes::<crate::abi::PackArgs>());
    }

    #[test]
    fn headers_are_held_to_the_rules() {
        let missing = copy(&[("other/else.cuh", HEADER)]).render().unwrap_err().to_string();
        assert!(missing.contains("other/copy.cuh"), "{missing}");
        let tab = copy(&[("other/copy.cuh", "#pragma once\n\t\n")]).render().unwrap_err().to_string();
        assert!(tab.contains("a tab"), "{tab}");
    }
}
