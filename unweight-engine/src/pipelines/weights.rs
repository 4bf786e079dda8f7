//! Loads the weights of MLPs to the device in their stored encodings.

use std::collections::BTreeSet;

use unweight_codegen::{
    VariantSpec,
    spec::{Arch, DecodeOutput},
};
use unweight_format::{
    EncodingId,
    bundle::Bundle,
    raw::{HuffmanTensor, PaletteTensor},
};
use unweight_model::{GatedWeights, LayerWeights, ModelConfig};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, ExecContext, KernelSet, Linear, LoadError, Merge, Stream,
    raw::{
        choose::graph,
        ops::decode_huffman::{Decoder, output_bytes},
        weight::{DeviceHuffman, DevicePalette},
    },
};

use super::{LoadedMlp, LoadedProjection, loads_as, reachable};
use crate::{
    error::EngineError,
    options::{LoadedAs, Placement},
    weights::{Mlp, ProjectionWeights, StoredMlp, StoredSource, dense, gate_up, in_tensor},
};

/// Transcodes Huffman-coded weights to palette indices.
struct Transcoding<'k> {
    kernels: &'k KernelSet,
    ctx: ExecContext,
}

impl<'k> Transcoding<'k> {
    fn new(kernels: &'k KernelSet, stream: &Stream) -> Result<Self, DeviceError> {
        Ok(Self { kernels, ctx: ExecContext::new(stream, ContextSize::default())? })
    }

    fn run(&mut self, tensor: DeviceHuffman) -> Result<DevicePalette, DeviceError> {
        let mut indices = DeviceBuffer::zeroed(self.ctx.stream(), output_bytes(tensor.grid(), DecodeOutput::Palette))?;
        let decoder = decoder(self.kernels, DecodeOutput::Palette, tensor.code_bits())?;
        decoder.palette(&mut self.ctx, &tensor, &mut indices)?;
        // Also waits, before the codes are freed.
        self.ctx.synchronize()?;
        Ok(tensor.into_palette(indices)?)
    }
}

/// Returns the decoder to an encoding, for codes of up to `bits` bits.
pub fn decoder(kernels: &KernelSet, output: DecodeOutput, bits: u32) -> Result<Decoder, DeviceError> {
    let arch = kernels.device().info().arch;
    match graph::decoder(arch, output, bits) {
        Some(spec) => Decoder::new(kernels.get(&spec)?),
        None => Err(unweight_rt::LaunchError::CodeBits { limit: 0, bits }.into()),
    }
}

/// The shapes `[n, k]` of a model's gate, up and down.
fn shapes(config: &ModelConfig) -> [[u32; 2]; 3] {
    let (hidden, intermediate) = (config.hidden, config.intermediate);
    [[intermediate, hidden], [intermediate, hidden], [hidden, intermediate]]
}

/// Whether a layer's Huffman codes become palette indices, if `coded` layers before it have Huffman codes.
fn is_easy(placement: Placement, coded: u32) -> bool {
    placement == Placement::Alternate && coded % 2 == 1
}

/// The encodings that decoders of step graphs write. Exponents and palette indices are for reconstructive matmuls,
/// which not every architecture has.
pub fn outputs(has_matmuls: bool) -> &'static [DecodeOutput] {
    const ALL: [DecodeOutput; 3] = [DecodeOutput::Full, DecodeOutput::Exponent, DecodeOutput::Palette];
    if has_matmuls { &ALL } else { &ALL[..1] }
}

