//! A layer of BF16 weights, which cuBLAS multiplies at every batch.

use unweight_codegen::spec::Epilogue;

use crate::{
    device::{ContextSize, DeviceError, LaunchError, MatrixMut, MatrixRef},
    exec::ExecContext,
    weight::DeviceMatrix,
};

/// A linear layer of BF16 weights `[n, k]`.
#[derive(Debug)]
pub struct Bf16Linear {
    weights: DeviceMatrix,
}

impl Bf16Linear {
    pub(crate) fn new(weights: DeviceMatrix) -> Self {
        Self { weights }
    }

    /// Returns the weights `[n, k]`, row-major, on the device.
    pub fn weights(&self) -> &DeviceMatrix {
        &self.weights
    }

    pub(super) fn context_size(&self) -> ContextSize {
        ContextSize::default().with_cublas()
    }

    pub(super) fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        let add = match epilogue {
            Epilogue::Store => false,
            Epilogue::StoreAdd => true,
            requested => return Err(LaunchError::Epilogue { asked: requested, loaded: Epilogue::Store }.into()),
        };
        ctx.cublas()?.matmul(x, self.weights.view(), y, add)
    }
}
