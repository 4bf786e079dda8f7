//! Encoding from and to pinned memory.
//!
//! ```text
//! stream `up`     upload 0 | upload 1 | upload 2 | ...
//! main stream              | stats 0  | stats 1  | ... | table, rows, scan, write | download of the other sections
//! stream `down`                       | download 0 | download 1 | ...
//! ```
//! Half of a tensor, its signs and mantissas, does not depend on statistics: a piece is split and downloaded while
//! later ones are uploaded. The link copies in both directions at once, so what remains after the last upload are the
//! kernels and the coded exponents.

use std::sync::Arc;

use unweight_codegen::{abi::EncodeHuffmanArgs, plan::GemmShape, spec::EncodeHuffmanStage};
use unweight_format::{EncodingId, Matrix, StoredTensor, bundle::SectionBytes, raw::Section};

use super::{EncodeBuffers, EncodeWorkspace, GpuEncoder, HUFFMAN_STAGES, PALETTE_STAGES, take};
use crate::device::{
    Device, DeviceError, Mark, Stream,
    copies::Part,
    pinned_pool::{Download, HostMemory, Upload},
    ranges::pieces,
    view::check_device,
};

/// The elements that are uploaded, split and downloaded at once, 8 MiB of BF16. A multiple of the 512 elements that
/// `stats` takes at a time.
const PIECE: usize = 4 << 20;
const _: () = assert!(PIECE.is_multiple_of(512), "`stats` loads 16 aligned bytes");

/// The streams of the copies, and the marks for which streams wait.
#[derive(Debug)]
pub(super) struct CopyStreams {
    up: Stream,
    down: Stream,
    uploaded: Mark,
    split: Mark,
}

impl CopyStreams {
    fn new(device: &Device) -> Result<Self, DeviceError> {
        let (uploaded, split) = (Mark::new(device)?, Mark::new(device)?);
        Ok(Self { up: device.stream()?, down: device.stream()?, uploaded, split })
    }
}

/// The encodings that this family makes.
#[derive(Clone, Copy)]
enum Coding {
    Huffman,
    Palette,
}

impl GpuEncoder {
    /// Like [`GpuEncoder::encode_in`]. A matrix in memory that `memory` lent is uploaded from there, and sections stay
    /// in memory that it lends. What finds no room there is copied as by [`GpuEncoder::encode_in`].
    ///
    /// # Errors
    /// As for [`GpuEncoder::encode`].
    #[doc(hidden)]
    pub fn encode_pinned(
        &self,
        workspace: &mut EncodeWorkspace,
        matrix: Matrix<'_>,
        memory: Option<&HostMemory>,
    ) -> Result<StoredTensor<SectionBytes>, DeviceError> {
        self.encode_coding(workspace, matrix, memory, Coding::Huffman)
    }

    /// Like [`GpuEncoder::encode_pinned`], as a palette tensor.
    ///
    /// # Errors
    /// As for [`GpuEncoder::encode_palette`].
    #[doc(hidden)]
    pub fn encode_palette_pinned(
        &self,
        workspace: &mut EncodeWorkspace,
        matrix: Matrix<'_>,
        memory: Option<&HostMemory>,
    ) -> Result<StoredTensor<SectionBytes>, DeviceError> {
        self.encode_coding(workspace, matrix, memory, Coding::Palette)
    }

