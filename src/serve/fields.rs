//! Parses the fields of a JSON object one by one, so that a body never becomes a tree of values.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, value::RawValue};

use super::error::ApiError;

/// The maximum size of a field other than prompts and messages, bytes of JSON.
const FIELD_BYTES_MAX: usize = 64 << 10;

/// The known fields of an object, as raw JSON. `null` means unset.
pub(super) struct Fields<'a>(BTreeMap<&'static str, &'a RawValue>);

impl<'a> Fields<'a> {
    /// Parses an object and keeps the fields in `names`. Of duplicate fields, the last counts.
    pub fn read(json: &'a [u8], names: &'static [&'static str]) -> serde_json::Result<Self> {
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let fields = FieldNames(names).deserialize(&mut deserializer)?;
        deserializer.end()?;
        Ok(Self(fields))
    }

    /// Removes a field and returns its raw JSON.
    pub fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        self.0.remove(name).filter(|raw| raw.get() != "null")
    }

    /// Removes and parses a field of at most [`FIELD_BYTES_MAX`] bytes.
    pub fn value(&mut self, name: &str) -> Result<Option<Value>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        if raw.get().len() > FIELD_BYTES_MAX {
            let message = format!("{name} has {} bytes; the limit is {FIELD_BYTES_MAX}", raw.get().len());
            return Err(ApiError::of(name, message));
        }
        let value = serde_json::from_str(raw.get());
        value.map(Some).map_err(|error| ApiError::of(name, format!("{name} cannot be parsed: {error}")))
    }

    /// Whether a field is unset or has a neutral value, which has no effect. An unparsable value is not neutral.
    pub fn is_neutral(&mut self, name: &str, neutral: impl FnOnce(&Value) -> bool) -> bool {
        self.value(name).is_ok_and(|value| value.is_none_or(|value| neutral(&value)))
    }

    /// Removes and parses a number.
    pub fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.value(name)? else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| ApiError::of(name, format!("{name} is not a number")))?;
        Ok(Some(number as f32))
    }

    /// Removes and parses an integer from `min` to `max`.
    pub fn integer(&mut self, name: &str, min: u64, max: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.value(name)? else { return Ok(None) };
        let number = value.as_u64().filter(|number| (min..=max).contains(number));
        let upper = if max == u64::MAX { String::new() } else { format!(" to {max}") };
        number.map(Some).ok_or_else(|| ApiError::of(name, format!("{name} is not a whole number from {min}{upper}")))
    }

    /// Whether a field is `false`, without removing it.
    pub fn is_false(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|raw| raw.get() == "false")
    }

    /// Removes and parses a boolean; unset means false.
    pub fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.value(name)? {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(ApiError::of(name, format!("{name} is neither true nor false"))),
        }
    }
}

/// Parses a string; `None` for other JSON.
pub(super) fn text(raw: &RawValue) -> Option<String> {
    raw.get().starts_with('"').then(|| serde_json::from_str(raw.get()).ok()).flatten()
}

/// Parses a list of token ids; `None` for other JSON.
pub(super) fn ids(raw: &RawValue) -> Option<Vec<u32>> {
    raw.get().starts_with('[').then(|| serde_json::from_str(raw.get()).ok()).flatten()
}

/// Passes the elements of a list to `take`, with their indices. `None` if `raw` is not a list.
pub(super) fn each<'a>(
    raw: &'a RawValue,
    take: impl FnMut(usize, &'a RawValue) -> Result<(), ApiError>,
) -> Option<Result<(), ApiError>> {
    let mut result = Ok(());
    let mut deserializer = serde_json::Deserializer::from_str(raw.get());
    match deserializer.deserialize_seq(Each { take, result: &mut result }) {
        // The error of an element ends the list.
        Ok(()) | Err(_) if result.is_err() => Some(result),
        Ok(()) => Some(Ok(())),
        Err(_) => None,
    }
}

struct Each<'r, F> {
    take: F,
    result: &'r mut Result<(), ApiError>,
}

impl<'de, F: FnMut(usize, &'de RawValue) -> Result<(), ApiError>> Visitor<'de> for Each<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        let mut at = 0;
        while let Some(raw) = list.next_element()? {
            if let Err(error) = (self.take)(at, raw) {
                *self.result = Err(error);
                return Err(A::Error::custom("an element is wrong"));
            }
            at += 1;
        }
        Ok(())
    }
}

/// Deserializes the fields of an object that have these names.
struct FieldNames(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for FieldNames {
    type Value = BTreeMap<&'static str, &'de RawValue>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldNames {
    type Value = BTreeMap<&'static str, &'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = BTreeMap::new();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            match self.0.iter().find(|name| **name == key) {
                Some(name) => _ = fields.insert(*name, map.next_value()?),
                None => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_fields_are_kept_and_others_skipped() {
        let json = br#" {"a": [1, {"b": 2}], "other": [[[["x"]]]], "\u0062": null, "c": 1, "c": 2} "#;
        let mut fields = Fields::read(json, &["a", "b", "c"]).unwrap();
        assert_eq!(fields.take("a").unwrap().get(), r#"[1, {"b": 2}]"#);
        assert!(fields.take("b").is_none(), "null is unset");
        assert_eq!(fields.integer("c", 0, 9).unwrap(), Some(2), "the last counts");
        // Deep nesting is skipped in an unknown field, and an error in a known one.
        let deep = format!(r#"{{"x": {0}, "a": {0}}}"#, ["[".repeat(200_000), "]".repeat(200_000)].concat());
        let error = Fields::read(deep.as_bytes(), &["a"]).unwrap().value("a").unwrap_err();
        assert!(error.message.contains("400000 bytes"), "{error:?}");
        let deep = format!(r#"{{"a": {}}}"#, ["[".repeat(200), "]".repeat(200)].concat());
        let error = Fields::read(deep.as_bytes(), &["a"]).unwrap().value("a").unwrap_err();
        assert!(error.message.contains("recursion"), "{error:?}");
        for wrong in ["[]", "7", "", "{", "{} x"] {
            assert!(Fields::read(wrong.as_bytes(), &["a"]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lists_end_at_the_first_wrong_element() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        let mut visited = Vec::new();
        let list = raw("[1, 2, 3]");
        let ended = each(&list, |at, raw| {
            visited.push((at, raw.get().to_owned()));
            if at == 1 { Err(ApiError::bad("two")) } else { Ok(()) }
        });
        assert_eq!(ended.unwrap().unwrap_err().message, "two");
        assert_eq!(visited, [(0, "1".to_owned()), (1, "2".to_owned())]);
        assert!(each(&raw("[]"), |_, _| Err(ApiError::bad("none"))).unwrap().is_ok());
        assert!(each(&raw("{}"), |_, _| Ok(())).is_none() && each(&raw("1"), |_, _| Ok(())).is_none());
        assert_eq!((text(&raw(r#""a\n""#)), text(&raw("7"))), (Some("a\n".into()), None));
        assert_eq!((ids(&raw("[1, 4294967295]")), ids(&raw("[1.0]"))), (Some(vec![1, u32::MAX]), None));
    }
}
