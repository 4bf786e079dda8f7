//! Parses the `key = value` pairs of `#[unweight_variant(...)]` to a spec, in const context.
//!
//! The attribute is independent of families. It passes on the parsed pairs, calls [`check`] for each pair, so that an
//! error is reported at the user's token, and [`check_all`] for all of them. If both pass, [`spec`] returns the spec.

#![expect(clippy::result_large_err, reason = "a const context has no heap, so errors contain their message inline")]

use crate::{
    axes::{AXES_MAX, Arch, Axis, Only, Raw, Values},
    family::{FAMILIES, Op, VariantSpec},
    plan::Plan,
    text::{Message, same},
};

/// A `key = value` of the attribute.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// The key, before `=`.
    pub key: &'static str,
    /// Value after `=`.
    pub value: PairValue,
}

/// A value that may follow `=`.
#[derive(Clone, Copy, Debug)]
pub enum PairValue {
    /// A literal integer.
    Number(u32),
    /// A word, or a path as written.
    Word(&'static str),
    /// `true` or `false`.
    Switch(bool),
}

/// An error of a pair, at its key or its value.
#[derive(Clone, Copy, Debug)]
pub enum Blame {
    /// The key is wrong.
    Key(Message),
    /// The value is wrong.
    Value(Message),
}

/// The family of an attribute without `op`: the report's matmul.
const DEFAULT_FAMILY: &str = "gemm_recon";

/// Checks one pair against the others.
pub const fn check(pairs: &[Pair], index: usize) -> Result<(), Blame> {
    let Pair { key, value } = pairs[index];
    if same(key, "op") {
        return match family(pairs) {
            Ok(_) => Ok(()),
            Err(message) => Err(Blame::Value(message)),
        };
    }
    if same(key, "arch") {
        return match read(&Arch::AXIS, value) {
            Ok(_) => Ok(()),
            Err(message) => Err(Blame::Value(message)),
        };
    }
    // Without a family the keys cannot be checked.
    let Ok(found) = family(pairs) else { return Ok(()) };
    let axes = FAMILIES[found].axes;
    let Some(axis) = find(axes, key) else {
        return Err(Blame::Key(no_such_key(found, key)));
    };
    if let Some(Only { axis: of, value, why }) = axes[axis].only {
        // An invalid value is reported for its own pair.
        if let Ok(other) = value_or_default(axes, of, pairs)
            && other != value
        {
            let text = Message::new().str("`").str(key).str("` needs ").str(axes[of].key).str(" = ");
            let text = match axes[of].values {
                Values::Words(words) => text.str(words[value as usize]),
                _ => text.num(value),
            };
            return Err(Blame::Key(text.str(": ").str(why)));
        }
    }
    match read(&axes[axis], value) {
        Ok(_) => Ok(()),
        Err(message) => Err(Blame::Value(message)),
    }
}

/// Checks the pairs together, if every single one is valid: for a missing key, or for a variant that cannot exist.
pub const fn check_all(pairs: &[Pair]) -> Result<(), Message> {
    let (Ok(found), Ok(_)) = (family(pairs), arch(pairs)) else { return Ok(()) };
    let axes = FAMILIES[found].axes;
    let (mut raw, mut i, mut has_invalid_value) = ([0; AXES_MAX], 0, false);
    while i < axes.len() {
        if axes[i].exists(&raw) {
            match value_or_default(axes, i, pairs) {
                Ok(value) => raw[i] = value,
                Err(message) => match find_value(pairs, axes[i].key) {
                    Some(_) => has_invalid_value = true,
                    None => return Err(message),
                },
            }
        }
        i += 1;
    }
    if has_invalid_value || any_invalid(pairs) {
        return Ok(());
    }
    match Plan::new(&spec(pairs)) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.message()),
    }
}

/// Returns the index of the family in [`FAMILIES`]. If `op` is invalid, which stops the build, returns the index of the
/// family of [`VariantSpec::PLACEHOLDER`].
pub const fn place(pairs: &[Pair]) -> usize {
    match family(pairs) {
        Ok(index) => index,
        Err(_) => VariantSpec::PLACEHOLDER.op.family_index(),
    }
}

/// Returns the spec; [`VariantSpec::PLACEHOLDER`] if a check fails, which stops the build.
pub const fn spec(pairs: &[Pair]) -> VariantSpec {
    let (Ok(found), Ok(arch)) = (family(pairs), arch(pairs)) else { return VariantSpec::PLACEHOLDER };
    match values(FAMILIES[found].axes, pairs) {
        Some(raw) => VariantSpec { arch, op: Op::of(found, &raw) },
        None => VariantSpec::PLACEHOLDER,
    }
}

const fn any_invalid(pairs: &[Pair]) -> bool {
    let mut i = 0;
    while i < pairs.len() {
        if check(pairs, i).is_err() {
            return true;
        }
        i += 1;
    }
    false
}

const fn values(axes: &[Axis], pairs: &[Pair]) -> Option<Raw> {
    let (mut raw, mut i) = ([0; AXES_MAX], 0);
    while i < axes.len() {
        if axes[i].exists(&raw) {
            match value_or_default(axes, i, pairs) {
                Ok(value) => raw[i] = value,
                Err(_) => return None,
            }
        }
        i += 1;
    }
    Some(raw)
}

