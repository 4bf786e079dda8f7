//! Measures speculative decoding, by n-gram lookup or by a draft model, next to the same engine without drafts.
//!
//! The weights are random, so the text would be, too. At temperature 100, noise decides: a token depends on seed and
//! position and hardly on the text before. The tokens of a sequence are therefore known from an earlier run, and
//! prompts of the same length can repeat them as real texts do. A draft model samples with the same noise, so it is
//! right at this temperature, and wrong at temperature 0.

use std::{collections::BTreeMap, fmt, time::Instant};

use serde::Serialize;
use unweight_engine::{Engine, EngineError, EngineOptions, LoadProgress, Request, SampleParams, SeqId};
use unweight_format::testing::Random;
use unweight_model::Geometry;
use unweight_rt::{DeviceInfo, KernelSet};

use crate::BenchError;

/// The temperature at which noise decides.
const NOISE: f32 = 100.0;

/// How right drafts are: for n-gram lookup, by how much of the following text the prompt contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Text {
    /// All but every 16th token, as with an edited file.
    Edited,
    /// Every other run of 32 tokens, as with a summary that quotes.
    Quoted,
    /// Nothing.
    New,
    /// Pairs of tokens, each followed by a wrong third token: every draft is wrong.
    Misleading,
    /// New text on which a draft model agrees.
    Agreed,
    /// New text on which a draft model disagrees.
    Disagreed,
}

impl Text {
    const OF_LOOKUP: [Self; 4] = [Self::Edited, Self::Quoted, Self::New, Self::Misleading];
    const OF_MODEL: [Self; 2] = [Self::Agreed, Self::Disagreed];

    /// Returns a prompt as long as the text that follows.
    fn prompt(self, text: &[u32], random: &mut Random, vocab: u32) -> Vec<u32> {
        let keeps = |at: usize| match self {
            Self::Edited => at % 16 != 15,
            Self::Quoted => at % 64 < 32,
            Self::New | Self::Agreed | Self::Disagreed => false,
            Self::Misleading => at % 3 != 2,
        };
        let mut other = || random.below(vocab.into()) as u32;
        text.iter().enumerate().map(|(at, token)| if keeps(at) { *token } else { other() }).collect()
    }

    fn temperature(self) -> f32 {
        match self {
            Self::Disagreed => 0.0,
            _ => NOISE,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Edited => "edited",
            Self::Quoted => "quoted",
            Self::New => "new",
            Self::Misleading => "misleading",
            Self::Agreed => "agreed",
            Self::Disagreed => "disagreed",
        }
    }
}

/// Tokens per second with drafts and without, by batch and text.
#[derive(Clone, Debug, Serialize)]
pub struct SpeculateReport {
    device: DeviceInfo,
    /// Name of the draft model; `null` with n-gram lookup.
    draft_geometry: Option<&'static str>,
    /// Maximum drafted tokens per sequence and step.
    speculate: u32,
    /// Prompt tokens, and new tokens.
    tokens: u32,
    /// Rounds of each figure.
    rounds: usize,
    /// Rows by batch and text.
    rows: Vec<SpeculateRow>,
}

/// The result for one kind of text at one batch.
#[derive(Clone, Debug, Serialize)]
struct SpeculateRow {
    /// The number of sequences.
    batch: u32,
    /// How the prompt relates to the text.
    text: Text,
    /// Median tokens per second without drafts: all sequences together, after their first tokens.
    plain_tokens_per_s: f64,
    /// Median tokens per second with drafts.
    tokens_per_s: f64,
    /// Tokens per second with drafts over those without.
    speedup: f64,
    /// Drafted tokens of all rounds.
    drafted: u64,
    /// Accepted drafted tokens.
    accepted: u64,
    /// Tokens of one round that differ from those without drafts. Steps of other sizes round logits differently.
    other_tokens: usize,
}

/// Runs sequences to their ends. Returns their tokens and the tokens per second from the time when all of them run.
fn run(
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    new: u32,
    temperature: f32,
) -> Result<(Vec<Vec<u32>>, f64), EngineError> {
    let mut generated = BTreeMap::<SeqId, Vec<u32>>::new();
    for (prompt, seed) in prompts.iter().zip(1..) {
        let params = SampleParams::default().temperature(temperature).seed(seed);
        generated.insert(engine.add(Request::new(prompt.clone()).max_new_tokens(new).params(params))?, Vec::new());
    }
    let mut all_running: Option<(Instant, usize)> = None;
    while !engine.is_idle() {
        for event in engine.step()? {
            generated.entry(event.seq).or_default().push(event.token);
        }
        if engine.running() == prompts.len() && all_running.is_none() {
            all_running = Some((Instant::now(), generated.values().map(Vec::len).sum()));
        }
    }
    let total: usize = generated.values().map(Vec::len).sum();
    let rate = all_running.map_or(f64::NAN, |(start, before)| (total - before) as f64 / start.elapsed().as_secs_f64());
    Ok((generated.into_values().collect(), rate))
}

