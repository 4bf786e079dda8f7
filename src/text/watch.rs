//! Ends work of `llguidance` that takes too much processor time. Its own limits count items and fuel, whose cost
//! depends on the grammar.

use std::{
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use llguidance::CancellationHandle;

/// Work that may be ended.
struct Watched {
    number: u64,
    handle: CancellationHandle,
    clock: ThreadClock,
    /// The time of `clock` at which the work is ended.
    ends: Duration,
    /// When `clock` can show that time at the earliest.
    due: Instant,
}

struct State {
    watched: Vec<Watched>,
    /// The number of the next work.
    next: u64,
    /// When the watching thread wakes up next; `None` if it sleeps until it is notified.
    wakes: Option<Instant>,
}

static STATE: Mutex<State> = Mutex::new(State { watched: Vec::new(), next: 0, wakes: None });
static CHANGED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work`, and cancels `handle` when it has taken `time_max` of processor time: waiting for a processor does not
/// count. If the watching thread waits for one, that is after the work. Returns the result and the time.
pub(super) fn limited<T>(
    handle: Option<CancellationHandle>,
    time_max: Duration,
    work: impl FnOnce() -> T,
) -> (T, Duration) {
    let clock = ThreadClock::of_this_thread();
    let start = clock.now();
    let number = handle.clone().map(|handle| begin(handle, clock, start + time_max, time_max));
    let done = work();
    if let Some(number) = number {
        state().watched.retain(|watched| watched.number != number);
    }
    let spent = clock.now().saturating_sub(start);
    if let Some(handle) = handle.filter(|_| spent >= time_max) {
        handle.cancel();
    }
    (done, spent)
}

/// Adds work to the watched, and returns its number.
fn begin(handle: CancellationHandle, clock: ThreadClock, ends: Duration, time_max: Duration) -> u64 {
    static THREAD: OnceLock<bool> = OnceLock::new();
    // Without the thread, only the limits of `llguidance` hold.
    THREAD.get_or_init(|| thread::Builder::new().name("unweight-watch".into()).spawn(watch).is_ok());
    let due = Instant::now() + time_max;
    let mut state = state();
    let number = state.next;
    state.next += 1;
    state.watched.push(Watched { number, handle, clock, ends, due });
    if state.wakes.is_none_or(|wakes| due < wakes) {
        CHANGED.notify_one();
    }
    number
}

/// Cancels work that has taken its time, forever.
fn watch() {
    let mut state = state();
    loop {
        let now = Instant::now();
        state.watched.retain_mut(|watched| {
            if watched.due <= now {
                let left = watched.ends.saturating_sub(watched.clock.now());
                if left.is_zero() {
                    watched.handle.cancel();
                    return false;
                }
                watched.due = now + left;
            }
            true
        });
        state.wakes = state.watched.iter().map(|watched| watched.due).min();
        state = match state.wakes {
            Some(wakes) => {
                CHANGED.wait_timeout(state, wakes - now).map_or_else(|error| error.into_inner().0, |(state, _)| state)
            }
            None => CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

/// The clock of the processor time of a thread, which other threads can read.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy)]
pub(super) struct ThreadClock(libc::clockid_t);

#[cfg(target_os = "linux")]
impl ThreadClock {
    pub fn of_this_thread() -> Self {
        let mut id = libc::CLOCK_MONOTONIC;
        // SAFETY: both arguments are valid; if the call fails, `id` keeps the clock of elapsed time.
        unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut id) };
        Self(id)
    }

    /// Returns the processor time so far.
    pub fn now(self) -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for writes. The clock of a thread that has ended gives an error, and zero here.
        unsafe { libc::clock_gettime(self.0, &mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

/// A clock of elapsed time, where the processor time of a thread cannot be read.
#[cfg(not(target_os = "linux"))]
#[derive(Clone, Copy)]
pub(super) struct ThreadClock(Instant);

#[cfg(not(target_os = "linux"))]
impl ThreadClock {
    pub fn of_this_thread() -> Self {
        Self(Instant::now())
    }

    /// Returns the time so far.
    pub fn now(self) -> Duration {
        self.0.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_was_too_long_is_cancelled_without_the_watching_thread() {
        let (handle, clock) = (CancellationHandle::default(), ThreadClock::of_this_thread());
        let time_max = Duration::from_millis(5);
        // The thread needs the state to cancel.
        let ((), spun) = limited(Some(handle.clone()), time_max, || {
            let (_held, start) = (state(), clock.now());
            while clock.now() - start < 2 * time_max {}
        });
        assert!(spun >= 2 * time_max && handle.is_cancelled(), "{spun:?}");
    }

    #[test]
    fn only_processor_time_counts() {
        let handle = CancellationHandle::default();
        let time_max = Duration::from_millis(20);
        let ((), slept) = limited(Some(handle.clone()), time_max, || thread::sleep(4 * time_max));
        // Elsewhere, time that passes counts.
        assert_eq!(handle.is_cancelled(), !cfg!(target_os = "linux"), "{slept:?}");
        let handle = CancellationHandle::default();
        let spin = || while !handle.is_cancelled() {};
        let ((), spun) = limited(Some(handle.clone()), time_max, spin);
        // The watching thread may wait for a processor, too.
        assert!(spun >= time_max && spun < 20 * time_max, "{spun:?}");
    }
}
