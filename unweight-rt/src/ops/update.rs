//! Replaces elements of packed tensors in place (`docs/format.md` A.9), with the same bytes as packing the new matrix.
//!
//! ```text
//! all tensors   places, count --host: window, operands, room--> places, tiles, lists, count --host: digest-->
//! ```
//! `count` writes nothing, so a tensor that cannot be updated in place stays as it is. The host waits twice, for any
//! number of tensors.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::UpdateArgs,
    plan::GemmShape,
    spec::{UpdateStage, catalog},
};
use unweight_format::{Histogram, raw::packed::Window};

use crate::{
    device::{DeviceBuffer, DeviceError, KernelSet, Stream, buffer::copy_on_device, module::LoadedKernel},
    ops::unpack::problem,
    weight::{DevicePacked, check_capacity},
};

/// New values for some elements of a packed tensor, on its device.
#[derive(Clone, Copy, Debug)]
pub struct SparseUpdate<'a> {
    /// The tensor, whose memory the update writes.
    pub tensor: &'a DevicePacked,
    /// Address of i64 `[updates]`: `row * k + column`, ascending.
    pub index: u64,
    /// Address of bf16 `[updates]`.
    pub values: u64,
    /// The number of elements to replace.
    pub updates: u32,
}

/// The result of an update of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Updated {
    /// The tensor has the new weights.
    InPlace {
        /// The words of its escape lists.
        escape_words: usize,
    },
    /// Unchanged: the new matrix has another window, more lists than there is room for, or cannot be packed.
    NeedsPacking,
    /// Unchanged: a place is outside of the matrix.
    Outside,
    /// Unchanged: places do not ascend, or repeat.
    NotAscending,
    /// Unchanged, because another tensor of the call is [`Updated::Outside`].
    Skipped,
    /// Changed, but the digest of the result is not that of the new weights: a bug.
    Differs,
}

/// Words of the results of a tensor in the scratch: counts of exponents, words of lists, two faults, a free word, then
/// u64: inexact element, digest before and after writing.
const RESULT_WORDS: usize = 272;
const LIST_WORDS: usize = 256;
const FAULTS: usize = 257;
const INEXACT: usize = 260;
const DIGEST: usize = 262;
const DIGEST_AFTER: usize = 264;
const _: () = assert!(DIGEST_AFTER + 2 <= RESULT_WORDS && RESULT_WORDS.is_multiple_of(4));
/// Sections of the scratch begin at multiples of this number of words.
const ALIGN_WORDS: usize = 64;

/// The kernels that update packed tensors on one device, and their stream.
#[derive(Debug)]
pub struct Updater {
    stream: Stream,
    stages: [Arc<LoadedKernel>; 4],
}

/// Offsets in the scratch, in words.
struct Parts {
    /// Of each tensor.
    group_words: Vec<usize>,
    first: usize,
    old_heads: usize,
    old_escapes: usize,
    total: usize,
}

impl Parts {
    fn new<'a>(tensors: impl Iterator<Item = &'a DevicePacked>) -> Self {
        let (mut groups, mut cells, mut heads, mut escapes) = (Vec::new(), 0, 0, 0);
        for tensor in tensors {
            // A group is 64 row blocks, of which a tile has 4.
            groups.push(tensor.grid().tiles().div_ceil(16));
            // One more than the rows of all tiles.
            cells = cells.max(tensor.grid().tiles() * 64 + 1);
            heads = heads.max(tensor.escape_heads().len());
            escapes = escapes.max(tensor.escapes().len());
        }
        let mut end = groups.len() * RESULT_WORDS;
        let mut section = |words: usize| {
            let at = end.next_multiple_of(ALIGN_WORDS);
            end = at + words;
            at
        };
        let group_words = groups.into_iter().map(&mut section).collect();
        let (first, old_heads, old_escapes) = (section(cells), section(heads), section(escapes));
        Self { group_words, first, old_heads, old_escapes, total: end }
    }
}

