//! Tunes the pipelines of a geometry whose MLPs keep their stored encoding, as `unweight tune` does: by coordinate
//! descent over whole steps of all layers. Settings tuned on the first 8 of 32 layers lost 6 % of a step of all layers.

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

/// Rounds of a comparison. A gain counts if it exceeds three times its standard deviation over the rounds.
const ROUNDS: Rounds = Rounds { rounds: 3, steps: 4 };

/// The best setting that the search found for one batch size.
#[derive(Clone, Debug, Serialize)]
pub struct TunedRow {
    /// Sequences per step.
    pub batch: u32,
    /// Time saved against the initial guess, as a share of the guess's time.
    pub gain: f64,
    /// The number of comparisons of two settings.
    pub compared: u32,
    /// The setting that the search found.
    #[serde(flatten)]
    pub setting: Setting,
}

/// Searches for the best setting at every batch size. `options` are those of the engine whose steps will be timed.
/// Batch sizes without a choice of settings get no row.
///
/// # Errors
/// Fails if the engine does not fit in memory, or if a step of the search fails.
pub(crate) fn search(
    kernels: &KernelSet,
    config: &ModelConfig,
    (options, stored): (EngineOptions, RandomStored),
    (batches, context): (&[u32], u32),
    progress: &(dyn Fn(&str) + Sync),
) -> Result<Vec<TunedRow>, BenchError> {
    let ignore_progress = |_: &LoadProgress<'_>| {};
    let mut engine = Engine::random_stored(kernels, config.clone(), options.graphs(false), stored, &ignore_progress)?;
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
        let setting_names = space.space().names(&best).join(" ");
        progress(&format!("batch {batch}: {:.1} % faster after {measured} comparisons: {setting_names}", gain * 100.0));
        rows.push(TunedRow { batch, gain, compared: measured, setting: space.setting(&best) });
    }
    Ok(rows)
}
