//! The variants that ship: the `catalogue` of each family (docs/kernels.md).
//!
//! A spec that is not listed works, too: it is compiled on demand, but is in no snapshot.

use std::collections::BTreeSet;

use super::{
    Arch, AttentionSpec, DecodeHuffmanSpec, DecodeWarps, EncodeCompactStage, EncodeHuffmanStage, GemmMmaSpec, Op,
    PackStage, SmemCopy, UpdateStage, VariantSpec,
};
use crate::{
    family::{FAMILIES, Family, Instruction},
    plan::Plan,
};

pub use crate::family::{
    gemm_compact::SHAPES as GEMM_COMPACT,
    gemm_join::SHAPES as GEMM_JOIN,
    gemm_mma::SHAPES as GEMM_MMA,
    gemm_recon::{SPLIT_RINGS, TABLE_5},
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
/// # use unweight_codegen::spec::{PackSpec, catalog};
/// assert_eq!(catalog::of::<PackSpec>().count(), 2);
/// ```
pub fn of<F: Family>() -> impl Iterator<Item = VariantSpec> {
    F::catalogue(Arch::Sm90a)
}

/// The variants that use bulk copies, rewritten to copy by their own threads, as far as they have a plan: these kernels
/// replace them on GPUs without a copy engine. If `arch` has a copy engine, also the variants that ship for
/// architectures without one: shapes for less shared memory, decoders with as few warps as that holds, and split
/// attention.
///
/// ```
/// # use unweight_codegen::spec::{Arch, catalog};
/// let names: Vec<String> = catalog::asynchronous(Arch::Sm90a).map(|spec| spec.to_string()).collect();
/// for name in ["gemm_mma_b8_r2w16p2c1_async_esc_pdl_store", "decode_huffman_full_l7_async",
///     "attention_decode_d128_w4p2c1_async", "attention_decode_d128_w4p2c1_split_async"] {
///     assert!(names.contains(&format!("uw_sm90a_{name}")), "{name}");
/// }
/// assert!(names.contains(&"uw_sm90a_decode_huffman_full_l7_async_w16".to_owned()), "as a GeForce RTX 3090 has it");
/// ```
pub fn asynchronous(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    let without = move |other: &Arch| arch.has(Instruction::BulkCopy) && !other.has(Instruction::BulkCopy);
    let others = Arch::ALL.iter().copied().filter(without).flat_map(all);
    let mut emitted = BTreeSet::new();
    let all = all(arch).into_iter().filter_map(copied_by_threads);
    all.chain(others.filter_map(move |spec| adapted_to(spec, arch))).filter(move |spec| emitted.insert(*spec))
}

/// Returns the variant with copies by threads; `None` if the family has no axis `copy`, or if there is no plan.
pub fn copied_by_threads(spec: VariantSpec) -> Option<VariantSpec> {
    let copy = SmemCopy::Async;
    let op = match spec.op {
        Op::GemmMma(op) => Op::GemmMma(GemmMmaSpec { copy, ..op }),
        Op::DecodeHuffman(op) => Op::DecodeHuffman(DecodeHuffmanSpec { copy, ..op }),
        Op::Attention(op) => Op::Attention(AttentionSpec { copy, ..op }),
        // Copied by threads on every architecture.
        Op::GemmGrouped(_) => spec.op,
        _ => return None,
    };
    let spec = VariantSpec { op, ..spec };
    Plan::new(&spec).is_ok().then_some(spec)
}

/// Returns the variant for another architecture, copied by threads, with the same number of warps as on its own.
fn adapted_to(spec: VariantSpec, arch: Arch) -> Option<VariantSpec> {
    let copied = copied_by_threads(VariantSpec { arch, ..spec })?;
    let warps = |spec: &VariantSpec| Plan::new(spec).map(|plan| plan.roles.warps()).ok();
    match copied.op {
        Op::DecodeHuffman(op) if warps(&copied) != warps(&spec) => {
            let op = Op::DecodeHuffman(DecodeHuffmanSpec { warps: DecodeWarps::new(warps(&spec)?).ok()?, ..op });
            copied_by_threads(VariantSpec { op, ..copied })
        }
        _ => Some(copied),
    }
}

/// The kernels that pack and unpack a matrix: stage `stats` of the encoder, and the families `pack` and `unpack`.
pub fn packing(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    let stages = PackStage::ALL.iter().map(move |stage| VariantSpec::pack(arch, *stage));
    stages.chain([VariantSpec::unpack(arch), VariantSpec::encode_huffman(arch, EncodeHuffmanStage::Stats)])
}

/// The kernels that replace elements of a packed tensor.
pub fn update(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    UpdateStage::ALL.iter().map(move |stage| VariantSpec::update(arch, *stage))
}

/// The kernels that encode a matrix as compact, in addition to stage `stats` of [`packing`].
pub fn encode_compact(arch: Arch) -> impl Iterator<Item = VariantSpec> {
    EncodeCompactStage::ALL.iter().map(move |stage| VariantSpec::encode_compact(arch, *stage))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::DecodeOutput;

    /// An H200 can run every block of other GPUs that copies by threads, with the same shared memory and pipeline.
    #[test]
    fn hopper_runs_variants_without_tma() {
        let plan = |spec: &VariantSpec| Plan::new(spec).unwrap();
        let runnable: Vec<Plan> = asynchronous(Arch::Sm90a).map(|spec| plan(&spec)).collect();
        let (mut blocks, mut small) = (0, 0);
        for arch in Arch::ALL.iter().filter(|arch| !arch.has(Instruction::BulkCopy)) {
            for spec in all(*arch).iter().filter(|spec| spec.op.instructions().has(Instruction::AsyncCopy)) {
                let native = plan(spec);
                let same = |on_hopper: &&Plan| match (on_hopper.spec.op, spec.op) {
                    (Op::DecodeHuffman(a), Op::DecodeHuffman(b)) => {
                        (a.output, a.element, a.code_limit) == (b.output, b.element, b.code_limit)
                    }
                    (a, b) => a == b,
                };
                let on_hopper =
                    runnable.iter().filter(same).find(|on_hopper| on_hopper.roles.warps() == native.roles.warps());
                let on_hopper = on_hopper.unwrap_or_else(|| panic!("{spec} has no counterpart"));
                assert_eq!(
                    (on_hopper.smem.bytes(), on_hopper.pipeline),
                    (native.smem.bytes(), native.pipeline),
                    "{spec}"
                );
                blocks += 1;
                small += u32::from(matches!(spec.op, Op::DecodeHuffman(_)) && native.roles.warps() < 32);
            }
        }
        assert!(blocks > 200 && small > 50, "{blocks} blocks, {small} decoders of fewer warps");
    }

    #[test]
    fn exponent_decoders_ship_where_recon_products_ship() {
        for arch in Arch::ALL {
            let shipped = all(*arch);
            let decoded = |op: &Op| matches!(op, Op::DecodeHuffman(op) if op.output == DecodeOutput::Exponent);
            let read = shipped.iter().any(|spec| matches!(spec.op, Op::GemmRecon(_)));
            assert_eq!(shipped.iter().any(|spec| decoded(&spec.op)), read, "{arch:?}");
        }
    }
}
