//! Builds the step graph of a model's layers.

use std::collections::HashMap;

use super::{
    Buffer, Job, Mlp, Pipeline, Place, Projection, Step, StepGraph,
    clock::{Clock, Clocks, Point},
    is_hard,
};

/// The parameters of a step graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The number of slots for decoded weights, 1 to 4. One slot is read while the others are filled.
    pub slots: u8,
    /// The number of streams that multiply in hard layers: 1, or 2 to run up in parallel with gate.
    pub consumers: u8,
    /// The number of multiprocessors of the device.
    pub sms: u32,
    /// The number of multiprocessors that decode while the others multiply, in a step graph with hard layers.
    pub decode_sms: u32,
    /// The rule that assigns slots to hard layers.
    pub rule: SlotRule,
}

impl Default for Layout {
    /// The report's layout: two slots, two consumers, and a sixth of an H200's multiprocessors for decoding.
    fn default() -> Self {
        Self { slots: 2, consumers: 2, sms: 132, decode_sms: 22, rule: SlotRule::Rank }
    }
}

/// The rule that assigns slots to hard layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRule {
    /// The rank of the layer among hard layers, modulo the number of slots.
    Rank,
    /// The report's rule (its section 9.3): half the layer's index, modulo 2. Two adjacent hard layers may get the same
    /// slot; the second is then decoded before the first was read. [`check`](super::check()) rejects such graphs; the
    /// rule exists to demonstrate this.
    HalfOfLayer,
}

impl SlotRule {
    fn slot(self, rank: usize, layer: u32, slots: u8) -> u8 {
        match self {
            Self::Rank => (rank % usize::from(slots)) as u8,
            Self::HalfOfLayer => (layer / 2 % 2) as u8,
        }
    }
}

/// The reason why a step graph cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The number of slots is out of range.
    #[error("{0} slots are not supported; use 1 to 4")]
    Slots(u8),
    /// The number of consumers is out of range.
    #[error("{0} streams that multiply are not supported; use 1 or 2")]
    Consumers(u8),
    /// The report's slot rule needs two slots.
    #[error("the report's slot rule requires 2 slots, not {0}")]
    HalfOfLayer(u8),
    /// The division leaves no multiprocessors for products or for decoders.
    #[error(
        "{decode_sms} of {sms} multiprocessors decode; at least {least} must, one per projection, and one must multiply"
    )]
    Partition {
        /// Multiprocessors that decode.
        decode_sms: u32,
        /// Multiprocessors of the device.
        sms: u32,
        /// The smallest number that can decode.
        least: u32,
    },
}

/// Builds the step graph of a model with these layers.
///
/// # Errors
/// [`BuildError`] if the layout is out of range.
///
/// ```
/// use unweight_engine::raw::pipelines::step_graph::{Layout, Pipeline, build, check};
/// let hard = [Pipeline::Exponents, Pipeline::Exponents, Pipeline::Raw];
/// let easy = [Pipeline::Palette, Pipeline::Palette, Pipeline::Raw];
/// let graph = build(&[[Pipeline::Raw; 3], easy, hard, easy, hard], &Layout::default())?;
/// assert_eq!((graph.streams, check(&graph)), (8, Ok(())));
/// # Ok::<(), unweight_engine::raw::pipelines::step_graph::BuildError>(())
/// ```
pub fn build(layers: &[Mlp], layout: &Layout) -> Result<StepGraph, BuildError> {
    let Layout { slots, consumers, sms, decode_sms, rule } = *layout;
    if !(1..=4).contains(&slots) {
        return Err(BuildError::Slots(slots));
    }
    if !(1..=2).contains(&consumers) {
        return Err(BuildError::Consumers(consumers));
    }
    if rule == SlotRule::HalfOfLayer && slots != 2 {
        return Err(BuildError::HalfOfLayer(slots));
    }
    let hard: Vec<u32> = (0..).zip(layers).filter(|(_, mlp)| is_hard(mlp)).map(|(layer, _)| layer).collect();
    let decoded =
        Projection::ALL.map(|projection| layers.iter().any(|mlp| mlp[projection as usize].decodes().is_some()));
    let decoded_count = decoded.iter().filter(|decoded| **decoded).count() as u32;
    if decoded_count > 0 && !(decoded_count..sms).contains(&decode_sms) || sms == 0 {
        return Err(BuildError::Partition { decode_sms, sms, least: decoded_count });
    }
    let ranks = hard.iter().enumerate().map(|(rank, layer)| (*layer, rank)).collect();
    let mut builder = Builder {
        layers,
        layout,
        ranks,
        streams: if hard.is_empty() { 1 } else { 2 + 3 * slots },
        share_sms: decode_sms.checked_div(decoded_count).unwrap_or(0),
        jobs: Vec::new(),
        clocks: Clocks::new(2 + 3 * slots),
        forked: vec![false; 2 + 3 * usize::from(slots)],
        buffers: HashMap::new(),
        decoders: HashMap::new(),
        waits_for_begin: false,
        events: 0,
    };
    for layer in hard.iter().take(usize::from(slots) - 1) {
        builder.decode(*layer);
    }
    builder.run(0, Job::Embed, vec![Buffer::Ids], vec![Buffer::Hidden]);
    for (layer, mlp) in (0..).zip(layers) {
        if let Some(next) = builder.ranks.get(&layer).and_then(|rank| hard.get(rank + usize::from(slots) - 1)) {
            builder.decode(*next);
        }
        builder.attention(layer);
        builder.mlp(layer, mlp);
    }
    builder.norm(None);
    builder.run(0, Job::Head, vec![Buffer::Normed], vec![Buffer::Logits, Buffer::Workspace(0)]);
    builder.run(0, Job::Sample, vec![Buffer::Logits], vec![Buffer::Ids]);
    Ok(builder.finish())
}

