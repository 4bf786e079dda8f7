//! Experts of which only some are on the device. All are in pinned host memory. A layer has slots for a few experts on
//! the device, and fetches experts that the router chooses and that are missing. Packed experts are compact in host
//! memory, which takes 10 % less of the link's time; a kernel expands them to the packed tiles of their slot.
//!
//! ```text
//! ids --to the host--> slots: hits, misses, waves --lists--> products of a wave --> ... --combine--> y
//!                                    \--copies of weights--> staging --expand--> slots of a wave
//! x --router of the next layer--> expected ids --to the host--> copies to slots of the next layer
//! ```
//! The host needs the routing decision before it can copy experts, so [`OffloadedExperts::enqueue`] waits for it and
//! cannot be captured. The host also builds the lists that [`Experts`] builds on the device, with slots in place of
//! experts. The products use the same kernels, and neither slot nor wave changes the bits of a row. One launch after
//! the last wave adds up the rows of all waves in the order of a token's places, so the result has the same bits as
//! that of [`Experts`].
//!
//! A step takes about as long as its copies, and without prefetching the link is idle while a layer computes and the
//! host waits for its router. So:
//! - Experts in slots are multiplied while others are copied. All gates and ups are copied before all downs, so that
//!   the first product of a wave runs during the second half of its copies.
//! - While a layer runs, [`OffloadedExperts::predict`] evaluates the router of the next layer on the input of this one,
//!   and [`OffloadedExperts::prefetch`] copies the first expected expert that is missing: the link is idle for about
//!   one expert per layer. A wrong guess costs this copy and changes no bits. If most guesses are wrong,
//!   [`Fetcher::predicts`] stops them.
//!
//! Escape lists stay on the device, the packed and the compact ones, each at most about 1 % of the weights: heads refer
//! to them from any slot.

mod expected;
mod host;
mod link;
#[doc(hidden)]
pub mod pieces;
pub mod slots;

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use serde::Serialize;
use unweight_format::raw::packed::Unpackable;

pub use self::host::HostEncoding;
pub(in crate::layer) use self::link::Link;
use self::{
    expected::Expected,
    host::{Counts, Encode, HostWeights},
    slots::{Slots, Wave},
};
use crate::{
    device::{
        ContextSize, DeviceBuffer, DeviceError, Event, KernelSet, LaunchError, LaunchMode, Mark, MatrixMut, MatrixRef,
        Pinned, Stream, Transfer,
    },
    exec::{ExecContext, context::ContextParts},
    layer::experts::{CHUNK_TOKENS, Experts, ExpertsShape, Routed, RouterConfig, Run},
    ops::gemm_grouped::{Items, Lists},
    weight::ExpertWeights,
};

/// The number of words in an item.
const ITEM_WORDS: usize = 4;
/// The bytes that are prefetched per layer, rounded down to whole experts, but at least one: what a link of 50 GB/s
/// copies in 80 us, about the time between the copies of two layers.
const PREFETCH_BYTES: u64 = 4 << 20;

/// Hits and misses of the slots, and the cost of the misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ExpertTraffic {
    /// Chosen experts that were already on the GPU or on their way, per step and layer.
    pub hits: u64,
    /// Chosen experts that were fetched after they were chosen.
    pub misses: u64,
    /// Experts that were fetched because the next layer was expected to choose them.
    pub prefetched: u64,
    /// Those of them that the layer then chose; they are hits.
    pub prefetch_hits: u64,
    /// Fetched bytes.
    pub bytes: u64,
    /// The number of times that products waited for experts.
    pub stalls: u64,
    /// The duration of these waits in microseconds, from the routing decision or the end of earlier products.
    pub stalled_us: f64,
}

impl ExpertTraffic {
    /// Returns the difference from the earlier counts `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
            prefetched: self.prefetched.saturating_sub(before.prefetched),
            prefetch_hits: self.prefetch_hits.saturating_sub(before.prefetch_hits),
            bytes: self.bytes.saturating_sub(before.bytes),
            stalls: self.stalls.saturating_sub(before.stalls),
            stalled_us: (self.stalled_us - before.stalled_us).max(0.0),
        }
    }
}

