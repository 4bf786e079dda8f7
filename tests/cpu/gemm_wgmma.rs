//! The register-sourced large-batch matmul, run on the CPU prelude: operands against the format's oracle bit by bit, results against float64,
//! shares of k in every position, hostile escapes, and planted bugs that must be caught.

use crate::harness::{CpuKernel, Edit, Launch};
use crate::packed_problem::{Outcome, Problem, Setup, TILE};
use unweight_codegen::spec::Epilogue;

/// The fields of `Config` in kernels/gemm_wgmma.cuh.
#[derive(Clone, Copy, Debug)]
struct Config {
    batch_tile: usize,
    stages: usize,
    warpgroups: usize,
    cluster: usize,
    stream_k: bool,
    epilogue: Epilogue,
    dump: bool,
}

impl Config {
    const fn new(batch_tile: usize, stages: usize, warpgroups: usize) -> Self {
        Config { batch_tile, stages, warpgroups, cluster: 1, stream_k: false, epilogue: Epilogue::Store, dump: false }
    }
    const fn streaming(mut self) -> Self {
        self.stream_k = true;
        self
    }
    const fn clustered(mut self, cluster: usize) -> Self {
        self.cluster = cluster;
        self
    }
    const fn adding(mut self) -> Self {
        self.epilogue = Epilogue::StoreAdd;
        self
    }
    const fn dumping(mut self) -> Self {
        self.dump = true;
        self
    }

    /// The sum stated in the head of kernels/gemm_wgmma.cuh.
    fn smem_bytes(&self) -> usize {
        let rows =
            if self.cluster == 1 && self.batch_tile > 64 && self.batch_tile.is_multiple_of(64) { 64 } else { 32 };
        let buffers = (self.batch_tile / rows).clamp(2, 3);
        self.stages * (self.batch_tile * 128 + self.warpgroups * (6144 + 256) + 16)
            + self.warpgroups * (buffers * rows * 128 + 8)
    }

    fn tiles(&self, m: usize, n: usize) -> usize {
        n.div_ceil(TILE * self.warpgroups) * m.div_ceil(self.batch_tile)
    }

    fn grid(&self, m: usize, n: usize, k: usize, multiprocessors: usize) -> usize {
        if self.cluster > 1 {
            return self.tiles(m, n) * self.cluster;
        }
        let units = self.tiles(m, n) * if self.stream_k { k / TILE } else { 1 };
        units.min(multiprocessors)
    }

    fn build(&self, edits: &[Edit]) -> CpuKernel {
        let source = format!(
            "#include \"unweight/kernels/gemm_wgmma.cuh\"\n\
             struct Config {{\n\
             \x20   static constexpr uw::u32 kBatchTile = {}, kStages = {}, kWarpgroups = {}, kCluster = {};\n\
             \x20   static constexpr bool kStreamK = {}, kEscapes = true, kStoreAdd = {}, kPdl = true, kDumpOperands = {};\n\
             }};\n\
             static_assert(uw::gemm_wgmma::Smem<Config>::kBytes == {});\n\
             extern \"C\" __global__ void gemm(const __grid_constant__ uw::GemmPackedArgs args) {{ uw::gemm_wgmma::run<Config>(args); }}\n",
            self.batch_tile,
            self.stages,
            self.warpgroups,
            self.cluster,
            self.stream_k,
            self.epilogue == Epilogue::StoreAdd,
            self.dump,
            self.smem_bytes()
        );
        CpuKernel::build(&source, "gemm", "uw::GemmPackedArgs", edits)
    }
}

impl Config {
    fn run(
        &self,
        kernel: &mut CpuKernel,
        problem: &Problem,
        multiprocessors: usize,
        seed: u64,
    ) -> Result<Outcome, String> {
        problem.run(kernel, &self.setup(problem, multiprocessors, seed))
    }

    fn setup(&self, problem: &Problem, multiprocessors: usize, seed: u64) -> Setup {
        let grid = self.grid(problem.m, problem.n, problem.k, multiprocessors);
        let shared = if self.stream_k { 2 * grid * self.warpgroups } else { 0 };
        Setup {
            launch: Launch {
                grid: grid as u32,
                block: (128 * (self.warpgroups + 1)) as u32,
                smem_bytes: self.smem_bytes() as u32,
                // Blocks that wait for each other have to run at the same time, and those of a cluster do.
                cluster: if self.stream_k { grid as u32 } else { self.cluster as u32 },
                seed,
            },
            batch_tile: self.batch_tile,
            workspace_bytes: shared * TILE * self.batch_tile * 4,
            counters: shared,
            dump: self.dump,
        }
    }
}

/// Shapes are (m, n, k, multiprocessors).
fn check(config: Config, shapes: &[(usize, usize, usize, usize)]) {
    let mut kernel = config.build(&[]);
    for (i, &(m, n, k, multiprocessors)) in shapes.iter().enumerate() {
        let problem = Problem::random(config.epilogue, (m, n, k), 31 + i as u64);
        let outcome = config
            .run(&mut kernel, &problem, multiprocessors, i as u64)
            .unwrap_or_else(|e| panic!("{config:?} m={m} n={n} k={k} multiprocessors={multiprocessors}: {e}"));
        let bad = problem.mismatches(&outcome);
        assert_eq!(bad, 0, "{config:?} m={m} n={n} k={k} multiprocessors={multiprocessors}");
    }
}

