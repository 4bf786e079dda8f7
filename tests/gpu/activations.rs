//! Activation kernels on the GPU through their operations: correct to one rounding, the same bits in any batch, and
//! errors for everything that the kernels do not support.

use unweight_bench::{halves, normal_bf16, oracle};
use unweight_codegen::spec::{
    Arch, EmbedSource, EmbedSpec, GateFunction, NormKind, NormSpec, NormThreads, SiluMulSpec, SiluMulThreads,
    VariantSpec,
};
use unweight_format::{Histogram, Matrix, raw::packed};
use unweight_rt::{
    DeviceBuffer, DeviceError, DevicePacked, KernelSet, LaunchError, MatrixMut, MatrixRef, RowFault, Stream,
    raw::ops::{
        embed::{Embed, EmbedTable},
        norm::Norm,
        silu_mul::SiluMul,
    },
};

use crate::harness::{Random, context, gpu, guard_is_intact, poison, refused, stream};

const EPS: f32 = 1e-5;
/// Repetitions that must give the same bits.
const AGAIN: usize = 2000;

fn random(count: usize, seed: u64) -> Vec<u16> {
    halves(&normal_bf16(count, 1.0, seed))
}

fn buffer(stream: &Stream, elements: &[u16]) -> DeviceBuffer<u16> {
    DeviceBuffer::from_host(stream, elements).unwrap()
}

/// Returns a poisoned output of `rows` rows.
fn output(stream: &Stream, rows: usize, pitch: usize) -> DeviceBuffer<u16> {
    let mut y = DeviceBuffer::zeroed(stream, rows * pitch).unwrap();
    poison(stream, &mut y);
    y
}

/// Returns the rows of a matrix with gaps, which must still be poisoned.
fn rows(stream: &Stream, y: &DeviceBuffer<u16>, columns: usize, pitch: usize, what: &str) -> Vec<u16> {
    guard_is_intact(stream, y, what);
    let mut rows = Vec::new();
    for row in y.to_host(stream).unwrap().chunks_exact(pitch) {
        rows.extend_from_slice(&row[..columns]);
        assert!(row[columns..].iter().all(|half| *half == 0xffff), "{what}: the gap after a row was written");
    }
    rows
}

fn rms(threads: NormThreads, pdl: bool) -> NormSpec {
    NormSpec { threads, kind: NormKind::Rms, add: false, pdl }
}