/// A job, and the jobs that it waits for.
struct Enqueued {
    stream: u8,
    job: Job,
    reads: Vec<Buffer>,
    writes: Vec<Buffer>,
    waits: Vec<Source>,
    point: Point,
    /// The clock that the job's event records.
    clock: Clock,
    event: Option<u32>,
}

/// The origin of an event that is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The beginning of the step.
    Begin,
    /// A job, by its index.
    Job(usize),
}

/// The last users of a buffer.
#[derive(Default)]
struct Users {
    writer: Option<usize>,
    /// Jobs that read the buffer since it was written.
    readers: Vec<usize>,
}

struct Builder<'a> {
    layers: &'a [Mlp],
    layout: &'a Layout,
    /// The ranks of hard layers.
    ranks: HashMap<u32, usize>,
    streams: u8,
    /// The number of multiprocessors of one projection's decoders.
    share_sms: u32,
    jobs: Vec<Enqueued>,
    clocks: Clocks,
    forked: Vec<bool>,
    buffers: HashMap<Buffer, Users>,
    /// The decoders by layer and projection.
    decoders: HashMap<(u32, Projection), usize>,
    /// Whether any job waits for the beginning.
    waits_for_begin: bool,
    events: u32,
}

impl Builder<'_> {
    fn slot(&self, layer: u32) -> u8 {
        let rank = self.ranks.get(&layer).copied().unwrap_or_default();
        self.layout.rule.slot(rank, layer, self.layout.slots)
    }

    /// Enqueues the decoders of a hard layer, each on its own stream.
    fn decode(&mut self, layer: u32) {
        let slot = self.slot(layer);
        for projection in Projection::ALL {
            let Some(output) = self.layers[layer as usize][projection as usize].decodes() else { continue };
            let writes = vec![Buffer::Slot(slot, projection), Buffer::Share(projection)];
            let stream = 2 + 3 * slot + projection as u8;
            let job = self.run(stream, Job::Decode { layer, projection, output, slot }, Vec::new(), writes);
            self.decoders.insert((layer, projection), job);
        }
    }

    fn norm(&mut self, of: Option<(u32, Place)>) {
        self.run(0, Job::Norm(of), vec![Buffer::Hidden], vec![Buffer::Normed]);
    }

    fn attention(&mut self, layer: u32) {
        self.norm(Some((layer, Place::Attention)));
        self.run(0, Job::Qkv { layer }, vec![Buffer::Normed], vec![Buffer::Qkv, Buffer::Workspace(0)]);
        self.run(0, Job::Attention { layer }, vec![Buffer::Qkv], vec![Buffer::Cache(layer), Buffer::Attended]);
        self.run(0, Job::Output { layer }, vec![Buffer::Attended], vec![Buffer::Hidden, Buffer::Workspace(0)]);
    }

    fn mlp(&mut self, layer: u32, mlp: &Mlp) {
        let [gate, up, _] = *mlp;
        self.norm(Some((layer, Place::Mlp)));
        if (gate, up) == (Pipeline::Packed, Pipeline::Packed) {
            self.run(0, Job::GateUp { layer }, vec![Buffer::Normed], vec![Buffer::Gate, Buffer::Workspace(0)]);
        } else {
            let up_stream = if is_hard(mlp) && self.layout.consumers == 2 { 1 } else { 0 };
            self.linear(0, layer, Projection::Gate, Buffer::Normed, Buffer::Gate);
            self.linear(up_stream, layer, Projection::Up, Buffer::Normed, Buffer::Up);
            self.run(0, Job::Activate { layer }, vec![Buffer::Up], vec![Buffer::Gate]);
        }
        self.linear(0, layer, Projection::Down, Buffer::Gate, Buffer::Hidden);
    }

    fn linear(&mut self, stream: u8, layer: u32, projection: Projection, x: Buffer, y: Buffer) {
        let pipeline = self.layers[layer as usize][projection as usize];
        let slot = pipeline.decodes().map(|_| self.slot(layer));
        let mut reads = vec![x];
        reads.extend(slot.map(|slot| Buffer::Slot(slot, projection)));
        self.run(stream, Job::Linear { layer, projection, pipeline, slot }, reads, vec![y, Buffer::Workspace(stream)]);
    }

    /// Enqueues a job after all jobs that it must not overtake, with as few waits as possible. Returns its index.
    fn run(&mut self, stream: u8, job: Job, reads: Vec<Buffer>, writes: Vec<Buffer>) -> usize {
        let mut dependencies: Vec<usize> = Vec::new();
        for buffer in &reads {
            // A product waits for its own decoder, whichever job wrote the slot since.
            let decoder = match (buffer, job) {
                (Buffer::Slot(..), Job::Linear { layer, projection, .. }) => self.decoders.get(&(layer, projection)),
                _ => None,
            };
            dependencies.extend(decoder.copied().or_else(|| self.buffers.get(buffer)?.writer));
        }
        for users in writes.iter().filter_map(|buffer| self.buffers.get(buffer)) {
            dependencies.extend(users.writer.iter().chain(&users.readers));
        }
        dependencies.sort_unstable();
        dependencies.dedup();
        dependencies.retain(|job| !self.clocks.of(stream).includes(self.jobs[*job].point));
        // A job that another needed job already follows is waited for implicitly.
        let is_implied = |job: usize| {
            dependencies.iter().any(|other| *other != job && self.jobs[*other].clock.includes(self.jobs[job].point))
        };
        let mut waits: Vec<Source> =
            dependencies.iter().filter(|job| !is_implied(**job)).map(|job| Source::Job(*job)).collect();
        let forked = &mut self.forked[usize::from(stream)];
        if stream != 0 && !*forked && waits.is_empty() {
            waits.push(Source::Begin);
            self.waits_for_begin = true;
        }
        *forked = true;
        for wait in &waits {
            let Source::Job(job) = *wait else { continue };
            self.jobs[job].event.get_or_insert_with(|| {
                self.events += 1;
                self.events
            });
            self.clocks.merge(stream, &self.jobs[job].clock);
        }
        let index = self.jobs.len();
        for buffer in &reads {
            self.buffers.entry(*buffer).or_default().readers.push(index);
        }
        for buffer in &writes {
            self.buffers.insert(*buffer, Users { writer: Some(index), readers: Vec::new() });
        }
        let point = self.clocks.run(stream);
        let clock = self.clocks.of(stream).clone();
        self.jobs.push(Enqueued { stream, job, reads, writes, waits, point, clock, event: None });
        index
    }

    /// Returns the steps in the host's order: each job after its waits, its event directly after it.
    fn finish(self) -> StepGraph {
        let Layout { slots, sms, decode_sms, .. } = *self.layout;
        let multiply_sms = if self.share_sms == 0 { sms } else { sms - decode_sms };
        // Event 0 is the beginning of the step, if a job waits for it.
        let shift = u32::from(!self.waits_for_begin);
        let mut steps = Vec::new();
        if self.waits_for_begin {
            steps.push(Step::Record { stream: 0, event: 0 });
        }
        // Whether the last entry of a stream is a kernel that a programmatic dependent may follow.
        let mut chained = vec![false; usize::from(self.streams)];
        let events: Vec<Option<u32>> = self.jobs.iter().map(|job| job.event.map(|event| event - shift)).collect();
        for (enqueued, event) in self.jobs.into_iter().zip(&events) {
            let Enqueued { stream, job, reads, writes, waits, .. } = enqueued;
            for wait in &waits {
                let event = match wait {
                    Source::Begin => Some(0),
                    Source::Job(job) => events[*job],
                };
                steps.extend(event.map(|event| Step::Wait { stream, event }));
            }
            let ordinary = job.is_ordinary();
            let dependent = chained[usize::from(stream)] && waits.is_empty() && !ordinary;
            let sms = if matches!(job, Job::Decode { .. }) { self.share_sms } else { multiply_sms };
            steps.push(Step::Run { stream, job, reads, writes, sms, dependent });
            steps.extend(event.map(|event| Step::Record { stream, event }));
            chained[usize::from(stream)] = !ordinary && event.is_none();
        }
        let hard = self.layers.iter().map(|mlp| mlp.map(Pipeline::decodes)).collect();
        let events = self.events + 1 - shift;
        StepGraph { steps, streams: self.streams, events, slots: if self.streams == 1 { 0 } else { slots }, sms, hard }
    }
}
