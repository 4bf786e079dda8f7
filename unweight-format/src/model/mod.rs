//! A model as it is published: safetensors files, names, and which tensor is to be stored in which form.

pub mod glob;
pub mod roles;
pub mod safetensors;