impl fmt::Display for ExpertTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hits, misses, prefetched, prefetch_hits, bytes, stalls, stalled_us } = self;
        let (gb, ms) = (*bytes as f64 / 1e9, stalled_us / 1e3);
        write!(
            f,
            "experts: {hits} hits, {misses} misses, {prefetch_hits} of {prefetched} prefetched experts used, \
             {gb:.2} GB fetched, {stalls} waits of {ms:.1} ms together"
        )
    }
}

/// The experts of a mixture in host memory, with slots on the device for some of them.
///
/// Only one stream may run it, because only the order of that stream protects the slots that an earlier call filled.
#[derive(Debug)]
pub struct OffloadedExperts {
    /// The shape of all experts.
    shape: ExpertsShape,
    host: [HostWeights; 2],
    link: Arc<Link>,
    /// The prefetched experts are on the device.
    arrived: Mark,
    /// The products of the last call have read the slots.
    read: Mark,
    /// The slots as experts. Declared after `host`, so that copies are waited for before the slots are dropped.
    resident: Experts,
    slots: Mutex<Slots>,
}

impl OffloadedExperts {
    /// Moves weights, laid out as for [`Experts::new`], to the host, and allocates `slots` experts on the device. All
    /// layers may share a link. `encode` makes packed weights compact. Waits.
    ///
    /// # Errors
    /// As [`Experts::new`]; or too little host memory can be pinned.
    pub(in crate::layer) fn new(
        kernels: &KernelSet,
        (stream, link): (&Stream, &Arc<Link>),
        shape: ExpertsShape,
        slots: u32,
        [gate_up, down]: [ExpertWeights; 2],
        encode: Encode<'_>,
    ) -> Result<Self, DeviceError> {
        shape.check_weights(kernels, &gate_up, &down)?;
        let slots = slots.clamp(1, shape.experts);
        // Below 2^32, like the number of rows of all experts.
        let [wide, narrow] =
            [2 * shape.intermediate, shape.hidden].map(|rows| Counts { rows, experts: shape.experts, slots });
        let wide = HostWeights::take(stream, link, gate_up, wide, encode)?;
        let narrow = HostWeights::take(stream, link, down, narrow, encode)?;
        let on_device = ExpertsShape { experts: slots, ..shape };
        Ok(Self {
            shape,
            host: [wide.0, narrow.0],
            link: link.clone(),
            arrived: Mark::new(stream.device())?,
            read: Mark::new(stream.device())?,
            resident: Experts::new(kernels, on_device, wide.1, narrow.1)?,
            slots: Mutex::new(Slots::new(shape.experts, slots)),
        })
    }

    /// Returns the sizes of all experts.
    pub fn shape(&self) -> ExpertsShape {
        self.shape
    }

    /// Returns the number of experts that fit on the device.
    pub fn slots(&self) -> u32 {
        self.resident.shape().experts
    }

    /// Returns the size of the weights on the device in bytes, without the staging buffers, which all
    /// layers share.
    pub fn bytes(&self) -> u64 {
        self.resident.bytes() + self.host.iter().map(HostWeights::device_bytes).sum::<u64>()
    }

    /// Returns the size of the staging buffers on the device in bytes; all layers share them.
    #[doc(hidden)]
    pub fn link_bytes() -> u64 {
        Link::BYTES as u64
    }

    /// Returns the size of the weights in host memory in bytes.
    pub fn host_bytes(&self) -> u64 {
        self.host.iter().map(HostWeights::bytes).sum()
    }

    /// Returns the size of the compact weights in host memory in bytes.
    #[doc(hidden)]
    pub fn host_compact_bytes(&self) -> u64 {
        let compact = self.host.iter().filter(|host| host.encoding() == HostEncoding::Compact);
        compact.map(HostWeights::bytes).sum()
    }

