//! The device memory of an engine, computed to the byte before anything is allocated. An engine allocates nothing after
//! loading.

use std::{fmt, path::Path};

use unweight_format::Role;
use unweight_model::{Activation, Mixture, ModelConfig};
use unweight_rt::{
    ContextSize, Expand, LoadOptions,
    experts::ExpertsShape,
    raw::{
        choose::{
            policy::PackedChooser,
            route::{RoutePolicy, Weight},
        },
        layer::linear,
        ops::{
            kv_packed::PackedShape,
            logprobs::ROW_WORDS,
            sample::{AdjustRow, SampleRow, TokenState},
        },
    },
};

use crate::{
    attention,
    error::{NoHostMemory, NoMemory},
    options::{EngineOptions, KvCache, Placement},
    pages::{PAGE_TOKENS, pages_for, sequence_pages},
};

/// Bytes of a bf16, and of an id.
const BF16: u64 = 2;
const ID: u64 = 4;
/// Bytes of the state of a token for adjusted logits.
const TOKEN_STATE: u64 = size_of::<TokenState>() as u64;
/// Words that sampling needs per row: parameters, adjustments and log probabilities.
const SAMPLING_WORDS: u64 = (size_of::<SampleRow>() + size_of::<AdjustRow>()) as u64 / ID + 1 + ROW_WORDS as u64;

/// The device memory of an engine by purpose, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Bytes of the weights, as they are placed on the device.
    pub weights: u64,
    /// Bytes of the KV cache.
    pub cache: u64,
    /// Bytes of activations, rotary tables and memory that kernels share, including `slot`.
    pub working: u64,
    /// Bytes of the buffer that weights are expanded into before their product; 0 if no weight is. Part of `working`.
    pub slot: u64,
    /// How the pages of the KV cache are stored.
    pub kv_cache: KvCache,
    /// Number of pages of the KV cache, 64 tokens each. In a packed cache each row has a hot page in addition.
    pub pages: u32,
    /// Number of hot pages of a packed KV cache, BF16, one per row of a step; 0 otherwise.
    pub hot_pages: u32,
    /// Number of BF16 units of a packed KV cache, for keys or values of a head in a page that cannot be packed.
    pub units: u32,
    /// Bytes of the KV cache per token of its pages.
    pub token: u64,
    /// Maximum number of tokens of one sequence, the prompt included.
    pub context: u32,
    /// Bytes of pinned host memory for experts that the device does not hold; 0 if it holds all.
    pub host: u64,
    /// Bytes of `host` that are compact; the rest is packed or BF16.
    #[doc(hidden)]
    pub host_compact: u64,
    /// Bytes of a draft model on the device: weights, KV cache and working memory; 0 without one.
    pub draft: u64,
}

impl Memory {
    /// Bytes of weights, KV cache, working memory and draft model together.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.working).saturating_add(self.draft)
    }

    /// Number of tokens that the KV cache holds, over all sequences, hot pages included.
    pub fn tokens(&self) -> u64 {
        (u64::from(self.pages) + u64::from(self.hot_pages)) * u64::from(PAGE_TOKENS)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let (weights, cache, working) = (gb(self.weights), gb(self.cache), gb(self.working));
        write!(
            f,
            "weights {weights:.2} GB, {} KV cache {cache:.2} GB ({} tokens of {} B), working memory {working:.2} GB",
            if self.kv_cache == KvCache::Packed { "packed" } else { "BF16" },
            self.tokens(),
            self.token
        )?;
        if self.slot > 0 {
            write!(f, ", including an expansion slot of {:.2} GB", gb(self.slot))?;
        }
        if self.draft > 0 {
            write!(f, ", draft model {:.2} GB", gb(self.draft))?;
        }
        match self.host {
            0 => Ok(()),
            host if host == self.host_compact => write!(f, "; {:.2} GB of compact experts in host memory", gb(host)),
            host => {
                let compact = gb(self.host_compact);
                write!(f, "; {:.2} GB of experts in host memory, {compact:.2} GB of them compact", gb(host))
            }
        }
    }
}

