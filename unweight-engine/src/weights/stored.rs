//! MLPs that are loaded in their stored encodings, for the report's pipelines.

use std::collections::HashMap;

use unweight_format::{
    CodeLimit, EncodingId, Matrix,
    bundle::Profile,
    raw::{HuffmanTensor, PaletteTensor, huffman, palette},
    safetensors::Dtype,
};
use unweight_model::{GatedWeights, ModelWeights};
use unweight_rt::{
    DeviceMatrix, Linear, LoadError, Loader, Unsuitable,
    raw::weight::{DeviceHuffman, DevicePalette},
};

use super::Source;

/// The weights of a projection.
#[derive(Debug)]
pub enum ProjectionWeights {
    Raw(DeviceMatrix),
    Palette(DevicePalette),
    Huffman(DeviceHuffman),
    Linear(Linear),
    /// Gate or up as part of [`StoredMlp::pair`].
    Paired,
}

/// The projections of a layer.
#[derive(Debug)]
pub struct StoredMlp {
    /// Gate and up, if they are one product of the loader, and whether its epilogue activates it.
    pub pair: Option<(Linear, bool)>,
    /// Gate, up and down.
    pub projections: [ProjectionWeights; 3],
    /// The shapes `[n, k]` of gate, up and down.
    pub shapes: [[u32; 2]; 3],
}

impl StoredMlp {
    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let bytes = self.projections.iter().map(|projection| match projection {
            ProjectionWeights::Raw(matrix) => matrix.bytes() as u64,
            ProjectionWeights::Palette(tensor) => tensor.bytes(),
            ProjectionWeights::Huffman(tensor) => tensor.bytes(),
            ProjectionWeights::Linear(linear) => linear.bytes(),
            ProjectionWeights::Paired => 0,
        });
        bytes.sum::<u64>() + self.pair.as_ref().map_or(0, |(linear, _)| linear.bytes())
    }
}

/// A source of weights in their stored encodings.
pub trait StoredSource: Source {
    /// The encoding that a weight is stored in.
    fn encoding(&self, name: &str) -> Result<EncodingId, LoadError>;
    /// Loads a Huffman-coded weight without decoding it.
    fn huffman(&mut self, name: &str, shape: [u32; 2]) -> Result<DeviceHuffman, LoadError>;
    /// Loads palette indices without decoding them.
    fn palette(&mut self, name: &str, shape: [u32; 2]) -> Result<DevicePalette, LoadError>;
}

impl StoredSource for Loader<'_> {
    fn encoding(&self, name: &str) -> Result<EncodingId, LoadError> {
        Loader::encoding(self, name)
    }

    fn huffman(&mut self, name: &str, _: [u32; 2]) -> Result<DeviceHuffman, LoadError> {
        Loader::huffman(self, name)
    }

    fn palette(&mut self, name: &str, _: [u32; 2]) -> Result<DevicePalette, LoadError> {
        Loader::palette(self, name)
    }
}

/// Random weights, Huffman-coded and as palette indices.
pub type Coded = (HuffmanTensor<Vec<u8>>, PaletteTensor<Vec<u8>>);

/// Random weights as a bundle would store them.
#[derive(Debug)]
pub struct Codes {
    /// The drawn weights, which repeat.
    drawn: Vec<u16>,
    /// The encodings of weights that are not raw, by name.
    encodings: HashMap<String, EncodingId>,
    /// Encoded weights, once per shape.
    coded: HashMap<[u32; 2], Coded>,
}

impl Codes {
    /// Codes with all weights raw.
    pub fn new(drawn: Vec<u16>) -> Self {
        Self { drawn, encodings: HashMap::new(), coded: HashMap::new() }
    }

    /// Sets the encodings of MLPs to those in a bundle of this profile (docs/format.md B.6).
    pub fn imitate(&mut self, names: &ModelWeights, profile: Profile) {
        for (index, layer) in names.layers.iter().enumerate() {
            let Some(GatedWeights { gate, up, down }) = layer.mlp.dense() else { continue };
            let encodings = match profile {
                Profile::Distribution => [EncodingId::HUFFMAN; 3],
                Profile::Palette => [EncodingId::PALETTE; 3],
                Profile::Inference if index > 0 && index % 2 == 0 => {
                    [EncodingId::HUFFMAN, EncodingId::HUFFMAN, EncodingId::RAW]
                }
                Profile::Inference if index > 0 => [EncodingId::PALETTE, EncodingId::PALETTE, EncodingId::RAW],
                _ => [EncodingId::RAW; 3],
            };
            self.encodings.extend([gate, up, down].into_iter().cloned().zip(encodings));
        }
    }

    /// The encoding of a weight.
    pub fn encoding(&self, name: &str) -> EncodingId {
        self.encodings.get(name).copied().unwrap_or(EncodingId::RAW)
    }

    /// Returns a weight `[n, k]` in both encodings.
    ///
    /// # Errors
    /// [`LoadError::Unsuitable`] if no matrix of this shape can be encoded.
    pub fn of(&mut self, name: &str, [n, k]: [u32; 2]) -> Result<&Coded, LoadError> {
        if !self.coded.contains_key(&[n, k]) {
            let elements = n as usize * k as usize;
            let bytes: Vec<u8> =
                self.drawn.iter().cycle().take(elements).flat_map(|weight| weight.to_le_bytes()).collect();
            let bad = |_| {
                let shape = vec![n.into(), k.into()];
                let why = Unsuitable::NotAMatrix { dtype: Dtype::Bf16, shape };
                LoadError::Unsuitable { name: name.to_owned(), why }
            };
            let matrix = Matrix::new(&bytes, n as usize, k as usize).map_err(bad)?;
            let coded = huffman::encode(matrix, CodeLimit::DEFAULT).map_err(bad)?;
            let palette = palette::encode(matrix, CodeLimit::DEFAULT).map_err(bad)?;
            self.coded.insert([n, k], (coded, palette));
        }
        self.coded.get(&[n, k]).ok_or_else(|| LoadError::Unsuitable {
            name: name.to_owned(),
            why: Unsuitable::OtherEncoding { encoding: EncodingId::HUFFMAN },
        })
    }
}
