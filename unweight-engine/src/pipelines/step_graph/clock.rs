//! Vector clocks: what has happened before what, by the order of streams and by events.

/// How far each stream had come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<u32>);

/// A point of a stream: its `at`-th step, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub stream: u8,
    pub at: u32,
}

impl Clock {
    /// Whether a point is before it.
    pub fn knows(&self, point: Point) -> bool {
        self.0.get(usize::from(point.stream)).is_some_and(|at| *at >= point.at)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(own, at)| *own = (*own).max(*at));
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

    /// What a stream knows.
    pub fn of(&self, stream: u8) -> &Clock {
        &self.streams[usize::from(stream)]
    }

    /// The next job of a stream.
    pub fn run(&mut self, stream: u8) -> Point {
        let at = usize::from(stream);
        let clock = &mut self.streams[at].0;
        if clock.len() <= at {
            clock.resize(at + 1, 0);
        }
        clock[at] += 1;
        Point { stream, at: clock[at] }
    }

    /// An event takes what its stream knows. `false`: it has been recorded before.
    pub fn record(&mut self, stream: u8, event: u32) -> bool {
        let at = event as usize;
        if self.events.len() <= at {
            self.events.resize(at + 1, None);
        }
        let first = self.events[at].is_none();
        self.events[at] = Some(self.streams[usize::from(stream)].clone());
        first
    }

    /// A stream learns what a point of another knew.
    pub fn learn(&mut self, stream: u8, clock: &Clock) {
        self.streams[usize::from(stream)].join(clock);
    }

    /// A stream learns what an event knows. `false`: the event was not recorded.
    pub fn wait(&mut self, stream: u8, event: u32) -> bool {
        let Some(clock) = self.events.get(event as usize).and_then(Clone::clone) else { return false };
        self.streams[usize::from(stream)].join(&clock);
        true
    }
}
