//! From a bundle to layers.
//!
//! ```text
//! packed   --upload-----------------------------> packed, 12 bits a weight --> matmul (crate::ops::gemm_packed)
//!    +--unpack on the GPU, to be merged--+
//! huffman  --decode on the GPU-----------+--> BF16 --merge, pad, pack on the GPU--> packed
//! palette  --decode on the host----------+     +--what cannot be packed--> cuBLAS
//! raw      ------------------------------+
//! compact  --transcode on the GPU---------+
//!    +--upload (merged: encoded anew), if it is to stay small--> compact, 10.9 bits a weight
//! ```

use unweight_codegen::{
    VariantSpec,
    spec::{Arch, DecodeOutput},
};
use unweight_format::{
    CompactTensor, FormId, HuffmanTensor, PackedTensor, PaletteTensor,
    bundle::{Bundle, BundleError},
    packed::Unpackable,
    safetensors::Dtype,
};

pub use crate::choose::reachable::{Expand, Linears, Resident};
use crate::{
    choose::{
        graph::{Node, Step},
        model::PackedChooser,
        reachable::{self, Wanted, Weight},
    },
    device::{DeviceBuffer, DeviceError, KernelSet, MatrixMut, Prepared, Staging, Stream},
    jit::cache::Progress,
    layer::{
        build::{ExpertPart, LayerBuilder, Parts, in_tensor, unsuitable},
        experts::{Experts, ExpertsShape},
        linear::Linear,
        offload::OffloadedExperts,
    },
    ops::{decode::Decoder, lane::Lane, repack::Packer, transcode::Transcoder},
    weight::{DeviceCompact, DeviceHuffman, DeviceMatrix, DevicePacked, DevicePalette, pods},
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
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bundle(error) => error.code(),
            Self::Device { source, .. } => source.code(),
            Self::Unsuitable { why, .. } => why.code(),
        }
    }

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
    /// Not BF16, or not of one dimension.
    #[error("{dtype:?} of shape {shape:?} is not a vector (BF16, one dimension)")]
    NotAVector {
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
    GateAndUp(Unpackable),
    /// Weights without a packed form.
    #[error("cannot be packed: {0}; load it as a matrix")]
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

impl Unsuitable {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotAMatrix { .. } | Self::NotAVector { .. } => "tensor-not-a-layer",
            Self::TooLarge { .. } => "tensor-too-large",
            Self::Nothing | Self::Columns { .. } | Self::NotAPair { .. } | Self::Pair { .. } | Self::GateAndUp(_) => {
                "tensors-not-mergeable"
            }
            Self::Unpackable(why) => why.code(),
            Self::OtherForm { .. } | Self::CodeBits { .. } => "manifest-disagrees",
        }
    }
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
    /// The largest batch of a launch, 4096 by default; a layer takes more in turns.
    pub max_batch: u32,
    /// Programmatic dependent launch: a layer asks for its weights while the kernel before it on the stream still runs,
    /// and waits for that one before it touches activations. Faster where layers follow each other closely; any kernel
    /// may come before. On by default.
    pub pdl: bool,
    /// What the weights lie as; packed by default.
    pub linears: Linears,
    /// What compact tensors lie as; packed by default.
    pub resident: Resident,
    /// Which batches are multiplied by cuBLAS from weights that are expanded ahead of it; by default what the model of
    /// the machine says, on architectures without `wgmma`.
    pub expand: Expand,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { max_batch: 4096, pdl: true, linears: Linears::Packed, resident: Resident::Fast, expand: Expand::Model }
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

    /// What the weights lie as.
    #[must_use]
    pub fn linears(self, linears: Linears) -> Self {
        Self { linears, ..self }
    }

    /// What compact tensors lie as.
    #[must_use]
    pub fn resident(self, resident: Resident) -> Self {
        Self { resident, ..self }
    }

    /// Which batches are multiplied by cuBLAS from weights that are expanded ahead of it.
    #[must_use]
    pub fn expand(self, expand: Expand) -> Self {
        Self { expand, ..self }
    }

    /// The same for whoever chooses, and Huffman codes of up to so many bits.
    pub fn wanted(self, chooser: PackedChooser, code_limit: u32) -> Wanted {
        let Self { max_batch, pdl, linears, resident, expand } = self;
        Wanted { linears, resident, chooser, max_batch, pdl, code_limit, expand }
    }
}

