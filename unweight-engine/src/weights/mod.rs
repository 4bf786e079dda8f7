//! A model's weights on the device.

mod random;
#[cfg(feature = "pipelines")]
mod stored;

use unweight_format::raw::{compact::Uncompact, packed::Unpackable};
use unweight_model::{
    Activation, ExpertWeights, GatedWeights, LayerWeights, Mixture, MlpWeights, ModelConfig, ModelWeights, NormWeights,
    QkNorm, SharedWeights,
};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, DeviceMatrix, DevicePacked, Expand, Linear, LoadError, Loader, Merge,
    Placement, Stream, Unsuitable,
    experts::{ExpertTensors, Experts, ExpertsShape, HostEncoding, OffloadedExperts, SharedTensors},
    raw::ops::embed::EmbedTable,
};

#[cfg(not(feature = "pipelines"))]
pub use self::Source as ModelSource;
pub use self::random::Random;
#[cfg(feature = "pipelines")]
pub use self::stored::{ProjectionWeights, StoredMlp, StoredSource, StoredSource as ModelSource};
use crate::{error::EngineError, memory};

/// The weights of a model.
#[derive(Debug)]
pub struct Weights {
    embed: Embedding,
    pub layers: Vec<Layer>,
    pub final_norm: DeviceBuffer<u16>,
    pub head: Linear,
    /// The bias of the head, padded to the columns of the logits buffer with zeros.
    pub head_bias: Option<DeviceBuffer<u16>>,
    vocab: u32,
}

/// Rows of the logits buffer have a multiple of this many columns.
pub(crate) const LOGITS_MULTIPLE: u32 = 8;

/// The table that ids are looked up in.
#[derive(Debug)]
pub enum Embedding {
    /// The table is the head.
    Tied,
    Packed(DevicePacked),
    Bf16(DeviceMatrix),
}

/// The weights of a layer. The bias of a norm that has one follows its weights.
#[derive(Debug)]
pub struct Layer {
    pub input_norm: Option<DeviceBuffer<u16>>,
    pub qkv: Linear,
    pub qkv_bias: Option<DeviceBuffer<u16>>,
    pub q_norm: Option<DeviceBuffer<u16>>,
    pub k_norm: Option<DeviceBuffer<u16>>,
    pub o: Linear,
    pub o_bias: Option<DeviceBuffer<u16>>,
    /// Norms what attention adds to the residual stream.
    pub attention_norm: Option<DeviceBuffer<u16>>,
    pub post_norm: Option<DeviceBuffer<u16>>,
    /// Norms what the MLP adds to the residual stream.
    pub mlp_norm: Option<DeviceBuffer<u16>>,
    pub mlp: Mlp,
}

/// The gate, up and down projections of a layer, or its experts.
#[expect(clippy::large_enum_variant, reason = "one per layer, and most layers of a model have the same variant")]
#[derive(Debug)]
pub enum Mlp {
    /// Linear layers of the loader.
    Linear {
        gate_up: Linear,
        /// Whether the product's epilogue activates gate and up.
        gated: bool,
        down: Linear,
    },
    /// Projections in their stored encodings, which pipelines multiply.
    #[cfg(feature = "pipelines")]
    Stored(StoredMlp),
    /// Experts, and the router that chooses among them.
    Mixture { router: Linear, experts: MixtureExperts },
}

/// The experts of a layer, by the memory that holds them.
#[derive(Debug)]
pub enum MixtureExperts {
    /// On the device.
    OnDevice(Box<Experts>),
    /// In host memory, and some on the device, too.
    Offloaded(Box<OffloadedExperts>),
}

impl MixtureExperts {
    /// The size of the execution context that the experts need.
    pub fn context_size(&self, tokens: u32, top_k: u32) -> ContextSize {
        match self {
            Self::OnDevice(experts) => experts.context_size(tokens, top_k),
            Self::Offloaded(experts) => experts.context_size(tokens, top_k),
        }
    }

    /// Sets the correction bias of the router's scores.
    fn set_correction(&mut self, bias: DeviceBuffer<f32>) {
        match self {
            Self::OnDevice(experts) => experts.set_correction(bias),
            Self::Offloaded(experts) => experts.set_correction(bias),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::OnDevice(experts) => experts.bytes(),
            Self::Offloaded(experts) => experts.bytes(),
        }
    }