    fn encode_coding(
        &self,
        workspace: &mut EncodeWorkspace,
        matrix: Matrix<'_>,
        memory: Option<&HostMemory>,
        coding: Coding,
    ) -> Result<StoredTensor<SectionBytes>, DeviceError> {
        let (grid, bytes) = (matrix.grid(), matrix.bytes().len() as u64);
        let trace = workspace.trace.clone();
        trace.time("allocate", bytes, || workspace.fit(grid))?;
        let EncodeWorkspace { stream, copier, buffers: Some(buffers), copies, .. } = workspace else {
            unreachable!("`fit` has made the buffers")
        };
        let copies = match copies {
            Some(copies) => copies,
            None => copies.insert(CopyStreams::new(stream.device())?),
        };
        let is_pinned = memory.is_some_and(|memory| memory.contains(matrix.bytes()));
        let mut plane =
            memory.and_then(|memory| memory.section(grid.elements())).map(|buffer| Download::new(&copies.down, buffer));
        let stages = match coding {
            Coding::Huffman => HUFFMAN_STAGES,
            Coding::Palette => PALETTE_STAGES,
        };
        trace.time("upload", bytes, || {
            // After the work of an earlier tensor that failed.
            copies.up.wait_for(stream)?;
            buffers.scratch.fill_bytes(stream, 0)?;
            let mut upload = Upload::new(&copies.up, matrix.bytes());
            if is_pinned {
                self.enqueue_pieces(buffers, copies, &mut upload, plane.as_mut())?;
            } else {
                copier.upload(&mut buffers.weights, matrix.bytes())?;
                self.enqueue_split(buffers, copies, (0, grid.elements()), plane.as_mut())?;
            }
            for stage in &stages[1..] {
                // SAFETY: `stats` has been enqueued for every element, after the scratch was cleared, and the stages
                // follow in their order; the buffers are borrowed mutably meanwhile.
                unsafe { self.enqueue_stage(buffers, *stage) }?;
            }
            upload.finish()
        })?;
        let totals = trace.time("kernels", bytes, || buffers.totals())?;
        let download = || -> Result<_, DeviceError> {
            let mut parts = match coding {
                Coding::Huffman => buffers.huffman_parts(totals)?,
                Coding::Palette => buffers.palette_parts(totals)?,
            };
            if plane.is_some() {
                parts.retain(|(section, _)| *section != Section::SIGN_MANTISSA);
            }
            let (names, parts): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
            let read = HostMemory::download(memory, copier, &parts)?;
            let mut sections: Vec<_> = names.into_iter().zip(read).collect();
            if let Some(plane) = plane {
                let buffer = plane.finish()?;
                let all = 0..buffer.len();
                sections.extend(SectionBytes::part(Arc::new(buffer), all).map(|b| (Section::SIGN_MANTISSA, b)));
            }
            Ok(sections)
        };
        let mut sections = trace.time("download", bytes, download)?;
        let encoding = match coding {
            Coding::Huffman => EncodingId::HUFFMAN,
            Coding::Palette => EncodingId::PALETTE,
        };
        let in_order = encoding.encoding().sections().iter().map(|&section| take(&mut sections, section)).collect();
        Ok(trace.time("check", bytes, || StoredTensor::new(encoding, grid, in_order))?)
    }

    /// Enqueues the upload of a matrix in pinned memory piece by piece. Each piece is split when it is there, and its
    /// signs and mantissas are downloaded to `plane`.
    fn enqueue_pieces(
        &self,
        buffers: &mut EncodeBuffers,
        copies: &CopyStreams,
        upload: &mut Upload<'_, '_>,
        mut plane: Option<&mut Download<'_>>,
    ) -> Result<(), DeviceError> {
        for piece in pieces(buffers.grid.elements(), PIECE) {
            let bytes = 2 * piece.start..2 * piece.end;
            upload.add(bytes.clone(), &mut buffers.weights, bytes.start)?;
            copies.up.record(&copies.uploaded)?;
            buffers.stream.wait(&copies.uploaded)?;
            self.enqueue_split(buffers, copies, (piece.start, piece.len()), plane.as_deref_mut())?;
        }
        Ok(())
    }

    /// Enqueues `stats` for `len` elements from index `at`, and the download of their signs and mantissas to `plane`.
    fn enqueue_split(
        &self,
        buffers: &mut EncodeBuffers,
        copies: &CopyStreams,
        (at, len): (usize, usize),
        plane: Option<&mut Download<'_>>,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(EncodeHuffmanStage::Stats);
        let (ordinal, other) = (kernel.device().ordinal(), buffers.stream.device().ordinal());
        check_device("the buffers", other, ordinal).or_else(|refusal| kernel.refuse(refusal))?;
        let (weights, sign_mantissa) =
            (buffers.weights.element(2 * at, 2 * len)?, buffers.sign_mantissa.element(at, len)?);
        let args = EncodeHuffmanArgs { weights, sign_mantissa, ..buffers.args(self.limit) };
        // `stats` has no tiles: the elements of a whole matrix have its shape, those of a piece are one row.
        let [n, k] = if len == buffers.grid.elements() { [args.n, args.k] } else { [1, len as u32] };
        let args = EncodeHuffmanArgs { n, k, ..args };
        // SAFETY: both buffers have `n * k` elements there, checked above, at multiples of 16 bytes; the histogram has
        // its fixed size. Dropping a buffer waits for the kernel.
        unsafe { kernel.launch(&buffers.stream, GemmShape { m: 0, n, k }, &args) }?;
        let Some(plane) = plane else { return Ok(()) };
        buffers.stream.record(&copies.split)?;
        copies.down.wait(&copies.split)?;
        plane.add(&Part::range(&buffers.sign_mantissa, at..at + len)?, at..at + len)
    }
}
