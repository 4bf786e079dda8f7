//! Checks a step graph: proves from its entries, with vector clocks and slots as automata, that it may run.
//!
//! If two entries touch the same memory and one writes, streams and events must order them. An event must be recorded
//! before a stream waits for it, because CUDA ignores a wait for an event that was never recorded. The device can
//! therefore follow the host's order, and nothing can hang.

use std::collections::{HashMap, HashSet};

use unweight_codegen::spec::DecodeOutput;

use super::{
    Buffer, Job, Projection, Step, StepGraph,
    clock::{Clocks, Point},
};

/// The content of a slot's buffer: the layer, and the encoding that its projection was decoded to.
pub type Held = (u32, DecodeOutput);

/// A fault of a step graph. Entries are counted from 0 in the host's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Two entries touch the same memory, one writes, and nothing orders them.
    #[error("steps {first} and {second} race for {buffer:?}: the second must wait for an event after the first")]
    Race {
        /// The entry that is enqueued first.
        first: usize,
        /// The other entry.
        second: usize,
        /// The memory that both touch.
        buffer: Buffer,
    },
    /// An entry names a stream, an event or a slot that the step graph does not have.
    #[error("step {step} names a stream, event or slot that the step graph does not have")]
    OutOfRange {
        /// The index of the entry.
        step: usize,
    },
    /// A job touches memory that its entry does not name, so that the check would not cover it.
    #[error("step {step} does not declare {buffer:?}, which its job reads or writes")]
    Undeclared {
        /// The index of the entry.
        step: usize,
        /// The memory that it touches.
        buffer: Buffer,
    },
    /// A wait for an event that no earlier entry records; CUDA would ignore it.
    #[error("step {step} waits for event {event}, which no earlier step records")]
    WaitBeforeRecord {
        /// The index of the entry.
        step: usize,
        /// The event.
        event: u32,
    },
    /// An event is recorded twice.
    #[error("step {step} records event {event} a second time")]
    RecordTwice {
        /// The index of the entry.
        step: usize,
        /// The event.
        event: u32,
    },
    /// A stream does not begin after stream 0. A capture would miss it, and two steps of a model could overlap.
    #[error("step {step} is the first of stream {stream} and does not wait for stream 0")]
    Unforked {
        /// The index of the entry.
        step: usize,
        /// The stream of the entry.
        stream: u8,
    },
    /// Stream 0 does not wait for the last work of a stream.
    #[error("stream {stream} is not joined: stream 0 ends without waiting for its last step")]
    Unjoined {
        /// The stream.
        stream: u8,
    },
    /// A product reads weights of another layer or projection.
    #[error("step {step} requires {want:?} in slot {slot} ({projection:?}), but the slot holds {found:?}")]
    Stale {
        /// The index of the entry.
        step: usize,
        /// The slot.
        slot: u8,
        /// The projection whose buffer is read.
        projection: Projection,
        /// The content that the product needs.
        want: Held,
        /// The content of the buffer; `None` if it was not written.
        found: Option<Held>,
    },
    /// A tensor is decoded twice.
    #[error("step {step} decodes {projection:?} of layer {layer} a second time")]
    DecodedTwice {
        /// The index of the entry.
        step: usize,
        /// The layer.
        layer: u32,
        /// The projection.
        projection: Projection,
    },
    /// A tensor that must be decoded is not decoded, or to another encoding.
    #[error("{projection:?} of layer {layer} is never decoded to the encoding that its product reads")]
    NeverDecoded {
        /// The layer.
        layer: u32,
        /// The projection.
        projection: Projection,
    },
    /// A tensor is decoded, and no product reads the result.
    #[error("{projection:?} of layer {layer} is decoded, and no product reads it")]
    Unread {
        /// The layer.
        layer: u32,
        /// The projection.
        projection: Projection,
    },
    /// A programmatic dependent follows an event or a kernel without programmatic launch on its stream.
    #[error(
        "step {step} is a programmatic dependent, but the entry before it on its stream is not a kernel that allows one"
    )]
    DependentAfterWait {
        /// The index of the entry.
        step: usize,
    },
    /// Two matmuls whose blocks wait for each other may run at the same time. With half of the blocks of each resident,
    /// both would wait forever.
    #[error("steps {first} and {second} both need all of their blocks resident, but may run at the same time")]
    Crowded {
        /// The entry that is enqueued first.
        first: usize,
        /// The other entry.
        second: usize,
    },
}