    /// Returns how gate and up, and down, are encoded in host memory.
    pub fn host_encodings(&self) -> [HostEncoding; 2] {
        self.host.each_ref().map(HostWeights::encoding)
    }

    /// Returns the bytes that a fetch of an expert copies; of a compact expert, they depend on its weights.
    #[doc(hidden)]
    pub fn fetch_bytes(&self, expert: u32) -> u64 {
        self.host.iter().map(|host| host.fetch_bytes(expert)).sum()
    }

    /// Returns why gate and up, and down, are BF16, as [`Experts::unpackable`] does.
    pub fn unpackable(&self) -> [Option<Unpackable>; 2] {
        self.resident.unpackable()
    }

    /// Returns the context size that [`OffloadedExperts::enqueue`] needs.
    pub fn context_size(&self, tokens: u32, top_k: u32) -> ContextSize {
        self.shape.context_size(tokens, top_k)
    }

    /// Sets the correction bias of the router, as [`Experts::set_correction`] does.
    #[doc(hidden)]
    pub fn set_correction(&mut self, bias: DeviceBuffer<f32>) {
        self.resident.set_correction(bias);
    }

    /// Enqueues the routing decision, as [`Experts::choose`] does.
    ///
    /// # Errors
    /// As [`Experts::choose`].
    pub fn choose(
        &self,
        stream: &Stream,
        logits: MatrixRef<'_>,
        choice: RouterConfig,
        ids: &mut DeviceBuffer<u32>,
        weights: &mut DeviceBuffer<f32>,
    ) -> Result<(), DeviceError> {
        self.resident.router().choose(stream, logits, self.shape.experts, choice, (ids, weights))
    }

    /// Enqueues the routing decision that these experts, of the next layer, are expected to get; `logits` are those of
    /// their router for an earlier input. To be called between [`Fetcher::begin`] and [`OffloadedExperts::enqueue`] of
    /// the layer before, so that it runs while the host plans that layer.
    ///
    /// # Errors
    /// As [`Experts::choose`]; more tokens than [`Fetcher::predicts`] accepts.
    #[doc(hidden)]
    pub fn predict(
        &self,
        stream: &Stream,
        logits: MatrixRef<'_>,
        choice: RouterConfig,
        fetcher: &mut Fetcher,
    ) -> Result<(), DeviceError> {
        let count = logits.rows() as usize * choice.places() as usize;
        let Expected { ids, weights, .. } = &mut fetcher.expected;
        self.choose(stream, logits, choice, ids, weights)?;
        fetcher.expected.begin(stream, count)
    }

    /// Enqueues copies of experts that [`OffloadedExperts::predict`] expects and that are missing, behind the copies of
    /// the layer before. Waits for the prediction. Does nothing without one.
    ///
    /// # Errors
    /// A driver error.
    #[doc(hidden)]
    pub fn prefetch(&self, fetcher: &mut Fetcher) -> Result<(), DeviceError> {
        let Some(expected) = fetcher.expected.wait(self.shape.experts)? else { return Ok(()) };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let each = self.host_bytes() / u64::from(self.shape.experts);
        let copies = slots.prefetch(&expected, (PREFETCH_BYTES / each.max(1)).max(1) as usize);
        if copies.is_empty() {
            return Ok(());
        }
        // `read`: the products of the pass before have read the slots.
        let enqueued = self.link.wait(&self.read).and_then(|()| {
            for (expert, slot) in &copies {
                for (host, weights) in self.host.iter().zip(self.resident.weights()) {
                    fetcher.traffic.bytes += host.fetch(&self.link, *expert, weights, *slot)?;
                }
            }
            self.link.record(&self.arrived)
        });
        if enqueued.is_err() {
            // It is unknown how much was enqueued.
            slots.clear();
        }
        fetcher.traffic.prefetched += copies.len() as u64;
        fetcher.expected.note_prefetched(copies.iter().map(|(expert, _)| *expert));
        enqueued
    }

