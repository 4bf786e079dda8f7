//! Measured times: the fastest variant of each problem on one kind of device.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use serde::{Deserialize, Serialize};
use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::Arch,
};

use super::candidates::{PackedUse, Registered, is_pdl};

/// Why a table of measurements cannot be used. Measuring again resolves every case
/// ([`Remedy::MeasureTable`](crate::Remedy::MeasureTable)).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The file is not a table.
    #[error("{}: not a table of measurements: {source}", .path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The position and the error.
        source: serde_json::Error,
    },
    /// The table belongs to another device.
    #[error("{}: was measured on {of}, but this device is {device}", .path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The table's device.
        of: String,
        /// This device.
        device: String,
    },
    /// A row names a variant that is not a packed matmul of this architecture, or that has no plan.
    #[error("{}: row {row}: {variant} is not a matmul from packed weights of {arch}", .path.display())]
    Variant {
        /// The file.
        path: PathBuf,
        /// The index of the row, from 0.
        row: usize,
        /// The named variant.
        variant: String,
        /// The compiler's name of the architecture.
        arch: &'static str,
    },
    /// A row names a variant that dispatch may not choose.
    #[error(
        "{}: row {row}: {variant} is neither built in nor registered; register it with the `KernelSet` before a table \
         names it", .path.display()
    )]
    Unregistered {
        /// The file.
        path: PathBuf,
        /// The index of the row, from 0.
        row: usize,
        /// The named variant.
        variant: String,
    },
}

impl TableError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Read { .. } => "dispatch-table-unreadable",
            Self::Parse { .. } | Self::Variant { .. } => "dispatch-table-invalid",
            Self::Foreign { .. } => "dispatch-table-of-another-gpu",
            Self::Unregistered { .. } => "dispatch-table-unregistered-variant",
        }
    }
}

/// Batch rows of the smallest tile of a product; all tiles are multiples of it.
const SMALLEST_TILE: u32 = 8;
/// Up to this batch, memory limits products, and a measurement holds for smaller batches.
const MEMORY_BOUND_BATCH: u32 = 64;
/// Batch tiles of larger batches are multiples of this many rows. With more rows of the batch, they hold more tiles.
const LARGE_TILE: u32 = 32;

/// The fastest variant of each measured problem.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredTable {
    /// The device's name as reported by its driver. The table is valid only for such devices.
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
    /// Whether programmatic dependent launch was used.
    pub pdl: bool,
    /// The variant; only the shape in its name matters.
    pub variant: VariantSpec,
}

impl MeasuredRow {
    /// Returns the batch after which the row applies, up to its own: half of it, in whole tiles of the smallest batch
    /// tile; above 64, the last batch with fewer multiples of 32 rows.
    pub(super) fn after(&self) -> u32 {
        if self.m > MEMORY_BOUND_BATCH {
            (self.m - 1) / LARGE_TILE * LARGE_TILE
        } else {
            self.m / (2 * SMALLEST_TILE) * SMALLEST_TILE
        }
    }
}

