//! Chooses the matmul of a problem: the variant that was measured fastest on this kind of device, else the variant that
//! the GPU model predicts to be fastest among built-in and registered ones.
//!
//! A choice is a pure function of the problem, the GPU, the table and the registered variants. A benchmark writes a
//! table for this machine, which [`KernelSet::chooser`](crate::device::KernelSet::chooser) uses.

use std::collections::BTreeSet;

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Arch, Op},
};

use super::{
    candidates::{PackedUse, RegisterError, Registered},
    cost::{
        constants::{SMALL_BATCH, SMALL_TILES_BATCH},
        gpu_model::{self, GpuModel},
    },
    table::MeasuredTable,
};

/// Chooses variants for one device.
#[derive(Clone, Debug)]
pub struct PackedChooser {
    gpu: GpuModel,
    table: MeasuredTable,
    registered: Registered,
}

impl PackedChooser {
    /// Creates a chooser that uses only the model.
    pub fn model(gpu: GpuModel) -> Self {
        Self { gpu, table: MeasuredTable::default(), registered: Registered::default() }
    }

    /// Creates a chooser that uses the model and, if the device has the name of the built-in table, that table.
    pub fn of(gpu: GpuModel, name: &str) -> Self {
        Self::model(gpu).with_table(name, MeasuredTable::builtin().clone())
    }

    /// Returns the chooser for an H200 (SXM), for use without a device.
    pub fn h200() -> Self {
        Self::of(GpuModel::H200, "NVIDIA H200")
    }

    /// Returns the chooser for the typical GPU of an architecture, for listings without a device.
    pub fn usual(arch: Arch) -> Self {
        match arch {
            Arch::Sm90a => Self::h200(),
            _ => Self::model(GpuModel::usual(arch)),
        }
    }

    /// Returns the model of the chooser's device.
    pub fn gpu_model(&self) -> &GpuModel {
        &self.gpu
    }

    /// Returns the measured times; they take precedence over the model.
    pub fn table(&self) -> &MeasuredTable {
        &self.table
    }

    /// Returns the architecture of the chooser's device.
    pub fn arch(&self) -> Arch {
        self.gpu.arch
    }

    /// Adds a table that overrides the present one, if it was measured on a device of this name.
    #[must_use]
    pub fn with_table(mut self, device: &str, table: MeasuredTable) -> Self {
        if table.device == device {
            self.table = table.over(&self.table);
        }
        self
    }

    /// Returns the chooser without measured times.
    #[must_use]
    pub fn without_table(self) -> Self {
        Self { table: MeasuredTable::default(), ..self }
    }

    /// Replaces the registered variants.
    #[must_use]
    pub fn with_registered(self, registered: Registered) -> Self {
        Self { registered, ..self }
    }

