//! `unweight tune`.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use clap::Args;
use serde::Serialize;
use unweight::{
    engine::{
        Engine, EngineError, EngineOptions, Plan,
        raw::{
            objective::{Interrupted, Rounds, StepObjective},
            options::{BUCKETS, Measured, PipelineVariant, Setting},
            pipelines::{
                SettingSpace,
                tune::{
                    Claim, How, Journal, JournalError, Limits, Point, Progress, Subject, TuneError, Tuned, descend,
                },
                tuned,
            },
        },
    },
    format::{
        EncodingId, Placement,
        bundle::{self as format, ATTACHED_NAME, Bundle},
    },
    model::{ModelConfig, ModelWeights},
    rt::KernelSet,
};

use super::{
    common::{Gpu, Memory},
    failure::{ErrorReport, Failure, Result},
    output::{self, Console, Table},
    pipelines::{note_load, saved_plan},
    plot::{self, Drawing, Ratios},
    progress,
    trust::Trust,
};

/// Arguments of `tune`.
#[derive(Args)]
pub struct Tune {
    /// Bundle with Huffman-coded or palette MLPs (profiles inference, distribution, palette)
    bundle: PathBuf,
    /// Batch sizes: any of 1, 8, 16, 32, 64, 128, 192, 256, 512 and 1024; repeatable
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = batch, default_value = "1,64,256,512,1024")]
    batch: Vec<u32>,
    /// Tokens in the KV cache per sequence
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Placement of weights: stored or alternate
    #[arg(long, value_name = "PLACEMENT", default_value = "stored", value_parser = stored)]
    placement: Placement,
    /// Rounds per comparison
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(3..=99))]
    rounds: u32,
    /// Journal of measurements, FILE.N per batch size; a repeated run continues from it
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
    /// Save the settings in the bundle, for `generate`, `serve` and `unweight-bench decode` with this --placement
    #[arg(long)]
    save: bool,
    /// Plot the speedup by batch size to this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    memory: Memory,
    #[command(flatten)]
    gpu: Gpu,
    #[command(flatten)]
    trust: Trust,
}

/// The report of `tune`.
#[derive(Serialize)]
pub struct Report {
    /// `stored` or `alternate`.
    placement: Placement,
    /// Tokens in the KV cache per sequence.
    context: u32,
    /// One row per batch.
    rows: Vec<Row>,
    /// Batches whose KV cache does not fit.
    skipped: Vec<u32>,
    /// Whether the bundle now holds the plan.
    saved: bool,
    /// Plan that `--save` could not save.
    plan: Option<serde_json::Value>,
    /// Error that ended the search.
    error: Option<ErrorReport>,
    /// Duration.
    seconds: f64,
}

/// The results of all batches.
#[derive(Default)]
struct TuneResults {
    rows: Vec<Row>,
    plan: Plan,
    skipped: Vec<u32>,
    /// The first failure.
    failed: Option<Failure>,
}

/// The result for one batch size.
#[derive(Serialize)]
pub struct Row {
    /// Sequences per step.
    pub batch: u32,
    /// Median step before the search, us.
    pub start_us: f64,
    /// Median step after, us.
    pub step_us: f64,
    /// Share of time saved, from interleaved rounds.
    gain: f64,
    /// Tokens per second, all sequences.
    tokens_per_s: f64,
    /// Comparisons measured.
    measured: u32,
    /// Comparisons taken from the journal.
    replayed: u32,
    /// Settings that failed or gave wrong logits.
    rejected: u32,
    #[serde(flatten)]
    setting: Setting,
}

/// Measured steps of each setting in a round.
const STEPS: u32 = 4;