    /// Why experts are BF16, in the product of gate and up or in that of down; `None` if all are packed, or if BF16 was
    /// requested.
    fn unpackable(&self) -> Option<Unpackable> {
        let [gate_up, down] = match self {
            Self::OnDevice(experts) => experts.unpackable(),
            Self::Offloaded(experts) => experts.unpackable(),
        };
        gate_up.or(down)
    }
}

impl Mlp {
    /// Gate and up, if they are one product, and whether its epilogue activates it.
    pub fn gate_up(&self) -> Option<(&Linear, bool)> {
        match self {
            Self::Linear { gate_up, gated, .. } => Some((gate_up, *gated)),
            #[cfg(feature = "pipelines")]
            Self::Stored(stored) => stored.pair.as_ref().map(|(linear, gated)| (linear, *gated)),
            Self::Mixture { .. } => None,
        }
    }

    /// Down, if it is a linear layer of the loader.
    pub fn down(&self) -> Option<&Linear> {
        match self {
            Self::Linear { down, .. } => Some(down),
            _ => None,
        }
    }

    /// The projections in their stored encodings, if they were loaded so.
    #[cfg(feature = "pipelines")]
    pub fn stored(&self) -> Option<&StoredMlp> {
        match self {
            Self::Stored(stored) => Some(stored),
            _ => None,
        }
    }

    /// The router and the experts, if there are any.
    pub fn mixture(&self) -> Option<(&Linear, &MixtureExperts)> {
        match self {
            Self::Mixture { router, experts } => Some((router, experts)),
            _ => None,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Linear { gate_up, down, .. } => gate_up.bytes() + down.bytes(),
            #[cfg(feature = "pipelines")]
            Self::Stored(stored) => stored.bytes(),
            Self::Mixture { router, experts } => router.bytes() + experts.bytes(),
        }
    }
}

impl Weights {
    /// Loads a model to the device, layer by layer. `mlp` loads the MLP of a layer, in the order of the layers;
    /// `progress` is called with the number of layers that are on the device.
    ///
    /// # Errors
    /// [`EngineError`] if the source cannot load a tensor, or if the driver fails.
    pub fn load<S: Source>(
        source: &mut S,
        config: &ModelConfig,
        names: &ModelWeights,
        mlp: &mut dyn FnMut(&mut S, &LayerWeights) -> Result<Mlp, EngineError>,
        progress: &dyn Fn(usize),
    ) -> Result<Self, EngineError> {
        let [vocab, hidden] = [config.vocab, config.hidden];
        let tied = names.embed == names.lm_head;
        let head = &[(names.lm_head.as_str(), [vocab, hidden])];
        // Ids are looked up in a tied head.
        let placement = source.placement();
        if tied {
            source.set_placement(placement.lookup());
        }
        // The head multiplies only the few requested rows. A slot of its size, the largest of all, would never be used.
        let expand = source.set_expand(Expand::Never);
        let head = source.linear(head, Merge::Rows)?;
        source.set_expand(expand);
        source.set_placement(placement);
        let embed = if tied { Embedding::Tied } else { source.embedding(&names.embed, [vocab, hidden])? };
        let head_bias = names.lm_head_bias.as_ref().map(|name| source.padded_vector(name, vocab, LOGITS_MULTIPLE));
        let head_bias = head_bias.transpose()?;
        let final_norm = norm(source, &names.final_norm, hidden)?;
        progress(0);
        let mut layers = Vec::with_capacity(names.layers.len());
        for names in &names.layers {
            let mlp = mlp(source, names)?;
            layers.push(Layer::load(source, config, names, mlp)?);
            progress(layers.len());
        }
        Ok(Self { embed, layers, final_norm, head, head_bias, vocab })
    }

