//! Linear layers from a bundle: `Y[m, n] = X[m, k] * W[n, k]^T` on a GPU, whatever form the weights are stored in, at every batch.
//!
//! ```text
//! packed   --upload-------------------+
//! huffman  --transcode on the GPU-----+--> packed, 12 bits a weight --> register-sourced matmul (crate::ops::gemm_packed)
//! palette  --decode, pack on the GPU--+
//! raw      --pack on the GPU----------+
//! what cannot be packed --------------+--> BF16 --> cuBLAS
//! ```
//! Everything that a batch can ask for is compiled and allocated when a layer is loaded; [`Linear::enqueue`] only enqueues, so it may be captured
//! into a graph. Shapes that are no multiples of 64 take a padded path: two copies beside the product.
//!
//! ```no_run
//! use unweight_codegen::spec::Epilogue;
//! use unweight_format::bundle::Bundle;
//! use unweight_rt::{device::Device,choose::KernelSet, env::Env,layer::linear::{LoadOptions, Loader, Merge},weight::DeviceMatrix};
//!
//! let device = Device::open(0)?;
//! let (kernels, stream) = (KernelSet::open(&device, Env::process()?), device.stream()?);
//! let bundle = Bundle::open("bundle".as_ref())?;
//! let mut loader = Loader::new(&kernels, &stream, LoadOptions::default())?;
//! let mlp = loader.merge(&bundle, &["mlp.gate_proj.weight", "mlp.up_proj.weight"], Merge::SiluMul)?;
//! let down = loader.load(&bundle, "mlp.down_proj.weight")?;
//! let mut scratch = loader.scratch(&stream)?;
//!
//! let (m, x) = (8, DeviceMatrix::zeroed(&stream, 8, mlp.k())?);
//! let mut activated = DeviceMatrix::zeroed(&stream, m, mlp.n() / 2)?;
//! let mut residual = DeviceMatrix::zeroed(&stream, m, down.n())?;
//! mlp.enqueue(&stream, &x, &mut activated, Epilogue::SiluMul, &mut scratch)?;
//! down.enqueue(&stream, &activated, &mut residual, Epilogue::StoreAdd, &mut scratch)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashMap;

use unweight_codegen::{
    VariantSpec,
    plan::GemmShape,
    spec::{DecodeOutput, Epilogue},
};
use unweight_format::{
    FormId, Histogram, HuffmanTensor, PackedTensor,
    bundle::{Bundle, BundleError},
    packed::Window,
    safetensors::Dtype,
};

use crate::{
    choose::{
        KernelSet, decoder,
        model::{PackedChooser, PackedUse},
    },
    device::{DeviceBuffer, DeviceError, Stream},
    ops::cublas::Cublas,
    ops::decode::Decoder,
    ops::gemm_packed::{PackedGemm, Workspace},
    ops::repack::{PackError, Packer},
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
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The tensors are no weights of a linear layer, or do not go together.
    #[error("{name}: {what}")]
    Unsuitable {
        /// The tensor.
        name: String,
        /// Why.
        what: String,
    },
}

/// What layers are loaded for.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The largest batch.
    pub max_batch: u32,
    /// Programmatic dependent launch: a layer asks for its weights while the kernel before it on the stream still runs, and waits for that one
    /// before it touches activations. Faster where layers follow each other closely; any kernel may come before.
    pub pdl: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { max_batch: 4096, pdl: true }
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
    stream: Stream,
    packer: Packer,
    dispatch: PackedChooser,
    options: LoadOptions,
    /// Of each shape and use loaded so far, what dispatch chose: layers of a model have few shapes.
    choices: HashMap<(u32, u32, PackedUse), Vec<(u32, VariantSpec)>>,
    padded_x: usize,
    padded_y: usize,
    needs_cublas: bool,
}

impl<'k> Loader<'k> {
    /// A loader whose layers run on `stream` or later streams of the device.
    ///
    /// # Errors
    /// The kernels of [`Packer`] cannot be made.
    pub fn new(kernels: &'k KernelSet, stream: &Stream, options: LoadOptions) -> Result<Self, DeviceError> {
        Ok(Self {
            kernels,
            stream: stream.clone(),
            packer: Packer::new(stream, kernels)?,
            dispatch: PackedChooser::of(kernels.device().info()),
            options,
            choices: HashMap::new(),
            padded_x: 0,
            padded_y: 0,
            needs_cublas: false,
        })
    }