/// Checks that the host has `need` bytes left for pinned buffers. Linux would not fail such an allocation; it would
/// kill processes.
///
/// # Errors
/// [`NoHostMemory`] if fewer bytes are available.
pub fn check_host(need: u64) -> Result<(), NoHostMemory> {
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let cgroup_left = cgroup_bytes(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup"));
    match host_bytes(&read("/proc/meminfo"), cgroup_left) {
        Some(have) if have < need => Err(NoHostMemory { need, have }),
        _ => Ok(()),
    }
}

/// Returns the bytes that a process can still allocate: the smaller of `MemAvailable` and what its control groups
/// leave. `None` if neither is known.
fn host_bytes(meminfo: &str, cgroup_left: Option<u64>) -> Option<u64> {
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    [kib.map(|kib| kib.saturating_mul(1024)), cgroup_left].into_iter().flatten().min()
}

/// A version of control groups: the files with its limit and its usage, and the keys of `memory.stat` for reclaimable
/// file pages, child groups included.
struct CgroupVersion {
    limit_file: &'static str,
    usage_file: &'static str,
    cached_keys: [&'static str; 2],
}

const V1: CgroupVersion = CgroupVersion {
    limit_file: "memory.limit_in_bytes",
    usage_file: "memory.usage_in_bytes",
    cached_keys: ["total_inactive_file", "total_active_file"],
};
const V2: CgroupVersion = CgroupVersion {
    limit_file: "memory.max",
    usage_file: "memory.current",
    cached_keys: ["inactive_file", "active_file"],
};

impl CgroupVersion {
    /// Returns the bytes that the group of this directory leaves; `None` if it has no limit.
    fn available(&self, group: &Path) -> Option<u64> {
        let read = |file: &str| std::fs::read_to_string(group.join(file)).ok();
        let number = |text: &str| text.trim().parse::<u64>().ok();
        // Without a limit, the file contains `max` or a number above all memory.
        let limit = number(&read(self.limit_file)?)?;
        let used = read(self.usage_file).and_then(|text| number(&text)).unwrap_or(0);
        let stat = read("memory.stat").unwrap_or_default();
        let cached = stat.lines().filter_map(|line| line.split_once(' '));
        let cached = cached.filter(|(name, _)| self.cached_keys.contains(name)).filter_map(|(_, bytes)| number(bytes));
        Some(limit.saturating_sub(used.saturating_sub(cached.fold(0, u64::saturating_add))))
    }
}

/// Returns the fewest bytes that a control group of this process, or an ancestor of one, leaves. Reads both versions,
/// and the root, which in a container is the container's own group. `groups` is the content of `/proc/self/cgroup`.
fn cgroup_bytes(root: &Path, groups: &str) -> Option<u64> {
    // A line is `0::/a/b` for version 2 and `7:cpu,memory:/a/b` for version 1.
    let of = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let (home, version) = match controllers {
            "" => (root.to_owned(), V2),
            _ if controllers.split(',').any(|controller| controller == "memory") => (root.join("memory"), V1),
            _ => return None,
        };
        // A container that sees only its own group finds it at the root, whatever the path is.
        let groups = Path::new(group.trim_start_matches('/')).ancestors().map(|group| home.join(group));
        groups.filter_map(|group| version.available(&group)).min()
    };
    // The root is read even if no line names a group.
    groups.lines().chain(["0::/"]).filter_map(of).min()
}

/// The default limit of an engine's device memory: nine tenths of the `free` bytes.
pub fn usual_share(free: u64) -> u64 {
    free / 10 * 9
}

/// The free device memory, in bytes, of which [`usual_share`] is at least `bytes`.
pub fn free_for(bytes: u64) -> u64 {
    bytes.div_ceil(9).saturating_mul(10)
}

/// The maximum number of rows of the activations: of a chunk of a prompt and a step in one pass, or of a step that
/// verifies drafts.
pub fn rows(options: &EngineOptions) -> u32 {
    (options.chunk + options.max_batch).max(options.step_rows())
}

/// The number of rows of the logits buffer: of a step, and at least 64 for [`Engine::logits`](crate::Engine::logits).
pub fn logit_rows(options: &EngineOptions) -> u32 {
    options.step_rows().max(64)
}

/// The maximum number of running sequences with adjusted logits or constraints: each needs a state and a bit of a mask
/// for every token of the vocabulary.
pub(crate) fn adjusted_rows(options: &EngineOptions) -> u32 {
    options.max_batch.min(64)
}

/// Returns the options that linear layers are loaded with.
pub(crate) fn load_options(options: &EngineOptions) -> LoadOptions {
    LoadOptions::default().max_batch(rows(options)).placement(options.placement.unwrap_or_default())
}

/// Returns the size of the execution context that the linear layers of a model need, before any of them is loaded.
/// Weights are compact if `compact` is true for their role; merged weights have the role of their first tensor
/// (queries, gate). This is the [`ExecContext::size`](unweight_rt::ExecContext::size) after loading, provided that the
/// weights can have the requested encodings and have escapes.
pub fn context_size(
    config: &ModelConfig,
    options: &EngineOptions,
    chooser: &PackedChooser,
    compact: impl Fn(Role) -> bool,
) -> ContextSize {
    let policy = load_options(options).wanted(chooser.clone(), 0);
    let (hidden, intermediate) = (config.hidden, config.dense_intermediate());
    let attention = config.heads * config.head_dim;
    let of = |role, weight: Weight| linear::context_size_of(&weight.all_compact(compact(role)), &policy);
    let merged = |role, n, k| of(role, Weight::merged(n, k, false));
    let mut mlp = ContextSize::default();
    if let (Some(mixture), Some(shape)) = (config.mixture, experts_shape(config)) {
        let experts = shape.context_size(rows(options), mixture.places());
        mlp = mlp.max(merged(Role::Router, mixture.router_rows(), hidden)).max(experts);
    }
    if intermediate > 0 {
        let gated = config.act == Activation::Silu && intermediate.is_multiple_of(32) && hidden.is_multiple_of(64);
        let both = of(Role::Gate, Weight::merged(2 * intermediate, hidden, gated));
        mlp = mlp.max(both).max(merged(Role::Down, hidden, intermediate));
    }
    // The head is loaded without cuBLAS, and packed if ids are looked up in it.
    let placement = if config.tied { policy.placement.lookup() } else { policy.placement };
    let head_policy = RoutePolicy { expand: Expand::Never, placement, ..policy.clone() };
    let head = linear::context_size_of(
        &Weight::merged(config.vocab, hidden, false).all_compact(compact(Role::LmHead)),
        &head_policy,
    );
    merged(Role::Q, config.qkv_rows(), hidden).max(merged(Role::O, hidden, attention)).max(mlp).max(head)
}

/// Bytes of the memory that an engine's kernels share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// All bytes, including `expansion_bytes`.
    pub bytes: u64,
    /// Bytes of the buffer that weights are expanded into before their product.
    pub expansion_bytes: u64,
}