    /// The table that ids are looked up in.
    pub fn embed_table(&self) -> Option<EmbedTable<'_>> {
        let (packed, bf16) = match &self.embed {
            Embedding::Tied => (self.head.packed_weights(), self.head.bf16_weights()),
            Embedding::Packed(packed) => (Some(packed), None),
            Embedding::Bf16(matrix) => (None, Some(matrix)),
        };
        let packed = packed.map(|weights| EmbedTable::Packed { weights, vocabulary: self.vocab });
        packed.or(bf16.map(|weights| EmbedTable::Bf16(weights.view())))
    }

    /// Whether ids are looked up in packed weights.
    pub fn embed_is_packed(&self) -> bool {
        matches!(self.embed_table(), Some(EmbedTable::Packed { .. }))
    }

    /// The layers whose experts are BF16 in one product or in both, because they cannot be packed, ascending; and the
    /// reason of the first.
    pub fn bf16_experts(&self) -> Option<(Vec<u32>, Unpackable)> {
        let reasons = self.layers.iter().map(|layer| layer.mlp.mixture()?.1.unpackable());
        let (layers, reasons): (Vec<_>, Vec<_>) = (0..).zip(reasons).filter_map(|(at, why)| Some((at, why?))).unzip();
        Some((layers, *reasons.first()?))
    }

    /// The layers with experts that are packed in host memory because they cannot be compact, in one product or in
    /// both, ascending; and the reason of the first.
    pub fn packed_in_host_memory(&self) -> Option<(Vec<u32>, Uncompact)> {
        let reason = |encoding| match encoding {
            HostEncoding::Packed { why } => why,
            _ => None,
        };
        let reasons = self.layers.iter().map(|layer| match layer.mlp.mixture()? {
            (_, MixtureExperts::Offloaded(experts)) => experts.host_encodings().into_iter().find_map(reason),
            (_, MixtureExperts::OnDevice(_)) => None,
        });
        let (layers, reasons): (Vec<_>, Vec<_>) = (0..).zip(reasons).filter_map(|(at, why)| Some((at, why?))).unzip();
        Some((layers, *reasons.first()?))
    }

    /// The experts of each layer, if the device does not hold all of them.
    pub fn offloaded(&self) -> impl Iterator<Item = &OffloadedExperts> {
        self.layers.iter().filter_map(|layer| match layer.mlp.mixture()? {
            (_, MixtureExperts::Offloaded(experts)) => Some(&**experts),
            (_, MixtureExperts::OnDevice(_)) => None,
        })
    }

    /// The offloaded experts, mutable.
    pub fn offloaded_mut(&mut self) -> impl Iterator<Item = &mut OffloadedExperts> {
        self.layers.iter_mut().filter_map(|layer| match &mut layer.mlp {
            Mlp::Mixture { experts: MixtureExperts::Offloaded(experts), .. } => Some(&mut **experts),
            _ => None,
        })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let vector = |vector: &DeviceBuffer<u16>| vector.bytes() as u64;
        let optional = |buffer: &Option<DeviceBuffer<u16>>| buffer.as_ref().map_or(0, vector);
        let vectors = self.layers.iter().map(|layer| {
            let norms = [&layer.input_norm, &layer.attention_norm, &layer.post_norm, &layer.mlp_norm];
            let others = [&layer.qkv_bias, &layer.q_norm, &layer.k_norm, &layer.o_bias];
            norms.into_iter().chain(others).map(optional).sum::<u64>()
        });
        let embed = match &self.embed {
            Embedding::Tied => 0,
            Embedding::Packed(packed) => packed.bytes(),
            Embedding::Bf16(matrix) => matrix.bytes() as u64,
        };
        let linears = self.layers.iter().map(|layer| layer.qkv.bytes() + layer.o.bytes() + layer.mlp.bytes());
        let linears = linears.sum::<u64>() + self.head.bytes();
        linears + vectors.sum::<u64>() + embed + vector(&self.final_norm) + optional(&self.head_bias)
    }
}

