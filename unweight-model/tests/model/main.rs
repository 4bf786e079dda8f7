//! Configurations, bindings of tensors, and the f32 reference.

mod bundle;
mod config;
mod reference;
mod rope;
