//! The memory of all request bodies together, and that of all large answers, within a limit.

use std::{
    collections::BTreeMap,
    error::Error as _,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::header,
};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::error::ApiError;

/// The largest body of a request, bytes: a million token ids and more.
pub const BODY_LIMIT: usize = 8 << 20;
/// The maximum size of all bodies together, bytes; also of all large answers.
const BODIES_LIMIT: usize = 64 << 20;
/// The part of [`BODIES_LIMIT`] that is reserved for small bodies.
const SMALL_BODIES_LIMIT: usize = 16 << 20;
/// The maximum size of a small body or answer, bytes.
pub(super) const SMALL_BYTES: usize = 64 << 10;
/// Bytes per permit.
const BYTES_PER_PERMIT: usize = 1 << 10;
/// How long a client may send nothing of its body.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long data must have waited for its client before it is dropped for other data.
const STALL_TIME: Duration = Duration::from_secs(1);
/// How fast a client must take data, so that it counts as not waiting; bytes per second.
const READ_RATE: f64 = (256 << 10) as f64;
/// The maximum size of the pieces in which answers are sent, bytes.
pub(super) const PIECE_BYTES: usize = 16 << 10;

/// A memory budget of bodies or answers.
#[derive(Clone)]
pub(super) struct Bodies {
    /// Returns the error that the limit was reached.
    full: fn(usize) -> ApiError,
    small: Arc<Pool>,
    large: Arc<Pool>,
}

/// A part of a budget.
struct Pool {
    bytes: usize,
    free: Arc<Semaphore>,
    waiting: Mutex<BTreeMap<Since, Data>>,
    /// Makes each [`Since`] unique.
    number: AtomicU64,
}

/// Since when data has waited, and a number that makes this unique.
type Since = (Instant, u64);

/// Data with its memory.
pub(super) struct Data {
    pub bytes: Vec<u8>,
    permit: BodyPermit,
}

/// Data that waits for its client. The longest waiting is dropped if others need the memory.
pub(super) struct Waiting {
    pool: Arc<Pool>,
    since: Since,
}

/// The progress of a client that takes data.
pub(super) struct Taking {
    start: Instant,
    pub bytes: usize,
}

/// The memory that a body holds; dropping it releases the memory.
pub(super) struct BodyPermit {
    bodies: Bodies,
    permit: Option<OwnedSemaphorePermit>,
    bytes: usize,
    /// When it became larger.
    grown: Instant,
}

impl Pool {
    fn new(bytes: usize) -> Arc<Self> {
        let free = Arc::new(Semaphore::new(bytes / BYTES_PER_PERMIT));
        Arc::new(Self { bytes, free, waiting: Mutex::default(), number: AtomicU64::new(0) })
    }

    fn held(&self) -> usize {
        self.bytes.saturating_sub(self.free.available_permits() * BYTES_PER_PERMIT)
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<Since, Data>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes permits; without room, drops the data that has waited longest.
    fn take(&self, permits: usize) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(permit) = Arc::clone(&self.free).try_acquire_many_owned(u32::try_from(permits).ok()?) {
                return Some(permit);
            }
            let mut waiting = self.waiting();
            let oldest = waiting.first_entry().filter(|entry| entry.key().0.elapsed() >= STALL_TIME)?;
            let dropped = oldest.remove();
            drop(waiting);
            drop(dropped);
        }
    }
}

impl Bodies {
    /// Creates the budget of request bodies.
    pub fn new() -> Self {
        let (small, large) = (Pool::new(SMALL_BODIES_LIMIT), Pool::new(BODIES_LIMIT - SMALL_BODIES_LIMIT));
        Self { full: ApiError::bodies, small, large }
    }

    /// Creates the budget of answers, of which it counts the large ones.
    pub fn of_answers() -> Self {
        Self { full: ApiError::answers, small: Pool::new(0), large: Pool::new(BODIES_LIMIT) }
    }

    /// Returns the bytes that bodies hold.
    pub fn held(&self) -> u64 {
        (self.small.held() + self.large.held()) as u64
    }

    pub fn empty_permit(&self) -> BodyPermit {
        BodyPermit { bodies: self.clone(), permit: None, bytes: 0, grown: Instant::now() }
    }

    /// Returns the part of the budget for a body of this size.
    fn pool(&self, bytes: usize) -> &Arc<Pool> {
        if bytes <= SMALL_BYTES { &self.small } else { &self.large }
    }