#[test]
fn whole_tiles() {
    check(Config::new(64, 3, 2), &[(1, 128, 64, 8), (64, 64, 192, 8), (65, 192, 128, 2)]);
}

#[test]
fn batch_tile_128_stages_fewer_than_steps() {
    check(Config::new(128, 3, 2), &[(127, 128, 320, 4), (129, 64, 128, 1)]);
}

#[test]
fn batch_tile_256_one_warpgroup() {
    check(Config::new(256, 3, 1), &[(250, 64, 128, 4)]);
}

#[test]
fn batch_tile_of_three_boxes() {
    check(Config::new(96, 3, 3), &[(95, 192, 128, 4), (97, 256, 64, 4)]);
}

#[test]
fn shares_of_k() {
    // Several shares of one tile, shares with the end of one tile and the beginning of the next, whole tiles before them, and shares of a single step.
    check(
        Config::new(32, 3, 1).streaming(),
        &[(20, 64, 448, 3), (32, 192, 320, 5), (40, 256, 192, 3), (5, 64, 128, 8), (33, 192, 64, 4)],
    );
}

#[test]
fn shares_of_k_that_add() {
    check(Config::new(64, 3, 2).streaming().adding(), &[(64, 320, 256, 4), (70, 128, 128, 3)]);
}

#[test]
fn clusters_of_2() {
    check(Config::new(64, 3, 2).clustered(2), &[(1, 128, 128, 1), (65, 192, 448, 1)]);
    check(Config::new(128, 5, 1).clustered(2).adding(), &[(128, 64, 192, 1)]);
}

#[test]
fn clusters_of_4() {
    check(Config::new(64, 4, 2).clustered(4), &[(64, 128, 256, 1), (33, 192, 576, 1)]);
    check(Config::new(96, 4, 2).clustered(4).adding(), &[(97, 128, 448, 1)]);
}

#[test]
fn operands_are_the_weights() {
    let config = Config::new(64, 4, 2).dumping();
    let mut kernel = config.build(&[]);
    let problem = Problem::random(config.epilogue, (2, 192, 192), 5);
    let outcome = config.run(&mut kernel, &problem, 3, 3).unwrap();
    problem.assert_operands(&outcome);
}

#[test]
fn hostile_escapes_stay_in_bounds() {
    let config = Config::new(32, 3, 2);
    let mut kernel = config.build(&[]);
    let problem = Problem::random(config.epilogue, (3, 128, 128), 9);
    problem.survives_hostile_escapes(&mut kernel, &config.setup(&problem, 2, 1));
}

#[test]
fn planted_bugs_are_caught() {
    let streaming = Config::new(128, 3, 1).streaming();
    let clustered = Config::new(64, 3, 2).clustered(2);
    for (config, from, to) in [
        // The ring: a slot given back while it is read, sums read too early, a wrong byte count, another warp's weights.
        (streaming, "if (step != s.first) release(slots, p);", "release(slots, p);"),
        (streaming, "ptx::wgmma_wait_group<0>();", "ptx::wgmma_wait_group<4>();"),
        (streaming, "S::kXBytes + S::kWBytes);", "S::kXBytes);"),
        (streaming, "p.warp * packed::kBlockBytes", "0 * packed::kBlockBytes"),
        // Another row block's escapes.
        (streaming, "p.warp * kBlockRecordBytes", "0 * kBlockRecordBytes"),
        // Shares of k: a part left out, a flag left standing.
        (streaming, "first + j <= sharing.last_team", "first + j < sharing.last_team"),
        (streaming, "if (waits) ptx::reduce_add_global(flag, ~0u);", "if (waits) ptx::reduce_add_global(flag, 0);"),
        // The store: the wrong half of a fragment.
        (streaming, "p.warp * 2 + p.lane / 8 % 2", "p.warp * 2 + p.lane / 16"),
        // A cluster: sums written over X that another warpgroup reads, a peer's left out, steps taken twice.
        (clustered, "ptx::named_barrier_sync(4, Config::kWarpgroups * kWarpgroupThreads);", "sync_warpgroup(p);"),
        (clustered, "j + (j >= schedule.team)", "j"),
        (clustered, "team * steps / Config::kCluster", "0"),
    ] {
        let header = "unweight/kernels/gemm_wgmma.cuh";
        let mut kernel = config.build(&[Edit { header, from, to }]);
        let problem = Problem::random(config.epilogue, (128, 128, 320), 3);
        let caught = (1..=4).any(|seed| {
            // In turn: all tiles in one block, whose ring and buffers go round, and tiles shared by several blocks.
            let multiprocessors = if seed % 2 == 1 { 1 } else { 5 };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                config.run(&mut kernel, &problem, multiprocessors, seed)
            }));
            !matches!(outcome, Ok(Ok(outcome)) if problem.mismatches(&outcome) == 0)
        });
        assert!(caught, "planting `{to}` for `{from}` went unnoticed");
    }
}
