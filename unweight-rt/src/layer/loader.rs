//! From a bundle to layers.
//!
//! ```text
//! packed   --upload-------------------+
//! huffman  --transcode on the GPU-----+--> packed, 12 bits a weight --> register-sourced matmul (crate::ops::gemm_packed)
//! palette  --decode, pack on the GPU--+
//! raw      --pack on the GPU----------+
//! what cannot be packed --------------+--> BF16 --> cuBLAS
//! ```

use std::sync::Arc;

use unweight_codegen::{VariantSpec, spec::DecodeOutput};
use unweight_format::{
    FormId, Histogram, HuffmanTensor, PackedTensor,
    bundle::{Bundle, BundleError},
    packed::{Unpackable, Window},
    safetensors::Dtype,
};

use crate::{
    choose::{
        graph::Step,
        model::PackedChooser,
        reachable::{self, Choice, KernelSource, Wanted, Weight},
    },
    device::{DeviceError, DeviceInfo, KernelSet, LaneSize, Prepared, Refusal, Stream, module::LoadedKernel},
    jit::cache::Progress,
    layer::linear::Linear,
    ops::{
        decode::Decoder,
        gemm_packed::PackedGemm,
        lane::Lane,
        repack::{PackError, Packer},
    },
    weight::{DeviceHuffman, DeviceMatrix, DevicePacked, pods},
};

/// Why a layer could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The bundle does not have the tensor, or it is damaged.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The device, the compiler or the driver failed.
    #[error("{name}: {source}")]
    Device {
        /// The tensor, or the first of those that become one layer.
        name: String,
        /// What failed.
        #[source]
        source: Box<DeviceError>,
    },
    /// The tensors are no weights of a linear layer, or do not become one.
    #[error("{name}: {why}")]
    Unsuitable {
        /// The tensor.
        name: String,
        /// Why.
        why: Unsuitable,
    },
}

impl LoadError {
    /// What to do about it, where one thing is to be done.
    pub fn remedy(&self) -> Option<crate::Remedy> {
        match self {
            Self::Device { source, .. } => source.remedy(),
            _ => None,
        }
    }
}

/// Why tensors do not become a linear layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsuitable {
    /// Not BF16, or not of two dimensions.
    #[error("{dtype:?} of shape {shape:?} is not the weight of a linear layer (BF16, two dimensions)")]
    NotAMatrix {
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Extents that kernels cannot count.
    #[error("{extent} rows or columns exceed the kernels' 2^32 - 1; split it")]
    TooLarge {
        /// The extent.
        extent: u64,
    },
    /// Nothing to merge.
    #[error("no tensors were named; a merged layer has one at least")]
    Nothing,
    /// Weights of another input.
    #[error("has {cols} columns, {first} has {first_cols}; they are not of one input")]
    Columns {
        /// Of this tensor.
        cols: u32,
        /// The first tensor.
        first: String,
        /// Of the first tensor.
        first_cols: u32,
    },
    /// A gate and an up are two.
    #[error("a gate and an up are 2 tensors, not {count}")]
    NotAPair {
        /// How many were named.
        count: usize,
    },
    /// A gate and an up of shapes that do not become one layer.
    #[error(
        "a gate [{gate}, {k}] and an up [{up}, {k}] must have the same multiple of 32 rows, and a multiple of 64 columns; load \
         them apart"
    )]
    Pair {
        /// Rows of the gate.
        gate: u32,
        /// Rows of the up.
        up: u32,
        /// Columns of both.
        k: u32,
    },
    /// A gate and an up that cuBLAS would have to multiply, which has no such epilogue.
    #[error("a gate with its up cannot be packed: {0}; load them apart")]
    Unpackable(Unpackable),
    /// Sections of another form than the manifest says.
    #[error("is not the {form} tensor that the manifest says; the bundle is damaged")]
    OtherForm {
        /// By the manifest.
        form: FormId,
    },
    /// Longer codes than the bundle says.
    #[error("has codes of {bits} bits, the manifest says {limit} at most; the bundle is damaged")]
    CodeBits {
        /// The longest code.
        bits: u32,
        /// By the manifest.
        limit: u32,
    },
}