impl Tune {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let started = Instant::now();
        let bundle = Bundle::open(&self.bundle)?;
        self.check_has_choices(&bundle)?;
        let mut batches = self.batch.clone();
        batches.sort_unstable();
        batches.dedup();
        let claims = self.claim(&batches)?;
        let kernels = self.trust.kernels(self.gpu.device, Some(&bundle), console)?;
        let cancelled = progress::cancel_flag()?;
        let plan = saved_plan(&bundle, console);
        let mut options = EngineOptions::default()
            .max_batch(batches.last().copied().unwrap_or(1))
            .context(self.tokens())
            .chunk(256)
            .placement(self.placement)
            .graphs(false);
        options.memory = self.memory.bytes;
        let (model, info) = (bundle.manifest().manifest_digest.to_string(), kernels.device().info());
        // Fail before loading, which takes minutes, if a journal belongs to other measurements.
        let subjects = claims.into_iter().map(|(batch, claim)| {
            let key = self.journal_key(&model, &kernels, batch);
            claim.claim.check(&key).map_err(journal_failure)?;
            Ok((batch, claim, key))
        });
        let subjects = subjects.collect::<Result<Vec<_>>>()?;
        let mut engine = Engine::load(&kernels, &bundle, options, &|loaded| note_load(console, loaded))?;
        console.note(format_args!("loaded: {}", engine.memory()));
        // Write the header of every journal before the first measurement.
        let searches = subjects.into_iter().map(|(batch, claim, key)| {
            let from = plan.setting(batch, &tuned::key(&model, self.placement, batch, info));
            Ok((batch, search(&mut engine, (batch, claim, &key), from)?))
        });
        let searches = searches.collect::<Result<Vec<_>>>()?;
        let stop = || cancelled.load(Ordering::Relaxed);
        let mut batches_left = searches.len();
        let mut found = TuneResults::of(searches, |batch, search| {
            batches_left -= 1;
            let Some(row) = self.tune(&mut engine, (batch, search), batches_left, &stop, console)? else {
                return Ok(None);
            };
            let (of, found) = ((model.as_str(), self.placement), (row.step_us, row.gain));
            let measured = Measured::new(of, batch, info, row.setting.clone(), found);
            Ok(Some((row, measured)))
        })?;
        let mut saved = false;
        if self.save && !found.rows.is_empty() {
            match self.attach(&found.plan) {
                Ok(()) => saved = true,
                Err(failure) => found.fail(failure, console),
            }
        }
        if let Some(file) = &self.svg {
            match plot::save(file, &drawing(&found.rows)) {
                Ok(()) => console.note(format_args!("wrote {}", file.display())),
                Err(failure) => found.fail(failure, console),
            }
        }
        let unsaved_plan = (self.save && !saved && !found.rows.is_empty()).then(|| found.plan.text());
        let (report, failed) = found.report(self, saved, unsaved_plan.as_deref(), started.elapsed().as_secs_f64());
        console.result("tune", &report, |out| report.write(unsaved_plan.as_deref(), out))?;
        failed.map_or(Ok(()), |failure| Err(failure.reported()))
    }

    /// Returns the locked journals, after checking that all other output can be written, so that an hour of measuring
    /// is not lost to a wrong name.
    fn claim(&self, batches: &[u32]) -> Result<Vec<(u32, ClaimedJournal)>> {
        if self.save {
            let saved = format::may_attach_plan(&self.bundle)?;
            self.plan_to_extend(saved.as_deref(), batches.len())?;
        }
        plot::check_can_save(self.svg.as_deref())?;
        let claim = |batch: &u32| {
            let folder = match &self.journal {
                Some(_) => None,
                None => Some(
                    tempfile::tempdir().map_err(Failure::io("cannot create a temporary directory for measurements"))?,
                ),
            };
            let temporary = folder.as_ref().map(|folder| folder.path().join("journal"));
            let path = self.journal.as_deref().map(|file| journal_path(file, *batch)).or(temporary).unwrap_or_default();
            Ok((*batch, ClaimedJournal { claim: Claim::new(&path).map_err(journal_failure)?, folder }))
        };
        batches.iter().map(claim).collect()
    }

    /// Saves the settings in the bundle, merged with those that another `tune` may have saved meanwhile.
    fn attach(&self, found: &Plan) -> Result<()> {
        format::attach_plan(&self.bundle, |old| {
            let mut plan = self.plan_to_extend(old, found.settings().len())?;
            found.settings().iter().for_each(|measured| plan.insert(measured.clone()));
            Ok::<_, Failure>(plan.text())
        })?;
        Ok(())
    }

    /// Returns the saved plan, to add settings to. An unreadable plan is replaced, but not the plan of a newer program.
    fn plan_to_extend(&self, saved: Option<&str>, more: usize) -> Result<Plan> {
        Plan::to_add_to(saved, more).map_err(|error| {
            let message = format!("{}: {error}", self.bundle.join(ATTACHED_NAME).display());
            Failure::new(
                error.code(),
                message,
                "or remove the plan and the attached kernels with `unweight kernels detach`",
            )
        })
    }

    /// Returns the key that identifies the measurements of a journal.
    fn journal_key(&self, model: &str, kernels: &KernelSet, batch: u32) -> String {
        let model = format!("{model} {}", self.placement);
        let rounds = self.rounds();
        let how = How {
            rounds: (rounds.rounds, rounds.steps),
            memory: self.memory.bytes,
            table: &kernels.chooser().table().to_json(),
        };
        let subject = tuned::subject(kernels.device().info());
        Subject { model: &model, batch, context: self.context, how: Some(how), ..subject }.key()
    }

    /// Returns the number of tokens of a sequence after the last step of a round.
    fn tokens(&self) -> u32 {
        self.context.saturating_add(STEPS + 1)
    }

    /// Rejects a bundle whose MLPs have only one pipeline each, and sequences beyond the model's limit, before anything
    /// is loaded.
    fn check_has_choices(&self, bundle: &Bundle) -> Result<()> {
        let config = ModelConfig::of_bundle(bundle).map_err(Failure::other)?;
        let names = ModelWeights::of_bundle(&config, bundle).map_err(Failure::other)?;
        if config.mixture.is_some() {
            return Err(Failure::new(
                "experts-without-pipelines",
                "nothing to tune: the MLPs of this bundle are experts, which run only from packed or BF16 weights",
                "`generate` and `serve` run this bundle without a plan",
            ));
        }
        let max_positions = config.max_positions;
        if self.tokens() > max_positions {
            let message = format!(
                "--context {} and the {} tokens of the measurement exceed the model's limit of {max_positions} tokens",
                self.context,
                STEPS + 1
            );
            return Err(Failure::new(
                "context-above-model-limit",
                message,
                format!("use --context {} or less", max_positions.saturating_sub(STEPS + 1)),
            ));
        }
        for layer in &names.layers {
            let Some(mlp) = layer.mlp.dense() else { continue };
            for name in [&mlp.gate, &mlp.up, &mlp.down] {
                if matches!(bundle.tensor(name)?.encoding(), EncodingId::HUFFMAN | EncodingId::PALETTE) {
                    return Ok(());
                }
            }
        }
        Err(nothing_to_choose())
    }

    fn rounds(&self) -> Rounds {
        Rounds { rounds: self.rounds, steps: STEPS }
    }

    /// Tunes one batch size; returns `None` if the memory does not hold so many sequences.
    fn tune(
        &self,
        engine: &mut Engine,
        (batch, search): (u32, Search),
        batches_left: usize,
        stop: &dyn Fn() -> bool,
        console: Console,
    ) -> Result<Option<Row>> {
        let Search { space, start, mut journal, _folder } = search;
        let mut objective = match StepObjective::new(engine, &space, (batch, self.context), self.rounds(), &start, stop)
        {
            Err(EngineError::AdmissionError(why)) => {
                console.note(format_args!("batch {batch} is skipped: {why}"));
                return Ok(None);
            }
            objective => objective?,
        };
        let mut printer = ProgressPrinter::new(batch, batches_left, console);
        let tuned = descend(space.space(), &start, &mut objective, &mut journal, &Limits::default(), &mut |progress| {
            printer.print(&progress, &space.space().names(progress.incumbent).join(" "));
        });
        let tuned = tuned.map_err(|error| search_failure(error, self.journal.as_deref()))?;
        let (start_us, step_us) = (objective.step_us(&start)?, objective.step_us(&tuned.best)?);
        let Tuned { best, gain, measured, replayed, rejected, .. } = tuned;
        Ok(Some(Row {
            batch,
            start_us,
            step_us,
            gain,
            tokens_per_s: f64::from(batch) / step_us * 1e6,
            measured,
            replayed,
            rejected,
            setting: space.setting(&best),
        }))
    }
}

