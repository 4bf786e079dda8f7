//! Lists every kernel that a loader can need, to be compiled before the first layer of a bundle.

use std::collections::{BTreeMap, BTreeSet};

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    spec::{DecodeOutput, catalog},
};
use unweight_format::{EncodingId, Placement, Role, bundle::Bundle, safetensors::Dtype};

use super::{
    candidates::{COMPACT_BATCH, PackedUse},
    graph::{Step, packing},
    route::{Expand, GEMM_MMA_BATCH, RoutePolicy, Weight, expander},
};

impl RoutePolicy {
    /// Returns every kernel needed to load these weights as layers and to run them at any batch. Ordered, without
    /// duplicates.
    pub fn reachable(&self, weights: impl IntoIterator<Item = Weight>) -> Vec<VariantSpec> {
        self.reachable_by(weights, |weight| self.products(weight))
    }

    /// Like [`RoutePolicy::reachable`], but for any card of the architecture, regardless of its multiprocessors and
    /// memory: the products include every built-in shape, because the choice among them depends on the card.
    pub fn reachable_on_any_card(&self, weights: impl IntoIterator<Item = Weight>) -> Vec<VariantSpec> {
        // This chooser's products are included, because a table may name variants that are not built in.
        self.reachable_by(weights, |weight| [self.products(weight), self.every_product(weight)].concat())
    }

    fn reachable_by(
        &self,
        weights: impl IntoIterator<Item = Weight>,
        products: impl Fn(&Weight) -> Vec<VariantSpec>,
    ) -> Vec<VariantSpec> {
        let weights: BTreeSet<Weight> = weights.into_iter().collect();
        // A loader always needs its packer.
        let mut variants: BTreeSet<VariantSpec> = packing(self.chooser.arch()).into_iter().collect();
        for weight in &weights {
            for edge in weight.conversion() {
                match edge.step {
                    Step::Decode(DecodeOutput::Full) => variants.extend(self.decoder()),
                    Step::DecodeCompact => _ = variants.insert(self.decode_compact()),
                    Step::GemmPacked if self.placement != Placement::Bf16 => {
                        variants.extend(products(weight));
                        if self.stays_compact(weight) {
                            // Parts of a merged layer are encoded again.
                            variants.extend(catalog::encode_compact(self.chooser.arch()));
                        }
                    }
                    _ => {}
                }
            }
        }
        variants.into_iter().collect()
    }

    /// Returns the products of a weight at any batch, with the kernels that run before them.
    fn products(&self, weight: &Weight) -> Vec<VariantSpec> {
        let of = |&escapes: &bool| self.gemms(weight, escapes);
        // Includes packed routes of compact weights: a weight may turn out smaller when packed, or serve as an
        // embedding.
        let mut all: Vec<VariantSpec> = weight.escapes().iter().flat_map(of).map(|choice| choice.kernel).collect();
        let packed = weight.escapes().iter().flat_map(|escapes| self.packed_routes(weight, *escapes));
        all.extend(packed.flat_map(|choice| choice.kernel.kernels().copied().collect::<Vec<_>>()));
        if self.stays_compact(weight) {
            all.extend(self.compact_routes(weight).iter().flat_map(|choice| choice.kernel.kernels()));
        }
        all
    }

    /// Returns the products of a weight for all cards of the architecture.
    fn every_product(&self, weight: &Weight) -> Vec<VariantSpec> {
        let arch = self.chooser.arch();
        let mut all = Vec::new();
        for &epilogue in weight.epilogues() {
            let packed_use = |escapes, pdl| PackedUse { escapes, pdl, epilogue };
            let every = |packed_use| self.chooser.every_candidate(self.max_batch, packed_use);
            all.extend(weight.escapes().iter().flat_map(|escapes| every(packed_use(*escapes, self.pdl))));
            let compact = self.stays_compact(weight);
            if compact {
                all.extend(self.chooser.every_compact_candidate(packed_use(true, self.pdl)));
            }
            if compact && self.max_batch > COMPACT_BATCH {
                all.push(expander(arch));
                all.extend(every(packed_use(true, false)));
            }
            // Whether and from which batch cuBLAS takes over depends on the card.
            let may = match self.expand {
                Expand::Never => false,
                Expand::Above(batch) => self.max_batch > batch,
                Expand::Model => !arch.has(Instruction::Wgmma) && self.max_batch > GEMM_MMA_BATCH,
            };
            if may {
                let routes = [false, compact].into_iter().filter_map(|compact| self.by_cublas(epilogue, compact));
                all.extend(routes.flat_map(|route| route.kernels().copied().collect::<Vec<_>>()));
            }
        }
        all
    }
}

/// `[n, k]` and whether the tensor is compact, by its role.
type Shapes = BTreeMap<Role, (u32, u32, bool)>;

/// Returns the weights of linear layers in a bundle, from its manifest: each alone, and merged as servers merge them
/// (q, k and v; a gate and an up, also from one tensor). Includes an embedding only if there is no head: then it is
/// also the head.
pub fn weights(bundle: &Bundle) -> Vec<Weight> {
    let mut found = BTreeSet::new();
    let tied = bundle.tensors().all(|tensor| tensor.entry().role != Role::LmHead);
    // By layer, and by the tensor name without its last two parts (`q_proj.weight`).
    let mut siblings: BTreeMap<(Option<u32>, &str), Shapes> = BTreeMap::new();
    for tensor in bundle.tensors() {
        let entry = tensor.entry();
        let &[n, k] = entry.shape.as_slice() else { continue };
        let (Ok(n), Ok(k)) = (u32::try_from(n), u32::try_from(k)) else { continue };
        if entry.dtype != Dtype::Bf16 || n == 0 || k == 0 || entry.role == Role::Embedding && !tied {
            continue;
        }
        found.insert(Weight::stored(n, k, entry.encoding));
        if entry.role == Role::GateUp && n.is_multiple_of(64) && k.is_multiple_of(64) {
            found.insert(Weight::merged(n, k, true).all_compact(entry.encoding == EncodingId::COMPACT));
        }
        let parent = entry.name.rsplitn(3, '.').nth(2).unwrap_or_default();
        siblings
            .entry((entry.layer, parent))
            .or_default()
            .insert(entry.role, (n, k, entry.encoding == EncodingId::COMPACT));
    }
    for roles in siblings.values() {
        for (merge, gated) in [(&[Role::Q, Role::K, Role::V][..], false), (&[Role::Gate, Role::Up][..], true)] {
            let Some(shapes) = merge.iter().map(|role| roles.get(role)).collect::<Option<Vec<_>>>() else { continue };
            let k = shapes[0].1;
            let n = shapes.iter().try_fold(0u32, |sum, shape| sum.checked_add(shape.0));
            let (Some(n), true) = (n, shapes.iter().all(|shape| shape.1 == k)) else { continue };
            if !gated || shapes[0].0 == shapes[1].0 && n.is_multiple_of(64) && k.is_multiple_of(64) {
                let compact = shapes.iter().all(|shape| shape.2);
                found.insert(Weight::merged(n, k, gated).all_compact(compact));
            }
        }
    }
    found.into_iter().collect()
}
