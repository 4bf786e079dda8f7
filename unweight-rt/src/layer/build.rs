//! Builds layers from matrices on the device.
//!
//! ```text
//! parts --rows concatenated or interleaved--> scratch [n, k]
//! scratch --pad, pack------------------------> packed weights --> matmul of packed weights
//!         --if it cannot be packed-----------> BF16 --> cuBLAS
//!         --encode, for placement `Compact`--> compact weights
//! ```
//! The whole build runs on the GPU and produces the same bytes as the host codec. The scratch is as large as the
//! largest layer, and is freed with the builder.

use std::sync::Arc;

use unweight_codegen::{VariantSpec, family::Instruction, spec::Epilogue};
use unweight_format::{Placement, raw::packed::Window};

use crate::{
    choose::route::{Expand, KernelSource, RoutePolicy, Weight},
    device::{
        ContextSize, DeviceBuffer, DeviceError, KernelSet, MatrixMut, MatrixRef, Stream, buffer::length,
        module::LoadedKernel,
    },
    exec::ExecContext,
    jit::{process, toolchain::Library},
    layer::{
        error::{LoadError, Unsuitable, in_tensor, refused, unsuitable},
        experts::{
            Experts, ExpertsShape,
            offload::{Link, OffloadedExperts},
        },
        linear::{Bf16Linear, CompactLinear, Linear, PackedLinear},
        options::{LoadOptions, Merge},
    },
    ops::{
        decode_compact::CompactDecoder,
        encode_compact::{EncodeCompact, EncodeCompactError},
        pack::{PackError, Packer},
    },
    weight::{DeviceCompact, DeviceMatrix, DevicePacked, ExpertWeights},
};

impl KernelSource for KernelSet {
    type Kernel = Arc<LoadedKernel>;
    type Error = DeviceError;

    fn take(&self, specs: &[VariantSpec]) -> Result<Vec<Arc<LoadedKernel>>, DeviceError> {
        self.prepare(specs, &|_| {})?;
        specs.iter().map(|spec| self.get(spec)).collect()
    }
}

/// Builds layers from matrices on the device.
///
/// ```no_run
/// use unweight_rt::{Device, DeviceMatrix, KernelSet, LayerBuilder, LoadOptions, Merge, env::Env};
///
/// let device = Device::open(0)?;
/// let (kernels, stream) = (KernelSet::open(&device, Env::process()?), device.stream()?);
/// let mut builder = LayerBuilder::new(&kernels, &stream, LoadOptions::default())?;
/// let weights = DeviceMatrix::zeroed(&stream, 4096, 14336)?;
/// let down = builder.layer("down", &[weights.view()], Merge::Rows)?;
/// let context = builder.context(&stream)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LayerBuilder<'k> {
    pub(super) kernels: &'k KernelSet,
    pub(super) packer: Packer,
    pub(super) policy: RoutePolicy,
    /// Created for the first layer that is encoded.
    compressor: Option<EncodeCompact>,
    scratch: Scratch,
    /// The context size that the layers built so far need.
    context_size: ContextSize,
    /// What fetches offloaded experts; created for the first of them.
    link: Option<Arc<Link>>,
    /// Whether offloaded experts are compact.
    compact_experts: bool,
}

/// Memory of the size of the largest layer so far.
#[derive(Debug)]
struct Scratch {
    /// The whole layer.
    whole: DeviceBuffer<u16>,
    /// A part to be interleaved; later the padded layer.
    other: DeviceBuffer<u16>,
}

/// The tensors of a layer, with a name for each or one name for all.
pub(super) struct Parts<'a> {
    names: &'a [&'a str],
    shapes: Vec<(u32, u32)>,
    merge: Merge,
    /// Whether all tensors are stored compact, or not encoded yet.
    compact: bool,
}

