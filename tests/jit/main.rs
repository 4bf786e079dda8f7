//! From a spec to a cubin: reviewed sources, the real compiler, the cache under many processes.

mod cache_processes;
mod nvrtc;
mod rivals;
mod snapshots;
