//! Experts of which only some are on the device. All of them are packed in pinned host memory. A layer has slots for a
//! few on the device, and fetches those that a router chooses when they are missing.
//!
//! ```text
//! ids --to the host--> slots: hits, misses, waves --lists--> products of a wave --> ... --combine--> y
//!                                    \--copies of packed tiles, on a stream of their own--> slots of a wave
//! ```
//! The host has to know what was chosen before it can say what is to be copied, so [`OffloadedExperts::enqueue`] waits
//! for the choice, and cannot be captured. The lists that [`Experts`] makes on the device it makes itself, with slots
//! in the place of experts: the products are the same kernels, and neither a slot nor a wave changes the bits of a row.
//! One launch after the last wave adds up the rows of all waves in the order of a token's places, so the bits are those
//! of [`Experts`].
//!
//! The lists of escapes, about a hundredth of the weights at most, stay on the device: heads name them wherever a tile
//! is.

pub mod slots;

use std::{
    fmt,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use serde::Serialize;
use unweight_format::{TileGrid, raw::packed};

use self::slots::{Slots, Wave};
use crate::{
    device::{
        ContextSize, DeviceBuffer, DeviceError, Event, KernelSet, LaunchError, LaunchMode, Mark, MatrixMut, MatrixRef,
        Pinned, Stream, Transfer, pinned::Source,
    },
    exec::{ExecContext, context::ContextParts},
    layer::experts::{CHUNK_TOKENS, Experts, ExpertsShape, Routed, RouterConfig, Run},
    ops::gemm_grouped::Lists,
    weight::DevicePacked,
};

/// Words of an item.
const ITEM_WORDS: usize = 4;

/// Hits and misses of the slots, and the cost of the misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ExpertTraffic {
    /// Chosen experts on the GPU, per step and layer.
    pub hits: u64,
    /// Chosen experts fetched.
    pub misses: u64,
    /// Bytes fetched.
    pub bytes: u64,
    /// Waits of products for experts.
    pub stalls: u64,
    /// Their time, us, from the choice of experts or the end of earlier products.
    pub stalled_us: f64,
}

impl ExpertTraffic {
    /// The counts since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
            bytes: self.bytes.saturating_sub(before.bytes),
            stalls: self.stalls.saturating_sub(before.stalls),
            stalled_us: (self.stalled_us - before.stalled_us).max(0.0),
        }
    }
}

impl fmt::Display for ExpertTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hits, misses, bytes, stalls, stalled_us } = self;
        let (gb, ms) = (*bytes as f64 / 1e9, stalled_us / 1e3);
        write!(f, "experts: {hits} hits, {misses} misses, {gb:.2} GB fetched, {stalls} waits of {ms:.1} ms together")
    }
}

/// The packed matrices of all experts in host memory.
#[derive(Debug)]
struct HostPacked {
    tiles: Source<u8>,
    heads: Source<u32>,
    /// Tiles of an expert.
    each: usize,
}

impl HostPacked {
    /// What is on the device, and room for `slots` experts of `rows` rows there. Waits.
    fn take(
        stream: &Stream,
        copies: &Stream,
        weights: DevicePacked,
        rows: u32,
        slots: u32,
    ) -> Result<(Self, DevicePacked), DeviceError> {
        let (device, cols) = (stream.device(), weights.grid().cols());
        let tiles = Pinned::zeroed(device, weights.packed().len())?;
        let tiles = weights.packed().read_later(stream, 0, tiles)?.wait()?;
        let heads = Pinned::zeroed(device, weights.escape_heads().len())?;
        let heads = weights.escape_heads().read_later(stream, 0, heads)?.wait()?;
        let each = TileGrid::new(rows as usize, cols)?.tiles();
        let all = (rows as usize).checked_mul(slots as usize).ok_or(LaunchError::TooLarge {
            what: "rows of slots",
            value: slots.into(),
            limit: u32::MAX.into(),
        })?;
        let room = weights.into_room(stream, TileGrid::new(all, cols)?)?;
        Ok((Self { tiles: Source::new(copies, tiles), heads: Source::new(copies, heads), each }, room))
    }

    fn bytes(&self) -> u64 {
        self.tiles.bytes() + self.heads.bytes()
    }