/// Returns the kernels that a bundle's MLPs need for loading in their stored encodings and in step graphs, whatever the
/// setting. Reads the tensors, because the variants depend on the codes and on the verbatim rows of tiles.
///
/// # Errors
/// [`EngineError::Load`] if a tensor cannot be read.
pub fn kernels<'a>(
    bundle: &Bundle,
    config: &ModelConfig,
    names: impl IntoIterator<Item = &'a GatedWeights>,
    placement: Placement,
    arch: Arch,
) -> Result<Vec<VariantSpec>, EngineError> {
    let (mut layers, mut decoders) = (Vec::new(), BTreeSet::new());
    let (mut coded, mut longest) = (0, None);
    for names in names {
        let all = [names.gate.as_str(), &names.up, &names.down];
        let mut encodings = [EncodingId::RAW; 3];
        for (encoding, name) in encodings.iter_mut().zip(all) {
            *encoding = bundle.tensor(name).map_err(LoadError::from)?.encoding();
        }
        let codes = encodings.contains(&EncodingId::HUFFMAN);
        let easy = codes && is_easy(placement, coded);
        coded += u32::from(codes);
        let mut mlp = shapes(config).map(|[n, k]| LoadedProjection {
            loaded_as: LoadedAs::Bf16,
            packed: false,
            n,
            k,
            verbatim_rows: 0,
        });
        for ((part, encoding), name) in mlp.iter_mut().zip(encodings).zip(all) {
            part.loaded_as = loads_as(encoding, [part.n, part.k], easy, arch);
            if !matches!(part.loaded_as, LoadedAs::Palette | LoadedAs::Huffman) {
                continue;
            }
            let tensor = bundle.tensor(name).and_then(|tensor| tensor.stored()).map_err(LoadError::from)?;
            if encoding == EncodingId::PALETTE {
                part.verbatim_rows = PaletteTensor::of(tensor).map_or(0, |tensor| tensor.max_verbatim_rows());
            } else if let Some(tensor) = HuffmanTensor::of(tensor) {
                part.verbatim_rows = tensor.max_verbatim_rows();
                let bits = tensor.code().max_length();
                if part.loaded_as == LoadedAs::Huffman {
                    longest = longest.max(Some(bits));
                } else {
                    decoders.extend(graph::decoder(arch, DecodeOutput::Palette, bits));
                }
            }
        }
        layers.push(mlp);
    }
    let matmuls = reachable(&layers, arch);
    if let Some(bits) = longest {
        let outputs = outputs(!matmuls.is_empty()).iter();
        decoders.extend(outputs.filter_map(|output| graph::decoder(arch, *output, bits)));
    }
    decoders.extend(matmuls);
    Ok(decoders.into_iter().collect())
}

/// Loads the MLPs of a model in their stored encodings.
pub struct StoredMlps<'k> {
    transcoding: Transcoding<'k>,
    placement: Placement,
    /// The number of layers with Huffman-coded weights so far.
    coded: u32,
}

impl<'k> StoredMlps<'k> {
    /// A loader for the layers of one model, from the first on.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn new(kernels: &'k KernelSet, stream: &Stream, placement: Placement) -> Result<Self, DeviceError> {
        Ok(Self { transcoding: Transcoding::new(kernels, stream)?, placement, coded: 0 })
    }

    /// Loads the next layer's MLP to the device.
    ///
    /// # Errors
    /// [`EngineError`] if the layer has experts, if the source cannot load a tensor, or if the driver fails.
    pub fn load(
        &mut self,
        source: &mut impl StoredSource,
        config: &ModelConfig,
        names: &LayerWeights,
    ) -> Result<Mlp, EngineError> {
        let names = dense(self.placement, names)?;
        let codes = has_codes(source, names)?;
        let easy = codes && is_easy(self.placement, self.coded);
        self.coded += u32::from(codes);
        Ok(Mlp::Stored(StoredMlp::load(source, &mut self.transcoding, config, names, easy)?))
    }
}

/// Whether a layer has Huffman-coded projections.
fn has_codes(source: &impl StoredSource, names: &GatedWeights) -> Result<bool, LoadError> {
    for name in [&names.gate, &names.up, &names.down] {
        if source.encoding(name)? == EncodingId::HUFFMAN {
            return Ok(true);
        }
    }
    Ok(false)
}

