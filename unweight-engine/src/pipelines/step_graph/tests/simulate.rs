//! Simulates when each job of a step graph runs, given the cost of each alone. For tests of order and slots.
//!
//! A stream runs its jobs in order. A job starts once the events that its stream waits for are recorded and its
//! multiprocessors are free. Concurrent jobs do not slow each other down, so a simulation is a bound: in reality they
//! share memory bandwidth.

use crate::pipelines::step_graph::{Job, Step, StepGraph, Violation};

/// The cost of a job that runs alone.
pub trait Cost {
    /// Microseconds on `sms` multiprocessors; values below 0 and NaN count as 0.
    fn us(&self, job: &Job, sms: u32) -> f64;
}

impl<F: Fn(&Job, u32) -> f64> Cost for F {
    fn us(&self, job: &Job, sms: u32) -> f64 {
        self(job, sms)
    }
}

/// A job with its start and end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The index of its step in the step graph.
    pub step: usize,
    /// Its stream.
    pub stream: u8,
    /// The job itself.
    pub job: Job,
    /// Its start in microseconds.
    pub start_us: f64,
    /// Its end in microseconds.
    pub end_us: f64,
}

impl Span {
    fn decodes(&self) -> bool {
        matches!(self.job, Job::Decode { .. })
    }
}

/// The simulated times of all jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Ordered by start, then in the host's order.
    pub spans: Vec<Span>,
}

/// Simulates a step graph.
///
/// # Errors
/// [`Violation::WaitBeforeRecord`] or [`Violation::OutOfRange`]; a graph that [`check`](super::check()) accepts has
/// neither.
pub fn simulate(graph: &StepGraph, cost: &dyn Cost) -> Result<Timeline, Violation> {
    let streams = usize::from(graph.streams);
    let mut queues: Vec<Vec<usize>> = vec![Vec::new(); streams];
    for (step, entry) in graph.steps.iter().enumerate() {
        queues.get_mut(usize::from(entry.stream())).ok_or(Violation::OutOfRange { step })?.push(step);
    }
    let mut next = vec![0; streams];
    let mut busy_until: Vec<Option<f64>> = vec![None; streams];
    let mut used_sms = vec![0; streams];
    let mut recorded = vec![false; graph.events as usize];
    let (mut now, mut free, mut spans) = (0.0, graph.sms, Vec::new());
    loop {
        // All entries that can run at this time, in the order in which they were enqueued.
        loop {
            let heads = (0..streams).filter(|stream| busy_until[*stream].is_none());
            let heads = heads.filter_map(|stream| Some((*queues[stream].get(next[stream])?, stream)));
            let ready = heads.filter(|(step, _)| match &graph.steps[*step] {
                Step::Record { .. } => true,
                Step::Wait { event, .. } => recorded.get(*event as usize) == Some(&true),
                Step::Run { sms, .. } => free >= (*sms).min(graph.sms),
            });
            let Some((step, stream)) = ready.min() else { break };
            next[stream] += 1;
            match &graph.steps[step] {
                Step::Record { event, .. } => {
                    *recorded.get_mut(*event as usize).ok_or(Violation::OutOfRange { step })? = true;
                }
                Step::Wait { .. } => {}
                Step::Run { job, sms, .. } => {
                    let end_us = now + cost.us(job, *sms).max(0.0);
                    used_sms[stream] = (*sms).min(graph.sms);
                    free -= used_sms[stream];
                    busy_until[stream] = Some(end_us);
                    spans.push(Span { step, stream: stream as u8, job: *job, start_us: now, end_us });
                }
            }
        }
        let Some(end) = busy_until.iter().flatten().copied().min_by(f64::total_cmp) else { break };
        now = end;
        for stream in 0..streams {
            if busy_until[stream].is_some_and(|end| end <= now) {
                busy_until[stream] = None;
                free += std::mem::take(&mut used_sms[stream]);
            }
        }
    }
    // Nothing runs, so any stream that is left waits for an event that is never recorded.
    let stuck = (0..streams).find_map(|stream| queues[stream].get(next[stream]).copied());
    match stuck.map(|step| (step, &graph.steps[step])) {
        None => Ok(Timeline { spans }),
        Some((step, Step::Wait { event, .. })) => Err(Violation::WaitBeforeRecord { step, event: *event }),
        Some((step, _)) => Err(Violation::OutOfRange { step }),
    }
}

impl Timeline {
    /// Microseconds from the first start to the last end.
    pub fn total_us(&self) -> f64 {
        self.spans.iter().map(|span| span.end_us).fold(0.0, f64::max)
    }

    /// Microseconds of all decoders together.
    pub fn decode_us(&self) -> f64 {
        self.spans.iter().filter(|span| span.decodes()).map(|span| span.end_us - span.start_us).sum()
    }

    /// Microseconds during which a decoder overlaps another job: the decoding that the step graph hides.
    pub fn overlap_us(&self) -> f64 {
        let mut edges: Vec<(f64, i32, bool)> = Vec::new();
        for span in &self.spans {
            edges.extend([(span.start_us, 1, span.decodes()), (span.end_us, -1, span.decodes())]);
        }
        edges.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut decoders, mut others, mut before, mut overlap) = (0, 0, 0.0, 0.0);
        for (at, change, decodes) in edges {
            if decoders > 0 && others > 0 {
                overlap += at - before;
            }
            before = at;
            *(if decodes { &mut decoders } else { &mut others }) += change;
        }
        overlap
    }

    /// Microseconds during which stream 0 cannot run anything: decoding that is not hidden.
    pub fn stalled_us(&self) -> f64 {
        let (mut end, mut stalled) = (0.0_f64, 0.0);
        for span in self.spans.iter().filter(|span| !span.decodes()) {
            stalled += (span.start_us - end).max(0.0);
            end = end.max(span.end_us);
        }
        stalled
    }

    /// The maximum number of hard layers that are already decoded after the layer whose first product starts.
    pub fn depth(&self) -> usize {
        let mut decoded_layers: Vec<u32> = self.spans.iter().filter(|span| span.decodes()).filter_map(layer).collect();
        decoded_layers.sort_unstable();
        decoded_layers.dedup();
        let ready = |index: u32| {
            let decoders = self.spans.iter().filter(|span| span.decodes() && layer(span) == Some(index));
            decoders.map(|span| span.end_us).fold(0.0, f64::max)
        };
        let started = |index: u32| {
            let products = self
                .spans
                .iter()
                .filter(|span| matches!(span.job, Job::Linear { layer, .. } | Job::GateUp { layer } if layer == index));
            products.map(|span| span.start_us).fold(f64::INFINITY, f64::min)
        };
        let ready: Vec<f64> = decoded_layers.iter().map(|index| ready(*index)).collect();
        let depths = decoded_layers.iter().enumerate().map(|(rank, index)| {
            let start = started(*index);
            ready[rank + 1..].iter().take_while(|end| **end <= start).count()
        });
        depths.max().unwrap_or(0)
    }
}

fn layer(span: &Span) -> Option<u32> {
    match span.job {
        Job::Decode { layer, .. } => Some(layer),
        _ => None,
    }
}
