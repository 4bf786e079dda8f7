//! Formats of other systems.

mod dfloat11;
mod others;