/// How several weights become one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// One under the other: the outputs lie side by side (`q`, `k`, `v`).
    Rows,
    /// A gate and an up: the output is `silu(X gate^T) * (X up^T)`, computed in fp32 and rounded once. As BF16
    /// ([`Linears::Bf16`]) they lie one under the other, and the output has both side by side: cuBLAS has no such
    /// epilogue.
    SiluMul,
}

/// Loads layers onto one device.
#[derive(Debug)]
pub struct Loader<'k> {
    bundle: &'k Bundle,
    builder: LayerBuilder<'k>,
    staging: Staging,
}

/// Every kernel that a loader with these options can ask for, for any tensor of this bundle, alone or merged as servers
/// do it. Reads the manifest only; needs no device.
pub fn reachable(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> Vec<VariantSpec> {
    all_reachable(bundle, &wanted(bundle, options, chooser))
}

/// The same for every card of an architecture: which of its kernels one asks for follows from its multiprocessors and
/// its memory, so these are more, and there is none that does not find its own among them.
pub fn reachable_on_any(bundle: &Bundle, options: LoadOptions, arch: Arch) -> Vec<VariantSpec> {
    let wanted = wanted(bundle, options, PackedChooser::usual(arch));
    with_decoders(bundle, &wanted, wanted.reachable_on_any_card(reachable::weights(bundle)))
}

fn wanted(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> Wanted {
    options.wanted(chooser, bundle.manifest().options.code_limit)
}

fn all_reachable(bundle: &Bundle, wanted: &Wanted) -> Vec<VariantSpec> {
    with_decoders(bundle, wanted, wanted.reachable(reachable::weights(bundle)))
}

fn with_decoders(bundle: &Bundle, wanted: &Wanted, mut variants: Vec<VariantSpec>) -> Vec<VariantSpec> {
    // An embedding is decoded, too, though it is no weight of a layer.
    if bundle.tensors().any(|tensor| tensor.entry.form == FormId::HUFFMAN) {
        variants.extend(wanted.decoder().filter(|decoder| !variants.contains(decoder)));
    }
    if bundle.tensors().any(|tensor| tensor.entry.form == FormId::COMPACT) && !variants.contains(&wanted.transcoder()) {
        variants.push(wanted.transcoder());
    }
    variants
}

/// The tensors of a mixture's experts.
#[derive(Clone, Copy, Debug)]
pub enum ExpertTensors<'a> {
    /// Gate, up and down of each.
    Each(&'a [[&'a str; 3]]),
    /// Stacks of all.
    Stacked {
        /// Gate and up of each, one below the other `[experts, 2 * intermediate, hidden]`.
        gate_up: &'a str,
        /// Down `[experts, hidden, intermediate]`.
        down: &'a str,
    },
}

impl<'a> ExpertTensors<'a> {
    fn first(&self) -> &'a str {
        match self {
            Self::Each(each) => each.first().map_or("experts", |names| names[0]),
            Self::Stacked { gate_up, .. } => gate_up,
        }
    }
}

