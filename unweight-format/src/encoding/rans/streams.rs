//! A section of chunks, which threads encode in any order.

use std::{cell::Cell, collections::BTreeMap, sync::Mutex};

use super::{
    CHUNK, CHUNK_HEAD,
    coder::{SLACK, STATE_MIN, STATES},
};
use crate::{bits::with_capacity, layout::SECTION_ALIGN};

/// Chunks in order. A chunk is copied to the section from where it was encoded if all chunks before it are there.
/// Otherwise a copy of it waits: on one thread, none does.
pub(super) struct Streams {
    chunks: Mutex<Chunks>,
}

struct Chunks {
    section: Vec<u8>,
    /// Chunks of the section.
    count: usize,
    waiting: BTreeMap<usize, Vec<u8>>,
}

thread_local! {
    /// Where a thread assembles the words of a chunk: kept from chunk to chunk, as filling it with zeros takes as long
    /// as a fifth of the encoding.
    static WORDS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl Streams {
    /// An empty section for the chunks of this number of symbols, with room for what `bytes` of a tensor hardly exceed.
    /// Memory is used as chunks arrive.
    pub(super) fn of_symbols(symbols: usize, bytes: usize) -> Self {
        let room = bytes + symbols.div_ceil(CHUNK) * (CHUNK_HEAD + 4) + SECTION_ALIGN;
        let chunks = Chunks { section: with_capacity(room), count: 0, waiting: BTreeMap::new() };
        Self { chunks: Mutex::new(chunks) }
    }

    /// Adds a chunk of `symbols` symbols, which `encode` encodes, the last one first: it advances the states, and
    /// writes words in front of a position.
    pub(super) fn add(
        &self,
        chunk: usize,
        symbols: usize,
        encode: impl FnOnce(&mut [u32; STATES], &mut [u8], &mut usize),
    ) {
        let mut buffer = WORDS.take();
        let most = 2 * symbols + SLACK;
        if buffer.len() < most {
            buffer.resize(most, 0);
        }
        let words = &mut buffer[..most];
        let (mut states, mut at) = ([STATE_MIN; STATES], most);
        encode(&mut states, words, &mut at);
        let mut chunks = self.chunks.lock().expect("no thread panics while it holds it");
        if chunks.count == chunk {
            put(&mut chunks.section, &states, &words[at..]);
            chunks.count += 1;
            chunks.take_waiting();
        } else {
            drop(chunks);
            let mut bytes = Vec::with_capacity(CHUNK_HEAD + words[at..].len() + 4);
            put(&mut bytes, &states, &words[at..]);
            let mut chunks = self.chunks.lock().expect("no thread panics while it holds it");
            chunks.waiting.insert(chunk, bytes);
            chunks.take_waiting();
        }
        WORDS.set(buffer);
    }

    /// The section, of which all chunks were added.
    pub(super) fn finish(self) -> Vec<u8> {
        let Chunks { mut section, waiting, .. } = self.chunks.into_inner().expect("no thread panics while it holds it");
        assert!(waiting.is_empty(), "a chunk is missing");
        section.resize(section.len().next_multiple_of(SECTION_ALIGN), 0);
        section.shrink_to_fit();
        section
    }
}

impl Chunks {
    /// Moves chunks that follow the section to it.
    fn take_waiting(&mut self) {
        while let Some(bytes) = self.waiting.remove(&self.count) {
            self.section.extend_from_slice(&bytes);
            self.count += 1;
        }
    }
}

/// Appends a chunk: its number of words, its states, its words, and zeros up to four bytes.
fn put(bytes: &mut Vec<u8>, states: &[u32; STATES], words: &[u8]) {
    bytes.extend((words.len() as u32 / 2).to_le_bytes());
    bytes.extend(states.iter().flat_map(|state| state.to_le_bytes()));
    bytes.extend_from_slice(words);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}
