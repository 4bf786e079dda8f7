//! The environment variables of `huggingface_hub`.

use std::{
    env,
    ffi::OsString,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use super::HubError;

/// The Hub, unless `HF_ENDPOINT` names another server.
const ENDPOINT: &str = "https://huggingface.co";
/// How long a connection may be silent, unless `HF_HUB_DOWNLOAD_TIMEOUT` says otherwise.
const SILENCE: Duration = Duration::from_secs(30);
/// Maximum size of a token file, bytes.
const TOKEN_MAX: u64 = 4096;

/// How to reach the Hub.
#[derive(Debug, Clone)]
pub struct Settings {
    /// URL of the server, without a slash at its end.
    pub endpoint: String,
    /// Access token.
    pub token: Option<Token>,
    /// How long a connection may be silent.
    pub silence: Duration,
    /// File of trusted certificates in PEM form (`SSL_CERT_FILE`).
    pub certificates: Option<PathBuf>,
}

/// An access token, which is never printed.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Returns the value of the `Authorization` header.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// Whether `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` forbids connections.
pub fn is_offline() -> bool {
    ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].iter().any(|name| is_true(env::var_os(name)))
}

fn is_true(value: Option<OsString>) -> bool {
    let value = value.and_then(|value| value.into_string().ok()).unwrap_or_default();
    ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str())
}

impl Settings {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// A variable or the token file has an unusable value.
    pub fn of_process() -> Result<Self, HubError> {
        Self::of(&|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn of(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let text = |name: &str| -> Result<Option<String>, HubError> {
            let invalid = |_| HubError::Setting { variable: name.into(), reason: "not UTF-8 text".into() };
            variable(name).map(|value| value.into_string().map_err(invalid)).transpose()
        };
        let endpoint = text("HF_ENDPOINT")?.unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let invalid = |name: &str, reason: String| HubError::Setting { variable: name.into(), reason };
        if !super::url::is_endpoint(&endpoint) {
            return Err(invalid("HF_ENDPOINT", format!("'{endpoint}' is not a URL such as {ENDPOINT}")));
        }
        let silence = match text("HF_HUB_DOWNLOAD_TIMEOUT")? {
            None => SILENCE,
            Some(seconds) => match seconds.parse() {
                Ok(seconds @ 1..=3600) => Duration::from_secs(seconds),
                _ => return Err(invalid("HF_HUB_DOWNLOAD_TIMEOUT", format!("'{seconds}' is not 1 to 3600 seconds"))),
            },
        };
        let token = match text("HF_TOKEN")? {
            Some(token) => Some(("HF_TOKEN".to_owned(), token)),
            None if is_true(variable("HF_HUB_DISABLE_IMPLICIT_TOKEN")) => None,
            None => token_file(variable).and_then(|file| Some((file.display().to_string(), read_token(&file)?))),
        };
        let token = match token {
            Some((name, token)) => {
                let token = token.trim();
                // A line end would add a header to the request.
                if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                    return Err(invalid(&name, "a token consists of printable ASCII characters".into()));
                }
                Some(Token(token.to_owned())).filter(|token| !token.0.is_empty())
            }
            None => None,
        };
        Ok(Self { endpoint, token, silence, certificates: variable("SSL_CERT_FILE").map(PathBuf::from) })
    }
}

/// Returns the path of the file that `hf auth login` writes.
fn token_file(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).map(PathBuf::from);
    let home = || set("HF_HOME").or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface")));
    let home = || home().or_else(|| Some(set("HOME")?.join(".cache/huggingface")));
    set("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")))
}

/// Reads a token file; a missing or unreadable one means no token.
fn read_token(path: &Path) -> Option<String> {
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    File::open(path).ok()?.take(TOKEN_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)]) -> Result<Settings, HubError> {
        Settings::of(&|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn settings_follow_the_environment() {
        let plain = of(&[]).unwrap();
        assert_eq!((plain.endpoint.as_str(), plain.silence), (ENDPOINT, SILENCE));
        assert!(plain.token.is_none() && plain.certificates.is_none());
        let set = of(&[
            ("HF_ENDPOINT", "http://mirror:8080/hub/"),
            ("HF_TOKEN", "hf_one\n"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "3"),
            ("SSL_CERT_FILE", "/ca.pem"),
        ])
        .unwrap();
        assert_eq!((set.endpoint.as_str(), set.silence.as_secs()), ("http://mirror:8080/hub", 3));
        assert_eq!(set.token.as_ref().unwrap().header(), "Bearer hf_one");
        assert!(!format!("{set:?}").contains("hf_one"));
        for wrong in [
            ("HF_ENDPOINT", "mirror"),
            ("HF_ENDPOINT", "ftp://mirror"),
            ("HF_ENDPOINT", "https://user:word@mirror"),
            ("HF_TOKEN", "a\r\nHost: b"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "soon"),
        ] {
            assert_eq!(of(&[wrong]).unwrap_err().code(), "hub-setting-invalid", "{wrong:?}");
        }
    }

    #[test]
    fn token_comes_from_the_file_unless_that_is_disabled() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let home = home.path().to_str().unwrap();
        let token = |set: &[(&str, &str)]| of(set).unwrap().token.map(|token| token.header());
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("Bearer hf_file"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN", "hf_x")]).as_deref(), Some("Bearer hf_x"));
        let path = format!("{home}/token");
        assert_eq!(token(&[("HF_TOKEN_PATH", &path)]).as_deref(), Some("Bearer hf_file"));
        assert_eq!(token(&[("HF_HOME", "/nowhere")]), None);
    }

    #[test]
    fn offline_is_what_the_library_takes_for_true() {
        let is = |value: &str| is_true(Some(value.into()));
        assert!(is("1") && is("on") && is("True") && is("YES"));
        assert!(!is("0") && !is("") && !is("no") && !is_true(None));
    }
}