    /// Adds a registered variant.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(&mut self, spec: VariantSpec) -> Result<(), RegisterError> {
        self.registered.add(self.gpu.arch, spec)
    }

    /// Returns the registered variants.
    pub fn registered(&self) -> &Registered {
        &self.registered
    }

    /// Returns the variants that can compute a problem from packed weights, with predicted microseconds, fastest first.
    pub fn candidates(&self, problem: GemmShape, packed_use: PackedUse) -> Vec<(VariantSpec, f64)> {
        gpu_model::candidates(&self.gpu, &self.registered, problem, packed_use)
    }

    /// Like [`Self::candidates`], for compact weights.
    pub fn compact_candidates(&self, problem: GemmShape, packed_use: PackedUse) -> Vec<(VariantSpec, f64)> {
        gpu_model::compact_candidates(&self.gpu, &self.registered, problem, packed_use)
    }

    /// Returns every variant that any card of the architecture can choose for a use and for batches up to `max_batch`,
    /// regardless of its multiprocessors and memory: all shapes that the model considers at such batches.
    pub fn every_candidate(&self, max_batch: u32, packed_use: PackedUse) -> impl Iterator<Item = VariantSpec> {
        let is_candidate = move |spec: &VariantSpec| max_batch > SMALL_BATCH || !matches!(spec.op, Op::GemmWgmma(_));
        self.registered.packed(self.arch(), packed_use).filter(is_candidate).filter(|spec| Plan::new(spec).is_ok())
    }

    /// Like [`Self::every_candidate`], for compact weights.
    pub fn every_compact_candidate(&self, packed_use: PackedUse) -> impl Iterator<Item = VariantSpec> {
        self.registered.compact(self.arch(), packed_use)
    }

    /// Returns the variant for a problem: the measured one, else the one that the model predicts to be fastest. `None`
    /// if no variant supports the shape.
    pub fn choose(&self, problem: GemmShape, packed_use: PackedUse) -> Option<VariantSpec> {
        let measured = self.table.choose(problem, packed_use.on(self.arch()));
        let measured = measured.filter(|spec| spec.arch == self.arch() && Plan::new(spec).is_ok());
        measured.or_else(|| self.candidates(problem, packed_use).first().map(|(spec, _)| *spec))
    }

    /// Like [`PackedChooser::choices`], for products that read compact weights directly. Uses only the model, which is
    /// fitted to measurements.
    pub fn compact_choices(&self, n: u32, k: u32, max_batch: u32, packed_use: PackedUse) -> Vec<(u32, VariantSpec)> {
        let mut choices: Vec<(u32, VariantSpec)> = Vec::new();
        for m in (8..max_batch).step_by(8).chain([max_batch]) {
            let problem = GemmShape { m, n, k };
            let found = self.compact_candidates(problem, packed_use);
            let Some(&(spec, _)) = found.first() else { return Vec::new() };
            match choices.last_mut() {
                Some((last, same)) if *same == spec => *last = m,
                _ => choices.push((m, spec)),
            }
        }
        choices
    }

    /// Returns the choice for every batch of 1 to `max_batch`: each variant with the largest batch that uses it,
    /// ascending. Empty if no variant supports the shape.
    pub fn choices(&self, n: u32, k: u32, max_batch: u32, packed_use: PackedUse) -> Vec<(u32, VariantSpec)> {
        // The choice changes only at these batches: small batch tiles are multiples of 8, those of large batches of 32.
        // Above 4096, where it hardly changes, every eighth of them suffices.
        let small = (8..max_batch.min(SMALL_TILES_BATCH)).step_by(8);
        let large = (SMALL_TILES_BATCH..max_batch.min(4096)).step_by(32);
        let tiles = small.chain(large).chain((4096..max_batch).step_by(256));
        let rows = self.table.rows.iter().filter(|row| (row.n, row.k) == (n, k) && row.m < max_batch);
        let measured = rows.flat_map(|row| [row.after(), row.m]).filter(|m| *m > 0);
        let ends: BTreeSet<u32> = tiles.chain(measured).chain([max_batch]).collect();
        let mut choices: Vec<(u32, VariantSpec)> = Vec::new();
        for m in ends {
            let Some(spec) = self.choose(GemmShape { m, n, k }, packed_use) else { return Vec::new() };
            match choices.last_mut() {
                Some((last, same)) if *same == spec => *last = m,
                _ => choices.push((m, spec)),
            }
        }
        choices
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::spec::Epilogue;

    use super::*;
    use crate::choose::{cost::gpu_model::expand_us, table::MeasuredRow};

    const USE: PackedUse = PackedUse { escapes: true, pdl: false, epilogue: Epilogue::Store };
    const SHAPES: [(u32, u32); 9] = [
        (64, 64),
        (192, 320),
        (1024, 4096),
        (4096, 4096),
        (6144, 4096),
        (14336, 4096),
        (4096, 14336),
        (28672, 8192),
        (128256, 4096),
    ];

    #[test]
    fn every_batch_of_every_shape_has_a_variant_and_nothing_else_has() {
        let dispatch = PackedChooser::model(GpuModel::H200);
        for (n, k) in SHAPES {
            for m in (1..=130).chain([255, 256, 257, 1000, 4095, 4096]) {
                let problem = GemmShape { m, n, k };
                let spec = dispatch.choose(problem, USE).unwrap_or_else(|| panic!("{problem:?}"));
                let plan = Plan::new(&spec).unwrap();
                assert!(plan.launch.grid.blocks(problem, 132).is_some_and(|blocks| blocks > 0), "{spec} {problem:?}");
            }
        }
        // A gate with its up has the shape of a plain product at every batch.
        let plain = PackedUse { pdl: true, ..USE };
        let gated = PackedUse { epilogue: Epilogue::SiluMul, ..plain };
        for (n, k) in SHAPES {
            for m in [1, 8, 9, 64, 65, 129, 300, 1024, 4096] {
                let problem = GemmShape { m, n, k };
                let spec = dispatch.choose(problem, gated).unwrap();
                assert!(spec.to_string().ends_with("_esc_pdl_silu_mul") && Plan::new(&spec).is_ok(), "{spec}");
                assert_eq!(plain.of(spec), dispatch.choose(problem, plain), "{problem:?}");
            }
        }
        for (m, n, k) in [(0, 64, 64), (1, 100, 64), (1, 64, 100), (1, 0, 64), (1, 64, 0)] {
            assert_eq!(dispatch.choose(GemmShape { m, n, k }, USE), None);
        }
    }

    /// Every card gets variants of its own architecture, and small batches are limited by its memory.
    #[test]
    fn other_gpus_have_their_own_choices() {
        let packed_use = PackedUse { pdl: true, ..USE };
        // Includes an L40S, which has more multiprocessors than a 4090 and slower memory.
        let l40s = GpuModel { arch: Arch::Sm89, sms: 142, memory: 0.864e6, clock_mhz: 2520.0, tensor: 1024.0 };
        for gpu in Arch::ALL.iter().map(|arch| GpuModel::usual(*arch)).chain([l40s]) {
            let (chooser, name) = (PackedChooser::of(gpu, "any"), gpu.arch);
            for (n, k) in SHAPES {
                for m in [1, 8, 16, 17, 64, 65, 256, 2048] {
                    let problem = GemmShape { m, n, k };
                    let spec = chooser.choose(problem, packed_use).unwrap_or_else(|| panic!("{name:?}: {problem:?}"));
                    let plan = Plan::new(&spec).unwrap();
                    assert_eq!(spec.arch, gpu.arch, "{spec}");
                    assert!(plan.launch.grid.blocks(problem, gpu.sms).is_some_and(|b| b > 0), "{spec} {problem:?}");
                }
            }
            for (n, k) in [(14336, 4096), (4096, 14336), (128_256, 4096)] {
                let floor = f64::from(n) * f64::from(k) * 1.5 / gpu.memory;
                let (spec, us) = chooser.candidates(GemmShape { m: 1, n, k }, packed_use)[0];
                assert!((1.0..1.4).contains(&(us / floor)), "{spec} at {n}x{k}: {us:.0} us, floor {floor:.0}");
            }
        }
    }

    /// Checks the batch tile of each batch, growing times, and the measured choices (docs/records/2026-11-22).
    #[test]
    fn products_from_compact_weights_are_chosen_as_measured() {
        let packed_use = PackedUse { pdl: true, ..USE };
        let (h200, ada) = (PackedChooser::model(GpuModel::H200), PackedChooser::model(GpuModel::usual(Arch::Sm89)));
        let best = |m, n, k| h200.compact_candidates(GemmShape { m, n, k }, packed_use)[0];
        // For small weights, more blocks are worth more than reading the weights once.
        for (n, k) in SHAPES.into_iter().filter(|(n, k)| n * k >= 1 << 24) {
            let mut last = 0.0;
            for m in [1, 8, 9, 16, 17, 32] {
                let (spec, us) = best(m, n, k);
                let Op::GemmCompact(op) = spec.op else { panic!("{spec}") };
                assert!(op.pdl && op.batch_tile.get() >= m, "{spec} at {m} of {n}x{k} reads the weights twice");
                assert!(us >= last, "{spec} at {m} of {n}x{k}: {us} after {last}");
                last = us;
            }
        }
        for (m, n, k, shape, measured) in [
            (1, 14336, 4096, "b8_w8p1c1_t16", 22.6),
            (8, 6144, 4096, "b8_w16p1c1_t32", 12.9),
            (1, 4096, 14336, "b8_w16p1c2_t32_pdl", 22.1),
            (8, 128_256, 4096, "b8_w8p1c1_t16", 172.8),
            (16, 14336, 4096, "b16_w8p1c1_t8", 24.9),
            (16, 8192, 8192, "b16_w16p1c1_t32", 25.7),
            (8, 28672, 4096, "b8_w16p1c2_t32_persistent", 41.7),
            (32, 28672, 8192, "b32_w12p1c2_t16_persistent", 101.7),
            (32, 4096, 14336, "b32_w12p1c2_t16_pdl", 29.5),
        ] {
            let (spec, us) = best(m, n, k);
            assert!(spec.to_string().contains(shape), "{spec} at {m} of {n}x{k}, not {shape}");
            assert!(
                (0.9..1.15).contains(&(us / measured)),
                "{spec} at {m} of {n}x{k}: {us:.1} us, measured {measured}"
            );
        }
        // One row of tiles per block would leave half of the machine idle.
        let narrow = h200.compact_candidates(GemmShape { m: 1, n: 4096, k: 4096 }, packed_use)[0].0;
        assert!(matches!(narrow.op, Op::GemmCompact(op) if op.cluster.get() == 2), "{narrow}");
        assert!(ada.compact_candidates(GemmShape { m: 1, n: 64, k: 64 }, USE).is_empty());
        assert!(h200.compact_candidates(GemmShape { m: 1, n: 65, k: 64 }, USE).is_empty());
        let us = expand_us(&GpuModel::H200, 14336, 4096);
        assert!((52.0..55.0).contains(&us), "{us}");
    }

    #[test]
    fn batch_ranges_equal_per_batch_choices() {
        let row = |m, variant: &str| MeasuredRow { n: 4096, k: 4096, m, pdl: false, variant: variant.parse().unwrap() };
        let table = MeasuredTable {
            device: "H".to_owned(),
            rows: vec![
                row(0, "uw_sm90a_gemm_mma_b8_r2w8p2c1_esc_store"),
                row(5, "uw_sm90a_gemm_mma_b8_r2w8p2c1_esc_store"),
                row(17, "uw_sm90a_gemm_mma_b32_r2w8p2c1_store"),
                row(331, "uw_sm90a_gemm_mma_b64_r2w8p2c1_esc_store"),
                row(544, "uw_sm90a_gemm_wgmma_b128_g2p6_esc_store"),
            ],
        };
        let dispatch = PackedChooser::model(GpuModel::H200).with_table("H", table);
        for (n, k) in SHAPES {
            let choices = dispatch.choices(n, k, 700, USE);
            assert_eq!(choices.last().map(|(m, _)| *m), Some(700));
            for m in 1..=700 {
                let (_, range) = choices.iter().find(|(last, _)| m <= *last).unwrap();
                assert_eq!(dispatch.choose(GemmShape { m, n, k }, USE), Some(*range), "m = {m}, {n} x {k}");
            }
        }
        assert!(dispatch.choices(100, 64, 8, USE).is_empty());
    }

    #[test]
    fn measured_table_overrides_the_model_on_its_gpu_only() {
        let measured = "uw_sm90a_gemm_mma_b64_r1w4p2c1_esc_store";
        let row = MeasuredRow { n: 4096, k: 4096, m: 16, pdl: true, variant: measured.parse().unwrap() };
        let table = MeasuredTable { device: "H".to_owned(), rows: vec![row] };
        let dispatch = |device| PackedChooser::model(GpuModel::H200).with_table(device, table.clone());
        let pdl = PackedUse { pdl: true, epilogue: Epilogue::StoreAdd, ..USE };
        let at = |m| GemmShape { m, n: 4096, k: 4096 };
        let chosen = dispatch("H").choose(at(9), pdl).unwrap();
        assert_eq!(chosen.to_string(), "uw_sm90a_gemm_mma_b64_r1w4p2c1_esc_pdl_store_add");
        assert_ne!(dispatch("H").choose(at(17), pdl), Some(chosen), "a larger batch was not measured");
        assert_ne!(dispatch("H").choose(at(9), USE).unwrap().to_string(), measured, "nor an ordinary launch");
        assert_ne!(dispatch("another").choose(at(9), pdl), Some(chosen));
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<MeasuredTable>(&text).unwrap(), table);
    }
    /// Variants with ten warps, or with 16 warps of one row block each, are not built in.
    const UNSHIPPED: [&str; 2] =
        ["uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store", "uw_sm90a_gemm_mma_b16_r1w16p4c1_esc_store"];

    fn with_unshipped(mut chooser: PackedChooser) -> PackedChooser {
        for name in UNSHIPPED {
            chooser.register(name.parse().unwrap()).unwrap();
        }
        chooser
    }

    #[test]
    fn a_registered_variant_is_chosen_where_the_model_finds_it_fastest() {
        let problem = GemmShape { m: 16, n: 2048, k: 2048 };
        for chooser in [PackedChooser::model(GpuModel::H200), PackedChooser::h200()] {
            for (epilogue, tag) in [(Epilogue::Store, "store"), (Epilogue::StoreAdd, "store_add")] {
                let packed_use = PackedUse { escapes: true, pdl: true, epilogue };
                let shipped = chooser.choose(problem, packed_use).unwrap();
                let both = with_unshipped(chooser.clone());
                let chosen = both.choose(problem, packed_use).unwrap();
                assert_eq!(chosen.to_string(), format!("uw_sm90a_gemm_mma_b16_r1w16p4c1_esc_pdl_{tag}"));
                let us = |spec| {
                    both.candidates(problem, packed_use).iter().find(|(candidate, _)| *candidate == spec).unwrap().1
                };
                assert!(us(chosen) < us(shipped), "{} and {}", us(chosen), us(shipped));
                assert!(both.choices(2048, 2048, 64, packed_use).iter().any(|(_, spec)| *spec == chosen));
                // Where another variant is faster, registration changes nothing.
                let large = GemmShape { m: 2048, ..problem };
                assert_eq!(both.choose(large, packed_use), chooser.choose(large, packed_use));
            }
        }
    }

    #[test]
    fn a_registered_variant_is_chosen_where_a_table_names_it() {
        let row = MeasuredRow { n: 4096, k: 4096, m: 8, pdl: true, variant: UNSHIPPED[0].parse().unwrap() };
        let table = MeasuredTable { device: "NVIDIA H200".to_owned(), rows: vec![row] };
        let chooser = with_unshipped(PackedChooser::h200());
        let packed_use = PackedUse { pdl: true, epilogue: Epilogue::StoreAdd, ..USE };
        let at = |chooser: &PackedChooser, m| {
            chooser.choose(GemmShape { m, n: 4096, k: 4096 }, packed_use).unwrap().to_string()
        };
        assert!(!at(&chooser, 8).contains("r3w10p2c1"), "the model prefers other variants: {}", at(&chooser, 8));
        let measured = chooser.clone().with_table("NVIDIA H200", table);
        assert_eq!(at(&measured, 8), "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_pdl_store_add");
        assert_eq!(at(&measured, 16), at(&chooser, 16));
        assert_eq!(at(&measured.without_table(), 8), at(&chooser.clone().without_table(), 8));
    }

    #[test]
    fn a_registered_compact_shape_is_a_candidate() {
        let declared = "uw_sm90a_gemm_compact_b8_w6p1c1_t16_store";
        let mut chooser = PackedChooser::model(GpuModel::H200);
        let problem = GemmShape { m: 1, n: 14336, k: 4096 };
        let shipped = chooser.compact_candidates(problem, USE);
        chooser.register(declared.parse().unwrap()).unwrap();
        let found = chooser.compact_candidates(problem, USE);
        assert_eq!(found.len(), shipped.len() + 1);
        assert!(found.iter().any(|(spec, _)| spec.to_string() == declared) && found.is_sorted_by(|a, b| a.1 <= b.1));
    }

    #[test]
    fn what_the_architecture_cannot_run_is_not_registered() {
        let mut ada = PackedChooser::usual(Arch::Sm89);
        assert!(matches!(ada.register(UNSHIPPED[0].parse().unwrap()), Err(RegisterError::Arch { .. })));
        assert_eq!(ada.registered(), &Registered::default());
    }
}