/// Writes a part into contiguous rows.
pub(super) type Fill<'a> = &'a mut dyn FnMut(usize, &mut Packer, MatrixMut<'_>) -> Result<(), LoadError>;

/// One of the three matrices of each expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpertPart {
    /// The gate projections.
    Gate,
    /// The up projections.
    Up,
    /// The down projections.
    Down,
}

/// Writes one matrix of all experts, with rows concatenated in expert order, on the given stream.
pub type FillExperts<'a> = &'a mut dyn FnMut(ExpertPart, &Stream, MatrixMut<'_>) -> Result<(), LoadError>;

impl<'a> Parts<'a> {
    pub(super) fn new(names: &'a [&'a str], shapes: Vec<(u32, u32)>, merge: Merge, compact: bool) -> Self {
        Self { names, shapes, merge, compact }
    }

    /// Returns the name of the first tensor.
    fn first(&self) -> &'a str {
        self.names.first().copied().unwrap_or("merge")
    }

    fn name(&self, part: usize) -> &'a str {
        self.names.get(part).copied().unwrap_or(self.first())
    }

    /// Returns the weight of the merged layer.
    fn weight(&self, placement: Placement) -> Result<Weight, LoadError> {
        let first = self.first();
        let Some(&(_, k)) = self.shapes.first() else {
            return Err(unsuitable(first, Unsuitable::Nothing));
        };
        let mut n = 0u32;
        for (part, &(rows, cols)) in self.shapes.iter().enumerate() {
            if cols != k {
                let why = Unsuitable::Columns { cols, first: first.to_owned(), first_cols: k };
                return Err(unsuitable(self.name(part), why));
            }
            let sum = u64::from(n) + u64::from(rows);
            n = u32::try_from(sum).map_err(|_| unsuitable(self.name(part), Unsuitable::TooLarge { extent: sum }))?;
        }
        let gated = match (self.merge, self.shapes.as_slice()) {
            (Merge::Rows, _) => false,
            (Merge::SiluMul, &[(gate, _), (up, _)]) => {
                // Gate and up together fill whole tiles of 64 rows.
                let packs = gate.is_multiple_of(32) && k.is_multiple_of(64);
                let by_cublas = placement == Placement::Bf16;
                if gate != up || !packs && !by_cublas {
                    return Err(unsuitable(first, Unsuitable::Pair { gate, up, k }));
                }
                !by_cublas
            }
            (Merge::SiluMul, shapes) => {
                return Err(unsuitable(first, Unsuitable::NotAPair { count: shapes.len() }));
            }
        };
        Ok(Weight::merged(n, k, gated).all_compact(self.compact))
    }
}

/// Returns whether cuBLAS is usable.
pub(super) fn has_cublas() -> bool {
    process::require(Library::Cublas).is_ok()
}

/// Returns `policy`, without expansion to BF16 if cuBLAS is missing and only the GPU model would use it. Results stay
/// correct, but large batches are slower.
pub(super) fn expanding(policy: RoutePolicy, has_cublas: impl FnOnce() -> bool) -> RoutePolicy {
    let may = policy.expand == Expand::Model && !policy.chooser.arch().has(Instruction::Wgmma);
    if may && !has_cublas() { RoutePolicy { expand: Expand::Never, ..policy } } else { policy }
}

impl<'k> LayerBuilder<'k> {
    /// Creates a builder that works on `stream`. The layers run on any stream of the device; each stream needs its own
    /// context. The kernels of a layer are compiled when the layer is built.
    ///
    /// # Errors
    /// A kernel cannot be compiled or loaded, or the device failed.
    pub fn new(kernels: &'k KernelSet, stream: &Stream, options: LoadOptions) -> Result<Self, DeviceError> {
        // No tensor is decoded, hence no code limit.
        Self::of(kernels, stream, options.wanted(kernels.chooser().clone(), 0))
    }

