//! The matmul variants among which dispatch chooses: the built-in ones of an architecture, and those that a program has
//! registered.
//!
//! A variant is a candidate by its shape: batch tile, warps, stages, cluster and other axes of how it computes. The
//! layer sets its use ([`PackedUse`]: escapes, dependent launch, epilogue), so one registered variant serves every
//! epilogue of a layer.

use std::{collections::BTreeSet, sync::OnceLock};

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    plan::{Infeasible, Plan},
    spec::{Arch, Epilogue, GemmCompactSpec, GemmMmaSpec, GemmWgmmaSpec, Op, catalog},
};

/// The largest batch that is multiplied directly from compact weights: the largest batch tile of `gemm_compact`. A
/// second tile would read and decode all weights again.
pub const COMPACT_BATCH: u32 = 32;

/// The use of a product: everything that selects a variant except its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedUse {
    /// Whether the tensor has elements outside its window.
    pub escapes: bool,
    /// Whether to use programmatic dependent launch: earlier kernels of the stream may still run when it starts.
    pub pdl: bool,
    /// Whether to overwrite, add or activate.
    pub epilogue: Epilogue,
}

impl PackedUse {
    /// Returns this use, without programmatic dependent launch if the architecture lacks it.
    pub(super) fn on(self, arch: Arch) -> Self {
        Self { pdl: self.pdl && arch.has(Instruction::DependentLaunch), ..self }
    }

    /// Returns the variant with the same shape for this use; `None` if it belongs to another family.
    ///
    /// Only variants with batch tile 8 have a version without escapes: for larger tiles it gains nothing, and some
    /// shapes spill.
    pub fn of(self, spec: VariantSpec) -> Option<VariantSpec> {
        let Self { escapes, pdl, epilogue } = self;
        let op = match spec.op {
            Op::GemmMma(op) => {
                let escapes = escapes || op.batch_tile.get() > 8;
                Op::GemmMma(GemmMmaSpec { escapes, pdl, epilogue, ..op })
            }
            Op::GemmWgmma(op) => Op::GemmWgmma(GemmWgmmaSpec { escapes: true, pdl, epilogue, ..op }),
            _ => return None,
        };
        Some(VariantSpec { op, ..spec })
    }
}

/// Why a variant cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The variant is declared for another architecture.
    #[error("{variant} is a kernel for {declared}, but this device is {device}; declare it with `arch = {tag}`")]
    Arch {
        /// The name of the variant.
        variant: String,
        /// The compiler's name of the variant's architecture.
        declared: &'static str,
        /// The compiler's name of the device's architecture.
        device: &'static str,
        /// The device's architecture as spelled in the attribute.
        tag: &'static str,
    },
    /// The architecture cannot run the variant: it exceeds a limit, or needs an instruction that is missing.
    #[error("{variant} cannot run: {source}")]
    Infeasible {
        /// The name of the variant.
        variant: String,
        /// The requirement, the limit and what would fit.
        source: Infeasible,
    },
    /// Dispatch does not choose among kernels of this family on this architecture.
    #[error(
        "dispatch on {device} cannot choose {variant}, whose op is {family}; it chooses among gemm_mma, gemm_wgmma \
         and, where it is built in, gemm_compact; load the variant and launch it instead"
    )]
    Family {
        /// The name of the variant.
        variant: String,
        /// The family of the variant.
        family: &'static str,
        /// The compiler's name of the device's architecture.
        device: &'static str,
    },
    /// The variant writes the decoded weights instead of a product.
    #[error("{variant} writes decoded weights instead of a product; declare it without `dump = true`")]
    Dump {
        /// The name of the variant.
        variant: String,
    },
}

impl RegisterError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "variant-not-registrable"
    }
}

/// Variants that a program has registered for dispatch, in addition to the built-in ones.
///
/// ```
/// use unweight_codegen::spec::Arch;
/// use unweight_rt::raw::choose::candidates::{RegisterError, Registered};
/// let mut registered = Registered::default();
/// registered.add(Arch::Sm90a, "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store".parse()?)?;
/// assert_eq!(registered.variants().count(), 1);
/// let other = registered.add(Arch::Sm89, "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store".parse()?);
/// assert!(matches!(other, Err(RegisterError::Arch { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// The variants as they were declared.
    variants: BTreeSet<VariantSpec>,
    /// The shapes among them that are not built in, as plain products.
    shapes: BTreeSet<VariantSpec>,
}