impl Layer {
    fn load(
        source: &mut impl Source,
        config: &ModelConfig,
        names: &LayerWeights,
        mlp: Mlp,
    ) -> Result<Self, EngineError> {
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        // Both products are at most 2^24, because the configuration was checked.
        let (q, kv) = (config.heads * head_dim, config.kv_heads * head_dim);
        let rows = config.qkv_rows();
        let qkv = [(names.q.as_str(), [q, hidden]), (&names.k, [kv, hidden]), (&names.v, [kv, hidden])];
        let whole = [(names.q.as_str(), [rows, hidden])];
        let qkv = if names.q == names.k { &whole[..] } else { &qkv };
        let bias = match (&names.q_bias, &names.k_bias, &names.v_bias) {
            (Some(of_all), Some(of_k), _) if of_all == of_k => Some(source.vector(&[(of_all, rows)])?),
            (Some(of_q), Some(of_k), Some(of_v)) => Some(source.vector(&[(of_q, q), (of_k, kv), (of_v, kv)])?),
            _ => None,
        };
        let [q_width, k_width] = if config.qk_norm == QkNorm::Whole { [q, kv] } else { [head_dim; 2] };
        let mut norms = |names: &Option<NormWeights>| -> Result<_, LoadError> {
            names.as_ref().map(|names| norm(source, names, hidden)).transpose()
        };
        let [input_norm, attention_norm] = [norms(&names.input_norm)?, norms(&names.attention_norm)?];
        let [post_norm, mlp_norm] = [norms(&names.post_norm)?, norms(&names.mlp_norm)?];
        let mut vector = |name: &Option<String>, width| -> Result<_, LoadError> {
            name.as_ref().map(|name| source.vector(&[(name, width)])).transpose()
        };
        Ok(Self {
            input_norm,
            attention_norm,
            post_norm,
            mlp_norm,
            q_norm: vector(&names.q_norm, q_width)?,
            k_norm: vector(&names.k_norm, k_width)?,
            o_bias: vector(&names.o_bias, hidden)?,
            qkv: source.linear(qkv, Merge::Rows)?,
            qkv_bias: bias,
            o: source.linear(&[(&names.o, [hidden, q])], Merge::Rows)?,
            mlp,
        })
    }
}

/// Loads the weights of a norm, followed by its bias if it has one.
fn norm(source: &mut impl Source, names: &NormWeights, width: u32) -> Result<DeviceBuffer<u16>, LoadError> {
    match &names.bias {
        None => source.vector(&[(&names.weight, width)]),
        Some(bias) => source.vector(&[(&names.weight, width), (bias, width)]),
    }
}

/// Loads the MLP of a layer for the chain of linear layers: gated, or experts, of which the device has room for
/// `resident`.
///
/// # Errors
/// [`EngineError`] if the source cannot load a tensor.
pub fn chain_mlp(
    source: &mut impl Source,
    config: &ModelConfig,
    resident: Option<u32>,
    names: &LayerWeights,
) -> Result<Mlp, EngineError> {
    match (&names.mlp, config.mixture) {
        (MlpWeights::Mixture { router, correction, experts, shared }, Some(mixture)) => {
            let shared = shared.as_ref().zip(mixture.shared.map(|shared| shared.parts));
            mixture_mlp(source, config, (mixture, resident), (router, correction.as_deref()), (experts, shared))
        }
        _ => linear_mlp(source, config, names),
    }
}

/// Loads an MLP as linear layers.
fn linear_mlp(source: &mut impl Source, config: &ModelConfig, names: &LayerWeights) -> Result<Mlp, EngineError> {
    let (hidden, intermediate) = (config.hidden, config.dense_intermediate());
    // The caller handles experts.
    let names = dense(source.placement(), names)?;
    let pair = [(names.gate.as_str(), [intermediate, hidden]), (names.up.as_str(), [intermediate, hidden])];
    let (gate_up, gated) = match (names.gate == names.up, config.act) {
        (true, Activation::Silu) => merged_gate_up(source, config, &names.gate)?,
        (false, Activation::Silu) => gate_up(source, &pair)?,
        // The epilogue of products supports only SiLU.
        (true, _) => (source.linear(&[(&names.gate, [2 * intermediate, hidden])], Merge::Rows)?, false),
        (false, _) => (source.linear(&pair, Merge::Rows)?, false),
    };
    let down = source.linear(&[(&names.down, [hidden, intermediate])], Merge::Rows)?;
    Ok(Mlp::Linear { gate_up, gated, down })
}

/// Loads experts with their router.
fn mixture_mlp(
    source: &mut impl Source,
    config: &ModelConfig,
    (mixture, resident): (Mixture, Option<u32>),
    (router, correction): (&str, Option<&str>),
    names: ExpertNames<'_>,
) -> Result<Mlp, EngineError> {
    let hidden = config.hidden;
    let shape = ExpertsShape { experts: mixture.all_experts(), hidden, intermediate: config.intermediate };
    if resident.is_some() {
        // No layer takes more than this, unless it cannot be packed; other processes may have taken memory meanwhile.
        let placement = if source.placement() == Placement::Bf16 { Placement::Bf16 } else { Placement::Packed };
        memory::check_host(u64::from(shape.experts).saturating_mul(config.expert_bytes(placement)))?;
    }
    // The gate of a shared expert is one more row.
    let gate = names.1.and_then(|(shared, _)| shared.gate.as_deref());
    let rows = [(router, [mixture.experts, hidden]), (gate.unwrap_or_default(), [1, hidden])];
    let rows = if gate.is_some() { &rows[..] } else { &rows[..1] };
    let router = source.linear(rows, Merge::Rows)?;
    let mut experts = source.experts(names, shape, resident)?;
    if let Some(name) = correction {
        experts.set_correction(source.f32_vector(name, mixture.experts)?);
    }
    Ok(Mlp::Mixture { router, experts })
}

