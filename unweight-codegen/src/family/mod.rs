//! The kernel families: one file for each, and the list of all.
//!
//! ```text
//! family/<f>.rs                        axes! (spec, names, attribute, constants), args! (the kernel's argument
//!                                      struct), const fn plan, and Family: edges, instructions, derived constants,
//!                                      shipped variants
//! templates/kernels/kernel.cu.tera     the entry point of all families
//! templates/include/.../<f>.cuh        the body
//! ```
//!
//! A family that converts one encoding of a weight to another, or to a product, is an [`Edge`] of the graph of
//! encodings. Families that work on activations only, or that look up rows of a table, have no edge. Code that covers
//! all families (names, attributes, plans, rendering, the catalogue, argument checks) uses the list at the end of this
//! file, so a new family is one file and one line. docs/adr/0008-families.md counts the edits.

mod entry;
mod name;
mod shared;

pub use crate::limits::{Instruction, Instructions};
pub use entry::Entry;
pub(crate) use entry::{Check, Constant, constant_name};
pub use name::ParseNameError;
#[cfg(test)]
pub(crate) use name::tests::any_spec;
pub use shared::{ClusterSize, Epilogue, SmemCopy};

use crate::{
    args::{ArgsInfo, KernelArgs},
    axes::{Arch, Axis, Raw},
    block::{BlockPlan, Constraint, GemmShape, WorkspacePlan},
};
use unweight_format::EncodingId;

/// One kernel: architecture and operation. Its name is `Display`, `FromStr` and the serde representation.
///
/// ```
/// # use unweight_codegen::spec::VariantSpec;
/// let spec: VariantSpec = "uw_sm90a_gemm_recon_palette_n2p4_v8_store".parse()?;
/// assert_eq!(spec.name().as_str(), "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VariantSpec {
    /// The architecture that it is compiled for.
    pub arch: Arch,
    /// The operation with the values of its axes.
    pub op: Op,
}

impl VariantSpec {
    /// A placeholder for the spec of an invalid attribute.
    #[doc(hidden)]
    pub const PLACEHOLDER: Self = Self::encode_huffman(Arch::Sm90a, encode_huffman::EncodeHuffmanStage::Stats);

    /// Returns the plan of a block, or the violated constraint.
    pub(crate) const fn block(&self) -> Result<BlockPlan, Constraint> {
        let limits = self.arch.limits();
        match self.op.instructions().missing_from(limits.instructions) {
            Some(instruction) => Err(Constraint::Instruction { instruction }),
            None => match self.op.plan(self.arch) {
                Ok(block) => Ok(block.within(limits)),
                refused => refused,
            },
        }
    }
}

/// Decoded exponents, u8 `[tiles, 64, 64]`, next to the sign-mantissa bytes: an encoding that only a device holds and
/// no bundle stores. [`EncodingId::EXPONENTS`] is another one, which bundles store.
pub const DECODED_EXPONENTS: EncodingId = EncodingId::new("decoded_exponents");
/// `Y`, the end of the graph. Not an encoding of the weight.
pub const PRODUCT: EncodingId = EncodingId::new("product");

/// A conversion of a family: the encoding that it reads and the one that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The encoding that is read.
    pub from: EncodingId,
    /// The encoding that is written, or [`PRODUCT`].
    pub to: EncodingId,
}

/// A family: a spec with its axes, and everything that follows from it.
///
/// A spec also has items that a const context needs, which a trait cannot provide: `plan`, `instructions` (the
/// [`Instruction`]s of its kernel), and `values` and `of`, which `axes!` writes.
pub trait Family: Copy {
    /// The argument struct of the family's kernels.
    type Args: KernelArgs;
    /// The axes, in the order of names.
    const AXES: &'static [Axis];
    /// The conversions of all variants; empty for a family of activations.
    const EDGES: &'static [Edge];

    /// Returns the conversions of this variant. A stage of several belongs to every edge that needs it.
    fn edges(&self) -> &'static [Edge] {
        Self::EDGES
    }

    /// Returns a line that says what the kernel does.
    fn summary(&self, plan: &BlockPlan) -> String;

    /// Returns the declarations of the entry point in addition to the axes.
    fn entry(&self, _plan: &BlockPlan) -> Entry {
        Entry::default()
    }

    /// Returns the device memory of a launch in addition to its operands, on a device with `sms` multiprocessors.
    fn workspace(&self, _plan: &BlockPlan, _problem: GemmShape, _sms: u32) -> WorkspacePlan {
        WorkspacePlan::default()
    }

    /// Returns the variants that ship for an architecture. Callers drop those without a plan there.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec>;
}