    /// Returns the weights in the slots: gate and up, and down. For tests.
    #[doc(hidden)]
    pub fn slot_weights(&self) -> [&ExpertWeights; 2] {
        self.resident.weights()
    }

    /// Returns the slot of an expert; its fetch may still run. For tests.
    #[doc(hidden)]
    pub fn slot_of(&self, expert: u32) -> Option<u32> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).slot_of(expert)
    }

    /// Overwrites and forgets all experts on the device, so that a product that does not wait for its fetch computes a
    /// wrong result. For tests. Waits.
    ///
    /// # Errors
    /// A driver error.
    #[doc(hidden)]
    pub fn poison(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.slots.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        self.link.poison(stream, byte)?;
        self.resident.fill(stream, byte)?;
        stream.synchronize()
    }

    /// Enqueues the experts as [`Experts::enqueue`] does, with the same bits, and fetches missing experts. Waits for
    /// the contents of `routed`, and therefore for all earlier work; cannot be captured.
    ///
    /// # Errors
    /// As [`Experts::enqueue`]; [`LaunchError::Fetching`] during a capture; more tokens or places than `fetcher` was
    /// created for.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        fetcher: &mut Fetcher,
        x: MatrixRef<'_>,
        routed: Routed<'_>,
        y: MatrixMut<'_>,
        adds: bool,
    ) -> Result<(), DeviceError> {
        let at = routed.check(x.rows(), self.resident.device())?;
        ctx.size().check(self.context_size(x.rows(), routed.top_k))?;
        if ctx.stream().is_capturing()? {
            return Err(LaunchError::Fetching.into());
        }
        let ContextParts { stream, workspace, .. } = ctx.parts();
        let scratch = (workspace.partials.address(), workspace.partials.len() as u64);
        let descs = (x.desc(), y.desc());
        self.resident.check_operands(self.shape, descs, routed.top_k, scratch)?;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        for run in Run::all(self.shape, descs, at, scratch.0, adds) {
            let first = run.first as usize * routed.top_k as usize;
            let pairs = run.pairs() as usize;
            let mut ids = fetcher.read(stream, routed.ids, first, pairs)?;
            if let Some(ReplaceRouting(replace)) = &mut fetcher.replace {
                replace(&mut ids[..pairs]);
            }
            let plan = Plan::new(&ids[..pairs], &mut slots, self.shape.experts, run.tile);
            fetcher.traffic.prefetch_hits += fetcher.expected.check(&plan.waves);
            fetcher.ids = Some(ids);
            // SAFETY: the operands were checked, and the lists name pairs of this run and existing slots.
            let enqueued = unsafe { self.waves(stream, fetcher, &run, &plan) };
            if let Err(error) = enqueued {
                // It is unknown how much was enqueued.
                slots.clear();
                return Err(error);
            }
        }
        Ok(())
    }

    /// # Safety
    /// The operands of `run` were checked, and `plan` was made for its pairs and these slots.
    unsafe fn waves(&self, stream: &Stream, fetcher: &mut Fetcher, run: &Run, plan: &Plan) -> Result<(), DeviceError> {
        let mut stream = stream.clone();
        // No kernel starts before all earlier work, copies included, is done.
        stream.set_mode(LaunchMode { serialized: true, ..stream.mode() });
        // Earlier products read their lists before these overwrite them: both are on one stream.
        let lists = fetcher.send(&stream, plan)?;
        if plan.waves.iter().any(|wave| !wave.copies.is_empty()) {
            // `slots_read`: earlier products have read the slots before copies overwrite them.
            stream.record(&fetcher.slots_read)?;
            self.link.wait(&fetcher.slots_read)?;
        }
        // The first copies run during products of experts in slots.
        let first_copies = plan.waves.iter().take_while(|wave| wave.behind.is_none()).count();
        for (at, wave) in plan.waves.iter().enumerate().take(first_copies) {
            self.copy(fetcher, at, wave)?;
        }
        for (at, (wave, items)) in plan.waves.iter().zip(&plan.items).enumerate() {
            if at >= first_copies {
                self.copy(fetcher, at, wave)?;
            }
            let address = lists.items + (items.start * ITEM_WORDS * size_of::<u32>()) as u64;
            let of_wave = Items::Lists(Lists { items: address, count: items.len() as u32, ..lists });
            let marks = fetcher.marks(at)?;
            // `gate_up`, `down`: the products read slots after the fetches. Marks of a link are reached in order, so a
            // later mark also stands for prefetched experts.
            let (gate_up, down) = match (wave.copies.is_empty(), wave.arriving) {
                (false, _) => (Some(&marks.gate_up), Some(&marks.down)),
                (true, true) => (Some(&self.arrived), None),
                (true, false) => (None, None),
            };
            let mut stalls = Vec::new();
            let mut wait = |mark: Option<&Mark>| -> Result<(), DeviceError> {
                let Some(mark) = mark else { return Ok(()) };
                let from = stream.event()?;
                stream.wait(mark)?;
                stalls.push((from, stream.event()?));
                Ok(())
            };
            wait(gate_up)?;
            // SAFETY: the caller's promise. The lists name pairs of the run and slots; they are dropped after the work.
            unsafe { self.resident.multiply_gate_up(&stream, run, of_wave) }?;
            wait(down)?;
            // SAFETY: as above.
            unsafe { self.resident.multiply_down(&stream, run, of_wave) }?;
            // `done`: see above, and `wave.behind`.
            stream.record(&marks.done)?;
            fetcher.note_wave(wave, stalls);
        }
        stream.record(&self.read)?;
        // SAFETY: as above. Rows of pairs without an expert are not read.
        unsafe { self.resident.router().combine(&stream, &run.route) }
    }

    /// Enqueues the copies of a wave: gate and up of all its experts, then down.
    fn copy(&self, fetcher: &mut Fetcher, at: usize, wave: &Wave) -> Result<(), DeviceError> {
        if wave.copies.is_empty() {
            return Ok(());
        }
        if let Some(reader) = wave.behind {
            // `done` of that wave: it and all earlier waves have read the overwritten slots.
            self.link.wait(&fetcher.marks(reader)?.done)?;
        }
        for part in [0, 1] {
            for &(expert, slot) in &wave.copies {
                let weights = self.resident.weights()[part];
                fetcher.traffic.bytes += self.host[part].fetch(&self.link, expert, weights, slot)?;
            }
            let WaveMarks { gate_up, down, .. } = fetcher.marks(at)?;
            self.link.record([gate_up, down][part])?;
        }
        Ok(())
    }
}

