//! Vector clocks: which steps happened before which, by the order of streams and by events.

/// The number of steps that were reached on each stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<u32>);

/// A point of a stream: its `at`-th step, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub stream: u8,
    pub at: u32,
}

impl Clock {
    /// Whether a point is at or before this clock.
    pub fn includes(&self, point: Point) -> bool {
        self.0.get(usize::from(point.stream)).is_some_and(|at| *at >= point.at)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(this, at)| *this = (*this).max(*at));
    }
}

/// The clocks of all streams, and of the events that were recorded.
#[derive(Clone, Debug, Default)]
pub struct Clocks {
    streams: Vec<Clock>,
    events: Vec<Option<Clock>>,
}

impl Clocks {
    pub fn new(streams: u8) -> Self {
        Self { streams: vec![Clock::default(); usize::from(streams)], events: Vec::new() }
    }

    /// The clock of a stream.
    pub fn of(&self, stream: u8) -> &Clock {
        &self.streams[usize::from(stream)]
    }

    /// Advances a stream by a job, and returns its point.
    pub fn run(&mut self, stream: u8) -> Point {
        let at = usize::from(stream);
        let clock = &mut self.streams[at].0;
        if clock.len() <= at {
            clock.resize(at + 1, 0);
        }
        clock[at] += 1;
        Point { stream, at: clock[at] }
    }

    /// Records the clock of a stream as an event. Returns `false` if the event was recorded before.
    pub fn record(&mut self, stream: u8, event: u32) -> bool {
        let at = event as usize;
        if self.events.len() <= at {
            self.events.resize(at + 1, None);
        }
        let first = self.events[at].is_none();
        self.events[at] = Some(self.streams[usize::from(stream)].clone());
        first
    }

    /// Joins the clock of another point into that of a stream.
    pub fn merge(&mut self, stream: u8, clock: &Clock) {
        self.streams[usize::from(stream)].join(clock);
    }

    /// Joins the clock of an event into that of a stream. Returns `false` if the event was not recorded.
    pub fn wait(&mut self, stream: u8, event: u32) -> bool {
        let Some(clock) = self.events.get(event as usize).and_then(Clone::clone) else { return false };
        self.streams[usize::from(stream)].join(&clock);
        true
    }
}
