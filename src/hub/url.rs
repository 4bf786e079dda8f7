//! Addresses: where a redirect leads, and who may see the token.

use ureq::http::Uri;

/// Whether a token may be sent there: encrypted, or within this machine.
pub(super) fn keeps_secrets(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default();
    uri.scheme_str() == Some("https") || matches!(host, "localhost" | "127.0.0.1" | "[::1]")
}

/// Whether a text is a URL that paths can be appended to.
pub(super) fn is_endpoint(text: &str) -> bool {
    let plain = !text.contains(['?', '#', '@']) && text.bytes().all(|byte| byte.is_ascii_graphic());
    plain && origin(text).is_some()
}

/// Returns scheme and authority, in lower case; `None` unless it is an HTTP URL without user name.
pub(super) fn origin(url: &str) -> Option<(String, String)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https"))?;
    let authority = uri.authority()?.as_str();
    let plain = !authority.contains('@') && !uri.host()?.is_empty();
    plain.then(|| (scheme.to_owned(), authority.to_lowercase()))
}

pub(super) fn host(url: &str) -> String {
    origin(url).map_or_else(|| url.to_owned(), |(_, authority)| authority)
}

/// Returns the address of a redirect; `None` if it is unusable or gives up encryption.
pub(super) fn join(base: &str, location: &str) -> Option<String> {
    let (scheme, authority) = origin(base)?;
    let url = if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        location.to_owned()
    };
    let (next, _) = origin(&url)?;
    (next == "https" || scheme == "http").then_some(url)
}

/// Percent-encodes one part of a path.
pub(super) fn encode(part: &str) -> String {
    part.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(byte.into());
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_stay_encrypted_and_usable() {
        let from = |location: &str| join("https://hub.test/a/b", location);
        assert_eq!(from("/c").as_deref(), Some("https://hub.test/c"));
        assert_eq!(from("//cdn.test/c").as_deref(), Some("https://cdn.test/c"));
        assert_eq!(from("https://cdn.test/c?x=1").as_deref(), Some("https://cdn.test/c?x=1"));
        for wrong in ["http://hub.test/c", "c", "", "ftp://x/y", "https://me@hub.test/c", "file:///etc/passwd"] {
            assert_eq!(from(wrong), None, "{wrong}");
        }
        assert_eq!(join("http://127.0.0.1:1/a", "http://127.0.0.1:2/b").as_deref(), Some("http://127.0.0.1:2/b"));
    }

    #[test]
    fn tokens_are_sent_encrypted_or_locally() {
        let keeps = |url: &str| keeps_secrets(&url.parse().unwrap());
        assert!(keeps("https://hub.test") && keeps("http://127.0.0.1:80") && keeps("http://localhost:1"));
        assert!(!keeps("http://hub.test") && !keeps("http://127.0.0.1.hub.test"));
    }

    #[test]
    fn origins_differ_by_port_and_scheme() {
        assert_eq!(origin("https://Hub.test/a"), origin("https://hub.test/b"));
        assert_ne!(origin("https://hub.test/a"), origin("https://hub.test:444/a"));
        assert_ne!(origin("https://hub.test/a"), origin("http://hub.test/a"));
    }
}
