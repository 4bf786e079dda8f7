//! Runs one pass through the model: which kernels are launched, in which order and on which memory.
//!
//! ```text
//! ids --embed--> hidden --+--norm--> normed --qkv--> qkv --attention--> attended --o--+--> hidden
//!                         |          (a chunk of a prompt: rope and the cache first)  |
//!                         +--norm--> normed --gate, up--> active --down---------------+--> hidden
//! hidden --norm--> normed --head--> logits --sample--> ids, positions + 1
//! ```
//! Families differ. Some norm what is added to the residual stream instead of what is read from it, or both. Some have
//! one norm for attention and MLP, factors of embeddings, of what is added and of logits, or biases.
//!
//! A step is one chain on one stream. Only copies of fetched experts
//! ([`offload`](unweight_rt::raw::layer::experts::offload)) run elsewhere; the host waits for the router's choice of
//! these. A kernel of a step may read positions, page tables and the keys and values of earlier tokens before the
//! preceding kernel has ended (programmatic dependent launch). No kernel of the same step writes these, except in a
//! step that verifies drafts ([`attend`]). The sampler writes state of the next step, and two steps are never in one
//! graph.

mod angles;
mod attend;
mod phase;
mod prompt;

use std::ops::Range;

use unweight_codegen::spec::Epilogue;
use unweight_model::{Factors, Mixture, ModelConfig, QkNorm, Scoring, SoftCaps};
use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, LaunchError, Linear, MatrixMut, MatrixRef, Stream,
    experts::{ExpertTraffic, Fetcher, OffloadedExperts, ReplaceRouting, Routed, RouterConfig},
    raw::ops::kv::PAD_POSITION,
};

use angles::LayerAngles;
pub use phase::StepPhase;
pub(crate) use phase::{AllPhases, Only, PhaseFilter};
pub(crate) use prompt::ChunkPlace;

use crate::{
    kernels::Kernels,
    kv_cache::{KvStore, PackedCache},
    memory::{self, Memory, Products, experts_shape},
    options::EngineOptions,
    pages::pages_for,
    sampling::{RowSampling, Sampling},
    weights::{LOGITS_MULTIPLE, Layer, MixtureExperts, Weights},
};

/// Sizes and constants of the model and of the buffers.
#[derive(Clone, Debug)]
struct Shape {
    /// Elements of a row of the residual stream.
    hidden: u32,
    /// Elements of a row between the products of an MLP without experts; 0 if every layer has experts.
    intermediate: u32,
    /// Elements of the queries, keys and values of a row together.
    qkv_cols: u32,
    /// Elements of the queries of a row, and of the output of attention.
    attended_cols: u32,
    /// Elements of the keys of a row.
    kv_cols: u32,
    /// The number of query heads.
    heads: u32,
    vocab: u32,
    /// Elements from one row of logits to the next.
    logit_pitch: u32,
    /// The number of rows of the logits buffer.
    logit_rows: u32,
    /// The number of rows of the activations.
    rows: u32,
    /// The maximum number of tokens of a chunk.
    chunk: u32,
    /// The constant that norms add to the mean square.
    eps: f32,
    /// The number of layers.
    layers: u32,
    /// The number of pages of the longest sequence.
    table_pages: u32,
    /// The window of each layer in tokens; `None` for full attention.
    windows: Vec<Option<u32>>,
    /// Whether each layer has rotary embedding.
    rotated: Vec<bool>,
    /// The soft caps of scores and of logits.
    soft_caps: SoftCaps,
    /// The experts of a mixture model; `None` for a dense one.
    mixture: Option<Mixture>,
    /// How queries and keys are normed.
    qk_norm: QkNorm,
    /// Whether attention and MLP read the same normed input.
    parallel_mlp: bool,
    /// The factors of embeddings, scores, of what is added to the residual stream, and of logits.
    factors: Factors,
}

/// The state of a row of a step.
#[derive(Clone, Debug)]
pub struct RowState<'a> {
    /// The id of its newest token.
    pub id: u32,
    /// The position of that token in its sequence.
    pub position: u32,
    /// The pages of its sequence.
    pub pages: &'a [u32],
    /// The hot page of its sequence in a packed cache.
    pub hot: u32,
    /// How the next token is sampled.
    pub sampling: RowSampling,
}