impl StoredMlp {
    /// Loads a layer's projections to the device; with `easy`, without Huffman codes.
    fn load(
        source: &mut impl StoredSource,
        transcoding: &mut Transcoding<'_>,
        config: &ModelConfig,
        names: &GatedWeights,
        easy: bool,
    ) -> Result<Self, EngineError> {
        let arch = transcoding.kernels.device().info().arch;
        let shapes = shapes(config);
        let all = [names.gate.as_str(), &names.up, &names.down];
        let mut loaded = [LoadedAs::Bf16; 3];
        for ((loaded, name), shape) in loaded.iter_mut().zip(all).zip(shapes) {
            *loaded = loads_as(source.encoding(name)?, shape, easy, arch);
        }
        let mut pair = None;
        if loaded[0] == LoadedAs::Linear && loaded[1] == LoadedAs::Linear {
            // Packed or not, a step graph treats gate and up of packed weights as one product.
            pair = Some(gate_up(source, &[(all[0], shapes[0]), (all[1], shapes[1])])?);
        }
        let mut projection = |index: usize| -> Result<ProjectionWeights, LoadError> {
            let (name, shape) = (all[index], shapes[index]);
            Ok(match loaded[index] {
                LoadedAs::Linear if index < 2 && pair.is_some() => ProjectionWeights::Paired,
                LoadedAs::Linear => ProjectionWeights::Linear(source.linear(&[(name, shape)], Merge::Rows)?),
                LoadedAs::Bf16 => ProjectionWeights::Raw(source.matrix(name, shape)?),
                LoadedAs::Huffman => ProjectionWeights::Huffman(source.huffman(name, shape)?),
                LoadedAs::Palette if source.encoding(name)? == EncodingId::HUFFMAN => {
                    let tensor = source.huffman(name, shape)?;
                    ProjectionWeights::Palette(transcoding.run(tensor).map_err(in_tensor(name))?)
                }
                LoadedAs::Palette => ProjectionWeights::Palette(source.palette(name, shape)?),
            })
        };
        let projections = [projection(0)?, projection(1)?, projection(2)?];
        Ok(Self { pair, projections, shapes })
    }

    /// The properties that the choice of pipelines depends on.
    pub fn loaded(&self) -> LoadedMlp {
        [0, 1, 2].map(|index| {
            let [n, k] = self.shapes[index];
            let (loaded_as, packed, verbatim_rows) = match &self.projections[index] {
                ProjectionWeights::Raw(_) => (LoadedAs::Bf16, false, 0),
                ProjectionWeights::Palette(tensor) => (LoadedAs::Palette, false, tensor.max_verbatim_rows()),
                ProjectionWeights::Huffman(tensor) => (LoadedAs::Huffman, false, tensor.max_verbatim_rows()),
                ProjectionWeights::Linear(linear) => (LoadedAs::Linear, linear.is_packed(), 0),
                ProjectionWeights::Paired => (LoadedAs::Linear, true, 0),
            };
            LoadedProjection { loaded_as, packed, n, k, verbatim_rows }
        })
    }

    /// The size of the execution context that the layer's products need, whichever stream they run on.
    pub fn context_size(&self) -> ContextSize {
        let linears = self.projections.iter().filter_map(|projection| match projection {
            ProjectionWeights::Linear(linear) => Some(linear),
            _ => None,
        });
        let linears = linears.chain(self.pair.as_ref().map(|(linear, _)| linear));
        linears.map(Linear::context_size).fold(ContextSize::default(), ContextSize::max)
    }

    /// The maximum code length of the layer's Huffman-coded weights, in bits.
    pub fn code_bits(&self) -> Option<u32> {
        let codes = self.projections.iter().filter_map(|projection| match projection {
            ProjectionWeights::Huffman(tensor) => Some(tensor.code_bits()),
            _ => None,
        });
        codes.max()
    }
}