impl Shared {
    /// Returns what an engine's kernels share, before the engine exists: as much as it will report, or more. For MLPs
    /// in their stored encodings, the slots of their step graphs are not included.
    pub fn planned(config: &ModelConfig, options: &EngineOptions, ctx: ContextSize) -> Self {
        let expansion_bytes = ctx.slot_bytes;
        if !options.placement.unwrap_or_default().has_pipelines() {
            return Self { bytes: ctx.bytes(), expansion_bytes };
        }
        // The second stream that multiplies has an execution context, too.
        let contexts = ctx.with_cublas().bytes().saturating_mul(2);
        let products = Products::Stored.bytes(config.dense_intermediate(), rows(options));
        Self { bytes: contexts.saturating_add(products), expansion_bytes }
    }
}

/// The sizes of the experts of a mixture model, the parts of a shared expert included; `None` for a dense model.
pub fn experts_shape(config: &ModelConfig) -> Option<ExpertsShape> {
    let experts = config.mixture.map(Mixture::all_experts)?;
    Some(ExpertsShape { experts, hidden: config.hidden, intermediate: config.intermediate })
}

/// How an engine multiplies with the gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// One product with the activation in its epilogue.
    Activated,
    /// One product, and a separate kernel for the activation.
    SeparateActivation,
    /// Two products, for MLPs that are kept in their stored encodings.
    Stored,
}

impl Products {
    /// Bytes of the activations that these products need in addition, for `rows` rows.
    pub fn bytes(self, intermediate: u32, rows: u32) -> u64 {
        if self == Self::Stored { u64::from(intermediate) * u64::from(rows) * BF16 } else { 0 }
    }
}

/// Tokens of one sequence that must fit next to packed weights if no context is requested.
const DEFAULT_CONTEXT: u32 = 8192;

/// Chooses the placement of a model with compact tensors if the options name none: [`Placement::Packed`], which is
/// faster, if the packed weights (`packed` bytes), the working memory and one sequence fit in `have` bytes; else
/// [`Placement::Compact`]. The sequence is as long as the context of the options, by default 8192 tokens or the model's
/// limit.
pub fn placement(config: &ModelConfig, options: &EngineOptions, packed: u64, have: u64) -> Placement {
    let context = options.context.unwrap_or(config.max_positions.min(DEFAULT_CONTEXT));
    let with_context = options.clone().context(context);
    match plan(config, &with_context, (packed, Shared::default()), have) {
        Ok(_) => Placement::Packed,
        Err(NoMemory { .. }) => Placement::Compact,
    }
}

impl EngineOptions {
    /// Settles placement and KV cache: the placement of these options, or [`placement`] if they name none.
    /// [`Placement::Compact`] becomes [`Placement::Packed`] if no tensor is compact or no kernel reads compact ones.
    /// `packed` and `compact` are the bytes of all weights in either placement.
    #[must_use]
    pub(crate) fn settled(
        self,
        config: &ModelConfig,
        (packed, compact): (u64, Option<u64>),
        has_kernels: bool,
        have: u64,
    ) -> Self {
        let may_be_compact = compact.is_some() && has_kernels;
        let chosen = match self.placement {
            None | Some(Placement::Compact) if !may_be_compact => Placement::Packed,
            None => placement(config, &self, packed, have),
            Some(placement) => placement,
        };
        let kv_cache = self.chosen_kv_cache();
        self.placement(chosen).kv_cache(kv_cache)
    }
}

/// The number of tokens that `bytes` bytes of a KV cache hold, and the bytes of the cache per token. A packed cache has
/// the hot pages of 16 sequences, the default of [`EngineOptions::max_batch`].
pub fn tokens_of(config: &ModelConfig, kv_cache: KvCache, bytes: u64) -> (u64, u64) {
    let cache = CacheBytes::of(config, &EngineOptions::default().kv_cache(kv_cache));
    let pages = bytes
        .checked_sub(cache.fixed_bytes)
        .map(|available| available / cache.page_bytes.max(1) + u64::from(cache.hot_pages));
    (pages.unwrap_or(0) * u64::from(PAGE_TOKENS), cache.token_bytes())
}

