//! Who may use the text processes: no kind of work waits for all of another kind.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{bodies::SMALL_BYTES, error::ApiError};
use crate::text::PROCESSES;

/// The maximum number of requests in the engine with a compiled grammar that is small, and with a large one, which
/// takes up to about 100 MiB.
const GRAMMARS_MAX: usize = 64;
const LARGE_GRAMMARS_MAX: usize = 16;
/// The maximum number of grammars of each size that wait to be compiled.
const GRAMMARS_WAITING_MAX: usize = 128;
/// The maximum sizes of small and medium grammars, bytes. A small one waits for at most one larger one.
const GRAMMAR_SIZES: [usize; 2] = [2 << 10, 8 << 10];
/// The processor time of a grammar before it waits for the other slow ones, too. A schema of 8 KiB takes some 50 ms.
pub(super) const FIRST_TRY_TIME: Duration = Duration::from_millis(100);
/// How long a small grammar waits for the first tries of others.
const SMALL_WAIT_MAX: Duration = Duration::from_secs(4);

/// The right to use a text process, until it is dropped.
pub(super) type Place = Vec<OwnedSemaphorePermit>;

/// The places of all work on texts and grammars. One process is always left for small texts.
#[derive(Clone)]
pub(super) struct Places {
    /// One permit per text process.
    processes: Arc<Semaphore>,
    /// One of the texts of more than [`SMALL_BYTES`].
    large_texts: Arc<Semaphore>,
    /// The grammars of each size, from small to large, for a first try.
    lines: [Line; 3],
    /// The grammars that take longer.
    slow: Line,
    /// The requests in the engine with a small compiled grammar, and those with a large one.
    small_compiled: Arc<Semaphore>,
    large_compiled: Arc<Semaphore>,
    waiting: Arc<AtomicU64>,
}

/// Grammars of one size that wait to be compiled.
#[derive(Clone)]
struct Line {
    all: Arc<Semaphore>,
    /// The first in the line. The first of the small ones is compiled; that of another line waits in the next one.
    first: Arc<Semaphore>,
}

impl Line {
    fn new() -> Self {
        let permits = |count: usize| Arc::new(Semaphore::new(count));
        Self { all: permits(GRAMMARS_WAITING_MAX), first: permits(1) }
    }

    /// Joins the line, if it is not too long.
    fn join(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let full = |_| ApiError::grammars(format!("{GRAMMARS_WAITING_MAX} grammars wait to be compiled, the limit"));
        Arc::clone(&self.all).try_acquire_owned().map_err(full)
    }
}

/// Counts work that waits.
struct Waiting<'a>(&'a AtomicU64);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Waits for a permit.
async fn permit(of: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(of).acquire_owned().await.map_err(ApiError::server)
}

impl Places {
    pub fn new() -> Self {
        let permits = |count: usize| Arc::new(Semaphore::new(count));
        Self {
            processes: permits(PROCESSES),
            large_texts: permits(1),
            lines: std::array::from_fn(|_| Line::new()),
            slow: Line::new(),
            small_compiled: permits(GRAMMARS_MAX),
            large_compiled: permits(LARGE_GRAMMARS_MAX),
            waiting: Arc::default(),
        }
    }