impl<'k> Loader<'k> {
    /// A loader of this bundle's layers, which works on `stream`. Its layers run on any stream of the device, on a lane
    /// each.
    ///
    /// Every kernel that the bundle can reach ([`reachable`]) is compiled or found first, in parallel; `progress` hears
    /// of each. Nothing is compiled later but for merges that [`reachable::weights`] does not foresee.
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
        let wanted = wanted(bundle, options, kernels.chooser().clone());
        let prepared = kernels.prepare(&all_reachable(bundle, &wanted), progress)?;
        let builder = LayerBuilder::of(kernels, stream, wanted)?;
        Ok((Self { bundle, builder, staging: Staging::new(stream) }, prepared))
    }

    /// Loads a tensor `[n, k]`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(&mut self, name: &str) -> Result<Linear, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let weight = Weight::stored(n, k, self.bundle.entry(name)?.form);
        match self.builder.wanted.linears {
            Linears::Packed if is_packed(&weight) => {
                let packed = self.parts().1.packed(name)?;
                self.builder.packed(packed, &weight).map_err(in_tensor(name))
            }
            Linears::Packed if self.builder.wanted.stays_compact(&weight) => {
                let compact = self.parts().1.compact(name)?;
                self.builder.compact(name, &weight, compact)
            }
            _ => self.merge(&[name], Merge::Rows),
        }
    }

    /// Loads several tensors as one layer.
    ///
    /// # Errors
    /// [`LoadError`]; the tensors have different `k`, or a gate and an up do not have the same multiple of 32 rows.
    pub fn merge(&mut self, names: &[&str], merge: Merge) -> Result<Linear, LoadError> {
        let shapes = names.iter().map(|name| extents(self.bundle, name)).collect::<Result<_, _>>()?;
        let form = |name: &&str| self.bundle.entry(name).map(|entry| entry.form);
        let compact = names.iter().all(|name| form(name).is_ok_and(|form| form == FormId::COMPACT));
        let (builder, mut tensors) = self.parts();
        builder.merge(&Parts::new(names, shapes, merge, compact), &mut |part, packer, output| {
            names.get(part).map_or(Ok(()), |name| tensors.decode(name, packer, output))
        })
    }

    /// The weights of a tensor `[n, k]` as they were, on the device: an embedding, for instance.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn matrix(&mut self, name: &str) -> Result<DeviceMatrix, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let device = in_tensor(name);
        let (builder, mut tensors) = self.parts();
        let mut matrix = DeviceMatrix::zeroed(builder.stream(), n, k).map_err(&device)?;
        tensors.decode(name, &mut builder.packer, matrix.view_mut())?;
        builder.stream().synchronize().map_err(&device)?;
        Ok(matrix)
    }

    /// The form that a tensor is stored in.
    ///
    /// # Errors
    /// There is no such tensor.
    pub fn form(&self, name: &str) -> Result<FormId, LoadError> {
        Ok(self.bundle.entry(name)?.form)
    }

    /// A Huffman-coded tensor `[n, k]` as it is.
    ///
    /// # Errors
    /// [`LoadError`]; [`Unsuitable::OtherForm`] where it is stored in another form.
    pub fn huffman(&mut self, name: &str) -> Result<DeviceHuffman, LoadError> {
        extents(self.bundle, name)?;
        let (_, tensors) = self.parts();
        let Some(tensor) = HuffmanTensor::of(tensors.bundle.tensor(name)?) else {
            return Err(tensors.other_form(name));
        };
        DeviceHuffman::upload(&mut *tensors.staging, &tensor).map_err(in_tensor(name))
    }

    /// Palette indices `[n, k]` as they are.
    ///
    /// # Errors
    /// As for [`Loader::huffman`].
    pub fn palette(&mut self, name: &str) -> Result<DevicePalette, LoadError> {
        extents(self.bundle, name)?;
        let (builder, tensors) = self.parts();
        let Some(tensor) = PaletteTensor::of(tensors.bundle.tensor(name)?) else {
            return Err(tensors.other_form(name));
        };
        DevicePalette::upload(builder.stream(), &tensor).map_err(in_tensor(name))
    }

    /// The packed form of a tensor `[n, k]`, whatever form it is stored in.
    ///
    /// # Errors
    /// [`LoadError`]; [`Unsuitable::Unpackable`] also where `n` or `k` is no multiple of 64.
    pub fn packed(&mut self, name: &str) -> Result<DevicePacked, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let weight = Weight::stored(n, k, self.bundle.entry(name)?.form);
        let (builder, mut tensors) = self.parts();
        if is_packed(&weight) {
            return tensors.packed(name);
        }
        builder.pack_alone(name, (n, k), &mut |_, packer, output| tensors.decode(name, packer, output))
    }

    /// The experts of a mixture, packed, of tensors of any form; what each is multiplied by lies below the one before.
    ///
    /// # Errors
    /// [`LoadError`]; tensors of other shapes, [`Unsuitable::Unpackable`] also where a size is no multiple of 64.
    pub fn experts(&mut self, names: ExpertTensors<'_>, shape: ExpertsShape) -> Result<Experts, LoadError> {
        let (gate_up, down) = self.pack_experts(names, shape)?;
        Experts::new(self.builder.kernels, shape, gate_up, down).map_err(in_tensor(names.first()))
    }

    /// The same in host memory, with room for `slots` of them on the device.
    ///
    /// # Errors
    /// As [`Loader::experts`]; not enough memory that can be locked.
    pub fn offloaded_experts(
        &mut self,
        names: ExpertTensors<'_>,
        shape: ExpertsShape,
        slots: u32,
    ) -> Result<OffloadedExperts, LoadError> {
        let packed = self.pack_experts(names, shape)?;
        self.builder.offload(names.first(), shape, slots, packed)
    }

    /// Gate and up, and down, of all experts.
    fn pack_experts(
        &mut self,
        names: ExpertTensors<'_>,
        shape: ExpertsShape,
    ) -> Result<(DevicePacked, DevicePacked), LoadError> {
        let ExpertsShape { experts, hidden, intermediate } = shape;
        let first = names.first();
        let device = in_tensor(first);
        match names {
            ExpertTensors::Each(each) => {
                if each.len() != experts as usize {
                    return Err(unsuitable(first, Unsuitable::NotAPair { count: each.len() }));
                }
                for [gate, up, down] in each {
                    for (name, wanted) in
                        [(gate, [intermediate, hidden]), (up, [intermediate, hidden]), (down, [hidden, intermediate])]
                    {
                        of_shape(self.bundle, name, &wanted)?;
                    }
                }
                let (builder, mut tensors) = self.parts();
                let mut decoding = Packer::new(builder.stream(), builder.kernels).map_err(&device)?;
                builder.pack_experts(first, shape, &mut |part, _, mut output| {
                    let (rows, cols) = (output.rows() / experts, output.cols());
                    for (expert, names) in (0..experts).zip(each) {
                        let name = names[part as usize];
                        let own = output.part(expert * rows..(expert + 1) * rows, 0..cols);
                        let own = own.map_err(|refusal| in_tensor(name)(refusal.into()))?;
                        tensors.decode(name, &mut decoding, own)?;
                    }
                    Ok(())
                })
            }
            ExpertTensors::Stacked { gate_up, down } => {
                let (wide, narrow) = ([experts, 2 * intermediate, hidden], [experts, hidden, intermediate]);
                of_shape(self.bundle, gate_up, &wide)?;
                of_shape(self.bundle, down, &narrow)?;
                let (builder, mut tensors) = self.parts();
                let mut stack = |name: &str, rows: u32, cols: u32, packer: &mut Packer| {
                    let mut matrix = DeviceMatrix::zeroed(packer.stream(), rows, cols).map_err(in_tensor(name))?;
                    tensors.decode(name, packer, matrix.view_mut())?;
                    Ok::<_, LoadError>(matrix)
                };
                let both = stack(gate_up, experts * 2 * intermediate, hidden, &mut builder.packer)?;
                let downs = stack(down, experts * hidden, intermediate, &mut builder.packer)?;
                builder.pack_experts(first, shape, &mut |part, stream, mut output| {
                    if part == ExpertPart::Down {
                        return output.copy_from(stream, downs.view()).map_err(in_tensor(down));
                    }
                    for expert in 0..experts {
                        // A gate, then its up.
                        let at = (2 * expert + part as u32) * intermediate;
                        let mut copy = || -> Result<(), DeviceError> {
                            let from = both.view().part(at..at + intermediate, 0..hidden)?;
                            let rows = expert * intermediate..(expert + 1) * intermediate;
                            output.part(rows, 0..hidden)?.copy_from(stream, from)
                        };
                        copy().map_err(in_tensor(gate_up))?;
                    }
                    Ok(())
                })
            }
        }
    }

    /// What linears are made of.
    pub fn linears(&self) -> Linears {
        self.builder.wanted.linears
    }

    /// The elements of a tensor of one dimension: the weight of a norm, a bias.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn vector(&mut self, name: &str) -> Result<DeviceBuffer<u16>, LoadError> {
        let entry = self.bundle.entry(name)?;
        if entry.dtype != Dtype::Bf16 || entry.shape.len() != 1 {
            let shape = entry.shape.iter().map(|extent| *extent as u64).collect();
            return Err(unsuitable(name, Unsuitable::NotAVector { dtype: entry.dtype, shape }));
        }
        let bytes = self.bundle.decode(name)?;
        pods(&bytes)
            .map_err(DeviceError::from)
            .and_then(|bits| DeviceBuffer::from_host(self.builder.stream(), &bits))
            .map_err(in_tensor(name))
    }

    /// What makes layers of matrices that are on the device: for weights that no bundle has.
    pub fn builder(&mut self) -> &mut LayerBuilder<'k> {
        &mut self.builder
    }

    /// A lane of `stream` for every layer loaded so far.
    ///
    /// # Errors
    /// Not enough memory, or no cuBLAS where a layer needs it.
    pub fn lane(&self, stream: &Stream) -> Result<Lane, DeviceError> {
        self.builder.lane(stream)
    }

    /// What makes layers, and what brings it their weights.
    fn parts(&mut self) -> (&mut LayerBuilder<'k>, Tensors<'_>) {
        let Self { bundle, builder, staging } = self;
        let LayerBuilder { kernels, wanted, .. } = &*builder;
        let tensors = Tensors { bundle, kernels, decoder: wanted.decoder(), code_limit: wanted.code_limit, staging };
        (builder, tensors)
    }
}