/// The products of some pairs of tokens and places.
struct Plan {
    waves: Vec<Wave>,
    /// The range of items of each wave.
    items: Vec<Range<usize>>,
    /// All items, followed by the pairs sorted by wave and expert.
    words: Vec<u32>,
}

impl Plan {
    /// Plans the pairs with these expert ids; skips ids that are not experts. As in `sort`, pairs of an expert keep
    /// their order, and only the last item of an expert may be smaller than a tile.
    fn new(ids: &[u32], slots: &mut Slots, experts: u32, tile: u32) -> Self {
        let mut counts = vec![0u32; experts as usize];
        for id in ids {
            if let Some(count) = counts.get_mut(*id as usize) {
                *count += 1;
            }
        }
        let requested: Vec<u32> = (0..experts).filter(|expert| counts[*expert as usize] > 0).collect();
        let waves = slots.step(&requested);
        let (mut items, mut words, mut first) = (Vec::new(), Vec::new(), 0);
        // By expert: the index of its next pair.
        let mut next = vec![0u32; experts as usize];
        for wave in &waves {
            let begin = words.len() / ITEM_WORDS;
            for &(expert, slot) in &wave.experts {
                let count = counts[expert as usize];
                next[expert as usize] = first;
                for done in (0..count).step_by(tile as usize) {
                    words.extend([slot, first + done, (count - done).min(tile), 0]);
                }
                first += count;
            }
            items.push(begin..words.len() / ITEM_WORDS);
        }
        let begin = words.len();
        words.resize(begin + first as usize, 0);
        for (pair, id) in (0u32..).zip(ids) {
            if let Some(row) = next.get_mut(*id as usize) {
                words[begin + *row as usize] = pair;
                *row += 1;
            }
        }
        Self { waves, items, words }
    }

