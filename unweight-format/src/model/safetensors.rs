//! Headers of safetensors files. Reading checks everything; writing aligns the data.
//!
//! ```text
//! 0        8                    8 + n                      end
//! | u64 n  | n bytes of JSON    | tensors, without holes   |
//! ```
//! The crate parses headers itself because it needs what the `safetensors` library does not expose: the order of the
//! data, the header's bytes, and errors that contain tensor and offset.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    io::Read,
};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeSeed, MapAccess, Visitor},
};

pub use crate::bits::dtype::Dtype;

/// Maximum size of the header of a source file, in bytes.
pub const SOURCE_HEADER_MAX: u64 = 25_000_000;
/// Maximum size of a header that safetensors readers accept, in bytes: the limit for the files of a bundle, whose
/// headers contain every section.
pub(crate) const HEADER_MAX: u64 = 100_000_000;
/// Bytes of the length in front of the header.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// Why a header is invalid. Offsets count from the start of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short to contain the header's length.
    #[error("{got} bytes hold no header; a safetensors file has at least 10")]
    NoLength {
        /// Bytes in the file.
        got: u64,
    },
    /// The header's length exceeds the limit.
    #[error(
        "at byte 0: a header of {got} bytes is above the limit of {limit}; this is not a safetensors file, or it is damaged"
    )]
    TooLarge {
        /// Length of the header.
        got: u64,
        /// Maximum length accepted.
        limit: u64,
    },
    /// The header ends after the end of the file.
    #[error(
        "at byte 0: a header of {header_bytes} bytes in a file of {file_bytes}; the file is truncated, or not a safetensors file"
    )]
    Truncated {
        /// Length of the header.
        header_bytes: u64,
        /// Bytes in the file.
        file_bytes: u64,
    },
    /// The header is not JSON, or not the JSON of a safetensors header.
    #[error("at byte {offset}: {reason}")]
    Json {
        /// Position of the error in the file.
        offset: u64,
        /// The parser's message.
        reason: String,
    },
    /// The specification does not define the element type.
    #[error("tensor '{tensor}': unknown dtype '{dtype}'")]
    Dtype {
        /// Name of the tensor.
        tensor: String,
        /// The type given.
        dtype: String,
    },
    /// The tensor's shape and offsets disagree.
    #[error("tensor '{tensor}' at byte {offset}: {dtype} {shape:?} has {expected} bytes, its offsets hold {got}")]
    TensorBytes {
        /// Name of the tensor.
        tensor: String,
        /// First byte of the tensor in the file.
        offset: u64,
        /// Type of the tensor.
        dtype: Dtype,
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Bytes that type and shape require.
        expected: u64,
        /// Bytes between the offsets.
        got: u64,
    },
    /// The size of the tensor overflows, or is not a whole number of bytes.
    #[error("tensor '{tensor}': the size of {dtype} {shape:?} overflows or is not in whole bytes")]
    Shape {
        /// Name of the tensor.
        tensor: String,
        /// Type of the tensor.
        dtype: Dtype,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// The tensor's data does not start where the previous tensor's data ends.
    #[error("tensor '{tensor}': its data starts at byte {got}, but the previous tensor ends at byte {expected} ({})", if got > expected { "a hole" } else { "an overlap" })]
    Offsets {
        /// Name of the tensor.
        tensor: String,
        /// End of the previous tensor's data.
        expected: u64,
        /// Start of the tensor's data.
        got: u64,
    },
    /// The tensor's data ends before it starts.
    #[error("tensor '{tensor}': its data ends ({end}) before it starts ({begin})")]
    Backwards {
        /// Name of the tensor.
        tensor: String,
        /// Start, relative to the start of the data.
        begin: u64,
        /// End, relative to the start of the data.
        end: u64,
    },
    /// The tensors do not end at the end of the file.
    #[error("the tensors end at byte {expected}, but the file ends at byte {got}; it is {}", if got < expected { "truncated" } else { "too long" })]
    End {
        /// End of the tensors.
        expected: u64,
        /// Bytes in the file.
        got: u64,
    },
}

impl HeaderError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoLength { .. } => "safetensors-too-short",
            Self::TooLarge { .. } => "safetensors-header-too-large",
            Self::Truncated { .. } => "safetensors-header-truncated",
            Self::Json { .. } => "safetensors-header-invalid",
            Self::Dtype { .. } => "unknown-dtype",
            Self::TensorBytes { .. } => "safetensors-tensor-size-mismatch",
            Self::Shape { .. } => "safetensors-shape-invalid",
            Self::Offsets { .. } | Self::Backwards { .. } => "safetensors-offsets-invalid",
            Self::End { .. } => "safetensors-file-size-mismatch",
        }
    }
}