impl MeasuredTable {
    /// Returns the built-in table, measured on an H200.
    pub fn builtin() -> &'static Self {
        static TABLE: OnceLock<MeasuredTable> = OnceLock::new();
        TABLE.get_or_init(|| serde_json::from_str(include_str!("h200.json")).unwrap_or_default())
    }

    /// Reads a table from a JSON file. It must be for a device with this name and architecture, and name only built-in
    /// or registered variants.
    ///
    /// # Errors
    /// [`TableError`].
    pub fn read(path: &Path, device: &str, arch: Arch, registered: &Registered) -> Result<Self, TableError> {
        let text = std::fs::read(path).map_err(|source| TableError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path, device, arch, registered)
    }

    /// Like [`MeasuredTable::read`], for text already read from `path`.
    pub(crate) fn parse(
        text: &[u8],
        path: &Path,
        device: &str,
        arch: Arch,
        registered: &Registered,
    ) -> Result<Self, TableError> {
        let table: Self =
            serde_json::from_slice(text).map_err(|source| TableError::Parse { path: path.to_owned(), source })?;
        if table.device != device {
            let (of, device) = (table.device, device.to_owned());
            return Err(TableError::Foreign { path: path.to_owned(), of, device });
        }
        let is_packed_gemm =
            |spec: &VariantSpec| spec.arch == arch && is_pdl(spec).is_some() && Plan::new(spec).is_ok();
        for (row, MeasuredRow { variant, .. }) in table.rows.iter().enumerate() {
            let (path, name) = (|| path.to_owned(), || variant.to_string());
            if !is_packed_gemm(variant) {
                return Err(TableError::Variant { path: path(), row, variant: name(), arch: arch.compiler_name() });
            }
            if !registered.offers(variant) {
                return Err(TableError::Unregistered { path: path(), row, variant: name() });
            }
        }
        Ok(table)
    }

    /// Returns the table as the JSON of its file.
    pub fn to_json(&self) -> String {
        // Serialising strings and numbers cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Adds the rows of another table for problems that this table lacks.
    #[must_use]
    pub fn over(mut self, other: &Self) -> Self {
        let key = |row: &MeasuredRow| (row.n, row.k, row.pdl, row.m);
        let present: BTreeSet<_> = self.rows.iter().map(key).collect();
        self.rows.extend(other.rows.iter().filter(|row| !present.contains(&key(row))).cloned());
        self
    }

    /// Returns the fastest variant at the smallest measured batch that is at least `m`. A measurement above twice `m`,
    /// rounded to whole tiles of the smallest batch tile, does not apply. Of batches above 64, one applies to batches
    /// with as many multiples of 32 rows.
    pub fn choose(&self, problem: GemmShape, packed_use: PackedUse) -> Option<VariantSpec> {
        self.rows
            .iter()
            .filter(|row| {
                (row.n, row.k, row.pdl) == (problem.n, problem.k, packed_use.pdl)
                    && row.after() < problem.m
                    && problem.m <= row.m
            })
            .min_by_key(|row| row.m)
            .and_then(|row| packed_use.of(row.variant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_table_parses_and_is_complete() {
        let table: MeasuredTable = serde_json::from_str(include_str!("h200.json")).unwrap();
        assert_eq!(&table, MeasuredTable::builtin());
        for row in &table.rows {
            assert!(is_pdl(&row.variant) == Some(row.pdl) && Plan::new(&row.variant).is_ok(), "{row:?}");
        }
        // The table was measured at powers of two: within a shape's rows, no batch up to 64 is left to the model.
        for row in table.rows.iter().filter(|row| row.m <= MEMORY_BOUND_BATCH) {
            let same = |other: &&MeasuredRow| (other.n, other.k, other.pdl) == (row.n, row.k, row.pdl);
            let smallest = table.rows.iter().filter(same).map(|other| other.m).min().unwrap();
            for m in (0..13).map(|shift| 1 << shift).filter(|m| (smallest..=row.m).contains(m)) {
                let packed_use =
                    PackedUse { escapes: true, pdl: row.pdl, epilogue: unweight_codegen::spec::Epilogue::Store };
                let problem = GemmShape { m, n: row.n, k: row.k };
                assert!(table.choose(problem, packed_use).is_some(), "{problem:?}, pdl: {}", row.pdl);
            }
        }
    }

    fn row(m: u32, variant: &str) -> MeasuredRow {
        MeasuredRow { n: 4096, k: 4096, m, pdl: false, variant: variant.parse().unwrap() }
    }

    #[test]
    fn table_is_read_only_for_its_gpu() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("table.json");
        let table = MeasuredTable {
            device: "NVIDIA L4".to_owned(),
            rows: vec![row(8, "uw_sm89_gemm_mma_b8_r2w8p3c1_async_esc_store")],
        };
        let read = |text: &str, device: &str, arch| {
            std::fs::write(&path, text).unwrap();
            MeasuredTable::read(&path, device, arch, &Registered::default())
        };
        assert_eq!(read(&table.to_json(), "NVIDIA L4", Arch::Sm89).unwrap(), table);
        let assert_error = |text: &str, device: &str, arch, words: &str| {
            let error = read(text, device, arch).unwrap_err().to_string();
            assert!(error.starts_with(&path.display().to_string()) && error.contains(words), "{error}");
        };
        assert_error(
            &table.to_json(),
            "NVIDIA L40S",
            Arch::Sm89,
            "was measured on NVIDIA L4, but this device is NVIDIA L40S",
        );
        assert_error(
            &table.to_json(),
            "NVIDIA L4",
            Arch::Sm86,
            "row 0: uw_sm89_gemm_mma_b8_r2w8p3c1_async_esc_store is not a matmul",
        );
        let other = table.to_json().replace("gemm_mma_b8_r2w8p3c1_async_esc_store", "unpack");
        assert_error(&other, "NVIDIA L4", Arch::Sm89, "row 0: uw_sm89_unpack is not a matmul");
        for text in ["", "[]", "{\"device\": \"NVIDIA L4\"}", &table.to_json().replace("uw_sm89", "uw_sm1")] {
            assert_error(text, "NVIDIA L4", Arch::Sm89, "not a table of measurements");
        }
        let none = Registered::default();
        let absent = MeasuredTable::read(&home.path().join("absent"), "NVIDIA L4", Arch::Sm89, &none);
        assert!(matches!(absent, Err(TableError::Read { .. })));
    }

    #[test]
    fn a_table_names_variants_that_ship_or_are_registered() {
        let variant = "uw_sm90a_gemm_mma_b8_r3w10p2c1_esc_store";
        let rows = vec![row(1, "uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_store"), row(8, variant)];
        let table = MeasuredTable { device: "NVIDIA H200".to_owned(), rows };
        let (text, path) = (table.to_json(), Path::new("table.json"));
        let parse = |registered: &Registered| {
            MeasuredTable::parse(text.as_bytes(), path, "NVIDIA H200", Arch::Sm90a, registered)
        };
        let mut registered = Registered::default();
        match parse(&registered) {
            Err(error @ TableError::Unregistered { row: 1, .. }) => {
                assert!(error.to_string().starts_with(&format!("table.json: row 1: {variant} ")), "{error}");
            }
            other => panic!("{other:?}"),
        }
        registered.add(Arch::Sm90a, variant.parse().unwrap()).unwrap();
        assert_eq!(parse(&registered).unwrap(), table);
    }

    /// A short measurement removes nothing from a long one.
    #[test]
    fn measured_rows_override_the_same_problem() {
        let of = |rows| MeasuredTable { device: "D".to_owned(), rows };
        let [first, second] = ["uw_sm90a_gemm_mma_b8_r2w8p3c1_esc_store", "uw_sm90a_gemm_mma_b8_r1w16p2c2_esc_store"];
        let below = of(vec![row(1, first), row(8, first)]);
        let other = MeasuredRow { pdl: true, ..row(8, second) };
        let both = of(vec![row(8, second), other.clone()]).over(&below);
        assert_eq!(both.rows, [row(8, second), other, row(1, first)]);
        let plain = PackedUse { escapes: true, pdl: false, epilogue: unweight_codegen::spec::Epilogue::Store };
        let at = |m| both.choose(GemmShape { m, n: 4096, k: 4096 }, plain).unwrap().to_string();
        assert_eq!((at(1).as_str(), at(2).as_str()), (first, second));
        let applies = |row_m, m| of(vec![row(row_m, first)]).choose(GemmShape { m, n: 4096, k: 4096 }, plain).is_some();
        assert_eq!([32, 33, 64, 65].map(|m| applies(64, m)), [false, true, true, false]);
        assert_eq!([64, 96, 97, 100].map(|m| applies(100, m)), [false, false, true, true]);
        assert_eq!([256, 480, 481, 512].map(|m| applies(512, m)), [false, false, true, true]);
        assert!(applies(15, 1) && !applies(16, 8) && applies(16, 9));
    }
}
