//! Errors of the Hub client. Messages name repository and file, and end with the next step.

use std::{error::Error, io, path::PathBuf};

use unweight_format::bundle::io_code;

/// Why a repository could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A variable of the environment has an unusable value.
    #[error("{variable}: {reason}; correct or unset it")]
    Setting {
        /// Name of the variable, or path of the file.
        variable: String,
        /// What is wrong with the value.
        reason: String,
    },
    /// The processor lacks instructions that the TLS library needs.
    #[error(
        "{endpoint}: this processor lacks the AES and vector instructions that HTTPS needs here; fetch the repository \
         with `hf download`"
    )]
    Processor {
        /// URL of the server.
        endpoint: String,
    },
    /// No connection, or a connection without an answer.
    #[error("{what}: no answer from {host}; check the network, or set HF_ENDPOINT to a mirror, then run it again")]
    Unreachable {
        /// Repository and file.
        what: String,
        /// Name of the server.
        host: String,
        /// The last error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The transfer broke repeatedly without new bytes.
    #[error("{what}: the transfer stopped at byte {at} of {size}; run it again to continue there")]
    Stopped {
        /// Repository and file.
        what: String,
        /// Bytes that have arrived.
        at: u64,
        /// Bytes of the file.
        size: u64,
        /// The last error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No such repository, or no access to it.
    #[error(
        "{what}: {host} has no such repository, or it is private; check the name, write ./{what} for a local path, \
         or get access: {help}"
    )]
    NoRepository {
        /// Repository.
        what: String,
        /// Name of the server.
        host: String,
        /// How to get access to a private one.
        help: &'static str,
    },
    /// No such branch, tag or commit.
    #[error("{what}: {host} has no such revision '{revision}'; give a branch, tag or commit after @")]
    NoRevision {
        /// Repository.
        what: String,
        /// Name of the server.
        host: String,
        /// The requested revision.
        revision: String,
    },
    /// The repository does not have a file that it lists.
    #[error("{what}: {host} lists this file but does not have it; run it again, or name a commit after @")]
    NoFile {
        /// Repository and file.
        what: String,
        /// Name of the server.
        host: String,
    },
    /// The server refuses access.
    #[error("{what}: {host} denies access ({status}){reason}; {help}")]
    Denied {
        /// Repository and file.
        what: String,
        /// Name of the server.
        host: String,
        /// HTTP status.
        status: u16,
        /// The server's reason after a colon, or nothing.
        reason: String,
        /// Next step.
        help: &'static str,
    },
    /// The server cannot answer, or answers with another error status.
    #[error("{what}: {host} answered with status {status}{reason}; wait and run it again, or set HF_ENDPOINT")]
    Status {
        /// Repository and file.
        what: String,
        /// Name of the server.
        host: String,
        /// HTTP status.
        status: u16,
        /// The server's reason after a colon, or nothing.
        reason: String,
    },
    /// An answer that does not follow the protocol.
    #[error("{what}: unusable answer of {host}: {reason}; check HF_ENDPOINT, then run it again")]
    Answer {
        /// Repository and file.
        what: String,
        /// Name of the server.
        host: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// A file arrived with other contents than the repository lists.
    #[error(
        "{what}: {kind} is {got}, but the repository lists {expected}; run it again, or choose another HF_ENDPOINT"
    )]
    Contents {
        /// Repository and file.
        what: String,
        /// Size or digest.
        kind: &'static str,
        /// The value in the list.
        expected: String,
        /// The value of what arrived.
        got: String,
    },
    /// The file system of the cache has too little space.
    #[error("{what}: needs {needed} more bytes in {path}, which has {free}; free some space, or set HF_HUB_CACHE")]
    NoRoom {
        /// Repository.
        what: String,
        /// Directory of the cache.
        path: PathBuf,
        /// Bytes to fetch.
        needed: u64,
        /// Free bytes.
        free: u64,
    },
    /// A file of the cache cannot be read or written.
    #[error("{path}: cannot {action}")]
    File {
        /// The file.
        path: PathBuf,
        /// What failed.
        action: &'static str,
        /// The error.
        source: io::Error,
    },
    /// The repository does not have what the command needs.
    #[error("{what}: {reason}")]
    Unsuitable {
        /// Repository.
        what: String,
        /// The stable code.
        code: &'static str,
        /// What is missing, and the next step.
        reason: String,
    },
    /// A signal ended the transfer.
    #[error("{what}: interrupted; run it again to continue")]
    Interrupted {
        /// Repository and file.
        what: String,
    },
}

impl HubError {
    /// The stable code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Setting { .. } => "hub-setting-invalid",
            Self::Processor { .. } => "hub-tls-unsupported",
            Self::Unreachable { .. } => "hub-unreachable",
            Self::Stopped { .. } => "hub-transfer-stopped",
            Self::NoRepository { .. } => "hub-repository-not-found",
            Self::NoRevision { .. } => "hub-revision-not-found",
            Self::NoFile { .. } => "hub-file-not-found",
            Self::Denied { .. } => "hub-access-denied",
            Self::Status { .. } => "hub-failed",
            Self::Answer { .. } => "hub-answer-invalid",
            Self::Contents { .. } => "hub-content-mismatch",
            Self::NoRoom { .. } => "disk-full",
            Self::File { source, .. } => io_code(source),
            Self::Unsuitable { code, .. } => code,
            Self::Interrupted { .. } => "interrupted",
        }
    }

    /// Converts an I/O error of a file.
    pub(super) fn file(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { path, action, source }
    }
}