/// Measures sequences with and without drafts for each of `batches`: `tokens` new tokens after prompts of `tokens`
/// tokens. [`EngineOptions::speculate`] is the number of drafted tokens. The model `draft` drafts, or n-gram lookup.
///
/// # Errors
/// Fails if both engines do not fit in memory, or if a step fails.
pub fn bench_speculate(
    kernels: &KernelSet,
    (model, draft): (Geometry, Option<Geometry>),
    options: &EngineOptions,
    (batches, tokens, rounds): (&[u32], u32, usize),
    progress: &(dyn Fn(&str) + Sync),
) -> Result<SpeculateReport, BenchError> {
    let speculate = options.speculate;
    let largest = batches.iter().copied().max().unwrap_or(1);
    let load = |speculate: u32| {
        let options = options.clone().max_batch(largest).context(2 * tokens).prefix_cache(false).speculate(speculate);
        let compiled = |loaded: &LoadProgress<'_>| {
            if let LoadProgress::Kernel(kernel) = loaded {
                progress(&format!("[{}/{}] {}", kernel.done, kernel.total, kernel.artifact.name));
            }
        };
        let draft = draft.filter(|_| speculate > 0).map(Geometry::config);
        let engine = Engine::random(kernels, model.config(), draft, options, &compiled)?;
        progress(&format!("engine with up to {speculate} drafted tokens loaded: {}", engine.memory()));
        Ok::<_, EngineError>(engine)
    };
    let (mut plain, mut drafting) = (load(0)?, load(speculate)?);
    let (vocab, mut random, mut rows) = (model.config().vocab, Random::new(7), Vec::new());
    let kinds = if draft.is_some() { &Text::OF_MODEL[..] } else { &Text::OF_LOOKUP };
    for &batch in batches {
        let random_prompts: Vec<Vec<u32>> =
            (0..batch).map(|_| (0..tokens).map(|_| random.below(vocab.into()) as u32).collect()).collect();
        let (texts, _) = run(&mut plain, &random_prompts, tokens, NOISE)?;
        for &text in kinds {
            let prompts: Vec<Vec<u32>> =
                texts.iter().map(|following| text.prompt(following, &mut random, vocab)).collect();
            let before = drafting.draft_counts();
            let (mut rates, mut other_tokens) = ([Vec::new(), Vec::new()], 0);
            for round in 0..=rounds {
                let (expected, plain_rate) = run(&mut plain, &prompts, tokens, text.temperature())?;
                let (drafted_tokens, rate) = run(&mut drafting, &prompts, tokens, text.temperature())?;
                let pairs = drafted_tokens.iter().flatten().zip(expected.iter().flatten());
                other_tokens = pairs.filter(|(drafted, expected)| drafted != expected).count();
                // The first round warms up.
                if round > 0 {
                    rates[0].push(plain_rate);
                    rates[1].push(rate);
                }
            }
            let [plain_tokens_per_s, tokens_per_s] = rates.map(median);
            let after = drafting.draft_counts();
            let (drafted, accepted) = (after.drafted - before.drafted, after.accepted - before.accepted);
            let speedup = tokens_per_s / plain_tokens_per_s;
            let row = SpeculateRow {
                batch,
                text,
                plain_tokens_per_s,
                tokens_per_s,
                speedup,
                drafted,
                accepted,
                other_tokens,
            };
            progress(&format!("batch {batch}, {} text: {speedup:.2}x", text.name()));
            rows.push(row);
        }
    }
    let device = kernels.device().info().clone();
    Ok(SpeculateReport { device, draft_geometry: draft.map(Geometry::name), speculate, tokens, rounds, rows })
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints a Markdown table.
impl fmt::Display for SpeculateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device: DeviceInfo { name, driver, .. }, speculate, tokens, rounds, .. } = self;
        let drafter = self.draft_geometry.unwrap_or("n-gram lookup");
        writeln!(
            f,
            "{name}, CUDA {driver}; {tokens} new tokens after prompts of {tokens}, up to {speculate} drafted by {drafter}, median of {rounds} rounds\n\n\
             | batch | text | tokens/s without drafts | with drafts | speedup | accepted | other tokens |\n\
             |---|---|---|---|---|---|---|"
        )?;
        for row in &self.rows {
            let SpeculateRow {
                batch, plain_tokens_per_s, tokens_per_s, speedup, drafted, accepted, other_tokens, ..
            } = row;
            writeln!(
                f,
                "| {batch} | {} | {plain_tokens_per_s:.0} | {tokens_per_s:.0} | {speedup:.2} | {accepted} of {drafted} | \
                 {other_tokens} |",
                row.text.name()
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_repeat_the_text_as_documented() {
        let text: Vec<u32> = (1000..1128).collect();
        let mut random = Random::new(1);
        let kept = Text::OF_LOOKUP.map(|kind| {
            let prompt = kind.prompt(&text, &mut random, 1000);
            assert_eq!(prompt.len(), text.len());
            prompt.iter().zip(&text).filter(|(prompt, text)| prompt == text).count()
        });
        assert_eq!(kept, [120, 64, 0, 86]);
    }
}
