//! Metrics of the server, in the text format of Prometheus.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::Duration,
};

use unweight_engine::ExpertTraffic;

use super::backend::{Limits, Load};

/// Upper bounds of the buckets for the time to the first token, seconds.
const FIRST_TOKEN_BOUNDS: [f64; 13] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Upper bounds of the buckets for the duration of a step, which may include the prefill of a long prompt; seconds.
const STEP_BOUNDS: [f64; 15] =
    [0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];

/// A histogram of durations.
#[derive(Debug)]
pub(super) struct Histogram {
    bounds: &'static [f64],
    /// The number of durations per bucket: up to its bound, above the previous one. Longer durations count only in
    /// `count`.
    buckets: Vec<AtomicU64>,
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let buckets = bounds.iter().map(|_| AtomicU64::new(0)).collect();
        Self { bounds, buckets, count: AtomicU64::new(0), nanos: AtomicU64::new(0) }
    }

    /// Adds a duration.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        if let Some((_, bucket)) = self.bounds.iter().zip(&self.buckets).find(|(bound, _)| seconds <= **bound) {
            bucket.fetch_add(1, Relaxed);
        }
        self.count.fetch_add(1, Relaxed);
        self.nanos.fetch_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        head(out, name, help, "histogram");
        let mut sum = 0;
        for (bound, bucket) in self.bounds.iter().zip(&self.buckets) {
            sum += bucket.load(Relaxed);
            line(out, format_args!("{name}_bucket{{le=\"{bound}\"}} {sum}"));
        }
        // A concurrent update must not make a bucket exceed the total.
        let count = self.count.load(Relaxed).max(sum);
        line(out, format_args!("{name}_bucket{{le=\"+Inf\"}} {count}"));
        line(out, format_args!("{name}_sum {}", self.nanos.load(Relaxed) as f64 / 1e9));
        line(out, format_args!("{name}_count {count}"));
    }
}

/// Memory and work outside of the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Bytes that request bodies hold.
    pub body_bytes: u64,
    /// Bytes of large whole answers that clients have not read.
    pub answer_bytes: u64,
    /// Texts and grammars that wait for a text process.
    pub texts_waiting: u64,
}

/// All metrics of a server.
#[derive(Debug)]
pub(super) struct Metrics {
    /// The number of answers by route and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    running: AtomicU64,
    waiting: AtomicU64,
    free_pages: AtomicU64,
    free_units: AtomicU64,
    preempted: AtomicU64,
    shared_prompt_tokens: AtomicU64,
    drafted: AtomicU64,
    accepted: AtomicU64,
    /// `None` until experts are fetched from host memory.
    experts: Mutex<Option<ExpertTraffic>>,
    /// Tokens of accepted prompts.
    pub prompt_tokens: AtomicU64,
    /// Generated tokens.
    pub generated_tokens: AtomicU64,
    /// Sequences that ended because their client disconnected, or because no more tokens were needed.
    pub cancelled: AtomicU64,
    /// Time from the arrival of a request to the first token of each sequence.
    pub first_token: Histogram,
    /// Durations of engine steps.
    pub step: Histogram,
}

impl Metrics {
    pub fn new() -> Self {
        Self {
            requests: Mutex::default(),
            running: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            free_pages: AtomicU64::new(0),
            free_units: AtomicU64::new(0),
            preempted: AtomicU64::new(0),
            shared_prompt_tokens: AtomicU64::new(0),
            drafted: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            experts: Mutex::default(),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            first_token: Histogram::new(&FIRST_TOKEN_BOUNDS),
            step: Histogram::new(&STEP_BOUNDS),
        }
    }

    /// Counts an answer. The status of a stream is the one that it starts with.
    pub fn request(&self, route: &'static str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route, status)).or_default() += 1;
    }

    /// Stores the load of the engine.
    pub fn load(&self, load: Load) {
        // The order matters: a reader that sees no running sequence sees its pages free.
        self.free_pages.store(load.free_pages.into(), Release);
        self.free_units.store(load.free_units.into(), Release);
        self.preempted.store(load.preempted, Release);
        self.shared_prompt_tokens.store(load.shared_prompt_tokens, Release);
        self.drafted.store(load.drafts.drafted, Release);
        self.accepted.store(load.drafts.accepted, Release);
        *self.experts.lock().unwrap_or_else(PoisonError::into_inner) = load.experts;
        self.running.store(load.running as u64, Release);
        self.waiting.store(load.waiting as u64, Release);
    }