/// Returns the dense MLP of a layer, whose weights are to be held by `placement`.
///
/// # Errors
/// [`EngineError::StoredExperts`] if the layer has experts.
pub(crate) fn dense(placement: Placement, names: &LayerWeights) -> Result<&GatedWeights, EngineError> {
    names.mlp.dense().ok_or(EngineError::StoredExperts(placement))
}

/// Loads gate and up as one layer that activates its product. If their shape or weights do not allow that, concatenates
/// their rows.
pub(crate) fn gate_up(source: &mut impl Source, pair: &[(&str, [u32; 2]); 2]) -> Result<(Linear, bool), LoadError> {
    match activated(source.linear(pair, Merge::SiluMul))? {
        Some(layer) => Ok(layer),
        None => Ok((source.linear(pair, Merge::Rows)?, false)),
    }
}

/// [`gate_up`] for a single tensor.
fn merged_gate_up(source: &mut impl Source, config: &ModelConfig, name: &str) -> Result<(Linear, bool), LoadError> {
    let shape = [2 * config.dense_intermediate(), config.hidden];
    match activated(source.gate_up(name, shape))? {
        Some(layer) => Ok(layer),
        None => Ok((source.linear(&[(name, shape)], Merge::Rows)?, false)),
    }
}

/// A layer of gate and up, and whether it activates its product; `None` if their shape or weights do not allow it.
fn activated(layer: Result<Linear, LoadError>) -> Result<Option<(Linear, bool)>, LoadError> {
    match layer {
        Ok(linear) => {
            // In BF16, the rows of gate and up are concatenated.
            let gated = linear.bf16_weights().is_none();
            Ok(Some((linear, gated)))
        }
        Err(LoadError::Unsuitable { why: Unsuitable::Pair { .. } | Unsuitable::GateAndUp(_), .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names of the experts of a layer, and of a shared expert with the number of experts that equal it.
pub type ExpertNames<'a> = (&'a ExpertWeights, Option<(&'a SharedWeights, u32)>);

/// A source of weights, each with a name and a shape.
pub trait Source {
    /// Loads one linear layer from matrices with the same number of columns.
    fn linear(&mut self, parts: &[(&str, [u32; 2])], merge: Merge) -> Result<Linear, LoadError>;
    /// Loads a tensor of a gate with its up below as a layer that activates its product.
    fn gate_up(&mut self, name: &str, shape: [u32; 2]) -> Result<Linear, LoadError>;
    /// The placement of the linear layers that are loaded next.
    fn placement(&self) -> Placement;
    /// Sets the placement of the linear layers that are loaded next.
    fn set_placement(&mut self, placement: Placement);
    /// Sets how the linear layers that are loaded next multiply large batches. Returns the previous value.
    fn set_expand(&mut self, expand: Expand) -> Expand;
    /// Loads the experts of a mixture, packed if possible; the parts of a shared expert come last. With `resident` they
    /// are in host memory, with room for this many on the device.
    fn experts(
        &mut self,
        names: ExpertNames<'_>,
        shape: ExpertsShape,
        resident: Option<u32>,
    ) -> Result<MixtureExperts, LoadError>;
    /// Loads a table for lookups: packed if linear layers are and the weights can be.
    fn embedding(&mut self, name: &str, shape: [u32; 2]) -> Result<Embedding, LoadError>;
    /// Loads vectors, concatenated.
    fn vector(&mut self, parts: &[(&str, u32)]) -> Result<DeviceBuffer<u16>, LoadError>;
    /// Loads a vector, followed by zeros up to a multiple of `multiple` elements.
    fn padded_vector(&mut self, name: &str, len: u32, multiple: u32) -> Result<DeviceBuffer<u16>, LoadError> {
        let vector = self.vector(&[(name, len)])?;
        if len.is_multiple_of(multiple) {
            return Ok(vector);
        }
        let stream = self.stream();
        let mut values = vector.to_host(&stream).map_err(in_tensor(name))?;
        values.resize(len.next_multiple_of(multiple) as usize, 0);
        DeviceBuffer::from_host(&stream, &values).map_err(in_tensor(name))
    }
    /// The stream that loads.
    fn stream(&mut self) -> Stream;
    /// Loads a vector as f32.
    fn f32_vector(&mut self, name: &str, len: u32) -> Result<DeviceBuffer<f32>, LoadError>;
    /// Loads a weight as BF16.
    fn matrix(&mut self, name: &str, shape: [u32; 2]) -> Result<DeviceMatrix, LoadError>;
}

/// A bundle, whose shapes were checked when its tensors were bound to their roles.
impl Source for Loader<'_> {
    fn linear(&mut self, parts: &[(&str, [u32; 2])], merge: Merge) -> Result<Linear, LoadError> {
        match parts {
            [(name, _)] if merge == Merge::Rows => self.load(name),
            parts => self.merge(&parts.iter().map(|(name, _)| *name).collect::<Vec<_>>(), merge),
        }
    }

    fn gate_up(&mut self, name: &str, _: [u32; 2]) -> Result<Linear, LoadError> {
        Loader::gate_up(self, name)
    }

    fn placement(&self) -> Placement {
        Loader::placement(self)
    }

    fn set_placement(&mut self, placement: Placement) {
        self.builder().set_placement(placement);
    }

    fn set_expand(&mut self, expand: Expand) -> Expand {
        self.builder().set_expand(expand)
    }

    fn experts(
        &mut self,
        (names, shared): ExpertNames<'_>,
        shape: ExpertsShape,
        resident: Option<u32>,
    ) -> Result<MixtureExperts, LoadError> {
        let shared = shared.map(|(shared, parts)| {
            let GatedWeights { gate, up, down } = &shared.mlp;
            SharedTensors { gate, up, down, parts }
        });
        let each: Vec<_>;
        let names = match names {
            ExpertWeights::Each(names) => {
                each = names.iter().map(|names| [&*names.gate, &*names.up, &*names.down]).collect();
                ExpertTensors::Each(&each)
            }
            ExpertWeights::Stacked { gate_up, down } => ExpertTensors::Stacked { gate_up, down },
        };
        Ok(match resident {
            None => MixtureExperts::OnDevice(Loader::experts(self, names, shared, shape)?.into()),
            Some(slots) => MixtureExperts::Offloaded(self.offloaded_experts(names, shared, shape, slots)?.into()),
        })
    }

    fn embedding(&mut self, name: &str, [vocab, hidden]: [u32; 2]) -> Result<Embedding, LoadError> {
        let whole = vocab.is_multiple_of(64) && hidden.is_multiple_of(64);
        if whole && Loader::placement(self) != Placement::Bf16 {
            match self.packed(name) {
                Err(LoadError::Unsuitable { why: Unsuitable::Unpackable(_), .. }) => {}
                packed => return packed.map(Embedding::Packed),
            }
        }
        self.matrix(name).map(Embedding::Bf16)
    }

    fn vector(&mut self, parts: &[(&str, u32)]) -> Result<DeviceBuffer<u16>, LoadError> {
        if let [(name, _)] = parts {
            return Loader::vector(self, name);
        }
        let mut whole = Vec::new();
        let stream = self.builder().stream().clone();
        for (name, _) in parts {
            let part = Loader::vector(self, name)?;
            whole.extend(part.to_host(&stream).map_err(in_tensor(name))?);
        }
        let first = parts.first().map_or("", |(name, _)| name);
        DeviceBuffer::from_host(&stream, &whole).map_err(in_tensor(first))
    }

    fn stream(&mut self) -> Stream {
        self.builder().stream().clone()
    }

    fn f32_vector(&mut self, name: &str, _: u32) -> Result<DeviceBuffer<f32>, LoadError> {
        Loader::f32_vector(self, name)
    }

    fn matrix(&mut self, name: &str, _: [u32; 2]) -> Result<DeviceMatrix, LoadError> {
        Loader::matrix(self, name)
    }
}

pub(crate) fn in_tensor(name: &str) -> impl FnOnce(DeviceError) -> LoadError {
    move |source| LoadError::Device { name: name.to_owned(), source: Box::new(source) }
}
