//! The Hugging Face Hub: `org/name` as a model or bundle, against a server on loopback.

mod fetch;
mod hostile;
mod push;
mod server;