/// What layers are loaded for.
///
/// ```
/// # use unweight_rt::layer::loader::LoadOptions;
/// let options = LoadOptions::default().max_batch(256).pdl(false);
/// assert_eq!((options.max_batch, options.pdl), (256, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The largest batch; 4096 by default.
    pub max_batch: u32,
    /// Programmatic dependent launch: a layer asks for its weights while the kernel before it on the stream still runs, and waits for that one
    /// before it touches activations. Faster where layers follow each other closely; any kernel may come before. On by default.
    pub pdl: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { max_batch: 4096, pdl: true }
    }
}

impl LoadOptions {
    /// The largest batch.
    #[must_use]
    pub fn max_batch(self, max_batch: u32) -> Self {
        Self { max_batch, ..self }
    }

    /// Programmatic dependent launch.
    #[must_use]
    pub fn pdl(self, pdl: bool) -> Self {
        Self { pdl, ..self }
    }
}

/// How several weights become one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// One under the other: the outputs lie side by side (`q`, `k`, `v`).
    Rows,
    /// A gate and an up: the output is `silu(X gate^T) * (X up^T)`, computed in fp32 and rounded once. Made for batches of up to 64.
    SiluMul,
}

/// Loads layers onto one device.
pub struct Loader<'k> {
    kernels: &'k KernelSet,
    bundle: &'k Bundle,
    packer: Packer,
    wanted: Wanted,
    /// What the layers so far need.
    lane_size: LaneSize,
}

