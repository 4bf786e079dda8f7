//! Who may use the text processes: no kind of work waits for all of another kind.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{bodies::SMALL_BYTES, error::ApiError};
use crate::text::PROCESSES;

/// The maximum number of compiled grammars of waiting and running requests, with about 100 MiB each at most.
const GRAMMARS_MAX: usize = 64;
/// The maximum number of grammars that wait to be compiled, small and large ones each.
const GRAMMARS_WAITING_MAX: usize = 128;
/// The size of a small grammar, bytes. It waits for at most one large grammar.
const SMALL_GRAMMAR_BYTES: usize = 8 << 10;

/// The right to use a text process, until it is dropped.
pub(super) type Place = Vec<OwnedSemaphorePermit>;

/// The places of all work on texts and grammars. One process is always left for small texts.
#[derive(Clone)]
pub(super) struct Places {
    /// One permit per text process.
    processes: Arc<Semaphore>,
    /// One of the texts of more than [`SMALL_BYTES`], one of the grammars, and one of the large grammars.
    large_texts: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
    large_grammars: Arc<Semaphore>,
    /// The grammars that wait to be compiled: small and large ones.
    queues: [Arc<Semaphore>; 2],
    compiled: Arc<Semaphore>,
    waiting: Arc<AtomicU64>,
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
            grammars: permits(1),
            large_grammars: permits(1),
            queues: [permits(GRAMMARS_WAITING_MAX), permits(GRAMMARS_WAITING_MAX)],
            compiled: permits(GRAMMARS_MAX),
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

    /// Waits for the permit to hold a compiled grammar and, unless it `is_kept`, until a grammar of this size may use
    /// a process.
    pub async fn grammar(&self, bytes: usize, is_kept: bool) -> Result<(OwnedSemaphorePermit, Place), ApiError> {
        if is_kept {
            return Ok((permit(&self.compiled).await?, Vec::new()));
        }
        let is_large = bytes > SMALL_GRAMMAR_BYTES;
        let queue = Arc::clone(&self.queues[usize::from(is_large)]).try_acquire_owned();
        let _queue = queue.map_err(|_| ApiError::grammars(GRAMMARS_WAITING_MAX))?;
        let _waiting = Waiting::new(&self.waiting);
        let mut place = Vec::new();
        // The other large grammars wait here, so that they take no permit and no place in the queue of small ones.
        if is_large {
            place.push(permit(&self.large_grammars).await?);
        }
        let compiled = permit(&self.compiled).await?;
        place.push(permit(&self.grammars).await?);
        place.push(permit(&self.processes).await?);
        Ok((compiled, place))
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Duration};

    use tokio::time::timeout;

    use super::*;

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
            let large = now(places.grammar(SMALL_GRAMMAR_BYTES + 1, false)).await.unwrap().unwrap();
            assert!(now(places.text(SMALL_BYTES)).await.is_some(), "a process is left for small texts");
            assert!(now(places.text(SMALL_BYTES + 1)).await.is_none());
            assert!(now(places.grammar(1, true)).await.is_some(), "a kept grammar needs no process");
            // Large grammars wait before a small one, which is served first nevertheless.
            let mut flood: Vec<_> = (0..70).map(|_| Box::pin(places.grammar(SMALL_GRAMMAR_BYTES + 1, false))).collect();
            for one in &mut flood {
                assert!(now(one).await.is_none());
            }
            let mut small = pin!(places.grammar(1, false));
            assert!(now(&mut small).await.is_none());
            assert_eq!(places.waiting(), 71);
            drop(large);
            assert!(now(&mut flood[0]).await.is_none(), "the small one comes first");
            let small = now(small).await.unwrap();
            drop(small);
            assert!(now(&mut flood[0]).await.is_some());
            drop((flood, large_text));
            assert_eq!(places.waiting(), 0);
        });
    }

    #[test]
    fn few_grammars_wait() {
        run(async {
            let places = Places::new();
            let _large = now(places.grammar(SMALL_GRAMMAR_BYTES + 1, false)).await.unwrap();
            let mut flood = Vec::new();
            for _ in 0..GRAMMARS_WAITING_MAX {
                let mut one = Box::pin(places.grammar(SMALL_GRAMMAR_BYTES + 1, false));
                assert!(timeout(Duration::ZERO, &mut one).await.is_err());
                flood.push(one);
            }
            let full = now(places.grammar(SMALL_GRAMMAR_BYTES + 1, false)).await.unwrap().unwrap_err();
            assert_eq!((full.status.as_u16(), full.retry_after), (429, Some(1)));
            drop(flood);
            assert!(now(places.grammar(SMALL_GRAMMAR_BYTES + 1, false)).await.is_none(), "it waits");
        });
    }
}
