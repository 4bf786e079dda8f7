//! Loads layers from a bundle.
//!
//! ```text
//! packed   --upload-----------------------------> packed, 12 bits a weight --> matmul (crate::ops::gemm_packed)
//!    +--unpack on the GPU, to be merged--+
//! huffman  --decode on the GPU-----------+--> BF16 --merge, pad, pack on the GPU--> packed
//! palette  --decode on the host----------+     +--what cannot be packed--> BF16 for cuBLAS
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
    weight::{DeviceCompact, DeviceHuffman, DeviceMatrix, DevicePacked, DevicePalette, pods},
};

/// Loads layers of a bundle onto one device.
#[derive(Debug)]
pub struct Loader<'k> {
    bundle: &'k Bundle,
    builder: LayerBuilder<'k>,
    staging: Staging,
}

/// Every kernel that a loader with these options can need, for any tensor of this bundle, alone or merged as servers
/// merge them. Reads the manifest only; needs no device.
pub fn reachable(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> Vec<VariantSpec> {
    all_reachable(bundle, options, &wanted(bundle, options, chooser))
}

/// Like [`reachable()`], for every GPU of an architecture. The kernels of one GPU follow from its multiprocessors and
/// its memory; these include the kernels of each.
pub fn reachable_on_any(bundle: &Bundle, options: LoadOptions, arch: Arch) -> Vec<VariantSpec> {
    let wanted = wanted(bundle, options, PackedChooser::usual(arch));
    with_decoders(bundle, &wanted, wanted.reachable_on_any_card(weights(bundle, options)))
}

fn wanted(bundle: &Bundle, options: LoadOptions, chooser: PackedChooser) -> RoutePolicy {
    options.wanted(chooser, bundle.manifest().options.code_limit)
}

/// The weights of a bundle, alone and merged.
fn weights(bundle: &Bundle, options: LoadOptions) -> impl Iterator<Item = Weight> {
    let of = move |weight: Weight| Weight { gated: weight.gated && options.fused_gate, ..weight };
    reachable::weights(bundle).into_iter().map(of)
}

fn all_reachable(bundle: &Bundle, options: LoadOptions, wanted: &RoutePolicy) -> Vec<VariantSpec> {
    with_decoders(bundle, wanted, wanted.reachable(weights(bundle, options)))
}

fn with_decoders(bundle: &Bundle, wanted: &RoutePolicy, mut variants: Vec<VariantSpec>) -> Vec<VariantSpec> {
    // An embedding is decoded, too, though it is not the weight of a layer.
    if bundle.tensors().any(|tensor| tensor.encoding() == EncodingId::HUFFMAN) {
        variants.extend(wanted.decoder().filter(|decoder| !variants.contains(decoder)));
    }
    if bundle.tensors().any(|tensor| tensor.encoding() == EncodingId::COMPACT)
        && !variants.contains(&wanted.decode_compact())
    {
        variants.push(wanted.decode_compact());
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
    /// A loader of this bundle's layers that works on `stream`. Its layers run on any stream of the device, each with
    /// its own context.
    ///
    /// Every kernel that the bundle can reach ([`reachable()`]) is compiled or found first, in parallel; `progress`
    /// hears of each. Nothing is compiled later, except for merges of tensors that servers do not merge.
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
        let prepared = kernels.prepare(&all_reachable(bundle, options, &wanted), progress)?;
        let builder = LayerBuilder::of(kernels, stream, wanted)?;
        Ok((Self { bundle, builder, staging: Staging::new(stream) }, prepared))
    }

    /// Loads a tensor `[n, k]` as a layer.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(&mut self, name: &str) -> Result<Linear, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let weight = Weight::stored(n, k, self.bundle.tensor(name)?.encoding());
        match self.builder.wanted.placement {
            Placement::Bf16 => self.merge(&[name], Merge::Rows),
            _ if is_packed(&weight) => {
                let packed = self.parts().1.packed(name)?;
                self.builder.packed(packed, &weight).map_err(in_tensor(name))
            }
            _ if self.builder.wanted.stays_compact(&weight) => {
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
        let encoding = |name: &&str| self.bundle.tensor(name).map(|tensor| tensor.encoding());
        let compact = names.iter().all(|name| encoding(name).is_ok_and(|encoding| encoding == EncodingId::COMPACT));
        let (builder, mut tensors) = self.parts();
        builder.merge(&Parts::new(names, shapes, merge, compact), &mut |part, packer, output| {
            names.get(part).map_or(Ok(()), |name| tensors.decode(name, packer, output))
        })
    }

    /// Loads a tensor `[2 * n, k]`, a gate with its up below, as one layer that activates its product
    /// ([`Merge::SiluMul`]).
    ///
    /// # Errors
    /// As for [`Loader::merge`].
    pub fn gate_up(&mut self, name: &str) -> Result<Linear, LoadError> {
        if self.builder.wanted.placement == Placement::Bf16 {
            // As BF16 their rows are concatenated.
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
        // Before the matrix goes.
        self.builder.stream().synchronize().map_err(in_tensor(name))?;
        Ok(layer)
    }

    /// Decodes a tensor `[n, k]` to BF16 on the device: an embedding, for instance.
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

    /// The encoding of a tensor.
    ///
    /// # Errors
    /// The bundle has no such tensor.
    pub fn encoding(&self, name: &str) -> Result<EncodingId, LoadError> {
        Ok(self.bundle.tensor(name)?.encoding())
    }

    /// A Huffman-coded tensor `[n, k]`, still encoded.
    ///
    /// # Errors
    /// [`LoadError`]; [`Unsuitable::OtherEncoding`] where it is stored in another encoding.
    pub fn huffman(&mut self, name: &str) -> Result<DeviceHuffman, LoadError> {
        extents(self.bundle, name)?;
        let (_, tensors) = self.parts();
        let Some(tensor) = HuffmanTensor::of(tensors.bundle.tensor(name)?.stored()?) else {
            return Err(tensors.other_encoding(name));
        };
        DeviceHuffman::upload(&mut *tensors.staging, &tensor).map_err(in_tensor(name))
    }

    /// A palette tensor `[n, k]`, still encoded.
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

    /// Packs a tensor `[n, k]` of any encoding.
    ///
    /// # Errors
    /// [`LoadError`]; [`Unsuitable::Unpackable`] also where `n` or `k` is not a multiple of 64.
    pub fn packed(&mut self, name: &str) -> Result<DevicePacked, LoadError> {
        let (n, k) = extents(self.bundle, name)?;
        let weight = Weight::stored(n, k, self.bundle.tensor(name)?.encoding());
        let (builder, mut tensors) = self.parts();
        if is_packed(&weight) {
            return tensors.packed(name);
        }
        builder.pack_alone(name, (n, k), &mut |_, packer, output| tensors.decode(name, packer, output))
    }

    /// The experts of a mixture, packed, of tensors of any encoding; experts are concatenated by rows.
    ///
    /// # Errors
    /// [`LoadError`]; tensors of other shapes, [`Unsuitable::Unpackable`] also where a size is not a multiple of 64.
    pub fn experts(&mut self, names: ExpertTensors<'_>, shape: ExpertsShape) -> Result<Experts, LoadError> {
        let (gate_up, down) = self.pack_experts(names, shape)?;
        Experts::new(self.builder.kernels, shape, gate_up, down).map_err(in_tensor(names.first()))
    }

    /// The experts of a mixture in host memory, with room for `slots` of them on the device.
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

    /// The placement of layers that are loaded from here on.
    pub fn placement(&self) -> Placement {
        self.builder.placement()
    }

    /// The elements of a tensor of one dimension: the weight of a norm, a bias.
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

    /// Builds layers from matrices on the device: for weights that are not in the bundle.
    pub fn builder(&mut self) -> &mut LayerBuilder<'k> {
        &mut self.builder
    }

    /// An execution context of `stream` for every layer loaded so far.
    ///
    /// # Errors
    /// Not enough memory, or no cuBLAS where a layer needs it.
    pub fn context(&self, stream: &Stream) -> Result<ExecContext, DeviceError> {
        self.builder.context(stream)
    }

    /// The builder of layers, and the source of their weights.
    fn parts(&mut self) -> (&mut LayerBuilder<'k>, Tensors<'_>) {
        let Self { bundle, builder, staging } = self;
        let LayerBuilder { kernels, wanted, .. } = &*builder;
        let tensors = Tensors { bundle, kernels, decoder: wanted.decoder(), code_limit: wanted.code_limit, staging };
        (builder, tensors)
    }
}

/// Brings tensors of a bundle to the device.
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
        let Some(tensor) = PackedTensor::of(self.bundle.tensor(name)?.stored()?) else {
            return Err(self.other_encoding(name));
        };
        DevicePacked::upload(&mut *self.staging, &tensor).map_err(in_tensor(name))
    }

    /// A tensor that is stored compact.
    fn compact(&mut self, name: &str) -> Result<DeviceCompact, LoadError> {
        let Some(tensor) = CompactTensor::of(self.bundle.tensor(name)?.stored()?) else {
            return Err(self.other_encoding(name));
        };
        DeviceCompact::upload(&mut *self.staging, &tensor).map_err(in_tensor(name))
    }

    /// Writes the weights of a tensor of any encoding into rows without gaps, in stream order.
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
                // The tensor goes when this returns: dropping it waits.
                decoder.full(packer.stream(), &tensor, output).map_err(device)
            }
            // Raw, and what the host decodes.
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

/// Refuses a tensor of another shape, or not of BF16.
fn of_shape(bundle: &Bundle, name: &str, wanted: &[u32]) -> Result<(), LoadError> {
    let entry = bundle.tensor(name)?.entry();
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
