//! Chooses the route of a batch, and splits a batch that is larger than the layer was loaded for.

use std::{ops::Range, sync::Arc};

use unweight_codegen::{VariantSpec, spec::Epilogue};

use crate::{
    choose::route::{BatchRoute, Route, Routes},
    device::{ContextSize, DeviceError, LaunchError, MatrixMut, MatrixRef, module::LoadedKernel},
    exec::{ExecContext, operands::check_product},
};

/// A layer with one route for each epilogue and range of batches.
pub(super) trait Routed {
    /// How a batch is multiplied.
    type Route;

    /// Returns the routes, grouped by epilogue and ascending in the largest batch.
    fn routes(&self) -> &[BatchRoute<Self::Route>];

    /// Returns `[n, k]`, without padding.
    fn shape(&self) -> [u32; 2];

    /// Returns the ordinal of the device that holds the weights.
    fn ordinal(&self) -> usize;

    /// Returns the address range of each section of the weights.
    fn spans(&self) -> impl Iterator<Item = (&'static str, Range<u64>)>;

    /// Returns the kernel of the product; `None` if cuBLAS multiplies.
    fn kernel<'a>(&self, route: &'a Self::Route) -> Option<&'a LoadedKernel>;

    /// Returns the context size for `rows` rows that are multiplied at once.
    fn rows_size(&self, route: &Self::Route, rows: u32) -> ContextSize;

    /// Checks the operands and enqueues a batch that the route can multiply at once.
    fn enqueue_rows(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        choice: &BatchRoute<Self::Route>,
    ) -> Result<(), DeviceError>;

    /// Returns the route of a batch and the maximum rows per launch: the whole batch, or the largest batch that the
    /// layer was loaded for.
    fn route(&self, m: u32, epilogue: Epilogue) -> Result<(&BatchRoute<Self::Route>, u32), LaunchError> {
        select(self.routes(), |choice| (choice.epilogue, choice.last), m, epilogue)
    }

    /// Returns the variant of the product for a batch, or for the first part of a split batch.
    fn variant(&self, m: u32, epilogue: Epilogue) -> Option<VariantSpec> {
        let (choice, _) = self.route(m, epilogue).ok()?;
        Some(*self.kernel(&choice.kernel)?.spec())
    }

    /// Returns the context size for every batch.
    fn context_size(&self) -> ContextSize {
        // The largest batch of a range needs the most.
        let of = |choice: &BatchRoute<Self::Route>| self.rows_size(&choice.kernel, choice.last);
        self.routes().iter().map(of).fold(ContextSize::default(), ContextSize::max)
    }

    /// Returns the context size for one batch, including all of its parts.
    fn context_size_at(&self, m: u32, epilogue: Epilogue) -> Result<ContextSize, LaunchError> {
        let (_, rows) = self.route(m, epilogue)?;
        let mut need = ContextSize::default();
        for rows in [rows, m % rows.max(1)].into_iter().filter(|rows| *rows > 0) {
            let (choice, _) = self.route(rows, epilogue)?;
            need = need.max(self.rows_size(&choice.kernel, rows));
        }
        Ok(need)
    }

    /// Checks the operands and enqueues a batch, split into parts if it is larger than the layer was loaded for.
    fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        mut y: MatrixMut<'_>,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        let (m, [n, k]) = (x.rows(), self.shape());
        let (choice, rows) = self.route(m, epilogue)?;
        if rows == m {
            return self.enqueue_rows(ctx, x, y, choice);
        }
        let columns = if epilogue == Epilogue::SiluMul { n / 2 } else { n };
        let w = [u64::from(n), k.into()];
        check_product(self.ordinal(), x.desc(), w, columns.into(), y.desc(), self.spans())?;
        // Each part begins at a multiple of 16 bytes if the batch does. The last part may have another route.
        for rows in [rows, m % rows] {
            let (choice, _) = self.route(rows, epilogue)?;
            ctx.size().check(self.rows_size(&choice.kernel, rows))?;
        }
        for part in parts(m, rows) {
            let (choice, _) = self.route(part.end - part.start, epilogue)?;
            let y = y.part(part.clone(), 0..columns)?;
            self.enqueue_rows(ctx, x.part(part, 0..k)?, y, choice)?;
        }
        Ok(())
    }
}

