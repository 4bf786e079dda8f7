//! The memory of all request bodies together, and that of all whole answers, within a limit.

use std::{error::Error as _, sync::Arc};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::header,
};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// The largest body of a request, bytes: a million token ids and more.
pub const BODY_LIMIT: usize = 8 << 20;
/// The maximum size of all bodies together, bytes.
const BODIES_LIMIT: usize = 64 << 20;
/// The part of [`BODIES_LIMIT`] that is reserved for the first [`SMALL_BYTES`] bytes of each body, so that large bodies
/// leave memory for small ones.
const SMALL_BYTES_LIMIT: usize = 16 << 20;
/// The size of a small body, and of the part of a large one that counts as small; bytes.
pub(super) const SMALL_BYTES: usize = 64 << 10;
/// Bytes per permit.
const BYTES_PER_PERMIT: usize = 1 << 10;

/// A memory budget of bodies.
#[derive(Clone)]
pub(super) struct Bodies {
    /// Returns the error that the limit was reached.
    full: fn(usize) -> ApiError,
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

/// The memory that a body holds; dropping it releases the memory.
pub(super) struct BodyPermit {
    bodies: Bodies,
    small: Option<OwnedSemaphorePermit>,
    large: Option<OwnedSemaphorePermit>,
    bytes: usize,
}

impl Bodies {
    pub fn new(full: fn(usize) -> ApiError) -> Self {
        Self {
            full,
            small: Arc::new(Semaphore::new(SMALL_BYTES_LIMIT / BYTES_PER_PERMIT)),
            large: Arc::new(Semaphore::new((BODIES_LIMIT - SMALL_BYTES_LIMIT) / BYTES_PER_PERMIT)),
        }
    }

    /// Returns the bytes that bodies hold.
    pub fn held(&self) -> u64 {
        let free = self.small.available_permits() + self.large.available_permits();
        (BODIES_LIMIT / BYTES_PER_PERMIT).saturating_sub(free) as u64 * BYTES_PER_PERMIT as u64
    }

    fn empty_permit(&self) -> BodyPermit {
        BodyPermit { bodies: self.clone(), small: None, large: None, bytes: 0 }
    }

    /// Returns an answer as a body, which holds its memory until it is sent or the client has disconnected.
    pub fn hold(&self, answer: Vec<u8>) -> Result<Body, ApiError> {
        struct Held {
            answer: Vec<u8>,
            _permit: BodyPermit,
        }
        impl AsRef<[u8]> for Held {
            fn as_ref(&self) -> &[u8] {
                &self.answer
            }
        }
        let mut permit = self.empty_permit();
        // A larger answer is sent when it is the only large one.
        permit.grow(answer.len().min(BODIES_LIMIT - SMALL_BYTES_LIMIT))?;
        Ok(Bytes::from_owner(Held { answer, _permit: permit }).into())
    }

    /// Reads a body. Memory is reserved as data arrives, not by the announced length. Without room, the rest of the
    /// body is discarded, so that the client reads the error.
    pub async fn read(&self, request: Request) -> Result<(Vec<u8>, BodyPermit), ApiError> {
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > BODY_LIMIT as u64) {
            return Err(ApiError::body(BODY_LIMIT));
        }
        let mut permit = self.empty_permit();
        let (mut body, mut bytes, mut length) = (request.into_body(), Vec::new(), 0);
        let mut full = None;
        while let Some(data) = next(&mut body).await? {
            length += data.len();
            if length > BODY_LIMIT {
                return Err(ApiError::body(BODY_LIMIT));
            }
            if full.is_some() {
                continue;
            }
            if length > bytes.capacity() {
                let hint = usize::try_from(body.size_hint().upper().unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
                // Reserve a quarter more, so that a body of many pieces is not copied often, but not more than the rest
                // of the body.
                let capacity =
                    (length + length / 4 + BYTES_PER_PERMIT).min(length.saturating_add(hint)).min(BODY_LIMIT);
                if let Err(error) = permit.grow(capacity) {
                    full = Some(error);
                    (bytes, permit) = (Vec::new(), self.empty_permit());
                    continue;
                }
                bytes.reserve_exact(capacity - bytes.len());
            }
            bytes.extend_from_slice(&data);
        }
        full.map_or(Ok((bytes, permit)), Err)
    }
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

impl BodyPermit {
    /// Reserves memory for a body of `bytes` bytes in total.
    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let units = |bytes: usize| bytes.div_ceil(BYTES_PER_PERMIT);
        let (before, after) = (self.bytes, bytes);
        let acquire = |semaphore: &Arc<Semaphore>, held: &mut Option<OwnedSemaphorePermit>, more: usize| {
            let permit = Arc::clone(semaphore).try_acquire_many_owned(more as u32).ok()?;
            match held {
                Some(held) => held.merge(permit),
                None => *held = Some(permit),
            }
            Some(())
        };
        let small = units(after.min(SMALL_BYTES)) - units(before.min(SMALL_BYTES));
        let large = units(after.saturating_sub(SMALL_BYTES)) - units(before.saturating_sub(SMALL_BYTES));
        let both = acquire(&self.bodies.small, &mut self.small, small)
            .and_then(|()| acquire(&self.bodies.large, &mut self.large, large));
        both.ok_or_else(|| (self.bodies.full)(BODIES_LIMIT))?;
        self.bytes = bytes;
        Ok(())
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
        let bodies = Bodies::new(ApiError::bodies);
        let large: Vec<BodyPermit> = std::iter::from_fn(|| permit(&bodies, BODY_LIMIT).ok()).collect();
        assert_eq!(large.len(), 6, "48 MiB for large bodies, besides their first bytes");
        assert!(bodies.held() <= BODIES_LIMIT as u64);
        let full = permit(&bodies, BODY_LIMIT).err().unwrap();
        assert_eq!((full.status.as_u16(), full.retry_after), (503, Some(1)));
        let small: Vec<BodyPermit> = std::iter::from_fn(|| permit(&bodies, SMALL_BYTES).ok()).collect();
        assert_eq!(small.len(), (SMALL_BYTES_LIMIT / SMALL_BYTES) - 6, "large bodies leave memory for small ones");
        assert!(permit(&bodies, 1).is_err() && bodies.held() > 60 << 20);
        drop((large, small));
        assert_eq!(bodies.held(), 0);
        assert_eq!(permit(&bodies, 1).unwrap().bodies.held(), BYTES_PER_PERMIT as u64);
    }
}