/// A tensor of a safetensors file, as the header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// The shape of the tensor.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: u64,
    /// The number of bytes.
    pub bytes: u64,
}

impl TensorInfo {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }
}

/// The number of elements of a shape (saturating): 0 if an extent is 0, even if the product of the others overflows.
pub(crate) fn elements(shape: &[usize]) -> u64 {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64)) }
}

/// A checked header: every tensor has the size that its type and shape require, and the tensors fill the file without
/// gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The entries of `__metadata__` in the header's order.
    pub metadata: Vec<(String, String)>,
    /// Tensors in the order of their data.
    pub tensors: Vec<TensorInfo>,
    /// First byte of the data in the file, after length and JSON.
    pub data_offset: u64,
}

impl Header {
    /// Reads the header of a file of `file_bytes` bytes; returns it with its own bytes, including the length.
    ///
    /// # Errors
    /// The reader fails (outer), or the header is invalid (inner).
    pub fn read(
        mut reader: impl Read,
        file_bytes: u64,
        limit: u64,
    ) -> std::io::Result<Result<(Self, Vec<u8>), HeaderError>> {
        if file_bytes < LENGTH_BYTES {
            return Ok(Err(HeaderError::NoLength { got: file_bytes }));
        }
        let mut bytes = vec![0; LENGTH_BYTES as usize];
        reader.read_exact(&mut bytes)?;
        let header_bytes = match header_bytes(&bytes, file_bytes, limit) {
            Ok(header_bytes) => header_bytes,
            Err(error) => return Ok(Err(error)),
        };
        bytes.resize((LENGTH_BYTES + header_bytes) as usize, 0);
        reader.read_exact(&mut bytes[LENGTH_BYTES as usize..])?;
        Ok(Self::parse(&bytes, file_bytes, limit).map(|header| (header, bytes)))
    }

    /// Parses the start of a file of `file_bytes` bytes; `bytes` contains at least length and header.
    ///
    /// # Errors
    /// The header is invalid.
    pub fn parse(bytes: &[u8], file_bytes: u64, limit: u64) -> Result<Self, HeaderError> {
        let header_bytes = header_bytes(bytes, file_bytes, limit)?;
        let truncated = || HeaderError::Truncated { header_bytes, file_bytes: bytes.len() as u64 };
        let data_offset = LENGTH_BYTES + header_bytes;
        let json = bytes.get(LENGTH_BYTES as usize..data_offset as usize).ok_or_else(truncated)?;
        let Entries { metadata, tensors } = serde_json::from_slice(json).map_err(|error| HeaderError::Json {
            offset: LENGTH_BYTES + json_offset(json, &error),
            reason: error.to_string(),
        })?;
        let mut checked =
            tensors.into_iter().map(|(name, entry)| entry.check(name, data_offset)).collect::<Result<Vec<_>, _>>()?;
        checked.sort_by_key(|t| (t.offset, t.bytes));
        let mut end = data_offset;
        for tensor in &checked {
            if tensor.offset != end {
                return Err(HeaderError::Offsets { tensor: tensor.name.clone(), expected: end, got: tensor.offset });
            }
            // No overflow: `check` has verified the tensor's end, and this tensor starts at `end`.
            end += tensor.bytes;
        }
        if end != file_bytes {
            return Err(HeaderError::End { expected: end, got: file_bytes });
        }
        Ok(Self { metadata, tensors: checked, data_offset })
    }
}