/// Builds routes from loaded kernels.
///
/// # Errors
/// Errors of `of`: a kernel belongs to another family.
pub(super) fn load_routes<R>(
    routes: Routes<Arc<LoadedKernel>>,
    of: impl Fn(Route<Arc<LoadedKernel>>) -> Result<R, DeviceError>,
) -> Result<Vec<BatchRoute<R>>, DeviceError> {
    let of = |BatchRoute { epilogue, last, kernel }| Ok(BatchRoute { epilogue, last, kernel: of(kernel)? });
    routes.into_iter().map(of).collect()
}

/// Selects the choice for a batch, and the maximum rows per launch. Choices are grouped by epilogue and ascending in
/// the largest batch.
fn select<T>(
    choices: &[T],
    of: impl Fn(&T) -> (Epilogue, u32),
    m: u32,
    requested: Epilogue,
) -> Result<(&T, u32), LaunchError> {
    let mut largest = None;
    for choice in choices {
        let (epilogue, last) = of(choice);
        if epilogue == requested {
            if m <= last {
                return Ok((choice, m));
            }
            largest = Some((choice, last));
        }
    }
    match (largest, choices.first()) {
        (Some(largest), _) => Ok(largest),
        (None, Some(first)) => Err(LaunchError::Epilogue { asked: requested, loaded: of(first).0 }),
        (None, None) => Err(LaunchError::Epilogue { asked: requested, loaded: Epilogue::Store }),
    }
}

/// Splits `m` rows into ranges of at most `rows`. Zero rows result in one empty range.
pub(super) fn parts(m: u32, rows: u32) -> impl Iterator<Item = Range<u32>> {
    let step = rows.max(1);
    (0..m.div_ceil(step).max(1)).map(move |part| part * step..m.min(part.saturating_add(1).saturating_mul(step)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epilogue_that_was_not_loaded_for_is_refused_and_a_large_batch_is_split() {
        let choices = [(Epilogue::Store, 8), (Epilogue::Store, 64), (Epilogue::StoreAdd, 64)];
        let chosen =
            |m, requested| select(&choices, |choice| *choice, m, requested).map(|(choice, rows)| (*choice, rows));
        assert_eq!(chosen(0, Epilogue::Store), Ok(((Epilogue::Store, 8), 0)));
        assert_eq!(chosen(1, Epilogue::Store), Ok(((Epilogue::Store, 8), 1)));
        assert_eq!(chosen(8, Epilogue::Store), Ok(((Epilogue::Store, 8), 8)));
        assert_eq!(chosen(9, Epilogue::Store), Ok(((Epilogue::Store, 64), 9)));
        assert_eq!(chosen(9, Epilogue::StoreAdd), Ok(((Epilogue::StoreAdd, 64), 9)));
        assert_eq!(chosen(65, Epilogue::StoreAdd), Ok(((Epilogue::StoreAdd, 64), 64)));
        assert_eq!(chosen(u32::MAX, Epilogue::Store), Ok(((Epilogue::Store, 64), 64)));
        let wrong = LaunchError::Epilogue { asked: Epilogue::SiluMul, loaded: Epilogue::Store };
        assert_eq!(chosen(1, Epilogue::SiluMul), Err(wrong));
    }

    #[test]
    fn parts_cover_each_row_once() {
        for (m, rows) in [(5, 4), (8, 4), (9, 4), (20_000, 4096), (1, 1), (3, 1), (u32::MAX, 1 << 31), (u32::MAX, 4096)]
        {
            let mut next = 0;
            for part in parts(m, rows) {
                assert_eq!(part.start, next, "{m} in {rows}");
                assert!((1..=rows).contains(&(part.end - part.start)), "{m} in {rows}: {part:?}");
                assert!(part.end == m || part.len() == rows as usize, "only the last is shorter");
                next = part.end;
            }
            assert_eq!(next, m);
        }
    }
}