/// What a bundle has, as it comes to the device.
struct Tensors<'a> {
    bundle: &'a Bundle,
    kernels: &'a KernelSet,
    staging: &'a mut Staging,
    decoder: Option<VariantSpec>,
    /// The longest code, bits.
    code_limit: u32,
}

impl Tensors<'_> {
    /// A tensor that is stored packed.
    fn packed(&mut self, name: &str) -> Result<DevicePacked, LoadError> {
        let Some(tensor) = PackedTensor::of(self.bundle.tensor(name)?) else {
            return Err(self.other_form(name));
        };
        DevicePacked::upload(&mut *self.staging, &tensor).map_err(in_tensor(name))
    }

    /// A tensor that is stored compact.
    fn compact(&mut self, name: &str) -> Result<DeviceCompact, LoadError> {
        let Some(tensor) = CompactTensor::of(self.bundle.tensor(name)?) else {
            return Err(self.other_form(name));
        };
        DeviceCompact::upload(&mut *self.staging, &tensor).map_err(in_tensor(name))
    }

    /// Writes the weights of a tensor of any form into rows without gaps, in stream order.
    fn decode(&mut self, name: &str, packer: &mut Packer, mut output: MatrixMut<'_>) -> Result<(), LoadError> {
        let device = in_tensor(name);
        let weight = Weight::stored(output.rows(), output.cols(), self.bundle.entry(name)?.form);
        match weight.route().first().map(|edge| edge.step) {
            _ if is_packed(&weight) => packer.unpack(&self.packed(name)?, output).map_err(device),
            Some(Step::Decode(DecodeOutput::Full)) => {
                let Some(tensor) = HuffmanTensor::of(self.bundle.tensor(name)?) else {
                    return Err(self.other_form(name));
                };
                let (bits, limit) = (tensor.code().max_length(), self.code_limit);
                let spec = self
                    .decoder
                    .filter(|_| bits <= limit)
                    .ok_or_else(|| unsuitable(name, Unsuitable::CodeBits { bits, limit }))?;
                let tensor = DeviceHuffman::upload(&mut *self.staging, &tensor).map_err(&device)?;
                let decoder = self.kernels.get(&spec).and_then(Decoder::new).map_err(&device)?;
                packer.decode(&decoder, &tensor, output).map_err(&device)
            }
            Some(Step::Transcode) => {
                let tensor = self.compact(name)?;
                let transcoder = Transcoder::of(self.kernels).map_err(&device)?;
                // The tensor goes when this returns: dropping it waits.
                transcoder.full(packer.stream(), &tensor, output).map_err(device)
            }
            // Raw, and what the host decodes.
            _ => self.staging.write(&mut output, &self.bundle.decode(name)?).map_err(device),
        }
    }

    fn other_form(&self, name: &str) -> LoadError {
        match self.bundle.entry(name) {
            Ok(entry) => unsuitable(name, Unsuitable::OtherForm { form: entry.form }),
            Err(error) => error.into(),
        }
    }
}

/// Refuses a tensor of another shape, or not of BF16.
fn of_shape(bundle: &Bundle, name: &str, wanted: &[u32]) -> Result<(), LoadError> {
    let entry = bundle.entry(name)?;
    let same = entry.shape.iter().map(|extent| *extent as u64).eq(wanted.iter().map(|extent| u64::from(*extent)));
    if same && entry.dtype == Dtype::Bf16 {
        return Ok(());
    }
    let shape = entry.shape.iter().map(|extent| *extent as u64).collect();
    Err(unsuitable(name, Unsuitable::NotAMatrix { dtype: entry.dtype, shape }))
}

/// Whether a weight is stored as kernels read it.
fn is_packed(weight: &Weight) -> bool {
    weight.node == Node::Packed && weight.padded() == Some((weight.n, weight.k))
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
