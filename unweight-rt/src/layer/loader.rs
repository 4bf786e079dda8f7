//! Loads layers from a bundle.
//!
//! ```text
//! packed   --upload-----------------------------> packed, 12 bits a weight --> matmul (crate::ops::gemm_packed)
//!    +--unpack on the GPU, to be merged--+
//! huffman  --decode on the GPU-----------+--> BF16 --merge, pad, pack on the GPU--> packed
//! palette, rans --decode on the host-----+     +--what cannot be packed--> BF16 for cuBLAS
//! raw      ------------------------------+
//! compact  --decode on the GPU-----------+
//!    +--upload (merged: encoded again), if compact is wanted--> compact, 10.9 bits a weight
//! ```

use unweight_codegen::{
    VariantSpec,
    spec::{Arch, DecodeOutput},
};
use unweight_format::{
    EncodingId, Placement,
    bundle::Bundle,
    raw::{CompactTensor, HuffmanTensor, PackedTensor, PaletteTensor},
    safetensors::Dtype,
};

use crate::{
    choose::{
        graph::{Node, Step},
        policy::PackedChooser,
        reachable,
        route::{RoutePolicy, Weight},
    },
    device::{DeviceBuffer, DeviceError, KernelSet, MatrixMut, Prepared, Staging, Stream},
    exec::ExecContext,
    jit::cache::Progress,
    layer::{
        build::{ExpertPart, LayerBuilder, Parts},
        error::{LoadError, Unsuitable, in_tensor, unsuitable},
        experts::{Experts, ExpertsShape, offload::OffloadedExperts},
        linear::Linear,
        options::{LoadOptions, Merge},
    },
    ops::{decode_compact::CompactDecoder, decode_huffman::Decoder, pack::Packer},
    weight::{DeviceCompact, DeviceHuffman, DeviceMatrix, DevicePacked, DevicePalette, ExpertWeights, pods},
};

/// Loads layers of a bundle onto one device.
#[derive(Debug)]
pub struct Loader<'k> {
    bundle: &'k Bundle,
    builder: LayerBuilder<'k>,
    staging: Staging,
}

/// Returns every kernel that a loader with these options can need for any tensor of this bundle, alone or merged as
/// servers merge them. Reads only the manifest; needs no device.
pub fn reachable(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> Vec<VariantSpec> {
    all_reachable(bundle, options, &policy(bundle, options, chooser))
}

/// Like [`reachable()`], but for every GPU of an architecture. The kernels for one GPU depend on its number of
/// multiprocessors and its memory; the result covers all such GPUs.
pub fn reachable_on_any(bundle: &Bundle, options: LoadOptions, arch: Arch) -> Vec<VariantSpec> {
    let policy = policy(bundle, options, PackedChooser::usual(arch));
    with_decoders(bundle, &policy, policy.reachable_on_any_card(weights(bundle, options)))
}

fn policy(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> RoutePolicy {
    options.wanted(chooser, bundle.manifest().options.code_limit)
}

/// Returns the weights of a bundle, alone and merged.
fn weights(bundle: &Bundle, options: LoadOptions) -> impl Iterator<Item = Weight> {
    let of = move |weight: Weight| Weight { gated: weight.gated && options.fused_gate, ..weight };
    reachable::weights(bundle).into_iter().map(of)
}

fn all_reachable(bundle: &Bundle, options: LoadOptions, policy: &RoutePolicy) -> Vec<VariantSpec> {
    with_decoders(bundle, policy, policy.reachable(weights(bundle, options)))
}

fn with_decoders(bundle: &Bundle, policy: &RoutePolicy, mut variants: Vec<VariantSpec>) -> Vec<VariantSpec> {
    // An embedding is also decoded, although it is not the weight of a layer.
    if bundle.tensors().any(|tensor| tensor.encoding() == EncodingId::HUFFMAN) {
        variants.extend(policy.decoder().filter(|decoder| !variants.contains(decoder)));
    }
    if bundle.tensors().any(|tensor| tensor.encoding() == EncodingId::COMPACT)
        && !variants.contains(&policy.decode_compact())
    {
        variants.push(policy.decode_compact());
    }
    variants
}

/// The tensors of a mixture's experts.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ExpertTensors<'a> {
    /// One gate, up and down tensor per expert.
    Each(&'a [[&'a str; 3]]),
    /// Two tensors that hold all experts.
    Stacked {
        /// Gates and ups of all experts, `[experts, 2 * intermediate, hidden]`; each gate is followed by its up.
        gate_up: &'a str,
        /// Downs of all experts, `[experts, hidden, intermediate]`.
        down: &'a str,
    },
}

