//! Tests of the `unweight` binary: output, JSON keys, exit status, errors and signals. One module per command or
//! feature.
#![cfg(feature = "cli")]

mod archive;
mod attach;
mod base;
mod budget;
#[cfg(feature = "hub")]
mod card;
mod completions;
mod compress;
mod convert;
mod decompress;
mod demo;
mod errors;
mod extract;
mod generate;
mod harness;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod kernels;
mod man;
mod merge;
mod output;
mod plan;
#[cfg(feature = "sign")]
mod prove;
#[cfg(all(feature = "dfloat11", feature = "serve"))]
mod reference;
mod resume;
mod sign;
mod source;
#[cfg(feature = "gpu")]
mod support;
mod tune;
mod verify;
