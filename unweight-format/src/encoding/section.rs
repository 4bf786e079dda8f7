//! Sections: the named arrays that an encoding stores.

use crate::{CodecError, TileGrid, layout::TILE, safetensors::Dtype};

/// One extent of a section's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Extent {
    /// Rows of the matrix.
    Rows,
    /// Columns of the matrix.
    Cols,
    /// Tiles of the matrix.
    Tiles,
    /// A constant.
    Fixed(usize),
    /// Depends on the weights.
    Open,
}

/// A named array of a stored tensor, with its type and shape.
///
/// Each encoding's module defines the constants of its sections; `tiles.rs` defines those that several encodings share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Section {
    name: &'static str,
    dtype: Dtype,
    shape: &'static [Extent],
    multiple: usize,
}

impl Section {
    /// A section with this type and shape. At most one extent is [`Extent::Open`].
    pub(crate) const fn new(name: &'static str, dtype: Dtype, shape: &'static [Extent]) -> Self {
        Self { name, dtype, shape, multiple: 1 }
    }

    /// Pads the section with zeros to a multiple of `bytes`.
    pub(crate) const fn padded_to(self, bytes: usize) -> Self {
        Self { multiple: bytes, ..self }
    }

    /// The section's name in the specification. It is empty for a raw tensor, which is stored under the tensor's name.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Type of the stored elements.
    pub const fn dtype(self) -> Dtype {
        self.dtype
    }

    /// Bytes of one stored element.
    pub(crate) const fn element_bytes(self) -> usize {
        self.dtype.bits() as usize / 8
    }

    /// The shape of a stored section of `bytes` bytes in a tensor of this grid.
    pub fn shape(self, grid: TileGrid, bytes: usize) -> Vec<usize> {
        let unit = self.unit(grid);
        self.shape.iter().map(|extent| self.extent(*extent, grid).unwrap_or(bytes / unit)).collect()
    }

    /// The section's size if the grid alone determines it; `None` if the size depends on the weights.
    pub fn fixed_bytes(self, grid: TileGrid) -> Option<usize> {
        (!self.shape.contains(&Extent::Open)).then(|| self.unit(grid))
    }

    /// Checks whether a section of `bytes` bytes can belong to a tensor of this grid.
    ///
    /// # Errors
    /// It cannot; the error contains the expected size.
    pub(crate) fn check_bytes(self, grid: TileGrid, bytes: u64) -> Result<(), CodecError> {
        let expected = match self.fixed_bytes(grid) {
            Some(fixed) => fixed as u64,
            None => {
                let unit = self.unit(grid).next_multiple_of(self.multiple) as u64;
                bytes.div_ceil(unit).saturating_mul(unit)
            }
        };
        if bytes == expected {
            Ok(())
        } else {
            Err(CodecError::SectionBytes { section: self.name, expected, got: bytes })
        }
    }

    pub(crate) fn check<B: AsRef<[u8]>>(self, grid: TileGrid, bytes: &B) -> Result<(), CodecError> {
        self.check_bytes(grid, bytes.as_ref().len() as u64)
    }

    /// Bytes per index of the open extent; all bytes if there is none.
    fn unit(self, grid: TileGrid) -> usize {
        // No overflow: the grid has checked four bytes per element, and no section has more.
        self.shape.iter().filter_map(|extent| self.extent(*extent, grid)).product::<usize>() * self.element_bytes()
    }

    fn extent(self, extent: Extent, grid: TileGrid) -> Option<usize> {
        match extent {
            Extent::Rows => Some(grid.rows()),
            Extent::Cols => Some(grid.cols()),
            Extent::Tiles => Some(grid.tiles()),
            Extent::Fixed(extent) => Some(extent),
            Extent::Open => None,
        }
    }
}

/// The stored sections of one tensor, borrowed, in the order of its encoding.
#[derive(Debug, Clone)]
pub struct Sections<'a>(Vec<(Section, &'a [u8])>);

impl<'a> Sections<'a> {
    /// Pairs the sections of an encoding with their bytes.
    ///
    /// # Errors
    /// A section has a size that the grid does not allow, or the number of sections is wrong.
    pub(crate) fn new(encoding: &'static [Section], grid: TileGrid, bytes: Vec<&'a [u8]>) -> Result<Self, CodecError> {
        if encoding.len() != bytes.len() {
            return Err(CodecError::Sections { expected: encoding.len(), got: bytes.len() });
        }
        encoding.iter().zip(&bytes).try_for_each(|(section, bytes)| section.check(grid, bytes))?;
        Ok(Self(encoding.iter().copied().zip(bytes).collect()))
    }

    /// The bytes of a section; empty if the encoding does not contain it.
    pub fn get(&self, section: Section) -> &'a [u8] {
        self.0.iter().find(|(name, _)| *name == section).map_or(&[], |(_, bytes)| bytes)
    }
}

const _: () = assert!(TILE == 64, "shapes of sections in docs/format.md");