/// A family as data.
#[derive(Clone, Copy, Debug)]
pub struct FamilyInfo {
    /// The name in canonical names and attributes, and the stem of the family's files.
    pub name: &'static str,
    /// The axes, in the order of names ([`Family::AXES`]).
    pub axes: &'static [Axis],
    /// The conversions of the family ([`Family::EDGES`]).
    pub edges: &'static [Edge],
    /// The argument struct ([`Family::Args`]).
    pub args: ArgsInfo,
    /// The variants that ship for an architecture ([`Family::catalogue`]).
    pub catalogue: fn(Arch) -> Vec<VariantSpec>,
}

impl FamilyInfo {
    const fn of<F: Family>(name: &'static str) -> Self {
        let args = ArgsInfo::of::<F::Args>();
        let catalogue = |arch| F::catalogue(arch).filter(|spec| spec.block().is_ok()).collect();
        Self { name, axes: F::AXES, edges: F::EDGES, args, catalogue }
    }
}

/// The family at an index of [`FAMILIES`], as a type. The attribute, which is independent of families, names the family
/// of a variant with it ([`ListedFamily`]).
#[doc(hidden)]
pub struct FamilyAt<const INDEX: usize>;

/// Maps an index of [`FAMILIES`] to a type; see [`FamilyAt`].
#[doc(hidden)]
pub trait ListedFamily {
    /// The family's spec.
    type Family: Family;
}

/// Declares everything that covers all families.
macro_rules! families {
    ($($(#[$doc:meta])* $module:ident: $variant:ident($spec:ident)),+ $(,)?) => {
        $(pub mod $module;)+
        $(pub use $module::$spec;)+

        /// Every family, in the order of reports.
        pub const FAMILIES: &[FamilyInfo] = &[$(FamilyInfo::of::<$spec>(stringify!($module))),+];

        /// The operation of a kernel, with the axes of its family.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Op { $($(#[$doc])* $variant($spec)),+ }

        $(impl ListedFamily for FamilyAt<{ FamilyIndex::$module as usize }> {
            type Family = $spec;
        })+

        /// Indices into [`FAMILIES`].
        #[derive(Clone, Copy)]
        #[allow(non_camel_case_types)]
        enum FamilyIndex { $($module),+ }

        impl Op {
            /// Returns the index of the family in [`FAMILIES`].
            pub(crate) const fn family_index(&self) -> usize {
                match self { $(Self::$variant(_) => FamilyIndex::$module as usize),+ }
            }

            /// Returns the values of the axes.
            pub(crate) const fn values(&self) -> Raw {
                match self { $(Self::$variant(spec) => spec.values()),+ }
            }

            /// Returns the operation with these values, of the family at an index of [`FAMILIES`].
            pub(crate) const fn of(index: usize, raw: &Raw) -> Self {
                $(if index == FamilyIndex::$module as usize {
                    return Self::$variant($spec::of(raw));
                })+
                panic!("not an index of FAMILIES")
            }

            pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
                match self { $(Self::$variant(op) => op.plan(arch)),+ }
            }

            /// Returns the [`Instruction`]s that the kernel needs.
            pub const fn instructions(&self) -> Instructions {
                match self { $(Self::$variant(op) => op.instructions()),+ }
            }

            /// Returns the conversions of this variant ([`Family::edges`]).
            pub fn edges(&self) -> &'static [Edge] {
                match self { $(Self::$variant(op) => op.edges()),+ }
            }

            pub(crate) fn summary(&self, plan: &BlockPlan) -> String {
                match self { $(Self::$variant(op) => op.summary(plan)),+ }
            }

            pub(crate) fn entry(&self, plan: &BlockPlan) -> Entry {
                match self { $(Self::$variant(op) => op.entry(plan)),+ }
            }

            pub(crate) fn workspace(&self, plan: &BlockPlan, problem: GemmShape, sms: u32) -> WorkspacePlan {
                match self { $(Self::$variant(op) => op.workspace(plan, problem, sms)),+ }
            }
        }
    };
}

impl Op {
    /// Returns the family of the operation.
    pub const fn info(&self) -> &'static FamilyInfo {
        &FAMILIES[self.family_index()]
    }

    /// Returns the name of the family.
    pub const fn family(&self) -> &'static str {
        self.info().name
    }

    /// Returns whether the argument struct of the operation's kernels is `A`.
    pub fn takes<A: KernelArgs>(&self) -> bool {
        self.info().args.name == A::NAME
    }
}

