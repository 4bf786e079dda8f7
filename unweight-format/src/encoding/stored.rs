//! A stored tensor in any encoding.

use std::fmt;

use super::{Encoding, EncodingId, NotEncodable, Section, Sections, Survey, TileRows, raw};
use crate::{CodeLimit, CodecError, FloatMatrix, TileGrid};

/// A stored tensor: its encoding, the shape of its matrix, and the bytes of its sections, owned (`Vec<u8>`) or borrowed
/// (`&[u8]`).
///
/// Construction checks the sections, so every offset in them can be trusted.
#[derive(Clone)]
pub struct StoredTensor<B> {
    encoding: &'static dyn Encoding,
    /// `None` for a tensor that is not a matrix, which is always raw.
    grid: Option<TileGrid>,
    sections: Vec<B>,
}

impl StoredTensor<Vec<u8>> {
    /// Encodes a matrix. `survey` is the survey of this matrix; `limit` bounds the code lengths of encodings with
    /// codes.
    ///
    /// # Errors
    /// As [`Encoding::encode`].
    pub fn encode(
        encoding: EncodingId,
        matrix: FloatMatrix<'_>,
        survey: &Survey,
        limit: CodeLimit,
    ) -> Result<Self, NotEncodable> {
        Ok(Self::trusted(encoding, matrix.grid(), encoding.encoding().encode(matrix, survey, limit)?))
    }
}

impl<B: AsRef<[u8]>> StoredTensor<B> {
    /// Checks the sections of a matrix, given in the encoding's order, and returns them as a tensor.
    ///
    /// # Errors
    /// As [`Encoding::check`](super::Encoding::check).
    pub fn new(encoding: EncodingId, grid: TileGrid, sections: Vec<B>) -> Result<Self, CodecError> {
        let tensor = Self::trusted(encoding, grid, sections);
        tensor.encoding.check(grid, &tensor.checked(grid)?)?;
        Ok(tensor)
    }

    /// Wraps the sections of an encoder or of a typed view without checking them.
    pub(crate) fn trusted(encoding: EncodingId, grid: TileGrid, sections: Vec<B>) -> Self {
        Self { encoding: encoding.encoding(), grid: Some(grid), sections }
    }

    /// Wraps the original bytes of a tensor of any type and shape.
    pub fn raw(bytes: B) -> Self {
        Self { encoding: &raw::Raw, grid: None, sections: vec![bytes] }
    }

    /// The tensor's encoding.
    pub fn encoding(&self) -> EncodingId {
        self.encoding.id()
    }

    /// The shape of the tensor's matrix; `None` for a raw tensor, which may have any shape.
    pub fn grid(&self) -> Option<TileGrid> {
        self.grid
    }

    /// The tensor's sections in stored order.
    pub fn sections(&self) -> impl Iterator<Item = (Section, &[u8])> {
        self.encoding.sections().iter().copied().zip(self.sections.iter().map(AsRef::as_ref))
    }

    /// The sections in stored order, with their bytes as they are held.
    pub(crate) fn held(&self) -> &[B] {
        &self.sections
    }

    /// The bytes of one section; `None` if the encoding does not contain it.
    pub fn section(&self, section: Section) -> Option<&[u8]> {
        self.sections().find(|(own, _)| *own == section).map(|(_, bytes)| bytes)
    }

    /// Bytes of all sections together.
    pub fn stored_bytes(&self) -> u64 {
        self.sections.iter().map(|bytes| bytes.as_ref().len() as u64).sum()
    }

    /// Decodes to the original bytes, on the current rayon pool.
    ///
    /// # Errors
    /// `out` has a different size than the original, or the codes are not those of any matrix.
    pub fn decode(&self, out: &mut [u8]) -> Result<(), CodecError> {
        match self.grid {
            Some(grid) => self.encoding.decode(grid, &self.checked(grid)?, out),
            None => raw::copy(self.sections[0].as_ref(), out),
        }
    }

    /// A decoder of tile rows; `None` if the tensor can only be decoded as a whole.
    pub(crate) fn tile_rows(&self) -> Result<Option<TileRows<'_>>, CodecError> {
        let Some((grid, read)) = self.grid.zip(self.encoding.tile_rows()) else { return Ok(None) };
        read(grid, &self.checked(grid)?).map(Some)
    }

    /// The same tensor with its bytes in another type.
    pub(crate) fn map<C>(self, convert: impl FnMut(B) -> C) -> StoredTensor<C> {
        StoredTensor {
            encoding: self.encoding,
            grid: self.grid,
            sections: self.sections.into_iter().map(convert).collect(),
        }
    }

    /// The bytes of the sections in stored order.
    pub(crate) fn into_sections(self) -> Vec<B> {
        self.sections
    }

    /// The same tensor with borrowed bytes.
    pub fn borrowed(&self) -> StoredTensor<&[u8]> {
        let sections = self.sections.iter().map(AsRef::as_ref).collect();
        StoredTensor { encoding: self.encoding, grid: self.grid, sections }
    }

    /// Takes a matrix of this encoding apart into its grid and its sections by name. `None` if it has another encoding.
    pub(crate) fn take(self, encoding: EncodingId) -> Option<(TileGrid, impl FnMut(Section) -> B)> {
        let grid = self.grid.filter(|_| self.encoding.id() == encoding)?;
        let mut sections: Vec<Option<B>> = self.sections.into_iter().map(Some).collect();
        let own = self.encoding.sections();
        let take = move |section| {
            let at = own.iter().position(|own| *own == section);
            at.and_then(|at| sections[at].take()).expect("a view takes each of its encoding's sections once")
        };
        Some((grid, take))
    }

    fn checked(&self, grid: TileGrid) -> Result<Sections<'_>, CodecError> {
        Sections::new(self.encoding.sections(), grid, self.sections.iter().map(AsRef::as_ref).collect())
    }
}

impl<B: AsRef<[u8]>> PartialEq for StoredTensor<B> {
    fn eq(&self, other: &Self) -> bool {
        let head = |t: &Self| (t.encoding.id(), t.grid);
        head(self) == head(other) && self.sections().eq(other.sections())
    }
}

impl<B: AsRef<[u8]>> Eq for StoredTensor<B> {}

/// Prints the sizes of sections instead of their bytes.
impl<B: AsRef<[u8]>> fmt::Debug for StoredTensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("StoredTensor");
        debug.field("encoding", &self.encoding()).field("grid", &self.grid);
        for (section, bytes) in self.sections() {
            debug.field(if section.name().is_empty() { "bytes" } else { section.name() }, &bytes.len());
        }
        debug.finish()
    }
}
