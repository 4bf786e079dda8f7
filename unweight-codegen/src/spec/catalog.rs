//! The variants that ship: what each family's `catalogue` lists (docs/kernels.md).
//!
//! A spec outside of it is as good as one inside: it is compiled on demand, only not shipped and not held by snapshots.

use super::{Arch, AttentionSpec, DecodeSpec, EncodeStage, GemmMmaSpec, Op, RepackStage, SmemCopy, VariantSpec};
use crate::{
    family::{FAMILIES, Family},
    plan::Plan,
};

pub use crate::family::{
    gemm_compact::SHAPES as GEMM_COMPACT, gemm_mma::SHAPES as GEMM_MMA, gemm_recon::TABLE_5,
    gemm_wgmma::SHAPES as GEMM_WGMMA,
};

/// Every variant that ships for an architecture, family by family.
pub fn all(arch: Arch) -> Vec<VariantSpec> {
    FAMILIES.iter().flat_map(|family| (family.catalogue)(arch)).collect()
}

/// The variants of a family that ship for an architecture.
///
/// ```
/// # use unweight_codegen::spec::{Arch, GemmWgmmaSpec, catalog};
/// assert_eq!(catalog::on::<GemmWgmmaSpec>(Arch::Sm89).count(), 0, "wgmma is Hopper's");
/// ```
pub fn on<F: Family>(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    F::catalogue(arch).filter(|spec| Plan::new(spec).is_ok())
}

/// The variants of a family that ship for Hopper, such as [`GemmMmaSpec`].
///
/// ```
/// # use unweight_codegen::spec::{RepackSpec, catalog};
/// assert_eq!(catalog::of::<RepackSpec>().count(), 3);
/// ```
pub fn of<F: Family>() -> impl Iterator<Item = VariantSpec> {
    F::catalogue(Arch::Sm90a)
}

/// The variants whose operands come by the copy engine, with copies by their threads instead, as far as they have a plan:
/// where there is a copy engine, what would run without it. Each is another shipped variant but for its axis `copy`.
///
/// ```
/// # use unweight_codegen::spec::{Arch, catalog};
/// let names: Vec<String> = catalog::asynchronous(Arch::Sm90a).map(|spec| spec.to_string()).collect();
/// for name in ["gemm_mma_b8_r2w16p2c1_async_esc_pdl_store", "decode_full_l7_async", "attention_decode_d128_w4p2c1_async"] {
///     assert!(names.contains(&format!("uw_sm90a_{name}")), "{name}");
/// }
/// ```
pub fn asynchronous(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    all(arch).into_iter().filter_map(copied_by_threads)
}

/// The same variant with copies by its threads; `None` of a family without the axis `copy`, or without a plan.
pub fn copied_by_threads(spec: VariantSpec) -> Option<VariantSpec> {
    let copy = SmemCopy::Async;
    let op = match spec.op {
        Op::GemmMma(op) => Op::GemmMma(GemmMmaSpec { copy, ..op }),
        Op::Decode(op) => Op::Decode(DecodeSpec { copy, ..op }),
        Op::Attention(op) => Op::Attention(AttentionSpec { copy, ..op }),
        _ => return None,
    };
    let spec = VariantSpec { op, ..spec };
    Plan::new(&spec).is_ok().then_some(spec)
}

/// What packing a matrix and unpacking it runs: the counts of the encoder, and the conversions.
pub fn packing(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    let conversions = RepackStage::ALL.iter().map(move |stage| VariantSpec::repack(arch, *stage));
    conversions.chain([VariantSpec::encode(arch, EncodeStage::Stats)])
}