fn norms(kernels: &KernelSet) -> Vec<Norm> {
    let variants = NormThreads::ALL.into_iter().flat_map(|threads| [false, true].map(|pdl| rms(threads, pdl)));
    variants.map(|spec| Norm::new(kernels.get(&VariantSpec::norm(Arch::Sm90a, spec)).unwrap()).unwrap()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn norms_of_every_width() {
    let kernels = gpu();
    let (stream, norms) = (stream(kernels), norms(kernels));
    let mut ctx = context(&stream);
    for (m, d, gap) in [
        (1usize, 4096usize, 0usize),
        (3, 72, 8),
        (7, 8, 0),
        (300, 4096, 0),
        (5, 16384, 0),
        (2, 16376, 8),
        (33, 5120, 64),
    ] {
        let pitch = d + gap;
        let (x, gamma) = (random(m * pitch, (m * d) as u64), random(d, d as u64));
        let spans: Vec<_> = x.chunks_exact(pitch).flat_map(|row| oracle::norm(&row[..d], &gamma, EPS)).collect();
        let (x, gamma) = (buffer(&stream, &x), buffer(&stream, &gamma));
        for norm in &norms {
            let what = format!("{} [{m}, {d}]", norm.kernel().spec());
            let (rows_u32, d_u32, pitch_u64) = (m as u32, d as u32, pitch as u64);
            let mut y = output(&stream, m, pitch);
            let view = MatrixRef::new(&x, rows_u32, d_u32, pitch_u64).unwrap();
            norm.enqueue(
                &mut ctx,
                view,
                &gamma,
                EPS,
                None,
                MatrixMut::new(&mut y, rows_u32, d_u32, pitch_u64).unwrap(),
            )
            .unwrap();
            ctx.synchronize().unwrap();
            let whole = rows(&stream, &y, d, pitch, &what);
            assert_eq!(oracle::outside(&whole, &spans), None, "{what}");
            // A list of the last row, the first, and the last again gives the same bits.
            let list: Vec<u32> = vec![rows_u32 - 1, 0, rows_u32 - 1];
            let list_on_device = DeviceBuffer::from_host(&stream, &list).unwrap();
            let mut y = output(&stream, 3, d);
            norm.enqueue(
                &mut ctx,
                view,
                &gamma,
                EPS,
                Some(&list_on_device),
                MatrixMut::new(&mut y, 3, d_u32, d as u64).unwrap(),
            )
            .unwrap();
            ctx.synchronize().unwrap();
            for (row, got) in list.iter().zip(rows(&stream, &y, d, d, &what).chunks_exact(d)) {
                assert!(got == &whole[*row as usize * d..][..d], "{what}: row {row} by a list");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn invalid_row_ids_give_zeros_and_are_reported() {
    let kernels = gpu();
    let (stream, norms) = (stream(kernels), norms(kernels));
    let mut ctx = context(&stream);
    let (x, gamma) = (buffer(&stream, &random(4 * 72, 1)), buffer(&stream, &random(72, 2)));
    let list = DeviceBuffer::from_host(&stream, &[0u32, 4, 3]).unwrap();
    let mut y = output(&stream, 3, 72);
    let view = MatrixRef::new(&x, 4, 72, 72).unwrap();
    norms[0].enqueue(&mut ctx, view, &gamma, EPS, Some(&list), MatrixMut::new(&mut y, 3, 72, 72).unwrap()).unwrap();
    assert!(matches!(ctx.synchronize(), Err(DeviceError::Row { row: 1, what: RowFault::Source })));
    ctx.synchronize().unwrap();
    let y = rows(&stream, &y, 72, 72, "a list");
    assert!(y[72..144].iter().all(|half| *half == 0) && y[..72].iter().any(|half| *half != 0));
}

#[test]
#[ignore = "needs a GPU"]
fn activations_of_every_width() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    let functions = || GateFunction::ALL.iter().copied();
    let all = SiluMulThreads::ALL.into_iter().flat_map(|threads| functions().map(move |gate| (threads, gate)));
    for spec in all.flat_map(|(threads, gate)| [false, true].map(|pdl| SiluMulSpec { threads, gate, pdl })) {
        let silu_mul = SiluMul::new(kernels.get(&VariantSpec::silu_mul(Arch::Sm90a, spec)).unwrap()).unwrap();
        for (m, n, gap) in
            [(1usize, 14336usize, 0usize), (3, 72, 8), (7, 8, 0), (257, 1032, 0), (64, 14336, 0), (2, 1024, 24)]
        {
            let what = format!("{} [{m}, {n}]", silu_mul.kernel().spec());
            let (x_pitch, y_pitch) = (2 * n + gap, n + gap);
            let mut x = random(m * x_pitch, (m * n) as u64);
            for (gate, value) in x.iter_mut().zip([20.0, -20.0, 90.0, -90.0, -300.0, 0.0]) {
                *gate = oracle::rounded(value);
            }
            let activated = |row: &[u16]| {
                let (gate, up) = row[..2 * n].split_at(n);
                gate.iter().zip(up).map(|(gate, up)| oracle::gated(spec.gate, *gate, *up)).collect::<Vec<_>>()
            };
            let spans: Vec<_> = x.chunks_exact(x_pitch).flat_map(activated).collect();
            let (x, mut y) = (buffer(&stream, &x), output(&stream, m, y_pitch));
            let view = MatrixRef::new(&x, m as u32, 2 * n as u32, x_pitch as u64).unwrap();
            silu_mul
                .enqueue(&mut ctx, view, MatrixMut::new(&mut y, m as u32, n as u32, y_pitch as u64).unwrap())
                .unwrap();
            ctx.synchronize().unwrap();
            assert_eq!(oracle::outside(&rows(&stream, &y, n, y_pitch, &what), &spans), None, "{what}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn embeddings_copy_their_rows() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    for (n, k, d, vocabulary) in [(128usize, 128usize, 72usize, 100u32), (6400, 4096, 4096, 6400), (64, 64, 64, 64)] {
        let mut weights = halves(&normal_bf16(n * k, 0.02, n as u64));
        // Single escapes, and escapes in lists.
        for (at, weight) in weights.iter_mut().enumerate() {
            if at % 499 == 7 || at / k == 5 && at % k < 40.min(n * k / 1000) {
                *weight = [0, 0x8000, 0x7f80, 0x4640][at % 4];
            }
        }
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let packed = packed::pack(Matrix::new(&bytes, n, k).unwrap(), &Histogram::of(&bytes)).unwrap();
        assert!(!packed.escapes().is_empty());
        let (table, packed) = (buffer(&stream, &weights), DevicePacked::upload(&stream, &packed).unwrap());
        let mut rng = Random::new(9);
        let mut ids: Vec<u32> = (0..300).map(|_| rng.below(vocabulary.into()) as u32).collect();
        ids[..3].copy_from_slice(&[0, vocabulary - 1, vocabulary - 1]);
        // Not a row of the table.
        ids[17] = vocabulary;
        let on_device = DeviceBuffer::from_host(&stream, &ids).unwrap();
        for (source, pdl) in EmbedSource::ALL.iter().flat_map(|source| [(*source, false), (*source, true)]) {
            let embed =
                Embed::new(kernels.get(&VariantSpec::embed(Arch::Sm90a, EmbedSpec { source, pdl })).unwrap()).unwrap();
            let what = format!("{} [{n}, {k}]", embed.kernel().spec());
            let table = match source {
                EmbedSource::Bf16 => EmbedTable::Bf16(MatrixRef::new(&table, vocabulary, d as u32, k as u64).unwrap()),
                EmbedSource::Packed => EmbedTable::Packed { weights: &packed, vocabulary },
            };
            let mut y = output(&stream, ids.len(), d + 8);
            for _ in 0..if n == 64 { AGAIN } else { 3 } {
                poison(&stream, &mut y);
                let view = MatrixMut::new(&mut y, ids.len() as u32, d as u32, d as u64 + 8).unwrap();
                embed.enqueue(&mut ctx, &on_device, table, view).unwrap();
                assert!(
                    matches!(ctx.synchronize(), Err(DeviceError::Row { row: 17, what: RowFault::Token })),
                    "{what}"
                );
                let y = rows(&stream, &y, d, d + 8, &what);
                for (row, (id, got)) in ids.iter().zip(y.chunks_exact(d)).enumerate() {
                    let zeros = vec![0; d];
                    let expected = if *id < vocabulary { &weights[*id as usize * k..][..d] } else { &zeros };
                    assert!(got == expected, "{what}: row {row}, id {id}");
                }
            }
        }
    }
}

/// A chain of dependent launches in a graph, each reading the output of the one before: the same bits every time.
#[test]
#[ignore = "needs a GPU"]
fn dependent_launches_give_the_same_bits_again_and_again() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    let (m, d) = (37u32, 2048u32);
    let table = buffer(&stream, &random(500 * d as usize, 3));
    let gamma = buffer(&stream, &random(d as usize, 4));
    let ids = DeviceBuffer::from_host(&stream, &(0..m).map(|row| row * 13 % 500).collect::<Vec<_>>()).unwrap();
    let get = |spec| kernels.get(&spec).unwrap();
    let threads = NormThreads::new(256).unwrap();
    let norm = Norm::new(get(VariantSpec::norm(Arch::Sm90a, rms(threads, true)))).unwrap();
    let threads = SiluMulThreads::new(128).unwrap();
    let silu_mul = SiluMulSpec { threads, gate: GateFunction::Silu, pdl: true };
    let silu_mul = SiluMul::new(get(VariantSpec::silu_mul(Arch::Sm90a, silu_mul))).unwrap();
    let embed = EmbedSpec { source: EmbedSource::Bf16, pdl: true };
    let embed = Embed::new(get(VariantSpec::embed(Arch::Sm90a, embed))).unwrap();
    let mut h = output(&stream, m as usize, d as usize);
    let mut x = output(&stream, m as usize, d as usize);
    let mut a = output(&stream, m as usize, d as usize / 2);
    let mut step = || {
        let table = EmbedTable::Bf16(MatrixRef::new(&table, 500, d, d.into())?);
        embed.enqueue(&mut ctx, &ids, table, MatrixMut::new(&mut h, m, d, d.into())?)?;
        norm.enqueue(
            &mut ctx,
            MatrixRef::new(&h, m, d, d.into())?,
            &gamma,
            EPS,
            None,
            MatrixMut::new(&mut x, m, d, d.into())?,
        )?;
        silu_mul.enqueue(
            &mut ctx,
            MatrixRef::new(&x, m, d, d.into())?,
            MatrixMut::new(&mut a, m, d / 2, u64::from(d) / 2)?,
        )
    };
    step().unwrap();
    let graph = stream.capture(&mut step).unwrap();
    let first = a.to_host(&stream).unwrap();
    for round in 0..AGAIN {
        for buffer in [&mut h, &mut x, &mut a] {
            buffer.fill_bytes(&stream, 0xff).unwrap();
        }
        // SAFETY: everything that the launches use lives until the reads below.
        unsafe { graph.launch() }.unwrap();
        assert!(a.to_host(&stream).unwrap() == first, "launch {round}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected_before_the_launch() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut ctx = context(&stream);
    let norm = norms(kernels).remove(0);
    let (x, gamma) = (buffer(&stream, &random(4 * 80, 1)), buffer(&stream, &random(72, 2)));
    let mut y = output(&stream, 4, 80);
    let mut run = |cols: u32, pitch: u64, rows: u32| {
        let y = MatrixMut::new(&mut y, rows, cols, pitch).unwrap();
        refused(norm.enqueue(&mut ctx, MatrixRef::new(&x, 4, cols, pitch).unwrap(), &gamma, EPS, None, y))
    };
    assert!(matches!(run(70, 80, 4), LaunchError::Columns { cols: 70, .. }));
    assert!(matches!(run(72, 76, 4), LaunchError::Pitch { pitch: 76, .. }));
    assert!(matches!(run(72, 80, 3), LaunchError::Output { .. }));
    assert!(matches!(run(64, 80, 4), LaunchError::Elements { buffer: "gamma", got: 72, expected: 64 }));
    // Not allowed in place: a block may read what another block has already written.
    let place = MatrixRef::new(&x, 4, 72, 80).unwrap();
    // SAFETY: nothing is enqueued.
    let same = unsafe { MatrixMut::from_raw(kernels.device(), x.address(), 4, 72, 80) }.unwrap();
    let overlap = LaunchError::Overlap { written: "y", other: "x" };
    assert_eq!(refused(norm.enqueue(&mut ctx, place, &gamma, EPS, None, same)), overlap);
    let pdl = false;
    let source = EmbedSource::Packed;
    let packed = Embed::new(kernels.get(&VariantSpec::embed(Arch::Sm90a, EmbedSpec { source, pdl })).unwrap()).unwrap();
    let ids = DeviceBuffer::from_host(&stream, &[0u32; 3]).unwrap();
    let mut few = output(&stream, 4, 72);
    let mut look_up = |rows| {
        let y = MatrixMut::new(&mut few, rows, 72, 72).unwrap();
        refused(packed.enqueue(&mut ctx, &ids, EmbedTable::Bf16(place), y))
    };
    assert_eq!(look_up(3), LaunchError::Source { takes: "packed", got: "bf16" });
    assert!(Norm::new(kernels.get(&VariantSpec::embed(Arch::Sm90a, EmbedSpec { source, pdl })).unwrap()).is_err());
    ctx.synchronize().unwrap();
}