    pub(super) fn of(kernels: &'k KernelSet, stream: &Stream, policy: RoutePolicy) -> Result<Self, DeviceError> {
        let policy = expanding(policy, has_cublas);
        let empty = || DeviceBuffer::zeroed(stream, 0);
        Ok(Self {
            packer: Packer::new(stream, kernels)?,
            compressor: None,
            kernels,
            policy,
            scratch: Scratch { whole: empty()?, other: empty()? },
            context_size: ContextSize::default(),
            link: None,
            compact_experts: true,
        })
    }

    /// Returns the stream of all work of the builder.
    pub fn stream(&self) -> &Stream {
        self.packer.stream()
    }

    /// Returns the placement of layers built from now on.
    pub fn placement(&self) -> Placement {
        self.policy.placement
    }

    /// Sets how layers built from now on hold their weights on the device. Returns the previous setting.
    pub fn set_placement(&mut self, placement: Placement) -> Placement {
        std::mem::replace(&mut self.policy.placement, placement.linear())
    }

    /// Sets which batches cuBLAS multiplies in layers built from now on. Returns the previous setting.
    pub fn set_expand(&mut self, expand: Expand) -> Expand {
        std::mem::replace(&mut self.policy.expand, expand)
    }

    /// Sets whether experts that are offloaded from now on are compact in host memory, if they can be; true by default.
    /// For measurements of packed ones. Returns the previous setting.
    #[doc(hidden)]
    pub fn set_compact_experts(&mut self, compact_experts: bool) -> bool {
        std::mem::replace(&mut self.compact_experts, compact_experts)
    }

