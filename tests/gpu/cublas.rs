//! Tuning of cuBLASLt: the fastest proposed algorithm is used and gives the same product as the default choice.

use crate::harness::{Random, bf16, gpu, guard_is_intact, poison, stream, value};
use unweight_rt::{ContextSize, DeviceBuffer, DeviceMatrix, ExecContext, LaunchError, MatrixRef};

/// Checks that rounding and the order of fp32 sums explain all differences. A sum of `k` products of N(0, 1) has terms
/// of about `sqrt(k)` that may cancel.
fn close(got: &[u16], other: &[u16], k: u32, what: &str) {
    let slack = f64::from(k).sqrt() * 2e-4;
    for (at, (got, other)) in got.iter().zip(other).enumerate() {
        let (got, other) = (value(*got), value(*other));
        assert!((got - other).abs() <= other.abs() / 64.0 + slack, "{what}: element {at} is {got}, was {other}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_tuned_product_is_the_same_product_and_no_slower() {
    let stream = stream(gpu());
    let mut ctx = ExecContext::new(&stream, ContextSize::default().with_cublas()).unwrap();
    let mut rng = Random::new(21);
    let mut random = |count: usize| -> Vec<u16> { (0..count).map(|_| bf16(rng.normal())).collect() };
    let mut proposed = 0;
    for (m, n, k) in [(1, 6144, 4096), (64, 1024, 4096), (200, 320, 448), (7, 100, 72)] {
        let ws: Vec<DeviceMatrix> =
            (0..3).map(|_| DeviceMatrix::from_host(&stream, n, k, &random(n as usize * k as usize)).unwrap()).collect();
        let x = DeviceMatrix::from_host(&stream, m, k, &random(m as usize * k as usize)).unwrap();
        let before = random(m as usize * n as usize);
        let mut y = DeviceMatrix::zeroed(&stream, m, n).unwrap();
        for add in [false, true] {
            let product = |ctx: &mut ExecContext, y: &mut DeviceMatrix| {
                poison(&stream, y);
                y.write(&stream, 0, &before).unwrap();
                ctx.cublas().unwrap().matmul(x.view(), ws[1].view(), y.view_mut(), add).unwrap();
                guard_is_intact(&stream, y, "cuBLAS");
                y.to_host(&stream).unwrap()
            };
            let untuned = product(&mut ctx, &mut y);
            let views: Vec<MatrixRef<'_>> = ws.iter().map(DeviceMatrix::view).collect();
            let found = ctx.cublas().unwrap().tune(x.view(), &views, y.view_mut(), add).unwrap();
            eprintln!("m = {m}, {n} x {k}, add {add}: {found:?}");
            assert!(found.best_us > 0.0 && found.best_us <= found.own_us, "{found:?}");
            proposed += found.proposals;
            let what = format!("m = {m}, {n} x {k}, add {add}");
            let tuned = product(&mut ctx, &mut y);
            close(&tuned, &untuned, k, &what);
            assert!(product(&mut ctx, &mut y) == tuned, "{what}: two runs differ");
            // The same in a graph.
            let graph = stream
                .capture(|| ctx.cublas()?.matmul(x.view(), ws[1].view(), y.view_mut(), add))
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            y.write(&stream, 0, &before).unwrap();
            // SAFETY: everything that the graph uses is alive.
            unsafe { graph.launch() }.unwrap();
            assert!(y.to_host(&stream).unwrap() == tuned, "{what}: a captured product has other bits");
        }
    }
    assert!(proposed > 8, "the library proposes nothing: {proposed}");
}

/// An algorithm that was tuned for aligned operands is not used for others, and invalid operands are errors.
#[test]
#[ignore = "needs a GPU"]
fn tuned_algorithms_apply_only_to_what_was_tuned() {
    let stream = stream(gpu());
    let mut ctx = ExecContext::new(&stream, ContextSize::default().with_cublas()).unwrap();
    let mut rng = Random::new(22);
    let mut random = |count: usize| -> Vec<u16> { (0..count).map(|_| bf16(rng.normal())).collect() };
    let w = DeviceMatrix::from_host(&stream, 256, 128, &random(256 * 128)).unwrap();
    let inputs = DeviceBuffer::from_host(&stream, &random(9 * 128)).unwrap();
    let whole = MatrixRef::new(&inputs, 9, 128, 128).unwrap();
    // Rows 1 to 8 begin at a multiple of 256 bytes; columns 1 to 127 of rows do not.
    let (aligned, shifted) = (whole.part(1..9, 0..128).unwrap(), whole.part(0..8, 1..128).unwrap());
    let mut y = DeviceMatrix::zeroed(&stream, 8, 256).unwrap();
    let cublas = ctx.cublas().unwrap();
    cublas.tune(aligned, &[w.view()], y.view_mut(), false).unwrap();
    let narrow = w.view().part(0..256, 1..128).unwrap();
    let found = cublas.tune(shifted, &[narrow], y.view_mut(), false).unwrap();
    assert_eq!(found.proposals, 0, "cuBLASLt must propose nothing for these operands");
    cublas.matmul(shifted, narrow, y.view_mut(), false).unwrap();
    let got = y.to_host(&stream).unwrap();
    let (x, w_host) = (inputs.to_host(&stream).unwrap(), w.to_host(&stream).unwrap());
    for (at, got) in got.iter().enumerate() {
        let (row, column) = (at / 256, at % 256);
        let exact: f64 = (1..128).map(|i| value(x[row * 128 + i]) * value(w_host[column * 128 + i])).sum();
        assert!(
            (value(*got) - exact).abs() <= exact.abs() / 128.0 + 1e-3,
            "element {at}: {}, not {exact}",
            value(*got)
        );
    }
    let other = DeviceMatrix::zeroed(&stream, 128, 128).unwrap();
    let unlike = cublas.tune(aligned, &[w.view(), other.view()], y.view_mut(), false).unwrap_err();
    assert!(matches!(unlike.launch_error(), Some(LaunchError::Shape { .. })), "{unlike}");
    let none = cublas.tune(aligned, &[], y.view_mut(), false).unwrap();
    assert_eq!((none.proposals, none.best_us), (0, 0.0));
    let captured = stream.capture(|| cublas.tune(aligned, &[w.view()], y.view_mut(), false).map(drop));
    assert_eq!(captured.err().and_then(|error| error.launch_error().cloned()), Some(LaunchError::Capturing));
}