/// A locked journal, before the model is loaded.
struct ClaimedJournal {
    claim: Claim,
    /// The directory of the journal if `--journal` is not given.
    folder: Option<tempfile::TempDir>,
}

/// The search for one batch size, before it starts.
struct Search {
    space: SettingSpace,
    start: Point,
    journal: Journal,
    /// Keeps the directory of [`ClaimedJournal`].
    _folder: Option<tempfile::TempDir>,
}

/// Prepares the search for a batch size, with a journal of this key.
fn search(
    engine: &mut Engine,
    (batch, claimed, key): (u32, ClaimedJournal, &str),
    from: Option<&Setting>,
) -> Result<Search> {
    let space = engine.tune_pipelines()?.space(batch)?;
    if space.is_trivial() {
        return Err(nothing_to_choose());
    }
    let start = from.map_or_else(|| space.space().first(), |setting| space.point(setting));
    let journal = claimed.claim.begin(key, space.space(), &start).map_err(journal_failure)?;
    // `from` may be a setting that this search saved earlier. The journal has the original start.
    let start = journal.start().clone();
    Ok(Search { space, start, journal, _folder: claimed.folder })
}

/// Returns `FILE.64`.
fn journal_path(file: &Path, batch: u32) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{batch}"));
    name.into()
}

