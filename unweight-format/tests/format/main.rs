//! Tests of codec, containers and bundles, by feature. They are one binary, because each would link the whole library.

mod attached;
mod attacks;
mod base;
mod bundle;
mod codec;
mod common;
mod damage;
mod encoder_memory;
mod exponents;
mod faults;
mod golden;
mod killed;
mod memory;
mod parts;
mod pieces;
mod rans;
mod safetensors_python;
mod slices;
