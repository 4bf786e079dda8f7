//! Declarations of a variant's entry point in addition to its axes.

use super::shared::Epilogue;
use crate::axes::{Axis, Raw, Values};
use serde::Serialize;
use unweight_format::raw::layout;

/// A field of the kernel's `Config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Constant {
    /// Its C++ type.
    kind: String,
    /// `kStages` for the field `stages`.
    pub(crate) name: String,
    /// A C++ expression.
    value: String,
}

impl Constant {
    /// A number.
    pub(crate) fn number(name: &str, value: u32) -> Self {
        Self { kind: "uw::u32".to_owned(), name: name.to_owned(), value: value.to_string() }
    }

    /// A switch.
    fn flag(name: &str, value: bool) -> Self {
        Self { kind: "bool".to_owned(), name: name.to_owned(), value: value.to_string() }
    }

    /// An enumerator of a type of `unweight/axes.cuh`.
    fn word(name: &str, kind: &str, enumerator: &str) -> Self {
        let kind = format!("uw::{kind}");
        Self { value: format!("{kind}::{enumerator}"), kind, name: name.to_owned() }
    }

    /// The value of an axis.
    fn of_axis(axis: &Axis, value: u32) -> Self {
        let name = constant_name(axis.field);
        match axis.values {
            Values::Range(..) | Values::Set(_) => Self::number(&name, value),
            Values::Flag => Self::flag(&name, value != 0),
            Values::Words(words) => Self::word(&name, axis.words_type, &constant_name(words[value as usize])),
        }
    }
}

/// An equation that the compiler checks: an expression of the kernel, and a number of this crate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    /// The compared quantity, in words.
    what: &'static str,
    /// The kernel's C++ expression.
    kernel: String,
    /// The number of this crate.
    host: u32,
}

/// Declarations of a variant's entry point in addition to its axes: derived constants, and equations between this crate
/// and the kernel's header. Names in equations are qualified, except `Smem` and `Config`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    part: Option<&'static str>,
    derived: Vec<Constant>,
    checks: Vec<Check>,
}

impl Entry {
    /// Creates an entry point that has only its axes.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Uses the header and namespace of a part of the family: `attention/decode.cuh`, `uw::attention::decode`.
    pub(crate) fn part(mut self, part: &'static str) -> Self {
        self.part = Some(part);
        self
    }

    /// Adds a derived number. It replaces the axis of the same name.
    pub(crate) fn number(mut self, name: &str, value: u32) -> Self {
        self.derived.push(Constant::number(name, value));
        self
    }

    /// Adds a derived switch.
    pub(crate) fn flag(mut self, name: &str, value: bool) -> Self {
        self.derived.push(Constant::flag(name, value));
        self
    }

    /// Adds a derived enumerator of a type of `unweight/axes.cuh`.
    pub(crate) fn word(mut self, name: &str, kind: &str, enumerator: &str) -> Self {
        self.derived.push(Constant::word(name, kind, enumerator));
        self
    }

    /// Adds an equation.
    pub(crate) fn check(mut self, what: &'static str, kernel: &str, host: u32) -> Self {
        self.checks.push(Check { what, kernel: kernel.to_owned(), host });
        self
    }

    /// Adds equations for the sizes of the packed encoding.
    pub(crate) fn packed_layout(self) -> Self {
        self.check("tiles", "uw::packed::kTile", layout::TILE as u32)
            .check("packed tiles", "uw::packed::kTileBytes", layout::PACKED_TILE_BYTES as u32)
            .check("row blocks", "uw::packed::kBlockBytes", layout::PACKED_BLOCK_BYTES as u32)
    }

    /// Adds equations for the sizes of the compact encoding.
    pub(crate) fn compact_layout(self) -> Self {
        self.check("dense tiles", "uw::compact::kDenseTileBytes", layout::DENSE_TILE_BYTES as u32).check(
            "streams",
            "uw::compact::kStreamBytesMax",
            layout::STREAM_TILE_BYTES_MAX as u32,
        )
    }

    /// Adds the equation for the number of gate rows that alternate with up rows in the weights of a `silu_mul`
    /// product.
    pub(crate) fn gate_rows(self) -> Self {
        self.check("rows of a gate", "uw::packed::kGateRows", Epilogue::GATE_ROWS)
    }

