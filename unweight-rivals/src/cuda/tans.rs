//! Adds tANS-coded FP8 vectors on a device while decoding them: `kernels/tans.cuh`.

use unweight_codegen::{ExternalSource, abi::ArgsInfo, args, plan::SmemPlan, spec::Arch};
use unweight_rt::{DeviceBuffer, DeviceError, KernelSet, LaunchError, Stream, raw::device::ExternalKernel};

use super::{Error, HEADERS};
use crate::tans::{Encoded, STATES, STEP, table};

const THREADS: u32 = 256;

args! {
    /// Arguments of both kernels.
    pub struct TansArgs {
        /// u32 `[words_a]`.
        pub slabs_a: u64,
        /// u32 `[words_b]`.
        pub slabs_b: u64,
        /// u16 `[streams]`.
        pub states_a: u64,
        /// u16 `[streams]`.
        pub states_b: u64,
        /// u8 `[streams]`.
        pub partial_a: u64,
        /// u8 `[streams]`.
        pub partial_b: u64,
        /// u32 `[ceil(streams / 128) + 1]`, in bytes.
        pub offsets_a: u64,
        /// u32 `[ceil(streams / 128) + 1]`, in bytes.
        pub offsets_b: u64,
        /// u8 `[tiles, streams, 8]`; `plain`: the first vector.
        pub rest_a: u64,
        /// u8 `[tiles, streams, 8]`; `plain`: the second vector.
        pub rest_b: u64,
        /// u32 `[4096]`: symbol, bits << 8, next state without them << 16.
        pub table: u64,
        /// u8 `[tiles, streams, 16]`, written, 16-byte aligned.
        pub out: u64,
        /// u32: incremented for each stream that ran out of bits.
        pub faults: u64,
        /// Words of `slabs_a`.
        pub words_a: u32,
        /// Words of `slabs_b`.
        pub words_b: u32,
        /// Streams of a vector.
        pub streams: u32,
        /// Tiles of 16 bytes per stream; `plain`: of the whole vector.
        pub tiles: u32,
    }
}

/// Returns the kernel that adds coded vectors. It needs compute capability 8.9.
pub fn add(arch: Arch) -> ExternalSource {
    ExternalSource {
        family: "tans",
        variant: "add".to_owned(),
        arch,
        summary: "Coded e4m3 + coded e4m3 -> e4m3.",
        grid: "ceil(streams / threads)",
        function: "add",
        header: "rivals/tans.cuh",
        headers: HEADERS,
        constants: vec![("kCoded", 1), ("kThreads", THREADS)],
        args: ArgsInfo::of::<TansArgs>(),
        smem: SmemPlan::new().section("table", STATES, 4, 16),
        threads: THREADS,
        blocks_per_sm: 4,
    }
}

/// Returns the kernel that adds uncoded vectors.
pub fn plain(arch: Arch) -> ExternalSource {
    ExternalSource {
        variant: "plain".to_owned(),
        summary: "e4m3 + e4m3 -> e4m3.",
        grid: "ceil(count / 16 / threads)",
        function: "plain",
        constants: vec![("kCoded", 0), ("kThreads", THREADS)],
        smem: SmemPlan::new(),
        ..add(arch)
    }
}

/// Returns whether an architecture has the conversion instructions that the kernels need.
pub fn runs_on(arch: Arch) -> bool {
    !matches!(arch, Arch::Sm80 | Arch::Sm86)
}

/// A coded vector on a device.
#[derive(Debug)]
pub struct DeviceTans {
    slabs: DeviceBuffer<u32>,
    states: DeviceBuffer<u16>,
    partial: DeviceBuffer<u8>,
    offsets: DeviceBuffer<u32>,
    rest: DeviceBuffer<u8>,
    table: DeviceBuffer<u32>,
    frequencies: Vec<u16>,
    per_stream: usize,
}

impl DeviceTans {
    /// Copies a vector to the device. Damaged streams are found by the kernel.
    ///
    /// # Errors
    /// The parts do not match, or the device has too little memory.
    pub fn upload(stream: &Stream, vector: &Encoded) -> Result<Self, Error> {
        let count = vector.states.len();
        let tiles = vector.per_stream / STEP;
        for (part, got, expected) in [
            ("bytes per stream", vector.per_stream, (tiles * STEP).max(STEP)),
            ("partial", vector.partial.len(), count),
            ("offsets", vector.offsets.len(), count.div_ceil(128) + 1),
            ("rest", vector.rest.len(), count.saturating_mul(vector.per_stream / 2)),
        ] {
            if got != expected {
                return Err(crate::tans::Error::Size { part, expected, got }.into());
            }
        }
        let offsets: Vec<u32> = vector.offsets.iter().map(|&offset| offset.cast_unsigned()).collect();
        Ok(Self {
            slabs: DeviceBuffer::from_host(stream, &vector.slabs)?,
            states: DeviceBuffer::from_host(stream, &vector.states)?,
            partial: DeviceBuffer::from_host(stream, &vector.partial)?,
            offsets: DeviceBuffer::from_host(stream, &offsets)?,
            rest: DeviceBuffer::from_host(stream, &vector.rest)?,
            table: DeviceBuffer::from_host(stream, &table(&vector.frequencies)?)?,
            frequencies: vector.frequencies.clone(),
            per_stream: vector.per_stream,
        })
    }