/// Every kernel that a loader with these options can ask for, for any tensor of this bundle, alone or merged as servers do it. Reads the manifest only;
/// needs no device.
pub fn reachable(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> Vec<VariantSpec> {
    wanted(bundle, options, chooser).reachable(reachable::weights(bundle))
}

fn wanted(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> Wanted {
    let LoadOptions { max_batch, pdl } = options;
    Wanted { chooser, max_batch, pdl, code_limit: bundle.manifest().options.code_limit }
}

fn chooser(device: &DeviceInfo) -> PackedChooser {
    PackedChooser::of(device.arch, device.sms, &device.name)
}

impl KernelSource for KernelSet {
    type Kernel = Arc<LoadedKernel>;
    type Error = DeviceError;

    fn take(&self, specs: &[VariantSpec]) -> Result<Vec<Arc<LoadedKernel>>, DeviceError> {
        self.prepare(specs, &|_| {})?;
        specs.iter().map(|spec| self.get(spec)).collect()
    }
}

impl<'k> Loader<'k> {
    /// A loader of this bundle's layers, which works on `stream`. Its layers run on any stream of the device, on a lane each.
    ///
    /// Every kernel that the bundle can reach ([`reachable`]) is compiled or found first, in parallel; `progress` hears of each. Nothing is compiled
    /// later but for merges that [`reachable::weights`] does not foresee.
    ///
    /// # Errors
    /// A kernel cannot be made, or the device failed.
    pub fn new(
        kernels: &'k KernelSet,
        stream: &Stream,
        bundle: &'k Bundle,
        options: LoadOptions,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<(Self, Prepared), DeviceError> {
        let wanted = wanted(bundle, options, chooser(kernels.device().info()));
        let prepared = kernels.prepare(&wanted.reachable(reachable::weights(bundle)), progress)?;
        let loader =
            Self { packer: Packer::new(stream, kernels)?, kernels, bundle, wanted, lane_size: LaneSize::default() };
        Ok((loader, prepared))
    }

    /// Loads a tensor `[n, k]`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(&mut self, name: &str) -> Result<Linear, LoadError> {
        let bundle = self.bundle;
        let shape = extents(bundle, name)?;
        let device = in_tensor(name);
        let weight = Weight::stored(shape.0, shape.1, bundle.entry(name)?.form);
        match weight.route().first().map(|edge| edge.step) {
            Some(Step::GemmPacked) if weight.padded() == Some(shape) => {
                let Some(tensor) = PackedTensor::of(bundle.tensor(name)?) else {
                    return Err(unsuitable(name, Unsuitable::OtherForm { form: bundle.entry(name)?.form }));
                };
                let packed = DevicePacked::upload(self.packer.stream(), &tensor).map_err(&device)?;
                let layer = self.packed(packed, &weight).map_err(&device)?;
                Ok(self.noted(layer))
            }
            Some(Step::Decode(DecodeOutput::Full)) => {
                let Some(tensor) = HuffmanTensor::of(bundle.tensor(name)?) else {
                    return Err(unsuitable(name, Unsuitable::OtherForm { form: bundle.entry(name)?.form }));
                };
                let (bits, limit) = (tensor.code().max_length(), self.wanted.code_limit);
                let spec = self.wanted.decoder().filter(|_| bits <= limit);
                let spec = spec.ok_or_else(|| unsuitable(name, Unsuitable::CodeBits { bits, limit }))?;
                let tensor = DeviceHuffman::upload(self.packer.stream(), &tensor).map_err(&device)?;
                let layer = self.huffman(&spec, &tensor, &weight).map_err(&device)?;
                Ok(self.noted(layer))
            }
            // Raw, and any form that the host decodes.
            _ => self.bf16(name, &bundle.decode(name)?, &weight),
        }
    }

    /// Loads several tensors as one layer.
    ///
    /// # Errors
    /// [`LoadError`]; the tensors have different `k`, or a gate and an up do not have the same multiple of 32 rows.
    pub fn merge(&mut self, names: &[&str], merge: Merge) -> Result<Linear, LoadError> {
        let bundle = self.bundle;
        let Some(&first) = names.first() else {
            return Err(unsuitable("merge", Unsuitable::Nothing));
        };
        let shapes = names.iter().map(|name| extents(bundle, name)).collect::<Result<Vec<_>, _>>()?;
        let k = shapes[0].1;
        let mut n = 0u32;
        for (&name, &(rows, cols)) in names.iter().zip(&shapes) {
            if cols != k {
                let why = Unsuitable::Columns { cols, first: first.to_owned(), first_cols: k };
                return Err(unsuitable(name, why));
            }
            let sum = u64::from(n) + u64::from(rows);
            n = u32::try_from(sum).map_err(|_| unsuitable(name, Unsuitable::TooLarge { extent: sum }))?;
        }
        let pair = match (merge, shapes.as_slice()) {
            (Merge::Rows, _) => false,
            (Merge::SiluMul, &[(gate, _), (up, _)]) => {
                if gate != up || !gate.is_multiple_of(32) || !k.is_multiple_of(64) {
                    return Err(unsuitable(first, Unsuitable::Pair { gate, up, k }));
                }
                true
            }
            (Merge::SiluMul, _) => return Err(unsuitable(first, Unsuitable::NotAPair { count: names.len() })),
        };
        let parts = names.iter().map(|name| bundle.decode(name)).collect::<Result<Vec<_>, _>>()?;
        match parts.as_slice() {
            [gate, up] if pair => {
                // 16 rows of the one and 16 of the other in turn: what one warp multiplies.
                let block = 16 * k as usize * 2;
                let mut turns = Vec::with_capacity(2 * gate.len());
                for (gate, up) in gate.chunks_exact(block).zip(up.chunks_exact(block)) {
                    turns.extend_from_slice(gate);
                    turns.extend_from_slice(up);
                }
                self.bf16(first, &turns, &Weight::merged(n, k, true))
            }
            _ => self.bf16(first, &parts.concat(), &Weight::merged(n, k, false)),
        }
    }

    /// A lane of `stream` for every layer loaded so far.
    ///
    /// # Errors
    /// Not enough memory, or no cuBLAS where a layer needs it.
    pub fn lane(&self, stream: &Stream) -> Result<Lane, DeviceError> {
        Lane::new(stream, self.lane_size)
    }

    fn noted(&mut self, layer: Linear) -> Linear {
        self.lane_size = self.lane_size.max(layer.lane_size());
        layer
    }

    /// Transcoded if it can be packed, else decoded.
    fn huffman(&mut self, spec: &VariantSpec, tensor: &DeviceHuffman, weight: &Weight) -> Result<Linear, DeviceError> {
        let decoder = Decoder::new(self.kernels.get(spec)?)?;
        match self.packer.transcode(&decoder, tensor) {
            Ok(packed) => self.packed(packed, weight),
            Err(PackError::Device(error)) => Err(error),
            Err(PackError::Unpackable(_)) => {
                let mut whole = DeviceMatrix::zeroed(self.packer.stream(), weight.n, weight.k)?;
                self.packer.decode(&decoder, tensor, whole.view_mut())?;
                Ok(Linear::whole(whole))
            }
        }
    }

    /// BF16 as it was: packed if it can be, padded to whole tiles.
    fn bf16(&mut self, name: &str, bytes: &[u8], weight: &Weight) -> Result<Linear, LoadError> {
        let device = in_tensor(name);
        let (n, k) = (weight.n, weight.k);
        let too_large = || unsuitable(name, Unsuitable::TooLarge { extent: n.max(k).into() });
        let padded = weight.padded().ok_or_else(too_large)?;
        let elements = if padded == (n, k) { pods(bytes) } else { pad(bytes, (n, k), padded) };
        let elements = elements.map_err(|refusal| device(refusal.into()))?;
        let stream = self.packer.stream();
        let whole = DeviceMatrix::from_host(stream, padded.0, padded.1, &elements).map_err(&device)?;
        let layer = match self.packer.pack(whole.view()) {
            Ok(packed) => self.packed(packed, weight),
            Err(PackError::Device(error)) => Err(error),
            Err(PackError::Unpackable(why)) if weight.gated => {
                return Err(unsuitable(name, Unsuitable::Unpackable(why)));
            }
            Err(PackError::Unpackable(_)) if padded == (n, k) => Ok(Linear::whole(whole)),
            Err(PackError::Unpackable(_)) => pods(bytes)
                .map_err(DeviceError::from)
                .and_then(|elements| DeviceMatrix::from_host(self.packer.stream(), n, k, &elements))
                .map(Linear::whole),
        };
        Ok(self.noted(layer.map_err(&device)?))
    }

    /// Every kernel that some batch asks for, loaded.
    fn packed(&mut self, packed: DevicePacked, weight: &Weight) -> Result<Linear, DeviceError> {
        let choices = self.wanted.take_gemms(self.kernels, weight, packed.has_escapes())?;
        let gemm = |Choice { epilogue, last, kernel }| -> Result<_, DeviceError> {
            Ok(Choice { epilogue, last, kernel: PackedGemm::new(kernel)? })
        };
        let choices = choices.into_iter().map(gemm).collect::<Result<_, _>>()?;
        Ok(Linear::packed((weight.n, weight.k), packed, choices))
    }
}

/// What failed on the device, with the tensor that it failed for.
fn in_tensor(name: &str) -> impl Fn(DeviceError) -> LoadError {
    let name = name.to_owned();
    move |source| LoadError::Device { name: name.clone(), source: Box::new(source) }
}

fn unsuitable(name: &str, why: Unsuitable) -> LoadError {
    LoadError::Unsuitable { name: name.to_owned(), why }
}

/// `[n, k]` of a tensor.
fn extents(bundle: &Bundle, name: &str) -> Result<(u32, u32), LoadError> {
    let entry = bundle.entry(name)?;
    match entry.shape.as_slice() {
        &[n, k] if entry.dtype == Dtype::Bf16 && n > 0 && k > 0 => match (u32::try_from(n), u32::try_from(k)) {
            (Ok(n), Ok(k)) => Ok((n, k)),
            _ => Err(unsuitable(name, Unsuitable::TooLarge { extent: n.max(k) as u64 })),
        },
        shape => {
            let shape = shape.iter().map(|extent| *extent as u64).collect();
            Err(unsuitable(name, Unsuitable::NotAMatrix { dtype: entry.dtype, shape }))
        }
    }
}

/// The matrix in the corner of a larger one. What is added lies in the window that suits the weights, so that it costs no escapes.
fn pad(bytes: &[u8], (n, k): (u32, u32), (padded_n, padded_k): (u32, u32)) -> Result<Vec<u16>, Refusal> {
    let fill = u16::from(Window::best(&Histogram::of(bytes)).0.base()) << 7;
    let mut padded = vec![fill; padded_n as usize * padded_k as usize];
    for (row, from) in
        padded.chunks_exact_mut(padded_k as usize).zip(bytes.chunks_exact(k as usize * 2)).take(n as usize)
    {
        row[..k as usize].copy_from_slice(&pods(from)?);
    }
    Ok(padded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_stays_inside_the_window() {
        let bytes: Vec<u8> =
            [0x3f80u16, 0x3f00, 0xbe80, 0x3f81, 0x3f80, 0x3f80].iter().flat_map(|b| b.to_le_bytes()).collect();
        let padded = pad(&bytes, (3, 2), (4, 5)).unwrap();
        assert_eq!(padded.len(), 20);
        assert_eq!((padded[0], padded[1], padded[5], padded[11]), (0x3f80, 0x3f00, 0xbe80, 0x3f80));
        let all: Vec<u8> = padded.iter().flat_map(|b| b.to_le_bytes()).collect();
        assert_eq!(Window::best(&Histogram::of(&all)).1, 0, "no escapes");
    }
}
