//! When each job of a step graph would run, by what each costs alone: what tests say of orders and slots.
//!
//! A stream runs its jobs in order, a job starts when what its stream waits for has happened and as many
//! multiprocessors are free as it may have. Jobs that run at once do not slow each other down, so that a simulation is
//! a bound: memory is shared in truth.

use super::{Job, Step, StepGraph, Violation};

/// What a job costs alone.
pub trait Cost {
    /// Microseconds on so many multiprocessors; what is below 0 or no number counts as 0.
    fn us(&self, job: &Job, sms: u32) -> f64;
}

impl<F: Fn(&Job, u32) -> f64> Cost for F {
    fn us(&self, job: &Job, sms: u32) -> f64 {
        self(job, sms)
    }
}

/// A job in time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Its step in the step graph.
    pub step: usize,
    /// Its stream.
    pub stream: u8,
    /// What it is.
    pub job: Job,
    /// When it starts, us.
    pub start_us: f64,
    /// When it ends, us.
    pub end_us: f64,
}

impl Span {
    fn decodes(&self) -> bool {
        matches!(self.job, Job::Decode { .. })
    }
}

/// When what would run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// By their starts; of equals, in the host's order.
    pub spans: Vec<Span>,
}

/// Runs a step graph on paper.
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
    let mut taken = vec![0; streams];
    let mut recorded = vec![false; graph.events as usize];
    let (mut now, mut free, mut spans) = (0.0, graph.sms, Vec::new());
    loop {
        // All that can go on at this time, what was enqueued first before the others.
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
                    taken[stream] = (*sms).min(graph.sms);
                    free -= taken[stream];
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
                free += std::mem::take(&mut taken[stream]);
            }
        }
    }
    // Nothing runs, so whoever is left waits for what nobody records.
    let stuck = (0..streams).find_map(|stream| queues[stream].get(next[stream]).copied());
    match stuck.map(|step| (step, &graph.steps[step])) {
        None => Ok(Timeline { spans }),
        Some((step, Step::Wait { event, .. })) => Err(Violation::WaitBeforeRecord { step, event: *event }),
        Some((step, _)) => Err(Violation::OutOfRange { step }),
    }
}

impl Timeline {
    /// From the first start to the last end, us.
    pub fn total_us(&self) -> f64 {
        self.spans.iter().map(|span| span.end_us).fold(0.0, f64::max)
    }

    /// All decoders together, us.
    pub fn decode_us(&self) -> f64 {
        self.spans.iter().filter(|span| span.decodes()).map(|span| span.end_us - span.start_us).sum()
    }

    /// How long at least one decoder overlaps at least one other job, us: what the step graph hides.
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

    /// How long stream 0 has nothing that it may run, us: decoding that nothing hides.
    pub fn stalled_us(&self) -> f64 {
        let (mut end, mut stalled) = (0.0_f64, 0.0);
        for span in self.spans.iter().filter(|span| !span.decodes()) {
            stalled += (span.start_us - end).max(0.0);
            end = end.max(span.end_us);
        }
        stalled
    }

    /// Hard layers that lie decoded behind the one whose first product starts, at most.
    pub fn depth(&self) -> usize {
        let mut hard: Vec<u32> = self.spans.iter().filter(|span| span.decodes()).filter_map(layer).collect();
        hard.sort_unstable();
        hard.dedup();
        let ready = |of: u32| {
            let decoders = self.spans.iter().filter(|span| span.decodes() && layer(span) == Some(of));
            decoders.map(|span| span.end_us).fold(0.0, f64::max)
        };
        let started = |of: u32| {
            let products = self
                .spans
                .iter()
                .filter(|span| matches!(span.job, Job::Linear { layer, .. } | Job::GateUp { layer } if layer == of));
            products.map(|span| span.start_us).fold(f64::INFINITY, f64::min)
        };
        let ready: Vec<f64> = hard.iter().map(|of| ready(*of)).collect();
        let depths = hard.iter().enumerate().map(|(rank, of)| {
            let start = started(*of);
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