    /// Returns the number of words before the pairs.
    fn item_words(&self) -> usize {
        self.items.last().map_or(0, |last| last.end) * ITEM_WORDS
    }
}

type Replace = dyn FnMut(&mut [u32]) + Send;

/// Replaces the routing decisions of a [`Fetcher`].
#[doc(hidden)]
pub struct ReplaceRouting(Box<Replace>);

impl ReplaceRouting {
    /// `replace` overwrites the expert ids of each call, those of a token one after the other.
    pub fn new(replace: impl FnMut(&mut [u32]) + Send + 'static) -> Self {
        Self(Box::new(replace))
    }
}

impl fmt::Debug for ReplaceRouting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplaceRouting")
    }
}

/// The events of a wave.
#[derive(Debug)]
struct WaveMarks {
    /// Gate and up of its experts are on the device.
    gate_up: Mark,
    /// Down of its experts is on the device.
    down: Mark,
    /// Its products are done.
    done: Mark,
}

/// The memory and counters for fetching, shared by all layers.
#[derive(Debug)]
pub struct Fetcher {
    /// Marks the end of work enqueued before a call.
    slots_read: Mark,
    marks: Vec<WaveMarks>,
    /// The expert ids on the host, or on their way.
    ids: Option<Pinned<u32>>,
    reading: Option<Transfer<u32>>,
    /// The prediction for the next layer.
    expected: Expected,
    replace: Option<ReplaceRouting>,
    /// The lists of the last call on the device.
    lists: DeviceBuffer<u32>,
    list_transfer: Option<Transfer<u32>>,
    /// Start and end of waits whose duration was not read yet.
    stall_events: Vec<(Event, Event)>,
    traffic: ExpertTraffic,
    pairs: usize,
}

