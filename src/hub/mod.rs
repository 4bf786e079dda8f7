//! A client of the Hugging Face Hub: fetches repositories into the cache that `huggingface_hub` uses, and uploads
//! bundles.
//!
//! ```text
//! models--org--name/blobs/<etag>               contents: SHA-256 of a large file, git's digest of a small one
//!                  /blobs/<etag>.incomplete    the beginning of an interrupted download
//!                  /snapshots/<commit>/<file>  a link to a blob
//!                  /refs/<revision>            the commit of a branch or tag, written last
//! ```
//!
//! Answers of the server are not trusted: names, sizes and digests are checked, bodies are limited, and the token stays
//! with the endpoint.

mod cache;
mod client;
mod digest;
mod error;
mod fetch;
mod push;
mod repository;
mod settings;
mod url;

pub use error::HubError;
pub use fetch::fetch;
pub use push::{LocalFile, PushOptions, push};
pub use repository::{Listing, RemoteFile, Repository, Use};
pub use settings::{Settings, is_offline};

pub use client::Client;