fn search_failure(error: TuneError, journal: Option<&Path>) -> Failure {
    match error {
        TuneError::Objective(error) if error.0.downcast_ref::<Interrupted>().is_some() => {
            Failure::interrupted(match journal {
                Some(_) => "interrupted; the same command continues from its journal",
                None => "interrupted; a run with --journal FILE can be continued",
            })
        }
        TuneError::Journal(error) => journal_failure(error),
        error => Failure::other(error),
    }
}

fn journal_failure(error: JournalError) -> Failure {
    match error {
        JournalError::Io { path, source } => Failure::io(path.display())(source),
        error => Failure::other(error),
    }
}

fn nothing_to_choose() -> Failure {
    Failure::new(
        "nothing-to-tune",
        "nothing to tune: no MLP weight of this bundle is Huffman-coded or a palette",
        "compress the model with --profile inference or distribution; packed weights are fastest as they are",
    )
}

/// Parses a batch size that steps are recorded for.
fn batch(text: &str) -> std::result::Result<u32, String> {
    let allowed = || BUCKETS.map(|batch| batch.to_string()).join(", ");
    match text.parse() {
        Ok(batch) if BUCKETS.contains(&batch) => Ok(batch),
        _ => Err(format!("'{text}' is not a supported batch size; choose from {}", allowed())),
    }
}

/// Parses a placement whose MLPs run through pipelines.
fn stored(text: &str) -> std::result::Result<Placement, String> {
    match text.parse() {
        Ok(placement) if Placement::has_pipelines(placement) => Ok(placement),
        _ => Err(format!("'{text}' is neither stored nor alternate")),
    }
}

/// Draws the speedup of the tuned step over the step at the start of the search, by batch size.
fn drawing(rows: &[Row]) -> Drawing<'static> {
    let line = rows.iter().map(|row| (row.batch, row.start_us / row.step_us)).collect();
    Drawing::Ratios(Ratios {
        caption: "Decode step: speedup of the tuned pipelines",
        x_name: "batch",
        ratio_name: "speedup",
        lines: vec![("tuned".to_owned(), line)],
    })
}

/// Prints progress during a search.
struct ProgressPrinter {
    batch: u32,
    /// The number of batches that follow.
    batches_left: usize,
    console: Console,
    started: Instant,
    measured: u32,
    last_printed: Option<Instant>,
}

impl ProgressPrinter {
    fn new(batch: u32, batches_left: usize, console: Console) -> Self {
        Self { batch, batches_left, console, started: Instant::now(), measured: 0, last_printed: None }
    }

    fn print(&mut self, progress: &Progress<'_>, best: &str) {
        let Progress { compared, expected, measured, .. } = *progress;
        self.measured += u32::from(measured);
        if self.last_printed.is_some_and(|last| last.elapsed() < Duration::from_secs(2)) {
            return;
        }
        self.last_printed = Some(Instant::now());
        let seconds = remaining_seconds(self.started.elapsed(), self.measured, expected.saturating_sub(compared));
        let remaining =
            seconds.map_or_else(String::new, |seconds| format!("; about {} left", output::seconds(seconds)));
        let batches_left = match self.batches_left {
            0 => String::new(),
            1 => ", then one more batch".to_owned(),
            batches_left => format!(", then {batches_left} more batches"),
        };
        let batch = self.batch;
        let line =
            format!("batch {batch}: {compared} of {expected} comparisons{remaining}{batches_left}; best: {best}");
        self.console.note(line);
    }
}