    /// Returns the body of an answer, which holds its memory until the connection has taken it. Small answers hold
    /// none, because the connection takes them at once.
    pub fn hold(&self, answer: Vec<u8>) -> Result<Body, ApiError> {
        if answer.len() <= SMALL_BYTES {
            return Ok(answer.into());
        }
        let mut permit = self.empty_permit();
        // A larger answer is sent when it is the only one.
        permit.grow(answer.len().min(self.large.bytes))?;
        let length = answer.len();
        let taking = Taking::new();
        Ok(Body::new(Answer { rest: Some(Data { bytes: answer, permit }.wait(taking.since())), taking, length }))
    }

    /// Reads a body. Memory is reserved as data arrives, not by the announced length. Without room, the rest of the
    /// body is discarded, so that the client reads the error.
    pub async fn read(&self, request: Request) -> Result<(Vec<u8>, BodyPermit), ApiError> {
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > BODY_LIMIT as u64) {
            return Err(ApiError::body(BODY_LIMIT));
        }
        let (mut body, mut length) = (request.into_body(), 0);
        // `None` without room.
        let mut received = Some(Data { bytes: Vec::new(), permit: self.empty_permit() });
        loop {
            let waiting = received.map(|data| {
                let grown = data.permit.grown;
                data.wait(grown)
            });
            let piece = timeout(SILENCE_TIMEOUT, next(&mut body)).await;
            let piece = piece.map_err(|_| ApiError::timeout("a pause of the body", SILENCE_TIMEOUT.as_secs()))??;
            received = waiting.and_then(Waiting::end);
            let Some(piece) = piece else { break };
            length += piece.len();
            if length > BODY_LIMIT {
                return Err(ApiError::body(BODY_LIMIT));
            }
            let rest = usize::try_from(body.size_hint().upper().unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
            received = received.and_then(|data| data.extend(&piece, rest));
        }
        received.map(|data| (data.bytes, data.permit)).ok_or_else(|| (self.full)(self.pool(length).bytes))
    }
}

/// Does work on `bytes` bytes of text: here if they are few, else on a blocking thread.
pub(super) async fn on_thread_for<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= SMALL_BYTES {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(ApiError::server)
}

/// Returns the next piece of a body.
async fn next(body: &mut Body) -> Result<Option<Bytes>, ApiError> {
    loop {
        match body.frame().await {
            None => return Ok(None),
            // Skip trailers.
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => return Ok(Some(data)),
                Err(_) => continue,
            },
            Some(Err(error)) => {
                let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                return Err(ApiError::bad(format!("the body cannot be read: {why}")));
            }
        }
    }
}

impl Data {
    pub fn new(bytes: Vec<u8>, permit: BodyPermit) -> Self {
        Self { bytes, permit }
    }

    /// Lets the data wait for its client since then.
    pub fn wait(self, since: Instant) -> Waiting {
        let pool = Arc::clone(self.permit.bodies.pool(self.permit.bytes));
        let since = (since, pool.number.fetch_add(1, Relaxed));
        pool.waiting().insert(since, self);
        Waiting { pool, since }
    }

    /// Adds a piece of a body, of which `rest` bytes follow at most. Returns `None` without room.
    fn extend(mut self, piece: &[u8], rest: usize) -> Option<Self> {
        let length = self.bytes.len() + piece.len();
        if length > self.bytes.capacity() {
            // Reserve a quarter more, so that a body of many pieces is not copied often, but not more than the rest of
            // the body.
            let capacity = (length + length / 4 + BYTES_PER_PERMIT).min(length.saturating_add(rest)).min(BODY_LIMIT);
            self.permit.grow(capacity).ok()?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(piece);
        Some(self)
    }
}

impl Taking {
    pub fn new() -> Self {
        Self { start: Instant::now(), bytes: 0 }
    }

    /// Returns since when the data waits for the client: the slower it takes them, the longer.
    pub fn since(&self) -> Instant {
        (self.start + Duration::from_secs_f64(self.bytes as f64 / READ_RATE)).min(Instant::now())
    }
}

impl Waiting {
    /// Returns the data, unless it was dropped.
    pub fn end(self) -> Option<Data> {
        self.pool.waiting().remove(&self.since)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Released after the lock.
        let _data = self.pool.waiting().remove(&self.since);
    }
}

impl BodyPermit {
    /// Reserves memory for at least `bytes` bytes in total.
    pub fn grow_to(&mut self, bytes: usize) -> Result<(), ApiError> {
        if bytes > self.bytes { self.grow(bytes) } else { Ok(()) }
    }