/// A step graph that [`check()`] has proved: the only kind that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedGraph(StepGraph);

impl CheckedGraph {
    /// Proves a step graph.
    ///
    /// # Errors
    /// The first [`Violation`] in the host's order.
    ///
    /// ```
    /// use unweight_engine::raw::pipelines::step_graph::{CheckedGraph, Layout, Pipeline, SlotRule, build};
    /// let layers = [[Pipeline::Raw; 3], [Pipeline::Exponents; 3], [Pipeline::Exponents; 3], [Pipeline::Exponents; 3]];
    /// assert!(CheckedGraph::new(build(&layers, &Layout::default())?).is_ok());
    /// // The report's slots, where hard layers are adjacent.
    /// let layout = Layout { rule: SlotRule::HalfOfLayer, ..Layout::default() };
    /// assert!(CheckedGraph::new(build(&layers, &layout)?).is_err());
    /// # Ok::<(), unweight_engine::raw::pipelines::step_graph::BuildError>(())
    /// ```
    pub fn new(graph: StepGraph) -> Result<Self, Violation> {
        check(&graph)?;
        Ok(Self(graph))
    }

    /// The step graph.
    pub fn graph(&self) -> &StepGraph {
        &self.0
    }
}

/// The last users of a buffer.
#[derive(Default)]
struct Users {
    writer: Option<(Point, usize)>,
    /// The last reader on each stream since the buffer was written.
    readers: HashMap<u8, (Point, usize)>,
}

