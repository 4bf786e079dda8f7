//! Text that a `const fn` can build.
//!
//! A spec that cannot exist must fail where it is declared: in the const assertion that `#[unweight_variant]` emits.
//! `format!` is not const, so names and messages are built in an inline buffer, for compile-time and run-time errors
//! alike.

use std::{fmt, ops::Deref};

/// ASCII text of at most `N` bytes, held inline; longer text is truncated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

/// A canonical variant name; the longest one that the axes allow has 88 bytes.
pub type Name = Text<96>;

/// A one-line error message.
pub type Message = Text<320>;

impl<const N: usize> Text<N> {
    /// The empty text.
    pub const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    /// Returns this text with `part` appended.
    #[must_use]
    pub const fn str(mut self, part: &str) -> Self {
        let part = part.as_bytes();
        let mut i = 0;
        while i < part.len() && self.len < N {
            // Only ASCII enters, so truncation never splits a character.
            self.bytes[self.len] = if part[i].is_ascii() { part[i] } else { b'?' };
            self.len += 1;
            i += 1;
        }
        self
    }

    /// Returns this text with `part` appended if `present`.
    #[must_use]
    pub const fn flag(self, present: bool, part: &str) -> Self {
        if present { self.str(part) } else { self }
    }

    /// Returns this text with the separator before item `index` of `count` appended: "a, b or c".
    #[must_use]
    pub const fn listed(self, index: usize, count: usize) -> Self {
        match index {
            0 => self,
            _ if index + 1 == count => self.str(" or "),
            _ => self.str(", "),
        }
    }

    /// Returns this text with `value` appended in decimal.
    #[must_use]
    pub const fn num(mut self, value: u32) -> Self {
        let mut power = 1;
        while value / power >= 10 {
            power *= 10;
        }
        while power > 0 && self.len < N {
            self.bytes[self.len] = b'0' + (value / power % 10) as u8;
            self.len += 1;
            power /= 10;
        }
        self
    }

    /// Returns the text as a string slice.
    pub const fn as_str(&self) -> &str {
        match std::str::from_utf8(self.bytes.split_at(self.len).0) {
            Ok(text) => text,
            Err(_) => "", // not reachable: only ASCII enters
        }
    }
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Deref for Text<N> {
    type Target = str;
    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl<const N: usize> fmt::Display for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Returns whether two strings are equal, in const context.
pub const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// Joins words: "a, b or c".
pub(crate) fn one_of(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_cuts() {
        const T: Text<16> = Text::new().str("a=").num(0).str(" b=").num(4_294_967_295);
        assert_eq!(T.as_str(), "a=0 b=4294967295");
        assert_eq!(Text::<4>::new().str("x").num(123_456).as_str(), "x123");
        assert_eq!(Text::<4>::new().str("\u{e9}").as_str(), "??");
        assert_eq!(Text::<4>::new().as_str(), "");
    }

    #[test]
    fn lists_and_comparisons() {
        for words in [&["a"][..], &["a", "b"], &["a", "b", "c"]] {
            let text = (0..words.len()).fold(Text::<16>::new(), |text, i| text.listed(i, words.len()).str(words[i]));
            assert_eq!(text.as_str(), one_of(words));
        }
        assert!(same("", "") && same("op", "op") && !same("op", "o") && !same("op", "opt") && !same("op", "of"));
    }
}