/// Sizes of a KV cache, in bytes.
struct CacheBytes {
    /// Bytes of a page with its share of the pool of BF16 units.
    page_bytes: u64,
    /// Bytes that do not depend on the number of pages.
    fixed_bytes: u64,
    kv_cache: KvCache,
    /// BF16 units of a page over all layers.
    page_units: u64,
    hot_pages: u32,
}

impl CacheBytes {
    /// The pool has the BF16 units of one page, and those of one more page per this many pages.
    const PAGES_PER_UNIT: u64 = 4096;

    fn of(config: &ModelConfig, options: &EngineOptions) -> Self {
        let bf16_page = config.kv_bytes_per_token() * u64::from(PAGE_TOKENS);
        let kv_cache = options.chosen_kv_cache();
        if kv_cache == KvCache::Bf16 {
            return Self { page_bytes: bf16_page, fixed_bytes: 0, kv_cache, page_units: 0, hot_pages: 0 };
        }
        let layers = u64::from(config.layers);
        let page_units = 2 * layers * u64::from(config.kv_heads);
        let (unit, hot_pages) = (PackedShape::unit_bytes(config.head_dim), options.max_batch);
        // Includes the page's entry in the list of freed pages.
        let page = layers * PackedShape::page_bytes(config.kv_heads, config.head_dim) + ID;
        let share = (page_units * unit).div_ceil(Self::PAGES_PER_UNIT);
        let fixed_bytes = (page_units + 1) * unit + bf16_page * u64::from(hot_pages);
        Self { page_bytes: page + share, fixed_bytes, kv_cache, page_units, hot_pages }
    }

