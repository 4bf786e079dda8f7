//! A model as it is published: safetensors files, and the roles of tensors by name.

pub mod glob;
pub mod roles;
pub mod safetensors;