/// Kernels and buffers of a pass. Nothing is allocated after construction.
#[derive(Debug)]
pub struct Forward {
    ctx: ExecContext,
    kernels: Kernels,
    shape: Shape,
    hidden: DeviceBuffer<u16>,
    /// The normed input of a product; between two kernels also what is normed or scaled before it is added to `hidden`.
    normed: DeviceBuffer<u16>,
    qkv: DeviceBuffer<u16>,
    attended: DeviceBuffer<u16>,
    /// The product of gate and up, if its epilogue does not activate it.
    gate_up: DeviceBuffer<u16>,
    /// The product of up, if gate has a separate one.
    #[cfg(feature = "pipelines")]
    up: DeviceBuffer<u16>,
    active: DeviceBuffer<u16>,
    /// The router's logits, the chosen experts and their shares; for mixture models.
    router: DeviceBuffer<u16>,
    experts: DeviceBuffer<u32>,
    shares: DeviceBuffer<f32>,
    /// Fetches experts if the device does not hold all of them.
    fetcher: Option<Fetcher>,
    /// The number of rows of a step that have a token, as last set, and of those in the enqueued pass.
    live_rows: u32,
    pass_rows: u32,
    /// Whether rows of a step may be consecutive tokens of one sequence.
    verifies: bool,
    logits: DeviceBuffer<u16>,
    cache: KvStore,
    angles: LayerAngles,
    /// The state of a step, per row.
    ids: DeviceBuffer<u32>,
    positions: DeviceBuffer<u32>,
    tables: DeviceBuffer<u32>,
    sampling: Sampling,
    /// The token ids of a prompt chunk, and the page table of its sequence.
    prompt: DeviceBuffer<u32>,
    prompt_pages: DeviceBuffer<u32>,
}

fn view(buffer: &DeviceBuffer<u16>, rows: u32, cols: u32) -> Result<MatrixRef<'_>, LaunchError> {
    MatrixRef::new(buffer, rows, cols, cols.into())
}

fn view_mut(buffer: &mut DeviceBuffer<u16>, rows: u32, cols: u32) -> Result<MatrixMut<'_>, LaunchError> {
    MatrixMut::new(buffer, rows, cols, cols.into())
}

/// Whether a product is added to its output, or overwrites it.
const ADDS: bool = true;
const STORES: bool = false;

/// The router of a layer with its experts.
type RoutedExperts<'a> = (&'a Linear, &'a MixtureExperts);

/// Elements from one row of a router's logits to the next: rows start at multiples of 16 bytes.
fn router_pitch(mixture: Mixture) -> u32 {
    mixture.router_rows().next_multiple_of(8)
}

/// How experts and weights follow from the router's logits. What experts add is multiplied by `scale`.
fn router_config(mixture: Mixture, scale: f32) -> RouterConfig {
    let Mixture { top_k, normalized, rounded, shared, factor: routed_scale, .. } = mixture;
    let (shared, gated) = shared.map_or((0, false), |shared| (shared.parts, shared.gated));
    let cutoff = (mixture.scoring == Scoring::SparseMixer).then_some(mixture.cutoff);
    RouterConfig { top_k, normalized, rounded, shared, gated, scale, routed_scale, cutoff }
}