    /// Returns the number of FP8 bytes of the vector.
    pub fn len(&self) -> usize {
        self.states.len() * self.per_stream
    }

    /// Returns whether the vector is empty.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Returns the bytes of the vector's parts.
    pub fn bytes(&self) -> u64 {
        let parts = self.slabs.bytes() + self.states.bytes() + self.partial.bytes() + self.offsets.bytes();
        (parts + self.rest.bytes()) as u64
    }
}

/// Returns the position of byte `index` of a vector in a sum, which is ordered `[tile][stream][16]`.
pub fn place(index: usize, per_stream: usize, streams: usize) -> usize {
    let (stream, byte) = (index / per_stream, index % per_stream);
    (byte / STEP * streams + stream) * STEP + byte % STEP
}

/// The kernels on a device.
#[derive(Debug)]
pub struct TansKernels {
    add: ExternalKernel,
    plain: ExternalKernel,
    faults: DeviceBuffer<u32>,
}

impl TansKernels {
    /// Compiles the kernels, or loads them from the cache.
    ///
    /// # Errors
    /// The device or the compiler is unavailable or failed. Compute capability 8.0 and 8.6 lack the conversions.
    pub fn of(stream: &Stream, kernels: &KernelSet) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        let (add, plain) = (ExternalKernel::of(kernels, add(arch))?, ExternalKernel::of(kernels, plain(arch))?);
        Ok(Self { add, plain, faults: DeviceBuffer::zeroed(stream, 1)? })
    }

    /// Enqueues `out = a + b`; the bytes of `out` are ordered by [`place`].
    ///
    /// # Errors
    /// Vectors have other lengths, streams or tables, or are on other devices.
    pub fn add(
        &self,
        stream: &Stream,
        a: &DeviceTans,
        b: &DeviceTans,
        out: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        let same = a.per_stream == b.per_stream && a.frequencies == b.frequencies;
        for (buffer, got) in [("the second vector", if same { b.len() } else { 0 }), ("the sum", out.len())] {
            let (got, expected) = (got as u64, a.len() as u64);
            if got != expected {
                return self.add.refuse(LaunchError::Elements { buffer, got, expected });
            }
        }
        self.check(&[a.slabs.device().ordinal(), b.slabs.device().ordinal(), out.device().ordinal()])?;
        let args = TansArgs {
            slabs_a: a.slabs.address(),
            slabs_b: b.slabs.address(),
            states_a: a.states.address(),
            states_b: b.states.address(),
            partial_a: a.partial.address(),
            partial_b: b.partial.address(),
            offsets_a: a.offsets.address(),
            offsets_b: b.offsets.address(),
            rest_a: a.rest.address(),
            rest_b: b.rest.address(),
            table: a.table.address(),
            out: out.address(),
            faults: self.faults.address(),
            // Offsets are below 2^31 bytes.
            words_a: a.slabs.len() as u32,
            words_b: b.slabs.len() as u32,
            streams: a.states.len() as u32,
            tiles: (a.per_stream / STEP) as u32,
        };
        // SAFETY: `upload` checked that every part has the size that `streams` and `tiles` imply. Dropping a buffer
        // waits for the kernel.
        unsafe { self.add.launch(stream, args.streams.div_ceil(THREADS), &args) }
    }

    /// Enqueues `out = a + b` for uncoded vectors, whose lengths are a multiple of 16.
    ///
    /// # Errors
    /// Vectors have other lengths, or are on other devices.
    pub fn add_plain(
        &self,
        stream: &Stream,
        a: &DeviceBuffer<u8>,
        b: &DeviceBuffer<u8>,
        out: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        let expected = (a.len() / STEP * STEP) as u64;
        for (buffer, got) in [("the first vector", a.len()), ("the second", b.len()), ("the sum", out.len())] {
            if got as u64 != expected {
                return self.plain.refuse(LaunchError::Elements { buffer, got: got as u64, expected });
            }
        }
        let tiles = expected / STEP as u64;
        let limit = u32::MAX.into();
        let tiles = match u32::try_from(tiles) {
            Ok(tiles) => tiles,
            Err(_) => return self.plain.refuse(LaunchError::TooLarge { what: "tiles", value: tiles, limit }),
        };
        self.check(&[a.device().ordinal(), b.device().ordinal(), out.device().ordinal()])?;
        let (rest_a, rest_b, out) = (a.address(), b.address(), out.address());
        let args = TansArgs { rest_a, rest_b, out, tiles, ..TansArgs::default() };
        // SAFETY: the lengths were checked above. Dropping a buffer waits for the kernel.
        unsafe { self.plain.launch(stream, tiles.div_ceil(THREADS), &args) }
    }

    /// Returns how many streams ran out of bits so far. Waits for the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn faults(&self, stream: &Stream) -> Result<u32, DeviceError> {
        Ok(self.faults.to_host(stream)?.first().copied().unwrap_or(0))
    }

    fn check(&self, devices: &[usize]) -> Result<(), DeviceError> {
        let own = self.add.device().ordinal();
        match devices.iter().find(|&&other| other != own) {
            Some(&other) => self.add.refuse(LaunchError::OtherDevice { operand: "an operand", own, other }),
            None => Ok(()),
        }
    }
}
