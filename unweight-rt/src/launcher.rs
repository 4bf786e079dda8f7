//! From a declared variant to what launches its kernel.
//!
//! `#[unweight_variant]` gives a struct the spec of its family as a type. Here each family whose kernels are launched
//! one by one has its [`Launcher`], so that [`LoadVariant::load`] returns the type of the operation.

use std::sync::Arc;

use unweight_codegen::{
    Variant,
    spec::{
        AttentionSpec, DecodeCompactSpec, DecodeHuffmanSpec, EmbedSpec, Family, GemmCompactSpec, GemmMmaSpec,
        GemmReconSpec, GemmWgmmaSpec, NormSpec, RopeSpec, SampleSpec, SiluMulSpec, UnpackSpec,
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

/// A family whose kernels have a launcher of their own.
///
/// Kernels of the other families are stages of one operation, which loads them all.
#[diagnostic::on_unimplemented(
    message = "kernels of `{Self}` are stages of an operation and have no launcher of their own",
    label = "this variant cannot be loaded by itself",
    note = "load the operation that runs the stage, or take the kernel with `KernelSet::get`"
)]
pub trait Launcher: Family {
    /// What launches a kernel of the family, such as [`PackedGemm`].
    type Op;

    /// Wraps a loaded kernel.
    ///
    /// # Errors
    /// A kernel of another family, or a stage that this launcher does not run.
    fn launcher(kernel: Arc<LoadedKernel>) -> Result<Self::Op, DeviceError>;
}

/// `GateUp::load(&kernels)?` for every variant that is declared with `#[unweight_variant]`.
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
    /// What launches the variant's kernel. The kernel is taken from the set, or from the cache, or compiled.
    ///
    /// # Errors
    /// The kernel cannot be made, does not run on the device, or is a stage that the launcher does not run.
    fn load(kernels: &KernelSet) -> Result<<Self::Family as Launcher>::Op, DeviceError>
    where
        Self::Family: Launcher,
    {
        Self::Family::launcher(kernels.get(&Self::SPEC)?)
    }
}

impl<V: Variant> LoadVariant for V {}

/// The launcher of each family.
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
    GemmMmaSpec => PackedGemm,
    GemmReconSpec => Matmul,
    GemmWgmmaSpec => PackedGemm,
    NormSpec => Norm,
    RopeSpec => Rope,
    SampleSpec => Sample,
    SiluMulSpec => SiluMul,
    UnpackSpec => Unpacker,
    /// Of stage `full`; layers run the others ahead of a product.
    DecodeCompactSpec => CompactDecoder,
}