    /// Loads a tensor `[n, k]`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(&mut self, bundle: &Bundle, name: &str) -> Result<Linear, LoadError> {
        let (n, k) = extents(bundle, name)?;
        if n.is_multiple_of(64) && k.is_multiple_of(64) {
            let tensor = bundle.tensor(name)?;
            match tensor.form() {
                FormId::PACKED => {
                    let Some(tensor) = PackedTensor::of(tensor) else { unreachable!("its form was asked") };
                    let packed = DevicePacked::upload(&self.stream, &tensor)?;
                    return self.packed(packed, (n, k), Epilogue::Store);
                }
                FormId::HUFFMAN => {
                    let Some(tensor) = HuffmanTensor::of(tensor) else { unreachable!("its form was asked") };
                    let bits = tensor.code().max_length();
                    let spec = decoder(self.kernels.device().info().arch, DecodeOutput::Full, bits)
                        .ok_or_else(|| unsuitable(name, format!("no decoder takes codes of {bits} bits")))?;
                    let mut decoder = Decoder::new(&self.stream, self.kernels.get(&spec)?)?;
                    let tensor = DeviceHuffman::upload(&self.stream, &tensor)?;
                    match self.packer.transcode(&self.stream, &mut decoder, &tensor) {
                        Ok(packed) => return self.packed(packed, (n, k), Epilogue::Store),
                        Err(PackError::Device(error)) => return Err(error.into()),
                        Err(PackError::Unpackable(_)) => {
                            let mut whole = DeviceMatrix::zeroed(&self.stream, n, k)?;
                            decoder.full(&self.stream, &tensor, &mut whole)?;
                            decoder.check(&self.stream)?;
                            return Ok(self.whole(whole));
                        }
                    }
                }
                // Any other form is decoded on the host.
                _ => {}
            }
        }
        let bytes = bundle.decode(name)?;
        self.bf16(&bytes, (n, k), Epilogue::Store)
    }

    /// Loads several tensors as one layer.
    ///
    /// # Errors
    /// [`LoadError`]; the tensors have different `k`, or a gate and an up do not have the same multiple of 32 rows.
    pub fn merge(&mut self, bundle: &Bundle, names: &[&str], merge: Merge) -> Result<Linear, LoadError> {
        let Some(&first) = names.first() else {
            return Err(unsuitable("merge", "no tensors were named".to_owned()));
        };
        let (_, k) = extents(bundle, first)?;
        let mut n = 0u32;
        let mut parts = Vec::new();
        for &name in names {
            let (rows, cols) = extents(bundle, name)?;
            if cols != k {
                return Err(unsuitable(
                    name,
                    format!("has {cols} columns, {first} has {k}; they are not of one input"),
                ));
            }
            n = n.checked_add(rows).ok_or_else(|| unsuitable(name, "the rows exceed 2^32".to_owned()))?;
            parts.push(bundle.decode(name)?);
        }
        let (bytes, epilogue) = match merge {
            Merge::Rows => (parts.concat(), Epilogue::Store),
            Merge::SiluMul => {
                let [gate, up] = parts.as_slice() else {
                    return Err(unsuitable(first, format!("a gate and an up are 2 tensors, not {}", parts.len())));
                };
                if gate.len() != up.len() || !n.is_multiple_of(64) || !k.is_multiple_of(64) {
                    let what = "a gate and an up must have the same multiple of 32 rows, and a multiple of 64 columns; load them apart";
                    return Err(unsuitable(first, what.to_owned()));
                }
                // 16 rows of the one and 16 of the other in turn: what one warp multiplies.
                let block = 16 * k as usize * 2;
                let mut turns = Vec::with_capacity(2 * gate.len());
                for (gate, up) in gate.chunks_exact(block).zip(up.chunks_exact(block)) {
                    turns.extend_from_slice(gate);
                    turns.extend_from_slice(up);
                }
                (turns, Epilogue::SiluMul)
            }
        };
        self.bf16(&bytes, (n, k), epilogue)
    }

    /// The scratch memory of every layer loaded so far: one for all layers of a stream.
    ///
    /// # Errors
    /// Not enough memory, or no cuBLAS where a layer needs it.
    pub fn scratch(&self, stream: &Stream) -> Result<Scratch, DeviceError> {
        let launches = self.choices.iter().flat_map(|((n, k, _), ranges)| {
            // The largest batch of a range needs most.
            ranges.iter().map(|(last, spec)| (*spec, GemmShape { m: *last, n: *n, k: *k }))
        });
        Ok(Scratch {
            workspace: Workspace::new(stream, launches)?,
            x: DeviceBuffer::zeroed(stream, self.padded_x)?,
            y: DeviceBuffer::zeroed(stream, self.padded_y)?,
            cublas: if self.needs_cublas { Some(Cublas::new(stream)?) } else { None },
        })
    }

    /// BF16 as it was: packed if it can be, padded to whole tiles.
    fn bf16(&mut self, bytes: &[u8], (n, k): (u32, u32), epilogue: Epilogue) -> Result<Linear, LoadError> {
        let padded = (n.next_multiple_of(64), k.next_multiple_of(64));
        let elements = if padded == (n, k) { pods(bytes)? } else { pad(bytes, (n, k), padded)? };
        let weights = DeviceMatrix::from_host(&self.stream, padded.0, padded.1, &elements)?;
        match self.packer.pack(&self.stream, &weights) {
            Ok(packed) => self.packed(packed, (n, k), epilogue),
            Err(PackError::Device(error)) => Err(error.into()),
            Err(PackError::Unpackable(why)) if epilogue == Epilogue::SiluMul => {
                Err(unsuitable("merge", format!("a gate with its up cannot be packed: {why}; load them apart")))
            }
            Err(PackError::Unpackable(_)) => {
                Ok(self.whole(DeviceMatrix::from_host(&self.stream, n, k, &pods(bytes)?)?))
            }
        }
    }

    /// A layer for cuBLAS.
    fn whole(&mut self, weights: DeviceMatrix) -> Linear {
        self.needs_cublas = true;
        Linear { n: weights.rows(), k: weights.cols(), weights: Weights::Whole(weights) }
    }

    /// Every kernel that some batch asks for, loaded; what it needs of the scratch memory, noted.
    fn packed(&mut self, packed: DevicePacked, shape: (u32, u32), first: Epilogue) -> Result<Linear, LoadError> {
        // A grid's dimensions fit 32 bits.
        let (n, k) = (packed.grid().rows() as u32, packed.grid().cols() as u32);
        let epilogues = match first {
            Epilogue::SiluMul => vec![Epilogue::SiluMul],
            _ => vec![Epilogue::Store, Epilogue::StoreAdd],
        };
        let mut choices = Vec::new();
        for epilogue in epilogues {
            let wanted = PackedUse { escapes: packed.has_escapes(), pdl: self.options.pdl, epilogue };
            let choose = || self.dispatch.choices(n, k, self.options.max_batch, wanted);
            let ranges = self.choices.entry((n, k, wanted)).or_insert_with(choose);
            let specs: Vec<VariantSpec> = ranges.iter().map(|(_, spec)| *spec).collect();
            self.kernels.prepare(&specs, &|_| {})?;
            for &mut (last, spec) in ranges {
                choices.push(Choice { epilogue, last, matmul: PackedGemm::new(self.kernels.get(&spec)?)? });
            }
        }
        if shape != (n, k) {
            let batch = self.options.max_batch as usize;
            self.padded_x = self.padded_x.max(batch * k as usize);
            self.padded_y = self.padded_y.max(batch * n as usize);
        }
        Ok(Linear { n: shape.0, k: shape.1, weights: Weights::Packed { packed, choices } })
    }
}

