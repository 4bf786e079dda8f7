//! The variants that ship: what each family's `catalogue` lists (docs/kernels.md).
//!
//! A spec outside of it is as good as one inside: it is compiled on demand, only not shipped and not held by snapshots.

use super::{Arch, EncodeStage, RepackStage, VariantSpec};
use crate::family::{FAMILIES, Family};

pub use crate::family::{gemm_mma::SHAPES as GEMM_MMA, gemm_recon::TABLE_5, gemm_wgmma::SHAPES as GEMM_WGMMA};

/// Every variant that ships for an architecture, family by family.
pub fn all(arch: Arch) -> Vec<VariantSpec> {
    FAMILIES.iter().flat_map(|family| (family.catalogue)(arch)).collect()
}

/// The variants of a family that ship for Hopper, such as [`GemmMmaSpec`](super::GemmMmaSpec).
///
/// ```
/// # use unweight_codegen::spec::{RepackSpec, catalog};
/// assert_eq!(catalog::of::<RepackSpec>().count(), 3);
/// ```
pub fn of<F: Family>() -> impl Iterator<Item = VariantSpec> {
    F::catalogue(Arch::Sm90a)
}

/// What packing a matrix and unpacking it runs: the counts of the encoder, and the conversions.
pub fn packing(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    let conversions = RepackStage::ALL.iter().map(move |stage| VariantSpec::repack(arch, *stage));
    conversions.chain([VariantSpec::encode(arch, EncodeStage::Stats)])
}