    /// Returns all metrics as text.
    pub fn text(&self, limits: &Limits, held: Held) -> String {
        let mut out = String::new();
        let name = "unweight_requests_total";
        head(&mut out, name, "Requests answered, by route and status.", "counter");
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for ((route, status), count) in requests {
            line(&mut out, format_args!("{name}{{route=\"{route}\",status=\"{status}\"}} {count}"));
        }
        let name = "unweight_kv_cache_info";
        head(&mut out, name, "How the KV cache is stored.", "gauge");
        line(&mut out, format_args!("{name}{{kv_cache=\"{}\"}} 1", limits.kv_cache.tag()));
        let (pages, units) = (u64::from(limits.pages), u64::from(limits.units));
        for (name, kind, help, value) in [
            ("sequences_running", "gauge", "Running sequences.", self.running.load(Acquire)),
            ("sequences_waiting", "gauge", "Waiting sequences.", self.waiting.load(Acquire)),
            ("texts_waiting", "gauge", "Texts and grammars that wait for a text process.", held.texts_waiting),
            ("body_bytes", "gauge", "Bytes held by request bodies.", held.body_bytes),
            ("answer_bytes", "gauge", "Bytes of large whole answers that clients have not read.", held.answer_bytes),
            ("kv_pages", "gauge", "Pages of the KV cache.", pages),
            ("kv_pages_free", "gauge", "Free pages of the KV cache.", self.free_pages.load(Acquire)),
            ("kv_units", "gauge", "BF16 units of a packed KV cache.", units),
            (
                "kv_units_free",
                "gauge",
                "Free BF16 units at the last change of running sequences.",
                self.free_units.load(Acquire),
            ),
            ("preempted_total", "counter", "Preemptions because the KV cache was full.", self.preempted.load(Acquire)),
            ("prompt_tokens_total", "counter", "Tokens of accepted prompts.", self.prompt_tokens.load(Relaxed)),
            (
                "prompt_tokens_shared_total",
                "counter",
                "Prompt tokens whose keys and values were in the prefix cache.",
                self.shared_prompt_tokens.load(Acquire),
            ),
            (
                "spec_decode_num_draft_tokens_total",
                "counter",
                "Drafted tokens that steps verified.",
                self.drafted.load(Acquire),
            ),
            (
                "spec_decode_num_accepted_tokens_total",
                "counter",
                "Drafted tokens that were accepted.",
                self.accepted.load(Acquire),
            ),
            ("generated_tokens_total", "counter", "Generated tokens.", self.generated_tokens.load(Relaxed)),
            ("cancelled_total", "counter", "Sequences cancelled before their end.", self.cancelled.load(Relaxed)),
        ] {
            let name = format!("unweight_{name}");
            head(&mut out, &name, help, kind);
            line(&mut out, format_args!("{name} {value}"));
        }
        let experts = *self.experts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(experts) = experts {
            write_experts(&mut out, &experts);
        }
        let help = "From the arrival of a request to the first token of each of its sequences.";
        self.first_token.write(&mut out, "unweight_time_to_first_token_seconds", help);
        self.step.write(&mut out, "unweight_step_seconds", "Steps of the engine, prefills included.");
        out
    }
}

/// Writes the counts of fetched experts.
fn write_experts(out: &mut String, experts: &ExpertTraffic) {
    for (name, help, value) in [
        ("hits", "Chosen experts that were on the GPU or on their way.", experts.hits as f64),
        ("misses", "Chosen experts that were fetched from host memory.", experts.misses as f64),
        ("prefetched", "Experts fetched before they were chosen.", experts.prefetched as f64),
        ("prefetch_hits", "Prefetched experts that were then chosen.", experts.prefetch_hits as f64),
        ("fetched_bytes", "Bytes of experts fetched from host memory.", experts.bytes as f64),
        ("stalls", "Times that products waited for experts.", experts.stalls as f64),
        ("stalled_seconds", "Duration of these waits.", experts.stalled_us / 1e6),
    ] {
        let name = format!("unweight_expert_{name}_total");
        head(out, &name, help, "counter");
        line(out, format_args!("{name} {value}"));
    }
}

fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    line(out, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{text}");
}

#[cfg(test)]
mod tests {
    use unweight_engine::{DraftCounts, KvCache};

    use super::*;

    #[test]
    fn kv_cache_is_described() {
        let metrics = Metrics::new();
        let mut drafts = DraftCounts::default();
        (drafts.drafted, drafts.accepted) = (70, 50);
        let mut experts = ExpertTraffic::default();
        (experts.hits, experts.misses, experts.bytes, experts.stalled_us) = (900, 40, 280_000_000, 1500.0);
        (experts.prefetched, experts.prefetch_hits, experts.stalls) = (20, 15, 30);
        let load = Load {
            running: 2,
            waiting: 1,
            free_pages: 30,
            free_units: 400,
            preempted: 5,
            shared_prompt_tokens: 128,
            drafts,
            experts: None,
        };
        metrics.load(load);
        let text = |kv_cache, units| {
            let (cache_tokens, cache_token_bytes, eos) = (6400, 98_721, Vec::new());
            let (max_batch, context, pages) = (4, 4096, 100);
            let limits =
                Limits { max_batch, context, pages, kv_cache, cache_tokens, cache_token_bytes, units, vocab: 9, eos };
            metrics.text(&limits, Held { body_bytes: 3072, answer_bytes: 2048, texts_waiting: 7 })
        };
        assert!(!text(KvCache::Packed, 512).contains("unweight_expert"), "all experts are on the GPU");
        metrics.load(Load { experts: Some(experts), ..load });
        let packed = text(KvCache::Packed, 512);
        for line in [
            "unweight_expert_hits_total 900",
            "unweight_expert_misses_total 40",
            "unweight_expert_prefetched_total 20",
            "unweight_expert_prefetch_hits_total 15",
            "unweight_expert_fetched_bytes_total 280000000",
            "unweight_expert_stalls_total 30",
            "unweight_expert_stalled_seconds_total 0.0015",
            "unweight_kv_cache_info{kv_cache=\"packed\"} 1",
            "unweight_body_bytes 3072",
            "unweight_answer_bytes 2048",
            "unweight_texts_waiting 7",
            "unweight_kv_pages 100",
            "unweight_kv_pages_free 30",
            "unweight_kv_units 512",
            "unweight_kv_units_free 400",
            "unweight_preempted_total 5",
            "unweight_prompt_tokens_shared_total 128",
            "unweight_spec_decode_num_draft_tokens_total 70",
            "unweight_spec_decode_num_accepted_tokens_total 50",
        ] {
            assert!(packed.lines().any(|found| found == line), "no {line} in {packed}");
        }
        assert!(text(KvCache::Bf16, 0).contains("\nunweight_kv_cache_info{kv_cache=\"bf16\"} 1\n"));
    }

    #[test]
    fn buckets_add_up() {
        let histogram = Histogram::new(&FIRST_TOKEN_BOUNDS);
        for millis in [1, 5, 6, 100, 90_000] {
            histogram.observe(Duration::from_millis(millis));
        }
        let mut text = String::new();
        histogram.write(&mut text, "t", "Help.");
        let of = |prefix: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(prefix)).unwrap_or_else(|| panic!("{prefix}"));
            line.trim().parse::<f64>().unwrap()
        };
        assert_eq!(of("t_bucket{le=\"0.005\"}"), 2.0, "a bound belongs to its bucket");
        assert_eq!((of("t_bucket{le=\"0.01\"}"), of("t_bucket{le=\"0.1\"}")), (3.0, 4.0));
        assert_eq!((of("t_bucket{le=\"60\"}"), of("t_bucket{le=\"+Inf\"}"), of("t_count")), (4.0, 5.0, 5.0));
        assert!((of("t_sum") - 90.112).abs() < 1e-9);
    }
}
