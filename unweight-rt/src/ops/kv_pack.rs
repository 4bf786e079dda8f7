//! Packs BF16 pages of a KV cache, and returns the BF16 units of freed pages to their pool.
//!
//! ```text
//! step      hot pages of all layers --> packed pages, for each row whose newest token completes a page
//! chunk     listed pages of one layer --> packed pages
//! release   frees the units of listed pages
//! ```
//! A unit is K or V of one KV head in a page. A unit whose exponents do not fit its window and record is stored as a
//! BF16 unit from the pool. If no unit is free, its values are lost and a flag is set: the caller must recompute them.

use std::sync::Arc;

use unweight_codegen::{
    abi::KvPackArgs,
    plan::GemmShape,
    spec::{KvPackSpec, KvPackStage, Op},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, RowFault,
        module::LoadedKernel,
        view::{check_apart, check_buffer},
    },
    exec::ExecContext,
    ops::{attention::TokenRows, kv::KvLayer, kv_packed::PackedLayers},
};

/// A kernel of `kv_pack`.
#[derive(Clone, Debug)]
pub struct KvPack {
    kernel: Arc<LoadedKernel>,
    spec: KvPackSpec,
}

/// Buffers of a launch, with their minimum lengths.
type Lists<'a> = [(&'static str, &'a DeviceBuffer<u32>, u64)];

impl KvPack {
    /// Wraps a kernel of family `kv_pack`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::KvPack(spec) => Ok(Self { kernel, spec }),
            _ => kernel.refuse(LaunchError::Family { wanted: "a kv_pack kernel" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues packing of the hot pages of all layers for each of the first `m` rows whose newest token completes a
    /// page. The row's table contains the target page at that index ([`NO_PAGE`](super::kv_packed::NO_PAGE): not
    /// packed). `hot` are the hot pages of layer 0; those of the other layers follow at a pitch of one layer. Sets
    /// `lost[row]` to 1 if a unit of the row is lost. A page that a cache does not have is skipped, and
    /// [`ExecContext::synchronize`] reports it.
    ///
    /// # Errors
    /// Operands that do not match, overlap or are on another device; or a driver error.
    pub fn step(
        &self,
        ctx: &mut ExecContext,
        (hot, hot_table): (KvLayer<'_>, &DeviceBuffer<u32>),
        cache: PackedLayers<'_>,
        rows: TokenRows<'_>,
        m: u32,
        lost: &mut DeviceBuffer<u32>,
    ) -> Result<(), DeviceError> {
        let table = u64::from(m) * u64::from(rows.table_pages);
        let lists = [
            ("the positions", rows.positions, u64::from(m)),
            ("the page table", rows.page_table, table),
            ("the table of hot pages", hot_table, u64::from(m)),
        ];
        let check = || {
            self.check(KvPackStage::Step, &cache, &lists, Some((&*lost, m)))?;
            cache.check_heads(&hot.shape())?;
            hot.check_layers(cache.shape().layers)?;
            hot.check_device(self.kernel.device().ordinal())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = KvPackArgs {
            source: hot.address(),
            positions: rows.positions.address(),
            page_table: rows.page_table.address(),
            hot_table: hot_table.address(),
            lost: lost.address(),
            source_pitch: hot.shape().layer_elements(),
            m,
            source_pages: hot.shape().pages(),
            table_pages: rows.table_pages,
            ..self.args(ctx, &cache)
        };
        self.launch(ctx, &args)
    }

    /// Enqueues packing of pages of one layer to the first `count` pages of `table` `[count]`: entry `i` is packed from
    /// page `first + i` of `source`. Sets `lost[0]` to 1 if a unit is lost.
    ///
    /// # Errors
    /// As for [`KvPack::step`].
    pub fn chunk(
        &self,
        ctx: &mut ExecContext,
        (source, first): (KvLayer<'_>, u32),
        layer: PackedLayers<'_>,
        (table, at, count): (&DeviceBuffer<u32>, u32, u32),
        lost: &mut DeviceBuffer<u32>,
    ) -> Result<(), DeviceError> {
        let lists = [("the page table", table, u64::from(at) + u64::from(count))];
        let check = || {
            self.check(KvPackStage::Chunk, &layer, &lists, Some((&*lost, 1)))?;
            layer.check_heads(&source.shape())?;
            source.check_device(self.kernel.device().ordinal())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = KvPackArgs {
            source: source.address(),
            page_table: table.address() + u64::from(at) * size_of::<u32>() as u64,
            lost: lost.address(),
            m: count,
            source_pages: source.shape().pages(),
            first,
            layers: 1,
            ..self.args(ctx, &layer)
        };
        self.launch(ctx, &args)
    }

    /// Enqueues the release of the units of the first `count` pages of `table`, in all layers of `cache`. The pages
    /// must be packed again before they are read.
    ///
    /// # Errors
    /// As for [`KvPack::step`].
    pub fn release(
        &self,
        ctx: &mut ExecContext,
        cache: PackedLayers<'_>,
        table: &DeviceBuffer<u32>,
        count: u32,
    ) -> Result<(), DeviceError> {
        let check = || self.check(KvPackStage::Release, &cache, &[("the page table", table, count.into())], None);
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = KvPackArgs { page_table: table.address(), m: count, ..self.args(ctx, &cache) };
        self.launch(ctx, &args)
    }

    fn check(
        &self,
        stage: KvPackStage,
        cache: &PackedLayers<'_>,
        lists: &Lists<'_>,
        lost: Option<(&DeviceBuffer<u32>, u32)>,
    ) -> Result<(), LaunchError> {
        let (supported, ordinal) = (self.spec.stage, self.kernel.device().ordinal());
        if supported != stage {
            return Err(LaunchError::Step { takes: supported.tag(), asked: stage.tag() });
        }
        cache.check(ordinal, self.spec.head_dim.get())?;
        lists.iter().try_for_each(|&(what, list, expected)| check_buffer(what, list, expected, ordinal))?;
        let Some((lost, rows)) = lost else { return Ok(()) };
        check_buffer("the list of lost rows", lost, rows.into(), ordinal)?;
        check_apart(("the list of lost rows", lost.span()), lists.iter().map(|(what, list, _)| (*what, list.span())))
    }

    /// Returns the arguments common to all stages.
    fn args(&self, ctx: &ExecContext, cache: &PackedLayers<'_>) -> KvPackArgs {
        let shape = cache.shape();
        let (packed_pitch, record_pitch) = cache.pitches();
        KvPackArgs {
            packed: cache.packed(),
            records: cache.records(),
            unit_pages: cache.units(),
            free_units: cache.free(),
            fault: ctx.row_fault_address(RowFault::Page),
            packed_pitch,
            record_pitch,
            layers: shape.layers,
            kv_heads: shape.kv.kv_heads(),
            pages: shape.kv.pages(),
            units: shape.units,
            ..KvPackArgs::default()
        }
    }

    fn launch(&self, ctx: &ExecContext, args: &KvPackArgs) -> Result<(), DeviceError> {
        // K and V of each KV head.
        let value = [args.m, args.layers, args.kv_heads, 2].map(u64::from).into_iter().fold(1, u64::saturating_mul);
        let Ok(units) = u32::try_from(value) else {
            let limit = u32::MAX.into();
            return self.kernel.refuse(LaunchError::TooLarge { what: "units of the pages", value, limit });
        };
        // SAFETY: lists were checked against their lengths above, caches against their memory when they were created;
        // the kernel bounds-checks pages, hot pages and units. The fault word lives as long as the context, on whose
        // stream this runs. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(units), args) }
    }
}