impl Fetcher {
    /// Creates a fetcher for batches of up to `tokens` tokens with `top_k` experts each.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(stream: &Stream, shape: ExpertsShape, tokens: u32, top_k: u32) -> Result<Self, DeviceError> {
        let device = stream.device();
        let words = Self::words(shape, tokens, top_k);
        let mark = || Mark::new(device);
        let marks = || Ok::<_, DeviceError>(WaveMarks { gate_up: mark()?, down: mark()?, done: mark()? });
        Ok(Self {
            slots_read: Mark::new(device)?,
            // With one slot, each expert is a wave.
            marks: (0..=shape.experts).map(|_| marks()).collect::<Result<_, _>>()?,
            ids: None,
            reading: None,
            expected: Expected::new(stream, tokens, top_k)?,
            replace: None,
            lists: DeviceBuffer::zeroed(stream, words)?,
            list_transfer: None,
            stall_events: Vec::new(),
            traffic: ExpertTraffic::default(),
            pairs: pairs(tokens, top_k),
        })
    }

    /// Returns the size of a fetcher's device memory in bytes.
    pub fn bytes(shape: ExpertsShape, tokens: u32, top_k: u32) -> u64 {
        Self::words(shape, tokens, top_k) as u64 * 4 + Expected::bytes(tokens, top_k)
    }

    /// Returns whether a prediction for a batch of `tokens` is likely to be worth its copies: for small batches, unless
    /// most recent predictions were wrong. Then one in a few is still tried.
    #[doc(hidden)]
    pub fn predicts(&mut self, tokens: u32) -> bool {
        self.replace.is_none() && self.expected.is_wanted(tokens)
    }

    /// Replaces routing decisions, for measurements; nothing is predicted then.
    #[doc(hidden)]
    pub fn replace_routing(&mut self, replace: Option<ReplaceRouting>) {
        self.replace = replace;
    }

    /// Starts to copy the routing decision of the first tokens to the host, as many as are processed at once. Work that
    /// is enqueued between this and [`OffloadedExperts::enqueue`] with these ids runs while the host plans.
    ///
    /// # Errors
    /// More ids than the fetcher was created for, or a driver error.
    #[doc(hidden)]
    pub fn begin(
        &mut self,
        stream: &Stream,
        ids: &DeviceBuffer<u32>,
        tokens: u32,
        top_k: u32,
    ) -> Result<(), DeviceError> {
        // Waits for the copy before, if it was not used.
        self.reading = None;
        self.reading = Some(self.start(stream, ids, 0, pairs(tokens, top_k))?);
        Ok(())
    }

    fn marks(&self, wave: usize) -> Result<&WaveMarks, DeviceError> {
        let (value, limit) = (wave as u64, self.marks.len() as u64);
        self.marks.get(wave).ok_or_else(|| LaunchError::TooLarge { what: "waves", value, limit }.into())
    }

    /// Counts a wave, and the waits of its products.
    fn note_wave(&mut self, wave: &Wave, stalls: Vec<(Event, Event)>) {
        self.traffic.hits += (wave.experts.len() - wave.copies.len()) as u64;
        self.traffic.misses += wave.copies.len() as u64;
        self.traffic.stalls += u64::from(!stalls.is_empty());
        self.stall_events.extend(stalls);
    }

    /// Returns the words of the longest lists: almost every pair may have its own item.
    fn words(shape: ExpertsShape, tokens: u32, top_k: u32) -> usize {
        let pairs = pairs(tokens, top_k);
        pairs + ITEM_WORDS * (pairs.min(shape.experts as usize) + pairs / 8)
    }

    /// Returns the counts so far. Waits for running copies.
    ///
    /// # Errors
    /// A driver error.
    pub fn traffic(&mut self) -> Result<ExpertTraffic, DeviceError> {
        self.read_stall_times()?;
        Ok(self.traffic)
    }

    /// Returns the counts so far without waiting; durations of recent waits are not included.
    #[doc(hidden)]
    pub fn last_traffic(&self) -> ExpertTraffic {
        self.traffic
    }

    /// Copies the expert ids to the host, unless [`Fetcher::begin`] did. Waits for them.
    fn read(
        &mut self,
        stream: &Stream,
        ids: &DeviceBuffer<u32>,
        first: usize,
        count: usize,
    ) -> Result<Pinned<u32>, DeviceError> {
        let begun = self.reading.take().filter(|_| first == 0);
        let pinned = match begun {
            Some(transfer) => transfer,
            None => self.start(stream, ids, first, count)?,
        };
        let pinned = pinned.wait()?;
        // The stream has passed these waits.
        self.read_stall_times()?;
        Ok(pinned)
    }

    fn start(
        &mut self,
        stream: &Stream,
        ids: &DeviceBuffer<u32>,
        first: usize,
        count: usize,
    ) -> Result<Transfer<u32>, DeviceError> {
        if count > self.pairs {
            let (need, have) = (count as u64, self.pairs as u64);
            return Err(LaunchError::Room { buffer: "the pairs of a fetcher", need, have }.into());
        }
        let pinned = match self.ids.take() {
            Some(pinned) => pinned,
            None => Pinned::zeroed(stream.device(), self.pairs)?,
        };
        ids.read_front_later(stream, first, pinned, count)
    }

    fn read_stall_times(&mut self) -> Result<(), DeviceError> {
        for (from, to) in self.stall_events.drain(..) {
            self.traffic.stalled_us += from.elapsed_us(&to)?;
        }
        Ok(())
    }

    /// Enqueues the copy of a plan's lists to the device.
    fn send(&mut self, stream: &Stream, plan: &Plan) -> Result<Lists, DeviceError> {
        let mut pinned = match self.list_transfer.take() {
            // Already done: the host has since waited for a later routing decision.
            Some(transfer) => transfer.wait()?,
            None => Pinned::zeroed(stream.device(), self.lists.len())?,
        };
        let (need, have) = (plan.words.len() as u64, pinned.len() as u64);
        let target = pinned.get_mut(..plan.words.len());
        target.ok_or(LaunchError::Room { buffer: "the lists of a fetcher", need, have })?.copy_from_slice(&plan.words);
        self.list_transfer = Some(self.lists.write_later(stream, 0, pinned, plan.words.len())?);
        let items = self.lists.address();
        Ok(Lists { items, pairs: items + (plan.item_words() * 4) as u64, count: 0 })
    }
}

