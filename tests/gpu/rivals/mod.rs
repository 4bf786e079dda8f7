//! The kernels of `unweight-rivals` on the GPU, against its decoders.

mod dfloat11;
mod matvans;
mod tans;
mod zipserv;
