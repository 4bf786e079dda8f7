//! Linear layers for candle on packed BF16 weights: lossless, at 12.03 bits per weight.
//!
//! ```no_run
//! use candle_core::{Device, Module, Tensor};
//! use unweight_candle::UnweightLinear;
//! use unweight_format::bundle::Bundle;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let bundle = Bundle::open_weights("bundle".as_ref())?;
//! let layer = UnweightLinear::of_bundle(&bundle, "model.layers.0.mlp.down_proj.weight", None, &Device::Cpu)?;
//! let x = Tensor::ones((1, layer.k()), candle_core::DType::F32, &Device::Cpu)?;
//! let y = layer.forward(&x)?;
//! # Ok(())
//! # }
//! ```
//! On the CPU, a layer unpacks its weights and multiplies in F32, because candle has no BF16 matmul there. The result
//! is bit for bit that of candle's F32 matmul with the same weights. On a GPU (feature `cuda`), the kernels of
//! `unweight-rt` multiply by the packed weights, on candle's stream and in memory that candle allocates. The GPU code
//! is compiled but not yet tested on a GPU.

#[cfg(feature = "cuda")]
mod cuda;

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, bail};
use half::bf16;
use unweight_format::{
    CodecError, Histogram, Matrix,
    bundle::{Bundle, BundleError},
    raw::{
        PackedTensor,
        packed::{self, Unpackable},
    },
};

/// An error of building, loading or unpacking a layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bundle does not contain the weight, or the weight cannot be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The weight cannot be packed.
    #[error("weight '{name}' cannot be packed ({reason}); use candle_nn::Linear for it")]
    Unpackable {
        /// Name of the weight.
        name: String,
        /// The condition that the weight violates.
        reason: Unpackable,
    },
    /// The weight is not a BF16 matrix.
    #[error("weight '{name}' is {dtype} {shape:?}; only BF16 matrices are packed")]
    NotBf16Matrix {
        /// Name of the weight.
        name: String,
        /// Its dtype.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The weight has no elements, or too many.
    #[error("weight '{name}': {source}")]
    Codec {
        /// Name of the weight.
        name: String,
        /// The violated limit.
        source: CodecError,
    },
    /// The bias does not have the shape `[n]` of a weight `[n, k]`.
    #[error("the bias of '{name}' is {got:?}, but the weight has {rows} rows")]
    Bias {
        /// Name of the weight.
        name: String,
        /// Shape of the bias.
        got: Vec<usize>,
        /// Rows of the weight.
        rows: usize,
    },
    /// Packed weights cannot run on this device.
    #[error("packed weights cannot be on {device}; use the CPU, or build with the feature `cuda` for an NVIDIA GPU")]
    Device {
        /// The device.
        device: String,
    },
    /// The GPU runtime failed.
    #[cfg(feature = "cuda")]
    #[error("cannot copy packed weights to the GPU")]
    Runtime(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Packed weights, in CPU or GPU memory.
enum WeightMemory {
    Cpu(PackedTensor<Vec<u8>>),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::GpuWeight>),
}

impl WeightMemory {
    fn on_cpu(&self) -> Option<&PackedTensor<Vec<u8>>> {
        match self {
            Self::Cpu(packed) => Some(packed),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }
}

/// A linear layer on packed weights: `x * weight^T + bias`.
#[derive(Clone)]
pub struct UnweightLinear {
    weight: Arc<Weight>,
    bias: Option<Tensor>,
}

struct Weight {
    memory: WeightMemory,
    n: usize,
    k: usize,
}

impl UnweightLinear {
    /// Loads a layer from a bundle. The weight `[n, k]` is BF16 in any encoding, `bias` has the shape `[n]`.
    ///
    /// # Errors
    /// [`Error`]: the bundle lacks the weight or is damaged, the weight is not a BF16 matrix or cannot be packed, the
    /// bias has another shape, or the device is not supported.
    pub fn of_bundle(bundle: &Bundle, name: &str, bias: Option<Tensor>, device: &Device) -> Result<Self, Error> {
        let tensor = bundle.tensor(name)?;
        let (&[n, k], "BF16") = (tensor.shape(), &*tensor.dtype().to_string()) else {
            let (dtype, shape) = (tensor.dtype().to_string(), tensor.shape().to_vec());
            return Err(Error::NotBf16Matrix { name: name.into(), dtype, shape });
        };
        let packed = match PackedTensor::of(tensor.stored()?) {
            Some(packed) => packed,
            None => pack(name, &tensor.decode()?, n, k)?,
        };
        Self::of_packed(name, packed, bias, device)
    }

    /// Packs a BF16 weight `[n, k]` on the CPU, and builds a layer on the weight's device. `bias` has the shape `[n]`.
    ///
    /// # Errors
    /// [`Error`], as for [`UnweightLinear::of_bundle`].
    pub fn of_weight(weight: &Tensor, bias: Option<Tensor>) -> Result<Self, Error> {
        let name = "unnamed";
        let (DType::BF16, &[n, k]) = (weight.dtype(), weight.dims()) else {
            let (dtype, shape) = (weight.dtype().as_str().to_owned(), weight.dims().to_vec());
            return Err(Error::NotBf16Matrix { name: name.into(), dtype, shape });
        };
        let weights = weight.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<bf16>()?;
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        Self::of_packed(name, pack(name, &bytes, n, k)?, bias, weight.device())
    }

    fn of_packed(
        name: &str,
        packed: PackedTensor<Vec<u8>>,
        bias: Option<Tensor>,
        device: &Device,
    ) -> Result<Self, Error> {
        let (n, k) = (packed.grid().rows(), packed.grid().cols());
        if let Some(bias) = &bias
            && bias.dims() != [n]
        {
            return Err(Error::Bias { name: name.into(), got: bias.dims().to_vec(), rows: n });
        }
        let bias = bias.map(|bias| bias.to_device(device)).transpose()?;
        let memory = match device {
            Device::Cpu => WeightMemory::Cpu(packed),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => WeightMemory::Cuda(Box::new(cuda::GpuWeight::new(&packed, device)?)),
            other => return Err(Error::Device { device: format!("{:?}", other.location()) }),
        };
        Ok(Self { weight: Arc::new(Weight { memory, n, k }), bias })
    }

    /// The number of output features: rows of the weight.
    pub fn n(&self) -> usize {
        self.weight.n
    }

    /// The number of input features: columns of the weight.
    pub fn k(&self) -> usize {
        self.weight.k
    }

    /// The bias `[n]`, if the layer has one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the weight as BF16 `[n, k]`, bit for bit, on the layer's device.
    ///
    /// # Errors
    /// [`Error::Candle`], or `Error::Runtime` on a GPU.
    pub fn unpacked(&self) -> Result<Tensor, Error> {
        let shape = (self.n(), self.k());
        match &self.weight.memory {
            WeightMemory::Cpu(packed) => {
                Ok(Tensor::from_vec(weights(packed).collect::<Vec<bf16>>(), shape, &Device::Cpu)?)
            }
            #[cfg(feature = "cuda")]
            WeightMemory::Cuda(gpu) => gpu.unpacked(shape),
        }
    }
}

fn pack(name: &str, weights: &[u8], n: usize, k: usize) -> Result<PackedTensor<Vec<u8>>, Error> {
    let matrix = Matrix::new(weights, n, k).map_err(|source| Error::Codec { name: name.into(), source })?;
    let packed = packed::pack(matrix, &Histogram::of(weights));
    packed.map_err(|reason| Error::Unpackable { name: name.into(), reason })
}

fn weights(packed: &PackedTensor<Vec<u8>>) -> impl Iterator<Item = bf16> {
    let bytes = packed.unpack();
    (0..bytes.len() / 2).map(move |index| bf16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]))
}