/// Returns the pairs of this many tokens.
fn pairs(tokens: u32, top_k: u32) -> usize {
    tokens.min(CHUNK_TOKENS) as usize * top_k as usize
}

#[cfg(test)]
mod tests {
    use unweight_format::testing::Random;

    use super::*;

    /// Returns the slot that the lists assign to each pair.
    fn slots_of(plan: &Plan, tile: u32, pairs: usize) -> Vec<Option<u32>> {
        let mut slots = vec![None; pairs];
        let list = &plan.words[plan.item_words()..];
        let mut next = 0;
        for (wave, items) in plan.waves.iter().zip(&plan.items) {
            for item in plan.words[..plan.item_words()].chunks_exact(ITEM_WORDS).take(items.end).skip(items.start) {
                let [slot, first, entries, 0] = *item else { panic!("{item:?}") };
                assert_eq!(first, next, "entries without gaps");
                assert!((1..=tile).contains(&entries));
                assert!(wave.experts.iter().any(|(_, other)| *other == slot), "the slot must belong to the wave");
                for pair in &list[first as usize..(first + entries) as usize] {
                    assert_eq!(slots[*pair as usize].replace(slot), None, "pair {pair} twice");
                }
                next += entries;
            }
        }
        assert_eq!(list.len(), next as usize);
        slots
    }

    #[test]
    fn every_pair_is_multiplied_once_by_its_expert() {
        let mut random = Random::new(3);
        for (experts, count) in [(8, 2), (8, 8), (60, 7), (128, 1), (512, 40)] {
            let mut slots = Slots::new(experts, count);
            let shape = ExpertsShape { experts, hidden: 64, intermediate: 64 };
            for tokens in [1, 2, 9, 64, 150, 700] {
                for tile in [8, 64] {
                    let ids: Vec<u32> = (0..tokens * 2)
                        .map(|pair| match random.below(9) {
                            0 => u32::MAX - pair,
                            _ => random.below(experts.into()) as u32,
                        })
                        .collect();
                    let plan = Plan::new(&ids, &mut slots, experts, tile);
                    assert!(plan.words.len() <= Fetcher::words(shape, tokens, 2), "{experts} experts, {tokens} tokens");
                    let found = slots_of(&plan, tile, ids.len());
                    for (id, slot) in ids.iter().zip(found) {
                        let assigned =
                            plan.waves.iter().flat_map(|wave| &wave.experts).find(|(expert, _)| expert == id);
                        assert_eq!(slot, assigned.map(|(_, slot)| *slot), "expert {id}");
                        assert_eq!(slot.is_some(), *id < experts);
                    }
                }
            }
        }
    }

    #[test]
    fn a_batch_without_experts_has_no_work() {
        let plan = Plan::new(&[u32::MAX, 8], &mut Slots::new(8, 2), 8, 8);
        assert!(plan.waves.is_empty() && plan.words.is_empty() && plan.item_words() == 0);
    }
}