    /// Reserves memory for a body of `bytes` bytes in total. A body that becomes large holds all of its memory in the
    /// part of large bodies.
    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let (before, after) = (self.bodies.pool(self.bytes), self.bodies.pool(bytes));
        let held = self.permit.take().filter(|_| Arc::ptr_eq(before, after));
        let more = bytes.div_ceil(BYTES_PER_PERMIT);
        let more = more.saturating_sub(held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        let mut permit = after.take(more).ok_or_else(|| (self.bodies.full)(after.bytes))?;
        if let Some(held) = held {
            permit.merge(held);
        }
        (self.permit, self.bytes, self.grown) = (Some(permit), bytes, Instant::now());
        Ok(())
    }
}

/// A large answer that the connection takes in pieces.
struct Answer {
    rest: Option<Waiting>,
    taking: Taking,
    length: usize,
}

/// Returns the error of an answer that was dropped because others needed its memory.
pub(super) fn dropped() -> io::Error {
    io::Error::other("the client did not read, and others needed the memory")
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Some(rest) = self.rest.take() else { return Poll::Ready(None) };
        let Some(data) = rest.end() else { return Poll::Ready(Some(Err(dropped()))) };
        let end = (self.taking.bytes + PIECE_BYTES).min(self.length);
        let piece = Bytes::copy_from_slice(&data.bytes[self.taking.bytes..end]);
        self.taking.bytes = end;
        if end < self.length {
            self.rest = Some(data.wait(self.taking.since()));
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.taking.bytes == self.length
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact((self.length - self.taking.bytes) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permit(bodies: &Bodies, bytes: usize) -> Result<BodyPermit, ApiError> {
        let mut permit = bodies.empty_permit();
        // Grow in four parts, as a body arrives.
        for part in 1..=4 {
            permit.grow(bytes * part / 4)?;
        }
        Ok(permit)
    }

    #[test]
    fn all_bodies_together_have_a_limit() {
        let bodies = Bodies::new();
        let large: Vec<BodyPermit> = std::iter::from_fn(|| permit(&bodies, BODY_LIMIT).ok()).collect();
        assert_eq!(large.len(), 6, "48 MiB for large bodies");
        assert_eq!(bodies.held(), 48 << 20);
        let full = permit(&bodies, BODY_LIMIT).err().unwrap();
        assert_eq!((full.status.as_u16(), full.retry_after), (503, Some(1)));
        let small: Vec<BodyPermit> = std::iter::from_fn(|| permit(&bodies, SMALL_BYTES).ok()).collect();
        assert_eq!(small.len(), SMALL_BODIES_LIMIT / SMALL_BYTES, "large bodies leave all memory of small ones");
        assert!(permit(&bodies, 1).is_err() && bodies.held() == BODIES_LIMIT as u64);
        drop((large, small));
        assert_eq!(bodies.held(), 0);
        assert_eq!(permit(&bodies, 1).unwrap().bodies.held(), BYTES_PER_PERMIT as u64);
    }

    #[test]
    fn data_that_waits_is_dropped_for_others() {
        let bodies = Bodies::new();
        let data = |size| Data { bytes: vec![0; 1], permit: permit(&bodies, size).unwrap() };
        let now = Instant::now();
        let before = |seconds| now.checked_sub(Duration::from_secs(seconds)).unwrap();
        // Six fill the memory.
        let newer = data(BODY_LIMIT).wait(before(5));
        let older = data(BODY_LIMIT).wait(before(9));
        let newest = data(BODY_LIMIT).wait(now);
        let small = data(1).wait(before(20));
        let others = [data(BODY_LIMIT), data(BODY_LIMIT), data(BODY_LIMIT)];
        let large = permit(&bodies, BODY_LIMIT).unwrap();
        assert!(older.end().is_none());
        let newer = newer.end().expect("one was enough");
        assert!(permit(&bodies, BODY_LIMIT).is_err(), "the newest has not waited long");
        assert!(newest.end().is_some() && small.end().is_some());
        // The slower a client takes data, the longer they wait.
        let from = before(10);
        assert_eq!(Taking { start: from, bytes: 1 << 20 }.since(), from + Duration::from_secs(4));
        assert!(Taking { start: from, bytes: 10 << 20 }.since() >= now);
        drop((others, large, newer));
        assert_eq!(bodies.held(), 0);
        drop(data(BODY_LIMIT).wait(now));
        assert_eq!(bodies.held(), 0, "a client that disconnects");
    }
}