/// Estimates the seconds for `more` comparisons from those that were measured.
fn remaining_seconds(elapsed: Duration, measured: u32, more: u32) -> Option<f64> {
    (measured > 0).then(|| elapsed.as_secs_f64() / f64::from(measured) * f64::from(more))
}

impl TuneResults {
    /// Tunes one batch after the other until one fails. The results of earlier batches are still saved and reported.
    fn of<S>(searches: Vec<(u32, S)>, mut tune: impl FnMut(u32, S) -> Result<Option<(Row, Measured)>>) -> Result<Self> {
        let mut found = Self::default();
        for (batch, search) in searches {
            match tune(batch, search) {
                Ok(Some((row, measured))) => {
                    found.plan.insert(measured);
                    found.rows.push(row);
                }
                Ok(None) => found.skipped.push(batch),
                Err(failure) if found.rows.is_empty() => return Err(failure),
                Err(failure) => {
                    found.failed = Some(failure);
                    break;
                }
            }
        }
        if found.rows.is_empty() {
            let message = "no batch was tuned: none of them fits in the memory";
            let help = "give smaller batches with --batch, or more memory with --memory";
            found.failed = Some(Failure::new("engine-memory-insufficient", message, help));
        }
        Ok(found)
    }

    /// Keeps the first failure as the command's result, and prints later ones.
    fn fail(&mut self, failure: Failure, console: Console) {
        match self.failed {
            None => self.failed = Some(failure),
            Some(_) => console.note(format_args!("also failed: {failure}")),
        }
    }

    fn report(self, of: &Tune, saved: bool, unsaved_plan: Option<&str>, seconds: f64) -> (Report, Option<Failure>) {
        let Self { rows, skipped, failed, .. } = self;
        let plan = unsaved_plan.and_then(|text| serde_json::from_str(text).ok());
        let error = failed.as_ref().map(Failure::report);
        (Report { placement: of.placement, context: of.context, rows, skipped, saved, plan, error, seconds }, failed)
    }
}