impl Registered {
    /// Adds a variant for devices of an architecture. Adding a built-in or already registered variant has no effect.
    ///
    /// # Errors
    /// The architecture cannot run the variant, or dispatch does not choose among variants of its family.
    pub fn add(&mut self, arch: Arch, spec: VariantSpec) -> Result<(), RegisterError> {
        let (variant, device) = (|| spec.to_string(), arch.compiler_name());
        if spec.arch != arch {
            let (declared, tag) = (spec.arch.compiler_name(), arch.tag());
            return Err(RegisterError::Arch { variant: variant(), declared, device, tag });
        }
        Plan::new(&spec).map_err(|source| RegisterError::Infeasible { variant: variant(), source })?;
        if dumps(&spec) {
            return Err(RegisterError::Dump { variant: variant() });
        }
        let Some(shape) = shape(spec).filter(|shape| is_pdl(shape).is_some() || has_compact_gemms(arch)) else {
            return Err(RegisterError::Family { variant: variant(), family: spec.op.family(), device });
        };
        self.variants.insert(spec);
        if !ships(&shape) {
            self.shapes.insert(shape);
        }
        Ok(())
    }

    /// Returns the variants as they were declared, ordered.
    pub fn variants(&self) -> impl Iterator<Item = &VariantSpec> {
        self.variants.iter()
    }

    /// Returns whether dispatch may choose the shape of this packed matmul: it is built in or registered.
    pub fn offers(&self, spec: &VariantSpec) -> bool {
        is_pdl(spec).is_some()
            && !dumps(spec)
            && shape(*spec).is_some_and(|shape| ships(&shape) || self.shapes.contains(&shape))
    }

    /// Returns the variants of every shape that computes products from packed weights for this use, built-in ones
    /// first. A registered shape may have no plan for a use; the model then predicts no time for it.
    pub fn packed(&self, arch: Arch, packed_use: PackedUse) -> impl Iterator<Item = VariantSpec> {
        let packed_use = packed_use.on(arch);
        let registered = self.shapes.iter().filter(move |shape| shape.arch == arch);
        shapes(arch).iter().chain(registered).filter_map(move |shape| packed_use.of(*shape))
    }

    /// Like [`Self::packed`], for compact weights.
    pub fn compact(&self, arch: Arch, packed_use: PackedUse) -> impl Iterator<Item = VariantSpec> {
        let PackedUse { pdl, epilogue, .. } = packed_use.on(arch);
        let used = move |spec: &VariantSpec| match spec.op {
            Op::GemmCompact(op) => (op.pdl, op.epilogue) == (pdl, epilogue),
            _ => false,
        };
        let registered =
            self.shapes.iter().filter(move |shape| shape.arch == arch).filter_map(move |shape| match shape.op {
                Op::GemmCompact(op) => {
                    Some(VariantSpec { op: Op::GemmCompact(GemmCompactSpec { pdl, epilogue, ..op }), ..*shape })
                }
                _ => None,
            });
        catalog::on::<GemmCompactSpec>(arch).filter(used).chain(registered.filter(|spec| Plan::new(spec).is_ok()))
    }
}

/// Returns the plain product with the shape of a matmul; `None` for families among which dispatch does not choose.
fn shape(spec: VariantSpec) -> Option<VariantSpec> {
    let plain = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
    match spec.op {
        Op::GemmCompact(op) => {
            let op = GemmCompactSpec { pdl: plain.pdl, epilogue: plain.epilogue, ..op };
            Some(VariantSpec { op: Op::GemmCompact(op), ..spec })
        }
        _ => plain.of(spec),
    }
}

/// Returns whether a shape is in the catalogue of its architecture.
fn ships(shape: &VariantSpec) -> bool {
    match shape.op {
        Op::GemmCompact(_) => catalog::on::<GemmCompactSpec>(shape.arch).any(|spec| self::shape(spec) == Some(*shape)),
        _ => shapes(shape.arch).binary_search(shape).is_ok(),
    }
}

/// Returns whether an architecture has built-in products that read compact weights directly.
pub fn has_compact_gemms(arch: Arch) -> bool {
    catalog::on::<GemmCompactSpec>(arch).next().is_some()
}

/// Returns the built-in variants of an architecture, reduced to their shapes: [`PackedUse`] sets the other axes.
fn shapes(arch: Arch) -> &'static [VariantSpec] {
    static SHAPES: [OnceLock<Vec<VariantSpec>>; Arch::ALL.len()] = [const { OnceLock::new() }; Arch::ALL.len()];
    SHAPES[arch as usize].get_or_init(|| {
        let plain = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
        let mut shapes: Vec<VariantSpec> = catalog::on::<GemmMmaSpec>(arch)
            .chain(catalog::on::<GemmWgmmaSpec>(arch))
            .filter(|spec| !dumps(spec))
            .filter_map(|spec| plain.of(spec))
            .collect();
        shapes.sort_unstable();
        shapes.dedup();
        shapes
    })
}