    /// The number of BF16 units of a cache of `pages` pages.
    fn units(&self, pages: u32) -> u32 {
        let units = self.page_units + self.page_units * u64::from(pages) / Self::PAGES_PER_UNIT;
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// Bytes of a cache of `pages` pages.
    fn total_bytes(&self, pages: u32) -> u64 {
        self.page_bytes * u64::from(pages) + self.fixed_bytes
    }

    /// Bytes per token of a page.
    fn token_bytes(&self) -> u64 {
        self.page_bytes.div_ceil(PAGE_TOKENS.into())
    }
}

/// Divides `have` bytes of device memory into `weights` bytes of weights, the working memory including `shared`, and a
/// KV cache.
///
/// # Errors
/// [`NoMemory`] if not one sequence of the requested context fits, or not one page if no context is requested.
pub fn plan(
    config: &ModelConfig,
    options: &EngineOptions,
    (weights, shared): (u64, Shared),
    have: u64,
) -> Result<Memory, NoMemory> {
    let requested = options.context.unwrap_or(config.max_positions).min(config.max_positions).max(1);
    let cache = CacheBytes::of(config, options);
    let pages_of = |tokens| sequence_pages(cache.kv_cache, tokens);
    // Returns the working memory of a context and the pages that fit next to it; `None` if not a single sequence fits.
    let of = |context: u32| {
        let working = working(config, options, context).saturating_add(shared.bytes);
        let available = have.checked_sub(weights)?.checked_sub(working)?.checked_sub(cache.fixed_bytes)?;
        let pages = u32::try_from(available / cache.page_bytes.max(1)).unwrap_or(u32::MAX);
        (pages >= pages_of(context)).then_some((context, working, pages))
    };
    let minimum = if options.context.is_some() { requested } else { PAGE_TOKENS.min(requested) };
    let Some(mut best) = of(requested).or_else(|| of(minimum)) else {
        let working = working(config, options, minimum).saturating_add(shared.bytes);
        let cache = cache.total_bytes(pages_of(minimum));
        let needed = weights.saturating_add(working).saturating_add(cache);
        let mixture = config.mixture.is_some();
        return Err(NoMemory { need: needed, have, weights, working, cache, context: minimum, mixture });
    };
    // A longer context needs more pages and leaves memory for fewer, so the longest that fits is found by halving.
    let (mut fits, mut too_long) = (pages_for(best.0), pages_for(requested));
    while too_long - fits > 1 {
        let middle = fits + (too_long - fits) / 2;
        match of(middle * PAGE_TOKENS) {
            Some(longer) => (best, fits) = (longer, middle),
            None => too_long = middle,
        }
    }
    let (context, working, pages) = best;
    // More pages than all rows can use are useless.
    let pages = u64::from(pages).min(u64::from(pages_of(context)) * u64::from(options.max_batch)) as u32;
    Ok(Memory {
        weights,
        cache: cache.total_bytes(pages),
        working,
        slot: shared.expansion_bytes,
        kv_cache: cache.kv_cache,
        pages,
        hot_pages: cache.hot_pages,
        units: cache.units(pages),
        token: cache.token_bytes(),
        context,
        host: 0,
        host_compact: 0,
        draft: 0,
    })
}

/// Bytes of a model on the device without its KV cache, for sequences of up to its maximum number of tokens.
pub(crate) fn fixed_bytes(config: &ModelConfig, options: &EngineOptions, (weights, shared): (u64, Shared)) -> u64 {
    weights.saturating_add(working(config, options, config.max_positions)).saturating_add(shared.bytes)
}

/// Bytes of a draft model's KV cache, if both models' caches share `have` bytes and a token of the target's cache has
/// `token` bytes. Both hold equally many tokens, unless the draft model's rows can use fewer, or the target's cache
/// must hold more: a sequence of `context` tokens.
pub(crate) fn draft_cache_bytes(
    draft: &ModelConfig,
    options: &EngineOptions,
    (token, context): (u64, u32),
    have: u64,
) -> u64 {
    let page_tokens = u64::from(PAGE_TOKENS);
    let (page_bytes, target_page_bytes) = (draft.kv_bytes_per_token() * page_tokens, token.saturating_mul(page_tokens));
    let pages = have / target_page_bytes.saturating_add(page_bytes).max(1);
    let sequence_bytes = u64::from(pages_for(context)).saturating_mul(target_page_bytes);
    let pages_left = have.saturating_sub(sequence_bytes) / page_bytes.max(1);
    let pages_used = u64::from(pages_for(draft.max_positions)) * u64::from(options.max_batch);
    pages.min(pages_left).min(pages_used).max(1).saturating_mul(page_bytes)
}

/// Bytes of activations, tables and state.
fn working(config: &ModelConfig, options: &EngineOptions, context: u32) -> u64 {
    let (rows, batch) = (u64::from(rows(options)), u64::from(options.step_rows()));
    let attention = u64::from(config.heads) * u64::from(config.head_dim);
    // Gate and up, if their product does not activate them, and the activated product.
    let mlp = 3 * u64::from(config.dense_intermediate());
    let row = 2 * u64::from(config.hidden) + u64::from(config.qkv_rows()) + attention + mlp;
    let logits = u64::from(logit_rows(options)) * u64::from(config.vocab);
    let tables = 1 + u64::from(config.local_rope.is_some());
    let angles = tables * u64::from(context) * u64::from(config.rope.dim);
    // Per row: ids, positions and data of a packed KV cache, then data of sampling, then the page table.
    let row_words = 12 + SAMPLING_WORDS + u64::from(pages_for(context));
    let state = (rows + batch * row_words) * ID;
    let (vocab, mask) = (u64::from(config.vocab.next_multiple_of(2)), u64::from(config.vocab.div_ceil(32)) * ID);
    let token_states = u64::from(adjusted_rows(options)) * (vocab * TOKEN_STATE + mask);
    // Packed pages of one layer and sequence are unpacked for later chunks of its prompt.
    let staging = match options.chosen_kv_cache() {
        KvCache::Packed => {
            u64::from(pages_for(context))
                * (config.kv_bytes_per_token() / u64::from(config.layers.max(1)) * u64::from(PAGE_TOKENS) + 2 * ID)
        }
        KvCache::Bf16 => 0,
    };
    (rows * row + logits + angles) * BF16 + state + token_states + staging + attention::split_workspace_bytes(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_model::Geometry;

    fn llama_8b() -> ModelConfig {
        Geometry::named("llama-3.1-8b").unwrap().config()
    }

    #[test]
    fn kv_cache_takes_the_rest_up_to_what_is_useful() {
        let none = Shared::default();
        let (config, weights, gb) = (llama_8b(), (12_000_000_000, none), 1_000_000_000);
        assert_eq!(config.kv_bytes_per_token(), 131_072);
        let options = EngineOptions::default().max_batch(16).context(4096);
        let plenty = plan(&config, &options, weights, 140 * gb).unwrap();
        assert_eq!((plenty.pages, plenty.context), (16 * 64, 4096));
        assert_eq!(plenty.cache, 16 * 4096 * 131_072);
        let tight = plan(&config, &options, weights, 16 * gb).unwrap();
        assert!(tight.pages < 1024 && tight.pages >= 64 && tight.total() <= 16 * gb, "{tight}");
        let none = plan(&config, &options, weights, 12 * gb).unwrap_err();
        assert!(none.need > none.have && none.context == 4096, "{none}");
        assert!(none.to_string().contains("shorten the context"));
    }

    /// The caches of both models hold equally many tokens, unless the draft model's rows can use fewer or a sequence
    /// of the target would not fit.
    #[test]
    fn draft_models_take_a_part_of_the_memory() {
        let (config, mb) = (llama_8b(), 1_000_000);
        let mut draft = llama_8b();
        (draft.layers, draft.max_positions) = (4, 8192);
        let options = EngineOptions::default().max_batch(8);
        let page = draft.kv_bytes_per_token() * 64;
        assert_eq!(page * 8, 131_072 * 64);
        let pages = |context, have| draft_cache_bytes(&draft, &options, (131_072, context), have) / page;
        assert_eq!(pages(0, 131_072 * 64 * 9), 8, "8 of each");
        assert_eq!(pages(0, 1 << 50), 8 * 128);
        assert_eq!([pages(512, 131_072 * 64 * 9), pages(576, 131_072 * 64 * 9), pages(0, 0)], [8, 1, 1]);
        let weights = config.weight_bytes(Placement::Packed);
        let alone = plan(&config, &options, (weights, Shared::default()), 20_000 * mb).unwrap();
        let fixed = fixed_bytes(&draft, &options, (100 * mb, Shared::default()));
        assert!(fixed > 200 * mb && fixed < 700 * mb, "{fixed}");
        let memory = Memory { draft: 500 * mb, ..alone };
        assert_eq!(memory.total(), alone.total() + 500 * mb);
        assert!(memory.to_string().contains("draft model 0.50 GB") && !alone.to_string().contains("draft"));
    }

    #[test]
    fn default_context_shrinks_to_fit() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        for have in [13, 14, 16, 20, 24, 40, 80, 140] {
            let memory = plan(&config, &EngineOptions::default(), (12 * gb, Shared::default()), have * gb).unwrap();
            assert!(memory.total() <= have * gb, "{have}: {memory}");
            assert!(memory.context <= config.max_positions && memory.context > 0);
            assert!(
                u64::from(memory.context) <= memory.tokens(),
                "{have}: one sequence of the context fits: {memory:?}"
            );
        }
        assert!(plan(&config, &EngineOptions::default(), (12 * gb, Shared::default()), 12 * gb).is_err());
        assert!(plan(&config, &EngineOptions::default(), (u64::MAX, Shared::default()), 12 * gb).is_err());
    }

    /// The bytes that a packed cache allocates (`kv_cache.rs`), computed independently of the plan.
    fn packed_bytes(config: &ModelConfig, memory: &Memory) -> u64 {
        let pages = u64::from(memory.pages) * u64::from(config.layers);
        let units = u64::from(memory.units) * PackedShape::unit_bytes(config.head_dim) + ID;
        let hot = u64::from(memory.hot_pages) * config.kv_bytes_per_token() * u64::from(PAGE_TOKENS);
        let freed = u64::from(memory.pages) * ID;
        pages * PackedShape::page_bytes(config.kv_heads, config.head_dim) + units + hot + freed
    }

    #[test]
    fn packed_cache_holds_a_quarter_more_tokens() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        // As many rows as may run: each reserves a hot page, whether used or not.
        for (context, rows, bits) in [(1024, 192, 12.3), (8192, 24, 12.09)] {
            let of = |cache| {
                let options = EngineOptions::default().max_batch(rows).context(context).kv_cache(cache);
                plan(&config, &options, (6 * gb, Shared::default()), 24 * gb).unwrap()
            };
            let (packed, bf16) = (of(KvCache::Packed), of(KvCache::Bf16));
            assert_eq!((bf16.token, bf16.hot_pages, bf16.units), (131_072, 0, 0));
            assert_eq!((packed.token, packed.hot_pages, packed.kv_cache), (98_721, rows, KvCache::Packed));
            // Whole sequences, as admission counts them.
            let sequences = |memory: &Memory| memory.pages / sequence_pages(memory.kv_cache, context);
            let gain = f64::from(sequences(&packed)) / f64::from(sequences(&bf16));
            assert!(gain > 1.23, "{context}: {} and {} sequences", sequences(&packed), sequences(&bf16));
            let share = packed.tokens() as f64 / bf16.tokens() as f64;
            assert!((1.29..4.0 / 3.0).contains(&share), "{context}: {share}");
            // One sequence, its hot page included.
            let pages = u64::from(sequence_pages(KvCache::Packed, context));
            let bytes = pages * CacheBytes::of(&config, &EngineOptions::default().kv_cache(KvCache::Packed)).page_bytes
                + u64::from(PAGE_TOKENS) * 131_072;
            let bits_per_element = bytes as f64 * 8.0 / (f64::from(context) * 65_536.0);
            assert!(bits_per_element < bits && bits_per_element > 12.0, "{context}: {bits_per_element} bits");
        }
    }