impl Module for UnweightLinear {
    /// Returns `x * weight^T + bias`, in the dtype of `x`: F32 or BF16 on the CPU, BF16 on a GPU.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.contiguous()?.apply_op1(Product(self.weight.clone()))?;
        match &self.bias {
            Some(bias) => y.broadcast_add(&bias.to_dtype(y.dtype())?),
            None => Ok(y),
        }
    }
}

/// The operator `x * weight^T`, without the bias.
struct Product(Arc<Weight>);

impl Product {
    /// Returns the number of input rows, the offset of the input in its storage, and the output's shape.
    fn rows(&self, layout: &Layout) -> candle_core::Result<(usize, usize, Shape)> {
        let Weight { n, k, .. } = *self.0;
        let Some((&columns, leading)) = layout.dims().split_last() else { bail!("unweight: the input has no columns") };
        if columns != k {
            bail!("unweight: the weight is [{n}, {k}], but the input has {columns} columns");
        }
        let Some((start, _)) = layout.contiguous_offsets() else { bail!("unweight: the input is not contiguous") };
        let mut shape = leading.to_vec();
        shape.push(n);
        Ok((leading.iter().product(), start, Shape::from(shape)))
    }
}

impl CustomOp1 for Product {
    fn name(&self) -> &'static str {
        "unweight-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, start, shape) = self.rows(layout)?;
        let Weight { memory, n, k } = &*self.0;
        let Some(packed) = memory.on_cpu() else { bail!("unweight: the weight is on a GPU, the input on the CPU") };
        let end = start + rows * k;
        let (x, is_bf16): (Vec<f32>, bool) = match storage {
            CpuStorage::F32(x) => (x[start..end].to_vec(), false),
            CpuStorage::BF16(x) => (x[start..end].iter().map(|x| x.to_f32()).collect(), true),
            _ => bail!("unweight: the input is neither F32 nor BF16; convert it with to_dtype"),
        };
        let weights: Vec<f32> = weights(packed).map(bf16::to_f32).collect();
        let weights = Tensor::from_vec(weights, (*n, *k), &Device::Cpu)?;
        let y = Tensor::from_vec(x, (rows, *k), &Device::Cpu)?.matmul(&weights.t()?)?;
        let y = y.flatten_all()?.to_vec1::<f32>()?;
        let y = match is_bf16 {
            true => CpuStorage::BF16(y.into_iter().map(bf16::from_f32).collect()),
            false => CpuStorage::F32(y),
        };
        Ok((y, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let (rows, start, shape) = self.rows(layout)?;
        match &self.0.memory {
            WeightMemory::Cuda(gpu) => Ok((gpu.product(storage, rows, start)?, shape)),
            WeightMemory::Cpu(_) => bail!("unweight: the weight is on the CPU, the input on a GPU"),
        }
    }
}
