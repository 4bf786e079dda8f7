//! Loads a declared kernel variant as the operation that launches it.
//!
//! `#[unweight_variant]` gives a struct its family's spec as a type. Each family whose kernels are launched one by one
//! implements [`Launcher`] here, so that [`LoadVariant::load`] returns the operation's type.

use std::sync::Arc;

use unweight_codegen::{
    Variant,
    spec::{
        AttentionSpec, DecodeCompactSpec, DecodeHuffmanSpec, EmbedSpec, Family, GemmCompactSpec, GemmJoinSpec,
        GemmMmaSpec, GemmReconSpec, GemmWgmmaSpec, NormSpec, RopeSpec, SampleSpec, SiluMulSpec, UnpackSpec,
    },
};

use crate::{
    device::{DeviceError, KernelSet, module::LoadedKernel},
    ops::{
        attention::Attention, decode_compact::CompactDecoder, decode_huffman::Decoder, embed::Embed,
        gemm_compact::CompactGemm, gemm_packed::PackedGemm, gemm_recon::Matmul, norm::Norm, rope::Rope, sample::Sample,
        silu_mul::SiluMul, unpack::Unpacker,
    },
};

/// A kernel family whose kernels each have a launcher.
///
/// Kernels of other families are stages of one operation, which loads them all.
#[diagnostic::on_unimplemented(
    message = "kernels of `{Self}` are stages of an operation and have no launcher of their own",
    label = "this variant cannot be loaded by itself",
    note = "load the operation that runs the stage, or take the kernel with `KernelSet::get`"
)]
pub trait Launcher: Family {
    /// The type that launches a kernel of the family, such as [`PackedGemm`].
    type Op;

    /// Wraps a loaded kernel.
    ///
    /// # Errors
    /// The kernel belongs to another family, or is a stage that this launcher does not run.
    fn launcher(kernel: Arc<LoadedKernel>) -> Result<Self::Op, DeviceError>;
}

/// Adds `load` to every variant declared with `#[unweight_variant]`.
///
/// ```no_run
/// use unweight_codegen::unweight_variant;
/// use unweight_rt::{Device, KernelSet, LoadVariant, env::Env, raw::ops::gemm_packed::PackedGemm};
///
/// #[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 10, stages = 2)]
/// struct GateUp;
///
/// let kernels = KernelSet::open(&Device::open(0)?, Env::process()?);
/// let matmul: PackedGemm = GateUp::load(&kernels)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A family without a launcher is a compile error:
/// ```compile_fail,E0277
/// # use unweight_codegen::unweight_variant;
/// # use unweight_rt::{DeviceError, KernelSet, LoadVariant};
/// #[unweight_variant(op = encode_huffman, stage = stats)]
/// struct Histogram;
///
/// fn load(kernels: &KernelSet) -> Result<(), DeviceError> {
///     Histogram::load(kernels).map(drop)
/// }
/// ```
pub trait LoadVariant: Variant {
    /// Loads the launcher of the variant's kernel. The kernel comes from the set or the cache, or is compiled.
    ///
    /// # Errors
    /// The kernel cannot be compiled, does not run on the device, or is a stage that the launcher does not run.
    fn load(kernels: &KernelSet) -> Result<<Self::Family as Launcher>::Op, DeviceError>
    where
        Self::Family: Launcher,
    {
        Self::Family::launcher(kernels.get(&Self::SPEC)?)
    }
}

impl<V: Variant> LoadVariant for V {}

/// Implements [`Launcher`] for each family.
macro_rules! launchers {
    ($($(#[$doc:meta])* $family:ident => $op:ident),+ $(,)?) => {
        $($(#[$doc])* impl Launcher for $family {
            type Op = $op;

            fn launcher(kernel: Arc<LoadedKernel>) -> Result<$op, DeviceError> {
                $op::new(kernel)
            }
        })+
    };
}

launchers! {
    AttentionSpec => Attention,
    DecodeHuffmanSpec => Decoder,
    EmbedSpec => Embed,
    GemmCompactSpec => CompactGemm,
    GemmJoinSpec => Matmul,
    GemmMmaSpec => PackedGemm,
    GemmReconSpec => Matmul,
    GemmWgmmaSpec => PackedGemm,
    NormSpec => Norm,
    RopeSpec => Rope,
    SampleSpec => Sample,
    SiluMulSpec => SiluMul,
    UnpackSpec => Unpacker,
    /// Launches stage `full` only; layers run the other stages before a product.
    DecodeCompactSpec => CompactDecoder,
}
