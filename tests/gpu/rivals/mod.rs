//! The kernels of `unweight-rivals` on the GPU, compared with its decoders.

mod dfloat11;
mod matvans;
mod tans;
mod zipserv;
