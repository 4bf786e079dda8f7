//! Escapes untrusted text so that it cannot control a terminal.

use std::borrow::Cow;

/// Escapes characters that control a terminal or change the direction of a line, because names of tensors and files are
/// untrusted. Line ends and tabs stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_harmful(c) && !matches!(c, '\n' | '\t'))
}

/// Escapes line ends and tabs, too: for names, and for messages that contain them. A line end in a name could imitate
/// output of this program.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_harmful)
}

fn is_harmful(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, harmful: impl Fn(char) -> bool + Copy) -> Cow<'_, str> {
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    text.chars()
        .fold(String::with_capacity(text.len()), |mut clean, c| {
            if harmful(c) {
                clean.extend(c.escape_default())
            } else {
                clean.push(c)
            }
            clean
        })
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(printable("a\tb\n"), "a\tb\n");
        assert_eq!(one_line("a\tb\n\u{2028}é"), "a\\tb\\n\\u{2028}é");
        assert_eq!(printable("\x1b[2J\x07\0\r\u{9b}x\u{202e}é"), "\\u{1b}[2J\\u{7}\\u{0}\\r\\u{9b}x\\u{202e}é");
    }
}
