//! HTTP requests to the Hub: redirects, retries, and the errors that statuses mean.
//!
//! ureq does not follow redirects here, because the token may only go to the endpoint: storage and CDN get requests
//! without it.

use std::{
    cell::RefCell,
    fs,
    io::Read,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;
use ureq::{
    Agent, Body, SendBody,
    http::{HeaderMap, Request, Response, StatusCode, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};

use super::{
    HubError,
    settings::Settings,
    url::{host, join, keeps_secrets, origin},
};

/// Maximum number of redirects of one request.
const REDIRECTS_MAX: usize = 8;
/// How often a request is sent before its failure is final.
const TRIES: u32 = 4;
/// The pause before the second try; later ones are twice as long each.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest pause that a server may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// The next step after a refusal that another token may change.
const HAS_ACCESS: &str = "use a token with access to this repository";
/// Maximum length of a server's reason in a message, characters.
const REASON_MAX: usize = 200;

/// A client of one server.
pub struct Client {
    agent: Agent,
    endpoint: String,
    /// Whether this processor can run the TLS library.
    has_tls: bool,
    /// Value of the `Authorization` header.
    authorization: Option<String>,
    /// Whether there is a token that may not go to the endpoint.
    withholds_token: bool,
    cancelled: Box<dyn Fn() -> bool + Send + Sync>,
}

/// Why a try failed, and when another may succeed.
pub(super) struct Failed {
    pub(super) error: HubError,
    /// Whether another try may succeed, and the pause that the server asks for.
    pub(super) retry: Option<Option<Duration>>,
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Self {
        Self { error, retry: None }
    }
}

impl Client {
    /// Creates a client. Nothing is sent yet. `cancelled` ends pauses between tries.
    ///
    /// # Errors
    /// The file of certificates cannot be used, or the processor cannot run the TLS library.
    pub fn new(settings: &Settings, cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Result<Self, HubError> {
        let mut tls = TlsConfig::builder();
        let provider = provider();
        let has_tls = provider.is_some();
        if !has_tls && is_https(&settings.endpoint) {
            return Err(HubError::Processor { endpoint: settings.endpoint.clone() });
        }
        // An endpoint without TLS may redirect to one with it.
        if let Some(provider) = provider {
            tls = tls.unversioned_rustls_crypto_provider(provider);
        }
        if let Some(file) = &settings.certificates {
            let text = fs::read(file).map_err(HubError::file("read the certificates", file))?;
            let certificates: Vec<_> = parse_pem(&text)
                .filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                })
                .collect();
            if certificates.is_empty() {
                let reason = format!("{} has no certificate", file.display());
                return Err(HubError::Setting { variable: "SSL_CERT_FILE".into(), reason });
            }
            tls = tls.root_certs(RootCerts::from(certificates));
        }
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_resolve(Some(settings.silence))
            .timeout_connect(Some(settings.silence))
            .timeout_per_read(Some(settings.silence))
            .timeout_per_write(Some(settings.silence))
            .accept_encoding("identity")
            .user_agent(concat!("unweight/", env!("CARGO_PKG_VERSION")))
            .build();
        let endpoint = settings.endpoint.clone();
        let safe = endpoint.parse::<Uri>().is_ok_and(|uri| keeps_secrets(&uri));
        let authorization = settings.token.as_ref().filter(|_| safe).map(|token| token.header());
        let withholds_token = settings.token.is_some() && !safe;
        let (agent, cancelled) = (config.new_agent(), Box::new(cancelled));
        Ok(Self { agent, endpoint, has_tls, authorization, withholds_token, cancelled })
    }

    /// The name of the server, for messages.
    pub fn host(&self) -> String {
        host(&self.endpoint)
    }

    /// The URL of the server, without a slash at its end.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Whether requests have a token.
    pub(super) fn has_token(&self) -> bool {
        self.authorization.is_some()
    }

    /// Whether there is a token that may not go to the endpoint.
    pub(super) fn withholds_token(&self) -> bool {
        self.withholds_token
    }

    /// Returns how requests get a token, after a refusal without one.
    pub(super) fn token_help(&self) -> &'static str {
        match (self.withholds_token, self.has_token()) {
            (true, _) => "the token is not sent unencrypted: set HF_ENDPOINT to an https address",
            (_, true) => HAS_ACCESS,
            _ => "set HF_TOKEN, or run `hf auth login`",
        }
    }

    /// Whether a signal asks to stop.
    pub(super) fn is_cancelled(&self) -> bool {
        (self.cancelled)()
    }

    /// Returns the error for an answer that does not follow the protocol.
    pub(super) fn invalid(&self, what: &str, reason: String) -> HubError {
        HubError::Answer { what: what.into(), host: self.host(), reason }
    }

    /// Gets a JSON value of at most `limit` bytes.
    pub(super) fn json<T: DeserializeOwned>(&self, what: &str, path: &str, limit: u64) -> Result<T, HubError> {
        self.with_retries(what, || {
            let response = self.send(what, &Call::get(format!("{}{path}", self.endpoint)))?;
            self.read_json(what, response, limit)
        })
    }

    /// Reads a body of at most `limit` bytes as JSON.
    pub(super) fn read_json<T: DeserializeOwned>(
        &self,
        what: &str,
        response: Response<Body>,
        limit: u64,
    ) -> Result<T, Failed> {
        let body = response.into_body().into_with_config().limit(limit).read_to_vec();
        let body = body.map_err(|error| match error {
            ureq::Error::BodyExceedsLimit(limit) => self.invalid(what, format!("more than {limit} bytes")).into(),
            other => self.unreachable(what, &self.endpoint, other),
        })?;
        serde_json::from_slice(&body).map_err(|error| self.invalid(what, error.to_string()).into())
    }

    /// Returns size and etag of a file from its headers.
    pub(super) fn head(&self, what: &str, path: &str) -> Result<(u64, String), HubError> {
        self.with_retries(what, || {
            let call =
                Call { method: "HEAD", follows: Follow::Endpoint, ..Call::get(format!("{}{path}", self.endpoint)) };
            let response = self.send(what, &call)?;
            let text = |names: [&str; 2]| {
                let value = names.iter().find_map(|name| response.headers().get(*name));
                value.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
            };
            let etag = text(["x-linked-etag", "etag"]);
            let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
            let size = text(["x-linked-size", "content-length"]);
            match size.parse() {
                Ok(size) => Ok((size, etag)),
                Err(_) => Err(self.invalid(what, "no size of the file".into()).into()),
            }
        })
    }

    /// Repeats a request whose failure may be temporary.
    pub(super) fn with_retries<T>(
        &self,
        what: &str,
        mut attempt: impl FnMut() -> Result<T, Failed>,
    ) -> Result<T, HubError> {
        let mut number = 1;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(Failed { error, retry: None }) => return Err(error),
                Err(Failed { error, .. }) if number >= TRIES => return Err(error),
                Err(Failed { retry: Some(asked), .. }) => self.pause(what, number, asked)?,
            }
            number += 1;
        }
    }

    /// Waits before try `number + 1`.
    pub(super) fn pause(&self, what: &str, number: u32, asked: Option<Duration>) -> Result<(), HubError> {
        let pause = asked.unwrap_or_else(|| PAUSE.saturating_mul(1 << (number - 1).min(6))).min(PAUSE_MAX);
        let end = Instant::now() + pause;
        while Instant::now() < end {
            if self.is_cancelled() {
                return Err(HubError::Interrupted { what: what.into() });
            }
            thread::sleep(Duration::from_millis(50).min(pause));
        }
        Ok(())
    }

    /// Sends a request once and follows its redirects. Statuses of 400 and above are errors, except 416.
    pub(super) fn send(&self, what: &str, call: &Call<'_>) -> Result<Response<Body>, Failed> {
        let mut url = call.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let response = self.send_to(what, &url, call)?;
            let status = response.status();
            // Other redirects would turn a POST into a GET.
            let same_method = matches!(call.body, Some(Content::Bytes(_))) && matches!(status.as_u16(), 307 | 308);
            let follows = status.is_redirection() && (call.body.is_none() || same_method);
            let location = response.headers().get(header::LOCATION).filter(|_| follows);
            let Some(location) = location else {
                return if status.is_success()
                    || status.is_redirection() && call.follows == Follow::Endpoint
                    || status == StatusCode::RANGE_NOT_SATISFIABLE && call.range.is_some()
                {
                    Ok(response)
                } else {
                    Err(self.refused(what, &url, status, response.headers()))
                };
            };
            let next = location.to_str().ok().and_then(|location| join(&url, location));
            let next = next.ok_or_else(|| self.invalid(what, "a redirect to no usable address".into()))?;
            if call.follows == Follow::Endpoint && origin(&next) != origin(&url) {
                return Ok(response);
            }
            url = next;
        }
        Err(self.invalid(what, format!("more than {REDIRECTS_MAX} redirects")).into())
    }

    fn send_to(&self, what: &str, url: &str, call: &Call<'_>) -> Result<Response<Body>, Failed> {
        if !self.has_tls && is_https(url) {
            return Err(HubError::Processor { endpoint: host(url) }.into());
        }
        let mut request = Request::builder().method(call.method).uri(url);
        if let Some(value) = self.authorization.as_ref().filter(|_| origin(url) == origin(&self.endpoint)) {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some(first) = call.range {
            request = request.header(header::RANGE, format!("bytes={first}-"));
        }
        for (name, value) in call.headers {
            request = request.header(*name, *value);
        }
        let invalid = |error: ureq::http::Error| self.invalid(what, format!("an unusable address: {error}"));
        let sent = match &call.body {
            Some(Content::Bytes(body)) => self.agent.run(request.body(*body).map_err(invalid)?),
            Some(Content::Reader(reader, bytes)) => {
                let mut reader = reader.borrow_mut();
                let request = request.header(header::CONTENT_LENGTH, *bytes);
                self.agent.run(request.body(SendBody::from_reader(&mut **reader)).map_err(invalid)?)
            }
            None => self.agent.run(request.body(()).map_err(invalid)?),
        };
        sent.map_err(|error| self.unreachable(what, url, error))
    }

    pub(super) fn unreachable(
        &self,
        what: &str,
        url: &str,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Failed {
        let error = HubError::Unreachable { what: what.into(), host: host(url), source: Box::new(error) };
        Failed { error, retry: Some(None) }
    }

    /// Returns the error that a status means.
    fn refused(&self, what: &str, url: &str, status: StatusCode, headers: &HeaderMap) -> Failed {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let (what, host) = (what.to_owned(), host(url));
        let reason: String = text("x-error-message").chars().take(REASON_MAX).collect();
        let reason = if reason.is_empty() { reason } else { format!(": {}", reason.replace("; ", ", ")) };
        let denied = |help: &'static str| HubError::Denied {
            what: what.clone(),
            host: host.clone(),
            status: status.as_u16(),
            reason: reason.clone(),
            help,
        };
        let error = match (status.as_u16(), text("x-error-code")) {
            (401 | 403, "GatedRepo") if self.withholds_token => denied(self.token_help()),
            (401 | 403, "GatedRepo") => denied("accept the terms on its page, and set HF_TOKEN"),
            (_, "RepoNotFound") => HubError::NoRepository { what, host, help: self.token_help() },
            (_, "RevisionNotFound") => HubError::NoRevision { what, host, revision: String::new() },
            (_, "EntryNotFound") => HubError::NoFile { what, host },
            (401, _) if !self.has_token() => denied(self.token_help()),
            (401, _) => denied("the token is not valid: renew it with `hf auth login`"),
            (403, _) if self.withholds_token => denied(self.token_help()),
            (403, _) => denied(HAS_ACCESS),
            (404, _) if what.contains(": ") => HubError::NoFile { what, host },
            (404, _) => HubError::NoRepository { what, host, help: self.token_help() },
            (status, _) => HubError::Status { what, host, status, reason },
        };
        let may_pass = matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504);
        let asked = text("retry-after").parse().ok().map(Duration::from_secs);
        Failed { error, retry: may_pass.then_some(asked) }
    }

    /// Returns the full URL of a path.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint)
    }
}

