//! A model as it is published: safetensors files, names, and which tensor is to be stored in which encoding.

pub mod glob;
pub mod roles;
pub mod safetensors;