/// Returns the index of the pairs' family in [`FAMILIES`].
const fn family(pairs: &[Pair]) -> Result<usize, Message> {
    let name = match find_value(pairs, "op") {
        None => DEFAULT_FAMILY,
        Some(PairValue::Word(name)) => name,
        Some(_) => return Err(type_error("op", "a word")),
    };
    let mut i = 0;
    while i < FAMILIES.len() {
        if same(FAMILIES[i].name, name) {
            return Ok(i);
        }
        i += 1;
    }
    let mut text = Message::new().str("unknown op `").str(name).str("`; it must be ");
    i = 0;
    while i < FAMILIES.len() {
        text = text.listed(i, FAMILIES.len()).str(FAMILIES[i].name);
        i += 1;
    }
    Err(text)
}

const fn arch(pairs: &[Pair]) -> Result<Arch, Message> {
    match find_value(pairs, "arch") {
        None => Ok(Arch::Sm90a),
        Some(value) => match read(&Arch::AXIS, value) {
            Ok(raw) => Ok(Arch::of_raw(raw)),
            Err(message) => Err(message),
        },
    }
}

/// Returns the given value of an axis, or its default.
const fn value_or_default(axes: &[Axis], index: usize, pairs: &[Pair]) -> Result<u32, Message> {
    let axis = &axes[index];
    match (find_value(pairs, axis.key), axis.default) {
        (Some(value), _) => read(axis, value),
        (None, Some(value)) => Ok(value),
        (None, None) => {
            let text = Message::new().str("`").str(axis.key).str("` is missing; it takes ");
            Err(match axis.values {
                Values::Words(words) => append_list(text, words),
                Values::Flag => text.str("true or false"),
                Values::Range(..) | Values::Set(_) => text.str("an integer"),
            })
        }
    }
}

/// Returns the value of an axis, or the error message.
const fn read(axis: &Axis, value: PairValue) -> Result<u32, Message> {
    match (axis.values, value) {
        (Values::Flag, PairValue::Switch(value)) => Ok(value as u32),
        (Values::Flag, _) => Err(type_error(axis.key, "true or false")),
        (Values::Words(words), PairValue::Word(word)) => {
            let mut i = 0;
            while i < words.len() {
                if same(words[i], word) {
                    return Ok(i as u32);
                }
                i += 1;
            }
            let text = Message::new().str("unknown ").str(axis.key).str(" `").str(word).str("`; it must be ");
            Err(append_list(text, words))
        }
        (Values::Words(_), _) => Err(type_error(axis.key, "a word")),
        (Values::Range(..) | Values::Set(_), PairValue::Number(number)) => match axis.check(number) {
            Ok(number) => Ok(number),
            Err(error) => Err(error.message()),
        },
        (Values::Range(..) | Values::Set(_), _) => Err(type_error(axis.key, "an integer")),
    }
}

const fn type_error(key: &str, what: &str) -> Message {
    Message::new().str("`").str(key).str("` takes ").str(what)
}

const fn no_such_key(family: usize, key: &str) -> Message {
    let mut text = Message::new().str("op = ").str(FAMILIES[family].name).str(" has no key `").str(key);
    text = text.str("`; it takes ");
    let axes = FAMILIES[family].axes;
    let mut i = 0;
    while i < axes.len() {
        text = text.str(axes[i].key).str(", ");
        i += 1;
    }
    text.str("op, arch, crate")
}

/// Appends the words as a list: "a, b or c".
const fn append_list(mut text: Message, words: &[&str]) -> Message {
    let mut i = 0;
    while i < words.len() {
        text = text.listed(i, words.len()).str(words[i]);
        i += 1;
    }
    text
}

const fn find_value(pairs: &[Pair], key: &str) -> Option<PairValue> {
    let mut i = 0;
    while i < pairs.len() {
        if same(pairs[i].key, key) {
            return Some(pairs[i].value);
        }
        i += 1;
    }
    None
}

const fn find(axes: &[Axis], key: &str) -> Option<usize> {
    let mut i = 0;
    while i < axes.len() {
        if same(axes[i].key, key) {
            return Some(i);
        }
        i += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::any_spec;
    use proptest::prelude::*;

    /// The pairs of an attribute that declares the spec.
    fn pairs_of(spec: &VariantSpec) -> Vec<Pair> {
        let raw = spec.op.values();
        let word = |word| PairValue::Word(word);
        let mut pairs =
            vec![Pair { key: "op", value: word(spec.op.family()) }, Pair { key: "arch", value: word(spec.arch.tag()) }];
        for (axis, value) in spec.op.info().axes.iter().zip(raw).filter(|(axis, _)| axis.exists(&raw)) {
            let value = match axis.values {
                Values::Range(..) | Values::Set(_) => PairValue::Number(value),
                Values::Words(words) => word(words[value as usize]),
                Values::Flag => PairValue::Switch(value != 0),
            };
            pairs.push(Pair { key: axis.key, value });
        }
        pairs
    }

    proptest! {
        /// Every variant can be declared. A variant that cannot exist is rejected by [`check_all`] and by no single
        /// pair.
        #[test]
        fn pairs_give_the_spec_back(spec in any_spec()) {
            let pairs = pairs_of(&spec);
            prop_assert_eq!(super::spec(&pairs), spec);
            for index in 0..pairs.len() {
                prop_assert!(check(&pairs, index).is_ok());
            }
            let whole = check_all(&pairs).map_err(|message| message.to_string());
            prop_assert_eq!(whole, Plan::new(&spec).map(drop).map_err(|error| error.to_string()));
        }
    }
}