/// The tensors of a shared expert, whose width is a multiple of an expert's.
#[derive(Clone, Copy, Debug)]
pub struct SharedTensors<'a> {
    /// Gate `[parts * intermediate, hidden]`. If gate and up are one tensor, the gate above, both have its name.
    pub gate: &'a str,
    /// Up `[parts * intermediate, hidden]`.
    pub up: &'a str,
    /// Down `[hidden, parts * intermediate]`.
    pub down: &'a str,
    /// The number of experts that together equal it.
    pub parts: u32,
}

impl<'a> SharedTensors<'a> {
    fn of(&self, part: ExpertPart) -> &'a str {
        match part {
            ExpertPart::Gate => self.gate,
            ExpertPart::Up => self.up,
            ExpertPart::Down => self.down,
        }
    }
}

/// A shared expert on the device in BF16, to be divided into experts.
struct SharedMatrices {
    /// Gate and up, or both in one.
    gate_up: Vec<DeviceMatrix>,
    down: DeviceMatrix,
    parts: u32,
}

impl SharedMatrices {
    /// Writes the rows of a shared expert's parts, behind those of `routed` other experts.
    fn copy(
        &self,
        part: ExpertPart,
        stream: &Stream,
        output: &mut MatrixMut<'_>,
        routed: u32,
    ) -> Result<(), DeviceError> {
        let (parts, cols) = (self.parts, output.cols());
        let rows = output.rows() / (routed + parts);
        let below = |part: u32| (routed + part) * rows..(routed + part + 1) * rows;
        let (gate, up) = match &self.gate_up[..] {
            [both] => {
                (both.view().part(0..parts * rows, 0..cols), both.view().part(parts * rows..2 * parts * rows, 0..cols))
            }
            [gate, up, ..] => (Ok(gate.view()), Ok(up.view())),
            [] => return Ok(()),
        };
        match part {
            // A part has consecutive rows of gate and up.
            ExpertPart::Gate => output.part(routed * rows..(routed + parts) * rows, 0..cols)?.copy_from(stream, gate?),
            ExpertPart::Up => output.part(routed * rows..(routed + parts) * rows, 0..cols)?.copy_from(stream, up?),
            // And columns of down.
            ExpertPart::Down => (0..parts).try_for_each(|part| {
                let from = self.down.view().part(0..rows, part * cols..(part + 1) * cols)?;
                output.part(below(part), 0..cols)?.copy_from(stream, from)
            }),
        }
    }
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
    /// Creates a loader for this bundle's layers that works on `stream`. The layers run on any stream of the device;
    /// each stream needs its own context.
    ///
    /// First compiles or finds every kernel that the bundle can reach ([`reachable()`]), in parallel, and reports each
    /// to `progress`. Nothing is compiled later, except for merges of tensors that servers do not merge.
    ///
    /// # Errors
    /// A kernel cannot be compiled or loaded, or the device failed.
    pub fn new(
        kernels: &'k KernelSet,
        stream: &Stream,
        bundle: &'k Bundle,
        options: LoadOptions,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<(Self, Prepared), DeviceError> {
        let policy = policy(bundle, options, kernels.chooser().clone());
        let prepared = kernels.prepare(&all_reachable(bundle, options, &policy), progress)?;
        let builder = LayerBuilder::of(kernels, stream, policy)?;
        Ok((Self { bundle, builder, staging: Staging::new(stream) }, prepared))
    }

    /// Loads a tensor `[n, k]` as a layer.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(&mut self, name: &str) -> Result<Linear, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let weight = Weight::stored(n, k, self.bundle.tensor(name)?.encoding());
        match self.builder.policy.placement {
            Placement::Bf16 => self.merge(&[name], Merge::Rows),
            _ if is_packed(&weight) => {
                let packed = self.parts().1.packed(name)?;
                self.builder.packed(packed, &weight).map_err(in_tensor(name))
            }
            _ if self.builder.policy.stays_compact(&weight) => {
                let compact = self.parts().1.compact(name)?;
                self.builder.compact(name, &weight, compact)
            }
            _ => self.merge(&[name], Merge::Rows),
        }
    }