    /// Enqueues copies of an expert's tiles and heads; their bytes.
    fn copy(&self, expert: u32, to: &DevicePacked, slot: u32) -> Result<u64, DeviceError> {
        let (expert, slot) = (expert as usize, slot as usize);
        let (bytes, words) = (self.each * packed::TILE_BYTES, self.each * packed::ROW_BLOCKS);
        self.tiles.copy(expert * bytes, bytes, to.packed(), slot * bytes)?;
        self.heads.copy(expert * words, words, to.escape_heads(), slot * words)?;
        Ok((bytes + words * size_of::<u32>()) as u64)
    }
}

/// The experts of a mixture, packed in host memory, with slots on the device for some of them.
///
/// One stream runs it: what an earlier call has left in the slots is ordered by that stream alone.
#[derive(Debug)]
pub struct OffloadedExperts {
    /// Of all experts.
    shape: ExpertsShape,
    host: [HostPacked; 2],
    /// The stream of the copies.
    copies: Stream,
    /// The slots, as experts of their own: behind what is copied from, so that copies are waited for before they go.
    resident: Experts,
    slots: Mutex<Slots>,
}

impl OffloadedExperts {
    /// Takes weights as [`Experts::new`] does to the host, and makes room for `slots` experts on the device. `copies`
    /// is the stream that will fetch them; one may serve all layers. Waits.
    ///
    /// # Errors
    /// As [`Experts::new`]; not enough host memory that can be pinned.
    pub fn new(
        kernels: &KernelSet,
        (stream, copies): (&Stream, &Stream),
        shape: ExpertsShape,
        slots: u32,
        gate_up: DevicePacked,
        down: DevicePacked,
    ) -> Result<Self, DeviceError> {
        shape.check_weights(kernels, &gate_up, &down)?;
        let slots = slots.clamp(1, shape.experts);
        // Below 2^32: the rows of all experts are.
        let wide = HostPacked::take(stream, copies, gate_up, 2 * shape.intermediate, slots)?;
        let narrow = HostPacked::take(stream, copies, down, shape.hidden, slots)?;
        let own = ExpertsShape { experts: slots, ..shape };
        Ok(Self {
            shape,
            host: [wide.0, narrow.0],
            copies: copies.clone(),
            resident: Experts::new(kernels, own, wide.1, narrow.1)?,
            slots: Mutex::new(Slots::new(shape.experts, slots)),
        })
    }

    /// The sizes of all experts.
    pub fn shape(&self) -> ExpertsShape {
        self.shape
    }

    /// Experts that the device has room for.
    pub fn slots(&self) -> u32 {
        self.resident.shape().experts
    }

    /// Bytes of its weights on the device.
    pub fn bytes(&self) -> u64 {
        self.resident.bytes()
    }

    /// Bytes of its weights in host memory.
    pub fn host_bytes(&self) -> u64 {
        self.host.iter().map(HostPacked::bytes).sum()
    }

    /// Memory that [`OffloadedExperts::enqueue`] needs from an execution context.
    pub fn context_size(&self, tokens: u32, top_k: u32) -> ContextSize {
        self.shape.context_size(tokens, top_k)
    }

    /// Enqueues a router's choice, as [`Experts::choose`] does.
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

    /// Overwrites and forgets all experts on the device, so that a product that does not wait for its fetch gives a
    /// wrong result. Waits.
    ///
    /// # Errors
    /// An error of the driver.
    #[doc(hidden)]
    pub fn poison(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.slots.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        self.copies.synchronize()?;
        self.resident.fill(stream, byte)?;
        stream.synchronize()
    }

