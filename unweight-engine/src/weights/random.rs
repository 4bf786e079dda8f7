//! Random weights of a model, for measurements of a geometry.

use half::bf16;
use unweight_format::testing::Weights as Kind;
#[cfg(feature = "pipelines")]
use unweight_format::{EncodingId, bundle::Profile};
#[cfg(feature = "pipelines")]
use unweight_model::ModelWeights;
#[cfg(feature = "pipelines")]
use unweight_rt::raw::weight::{DeviceHuffman, DevicePalette};
use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, Expand, LayerBuilder, Linear, LoadError, MatrixMut, MatrixRef, Merge,
    Placement, Stream, experts::ExpertsShape,
};

#[cfg(feature = "pipelines")]
use super::stored::{Codes, StoredSource};
use super::{Embedding, ExpertNames, MixtureExperts, Source, in_tensor};

/// Random weights distributed like a trained model's. Every layer has the same weights.
#[derive(Debug)]
pub struct Random<'k> {
    builder: LayerBuilder<'k>,
    pool: DeviceBuffer<u16>,
    #[cfg(feature = "pipelines")]
    codes: Codes,
}

impl<'k> Random<'k> {
    /// Draws weights for matrices of up to `elements` elements.
    ///
    /// # Errors
    /// [`DeviceError`] if the allocation fails.
    pub fn new(builder: LayerBuilder<'k>, elements: u64) -> Result<Self, DeviceError> {
        /// The number of drawn weights; all further weights repeat them.
        const DRAWN: usize = 1 << 22;
        let stream = builder.stream().clone();
        let host: Vec<u16> = Kind::TRAINED.iter(1).take(DRAWN).collect();
        let drawn = DeviceMatrix::from_host(&stream, 1, DRAWN as u32, &host)?;
        // One more row, so that parts can start at different offsets.
        let rows = elements.div_ceil(DRAWN as u64) + 1;
        let mut pool = DeviceBuffer::zeroed(&stream, rows as usize * DRAWN)?;
        let mut all = MatrixMut::new(&mut pool, rows as u32, DRAWN as u32, DRAWN as u64)?;
        for row in 0..rows as u32 {
            all.part(row..row + 1, 0..DRAWN as u32)?.copy_from(&stream, drawn.view())?;
        }
        stream.synchronize()?;
        Ok(Self {
            builder,
            pool,
            #[cfg(feature = "pipelines")]
            codes: Codes::new(host),
        })
    }

    /// Loads MLPs as a bundle of this profile stores them (docs/format.md B.6).
    #[cfg(feature = "pipelines")]
    pub fn imitate(&mut self, names: &ModelWeights, profile: Profile) {
        self.codes.imitate(names, profile);
    }

    /// The builder of linear layers.
    pub fn builder(&mut self) -> &mut LayerBuilder<'k> {
        &mut self.builder
    }
}

/// Rows between the starts of the parts of a layer.
const PART_OFFSET: u32 = 17;