/// A request.
pub(super) struct Call<'a> {
    pub(super) method: &'static str,
    pub(super) url: String,
    /// The first byte of the file that is needed.
    pub(super) range: Option<u64>,
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: Option<Content<'a>>,
    pub(super) follows: Follow,
}

/// The body of a request.
pub(super) enum Content<'a> {
    Bytes(&'a [u8]),
    /// Bytes to stream, and their number. They can be sent once, so a redirect is an error.
    Reader(RefCell<Box<dyn Read + 'a>>, u64),
}

/// Which redirects to follow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Follow {
    /// To any server.
    Anywhere,
    /// Only those that stay on one server; the answer is any other redirect.
    Endpoint,
}

impl Call<'_> {
    pub(super) fn get(url: String) -> Self {
        Self { method: "GET", url, range: None, headers: &[], body: None, follows: Follow::Anywhere }
    }
}

fn is_https(url: &str) -> bool {
    url.get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"))
}

/// Returns the cryptography of TLS; `None` if this processor cannot run it.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn provider() -> Option<Arc<rustls::crypto::CryptoProvider>> {
    #[cfg(target_arch = "x86_64")]
    let can_run = is_x86_feature_detected!("aes")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("adx")
        && is_x86_feature_detected!("avx")
        && is_x86_feature_detected!("avx2");
    #[cfg(target_arch = "aarch64")]
    let can_run = std::arch::is_aarch64_feature_detected!("neon")
        && std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull")
        && std::arch::is_aarch64_feature_detected!("sha2");
    can_run.then(|| Arc::new(rustls_graviola::default_provider()))
}

/// Returns `None`: the TLS library does not support this architecture.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn provider() -> Option<Arc<rustls::crypto::CryptoProvider>> {
    None
}