impl Forward {
    /// Allocates everything but the KV cache.
    ///
    /// # Errors
    /// [`DeviceError`] if the allocation fails.
    pub fn new(
        ctx: ExecContext,
        (kernels, cache): (Kernels, KvStore),
        config: &ModelConfig,
        options: &EngineOptions,
        memory: &Memory,
        products: Products,
    ) -> Result<Self, DeviceError> {
        let stream = ctx.stream().clone();
        let (rows, batch) = (memory::rows(options), options.step_rows());
        let shape = Shape {
            hidden: config.hidden,
            intermediate: config.dense_intermediate(),
            qkv_cols: config.qkv_rows(),
            attended_cols: config.heads * config.head_dim,
            kv_cols: config.kv_heads * config.head_dim,
            heads: config.heads,
            vocab: config.vocab,
            logit_pitch: config.vocab.next_multiple_of(LOGITS_MULTIPLE),
            logit_rows: memory::logit_rows(options),
            rows,
            chunk: options.chunk,
            eps: config.eps,
            layers: config.layers,
            table_pages: pages_for(memory.context),
            windows: config.window.clone(),
            rotated: config.rotated.clone(),
            soft_caps: config.soft_caps,
            mixture: config.mixture,
            qk_norm: config.qk_norm,
            parallel_mlp: config.parallel,
            factors: config.factors,
        };
        let (experts, top_k) = shape.mixture.map_or((0, 0), |mixture| (router_pitch(mixture), mixture.places()));
        let elements = |rows: u32, cols: u32| rows as usize * cols as usize;
        let zeroed = |rows: u32, cols: u32| DeviceBuffer::<u16>::zeroed(&stream, elements(rows, cols));
        let words = |len: usize| DeviceBuffer::<u32>::zeroed(&stream, len);
        Ok(Self {
            hidden: zeroed(rows, shape.hidden)?,
            normed: zeroed(rows, shape.hidden)?,
            qkv: zeroed(rows, shape.qkv_cols)?,
            attended: zeroed(rows, shape.attended_cols)?,
            gate_up: zeroed(if products == Products::Activated { 0 } else { rows }, 2 * shape.intermediate)?,
            #[cfg(feature = "pipelines")]
            up: zeroed(if products == Products::Stored { rows } else { 0 }, shape.intermediate)?,
            active: zeroed(rows, shape.intermediate)?,
            router: zeroed(rows, experts)?,
            experts: words(elements(rows, top_k))?,
            shares: DeviceBuffer::zeroed(&stream, elements(rows, top_k))?,
            fetcher: match (options.resident_experts, experts_shape(config)) {
                (Some(_), Some(experts)) => Some(Fetcher::new(&stream, experts, rows, top_k)?),
                _ => None,
            },
            live_rows: 0,
            pass_rows: 0,
            verifies: false,
            logits: zeroed(shape.logit_rows, shape.logit_pitch)?,
            cache,
            angles: LayerAngles::new(&stream, config, memory.context)?,
            ids: words(batch as usize)?,
            positions: words(batch as usize)?,
            tables: words(elements(batch, shape.table_pages))?,
            sampling: Sampling::new(&stream, batch, memory::adjusted_rows(options), shape.vocab)?,
            prompt: words(options.chunk as usize)?,
            prompt_pages: words(shape.table_pages as usize)?,
            ctx,
            kernels,
            shape,
        })
    }

    /// The execution context of all launches.
    pub fn context(&mut self) -> &mut ExecContext {
        &mut self.ctx
    }

    /// The stream of all launches.
    pub fn stream(&self) -> &Stream {
        self.ctx.stream()
    }

    /// The tokens that steps sample, one per row.
    pub fn ids(&self) -> &DeviceBuffer<u32> {
        &self.ids
    }

    /// The KV cache of all layers.
    pub fn cache(&mut self) -> &mut KvStore {
        &mut self.cache
    }

    /// The KV cache, if it is packed.
    pub fn packed_cache(&mut self) -> Option<&mut PackedCache> {
        self.cache.packed()
    }

