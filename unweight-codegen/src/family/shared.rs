//! Axes that several families share.

use crate::{
    axes::{Arch, set_axis, word_axis},
    limits::Instruction,
};

word_axis! {
    /// How a kernel copies operands to shared memory.
    SmemCopy, "copy" {
        /// Bulk and tensor copies of the copy engine, issued by an elected lane of each warp.
        Bulk = "bulk",
        /// `cp.async`: every thread copies 16 bytes at a time. For architectures without a copy engine; works on all.
        Async = "async",
    }
}

impl SmemCopy {
    /// Returns `Bulk` for architectures with a copy engine, and `Async` for others.
    pub const fn of(arch: Arch) -> Self {
        if arch.has(Instruction::BulkCopy) { Self::Bulk } else { Self::Async }
    }

    /// Returns the instruction that the copy needs.
    pub const fn instruction(self) -> Instruction {
        match self {
            Self::Bulk => Instruction::BulkCopy,
            Self::Async => Instruction::AsyncCopy,
        }
    }
}

word_axis! {
    /// How the product is stored (report section 8.2, finish stage).
    Epilogue, "epilogue" {
        /// `Y = X W^T`.
        Store = "store",
        /// `Y = Y + X W^T`, added in fp32 and rounded once.
        StoreAdd = "store_add",
        /// `Y = silu(G) * U`. Blocks of [`Epilogue::GATE_ROWS`] columns of G and of the matching columns of U alternate
        /// in the product, so Y has half as many output features. For ops `gemm_mma`, `gemm_wgmma`, `gemm_compact` and
        /// `gemm_grouped` only.
        SiluMul = "silu_mul",
    }
}

impl Epilogue {
    /// Rows of a gate block, and of the up block after it, in the weights of a `silu_mul` product.
    pub const GATE_ROWS: u32 = 8;

    /// Returns the formula for the head comment of a source.
    pub(crate) const fn formula(self) -> &'static str {
        match self {
            Self::Store => "Y[m,n] = X[m,k] * W[n,k]^T",
            Self::StoreAdd => "Y[m,n] += X[m,k] * W[n,k]^T",
            Self::SiluMul => "Y[m,n/2] = silu(G) * U, G and U alternating blocks of 8 columns of X[m,k] * W[n,k]^T",
        }
    }
}

set_axis! {
    /// Blocks that share the work of one output, such as the k of a tile, and combine their results through distributed
    /// shared memory; 1 for no cluster.
    ClusterSize, "cluster", [1, 2, 4, 8], "1, 2, 4 or 8 (blocks; 8 is what every device of the architecture runs)"
}

#[cfg(test)]
mod tests {
    use crate::spec::{CodeLimit, EncodeHuffmanStage, NTiles, SmallBatchTile, Stages, VerbatimRows, WideBatchTile};

    #[test]
    fn values_outside_an_axis_are_explained() {
        assert_eq!(
            CodeLimit::new(16).unwrap_err().to_string(),
            "code_limit = 16 is not supported; it must be 6..=15 (bits)"
        );
        assert!(NTiles::new(0).is_err() && NTiles::new(5).is_err() && NTiles::new(u32::MAX).is_err());
        assert!(Stages::new(1).is_err() && Stages::new(9).is_err());
        assert!(VerbatimRows::new(7).is_err() && VerbatimRows::new(64).is_ok());
        assert_eq!(
            WideBatchTile::new(8).unwrap_err().to_string(),
            "batch_tile = 8 is not supported; it must be a multiple of 32 up to 256 (batch rows of op gemm_wgmma)"
        );
        for value in 0..300 {
            assert_eq!(WideBatchTile::new(value).is_ok(), WideBatchTile::ALL.iter().any(|tile| tile.get() == value));
        }
    }

    #[test]
    fn budgets_are_rounded_up() {
        for rows in 0..=64 {
            let budget = VerbatimRows::at_least(rows).unwrap();
            assert!(budget.get() >= rows && VerbatimRows::ALL.iter().all(|b| b.get() < rows || *b >= budget));
        }
        assert_eq!(VerbatimRows::at_least(65), None);
        assert_eq!(SmallBatchTile::at_least(9).map(SmallBatchTile::get), Some(16));
    }

    #[test]
    fn tags_parse_back() {
        for stage in EncodeHuffmanStage::ALL {
            assert_eq!(EncodeHuffmanStage::from_tag(stage.tag()), Some(*stage));
        }
        assert_eq!(EncodeHuffmanStage::from_tag("Stats"), None);
    }
}
