//! Reads values of a JSON object by key and type.

use serde_json::{Map, Value};

use super::ConfigError;

/// The maximum size: far above every model, and products of two do not overflow u64. Positions above it are not
/// distinct in f32.
pub(super) const EXTENT_MAX: u32 = 1 << 24;

/// An object of a file. An absent key and a null differ: transformers applies its default to an absent key only.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    file: &'static str,
    /// The path of the object with a trailing dot; empty for the root of the file.
    prefix: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(file: &'static str, value: &'a Value) -> Result<Self, ConfigError> {
        let map = value.as_object();
        let map = map.ok_or_else(|| ConfigError::Json { file, reason: format!("it is {}", excerpt(value)) })?;
        Ok(Self { file, prefix: "", map })
    }

    /// The value of a key, null included.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.map.get(key)
    }

    /// The value of a key, if it is there and not null.
    pub(super) fn non_null(self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    /// An object with entries; `None` also for an empty one, which is false in Python.
    pub(super) fn object(self, key: &str, prefix: &'static str) -> Result<Option<Self>, ConfigError> {
        let Some(value) = self.non_null(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong_type(key, "an object"))?;
        Ok((!map.is_empty()).then_some(Self { file: self.file, prefix, map }))
    }

    /// A size: an integer in `1..=EXTENT_MAX`.
    pub(super) fn extent(self, key: &str, default: u32) -> Result<u32, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let positive = value.as_u64().ok_or_else(|| self.wrong_type(key, "a positive integer"))?;
        let extent = u32::try_from(positive).ok().filter(|extent| (1..=EXTENT_MAX).contains(extent));
        extent.ok_or_else(|| self.out_of_range(key, format!("1 to {EXTENT_MAX}")))
    }

    /// Like [`Fields::extent`], with `None` for an absent key or a null.
    pub(super) fn optional_extent(self, key: &str) -> Result<Option<u32>, ConfigError> {
        self.non_null(key).map(|_| self.extent(key, 0)).transpose()
    }

    /// A finite number, if the key is there and not null.
    pub(super) fn number(self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.non_null(key) else { return Ok(None) };
        value.as_f64().filter(|number| number.is_finite()).map(Some).ok_or_else(|| self.wrong_type(key, "a number"))
    }

    /// A number for which `is_valid` returns true; `limit` describes such numbers.
    pub(super) fn number_where(
        self,
        key: &str,
        limit: &str,
        is_valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ConfigError> {
        let Some(number) = self.number(key)? else { return Ok(None) };
        // It must also hold in f32, in which transformers computes.
        let is_valid = is_valid(number) && is_valid(f64::from(number as f32)) && (number as f32).is_finite();
        if is_valid { Ok(Some(number)) } else { Err(self.out_of_range(key, limit.into())) }
    }

    pub(super) fn positive(self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.number_where(key, "above 0 and within the range of f32", |number| number > 0.0)
    }

    /// A number that others are multiplied with or divided by, in a range that does not overflow.
    pub(super) fn ratio(self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.number_where(key, "0.000001 to 1000000", |number| (1e-6..=1e6).contains(&number))
    }

    pub(super) fn flag(self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.non_null(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong_type(key, "true or false"))
    }

    pub(super) fn text(self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.non_null(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong_type(key, "a string"))
    }

    /// One token or a list of them, below `vocab`; `None` if the key is absent or null.
    pub(super) fn tokens(self, key: &str, vocab: u32) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.non_null(key) else { return Ok(None) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let token = |value: &Value| {
            let id = value.as_u64().ok_or_else(|| self.wrong_type(key, "a token id or a list of token ids"))?;
            let id = u32::try_from(id).ok().filter(|&id| id < vocab);
            id.ok_or_else(|| self.out_of_range(key, format!("below vocab_size ({vocab})")))
        };
        list.iter().map(token).collect::<Result<_, _>>().map(Some)
    }

    /// Like [`Fields::tokens`], without ids outside the vocabulary; `None` if that removes all ids.
    pub(super) fn known_tokens(self, key: &str, vocab: u32) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.non_null(key) else { return Ok(None) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        if !list.iter().all(|value| value.is_i64() || value.is_u64()) {
            return Err(self.wrong_type(key, "a token id or a list of token ids"));
        }
        let ids = list.iter().filter_map(|value| u32::try_from(value.as_u64()?).ok());
        let valid: Vec<u32> = ids.filter(|&id| id < vocab).collect();
        Ok(if valid.is_empty() && !list.is_empty() { None } else { Some(valid) })
    }

    /// The keys of the object.
    pub(super) fn keys(self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(super) fn missing(self, key: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::Missing { file: self.file, key: self.path(key), expected: expected.into() }
    }

    pub(super) fn wrong_type(self, key: &str, expected: &'static str) -> ConfigError {
        ConfigError::Type { file: self.file, key: self.path(key), value: self.excerpt(key), expected }
    }

    pub(super) fn out_of_range(self, key: &str, limit: String) -> ConfigError {
        ConfigError::Range { file: self.file, key: self.path(key), value: self.excerpt(key), limit }
    }

    pub(super) fn unsupported(self, key: &str, instead: impl Into<String>) -> ConfigError {
        let (value, instead) = (self.excerpt(key), instead.into());
        ConfigError::Unsupported { file: self.file, key: self.path(key), value, instead }
    }

    fn path(self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn excerpt(self, key: &str) -> String {
        self.get(key).map_or_else(|| "absent".into(), excerpt)
    }
}

/// A value as JSON, shortened to 64 characters.
pub(super) fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().nth(64).is_none() { text } else { text.chars().take(61).chain("...".chars()).collect() }
}