    /// Loads several tensors as one layer.
    ///
    /// # Errors
    /// [`LoadError`]; the tensors have different `k`, or a gate and an up have different numbers of rows or rows that
    /// are not a multiple of 32.
    pub fn merge(&mut self, names: &[&str], merge: Merge) -> Result<Linear, LoadError> {
        let shapes = names.iter().map(|name| extents(self.bundle, name)).collect::<Result<_, _>>()?;
        let encoding = |name: &&str| self.bundle.tensor(name).map(|tensor| tensor.encoding());
        let compact = names.iter().all(|name| encoding(name).is_ok_and(|encoding| encoding == EncodingId::COMPACT));
        let (builder, mut tensors) = self.parts();
        builder.merge(&Parts::new(names, shapes, merge, compact), &mut |part, packer, output| {
            names.get(part).map_or(Ok(()), |name| tensors.decode(name, packer, output))
        })
    }

    /// Loads a tensor `[2 * n, k]`, a gate followed by its up, as one layer that activates its product
    /// ([`Merge::SiluMul`]).
    ///
    /// # Errors
    /// As for [`Loader::merge`].
    pub fn gate_up(&mut self, name: &str) -> Result<Linear, LoadError> {
        if self.builder.policy.placement == Placement::Bf16 {
            // A BF16 layer concatenates the rows.
            return self.load(name);
        }
        let both = self.matrix(name)?;
        let compact = self.bundle.tensor(name)?.encoding() == EncodingId::COMPACT;
        let (gate, k) = (both.view().rows() / 2, both.view().cols());
        let up = both.view().rows() - gate;
        let names = [name];
        let parts = Parts::new(&names, vec![(gate, k), (up, k)], Merge::SiluMul, compact);
        let layer = self.builder.merge(&parts, &mut |part, packer, mut output| {
            let rows = if part == 0 { 0..gate } else { gate..gate + up };
            let mut copy = || -> Result<(), DeviceError> {
                output.copy_from(packer.stream(), both.view().part(rows.clone(), 0..k)?)
            };
            copy().map_err(in_tensor(name))
        })?;
        // The matrix must outlive the work.
        self.builder.stream().synchronize().map_err(in_tensor(name))?;
        Ok(layer)
    }

    /// Decodes a tensor `[n, k]`, such as an embedding, to BF16 on the device.
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

    /// Returns the encoding of a tensor.
    ///
    /// # Errors
    /// The bundle has no such tensor.
    pub fn encoding(&self, name: &str) -> Result<EncodingId, LoadError> {
        Ok(self.bundle.tensor(name)?.encoding())
    }

    /// Loads a Huffman-coded tensor `[n, k]` without decoding it.
    ///
    /// # Errors
    /// [`LoadError`]; [`Unsuitable::OtherEncoding`] if it is stored in another encoding.
    pub fn huffman(&mut self, name: &str) -> Result<DeviceHuffman, LoadError> {
        extents(self.bundle, name)?;
        let (_, tensors) = self.parts();
        let Some(tensor) = HuffmanTensor::of(tensors.bundle.tensor(name)?.stored()?) else {
            return Err(tensors.other_encoding(name));
        };
        DeviceHuffman::upload(&mut *tensors.staging, &tensor).map_err(in_tensor(name))
    }

    /// Loads a palette tensor `[n, k]` without decoding it.
    ///
    /// # Errors
    /// As for [`Loader::huffman`].
    pub fn palette(&mut self, name: &str) -> Result<DevicePalette, LoadError> {
        extents(self.bundle, name)?;
        let (builder, tensors) = self.parts();
        let Some(tensor) = PaletteTensor::of(tensors.bundle.tensor(name)?.stored()?) else {
            return Err(tensors.other_encoding(name));
        };
        DevicePalette::upload(builder.stream(), &tensor).map_err(in_tensor(name))
    }

