//! How weights are held in device memory.

use crate::named::named;

named! {
    /// How the weights of a model are held in device memory.
    ///
    /// ```
    /// use unweight_format::Placement;
    /// assert_eq!("compact".parse(), Ok(Placement::Compact));
    /// assert_eq!((Placement::default(), Placement::Stored.to_string()), (Placement::Packed, "stored".to_owned()));
    /// // A layer outside of an MLP's pipelines, and a table that ids are looked up in.
    /// assert_eq!([Placement::Stored.linear(), Placement::Compact.linear()], [Placement::Packed, Placement::Compact]);
    /// assert_eq!([Placement::Compact.lookup(), Placement::Bf16.lookup()], [Placement::Packed, Placement::Bf16]);
    /// ```
    #[derive(Default)]
    Placement, "placement" {
        /// BF16, multiplied by cuBLAS, experts by the grouped product: the BF16 baseline.
        Bf16 = "bf16",
        /// Packed tiles, 12 bits per weight, the default. A weight that cannot be packed is held as BF16; a compact
        /// tensor is expanded when it is loaded.
        #[default]
        Packed = "packed",
        /// Compact tensors stay compact, 10.9 bits per weight, where kernels support them. All other weights are held
        /// as by [`Self::Packed`].
        Compact = "compact",
        /// The weights of MLPs stay as the bundle stores them, and the report's pipelines multiply by them. All other
        /// weights are held as by [`Self::Packed`].
        Stored = "stored",
        /// Like [`Self::Stored`], but every other layer with Huffman-coded weights is held as palette indices.
        Alternate = "alternate",
    }
}

impl Placement {
    /// Whether the report's pipelines multiply by the weights of MLPs: [`Self::Stored`] and [`Self::Alternate`].
    pub const fn has_pipelines(self) -> bool {
        matches!(self, Self::Stored | Self::Alternate)
    }

    /// The placement of a linear layer outside of pipelines: [`Self::Bf16`], [`Self::Packed`] or [`Self::Compact`].
    #[must_use]
    pub const fn linear(self) -> Self {
        if self.has_pipelines() { Self::Packed } else { self }
    }

    /// The placement of an embedding table: [`Self::Bf16`] or [`Self::Packed`], because no kernel looks up rows of
    /// compact tensors.
    #[must_use]
    pub const fn lookup(self) -> Self {
        match self {
            Self::Bf16 => Self::Bf16,
            _ => Self::Packed,
        }
    }
}