impl Updater {
    /// Compiles or finds the kernels. All work runs on `stream`.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn new(stream: &Stream, kernels: &KernelSet) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        kernels.prepare(&catalog::update(arch).collect::<Vec<_>>(), &|_| {})?;
        let stage = |stage| kernels.get(&VariantSpec::update(arch, stage));
        Ok(Self {
            stream: stream.clone(),
            stages: [
                stage(UpdateStage::Places)?,
                stage(UpdateStage::Count)?,
                stage(UpdateStage::Tiles)?,
                stage(UpdateStage::Lists)?,
            ],
        })
    }

    /// Returns the u32 words of scratch that [`Updater::update`] needs for these tensors.
    pub fn scratch_words<'a>(tensors: impl Iterator<Item = &'a DevicePacked>) -> usize {
        Parts::new(tensors).total
    }

    /// Updates tensors of this device, and waits. Each is updated whole or stays as it is, except after a driver error.
    /// None is updated if a place is outside of its tensor.
    ///
    /// # Safety
    /// Addresses and lengths of the updates are as [`SparseUpdate`] says. Work of other streams on them, on the tensors
    /// and on the scratch is done, and nothing else accesses them during the call. No tensor is listed twice.
    ///
    /// # Errors
    /// A scratch smaller than [`Updater::scratch_words`], or a driver error.
    pub unsafe fn update(
        &self,
        jobs: &[SparseUpdate<'_>],
        scratch: &mut DeviceBuffer<u32>,
    ) -> Result<Vec<Updated>, DeviceError> {
        let parts = Parts::new(jobs.iter().map(|job| job.tensor));
        check_capacity("words of scratch", scratch.len(), parts.total)?;
        let args: Vec<_> = (0..jobs.len()).map(|i| arguments(&jobs[i], scratch.address(), &parts, i)).collect();
        // Results and group words. The sections that follow are of one tensor after another.
        scratch.fill_front(&self.stream, parts.first, 0)?;
        for (job, args) in jobs.iter().zip(&args) {
            // SAFETY: the tensor's sections have the sizes of its grid, the caller answers for the update and the
            // scratch. The kernel checks indices.
            unsafe {
                self.launch(UpdateStage::Places, job, args)?;
                self.launch(UpdateStage::Count, job, args)?;
            }
        }
        let counted = scratch.read(&self.stream, 0, jobs.len() * RESULT_WORDS)?;
        let mut results: Vec<_> = jobs
            .iter()
            .zip(counted.chunks_exact(RESULT_WORDS))
            .map(|(job, result)| judge(job.tensor, result))
            .collect();
        if results.contains(&Updated::Outside) {
            results
                .iter_mut()
                .filter(|result| **result != Updated::Outside)
                .for_each(|result| *result = Updated::Skipped);
            return Ok(results);
        }
        for (i, job) in jobs.iter().enumerate() {
            if matches!(results[i], Updated::InPlace { .. }) {
                // SAFETY: as above.
                unsafe { self.write(job, &args[i], scratch.address(), &parts) }?;
            }
        }
        let after = scratch.read(&self.stream, 0, jobs.len() * RESULT_WORDS)?;
        for (result, after) in results.iter_mut().zip(after.chunks_exact(RESULT_WORDS)) {
            if matches!(result, Updated::InPlace { .. }) && long(after, DIGEST) != long(after, DIGEST_AFTER) {
                *result = Updated::Differs;
            }
        }
        Ok(results)
    }

    /// Enqueues the writes of one tensor, and the digest of the result.
    ///
    /// # Safety
    /// As for [`Updater::update`].
    unsafe fn write(
        &self,
        job: &SparseUpdate<'_>,
        args: &UpdateArgs,
        scratch: u64,
        parts: &Parts,
    ) -> Result<(), DeviceError> {
        let (heads, escapes) = (job.tensor.escape_heads(), job.tensor.escapes());
        let (old_heads, old_escapes) = (word(scratch, parts.old_heads), word(scratch, parts.old_escapes));
        let copied = UpdateArgs { old_heads, old_escapes, ..*args };
        let digest_only =
            UpdateArgs { updates: 0, histogram: 0, digest: args.digest + 4 * (DIGEST_AFTER - DIGEST) as u64, ..*args };
        // SAFETY: the scratch has room for both copies. As for the counts; earlier tensors have read their copies,
        // because all runs on one stream.
        unsafe {
            copy_on_device(&self.stream, old_heads, heads.address(), heads.bytes())?;
            copy_on_device(&self.stream, old_escapes, escapes.address(), escapes.bytes())?;
            self.launch(UpdateStage::Places, job, &copied)?;
            self.launch(UpdateStage::Tiles, job, &copied)?;
            self.launch(UpdateStage::Lists, job, &copied)?;
            self.launch(UpdateStage::Count, job, &digest_only)
        }
    }

    /// # Safety
    /// As for [`Updater::update`], for these arguments.
    unsafe fn launch(&self, stage: UpdateStage, job: &SparseUpdate<'_>, args: &UpdateArgs) -> Result<(), DeviceError> {
        let kernel = match stage {
            UpdateStage::Places => &self.stages[0],
            UpdateStage::Count => &self.stages[1],
            UpdateStage::Tiles => &self.stages[2],
            UpdateStage::Lists => &self.stages[3],
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(&self.stream, problem(job.tensor.grid()), args) }
    }
}