fn header_bytes(bytes: &[u8], file_bytes: u64, limit: u64) -> Result<u64, HeaderError> {
    let Some(length) = bytes.first_chunk::<{ LENGTH_BYTES as usize }>() else {
        return Err(HeaderError::NoLength { got: bytes.len() as u64 });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > limit {
        return Err(HeaderError::TooLarge { got: header_bytes, limit });
    }
    if header_bytes > file_bytes.saturating_sub(LENGTH_BYTES) {
        return Err(HeaderError::Truncated { header_bytes, file_bytes });
    }
    Ok(header_bytes)
}

/// The byte of the JSON text at which the parser stopped.
pub(crate) fn json_offset(json: &[u8], error: &serde_json::Error) -> u64 {
    let lines = json.split_inclusive(|&b| b == b'\n').take(error.line().saturating_sub(1));
    let before: usize = lines.map(<[u8]>::len).sum();
    (before + error.column()).saturating_sub(1) as u64
}

/// The entries of the JSON object in order, without duplicates.
#[derive(Default)]
struct Entries {
    metadata: Vec<(String, String)>,
    tensors: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Entry {
    fn check(self, name: String, data_offset: u64) -> Result<TensorInfo, HeaderError> {
        let Ok(dtype) = self.dtype.parse::<Dtype>() else {
            return Err(HeaderError::Dtype { tensor: name, dtype: self.dtype.chars().take(64).collect() });
        };
        let (begin, end) = self.data_offsets;
        let countable = end.checked_add(data_offset).is_some();
        if end < begin || !countable {
            return Err(HeaderError::Backwards { tensor: name, begin, end });
        }
        let shape: Option<Vec<usize>> = self.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
        let shape = shape.unwrap_or_else(|| vec![usize::MAX; self.shape.len()]);
        let Some(expected) = dtype.tensor_bytes(&shape) else {
            return Err(HeaderError::Shape { tensor: name, dtype, shape });
        };
        let (offset, bytes) = (begin + data_offset, end - begin);
        if expected != bytes {
            return Err(HeaderError::TensorBytes { tensor: name, offset, dtype, shape, expected, got: bytes });
        }
        Ok(TensorInfo { name, dtype, shape, offset, bytes })
    }
}

/// A JSON object as an ordered list; a key that appears twice is an error.
pub(crate) struct Ordered<T>(pub(crate) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Pairs<T> {
            type Value = Vec<(String, T)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut pairs, mut keys) = (Vec::new(), HashSet::new());
                while let Some(key) = map.next_key_seed(Key(&mut keys))? {
                    pairs.push((key, map.next_value()?));
                }
                Ok(pairs)
            }
        }
        deserializer.deserialize_map(Pairs(std::marker::PhantomData)).map(Self)
    }
}

/// A key that has not appeared before.
struct Key<'a>(&'a mut HashSet<String>);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        let key = String::deserialize(deserializer)?;
        if self.0.insert(key.clone()) {
            return Ok(key);
        }
        Err(serde::de::Error::custom(format!("the name '{key}' appears twice")))
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let (mut entries, mut keys) = (Entries::default(), HashSet::new());
                while let Some(key) = map.next_key_seed(Key(&mut keys))? {
                    if key == "__metadata__" {
                        let pairs: Option<Ordered<String>> = map.next_value()?;
                        entries.metadata = pairs.map(|pairs| pairs.0).unwrap_or_default();
                    } else {
                        entries.tensors.push((key, map.next_value()?));
                    }
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Serialises a header from `metadata` and tensors `(name, dtype, shape, [begin, end])` in the order of their data.
/// Spaces pad it so that the data begins on a multiple of 64 bytes, and not before byte `at_least`.
pub(crate) fn header_to_bytes<'a>(
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize], [u64; 2])>,
    at_least: u64,
) -> Vec<u8> {
    #[derive(Serialize)]
    struct Stored<'a> {
        dtype: Dtype,
        shape: &'a [usize],
        data_offsets: [u64; 2],
    }
    let json = |value: &dyn erased::Json| value.to_json();
    let mut text = format!("{{\"__metadata__\":{}", json(metadata));
    for (name, dtype, shape, data_offsets) in tensors {
        text.push(',');
        text.push_str(&json(&name));
        text.push(':');
        text.push_str(&json(&Stored { dtype, shape, data_offsets }));
    }
    text.push('}');
    let data_offset = (LENGTH_BYTES + text.len() as u64).next_multiple_of(64).max(at_least);
    let header_bytes = data_offset - LENGTH_BYTES;
    let mut bytes = header_bytes.to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(data_offset as usize, b' ');
    bytes
}

mod erased {
    /// Values whose serialisation to JSON cannot fail: strings, numbers and maps with string keys.
    pub(super) trait Json {
        fn to_json(&self) -> String;
    }

    impl<T: serde::Serialize> Json for T {
        fn to_json(&self) -> String {
            serde_json::to_string(self).expect("strings and numbers serialise")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parse(json: &str, data: usize) -> Result<Header, HeaderError> {
        let bytes = file(json, data);
        Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX)
    }

