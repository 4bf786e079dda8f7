//! What was measured: the fastest variant of each problem on one kind of device.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use serde::{Deserialize, Serialize};
use unweight_codegen::{VariantSpec, plan::GemmShape};

use super::model::PackedUse;

/// Why there is no table. Both are mended by measuring one ([`Remedy::MeasureTable`](crate::Remedy::MeasureTable)).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no table.
    #[error("{}: is no table of measurements: {source}", .path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
}

/// What was fastest where it was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredTable {
    /// The device's name, as its driver says it. The table holds for such devices only.
    pub device: String,
    /// The fastest variant of each problem.
    pub rows: Vec<MeasuredRow>,
}

/// A problem and its fastest variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredRow {
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Batch rows.
    pub m: u32,
    /// Under programmatic dependent launch.
    pub pdl: bool,
    /// The variant; of its name, only the shape counts.
    pub variant: VariantSpec,
}

impl MeasuredTable {
    /// The table that ships: an H200.
    pub fn builtin() -> &'static Self {
        static TABLE: OnceLock<MeasuredTable> = OnceLock::new();
        TABLE.get_or_init(|| serde_json::from_str(include_str!("h200.json")).unwrap_or_default())
    }

    /// A table from a file of JSON.
    ///
    /// # Errors
    /// [`TableError`].
    pub fn read(path: &Path) -> Result<Self, TableError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| TableError::Read { path: path.to_owned(), source })?;
        serde_json::from_str(&text).map_err(|source| TableError::Parse { path: path.to_owned(), source })
    }

    /// The variant that was fastest for the smallest measured batch that is not below `m`.
    pub fn choose(&self, problem: GemmShape, wanted: PackedUse) -> Option<VariantSpec> {
        self.rows
            .iter()
            .filter(|row| (row.n, row.k, row.pdl) == (problem.n, problem.k, wanted.pdl) && row.m >= problem.m)
            .min_by_key(|row| row.m)
            .and_then(|row| wanted.of(row.variant))
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::plan::Plan;

    use super::*;
    use crate::choose::model::is_pdl;

    #[test]
    fn the_table_that_ships_is_a_table() {
        let table: MeasuredTable = serde_json::from_str(include_str!("h200.json")).unwrap();
        assert_eq!(&table, MeasuredTable::builtin());
        for row in &table.rows {
            assert!(is_pdl(&row.variant) == Some(row.pdl) && Plan::new(&row.variant).is_ok(), "{row:?}");
        }
    }
}