/// The address of a word of the scratch.
fn word(scratch: u64, at: usize) -> u64 {
    scratch + 4 * at as u64
}

/// Returns the arguments of `count` for tensor `i`.
fn arguments(job: &SparseUpdate<'_>, scratch: u64, parts: &Parts, i: usize) -> UpdateArgs {
    let GemmShape { n, k, .. } = problem(job.tensor.grid());
    let result = |at: usize| word(scratch, i * RESULT_WORDS + at);
    // Below 2^32: checked when the tensor was created.
    let escape_words = job.tensor.escapes().len() as u32;
    UpdateArgs {
        packed: job.tensor.packed().address(),
        escape_heads: job.tensor.escape_heads().address(),
        escapes: job.tensor.escapes().address(),
        old_heads: job.tensor.escape_heads().address(),
        old_escapes: job.tensor.escapes().address(),
        index: job.index,
        values: job.values,
        first: word(scratch, parts.first),
        histogram: result(0),
        list_words: result(LIST_WORDS),
        group_words: word(scratch, parts.group_words[i]),
        inexact: result(INEXACT),
        digest: result(DIGEST),
        faults: result(FAULTS),
        updates: job.updates,
        escape_words,
        old_escape_words: escape_words,
        base: job.tensor.window().base().into(),
        n,
        k,
        tile_rows: job.tensor.grid().tile_rows() as u32,
        tile_cols: job.tensor.grid().tile_cols() as u32,
    }
}

fn long(result: &[u32], at: usize) -> u64 {
    u64::from(result[at]) | u64::from(result[at + 1]) << 32
}

/// Decides by the results of `count` whether a tensor can be updated in place.
fn judge(tensor: &DevicePacked, result: &[u32]) -> Updated {
    let mut histogram = Histogram::default();
    for (exponent, &count) in result[..256].iter().enumerate() {
        histogram.add(exponent as u8, count.into());
    }
    decide((tensor.window(), tensor.escapes().len()), &histogram, result)
}

fn decide((window, room): (Window, usize), histogram: &Histogram, result: &[u32]) -> Updated {
    let escape_words = result[LIST_WORDS] as usize;
    match () {
        () if result[FAULTS] != 0 => Updated::Outside,
        () if result[FAULTS + 1] != 0 => Updated::NotAscending,
        () if Window::covering(histogram).ok() != Some(window) => Updated::NeedsPacking,
        () if long(result, INEXACT) != 0 || escape_words > room => Updated::NeedsPacking,
        () => Updated::InPlace { escape_words },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_updated_only_if_its_window_and_room_stay() {
        let window = Window::new(100).unwrap();
        let mut histogram = Histogram::default();
        (100..116).for_each(|exponent| histogram.add(exponent, 1000));
        histogram.add(3, 62);
        let result = |words: u32, faults: [u32; 2], inexact: u32| {
            let mut result = vec![0; RESULT_WORDS];
            result[LIST_WORDS] = words;
            result[FAULTS..FAULTS + 2].copy_from_slice(&faults);
            result[INEXACT + 1] = inexact;
            result
        };
        let of = |histogram: &Histogram, result: Vec<u32>| decide((window, 9), histogram, &result);
        assert_eq!(of(&histogram, result(9, [0, 0], 0)), Updated::InPlace { escape_words: 9 });
        assert_eq!(of(&histogram, result(10, [0, 0], 0)), Updated::NeedsPacking);
        assert_eq!(of(&histogram, result(9, [0, 0], 1)), Updated::NeedsPacking);
        assert_eq!(of(&histogram, result(10, [1, 1], 1)), Updated::Outside);
        assert_eq!(of(&histogram, result(10, [0, 1], 1)), Updated::NotAscending);
        // One more escape than one in 256, and another window.
        let mut other = histogram.clone();
        other.add(3, 1);
        assert_eq!(of(&other, result(0, [0, 0], 0)), Updated::NeedsPacking);
        histogram.add(116, 1001);
        assert_eq!(of(&histogram, result(0, [0, 0], 0)), Updated::NeedsPacking);
    }
}