    /// Returns the number of texts and grammars that wait for a text process.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Relaxed)
    }

    /// Waits until texts of this size may use a process.
    pub async fn text(&self, bytes: usize) -> Result<Place, ApiError> {
        let _waiting = Waiting::new(&self.waiting);
        let mut place = Vec::new();
        if bytes > SMALL_BYTES {
            place.push(permit(&self.large_texts).await?);
        }
        place.push(permit(&self.processes).await?);
        Ok(place)
    }

    /// Waits for the permit to use a small compiled grammar, which only requests in the engine hold.
    pub async fn small_compiled(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        permit(&self.small_compiled).await
    }

    /// Returns the permit to use a large compiled grammar.
    pub fn large_compiled(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let full = |_| ApiError::grammars(format!("{LARGE_GRAMMARS_MAX} requests use large grammars, the limit"));
        Arc::clone(&self.large_compiled).try_acquire_owned().map_err(full)
    }

    /// Waits until a grammar of this size may use a process for [`FIRST_TRY_TIME`].
    pub async fn grammar(&self, bytes: usize) -> Result<Place, ApiError> {
        let size = GRAMMAR_SIZES.iter().filter(|size| bytes > **size).count();
        let _place_in_line = self.lines[size].join()?;
        let _waiting = Waiting::new(&self.waiting);
        let mut place = Vec::new();
        // The other large grammars wait here, so that they take no place in the line of smaller ones.
        for line in self.lines[1..=size].iter().rev() {
            place.push(permit(&line.first).await?);
        }
        let first = permit(&self.lines[0].first);
        let first = if size > 0 { Ok(first.await) } else { timeout(SMALL_WAIT_MAX, first).await };
        let late = || ApiError::grammars(format!("other grammars take more than {} s", SMALL_WAIT_MAX.as_secs()));
        place.push(first.map_err(|_| late())??);
        place.push(permit(&self.processes).await?);
        Ok(place)
    }

    /// Waits until a grammar that takes longer than [`FIRST_TRY_TIME`] may use a process.
    pub async fn slow_grammar(&self) -> Result<Place, ApiError> {
        let _place_in_line = self.slow.join()?;
        let _waiting = Waiting::new(&self.waiting);
        Ok(vec![permit(&self.slow.first).await?, permit(&self.processes).await?])
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    const MEDIUM: usize = GRAMMAR_SIZES[0] + 1;
    const LARGE: usize = GRAMMAR_SIZES[1] + 1;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    /// Returns the result if it is there without waiting for others.
    async fn now<T>(work: impl Future<Output = T>) -> Option<T> {
        timeout(Duration::from_millis(20), work).await.ok()
    }

    #[test]
    fn no_kind_of_work_waits_for_all_of_another() {
        run(async {
            let places = Places::new();
            let large_text = now(places.text(SMALL_BYTES + 1)).await.unwrap().unwrap();
            let large = now(places.grammar(LARGE)).await.unwrap().unwrap();
            assert!(now(places.text(SMALL_BYTES)).await.is_some(), "a process is left for small texts");
            assert!(now(places.text(SMALL_BYTES + 1)).await.is_none());
            // Larger grammars wait before a small one, which is served first nevertheless.
            let mut flood: Vec<_> = (0..140).map(|at| Box::pin(places.grammar([MEDIUM, LARGE][at % 2]))).collect();
            for one in &mut flood {
                assert!(timeout(Duration::ZERO, one).await.is_err());
            }
            let mut small = pin!(places.grammar(1));
            assert!(now(&mut small).await.is_none());
            assert_eq!(places.waiting(), 141);
            assert!(now(places.small_compiled()).await.is_some(), "a compiled grammar waits for none of them");
            drop(large);
            assert!(now(&mut flood[0]).await.is_none() && now(&mut flood[1]).await.is_none());
            let small = now(small).await.expect("the small one comes first");
            drop(small);
            assert!(now(&mut flood[0]).await.is_some());
            drop(flood);
            let slow = now(places.slow_grammar()).await.unwrap();
            assert!(now(places.grammar(1)).await.is_some(), "and slow ones hold back no first try");
            assert!(now(places.text(1)).await.is_some() && now(places.slow_grammar()).await.is_none());
            drop((slow, large_text));
            assert_eq!(places.waiting(), 0);
        });
    }

    #[test]
    fn small_grammars_wait_for_a_limited_time() {
        run(async {
            let places = Places::new();
            let _slow = now(places.grammar(1)).await.unwrap();
            let limit = SMALL_WAIT_MAX + Duration::from_secs(1);
            let late = timeout(limit, places.grammar(1)).await.unwrap().unwrap_err();
            assert_eq!((late.status.as_u16(), late.retry_after), (429, Some(1)));
            assert!(timeout(limit, places.grammar(MEDIUM)).await.is_err(), "a larger one waits");
        });
    }

    #[test]
    fn few_grammars_wait() {
        run(async {
            let places = Places::new();
            let _large = now(places.grammar(LARGE)).await.unwrap();
            let mut flood = Vec::new();
            for _ in 0..GRAMMARS_WAITING_MAX {
                let mut one = Box::pin(places.grammar(LARGE));
                assert!(timeout(Duration::ZERO, &mut one).await.is_err());
                flood.push(one);
            }
            let full = now(places.grammar(LARGE)).await.unwrap().unwrap_err();
            assert_eq!((full.status.as_u16(), full.retry_after), (429, Some(1)));
            drop(flood);
            assert!(now(places.grammar(LARGE)).await.is_none(), "it waits");
        });
    }
}