families! {
    /// Decodes a Huffman tensor to an encoding that a consumer reads (report section 7).
    decode_huffman: DecodeHuffman(DecodeHuffmanSpec),
    /// Encodes BF16 as a Huffman or palette tensor (report section 4).
    encode_huffman: EncodeHuffman(EncodeHuffmanSpec),
    /// Packs BF16 as a packed tensor.
    pack: Pack(PackSpec),
    /// Unpacks a packed tensor to BF16.
    unpack: Unpack(UnpackSpec),
    /// Replaces elements of a packed tensor.
    update: Update(UpdateSpec),
    /// Encodes BF16 as a compact tensor.
    encode_compact: EncodeCompact(EncodeCompactSpec),
    /// Decodes a compact tensor to BF16 or to a packed tensor.
    decode_compact: DecodeCompact(DecodeCompactSpec),
    /// Reconstructive matmul `Y[m,n] = X[m,k] * W[n,k]^T` (report section 8).
    gemm_recon: GemmRecon(GemmReconSpec),
    /// Matmul for small batches from the operands of the reconstructive matmul, joined in registers.
    gemm_join: GemmJoin(GemmJoinSpec),
    /// Packed matmul for small batches, from a packed tensor.
    gemm_mma: GemmMma(GemmMmaSpec),
    /// Packed matmul for large batches, from a packed tensor.
    gemm_wgmma: GemmWgmma(GemmWgmmaSpec),
    /// Matmul for small batches, from a compact tensor.
    gemm_compact: GemmCompact(GemmCompactSpec),
    /// Matmul of a mixture of experts, from one packed tensor or one BF16 matrix that holds all experts.
    gemm_grouped: GemmGrouped(GemmGroupedSpec),
    /// Looks up rows of an embedding, from BF16 or a packed tensor.
    embed: Embed(EmbedSpec),
    /// Norms of activations.
    norm: Norm(NormSpec),
    /// Applies bias, QK-norm and rotary embedding to heads, and stores K and V in the KV cache.
    rope: Rope(RopeSpec),
    /// The activation of a gated MLP.
    silu_mul: SiluMul(SiluMulSpec),
    /// Multiplies activations by a factor.
    scale: Scale(ScaleSpec),
    /// Routing of a mixture of experts.
    route: Route(RouteSpec),
    /// Attention over the pages of a KV cache.
    attention: Attention(AttentionSpec),
    /// Packs pages of a KV cache, from BF16 to 12 bits.
    kv_pack: KvPack(KvPackSpec),
    /// Unpacks packed pages of a KV cache to BF16.
    kv_unpack: KvUnpack(KvUnpackSpec),
    /// Samples a token from each row of logits.
    sample: Sample(SampleSpec),
    /// Log probabilities of sampled tokens.
    logprobs: Logprobs(LogprobsSpec),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::catalog;
    use std::collections::BTreeSet;

    #[test]
    fn no_variant_is_listed_twice_and_every_family_ships_what_fits() {
        for arch in Arch::ALL {
            let specs = catalog::all(*arch);
            assert_eq!(specs.iter().collect::<BTreeSet<_>>().len(), specs.len());
            for family in FAMILIES {
                let specs = (family.catalogue)(*arch);
                assert!(
                    specs.iter().all(|spec| spec.op.family() == family.name && spec.arch == *arch),
                    "{}",
                    family.name
                );
                assert!(!specs.is_empty() || *arch != Arch::Sm90a, "{}", family.name);
            }
        }
    }

    /// Every edge of a family is an edge of one of its variants, and vice versa.
    #[test]
    fn family_edges_match_their_variants() {
        for family in FAMILIES {
            let edges: Vec<_> = (family.catalogue)(Arch::Sm90a).iter().flat_map(|spec| spec.op.edges()).collect();
            assert!(family.edges.iter().all(|edge| edges.contains(&edge)), "{}", family.name);
            assert!(edges.iter().all(|edge| family.edges.contains(edge)), "{}", family.name);
        }
    }

    /// Every edge begins and ends at an encoding that bundles store, at decoded exponents, or at the product.
    #[test]
    fn family_edges_end_at_encodings() {
        let stored = |id: EncodingId| unweight_format::ENCODINGS.iter().any(|encoding| encoding.id() == id);
        for Edge { from, to } in FAMILIES.iter().flat_map(|family| family.edges) {
            assert!(stored(*from) || *from == DECODED_EXPONENTS, "{from}");
            assert!(stored(*to) || *to == DECODED_EXPONENTS || *to == PRODUCT, "{to}");
        }
    }

    #[test]
    fn axes_round_trip_through_their_names() {
        for family in FAMILIES {
            let marks: BTreeSet<_> = family.axes.iter().map(|axis| axis.key).collect();
            assert_eq!(marks.len(), family.axes.len(), "{}: a key is used twice", family.name);
            for (i, axis) in family.axes.iter().enumerate() {
                assert!(
                    axis.only.is_none_or(|only| only.axis < i),
                    "{}: {} depends on a later axis",
                    family.name,
                    axis.key
                );
                assert!(axis.default.is_none_or(|value| axis.check(value).is_ok()), "{}: {}", family.name, axis.key);
            }
        }
    }
}