/// Scratch memory for the layers of one stream.
pub struct Scratch {
    workspace: Workspace,
    x: DeviceBuffer<u16>,
    y: DeviceBuffer<u16>,
    cublas: Option<Cublas>,
}

/// A linear layer on the device.
#[derive(Debug)]
pub struct Linear {
    n: u32,
    k: u32,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Packed {
        packed: DevicePacked,
        /// By epilogue, ascending in the largest batch.
        choices: Vec<Choice>,
    },
    Whole(DeviceMatrix),
}

/// A kernel for batches up to `last`.
#[derive(Debug)]
struct Choice {
    epilogue: Epilogue,
    last: u32,
    matmul: PackedGemm,
}

impl Linear {
    /// Output features; of a gate and an up, both.
    pub fn n(&self) -> u32 {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> u32 {
        self.k
    }

    /// Bytes of the weights on the device.
    pub fn bytes(&self) -> u64 {
        match &self.weights {
            Weights::Packed { packed, .. } => packed.bytes(),
            Weights::Whole(whole) => whole.data().bytes() as u64,
        }
    }

    /// Whether the weights are packed; otherwise they are BF16, for cuBLAS.
    pub fn is_packed(&self) -> bool {
        matches!(self.weights, Weights::Packed { .. })
    }

    /// The variant for a batch; `None` where cuBLAS takes it, or nothing does.
    pub fn variant(&self, m: u32, epilogue: Epilogue) -> Option<VariantSpec> {
        match &self.weights {
            Weights::Packed { choices, .. } => {
                choose(choices, m, epilogue).map(|choice| *choice.matmul.kernel().spec())
            }
            Weights::Whole(_) => None,
        }
    }

    /// Enqueues the product. `y` is overwritten, or added to ([`Epilogue::StoreAdd`]); of a gate and an up only [`Epilogue::SiluMul`] can be had,
    /// with `y` `[m, n / 2]`.
    ///
    /// # Errors
    /// Shapes that do not go together, a batch above the one that was loaded for, scratch memory of another loader, or the driver's refusal.
    pub fn enqueue(
        &self,
        stream: &Stream,
        x: &DeviceMatrix,
        y: &mut DeviceMatrix,
        epilogue: Epilogue,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let (m, columns) = (x.rows(), if epilogue == Epilogue::SiluMul { self.n / 2 } else { self.n });
        if x.cols() != self.k || (y.rows(), y.cols()) != (m, columns) {
            let (rows, cols) = (y.rows(), y.cols());
            return Err(DeviceError::Shape(format!(
                "Y[{rows}, {cols}] = X[{m}, {}] * W[{}, {}]^T: the shapes do not go together",
                x.cols(),
                self.n,
                self.k
            )));
        }
        if m == 0 {
            return Ok(());
        }
        let (packed, choices) = match &self.weights {
            Weights::Whole(whole) => {
                let Some(cublas) = &mut scratch.cublas else {
                    return Err(DeviceError::Shape(
                        "the scratch memory was made before this layer was loaded".to_owned(),
                    ));
                };
                return cublas.matmul(x, whole, y, epilogue == Epilogue::StoreAdd);
            }
            Weights::Packed { packed, choices } => (packed, choices),
        };
        let Some(Choice { matmul, .. }) = choose(choices, m, epilogue) else {
            let most = choices.iter().filter(|choice| choice.epilogue == epilogue).map(|choice| choice.last).max();
            return Err(DeviceError::Shape(match most {
                Some(most) => {
                    format!("a batch of {m}: this layer was loaded for {most} at most; raise LoadOptions::max_batch")
                }
                None => format!("the weights were not loaded for the epilogue {}", epilogue.tag()),
            }));
        };
        let (padded_n, padded_k) = (packed.grid().rows(), packed.grid().cols());
        if (padded_n, padded_k) == (self.n as usize, self.k as usize) {
            return matmul.enqueue(stream, x, packed, y, &mut scratch.workspace);
        }
        let (rows, k, n) = (m as usize, self.k as usize, self.n as usize);
        // Columns past k must be zeros: they are multiplied with what pads the weights.
        scratch.x.fill_front(stream, rows * padded_k, 0)?;
        scratch.x.copy_rows(stream, padded_k, x.data(), k, (rows, k))?;
        if epilogue == Epilogue::StoreAdd {
            scratch.y.copy_rows(stream, padded_n, y.data(), n, (rows, n))?;
        }
        matmul.enqueue_at(stream, (scratch.x.address(), m), packed, scratch.y.address(), &mut scratch.workspace)?;
        y.data_mut().copy_rows(stream, n, &scratch.y, padded_n, (rows, n))
    }
}

fn choose(choices: &[Choice], m: u32, epilogue: Epilogue) -> Option<&Choice> {
    choices.iter().find(|choice| choice.epilogue == epilogue && m <= choice.last)
}

fn unsuitable(name: &str, what: String) -> LoadError {
    LoadError::Unsuitable { name: name.to_owned(), what }
}

/// `[n, k]` of a tensor.
fn extents(bundle: &Bundle, name: &str) -> Result<(u32, u32), LoadError> {
    let entry = bundle.entry(name)?;
    match entry.shape.as_slice() {
        &[n, k] if entry.dtype == Dtype::Bf16 && n > 0 && k > 0 => match (u32::try_from(n), u32::try_from(k)) {
            (Ok(n), Ok(k)) => Ok((n, k)),
            _ => Err(unsuitable(name, format!("[{n}, {k}]: kernels count in 32 bits; split it"))),
        },
        shape => {
            let what = format!(
                "{:?} of shape {shape:?} is not the weight of a linear layer (BF16, two dimensions)",
                entry.dtype
            );
            Err(unsuitable(name, what))
        }
    }
}

/// The matrix in the corner of a larger one. What is added lies in the window that suits the weights, so that it costs no escapes.
fn pad(bytes: &[u8], (n, k): (u32, u32), (padded_n, padded_k): (u32, u32)) -> Result<Vec<u16>, DeviceError> {
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
