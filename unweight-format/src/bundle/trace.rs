//! The stages of a run, and how long each took.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde::Serialize;

/// Time and bytes of one stage of a run. Stages overlap and run on several threads, whose times are added, so the sum
/// of all stages may exceed the duration of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StageTime {
    /// Name, such as `read`.
    pub stage: String,
    /// Sum over threads.
    pub seconds: f64,
    /// Bytes processed.
    pub bytes: u64,
}

/// Adds up the time of stages. Shared by the threads of a run.
#[derive(Debug, Default)]
pub struct Trace(Mutex<Vec<(&'static str, Duration, u64)>>);

impl Trace {
    /// Runs `work` as a part of a stage that processes `bytes` bytes.
    pub fn time<T>(&self, stage: &'static str, bytes: u64, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.add(stage, bytes, started.elapsed());
        result
    }

    fn add(&self, stage: &'static str, bytes: u64, took: Duration) {
        let mut stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match stages.iter_mut().find(|(name, ..)| *name == stage) {
            Some((_, sum, processed)) => {
                *sum += took;
                *processed += bytes;
            }
            None => stages.push((stage, took, bytes)),
        }
    }

    /// The stages so far, in the order in which they first ended.
    pub fn stages(&self) -> Vec<StageTime> {
        let stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let stage = |&(stage, took, bytes): &(&str, Duration, u64)| StageTime {
            stage: stage.to_owned(),
            seconds: took.as_secs_f64(),
            bytes,
        };
        stages.iter().map(stage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_over_threads() {
        let trace = Trace::default();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| trace.time("read", 5, || std::thread::sleep(Duration::from_millis(2))));
            }
        });
        assert_eq!(trace.time("write", 7, || 9), 9);
        let stages = trace.stages();
        assert_eq!(
            stages.iter().map(|s| (s.stage.as_str(), s.bytes)).collect::<Vec<_>>(),
            [("read", 15), ("write", 7)]
        );
        assert!(stages[0].seconds >= 0.006 && stages[1].seconds < stages[0].seconds, "{stages:?}");
    }
}
