//! The struct keeps its visibility, documentation and further attributes, and can be used as a type parameter.
#![deny(missing_docs)]
use unweight_codegen::unweight_variant;
use unweight_codegen::{Variant, plan::Plan};

/// The gate projection.
#[unweight_variant(n = 4, stages = 2)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GateProjection;

fn smem_bytes<V: Variant>() -> u32 {
    const { assert!(Plan::new(&GateProjection::SPEC).is_ok()) };
    Plan::new(&V::SPEC).map_or(0, |plan| plan.smem.bytes())
}

#[test]
fn structs_may_be_public_and_documented() {
    fn derived<T: Default>() -> T {
        T::default()
    }
    assert_eq!(GateProjection, derived());
    assert!(smem_bytes::<GateProjection>() > 0);
}
