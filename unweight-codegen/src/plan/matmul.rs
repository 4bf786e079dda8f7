use super::{Grid, Infeasible, LaunchPlan, PipelinePlan, Plan, Role, RolePlan, SmemPlan, Work};
use crate::spec::{MatmulSpec, NTiles, Stages, VariantSpec, WeightSource};

const fn stage_bytes(op: &MatmulSpec, n: u32) -> u32 {
    let source = match op.source {
        WeightSource::Exponent => 4096,
        WeightSource::Palette { verbatim } => 2048 + 16 + 64 * verbatim.get(),
    };
    16384 + n * (4096 + source)
}
const fn fixed_bytes(n: u32) -> u32 {
    1024 + 2 * 8192 * n
}

pub(super) const fn plan(spec: &VariantSpec, op: &MatmulSpec) -> Result<Plan, Infeasible> {
    let limit = spec.arch.limits().smem_bytes_per_block;
    let (n, stages) = (op.n_tiles.get(), op.stages.get());
    let stage = stage_bytes(op, n);
    let fixed = fixed_bytes(n);
    if fixed + stages * stage > limit {
        let mut fitting_stages = None;
        let mut s = Stages::MIN.get();
        while s < stages {
            if let Ok(value) = Stages::new(s)
                && fixed + s * stage <= limit
            {
                fitting_stages = Some(value);
            }
            s += 1;
        }
        let mut fitting_n = None;
        let mut t = NTiles::MIN.get();
        while t < n {
            if let Ok(value) = NTiles::new(t)
                && fixed_bytes(t) + stages * stage_bytes(op, t) <= limit
            {
                fitting_n = Some(value);
            }
            t += 1;
        }
        return Err(Infeasible::SharedMemory {
            spec: *spec,
            fixed_bytes: fixed,
            stages,
            stage_bytes: stage,
            limit_bytes: limit,
            fitting_stages,
            fitting_n,
        });
    }
    let smem = SmemPlan::new().section("stages", stages, stage, 1024).section("rest", 1, fixed, 16);
    Ok(Plan {
        spec: *spec,
        smem,
        pipeline: Some(PipelinePlan { stages, stage_bytes: stage, full_arrivals: 1, empty_arrivals: 2 }),
        roles: RolePlan {
            first: Role { name: "load", warps: 4, registers: Some(40) },
            second: Some(Role { name: "compute", warps: 8, registers: Some(232) }),
        },
        launch: LaunchPlan {
            threads: 384,
            blocks_per_sm: 1,
            grid: Grid::Persistent {
                work: Work::OutputTiles { rows: 128, columns: 64 * n },
                per_block: 1,
                blocks_per_sm: 1,
            },
        },
    })
}