    /// Builds a layer from weights `[n, k]`, which are copied. Errors refer to them as `name`. With
    /// [`Placement::Compact`] they are encoded as a compact tensor.
    ///
    /// # Errors
    /// As [`Loader::merge`](super::loader::Loader::merge).
    pub fn layer(&mut self, name: &str, parts: &[MatrixRef<'_>], merge: Merge) -> Result<Linear, LoadError> {
        let shapes = parts.iter().map(|part| (part.rows(), part.cols())).collect();
        let names = [name];
        self.merge(&Parts::new(&names, shapes, merge, true), &mut |part, packer, mut output| {
            let Some(source) = parts.get(part) else { return Ok(()) };
            output.copy_from(packer.stream(), *source).map_err(in_tensor(name))
        })
    }

    /// Creates an execution context on `stream` for every layer built so far.
    ///
    /// # Errors
    /// Not enough memory, or cuBLAS is missing and a layer needs it.
    pub fn context(&self, stream: &Stream) -> Result<ExecContext, DeviceError> {
        ExecContext::new(stream, self.context_size)
    }

    /// Builds one layer from several parts.
    pub(super) fn merge(&mut self, parts: &Parts<'_>, fill: Fill<'_>) -> Result<Linear, LoadError> {
        let weight = parts.weight(self.policy.placement)?;
        let device = in_tensor(parts.first());
        let (n, k) = (weight.n, weight.k);
        let stream = self.packer.stream().clone();
        if self.policy.placement == Placement::Bf16 {
            let mut whole = DeviceMatrix::zeroed(&stream, n, k).map_err(&device)?;
            stack(&mut self.packer, parts, whole.view_mut(), fill)?;
            return self.whole(whole).map_err(&device);
        }
        reserve(&mut self.scratch.whole, &stream, (n, k)).map_err(&device)?;
        if weight.gated {
            self.interleave(parts, (n, k), fill)?;
        } else {
            let whole = MatrixMut::new(&mut self.scratch.whole, n, k, k.into()).map_err(refused(&device))?;
            stack(&mut self.packer, parts, whole, fill)?;
        }
        let compact =
            if self.policy.stays_compact(&weight) { self.compact_scratch((n, k)).map_err(&device)? } else { None };
        self.layer_of_scratch(parts.first(), &weight, compact)
    }

    /// Builds a layer whose weight stays compact; of its packed encoding, only the escapes stay on the device.
    pub(super) fn compact(&mut self, name: &str, weight: &Weight, compact: DeviceCompact) -> Result<Linear, LoadError> {
        let device = in_tensor(name);
        let (n, k, stream) = (weight.n, weight.k, self.packer.stream().clone());
        reserve(&mut self.scratch.whole, &stream, (n, k)).map_err(&device)?;
        let whole = MatrixMut::new(&mut self.scratch.whole, n, k, k.into()).map_err(refused(&device))?;
        let decoder = CompactDecoder::of(self.kernels).map_err(&device)?;
        decoder.full(&stream, &compact, whole).map_err(&device)?;
        self.layer_of_scratch(name, weight, Some(compact))
    }

    /// Builds a layer from the scratch `[n, k]`. `compact` contains the same weights if the layer is to stay compact.
    fn layer_of_scratch(
        &mut self,
        name: &str,
        weight: &Weight,
        compact: Option<DeviceCompact>,
    ) -> Result<Linear, LoadError> {
        let (n, k, device) = (weight.n, weight.k, in_tensor(name));
        let too_large = || unsuitable(name, Unsuitable::TooLarge { extent: n.max(k).into() });
        let padded = weight.padded().ok_or_else(too_large)?;
        match (self.pack_scratch((n, k), padded), compact) {
            (Ok(packed), Some(compact)) => {
                let escapes = packed.into_escapes();
                let routes =
                    RoutePolicy::take_routes(self.kernels, &self.policy.compact_routes(weight)).map_err(&device)?;
                let layer = CompactLinear::new(compact, escapes, routes).map_err(&device)?;
                Ok(self.reserve_context(Linear::Compact(layer)))
            }
            (packed, _) => self.layer_of_packed(name, weight, packed),
        }
    }

    fn layer_of_packed(
        &mut self,
        name: &str,
        weight: &Weight,
        packed: Result<DevicePacked, PackError>,
    ) -> Result<Linear, LoadError> {
        let (n, k, device) = (weight.n, weight.k, in_tensor(name));
        match packed {
            Ok(packed) => self.packed(packed, weight).map_err(&device),
            Err(PackError::Device(error)) => Err(device(error)),
            Err(PackError::Unpackable(why)) if weight.gated => Err(unsuitable(name, Unsuitable::GateAndUp(why))),
            Err(PackError::Unpackable(_)) => {
                let whole = self.scratch_matrix((n, k)).map_err(&device)?;
                self.whole(whole).map_err(&device)
            }
        }
    }

    /// Packs a matrix that is not a layer, such as an embedding. Rows and columns must be multiples of 64.
    ///
    /// # Errors
    /// [`Unsuitable::Unpackable`], or a driver error. Errors refer to the matrix as `name`.
    pub fn pack(&mut self, name: &str, weights: MatrixRef<'_>) -> Result<DevicePacked, LoadError> {
        self.pack_alone(name, (weights.rows(), weights.cols()), &mut |_, packer, mut output| {
            output.copy_from(packer.stream(), weights).map_err(in_tensor(name))
        })
    }

    /// Packs one weight without padding.
    pub(super) fn pack_alone(
        &mut self,
        name: &str,
        (n, k): (u32, u32),
        fill: Fill<'_>,
    ) -> Result<DevicePacked, LoadError> {
        self.fill_scratch(name, (n, k), fill)?;
        self.pack_scratch((n, k), (n, k)).map_err(|error| match error {
            PackError::Unpackable(why) => unsuitable(name, Unsuitable::Unpackable(why)),
            PackError::Device(error) => in_tensor(name)(error),
        })
    }

    /// Writes one weight `[n, k]` to the scratch.
    fn fill_scratch(&mut self, name: &str, (n, k): (u32, u32), fill: Fill<'_>) -> Result<(), LoadError> {
        let device = in_tensor(name);
        reserve(&mut self.scratch.whole, &self.packer.stream().clone(), (n, k)).map_err(&device)?;
        let whole = MatrixMut::new(&mut self.scratch.whole, n, k, k.into()).map_err(refused(&device))?;
        fill(0, &mut self.packer, whole)
    }

    /// Builds the experts of a mixture. `fill` writes the gates of all experts, concatenated by rows, then the ups,
    /// then the downs. Sizes must be multiples of 64. Weights that cannot be packed stay BF16
    /// ([`Experts::unpackable`]), as do all with [`Placement::Bf16`].
    ///
    /// # Errors
    /// Sizes that no kernel supports, errors of `fill`, or a driver error. Errors refer to the weights as `name`.
    pub fn experts(&mut self, name: &str, shape: ExpertsShape, fill: FillExperts<'_>) -> Result<Experts, LoadError> {
        let [gate_up, down] = self.expert_weights(name, shape, fill)?;
        Experts::new(self.kernels, shape, gate_up, down).map_err(in_tensor(name))
    }

    /// Builds the experts of a mixture in host memory, with room for `slots` of them on the device. Packed weights are
    /// compact in host memory, if they can be ([`OffloadedExperts::host_encodings`]).
    ///
    /// # Errors
    /// As [`LayerBuilder::experts`]; or too little memory can be pinned.
    pub fn offloaded_experts(
        &mut self,
        name: &str,
        shape: ExpertsShape,
        slots: u32,
        fill: FillExperts<'_>,
    ) -> Result<OffloadedExperts, LoadError> {
        let weights = self.expert_weights(name, shape, fill)?;
        self.offload(name, shape, slots, weights)
    }

    /// Moves the weights of experts to host memory.
    pub(super) fn offload(
        &mut self,
        name: &str,
        shape: ExpertsShape,
        slots: u32,
        weights: [ExpertWeights; 2],
    ) -> Result<OffloadedExperts, LoadError> {
        let device = in_tensor(name);
        let (kernels, stream) = (self.kernels, self.packer.stream().clone());
        let link = match &self.link {
            Some(link) => link.clone(),
            None => self.link.insert(Link::new(kernels, &stream).map_err(&device)?.into()).clone(),
        };
        let is_compact = self.compact_experts;
        let mut encode = |packed: &DevicePacked| is_compact.then(|| self.encode_packed(packed)).transpose();
        OffloadedExperts::new(kernels, (&stream, &link), shape, slots, weights, &mut encode).map_err(device)
    }

    /// Encodes packed weights as compact, by way of the scratch. Waits.
    fn encode_packed(&mut self, packed: &DevicePacked) -> Result<DeviceCompact, EncodeCompactError> {
        // A grid's dimensions fit 32 bits.
        let (n, k) = (packed.grid().rows() as u32, packed.grid().cols() as u32);
        let stream = self.packer.stream().clone();
        // Freed, so that the encoded weights need little more memory than the parts did.
        self.scratch.other = DeviceBuffer::zeroed(&stream, 0)?;
        reserve(&mut self.scratch.whole, &stream, (n, k))?;
        let whole = MatrixMut::new(&mut self.scratch.whole, n, k, k.into()).map_err(DeviceError::from)?;
        self.packer.unpack(packed, whole)?;
        self.encode_scratch((n, k))
    }

    /// Returns gate and up, and down, of all experts.
    pub(super) fn expert_weights(
        &mut self,
        name: &str,
        shape: ExpertsShape,
        fill: FillExperts<'_>,
    ) -> Result<[ExpertWeights; 2], LoadError> {
        let device = in_tensor(name);
        let rows_of = |[n, k]: [u64; 2]| match (u32::try_from(n), u32::try_from(k)) {
            (Ok(n), Ok(k)) => Ok((n, k)),
            _ => Err(unsuitable(name, Unsuitable::TooLarge { extent: n.max(k) })),
        };
        let (wide, narrow) = (rows_of(shape.gate_up())?, rows_of(shape.down())?);
        reserve(&mut self.scratch.whole, &self.packer.stream().clone(), wide).map_err(&device)?;
        let names = [name];
        let half = (wide.0 / 2, wide.1);
        let parts = Parts::new(&names, vec![half; 2], Merge::SiluMul, false);
        self.interleave(&parts, wide, &mut |part, packer, output| {
            fill(if part == 0 { ExpertPart::Gate } else { ExpertPart::Up }, packer.stream(), output)
        })?;
        let gate_up = self.experts_of_scratch(wide).map_err(&device)?;
        self.fill_scratch(name, narrow, &mut |_, packer, output| fill(ExpertPart::Down, packer.stream(), output))?;
        Ok([gate_up, self.experts_of_scratch(narrow).map_err(&device)?])
    }

    /// Returns the scratch `[n, k]` as the weights of all experts: packed, unless that is impossible or the placement
    /// is BF16. Waits.
    fn experts_of_scratch(&mut self, (n, k): (u32, u32)) -> Result<ExpertWeights, DeviceError> {
        let why = match self.policy.placement {
            Placement::Bf16 => None,
            _ => match self.pack_scratch((n, k), (n, k)) {
                Ok(packed) => return Ok(packed.into()),
                Err(PackError::Unpackable(why)) => Some(why),
                Err(PackError::Device(error)) => return Err(error),
            },
        };
        Ok(ExpertWeights::Bf16 { weights: self.scratch_matrix((n, k))?, why })
    }

    /// Copies the scratch `[n, k]`. Waits, so that any stream may use the copy.
    fn scratch_matrix(&self, (n, k): (u32, u32)) -> Result<DeviceMatrix, DeviceError> {
        let stream = self.packer.stream();
        let mut whole = DeviceMatrix::zeroed(stream, n, k)?;
        whole.view_mut().copy_from(stream, MatrixRef::new(&self.scratch.whole, n, k, k.into())?)?;
        stream.synchronize()?;
        Ok(whole)
    }

    /// Builds a layer of packed weights and loads every kernel that any batch needs.
    pub(super) fn packed(&mut self, packed: DevicePacked, weight: &Weight) -> Result<Linear, DeviceError> {
        let routes = self.policy.packed_routes(weight, packed.has_escapes());
        let routes = RoutePolicy::take_routes(self.kernels, &routes)?;
        let layer = PackedLinear::new((weight.n, weight.k), packed, routes)?;
        Ok(self.reserve_context(Linear::Packed(layer)))
    }

    /// Builds a BF16 layer. Waits for its weights, so that any stream may run it.
    fn whole(&mut self, weights: DeviceMatrix) -> Result<Linear, DeviceError> {
        self.packer.stream().synchronize()?;
        Ok(self.reserve_context(Linear::Bf16(Bf16Linear::new(weights))))
    }

    fn reserve_context(&mut self, layer: Linear) -> Linear {
        self.context_size = self.context_size.max(layer.context_size());
        layer
    }

    /// Interleaves the rows of a gate and an up in the scratch, in the order that the epilogue expects.
    fn interleave(&mut self, parts: &Parts<'_>, (n, k): (u32, u32), fill: Fill<'_>) -> Result<(), LoadError> {
        let device = in_tensor(parts.first());
        let stream = self.packer.stream().clone();
        let (half, groups) = (n / 2, n / (2 * Epilogue::GATE_ROWS));
        // One group of rows is copied as one row, with a pitch of two groups.
        let group = k.checked_mul(2 * Epilogue::GATE_ROWS).map(|both| (both / 2, both));
        let (one, both) = group.ok_or_else(|| unsuitable(parts.first(), Unsuitable::TooLarge { extent: k.into() }))?;
        for part in 0..2 {
            reserve(&mut self.scratch.other, &stream, (half, k)).map_err(&device)?;
            let rows = MatrixMut::new(&mut self.scratch.other, half, k, k.into()).map_err(refused(&device))?;
            fill(part as usize, &mut self.packer, rows)?;
            let from = MatrixRef::new(&self.scratch.other, groups, one, one.into()).map_err(refused(&device))?;
            let mut whole =
                MatrixMut::new(&mut self.scratch.whole, groups, both, both.into()).map_err(refused(&device))?;
            let mut to = whole.part(0..groups, part * one..(part + 1) * one).map_err(refused(&device))?;
            to.copy_from(&stream, from).map_err(&device)?;
        }
        Ok(())
    }

    /// Encodes the scratch `[n, k]` as compact; `None` if that is impossible. Waits.
    fn compact_scratch(&mut self, (n, k): (u32, u32)) -> Result<Option<DeviceCompact>, DeviceError> {
        match self.encode_scratch((n, k)) {
            Ok(compact) => Ok(Some(compact)),
            // The caller packs the weights instead, or keeps them as BF16 if they cannot be packed.
            Err(EncodeCompactError::Uncompact(_)) => Ok(None),
            Err(EncodeCompactError::Device(error)) => Err(error),
        }
    }

    /// Encodes the scratch `[n, k]` as compact. Waits.
    fn encode_scratch(&mut self, (n, k): (u32, u32)) -> Result<DeviceCompact, EncodeCompactError> {
        let compressor = match &self.compressor {
            Some(compressor) => compressor,
            None => self.compressor.insert(EncodeCompact::of(self.kernels)?),
        };
        let whole = MatrixRef::new(&self.scratch.whole, n, k, k.into()).map_err(DeviceError::from)?;
        Ok(compressor.encode(&mut self.packer, whole)?.tensor)
    }

    /// Packs the scratch `[n, k]`, padded to whole tiles.
    fn pack_scratch(&mut self, (n, k): (u32, u32), padded: (u32, u32)) -> Result<DevicePacked, PackError> {
        let whole = MatrixRef::new(&self.scratch.whole, n, k, k.into()).map_err(DeviceError::from)?;
        if padded == (n, k) {
            return self.packer.pack(whole);
        }
        // The padding value is inside the weights' window, so that it needs no escapes.
        let fill = u16::from(Window::best(&self.packer.histogram(whole)?).0.base()) << 7;
        let stream = self.packer.stream().clone();
        reserve(&mut self.scratch.other, &stream, padded)?;
        let (rows, cols) = padded;
        self.scratch.other.fill_elements(&stream, rows as usize * cols as usize, fill)?;
        let mut other = MatrixMut::new(&mut self.scratch.other, rows, cols, cols.into()).map_err(DeviceError::from)?;
        other.part(0..n, 0..k).map_err(DeviceError::from)?.copy_from(&stream, whole)?;
        self.packer.pack(other.as_ref())
    }
}

/// Writes parts one after another, concatenated by rows.
fn stack(packer: &mut Packer, parts: &Parts<'_>, mut whole: MatrixMut<'_>, fill: Fill<'_>) -> Result<(), LoadError> {
    let mut first = 0;
    for (part, &(rows, k)) in parts.shapes.iter().enumerate() {
        // Their sum fits 32 bits.
        let last = first + rows;
        let target = whole.part(first..last, 0..k).map_err(refused(&in_tensor(parts.name(part))))?;
        fill(part, packer, target)?;
        first = last;
    }
    Ok(())
}

/// Allocates space for a matrix. Frees the previous buffer first, so that both need not fit.
fn reserve(buffer: &mut DeviceBuffer<u16>, stream: &Stream, (rows, cols): (u32, u32)) -> Result<(), DeviceError> {
    let elements = length("elements", u64::from(rows) * u64::from(cols))?;
    if buffer.len() < elements {
        *buffer = DeviceBuffer::zeroed(stream, 0)?;
        *buffer = DeviceBuffer::zeroed(stream, elements)?;
    }
    Ok(())
}
