//! Settings for the steps of a geometry whose MLPs stay as they are stored, found as `unweight tune` finds them: by
//! coordinate descent over whole steps, of all layers. What was best for the first eight of 32 lost 6 % of a step of
//! all of them.

use serde::Serialize;
use unweight_engine::{
    Engine, EngineOptions, LoadProgress,
    raw::{
        RandomStored,
        objective::{Rounds, StepObjective},
        options::Setting,
        pipelines::tune::{Journal, Limits, TuneError, Tuned, descend},
    },
};
use unweight_model::ModelConfig;
use unweight_rt::KernelSet;

use crate::BenchError;

/// Rounds of a comparison. Its gain counts where it exceeds three times its deviation in them.
const ROUNDS: Rounds = Rounds { rounds: 3, steps: 4 };

/// What a search found for the steps of a batch.
#[derive(Clone, Debug, Serialize)]
pub struct TunedRow {
    /// Sequences per step.
    pub batch: u32,
    /// What was gained over the best guess, as a share of its time.
    pub gain: f64,
    /// Comparisons of two settings.
    pub compared: u32,
    /// The setting that the search found.
    #[serde(flatten)]
    pub setting: Setting,
}

/// Searches at every batch; `own` says how the engine is loaded whose steps will be timed. Nothing for a batch that
/// leaves nothing to choose.
///
/// # Errors
/// No room for the engine, or what fails on the way.
pub(crate) fn search(
    kernels: &KernelSet,
    config: &ModelConfig,
    (own, stored): (EngineOptions, RandomStored),
    (batches, context): (&[u32], u32),
    progress: &(dyn Fn(&str) + Sync),
) -> Result<Vec<TunedRow>, BenchError> {
    let told = |_: &LoadProgress<'_>| {};
    let mut engine = Engine::random_stored(kernels, config.clone(), own.graphs(false), stored, &told)?;
    let folder = tempfile::tempdir().map_err(BenchError::Temporary)?;
    let mut rows = Vec::new();
    for &batch in batches {
        let space = engine.tune_pipelines()?.space(batch)?;
        if space.is_trivial() {
            continue;
        }
        let start = space.space().first();
        let path = folder.path().join(batch.to_string());
        let mut journal = Journal::open(&path, "", space.space(), &start).map_err(TuneError::from)?;
        let mut objective = StepObjective::new(&mut engine, &space, (batch, context), ROUNDS, &start, &|| false)?;
        let found = descend(space.space(), &start, &mut objective, &mut journal, &Limits::default(), &mut |_| {})?;
        let Tuned { best, gain, measured, .. } = found;
        let what = space.space().names(&best).join(" ");
        progress(&format!("batch {batch}: {measured} comparisons gain {:.1} %: {what}", gain * 100.0));
        rows.push(TunedRow { batch, gain, compared: measured, setting: space.setting(&best) });
    }
    Ok(rows)
}