    /// Loads a tensor `[n, k]` of any encoding as packed weights.
    ///
    /// # Errors
    /// [`LoadError`]; [`Unsuitable::Unpackable`] also if `n` or `k` is not a multiple of 64.
    pub fn packed(&mut self, name: &str) -> Result<DevicePacked, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let weight = Weight::stored(n, k, self.bundle.tensor(name)?.encoding());
        let (builder, mut tensors) = self.parts();
        if is_packed(&weight) {
            return tensors.packed(name);
        }
        builder.pack_alone(name, (n, k), &mut |_, packer, output| tensors.decode(name, packer, output))
    }

    /// Loads the experts of a mixture from tensors of any encoding; experts are concatenated by rows. The last experts
    /// of the shape are the parts of `shared`, if the layer has a shared expert. Weights that cannot be packed stay
    /// BF16 ([`Experts::unpackable`]), as do all with [`Placement::Bf16`].
    ///
    /// # Errors
    /// [`LoadError`]; tensors of other shapes, or sizes that are not multiples of 64.
    pub fn experts(
        &mut self,
        names: ExpertTensors<'_>,
        shared: Option<SharedTensors<'_>>,
        shape: ExpertsShape,
    ) -> Result<Experts, LoadError> {
        let [gate_up, down] = self.expert_weights(names, shared, shape)?;
        Experts::new(self.builder.kernels, shape, gate_up, down).map_err(in_tensor(names.first()))
    }

    /// Loads the experts of a mixture into host memory, with room for `slots` of them on the device. Takes the same
    /// tensors as [`Loader::experts`].
    ///
    /// # Errors
    /// As [`Loader::experts`]; or too little memory can be pinned.
    pub fn offloaded_experts(
        &mut self,
        names: ExpertTensors<'_>,
        shared: Option<SharedTensors<'_>>,
        shape: ExpertsShape,
        slots: u32,
    ) -> Result<OffloadedExperts, LoadError> {
        let weights = self.expert_weights(names, shared, shape)?;
        self.builder.offload(names.first(), shape, slots, weights)
    }

    /// Reads the tensors of a shared expert next to experts of this shape.
    fn shared_matrices(&mut self, shared: SharedTensors<'_>, shape: ExpertsShape) -> Result<SharedMatrices, LoadError> {
        let SharedTensors { gate, up, down, parts } = shared;
        let (width, hidden) = (parts.saturating_mul(shape.intermediate), shape.hidden);
        let names: &[(&str, u32)] =
            if gate == up { &[(gate, width.saturating_mul(2))] } else { &[(gate, width), (up, width)] };
        for (name, rows) in names {
            check_shape(self.bundle, name, &[*rows, hidden])?;
        }
        check_shape(self.bundle, down, &[hidden, width])?;
        let (builder, mut tensors) = self.parts();
        let packer = &mut builder.packer;
        let mut read = |name: &str, rows: u32, cols: u32| {
            let mut matrix = DeviceMatrix::zeroed(packer.stream(), rows, cols).map_err(in_tensor(name))?;
            tensors.decode(name, packer, matrix.view_mut())?;
            Ok::<_, LoadError>(matrix)
        };
        let gate_up = names.iter().map(|(name, rows)| read(name, *rows, hidden)).collect::<Result<_, _>>()?;
        Ok(SharedMatrices { gate_up, down: read(down, hidden, width)?, parts })
    }

    /// Returns gate and up, and down, of all experts.
    fn expert_weights(
        &mut self,
        names: ExpertTensors<'_>,
        shared: Option<SharedTensors<'_>>,
        shape: ExpertsShape,
    ) -> Result<[ExpertWeights; 2], LoadError> {
        let ExpertsShape { experts, hidden, intermediate } = shape;
        let first = names.first();
        let routed = experts.saturating_sub(shared.map_or(0, |shared| shared.parts));
        let matrices = shared.map(|shared| self.shared_matrices(shared, shape)).transpose()?;
        let copy_shared = |part, stream: &Stream, output: &mut MatrixMut<'_>| match (&matrices, shared) {
            (Some(matrices), Some(names)) => {
                matrices.copy(part, stream, output, routed).map_err(in_tensor(names.of(part)))
            }
            _ => Ok(()),
        };
        match names {
            ExpertTensors::Each(each) => {
                if each.len() != routed as usize {
                    return Err(unsuitable(first, Unsuitable::NotAPair { count: each.len() }));
                }
                for [gate, up, down] in each {
                    for (name, expected) in
                        [(gate, [intermediate, hidden]), (up, [intermediate, hidden]), (down, [hidden, intermediate])]
                    {
                        check_shape(self.bundle, name, &expected)?;
                    }
                }
                let (builder, mut tensors) = self.parts();
                let mut decoding = Packer::new(builder.stream(), builder.kernels).map_err(in_tensor(first))?;
                builder.expert_weights(first, shape, &mut |part, stream, mut output| {
                    copy_shared(part, stream, &mut output)?;
                    let (rows, cols) = (output.rows() / experts, output.cols());
                    for (expert, names) in (0..routed).zip(each) {
                        let name = names[part as usize];
                        let target = output.part(expert * rows..(expert + 1) * rows, 0..cols);
                        let target = target.map_err(|refusal| in_tensor(name)(refusal.into()))?;
                        tensors.decode(name, &mut decoding, target)?;
                    }
                    Ok(())
                })
            }
            ExpertTensors::Stacked { gate_up, down } => {
                let (wide, narrow) = ([routed, 2 * intermediate, hidden], [routed, hidden, intermediate]);
                check_shape(self.bundle, gate_up, &wide)?;
                check_shape(self.bundle, down, &narrow)?;
                let (builder, mut tensors) = self.parts();
                let mut stack = |name: &str, rows: u32, cols: u32, packer: &mut Packer| {
                    let mut matrix = DeviceMatrix::zeroed(packer.stream(), rows, cols).map_err(in_tensor(name))?;
                    tensors.decode(name, packer, matrix.view_mut())?;
                    Ok::<_, LoadError>(matrix)
                };
                let both = stack(gate_up, routed * 2 * intermediate, hidden, &mut builder.packer)?;
                let downs = stack(down, routed * hidden, intermediate, &mut builder.packer)?;
                builder.expert_weights(first, shape, &mut |part, stream, mut output| {
                    copy_shared(part, stream, &mut output)?;
                    if part == ExpertPart::Down {
                        let target = output.part(0..routed * hidden, 0..intermediate);
                        let target = target.map_err(|refusal| in_tensor(down)(refusal.into()));
                        return target?.copy_from(stream, downs.view()).map_err(in_tensor(down));
                    }
                    for expert in 0..routed {
                        // Each gate is followed by its up.
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

    /// Returns the placement of layers loaded from now on.
    pub fn placement(&self) -> Placement {
        self.builder.placement()
    }

    /// Loads a tensor of one dimension, such as the weight of a norm or a bias.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn vector(&mut self, name: &str) -> Result<DeviceBuffer<u16>, LoadError> {
        let entry = self.bundle.tensor(name)?.entry();
        if entry.dtype != Dtype::Bf16 || entry.shape.len() != 1 {
            let shape = entry.shape.iter().map(|extent| *extent as u64).collect();
            return Err(unsuitable(name, Unsuitable::NotAVector { dtype: entry.dtype, shape }));
        }
        let bytes = self.bundle.tensor(name)?.decode()?;
        pods(&bytes)
            .map_err(DeviceError::from)
            .and_then(|bits| DeviceBuffer::from_host(self.builder.stream(), &bits))
            .map_err(in_tensor(name))
    }

    /// Loads a tensor of one dimension as f32, which a BF16 one is widened to.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn f32_vector(&mut self, name: &str) -> Result<DeviceBuffer<f32>, LoadError> {
        let entry = self.bundle.tensor(name)?.entry();
        if !matches!(entry.dtype, Dtype::Bf16 | Dtype::F32) || entry.shape.len() != 1 {
            let shape = entry.shape.iter().map(|extent| *extent as u64).collect();
            return Err(unsuitable(name, Unsuitable::NotAVector { dtype: entry.dtype, shape }));
        }
        let bytes = self.bundle.tensor(name)?.decode()?;
        let values: Vec<f32> = match entry.dtype {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
            _ => {
                let halves = bytes.as_chunks().0.iter();
                halves.map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16)).collect()
            }
        };
        DeviceBuffer::from_host(self.builder.stream(), &values).map_err(in_tensor(name))
    }

    /// Returns the builder of layers from matrices on the device, for weights that are not in the bundle.
    pub fn builder(&mut self) -> &mut LayerBuilder<'k> {
        &mut self.builder
    }

    /// Creates an execution context on `stream` for every layer loaded so far.
    ///
    /// # Errors
    /// Not enough memory, or cuBLAS is missing and a layer needs it.
    pub fn context(&self, stream: &Stream) -> Result<ExecContext, DeviceError> {
        self.builder.context(stream)
    }

    /// Returns the builder of layers, and the source of their weights.
    fn parts(&mut self) -> (&mut LayerBuilder<'k>, Tensors<'_>) {
        let Self { bundle, builder, staging } = self;
        let LayerBuilder { kernels, policy, .. } = &*builder;
        let tensors = Tensors { bundle, kernels, decoder: policy.decoder(), code_limit: policy.code_limit, staging };
        (builder, tensors)
    }
}