impl Source for Random<'_> {
    fn linear(&mut self, parts: &[(&str, [u32; 2])], merge: Merge) -> Result<Linear, LoadError> {
        let first = parts.first().map_or("", |(name, _)| name);
        // Each part starts at another offset: equal gate and up weights would compress better than random ones.
        let views = parts.iter().zip(0..).map(|((name, [n, k]), part)| {
            let first: u32 = part * PART_OFFSET;
            let whole = MatrixRef::new(&self.pool, first + n, *k, (*k).into());
            let view = whole.and_then(|whole| whole.part(first..first + n, 0..*k));
            view.map_err(|error| in_tensor(name)(error.into()))
        });
        let views = views.collect::<Result<Vec<_>, _>>()?;
        self.builder.layer(first, &views, merge)
    }

    fn gate_up(&mut self, name: &str, [rows, cols]: [u32; 2]) -> Result<Linear, LoadError> {
        self.linear(&[(name, [rows / 2, cols]); 2], Merge::SiluMul)
    }

    fn placement(&self) -> Placement {
        self.builder.placement()
    }

    fn set_placement(&mut self, placement: Placement) {
        self.builder.set_placement(placement);
    }

    fn set_expand(&mut self, expand: Expand) -> Expand {
        self.builder.set_expand(expand)
    }

    fn experts(
        &mut self,
        _: ExpertNames<'_>,
        shape: ExpertsShape,
        resident: Option<u32>,
    ) -> Result<MixtureExperts, LoadError> {
        let (pool, name) = (&self.pool, "experts");
        let mut fill = |_, stream: &Stream, mut output: MatrixMut<'_>| {
            let (rows, cols) = (output.rows(), output.cols());
            let from = MatrixRef::new(pool, rows, cols, cols.into()).map_err(|error| in_tensor(name)(error.into()))?;
            output.copy_from(stream, from).map_err(in_tensor(name))
        };
        Ok(match resident {
            None => MixtureExperts::OnDevice(self.builder.experts(name, shape, &mut fill)?.into()),
            Some(slots) => {
                MixtureExperts::Offloaded(self.builder.offloaded_experts(name, shape, slots, &mut fill)?.into())
            }
        })
    }

    fn embedding(&mut self, name: &str, [rows, cols]: [u32; 2]) -> Result<Embedding, LoadError> {
        let whole = rows.is_multiple_of(64) && cols.is_multiple_of(64);
        if whole && self.builder.placement() != Placement::Bf16 {
            let matrix = MatrixRef::new(&self.pool, rows, cols, cols.into());
            let matrix = matrix.map_err(|error| in_tensor(name)(error.into()))?;
            return self.builder.pack(name, matrix).map(Embedding::Packed);
        }
        self.matrix(name, [rows, cols]).map(Embedding::Bf16)
    }

    fn vector(&mut self, parts: &[(&str, u32)]) -> Result<DeviceBuffer<u16>, LoadError> {
        let first = parts.first().map_or("", |(name, _)| name);
        let len: u32 = parts.iter().map(|(_, len)| len).sum();
        // Norm weights are about 1; a bias of 1 does no harm.
        let ones = vec![bf16::ONE.to_bits(); len as usize];
        DeviceBuffer::from_host(self.builder.stream(), &ones).map_err(in_tensor(first))
    }

    fn stream(&mut self) -> Stream {
        self.builder.stream().clone()
    }

    fn f32_vector(&mut self, name: &str, len: u32) -> Result<DeviceBuffer<f32>, LoadError> {
        DeviceBuffer::zeroed(self.builder.stream(), len as usize).map_err(in_tensor(name))
    }

    fn matrix(&mut self, name: &str, [rows, cols]: [u32; 2]) -> Result<DeviceMatrix, LoadError> {
        let stream: Stream = self.builder.stream().clone();
        let make = || {
            let mut matrix = DeviceMatrix::zeroed(&stream, rows, cols)?;
            matrix.view_mut().copy_from(&stream, MatrixRef::new(&self.pool, rows, cols, cols.into())?)?;
            stream.synchronize()?;
            Ok(matrix)
        };
        make().map_err(in_tensor(name))
    }
}

#[cfg(feature = "pipelines")]
impl StoredSource for Random<'_> {
    fn encoding(&self, name: &str) -> Result<EncodingId, LoadError> {
        Ok(self.codes.encoding(name))
    }

    fn huffman(&mut self, name: &str, shape: [u32; 2]) -> Result<DeviceHuffman, LoadError> {
        let stream = self.builder.stream().clone();
        let (tensor, _) = self.codes.of(name, shape)?;
        DeviceHuffman::upload(&stream, tensor).map_err(in_tensor(name))
    }

    fn palette(&mut self, name: &str, shape: [u32; 2]) -> Result<DevicePalette, LoadError> {
        let stream = self.builder.stream().clone();
        let (_, tensor) = self.codes.of(name, shape)?;
        DevicePalette::upload(&stream, tensor).map_err(in_tensor(name))
    }
}