    /// For random memory sizes: the cache fits in its plan, the limit holds, and no longer context fits.
    #[test]
    fn packed_plans_fit_their_memory() {
        let mut random = unweight_format::testing::Random::new(7);
        let (mut planned, mut hot_only) = (0, 0);
        for case in 0..3000 {
            let mut config = Geometry::ALL[random.below(Geometry::ALL.len() as u64) as usize].config();
            // With few layers, staging is a large part.
            config.layers = [1, 2, config.layers][random.below(3) as usize];
            let mut options = EngineOptions::default().chunk(256).kv_cache(KvCache::Packed);
            options.max_batch = [1, 3, 16, 256][random.below(4) as usize];
            options.context =
                [None, Some(1 + random.below(200) as u32), Some(1024), Some(8192)][random.below(4) as usize];
            let bits = 27 + random.below(10);
            let have = random.below(1 << bits);
            let weights = (random.below(1 << 30), Shared::default());
            let Ok(memory) = plan(&config, &options, weights, have) else { continue };
            planned += 1;
            assert!(memory.total() <= have, "{case}: {memory:?}");
            assert!(packed_bytes(&config, &memory) <= memory.cache, "{case}: {memory:?}");
            assert!(memory.pages >= sequence_pages(KvCache::Packed, memory.context), "{case}: {memory:?}");
            assert!(memory.tokens() >= memory.context.into() && memory.hot_pages == options.max_batch);
            // The units of one page of all layers suffice to keep any single page.
            assert!(memory.units >= 2 * config.layers * config.kv_heads, "{case}: {memory:?}");
            hot_only += u32::from(memory.pages == 0);
            if options.context.is_none() && memory.context < config.max_positions {
                let longer = options.context(memory.context + PAGE_TOKENS);
                assert!(plan(&config, &longer, weights, have).is_err(), "{case}: {memory:?}");
            }
        }
        assert!(planned > 500 && hot_only > 20, "{planned} {hot_only}");
    }

