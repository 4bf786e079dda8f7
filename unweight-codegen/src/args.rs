//! Argument structs of kernels: their fields as data, and the macro that declares them.

use bytemuck::{Pod, Zeroable};

/// A `CUtensorMap`: opaque, 128 bytes, 64-byte aligned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct TensorMap(
    /// The 128 bytes that `cuTensorMapEncodeTiled` writes.
    pub [u64; 16],
);

/// An argument struct of kernels.
pub trait KernelArgs: Pod {
    /// The name of the struct in Rust and CUDA.
    const NAME: &'static str;
    /// The fields of the struct, in order.
    const FIELDS: &'static [Field];
}

/// A field of an argument struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name of the field in Rust and in CUDA.
    pub name: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// Size of the field in bytes.
    pub bytes: usize,
}

/// An argument struct as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArgsInfo {
    /// The name of the struct in Rust and CUDA ([`KernelArgs::NAME`]).
    pub name: &'static str,
    /// Size of the struct in bytes.
    pub bytes: usize,
    /// The fields of the struct, in order ([`KernelArgs::FIELDS`]).
    pub fields: &'static [Field],
}

impl ArgsInfo {
    /// Name, size and fields of a struct.
    pub const fn of<A: KernelArgs>() -> Self {
        Self { name: A::NAME, bytes: size_of::<A>(), fields: A::FIELDS }
    }
}

/// Declares an argument struct and implements [`KernelArgs`]. The calling crate must depend on `bytemuck` with
/// `derive`.
#[macro_export]
macro_rules! args {
    ($(#[$doc:meta])* pub struct $name:ident { $($(#[$field_doc:meta])* pub $field:ident: $type:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type),+ }

        impl $crate::args::KernelArgs for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [$crate::args::Field] = &[$($crate::args::Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                bytes: size_of::<$type>(),
            }),+];
        }
    };
}

pub(crate) use args;