    /// Enqueues the release of the BF16 units of pages that no sequence uses any more.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn release(&mut self, pages: &[u32]) -> Result<(), DeviceError> {
        match self.cache.packed() {
            Some(cache) => cache.release(&mut self.ctx, pages),
            None => Ok(()),
        }
    }

    /// The number of free BF16 units of a packed cache; `None` if the cache is BF16. Waits for the device.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn free_units(&mut self) -> Result<Option<u32>, DeviceError> {
        self.cache.packed().map(|cache| cache.free_units(self.ctx.stream())).transpose()
    }

    /// Whether a page of the last prompt is lost. Waits for the device if the cache is packed.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn prompt_is_lost(&mut self) -> Result<bool, DeviceError> {
        self.cache.packed().map_or(Ok(false), |cache| cache.prompt_is_lost(self.ctx.stream()))
    }

    /// Reads the logits of the first `rows` rows of the last step or chunk, `[rows, vocab]`. Waits for the device.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn read_logits(&self, rows: u32) -> Result<Vec<u16>, DeviceError> {
        let pitch = self.shape.logit_pitch as usize;
        let padded = self.logits.read(self.stream(), 0, rows as usize * pitch)?;
        let rows = padded.chunks_exact(pitch).map(|row| &row[..self.shape.vocab as usize]);
        Ok(rows.flatten().copied().collect())
    }

    /// The maximum number of rows of logits.
    pub fn logit_rows(&self) -> u32 {
        self.shape.logit_rows
    }

    /// The maximum number of tokens of a chunk.
    pub fn chunk_rows(&self) -> u32 {
        self.shape.chunk
    }

    /// Sets the rows of the following steps; further rows up to `bucket` have no token. Waits for the copies.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_rows(&mut self, rows: &[RowState<'_>], bucket: u32) -> Result<(), DeviceError> {
        let (bucket, table_pages) = (bucket as usize, self.shape.table_pages as usize);
        let mut ids = vec![0; bucket];
        let mut positions = vec![PAD_POSITION; bucket];
        let mut tables = vec![self.cache.padding(); bucket * table_pages];
        let mut hot = vec![0; bucket];
        for (at, row) in rows.iter().enumerate() {
            (ids[at], positions[at], hot[at]) = (row.id, row.position, row.hot);
            let table = &mut tables[at * table_pages..(at + 1) * table_pages];
            table[..row.pages.len()].copy_from_slice(row.pages);
        }
        // At most `bucket`.
        self.live_rows = rows.len() as u32;
        let stream = self.ctx.stream();
        if let Some(cache) = self.cache.packed() {
            cache.set_rows(stream, &hot)?;
        }
        self.ids.write(stream, 0, &ids)?;
        self.positions.write(stream, 0, &positions)?;
        self.tables.write(stream, 0, &tables)?;
        let sampling: Vec<RowSampling> = rows.iter().map(|row| row.sampling).collect();
        self.sampling.set_rows(stream, &sampling)
    }

    /// Sets whether rows of the steps that are enqueued from now on may be consecutive tokens of one sequence.
    pub fn set_verifies(&mut self, verifies: bool) {
        self.verifies = verifies;
    }

    /// Enqueues a step of `rows` rows through all layers.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn enqueue_step(&mut self, weights: &Weights, rows: u32) -> Result<(), DeviceError> {
        self.enqueue_phases(weights, rows, AllPhases)
    }

    /// Enqueues one phase of a step of `rows` rows, to measure it: its results mean nothing.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn enqueue_phase(&mut self, weights: &Weights, rows: u32, phase: StepPhase) -> Result<(), DeviceError> {
        self.enqueue_phases(weights, rows, Only(&[phase]))
    }

    fn enqueue_phases(&mut self, weights: &Weights, rows: u32, filter: impl PhaseFilter) -> Result<(), DeviceError> {
        self.pass_rows = self.live_rows.min(rows);
        if filter.has(StepPhase::Embed) {
            self.enqueue_embed(weights, 0..rows, Ids::Step)?;
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            if filter.has(StepPhase::Norm) {
                self.enqueue_input_norm(&layer.input_norm, rows)?;
            }
            if filter.has(StepPhase::Qkv) {
                self.enqueue_qkv(layer, rows)?;
            }
            if filter.has(StepPhase::Attention) {
                self.enqueue_attention(layer, index, rows)?;
            }
            self.enqueue_after_attention((layer, weights.layers.get(index + 1)), rows, filter)?;
        }
        self.enqueue_head(weights, 0, rows, filter)?;
        if filter.has(StepPhase::Sample) { self.enqueue_sample(rows) } else { Ok(()) }
    }

    /// The stream and the state of sampling.
    pub fn sampling(&mut self) -> (&Stream, &mut Sampling) {
        (self.ctx.stream(), &mut self.sampling)
    }

    /// Enqueues, after a step, the kernels that its rows request in addition to sampling.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn enqueue_sampling_extras(&mut self) -> Result<(), DeviceError> {
        let rows = self.sampling.extra_rows();
        if rows == 0 {
            return Ok(());
        }
        let Self { sampling, ctx, kernels, logits, shape, positions, ids, .. } = self;
        let logits = MatrixRef::new(logits, rows, shape.vocab, shape.logit_pitch.into())?;
        sampling.enqueue_extras(ctx, kernels, logits, positions, ids)
    }

    /// Enqueues the embeddings of `ids`, one per row of the residual stream in `rows`.
    pub(crate) fn enqueue_embed(&mut self, weights: &Weights, rows: Range<u32>, ids: Ids) -> Result<(), DeviceError> {
        let Some(table) = weights.embed_table() else { return Ok(()) };
        let ids = match ids {
            Ids::Step => &self.ids,
            Ids::Prompt => &self.prompt,
        };
        let cols = self.shape.hidden;
        let mut whole = view_mut(&mut self.hidden, rows.end, cols)?;
        let mut hidden = whole.part(rows, 0..cols)?;
        self.kernels.embed.enqueue(&mut self.ctx, ids, table, hidden.reborrow())?;
        self.kernels.scale(&mut self.ctx, hidden, self.shape.factors.embedding)
    }

    /// Enqueues the norm of what a layer reads, if `gamma` is given.
    pub(crate) fn enqueue_input_norm(
        &mut self,
        gamma: &Option<DeviceBuffer<u16>>,
        rows: u32,
    ) -> Result<(), DeviceError> {
        gamma.as_ref().map_or(Ok(()), |gamma| self.enqueue_norm(gamma, 0, rows))
    }

    /// Enqueues the norm of `rows` rows of `hidden` from `first` on, to the first rows of `normed`.
    fn enqueue_norm(&mut self, gamma: &DeviceBuffer<u16>, first: u32, rows: u32) -> Result<(), DeviceError> {
        let Shape { hidden, eps, .. } = self.shape;
        let x = view(&self.hidden, first + rows, hidden)?.part(first..first + rows, 0..hidden)?;
        let y = view_mut(&mut self.normed, rows, hidden)?;
        self.kernels.norm.enqueue(&mut self.ctx, x, gamma, eps, None, y)
    }

    pub(crate) fn enqueue_qkv(&mut self, layer: &Layer, rows: u32) -> Result<(), DeviceError> {
        let Shape { hidden, qkv_cols, attended_cols, kv_cols, eps, qk_norm, .. } = self.shape;
        let x = view(if layer.input_norm.is_some() { &self.normed } else { &self.hidden }, rows, hidden)?;
        let mut y = view_mut(&mut self.qkv, rows, qkv_cols)?;
        layer.qkv.enqueue(&mut self.ctx, x, y.reborrow(), Epilogue::Store)?;
        if qk_norm != QkNorm::Whole {
            return Ok(());
        }
        self.kernels.add_bias(&mut self.ctx, layer.qkv_bias.as_ref(), 1.0, y.reborrow())?;
        let keys = attended_cols..attended_cols + kv_cols;
        for (gamma, columns) in [(&layer.q_norm, 0..attended_cols), (&layer.k_norm, keys)] {
            let Some(gamma) = gamma else { continue };
            self.kernels.norm.enqueue_in_place(&mut self.ctx, y.part(0..rows, columns)?, gamma, eps)?;
        }
        Ok(())
    }

    /// Enqueues what follows attention in a layer: the output projection and the MLP. Experts of the `next` layer may
    /// be prefetched.
    pub(crate) fn enqueue_after_attention(
        &mut self,
        (layer, next): (&Layer, Option<&Layer>),
        rows: u32,
        filter: impl PhaseFilter,
    ) -> Result<(), DeviceError> {
        let Shape { hidden, intermediate, .. } = self.shape;
        if filter.has(StepPhase::Output) {
            let output = (&layer.o, layer.o_bias.as_ref());
            self.enqueue_residual_add(output, Added::Attention, layer.attention_norm.as_ref(), rows)?;
        }
        if filter.has(StepPhase::Norm) {
            self.enqueue_input_norm(&layer.post_norm, rows)?;
        }
        if let (Some(experts), Some(mixture)) = (layer.mlp.mixture(), self.shape.mixture) {
            let next = next.and_then(|next| next.mlp.mixture());
            return match filter.has(StepPhase::GateUp) {
                true => self.enqueue_mixture((experts, next), mixture, rows),
                false => Ok(()),
            };
        }
        let normed = self.shape.parallel_mlp || layer.post_norm.is_some();
        let x = view(if normed { &self.normed } else { &self.hidden }, rows, hidden)?;
        // Pipelines multiply weights in their stored encodings.
        let Some((gate_up, gated)) = layer.mlp.gate_up() else { return Ok(()) };
        if gated {
            if filter.has(StepPhase::GateUp) {
                let y = view_mut(&mut self.active, rows, intermediate)?;
                gate_up.enqueue(&mut self.ctx, x, y, Epilogue::SiluMul)?;
            }
        } else {
            if filter.has(StepPhase::GateUp) {
                let y = view_mut(&mut self.gate_up, rows, 2 * intermediate)?;
                gate_up.enqueue(&mut self.ctx, x, y, Epilogue::Store)?;
            }
            if filter.has(StepPhase::Activation) {
                let x = view(&self.gate_up, rows, 2 * intermediate)?;
                let y = view_mut(&mut self.active, rows, intermediate)?;
                self.kernels.silu_mul.enqueue(&mut self.ctx, x, y)?;
            }
        }
        match layer.mlp.down().filter(|_| filter.has(StepPhase::Down)) {
            Some(down) => self.enqueue_residual_add((down, None), Added::Mlp, layer.mlp_norm.as_ref(), rows),
            None => Ok(()),
        }
    }

    /// Enqueues a product that is added to the residual stream, normed or scaled if the model requires it. Its bias is
    /// added before a norm, otherwise to the residual stream.
    fn enqueue_residual_add(
        &mut self,
        (linear, bias): (&Linear, Option<&DeviceBuffer<u16>>),
        of: Added,
        norm: Option<&DeviceBuffer<u16>>,
        rows: u32,
    ) -> Result<(), DeviceError> {
        let Shape { hidden, intermediate, attended_cols, eps, factors, .. } = self.shape;
        let x = match of {
            Added::Attention => view(&self.attended, rows, attended_cols)?,
            Added::Mlp => view(&self.active, rows, intermediate)?,
        };
        let is_plain = norm.is_none() && factors.residual == 1.0;
        // What `normed` held has been multiplied, so until the next norm it can hold this product. A parallel MLP reads
        // it later, but families with one have plain sums only.
        let (y, epilogue) =
            if is_plain { (&mut self.hidden, Epilogue::StoreAdd) } else { (&mut self.normed, Epilogue::Store) };
        linear.enqueue(&mut self.ctx, x, view_mut(y, rows, hidden)?, epilogue)?;
        if norm.is_some() {
            self.kernels.add_bias(&mut self.ctx, bias, 1.0, view_mut(&mut self.normed, rows, hidden)?)?;
        }
        let (x, y) = (view(&self.normed, rows, hidden)?, view_mut(&mut self.hidden, rows, hidden)?);
        match (norm, &self.kernels.norm_add, &self.kernels.scale_add) {
            _ if is_plain => {}
            (Some(gamma), Some(kernel), _) => return kernel.enqueue(&mut self.ctx, x, gamma, eps, None, y),
            (None, _, Some(kernel)) => kernel.enqueue(&mut self.ctx, x, factors.residual, y)?,
            _ => return Err(LaunchError::Family { wanted: "a sum with the residual stream" }.into()),
        }
        let y = view_mut(&mut self.hidden, rows, hidden)?;
        self.kernels.add_bias(&mut self.ctx, bias, factors.residual, y)
    }

    /// Enqueues the experts that a router chooses; their output is added to the residual stream.
    fn enqueue_mixture(
        &mut self,
        ((router, experts), next): (RoutedExperts<'_>, Option<RoutedExperts<'_>>),
        mixture: Mixture,
        rows: u32,
    ) -> Result<(), DeviceError> {
        let (hidden, pitch) = (self.shape.hidden, router_pitch(mixture).into());
        let x = view(&self.normed, rows, hidden)?;
        let logits = MatrixMut::new(&mut self.router, rows, mixture.router_rows(), pitch)?;
        router.enqueue(&mut self.ctx, x, logits, Epilogue::Store)?;
        // Rows without a token come last, and nothing is fetched for them.
        let rows = if self.fetcher.is_some() { self.pass_rows } else { rows };
        if rows == 0 {
            return Ok(());
        }
        let logits = MatrixRef::new(&self.router, rows, mixture.router_rows(), pitch)?;
        let choice = router_config(mixture, self.shape.factors.residual);
        match experts {
            MixtureExperts::OnDevice(experts) => {
                let (ids, shares, ctx) = (&mut self.experts, &mut self.shares, &mut self.ctx);
                experts.choose(ctx.stream(), logits, choice, ids, shares)?;
                let (x, y) = (view(&self.normed, rows, hidden)?, view_mut(&mut self.hidden, rows, hidden)?);
                experts.enqueue(ctx, x, Routed { ids, weights: shares, top_k: choice.places() }, y, ADDS)
            }
            MixtureExperts::Offloaded(experts) => {
                let (ids, shares, stream) = (&mut self.experts, &mut self.shares, self.ctx.stream());
                experts.choose(stream, logits, choice, ids, shares)?;
                self.enqueue_offloaded((experts, next), choice, rows)
            }
        }
    }

    /// Enqueues offloaded experts, whose routing decision was enqueued, and prefetches experts of the next layer.
    fn enqueue_offloaded(
        &mut self,
        (experts, next): (&OffloadedExperts, Option<RoutedExperts<'_>>),
        choice: RouterConfig,
        rows: u32,
    ) -> Result<(), DeviceError> {
        let Some(fetcher) = &mut self.fetcher else {
            return Err(LaunchError::Source { takes: "experts on the device", got: "experts in host memory" }.into());
        };
        let (hidden, top_k) = (self.shape.hidden, choice.places());
        fetcher.begin(self.ctx.stream(), &self.experts, rows, top_k)?;
        let next = match next {
            Some((router, MixtureExperts::Offloaded(next))) if fetcher.predicts(rows) => Some((router, next)),
            _ => None,
        };
        if let Some((router, next)) = next {
            let (cols, pitch) = self.shape.mixture.map_or((0, 0), |of| (of.router_rows(), router_pitch(of)));
            let pitch = pitch.into();
            // The logits of this layer were read by its choice.
            let logits = MatrixMut::new(&mut self.router, rows, cols, pitch)?;
            router.enqueue(&mut self.ctx, view(&self.normed, rows, hidden)?, logits, Epilogue::Store)?;
            let logits = MatrixRef::new(&self.router, rows, cols, pitch)?;
            next.predict(self.ctx.stream(), logits, choice, fetcher)?;
        }
        let routed = Routed { ids: &self.experts, weights: &self.shares, top_k };
        let (x, y) = (view(&self.normed, rows, hidden)?, view_mut(&mut self.hidden, rows, hidden)?);
        experts.enqueue(&mut self.ctx, fetcher, x, routed, y, ADDS)?;
        next.map_or(Ok(()), |(_, next)| next.prefetch(fetcher))
    }

    /// Replaces the routing decisions of offloaded experts.
    pub(crate) fn replace_routing(&mut self, replace: Option<ReplaceRouting>) {
        if let Some(fetcher) = &mut self.fetcher {
            fetcher.replace_routing(replace);
        }
    }

    /// Returns the cost of fetching experts so far; `None` if the device holds all. Waits for copies in flight.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn expert_traffic(&mut self) -> Result<Option<ExpertTraffic>, DeviceError> {
        self.fetcher.as_mut().map(Fetcher::traffic).transpose()
    }

    /// Returns the cost of fetching experts without waiting: the durations of recent waits are not included.
    pub fn last_expert_traffic(&self) -> Option<ExpertTraffic> {
        self.fetcher.as_ref().map(Fetcher::last_traffic)
    }

    /// Enqueues the logits of `rows` rows of the residual stream, from `first` on.
    pub(crate) fn enqueue_head(
        &mut self,
        weights: &Weights,
        first: u32,
        rows: u32,
        filter: impl PhaseFilter,
    ) -> Result<(), DeviceError> {
        let Shape { hidden, vocab, logit_pitch, .. } = self.shape;
        if filter.has(StepPhase::Norm) {
            self.enqueue_norm(&weights.final_norm, first, rows)?;
        }
        if filter.has(StepPhase::Head) {
            let x = view(&self.normed, rows, hidden)?;
            let y = MatrixMut::new(&mut self.logits, rows, vocab, logit_pitch.into())?;
            weights.head.enqueue(&mut self.ctx, x, y, Epilogue::Store)?;
            let whole = view_mut(&mut self.logits, rows, logit_pitch)?;
            self.kernels.add_bias(&mut self.ctx, weights.head_bias.as_ref(), 1.0, whole)?;
            let whole = view_mut(&mut self.logits, rows, logit_pitch)?;
            self.kernels.scale(&mut self.ctx, whole, self.shape.factors.logits)?;
            let whole = view_mut(&mut self.logits, rows, logit_pitch)?;
            self.kernels.cap(&mut self.ctx, whole, self.shape.soft_caps.logits)?;
        }
        Ok(())
    }

    pub(crate) fn enqueue_sample(&mut self, rows: u32) -> Result<(), DeviceError> {
        let logits = MatrixRef::new(&self.logits, rows, self.shape.vocab, self.shape.logit_pitch.into())?;
        let (positions, ids) = (&mut self.positions, &mut self.ids);
        self.kernels.sample.enqueue(&mut self.ctx, logits, self.sampling.samples(), positions, ids)
    }

    /// Returns the buffers that the products of an MLP of `rows` rows read and write.
    ///
    /// # Errors
    /// [`LaunchError`] if the buffers have fewer rows.
    #[cfg(feature = "pipelines")]
    pub(crate) fn mlp(&mut self, rows: u32) -> Result<Mlp<'_>, LaunchError> {
        let Shape { hidden, intermediate, .. } = self.shape;
        Ok(Mlp {
            ctx: &mut self.ctx,
            silu_mul: &self.kernels.silu_mul,
            normed: view(&self.normed, rows, hidden)?,
            gate: view_mut(&mut self.gate_up, rows, intermediate)?,
            up: view_mut(&mut self.up, rows, intermediate)?,
            active: view_mut(&mut self.active, rows, intermediate)?,
            hidden: view_mut(&mut self.hidden, rows, hidden)?,
        })
    }

    /// Lets cuBLAS select its fastest algorithm for each of its products in a step of `rows` rows. Waits.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver or cuBLAS fails.
    pub fn tune(&mut self, weights: &Weights, rows: u32) -> Result<(), DeviceError> {
        let Shape { hidden, intermediate, qkv_cols, attended_cols, vocab, logit_pitch, .. } = self.shape;
        let all = |of: fn(&Layer) -> Option<&Linear>| -> Vec<MatrixRef<'_>> {
            // A few layers are read from memory, not from caches, as surely as all are.
            let whole = weights.layers.iter().take(8).filter_map(|layer| of(layer)?.bf16_weights());
            whole.map(DeviceMatrix::view).collect()
        };
        let [qkv, o] = [all(|layer| Some(&layer.qkv)), all(|layer| Some(&layer.o))];
        let [gate_up, down] = [all(|layer| Some(layer.mlp.gate_up()?.0)), all(|layer| layer.mlp.down())];
        let Self { ctx, normed, qkv: heads, attended, gate_up: gated, active, hidden: residual, .. } = self;
        type Buffer = DeviceBuffer<u16>;
        let mut tune = |weights: &[MatrixRef<'_>], (x, k): (&Buffer, u32), (y, n): (&mut Buffer, u32), adds: bool| {
            // No layer has this product in BF16, or another kernel computes it.
            if !weights.is_empty() && !y.is_empty() {
                ctx.cublas()?.tune(view(x, rows, k)?, weights, view_mut(y, rows, n)?, adds)?;
            }
            Ok::<(), DeviceError>(())
        };
        tune(&qkv, (&*normed, hidden), (heads, qkv_cols), STORES)?;
        tune(&o, (&*attended, attended_cols), (&mut *residual, hidden), ADDS)?;
        tune(&gate_up, (&*normed, hidden), (gated, 2 * intermediate), STORES)?;
        tune(&down, (&*active, intermediate), (residual, hidden), ADDS)?;
        if let Some(head) = weights.head.bf16_weights() {
            let x = view(&self.normed, rows, hidden)?;
            let y = MatrixMut::new(&mut self.logits, rows, vocab, logit_pitch.into())?;
            self.ctx.cublas()?.tune(x, &[head.view()], y, STORES)?;
        }
        Ok(())
    }
}

/// The activations of an MLP, and the context of the stream that a step begins on.
#[cfg(feature = "pipelines")]
pub(crate) struct Mlp<'a> {
    pub ctx: &'a mut ExecContext,
    pub silu_mul: &'a unweight_rt::raw::ops::silu_mul::SiluMul,
    pub normed: MatrixRef<'a>,
    pub gate: MatrixMut<'a>,
    pub up: MatrixMut<'a>,
    pub active: MatrixMut<'a>,
    pub hidden: MatrixMut<'a>,
}

/// The origin of a product that is added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Added {
    Attention,
    Mlp,
}

/// The ids to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ids {
    /// The newest tokens of the rows of a step.
    Step,
    /// The tokens of a chunk of a prompt.
    Prompt,
}