/// Returns whether a packed matmul uses programmatic dependent launch; `None` for other families.
pub fn is_pdl(spec: &VariantSpec) -> Option<bool> {
    match spec.op {
        Op::GemmMma(op) => Some(op.pdl),
        Op::GemmWgmma(op) => Some(op.pdl),
        _ => None,
    }
}

fn dumps(spec: &VariantSpec) -> bool {
    match spec.op {
        Op::GemmMma(op) => op.dump,
        Op::GemmWgmma(op) => op.dump,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USE: PackedUse = PackedUse { escapes: true, pdl: true, epilogue: Epilogue::SiluMul };

    fn spec(name: &str) -> VariantSpec {
        name.parse().unwrap()
    }

    #[test]
    fn a_registered_shape_serves_every_use() {
        let mut registered = Registered::default();
        let declared = spec("uw_sm90a_gemm_mma_b8_r3w10p2c1_pdl_store_add");
        assert!(!registered.offers(&declared));
        registered.add(Arch::Sm90a, declared).unwrap();
        assert!(registered.offers(&declared) && registered.offers(&spec("uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store")));
        let found: Vec<_> = registered.packed(Arch::Sm90a, USE).collect();
        let shipped: Vec<_> = Registered::default().packed(Arch::Sm90a, USE).collect();
        assert_eq!(
            found.strip_prefix(shipped.as_slice()),
            Some(&[spec("uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_pdl_silu_mul")][..])
        );
        assert_eq!(registered.variants().collect::<Vec<_>>(), [&declared]);
        let sm89 = |registered: &Registered| registered.packed(Arch::Sm89, USE).collect::<Vec<_>>();
        assert_eq!(sm89(&registered), sm89(&Registered::default()), "another architecture");
    }

    #[test]
    fn a_registered_compact_shape_serves_every_use() {
        let mut registered = Registered::default();
        let declared = spec("uw_sm90a_gemm_compact_b8_w6p1c1_t16_store");
        let (before, packed) =
            (registered.compact(Arch::Sm90a, USE).count(), registered.packed(Arch::Sm90a, USE).count());
        registered.add(Arch::Sm90a, declared).unwrap();
        let used = spec("uw_sm90a_gemm_compact_b8_w6p1c1_t16_pdl_silu_mul");
        assert_eq!(registered.compact(Arch::Sm90a, USE).skip(before).collect::<Vec<_>>(), [used]);
        assert_eq!(registered.packed(Arch::Sm90a, USE).count(), packed);
        assert!(!registered.offers(&declared), "a table holds products from packed weights");
    }

    #[test]
    fn what_ships_is_registered_once_and_changes_nothing() {
        let mut registered = Registered::default();
        for arch in Arch::ALL {
            let all = |registered: &Registered| {
                let compact = registered.compact(*arch, USE);
                registered.packed(*arch, USE).chain(compact).collect::<Vec<_>>()
            };
            let shipped = all(&registered);
            for spec in &shipped {
                registered.add(*arch, *spec).unwrap();
                registered.add(*arch, *spec).unwrap();
            }
            assert_eq!(all(&registered), shipped);
            assert_eq!(registered.variants().filter(|spec| spec.arch == *arch).count(), shipped.len());
        }
    }

    #[test]
    fn what_dispatch_cannot_choose_is_refused() {
        let refused = |arch, name: &str| {
            let mut registered = Registered::default();
            let error = registered.add(arch, spec(name)).unwrap_err();
            assert_eq!(registered, Registered::default());
            assert!(error.to_string().contains(name), "{error}");
            error
        };
        let hopper = "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store";
        let error = refused(Arch::Sm89, hopper);
        assert!(matches!(error, RegisterError::Arch { declared: "sm_90a", device: "sm_89", tag: "sm89", .. }));
        // 16 warps with rings of 16 stages do not fit.
        let error = refused(Arch::Sm90a, "uw_sm90a_gemm_mma_b64_r8w16p16c1_esc_store");
        assert!(matches!(error, RegisterError::Infeasible { .. }));
        let error = refused(Arch::Sm89, "uw_sm89_gemm_wgmma_b128_g2p6_esc_store");
        assert!(matches!(error, RegisterError::Infeasible { .. }));
        for name in ["uw_sm90a_decode_huffman_full_l7", "uw_sm90a_gemm_recon_palette_n2p4_v8_store"] {
            assert!(matches!(refused(Arch::Sm90a, name), RegisterError::Family { .. }));
        }
        let error = refused(Arch::Sm90a, "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store_dump");
        assert!(matches!(error, RegisterError::Dump { .. }));
    }
}