    /// As [`Experts::enqueue`], with the same bits: fetches what is missing. Waits for what `routed` holds, and so for
    /// all that was enqueued before; it cannot be captured.
    ///
    /// # Errors
    /// As [`Experts::enqueue`]; [`LaunchError::Fetching`] in a capture; more tokens or places than `fetcher` was made
    /// for.
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
        let places = (x.place(), y.place());
        self.resident.check_operands(self.shape, places, routed.top_k, scratch)?;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        for run in Run::all(self.shape, places, at, scratch.0, adds) {
            let first = run.first as usize * routed.top_k as usize;
            let pairs = run.pairs() as usize;
            let ids = fetcher.read(stream, routed.ids, first, pairs)?;
            let plan = Plan::new(&ids[..pairs], &mut slots, self.shape.experts, run.tile);
            fetcher.ids = Some(ids);
            // SAFETY: the operands were checked, and the lists name pairs of this run and slots that there are.
            let enqueued = unsafe { self.waves(stream, fetcher, &run, &plan) };
            if let Err(error) = enqueued {
                // How much was enqueued is unknown.
                slots.clear();
                return Err(error);
            }
        }
        Ok(())
    }

    /// # Safety
    /// The operands of `run` were checked, and `plan` is of its pairs and these slots.
    unsafe fn waves(&self, stream: &Stream, fetcher: &mut Fetcher, run: &Run, plan: &Plan) -> Result<(), DeviceError> {
        let mut stream = stream.clone();
        // No kernel starts before the work in front of it, copies included, is done.
        stream.set_mode(LaunchMode { ordinary: true, ..stream.mode() });
        // Products of an earlier call have read their lists before these overwrite them: one stream has both.
        let lists = fetcher.send(&stream, plan)?;
        let Fetcher { begun, marks, waits, traffic, .. } = fetcher;
        if plan.waves.iter().any(|wave| !wave.copies.is_empty()) {
            // `begun`: products of earlier calls have read the slots before anything is copied over them.
            stream.record(begun)?;
            self.copies.wait(begun)?;
        }
        for ((wave, items), (there, done)) in plan.waves.iter().zip(&plan.items).zip(&*marks) {
            traffic.hits += (wave.experts.len() - wave.copies.len()) as u64;
            traffic.misses += wave.copies.len() as u64;
            if !wave.copies.is_empty() {
                let from = stream.event()?;
                if let Some((_, read)) = wave.behind.and_then(|reader| marks.get(reader)) {
                    // `done` of that wave: it and those before it have read what is overwritten now.
                    self.copies.wait(read)?;
                }
                for &(expert, slot) in &wave.copies {
                    for (host, room) in self.host.iter().zip(self.resident.weights()) {
                        traffic.bytes += host.copy(expert, room, slot)?;
                    }
                }
                // `there`: the products of this wave read its slots behind the copies.
                self.copies.record(there)?;
                stream.wait(there)?;
                waits.push((from, stream.event()?));
                traffic.stalls += 1;
            }
            let at = lists.items + (items.start * ITEM_WORDS * size_of::<u32>()) as u64;
            let own = Lists { items: at, count: items.len() as u32, ..lists };
            // SAFETY: the caller's promise. The lists name pairs of the run and slots; they go behind the work.
            unsafe { self.resident.multiply(&stream, run, own) }?;
            // `done`: see above, and `wave.behind`.
            stream.record(done)?;
        }
        // SAFETY: as above. Rows of pairs without an expert are not read.
        unsafe { self.resident.router().combine(&stream, &run.route) }
    }
}

/// What is done for some pairs of tokens and places.
struct Plan {
    waves: Vec<Wave>,
    /// Items of each wave.
    items: Vec<Range<usize>>,
    /// All items, then the pairs, sorted by wave and expert.
    words: Vec<u32>,
}

impl Plan {
    /// Of the expert of each pair; what is none is left out. As `sort` does, pairs of an expert stay in their order,
    /// and items are whole but the last of each expert.
    fn new(ids: &[u32], slots: &mut Slots, experts: u32, tile: u32) -> Self {
        let mut counts = vec![0u32; experts as usize];
        for id in ids {
            if let Some(count) = counts.get_mut(*id as usize) {
                *count += 1;
            }
        }
        let wanted: Vec<u32> = (0..experts).filter(|expert| counts[*expert as usize] > 0).collect();
        let waves = slots.step(&wanted);
        let (mut items, mut words, mut first) = (Vec::new(), Vec::new(), 0);
        // By expert: where its next pair goes.
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
            if let Some(place) = next.get_mut(*id as usize) {
                words[begin + *place as usize] = pair;
                *place += 1;
            }
        }
        Self { waves, items, words }
    }

    /// Words in front of the pairs.
    fn item_words(&self) -> usize {
        self.items.last().map_or(0, |last| last.end) * ITEM_WORDS
    }
}

/// The memory and the counters that fetching needs, shared by all layers.
#[derive(Debug)]
pub struct Fetcher {
    /// What was enqueued before a call.
    begun: Mark,
    /// By wave: its experts are there, and its products are done.
    marks: Vec<(Mark, Mark)>,
    /// What was chosen, on the host.
    ids: Option<Pinned<u32>>,
    /// Lists of the last call, on the device; and on their way there.
    lists: DeviceBuffer<u32>,
    sent: Option<Transfer<u32>>,
    /// Ends of waits whose time was not read yet.
    waits: Vec<(Event, Event)>,
    traffic: ExpertTraffic,
    pairs: usize,
}