impl Report {
    /// `unsaved_plan` is the text of a plan that could not be saved.
    fn write(&self, unsaved_plan: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
        let headings =
            [">batch", ">start us", ">step us", ">gain", ">tokens/s", "hard", "easy", ">decode SMs", ">streams"];
        let mut table = Table::new(&headings);
        let names = |variants: &[PipelineVariant; 3]| variants.each_ref().map(ToString::to_string).join(" ");
        for row in &self.rows {
            table.row([
                row.batch.to_string(),
                format!("{:.0}", row.start_us),
                format!("{:.0}", row.step_us),
                format!("{:.1} %", row.gain * 100.0),
                format!("{:.0}", row.tokens_per_s),
                names(&row.setting.hard),
                names(&row.setting.easy),
                row.setting.decode_sms.to_string(),
                row.setting.consumers.to_string(),
            ]);
        }
        table.write(out)?;
        if let Some(plan) = unsaved_plan {
            write!(out, "\nthe plan, which could not be saved:\n{plan}")?;
        }
        if self.saved {
            writeln!(out, "\nsaved next to the bundle: --placement {} uses it", self.placement)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn batches_are_recorded_graph_sizes() {
        assert_eq!(batch("64"), Ok(64));
        for text in ["3", "0", "x", "2048", "-1"] {
            assert!(batch(text).unwrap_err().contains("1, 8, 16"), "{text}");
        }
    }

    fn row(batch: u32, setting: Setting) -> Row {
        Row {
            batch,
            start_us: 2.0,
            step_us: 1.0,
            gain: 0.5,
            tokens_per_s: 1e6,
            measured: 3,
            replayed: 0,
            rejected: 0,
            setting,
        }
    }

    #[test]
    fn settings_are_printed_by_name() {
        let variants = |names: [&str; 3]| names.map(|variant| variant.parse().unwrap());
        let (hard, easy) = (variants(["raw", "exponents/n2p4", "palette/n1p6s2"]), variants(["raw"; 3]));
        let json = serde_json::to_string(&row(64, Setting { hard, easy, decode_sms: 22, consumers: 2 })).unwrap();
        let hard = r#""hard":["raw","exponents/n2p4","palette/n1p6s2"]"#;
        let rest = r#""easy":["raw","raw","raw"],"decode_sms":22,"consumers":2}"#;
        assert!(json.ends_with(&format!("{hard},{rest}")), "{json}");
    }

    #[test]
    fn journal_on_a_full_disk_names_the_next_step() {
        let source = io::ErrorKind::StorageFull.into();
        let error = JournalError::Io { path: "some/journal.1".into(), source };
        let text = serde_json::to_string(&search_failure(error.into(), None).report()).unwrap();
        assert!(text.contains(r#""message":"some/journal.1""#) && text.contains("free some space"), "{text}");
    }

    /// The second of four batches does not fit in memory, the third fails, and the fourth is not started.
    #[test]
    fn failed_batch_is_reported_with_the_others() {
        let variants: [PipelineVariant; 3] = ["raw"; 3].map(|variant| variant.parse().unwrap());
        let setting = Setting { hard: variants, easy: variants, decode_sms: 22, consumers: 2 };
        let found = |last: u32| {
            TuneResults::of(vec![(1, ()), (64, ()), (256, ()), (512, ())], |batch, ()| match batch {
                64 => Ok(None),
                batch if batch == last => {
                    Err(Failure::new("engine-failed", "the device is lost", "look at its cables"))
                }
                batch => {
                    let (key, basis, device) = ("0".repeat(32), "0".repeat(32), "a card".to_owned());
                    let setting = setting.clone();
                    let measured = Measured { batch, key, device, basis, setting, step_us: 1.0, gain: 0.5 };
                    Ok(Some((row(batch, measured.setting.clone()), measured)))
                }
            })
        };
        let arguments = Tune::augment_args(clap::Command::new("tune")).get_matches_from(["tune", "b"]);
        let tune = Tune::from_arg_matches(&arguments).unwrap();
        let report = |found: TuneResults| {
            let (report, failed) = found.report(&tune, false, None, 1.0);
            (serde_json::to_value(report).unwrap(), failed)
        };
        let (json, failed) = report(found(256).unwrap());
        assert_eq!((json["rows"].as_array().unwrap().len(), &json["skipped"][0]), (1, &64.into()));
        assert_eq!((&json["rows"][0]["batch"], json["rows"][0]["gain"].as_f64()), (&1.into(), Some(0.5)));
        let error = ["class", "message", "help"].map(|key| json["error"][key].as_str().unwrap());
        assert_eq!(error, ["failed", "the device is lost", "look at its cables"]);
        assert_eq!(failed.unwrap().to_string(), "the device is lost");
        // Without a failure, all batches have rows; a failure of the first batch is returned.
        let (json, failed) = report(found(0).unwrap());
        assert!(json["error"].is_null() && failed.is_none() && json["rows"].as_array().unwrap().len() == 3);
        assert_eq!(found(1).err().unwrap().to_string(), "the device is lost");
        let none = TuneResults::of(vec![(1, ())], |_, ()| Ok(None)).unwrap();
        assert!(report(none).0["error"]["message"].as_str().unwrap().contains("none of them fits"));
        // A later failure does not hide the first one.
        let mut both = found(256).unwrap();
        both.fail(Failure::new("disk-full", "no room", "make room"), Console { json: true, quiet: true, verbose: 0 });
        assert_eq!(report(both).0["error"]["message"], "the device is lost");
        // The documentation lists every key.
        let (_, section) = include_str!("../../docs/reference/json.md").split_once("\n### tune\n").unwrap();
        let (section, _) = section.split_once("\n### ").unwrap();
        for key in json.as_object().unwrap().keys().chain(json["rows"][0].as_object().unwrap().keys()) {
            let known = [format!("`{key}`"), format!("`{key}[]`"), format!("`rows[].{key}`")];
            assert!(key == "rows" || known.iter().any(|known| section.contains(known)), "{key} is not in json.md");
        }
    }

    #[test]
    fn remaining_time_follows_measurements() {
        assert_eq!(remaining_seconds(Duration::from_secs(10), 5, 20), Some(40.0));
        assert_eq!(remaining_seconds(Duration::from_secs(10), 0, 20), None);
        assert_eq!(journal_path(Path::new("a/j"), 64), Path::new("a/j.64"));
    }
}
