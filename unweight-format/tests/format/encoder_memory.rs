//! Encoders with memory of their own: the same bundles, and all memory returns.

use std::{
    fs,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use unweight_format::{
    CodeLimit, Digest, EncodingId, FloatMatrix, StoredTensor,
    bundle::{
        CompressOptions, CpuEncoder, Encoder, EncoderBuffer, EncoderError, EncoderMemory, Profile, SectionBytes,
        Silent, compress, compress_with,
    },
    testing::demo_model::{self, DemoOptions},
};

use crate::common::{Scratch, narrow, read_tree};

/// Lends blocks of one size. They come back with the bytes of earlier tensors.
struct Lender {
    block_bytes: usize,
    idle: Arc<Mutex<Vec<Vec<u8>>>>,
    blocks: usize,
    /// Tensors that were read into a block; sections that stayed in one; what else was encoded.
    counts: [AtomicUsize; 3],
    /// The number of rows of matrices that it fails to encode.
    fails: usize,
    reserved: AtomicUsize,
}

struct Block {
    bytes: Vec<u8>,
    len: usize,
    idle: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.idle.lock().unwrap().push(std::mem::take(&mut self.bytes));
    }
}

impl Lender {
    fn new(blocks: usize, block_bytes: usize, fails: usize) -> Self {
        let idle = Arc::new(Mutex::new(vec![vec![0xee; block_bytes]; blocks]));
        Self { block_bytes, idle, blocks, counts: Default::default(), fails, reserved: AtomicUsize::new(0) }
    }

    fn block(&self, len: usize) -> Option<Block> {
        let bytes = self.idle.lock().unwrap().pop_if(|_| len <= self.block_bytes)?;
        Some(Block { bytes, len, idle: self.idle.clone() })
    }

    fn counts(&self) -> [usize; 3] {
        assert_eq!(self.idle.lock().unwrap().len(), self.blocks, "every block came back");
        [0, 1, 2].map(|i| self.counts[i].load(Ordering::Relaxed))
    }
}

impl Encoder for Lender {
    fn encode(
        &self,
        _: FloatMatrix<'_>,
        _: EncodingId,
        _: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        panic!("an encoder with memory encodes there")
    }

    fn memory(&self) -> Option<&dyn EncoderMemory> {
        Some(self)
    }
}

impl EncoderMemory for Lender {
    fn reserve(&self, ram_bytes: u64, tensor_bytes: u64) -> u64 {
        self.reserved.store(tensor_bytes as usize, Ordering::Relaxed);
        ((self.blocks * self.block_bytes) as u64).min(ram_bytes)
    }

    fn buffer(&self, bytes: usize) -> Option<EncoderBuffer> {
        let block = self.block(bytes)?;
        self.counts[0].fetch_add(1, Ordering::Relaxed);
        Some(Box::new(block))
    }

    fn encode_here(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<SectionBytes>), EncoderError> {
        if matrix.grid().rows() == self.fails {
            return Err(EncoderError::Failed("it always fails".into()));
        }
        let grid = matrix.grid();
        let (digest, tensor) = CpuEncoder.encode(matrix, encoding, limit)?;
        let Some(mut block) = self.block(tensor.stored_bytes() as usize) else {
            self.counts[2].fetch_add(1, Ordering::Relaxed);
            return Ok((digest, tensor.into()));
        };
        self.counts[1].fetch_add(1, Ordering::Relaxed);
        let (mut ranges, mut at) = (Vec::new(), 0);
        for (_, bytes) in tensor.sections() {
            block[at..at + bytes.len()].copy_from_slice(bytes);
            ranges.push(at..at + bytes.len());
            at += bytes.len();
        }
        let block = Arc::new(block);
        let parts = ranges.into_iter().map(|range| SectionBytes::part(block.clone(), range).unwrap());
        Ok((digest, StoredTensor::new(encoding, grid, parts.collect())?))
    }
}

fn model(scratch: &Scratch) -> std::path::PathBuf {
    let source = scratch.path("model");
    demo_model::write(&source, &DemoOptions { experts: 2, ..narrow(3, 512, 3) }).unwrap();
    source
}

#[test]
fn bundles_do_not_depend_on_the_encoder_s_memory() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    for (at, (profile, blocks, ram_bytes)) in [
        (Profile::Distribution, 0, None),
        (Profile::Distribution, 1, Some(1)),
        (Profile::Packed, 2, Some(1 << 18)),
        (Profile::Palette, 40, None),
        (Profile::Compact, 3, Some(1 << 20)),
    ]
    .into_iter()
    .enumerate()
    {
        let options = CompressOptions::new(profile).ram_bytes(ram_bytes);
        let [own, lent] = ["own", "lent"].map(|name| scratch.path(&format!("{name}-{at}")));
        compress(&source, &own, &options, &Silent).unwrap();
        let lender = Lender::new(blocks, 1 << 20, 0);
        compress_with(&source, &lent, &options, &lender, &Silent).unwrap();
        assert!(read_tree(&own) == read_tree(&lent), "{profile}");
        let [read, kept, others] = lender.counts();
        assert_eq!(read > 0, blocks > 0 && ram_bytes.is_some(), "{profile}");
        // By default, a unit is larger than a block. With one block, which holds the tensor, its sections find none.
        assert!(others > 0 || blocks > 1, "{profile}");
        assert!(kept > 0 || blocks < 40, "{profile}");
        // Headers are small.
        let bytes: u64 = read_tree(&source).values().map(|file| file.len() as u64).sum();
        let tensor_bytes = lender.reserved.load(Ordering::Relaxed) as u64;
        assert!(tensor_bytes > bytes / 2 && tensor_bytes < bytes, "{tensor_bytes} of {bytes}");
    }
}

#[test]
fn memory_returns_after_errors() {
    let scratch = Scratch::new();
    let source = model(&scratch);
    let options = CompressOptions::default().threads(Some(2)).ram_bytes(Some(1 << 20));
    let shards = read_tree(&source);
    // Embedding and down_proj.
    for fails in [512, 256] {
        let (lender, out) = (Lender::new(8, 1 << 20, fails), scratch.path(&format!("fails-{fails}")));
        let error = compress_with(&source, &out, &options, &lender, &Silent).unwrap_err();
        assert_eq!(error.code(), "encoder-failed", "{error}");
        assert!(!out.exists());
        lender.counts();
    }
    // A disk error: the output's directory is gone.
    let lender = Lender::new(8, 1 << 20, 0);
    fs::write(scratch.path("file"), "").unwrap();
    compress_with(&source, &scratch.path("file").join("out"), &options, &lender, &Silent).unwrap_err();
    lender.counts();
    assert!(shards == read_tree(&source));
}