impl Fetcher {
    /// Room for batches of up to `tokens` tokens with `top_k` experts each.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(stream: &Stream, shape: ExpertsShape, tokens: u32, top_k: u32) -> Result<Self, DeviceError> {
        let device = stream.device();
        let words = Self::words(shape, tokens, top_k);
        let marks = || Ok::<_, DeviceError>((Mark::new(device)?, Mark::new(device)?));
        Ok(Self {
            begun: Mark::new(device)?,
            // With one slot a wave for each expert.
            marks: (0..=shape.experts).map(|_| marks()).collect::<Result<_, _>>()?,
            ids: None,
            lists: DeviceBuffer::zeroed(stream, words)?,
            sent: None,
            waits: Vec::new(),
            traffic: ExpertTraffic::default(),
            pairs: pairs(tokens, top_k),
        })
    }

    /// Bytes that a fetcher takes on the device.
    pub fn bytes(shape: ExpertsShape, tokens: u32, top_k: u32) -> u64 {
        Self::words(shape, tokens, top_k) as u64 * 4
    }

    /// Of the longest lists: each pair may have an item of its own, or almost so.
    fn words(shape: ExpertsShape, tokens: u32, top_k: u32) -> usize {
        let pairs = pairs(tokens, top_k);
        pairs + ITEM_WORDS * (pairs.min(shape.experts as usize) + pairs / 8)
    }

    /// The counts so far. Waits for running copies.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn traffic(&mut self) -> Result<ExpertTraffic, DeviceError> {
        self.read_waits()?;
        Ok(self.traffic)
    }

    /// The choice, on the host. Waits for it.
    fn read(
        &mut self,
        stream: &Stream,
        ids: &DeviceBuffer<u32>,
        first: usize,
        count: usize,
    ) -> Result<Pinned<u32>, DeviceError> {
        if count > self.pairs {
            let (need, have) = (count as u64, self.pairs as u64);
            return Err(LaunchError::Room { buffer: "the pairs of a fetcher", need, have }.into());
        }
        let pinned = match self.ids.take() {
            Some(pinned) => pinned,
            None => Pinned::zeroed(stream.device(), self.pairs)?,
        };
        let pinned = ids.read_front_later(stream, first, pinned, count)?.wait()?;
        // The stream has come past them.
        self.read_waits()?;
        Ok(pinned)
    }

    fn read_waits(&mut self) -> Result<(), DeviceError> {
        for (from, to) in self.waits.drain(..) {
            self.traffic.stalled_us += from.elapsed_us(&to)?;
        }
        Ok(())
    }

    /// Enqueues the lists of a plan to the device.
    fn send(&mut self, stream: &Stream, plan: &Plan) -> Result<Lists, DeviceError> {
        let mut pinned = match self.sent.take() {
            // Long there: the host has waited for a choice behind it.
            Some(transfer) => transfer.wait()?,
            None => Pinned::zeroed(stream.device(), self.lists.len())?,
        };
        let (need, have) = (plan.words.len() as u64, pinned.len() as u64);
        let room = pinned.get_mut(..plan.words.len());
        room.ok_or(LaunchError::Room { buffer: "the lists of a fetcher", need, have })?.copy_from_slice(&plan.words);
        self.sent = Some(self.lists.write_later(stream, 0, pinned, plan.words.len())?);
        let items = self.lists.address();
        Ok(Lists { items, pairs: items + (plan.item_words() * 4) as u64, count: 0 })
    }
}

/// Of so many tokens.
fn pairs(tokens: u32, top_k: u32) -> usize {
    tokens.min(CHUNK_TOKENS) as usize * top_k as usize
}

#[cfg(test)]
mod tests {
    use unweight_format::testing::Random;

    use super::*;

    /// What a list says of each pair: its slot.
    fn slots_of(plan: &Plan, tile: u32, pairs: usize) -> Vec<Option<u32>> {
        let mut slots = vec![None; pairs];
        let list = &plan.words[plan.item_words()..];
        let mut next = 0;
        for (wave, items) in plan.waves.iter().zip(&plan.items) {
            for item in plan.words[..plan.item_words()].chunks_exact(ITEM_WORDS).take(items.end).skip(items.start) {
                let [slot, first, entries, 0] = *item else { panic!("{item:?}") };
                assert_eq!(first, next, "entries without gaps");
                assert!((1..=tile).contains(&entries));
                assert!(wave.experts.iter().any(|(_, own)| *own == slot), "a slot of another wave");
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
                        let own = plan.waves.iter().flat_map(|wave| &wave.experts).find(|(expert, _)| expert == id);
                        assert_eq!(slot, own.map(|(_, slot)| *slot), "expert {id}");
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