/// Uploads and decodes tensors of a bundle.
struct Tensors<'a> {
    bundle: &'a Bundle,
    kernels: &'a KernelSet,
    staging: &'a mut Staging,
    decoder: Option<VariantSpec>,
    /// The maximum code length in bits.
    code_limit: u32,
}

impl Tensors<'_> {
    /// Uploads a tensor that is stored packed.
    fn packed(&mut self, name: &str) -> Result<DevicePacked, LoadError> {
        let Some(tensor) = PackedTensor::of(self.bundle.tensor(name)?.stored()?) else {
            return Err(self.other_encoding(name));
        };
        DevicePacked::upload(&mut *self.staging, &tensor).map_err(in_tensor(name))
    }

    /// Uploads a tensor that is stored compact.
    fn compact(&mut self, name: &str) -> Result<DeviceCompact, LoadError> {
        let Some(tensor) = CompactTensor::of(self.bundle.tensor(name)?.stored()?) else {
            return Err(self.other_encoding(name));
        };
        DeviceCompact::upload(&mut *self.staging, &tensor).map_err(in_tensor(name))
    }

    /// Writes the weights of a tensor of any encoding into contiguous rows, in stream order.
    fn decode(&mut self, name: &str, packer: &mut Packer, mut output: MatrixMut<'_>) -> Result<(), LoadError> {
        let device = in_tensor(name);
        let weight = Weight::stored(output.rows(), output.cols(), self.bundle.tensor(name)?.encoding());
        match weight.conversion().first().map(|edge| edge.step) {
            _ if is_packed(&weight) => packer.unpack(&self.packed(name)?, output).map_err(device),
            Some(Step::Decode(DecodeOutput::Full)) => {
                let Some(tensor) = HuffmanTensor::of(self.bundle.tensor(name)?.stored()?) else {
                    return Err(self.other_encoding(name));
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
            Some(Step::DecodeCompact) => {
                let tensor = self.compact(name)?;
                let decoder = CompactDecoder::of(self.kernels).map_err(&device)?;
                // The tensor is dropped on return: dropping it waits.
                decoder.full(packer.stream(), &tensor, output).map_err(device)
            }
            // Raw tensors, and encodings that are decoded on the host.
            _ => self.staging.write(&mut output, &self.bundle.tensor(name)?.decode()?).map_err(device),
        }
    }

    fn other_encoding(&self, name: &str) -> LoadError {
        match self.bundle.tensor(name) {
            Ok(tensor) => unsuitable(name, Unsuitable::OtherEncoding { encoding: tensor.encoding() }),
            Err(error) => error.into(),
        }
    }
}

/// Rejects a tensor of another shape or type.
fn check_shape(bundle: &Bundle, name: &str, expected: &[u32]) -> Result<(), LoadError> {
    let entry = bundle.tensor(name)?.entry();
    let same = entry.shape.iter().map(|extent| *extent as u64).eq(expected.iter().map(|extent| u64::from(*extent)));
    if same && entry.dtype == Dtype::Bf16 {
        return Ok(());
    }
    let shape = entry.shape.iter().map(|extent| *extent as u64).collect();
    Err(unsuitable(name, Unsuitable::NotAMatrix { dtype: entry.dtype, shape }))
}

/// Returns whether a weight is stored packed and needs no padding.
fn is_packed(weight: &Weight) -> bool {
    weight.node == Node::Packed && weight.padded() == Some((weight.n, weight.k))
}

/// Returns `[n, k]` of a tensor.
fn extents(bundle: &Bundle, name: &str) -> Result<(u32, u32), LoadError> {
    let entry = bundle.tensor(name)?.entry();
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