    #[test]
    fn packed_cache_of_one_page_has_hot_pages_only() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        let of = |context: u32, have: u64| {
            let options = EngineOptions::default().max_batch(4).context(context).kv_cache(KvCache::Packed);
            plan(&config, &options, (0, Shared::default()), have)
        };
        let one = of(64, gb).unwrap();
        assert_eq!((one.pages, one.hot_pages, one.tokens(), one.context), (0, 4, 256, 64));
        assert_eq!(one.cache, packed_bytes(&config, &one) + PackedShape::unit_bytes(128) - ID);
        let two = of(65, gb).unwrap();
        assert_eq!((two.pages, two.hot_pages), (4, 4));
        // Nothing fits, or all but the last byte.
        let need = of(64, 0).unwrap_err();
        assert_eq!((need.cache, need.need), (one.cache, one.total()));
        assert!(of(64, one.total()).is_ok() && of(64, one.total() - 1).is_err());
        let text = of(65, 100).unwrap_err().to_string();
        assert!(text.contains("shorten the context"), "{text}");
    }

    #[test]
    fn tokens_of_a_number_of_bytes() {
        let config = llama_8b();
        for bytes in [0, 100_000_000, 1_000_000_000, 8_000_000_000] {
            let bf16 = tokens_of(&config, KvCache::Bf16, bytes);
            assert_eq!(bf16, (config.kv_tokens(bytes, PAGE_TOKENS), 131_072));
            let (tokens, each) = tokens_of(&config, KvCache::Packed, bytes);
            assert_eq!((each, tokens == 0), (98_721, bytes <= 100_000_000), "{bytes}: {tokens}");
            assert!(tokens == 0 || tokens * 131_072 > bytes * 115 / 100, "{bytes}: {tokens}");
        }
    }

    #[test]
    fn requested_kv_cache_is_used() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        let settled = |options: EngineOptions| options.settled(&config, (12 * gb, None), true, 80 * gb).kv_cache;
        assert_eq!(settled(EngineOptions::default()), Some(KvCache::Bf16));
        for cache in KvCache::ALL.iter().copied() {
            assert_eq!(settled(EngineOptions::default().kv_cache(cache)), Some(cache));
        }
    }

    /// 8192 tokens of this model take 1.07 GB, and the working memory of 16 rows 0.5 GB.
    #[test]
    fn weights_are_expanded_if_a_sequence_still_fits() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        let of = |options: &EngineOptions, have: u64| placement(&config, options, 12 * gb, have);
        let default = EngineOptions::default();
        assert_eq!((of(&default, 80 * gb), of(&default, 14 * gb)), (Placement::Packed, Placement::Packed));
        assert_eq!((of(&default, 13 * gb), of(&default, 0)), (Placement::Compact, Placement::Compact));
        // The smallest memory in which one sequence fits.
        let edge = (12 * gb..14 * gb).step_by(1_000_000).find(|have| of(&default, *have) == Placement::Packed).unwrap();
        let requested = default.clone().context(8192);
        let fits = |have| plan(&config, &requested, (12 * gb, Shared::default()), have).is_ok();
        assert!(fits(edge) && !fits(edge - 1_000_000), "{edge}");
        // A longer requested context needs more, a shorter one less. No more is needed than the model's limit.
        assert_eq!(of(&default.clone().context(65_536), 14 * gb), Placement::Compact);
        assert_eq!(of(&default.clone().context(64), edge - 500_000_000), Placement::Packed);
        let mut short = config.clone();
        short.max_positions = 64;
        assert_eq!(placement(&short, &default, 12 * gb, edge - 500_000_000), Placement::Packed);
    }

    #[test]
    fn requested_placement_is_used_if_possible() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        let chosen = |options: EngineOptions, compact, has_kernels, have| {
            options.settled(&config, (12 * gb, compact), has_kernels, have * gb).placement
        };
        let (packed, small) = (Some(Placement::Packed), Some(Placement::Compact));
        let (requested, auto) = (EngineOptions::default().placement(Placement::Compact), EngineOptions::default());
        assert_eq!(chosen(requested.clone(), Some(11 * gb), true, 80), small);
        assert_eq!(chosen(EngineOptions::default().placement(Placement::Packed), Some(11 * gb), true, 13), packed);
        assert_eq!(
            (chosen(auto.clone(), Some(11 * gb), true, 80), chosen(auto, Some(11 * gb), true, 13)),
            (packed, small)
        );
        // No tensor is compact, or no kernel reads them.
        assert_eq!(chosen(requested.clone(), None, true, 80), packed);
        assert_eq!(chosen(requested, Some(11 * gb), false, 13), packed);
        assert_eq!(chosen(EngineOptions::default(), None, true, 0), packed);
        for other in [Placement::Bf16, Placement::Stored, Placement::Alternate] {
            assert_eq!(chosen(EngineOptions::default().placement(other), Some(11 * gb), true, 13), Some(other));
        }
    }

    /// Writes a file in a tree of control groups.
    fn write(root: &Path, path: &str, text: &str) {
        std::fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        std::fs::write(root.join(path), text).unwrap();
    }

    /// The smallest limit holds: of the group or its ancestors, of either version.
    #[test]
    fn cgroup_limits_are_read() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path();
        let process_groups = "12:cpu:/x\n7:hugetlb,memory:/docker/c\n0::/user.slice/job\n";
        assert_eq!(cgroup_bytes(root, process_groups), None);
        write(root, "user.slice/job/memory.max", "max\n");
        write(root, "memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(9_223_372_036_854_771_712));
        write(root, "user.slice/memory.max", "8000\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(8000));
        write(root, "memory/docker/c/memory.limit_in_bytes", "7000\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(7000));
        assert_eq!(cgroup_bytes(root, "0::/elsewhere\n"), None);
        // A container sees its own group as the root.
        write(root, "memory.max", "6000");
        for groups in [process_groups, "", "0::/\n", "0::/../elsewhere\n", "not a cgroup line"] {
            assert_eq!(cgroup_bytes(root, groups), Some(6000), "{groups}");
        }
    }

    /// Used memory is not available, unless it caches files.
    #[test]
    fn cgroup_memory_left_is_limit_minus_usage() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path();
        let process_groups = "7:memory:/c\n0::/slice/job\n";
        write(root, "slice/job/memory.max", "8000\n");
        write(root, "slice/job/memory.current", "5000\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(3000));
        let stat = "anon 4000\ninactive_file 700\nactive_file 200\nshmem 50\nworkingset_activate_file 9\n";
        write(root, "slice/job/memory.stat", stat);
        assert_eq!(cgroup_bytes(root, process_groups), Some(3900));
        // Sibling groups share the limit of their parent.
        write(root, "slice/memory.max", "100000\n");
        write(root, "slice/memory.current", "98000\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(2000));
        // Version 1 counts child groups in separate `total_` lines.
        write(root, "memory/c/memory.limit_in_bytes", "6000\n");
        write(root, "memory/c/memory.usage_in_bytes", "5500\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(500));
        let stat = "inactive_file 1\nactive_file 2\ntotal_inactive_file 300\ntotal_active_file 100\n";
        write(root, "memory/c/memory.stat", stat);
        assert_eq!(cgroup_bytes(root, process_groups), Some(900));
        // Usage may briefly exceed the limit or be below the cached bytes.
        write(root, "memory/c/memory.usage_in_bytes", "7000\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(0));
        write(root, "memory/c/memory.usage_in_bytes", "399\n");
        assert_eq!(cgroup_bytes(root, process_groups), Some(2000));
    }

    #[test]
    fn default_share_of_free_memory() {
        for bytes in [0, 1, 8, 9, 10, 89, 90, 91, 24 << 30, (24 << 30) + 1] {
            let free = free_for(bytes);
            assert!(usual_share(free) >= bytes && (free < 10 || usual_share(free - 10) < bytes), "{bytes}");
        }
    }

    #[test]
    fn experts_above_host_memory_are_rejected() {
        let meminfo = "MemTotal:       263939380 kB\nMemFree:         1000 kB\nMemAvailable:   201000000 kB\n";
        assert_eq!(host_bytes(meminfo, None), Some(201_000_000 * 1024));
        assert_eq!(host_bytes(meminfo, Some(137_438_953_472)), Some(137_438_953_472));
        assert_eq!(
            (host_bytes("", None), host_bytes("", Some(5)), host_bytes("MemAvailable: x kB", None)),
            (None, Some(5), None)
        );
        assert_eq!(check_host(0), Ok(()));
        let error = check_host(u64::MAX).unwrap_err();
        assert!(error.have < error.need && error.to_string().contains("resident_experts"), "{error}");
    }

    #[test]
    fn slot_is_counted_in_the_working_memory() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        let options = EngineOptions::default().context(4096);
        let with =
            |bytes, slot| plan(&config, &options, (10 * gb, Shared { bytes, expansion_bytes: slot }), 40 * gb).unwrap();
        let (without, with) = (with(0, 0), with(200_000_000, 176_000_000));
        assert_eq!((with.working - without.working, with.slot), (200_000_000, 176_000_000));
        assert!(
            with.to_string().ends_with("GB, including an expansion slot of 0.18 GB")
                && !without.to_string().contains("slot")
        );
        let host = |host, host_compact| Memory { host, host_compact, ..without }.to_string();
        assert!(host(2 * gb, 2 * gb).ends_with("; 2.00 GB of compact experts in host memory"));
        assert!(host(2 * gb, gb).ends_with("; 2.00 GB of experts in host memory, 1.00 GB of them compact"));
        assert!(!without.to_string().contains("experts"));
    }
}