/// Checks a step graph.
///
/// # Errors
/// The first [`Violation`] in the host's order.
pub fn check(graph: &StepGraph) -> Result<(), Violation> {
    let streams = usize::from(graph.streams);
    let mut clocks = Clocks::new(graph.streams);
    let mut users: HashMap<Buffer, Users> = HashMap::new();
    let mut contents: HashMap<(u8, Projection), Held> = HashMap::new();
    let mut decoded: HashMap<(u32, Projection), DecodeOutput> = HashMap::new();
    let mut read: HashSet<(u32, Projection)> = HashSet::new();
    let mut resident: Option<(Point, usize)> = None;
    let mut last: Vec<Option<Point>> = vec![None; streams];
    // Streams that belong to the step; below, whether the last entry of a stream allows a programmatic dependent.
    let mut forked: HashSet<u8> = HashSet::from([0]);
    let mut chained = vec![false; streams];
    // Events that follow the beginning of stream 0.
    let mut rooted: HashSet<u32> = HashSet::new();
    for (step, entry) in graph.steps.iter().enumerate() {
        let stream = entry.stream();
        let at = usize::from(stream);
        if at >= streams {
            return Err(Violation::OutOfRange { step });
        }
        match entry {
            Step::Record { event, .. } | Step::Wait { event, .. } if *event >= graph.events => {
                return Err(Violation::OutOfRange { step });
            }
            Step::Record { event, .. } => {
                if !clocks.record(stream, *event) {
                    return Err(Violation::RecordTwice { step, event: *event });
                }
                if forked.contains(&stream) {
                    rooted.insert(*event);
                }
                chained[at] = false;
            }
            Step::Wait { event, .. } => {
                if !clocks.wait(stream, *event) {
                    return Err(Violation::WaitBeforeRecord { step, event: *event });
                }
                if rooted.contains(event) {
                    forked.insert(stream);
                }
                chained[at] = false;
            }
            Step::Run { job, reads, writes, dependent, .. } => {
                if !forked.contains(&stream) {
                    return Err(Violation::Unforked { step, stream });
                }
                if *dependent && (!chained[at] || job.is_ordinary()) {
                    return Err(Violation::DependentAfterWait { step });
                }
                chained[at] = !job.is_ordinary();
                let point = clocks.run(stream);
                last[at] = Some(point);
                let is_before = |other: &(Point, usize)| clocks.of(stream).includes(other.0);
                let race = |other: &(Point, usize), buffer| Violation::Race { first: other.1, second: step, buffer };
                for &buffer in reads {
                    let users = users.entry(buffer).or_default();
                    if let Some(other) = users.writer.as_ref().filter(|other| !is_before(other)) {
                        return Err(race(other, buffer));
                    }
                    users.readers.insert(stream, (point, step));
                }
                for &buffer in writes {
                    let users = users.entry(buffer).or_default();
                    let mut others = users.writer.iter().chain(users.readers.values());
                    if let Some(other) = others.find(|other| !is_before(other)) {
                        return Err(race(other, buffer));
                    }
                    *users = Users { writer: Some((point, step)), readers: HashMap::new() };
                }
                if job.waits_for_own_blocks() {
                    if let Some(other) = resident.filter(|other| !is_before(other)) {
                        return Err(Violation::Crowded { first: other.1, second: step });
                    }
                    resident = Some((point, step));
                }
                if job.slot().is_some_and(|slot| slot >= graph.slots) {
                    return Err(Violation::OutOfRange { step });
                }
                read.extend(slots(step, job, &mut contents, &mut decoded)?);
            }
        }
    }
    for (layer, outputs) in (0..).zip(&graph.hard) {
        for (projection, output) in Projection::ALL.into_iter().zip(outputs) {
            if output.is_some() && decoded.get(&(layer, projection)) != output.as_ref() {
                return Err(Violation::NeverDecoded { layer, projection });
            }
            if output.is_some() && !read.contains(&(layer, projection)) {
                return Err(Violation::Unread { layer, projection });
            }
        }
    }
    let unjoined =
        (1..graph.streams).find(|stream| last[usize::from(*stream)].is_some_and(|point| !clocks.of(0).includes(point)));
    unjoined.map_or_else(|| declared(graph), |stream| Err(Violation::Unjoined { stream }))
}

/// Checks that every step names all buffers that its job touches.
fn declared(graph: &StepGraph) -> Result<(), Violation> {
    for (step, entry) in graph.steps.iter().enumerate() {
        let Step::Run { stream, job, reads, writes, .. } = entry else { continue };
        let (read, written) = job.touches(*stream);
        let unwritten = written.into_iter().find(|buffer| !writes.contains(buffer));
        let unread = || read.into_iter().find(|buffer| !reads.contains(buffer) && !writes.contains(buffer));
        if let Some(buffer) = unwritten.or_else(unread) {
            return Err(Violation::Undeclared { step, buffer });
        }
    }
    Ok(())
}

/// Applies a job to the slots, and returns the decoded tensor that it reads. Conflicting steps are ordered as the host
/// enqueues them, so the device has the same order.
fn slots(
    step: usize,
    job: &Job,
    contents: &mut HashMap<(u8, Projection), Held>,
    decoded: &mut HashMap<(u32, Projection), DecodeOutput>,
) -> Result<Option<(u32, Projection)>, Violation> {
    match *job {
        Job::Decode { layer, projection, output, slot } => {
            if decoded.insert((layer, projection), output).is_some() {
                return Err(Violation::DecodedTwice { step, layer, projection });
            }
            contents.insert((slot, projection), (layer, output));
            Ok(None)
        }
        Job::Linear { layer, projection, pipeline, slot } => {
            let Some(output) = pipeline.decodes() else { return Ok(None) };
            let Some(slot) = slot else { return Err(Violation::NeverDecoded { layer, projection }) };
            let (want, found) = ((layer, output), contents.get(&(slot, projection)).copied());
            if found != Some(want) {
                return Err(Violation::Stale { step, slot, projection, want, found });
            }
            Ok(Some((layer, projection)))
        }
        _ => Ok(None),
    }
}