    /// Adds equations for the registers per thread of both roles, loading and multiplying, if the plan moves registers.
    /// `kernel` is a C++ type.
    pub(crate) fn registers(self, kernel: &str, of_roles: &[u32]) -> Self {
        let names = ["kProducerRegisters", "kConsumerRegisters"];
        names
            .iter()
            .zip(of_roles)
            .fold(self, |entry, (name, registers)| entry.check("registers", &format!("{kernel}::{name}"), *registers))
    }

    /// Returns the header of the kernel.
    pub(crate) fn header(&self, family: &str) -> String {
        match self.part {
            Some(part) => format!("unweight/kernels/{family}/{part}.cuh"),
            None => format!("unweight/kernels/{family}.cuh"),
        }
    }

    /// Returns the namespace of the kernel in `uw`.
    pub(crate) fn namespace(&self, family: &str) -> String {
        self.part.map_or_else(|| family.to_owned(), |part| format!("{family}::{part}"))
    }

    /// Returns the fields of `Config`: the axes in their order, then the derived constants that replace no axis.
    pub(crate) fn constants(&self, axes: &[Axis], values: Raw) -> Vec<Constant> {
        let mut constants: Vec<_> =
            axes.iter().zip(values).map(|(axis, value)| Constant::of_axis(axis, value)).collect();
        for derived in &self.derived {
            match constants.iter_mut().find(|constant| constant.name == derived.name) {
                Some(constant) => *constant = derived.clone(),
                None => constants.push(derived.clone()),
            }
        }
        constants
    }

    /// Returns the equations.
    pub(crate) fn checks(&self) -> &[Check] {
        &self.checks
    }
}

/// Returns the C++ name of a constant, enumerator or section: `kSourceBarriers` for `source_barriers`.
pub(crate) fn constant_name(name: &str) -> String {
    let camel = name.split('_').map(|word| match word.split_at_checked(1) {
        Some((first, rest)) => first.to_ascii_uppercase() + rest,
        None => String::new(),
    });
    format!("k{}", camel.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        axes::Arch,
        family::{FAMILIES, VariantSpec},
    };

    fn declared(name: &str) -> Vec<String> {
        let spec: VariantSpec = name.parse().unwrap();
        let entry = spec.op.entry(&spec.block().unwrap());
        let constants = entry.constants(spec.op.info().axes, spec.op.values());
        constants.iter().map(|Constant { kind, name, value }| format!("{kind} {name} = {value}")).collect()
    }

    #[test]
    fn axes_become_constants_of_their_types() {
        assert_eq!(
            declared("uw_sm90a_gemm_recon_palette_n2p4_v8_store_add"),
            [
                "uw::WeightSource kSource = uw::WeightSource::kPalette",
                "uw::u32 kNTiles = 2",
                "uw::u32 kStages = 4",
                "uw::u32 kSplits = 1",
                "uw::u32 kVerbatimRows = 8",
                "uw::Epilogue kEpilogue = uw::Epilogue::kStoreAdd",
            ]
        );
        assert_eq!(
            declared("uw_sm90a_norm_t256_layer_add"),
            [
                "uw::u32 kThreads = 256",
                "uw::NormKind kKind = uw::NormKind::kLayer",
                "bool kAdd = true",
                "bool kPdl = false"
            ]
        );
    }

    #[test]
    fn a_derived_constant_replaces_its_axis() {
        let warps = declared("uw_sm90a_decode_huffman_full_l7").into_iter().filter(|line| line.contains("kWarps"));
        assert_eq!(warps.collect::<Vec<_>>(), ["uw::u32 kWarps = 32"]);
    }

    /// The enumerations of `unweight/axes.cuh` match the axes, with their words in the same order.
    #[test]
    fn words_are_enumerators_of_the_header() {
        let header = unweight_templates::header("unweight/axes.cuh").unwrap();
        let mut types = Vec::new();
        for axis in FAMILIES.iter().flat_map(|family| family.axes) {
            if let Values::Words(words) = axis.values {
                let words: Vec<_> = words.iter().map(|word| constant_name(word)).collect();
                let line = format!("enum class {} : u32 {{ {} }};", axis.words_type, words.join(", "));
                assert!(header.lines().any(|found| found == line), "{line}");
                types.push(axis.words_type);
            }
        }
        types.sort_unstable();
        types.dedup();
        assert_eq!(header.matches("enum class").count(), types.len(), "an enumeration that no axis has");
        assert!(!types.contains(&Arch::AXIS.words_type));
    }
}