    #[test]
    fn order_metadata_and_trailing_spaces() {
        let json = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"z":"1","a":"2"},"a":{"shape":[],"dtype":"F32","data_offsets":[0,4]},"empty":{"dtype":"I64","shape":[0,9],"data_offsets":[4,4]}}   "#;
        let header = parse(json, 16).unwrap();
        let names: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "empty", "b"], "the order of the data");
        assert_eq!(header.metadata, [("z".into(), "1".into()), ("a".into(), "2".into())]);
        assert_eq!(header.tensors[2].offset, 8 + json.len() as u64 + 4);
    }

    #[test]
    fn each_fault_has_its_error() {
        let one = |offsets: &str, shape: &str, dtype: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(parse(&one("[0,8]", "[4]", "BF16"), 8).is_ok());
        assert!(matches!(parse(&one("[0,8]", "[4]", "BF16"), 7), Err(HeaderError::End { .. })));
        assert!(matches!(parse(&one("[0,8]", "[4]", "BF16"), 9), Err(HeaderError::End { .. })));
        assert!(matches!(
            parse(&one("[0,6]", "[4]", "BF16"), 6),
            Err(HeaderError::TensorBytes { expected: 8, got: 6, .. })
        ));
        assert!(matches!(parse(&one("[2,10]", "[4]", "BF16"), 10), Err(HeaderError::Offsets { .. })));
        assert!(matches!(parse(&one("[8,0]", "[4]", "BF16"), 8), Err(HeaderError::Backwards { .. })));
        assert!(matches!(
            parse(&one("[0,18446744073709551615]", "[4]", "BF16"), 8),
            Err(HeaderError::Backwards { .. })
        ));
        assert!(matches!(parse(&one("[0,8]", "[4294967296,4294967296]", "BF16"), 8), Err(HeaderError::Shape { .. })));
        assert!(matches!(parse(&one("[0,2]", "[3]", "F4"), 2), Err(HeaderError::Shape { .. })));
        assert!(matches!(parse(&one("[0,8]", "[4]", "BF17"), 8), Err(HeaderError::Dtype { .. })));
        assert!(matches!(parse(&one("[0,8]", "[-4]", "BF16"), 8), Err(HeaderError::Json { .. })));
        let twice = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        let error = parse(twice, 2).unwrap_err();
        assert!(
            matches!(&error, HeaderError::Json { .. }) && error.to_string().contains("'t' appears twice"),
            "{error}"
        );
        let twice = r#"{"__metadata__":{"a":"1","a":"2"}}"#;
        assert!(parse(twice, 0).unwrap_err().to_string().contains("'a' appears twice"));
        let overlap = r#"{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"u":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        assert!(matches!(
            parse(overlap, 3),
            Err(HeaderError::Offsets { expected: 113, got: 112, .. }) | Err(HeaderError::Offsets { .. })
        ));
        assert!(matches!(Header::parse(&[1, 2], 2, 9), Err(HeaderError::NoLength { got: 2 })));
        assert!(matches!(Header::parse(&[255; 16], 16, 9), Err(HeaderError::TooLarge { limit: 9, .. })));
        let mut long = file("{}", 0);
        long[0] = 3;
        assert!(matches!(Header::parse(&long, 10, 9), Err(HeaderError::Truncated { header_bytes: 3, file_bytes: 10 })));
        let mut utf8 = file(r#"{"__metadata__":{"a":"x"}}"#, 0);
        utf8[30] = 0xff;
        assert!(matches!(Header::parse(&utf8, utf8.len() as u64, 99), Err(HeaderError::Json { .. })));
    }

    #[test]
    fn headers_read_back_here_and_in_the_reference_library() {
        let metadata = BTreeMap::from([("format".to_string(), "unweight".to_string())]);
        let shape = [2usize, 3];
        let tensors =
            [("a \"quoted\"", Dtype::Bf16, shape.as_slice(), [0, 12]), ("b", Dtype::U8, &shape[..0], [12, 13])];
        for at_least in [0, 640] {
            let mut bytes = header_to_bytes(&metadata, tensors.into_iter(), at_least);
            assert_eq!(bytes.len() % 64, 0);
            assert!(bytes.len() as u64 >= at_least);
            bytes.resize(bytes.len() + 13, 7);
            let header = Header::parse(&bytes, bytes.len() as u64, HEADER_MAX).unwrap();
            assert_eq!((header.tensors[0].name.as_str(), header.tensors[1].bytes), ("a \"quoted\"", 1));
            let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(reference.tensor("b").unwrap().data(), [7]);
        }
    }

    #[test]
    fn every_dtype_of_the_reference_library_is_known() {
        for dtype in Dtype::ALL {
            let bytes = dtype.tensor_bytes(&[8]).unwrap();
            let json = format!(r#"{{"t":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{bytes}]}}}}"#);
            let bytes = file(&json, bytes as usize);
            Header::parse(&bytes, bytes.len() as u64, HEADER_MAX).unwrap();
            safetensors::SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{dtype}: {e}"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_bytes_parse_or_fail_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), json in ".{0,120}") {
            let _ = Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX);
            let _ = parse(&json, 3);
        }

        #[test]
        fn damaged_headers_never_panic(at in 0usize..200, to: u8) {
            let json = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"z":"1"},"a":{"shape":[],"dtype":"F32","data_offsets":[0,4]}}"#;
            let mut bytes = file(json, 16);
            let at = at % bytes.len();
            bytes[at] = to;
            // The reference library accepts every header that we accept.
            if Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX).is_ok() {
                prop_assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
            }
        }
    }
}
