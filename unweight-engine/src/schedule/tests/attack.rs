//! Schedules under attack: small pools of pages and units, prompts that share whole chunks, cancellation at any time,
//! texts whose logits are computed in between, and lost pages. The device tracks its BF16 units by index: none is owned
//! twice, and none is missing at the end.

use std::ops::Range;

use super::*;

/// The id of texts of one page or more, which are scored between steps.
const TEXT: SeqId = SeqId(u64::MAX);

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
struct Plan {
    limits: Limits,
    pages: u32,
    units: u32,
    /// One page in this many takes units.
    odds: u64,
    sequences: usize,
    /// One in this many steps is followed by a cancellation, or by a text; 0 for none.
    cancels: u64,
    texts: u64,
    /// Whether a sequence is cancelled while its prompt runs.
    cancels_prefills: bool,
}

/// The BF16 units of the device.
#[derive(Default)]
struct Units {
    free: Vec<u32>,
    /// The units of each page.
    owned: BTreeMap<u32, Vec<u32>>,
    lost: BTreeSet<u32>,
}

impl Units {
    /// Like the kernel: a page that is listed twice returns its units twice.
    fn release(&mut self, pages: &[u32]) {
        let units = pages.iter().filter_map(|page| self.owned.get(page)).flatten().copied();
        self.free.extend(units.collect::<Vec<_>>());
        pages.iter().for_each(|page| {
            self.owned.remove(page);
            self.lost.remove(page);
        });
        let distinct: BTreeSet<u32> = self.free.iter().copied().collect();
        assert_eq!(distinct.len(), self.free.len(), "units that were freed twice: {:?}", self.free);
        let owned: BTreeSet<u32> = self.owned.values().flatten().copied().collect();
        assert!(owned.is_disjoint(&distinct), "a free unit belongs to a page");
    }

    /// Returns whether all of the page is kept.
    fn pack(&mut self, page: u32, count: u32) -> bool {
        assert!(!self.owned.contains_key(&page), "page {page} is packed over units that were not released");
        let units = self.free.split_off(self.free.len().saturating_sub(count as usize));
        let is_kept = units.len() == count as usize;
        if !units.is_empty() {
            self.owned.insert(page, units);
        }
        match is_kept {
            true => self.lost.remove(&page),
            false => self.lost.insert(page),
        };
        is_kept
    }
}

struct Attack {
    plan: Plan,
    schedule: Schedule,
    draft_model: SimulatedModel,
    random: Random,
    units: Units,
    clients: Clients,
    rows: Vec<Row>,
    memory: Vec<u64>,
    /// The pages and the hot page of the current prompt, as they were set before its first chunk.
    prompt: (Vec<u32>, u32),
    prompt_is_lost: bool,
    /// Events of prompts that another was about to pass.
    pending: Vec<Event>,
    is_overwritten: bool,
    in_flight: VecDeque<(Vec<u32>, Vec<u32>)>,
    texts: u32,
    text_kept: u32,
    cancelled_prefills: u32,
}

/// Prompts of eight kinds: chunk `n` distinguishes `2^(n + 1)` of them.
fn tree_prompt(id: SeqId, len: usize, chunk: u32) -> Vec<u32> {
    (0..len).map(|at| 1 + id.0 as u32 % 8 % (2 << (at as u32 / chunk).min(2))).collect()
}

impl Attack {
    fn new(plan: Plan, mut random: Random) -> Self {
        Self {
            schedule: Schedule::new(plan.limits, plan.pages),
            draft_model: draft_model(plan.limits, &mut random),
            random,
            units: Units { free: (0..plan.units).collect(), ..Units::default() },
            clients: Clients::default(),
            rows: Vec::new(),
            memory: vec![0; ((plan.pages + plan.limits.max_batch) * PAGE_TOKENS) as usize],
            prompt: (Vec::new(), 0),
            prompt_is_lost: false,
            pending: Vec::new(),
            is_overwritten: false,
            in_flight: VecDeque::new(),
            texts: 0,
            text_kept: 0,
            cancelled_prefills: 0,
            plan,
        }
    }

    fn packed(&self) -> bool {
        self.plan.limits.kv_cache == KvCache::Packed
    }

    fn tokens(&self, id: SeqId, received: usize) -> Vec<u32> {
        let prompt = tree_prompt(id, self.clients.requested[&id].prompt, self.plan.limits.chunk);
        prompt.into_iter().chain((0..received as u32).map(|nth| token_of(id, nth))).collect()
    }

    /// The number of units of a page that ends with this key.
    fn units_of_key(&self, last_key: u64) -> u32 {
        if last_key >> 20 & 0xffff >= 0x10000 / self.plan.odds.max(1) { 0 } else { 1 + (last_key >> 40 & 1) as u32 }
    }

    fn units_of_tokens(&self, tokens: &[u32]) -> u32 {
        let keys = keys(tokens);
        keys.chunks_exact(PAGE_TOKENS as usize).map(|page| self.units_of_key(page[PAGE_TOKENS as usize - 1])).sum()
    }

    fn release(&mut self) {
        let freed = self.schedule.take_freed();
        assert!(self.packed() || freed.is_empty());
        self.units.release(&freed);
    }

    fn run(&mut self) {
        for _ in 0..100_000 {
            let has_more = self.clients.requested.len() < self.plan.sequences;
            if has_more && self.random.below(3) == 0 {
                self.add();
            }
            if self.plan.cancels > 0 && self.random.below(self.plan.cancels) == 0 {
                self.cancel();
            }
            if self.plan.texts > 0 && self.random.below(self.plan.texts) == 0 {
                self.text();
            }
            let events = self.step();
            let is_idle = self.schedule.rows().is_empty() && self.schedule.waiting() == 0;
            if events.is_empty() && is_idle && !has_more {
                return self.check();
            }
            events.into_iter().for_each(|event| self.receive(event));
        }
        panic!("still busy: {:?}", self.plan);
    }

    fn add(&mut self) {
        let Limits { context, chunk, .. } = self.plan.limits;
        let id = SeqId(self.clients.requested.len() as u64);
        // Around the ends of chunks and pages as often as elsewhere.
        let prompt_max = u64::from(context) * 3 / 4;
        let prompt = match self.random.below(3) {
            0 => self.random.below(prompt_max) + 1,
            1 => u64::from(chunk) * (1 + self.random.below(3)) + self.random.below(3) - 1,
            _ => u64::from(PAGE_TOKENS) * (1 + self.random.below(5)) + self.random.below(3) - 1,
        };
        let prompt = prompt.min(prompt_max) as usize;
        let new = (self.random.below(220) as u32).min(context - prompt as u32);
        let stops = self.random.below(4) == 0 && new > stop_of(new);
        let stop = if stops { vec![token_of(id, stop_of(new))] } else { Vec::new() };
        let request = Request::new(tree_prompt(id, prompt, chunk)).max_new_tokens(new).stop(stop);
        match self.schedule.add(request) {
            Ok(added) => {
                assert_eq!(added, id);
                self.clients.requested.insert(id, Requested { prompt, new, stops });
            }
            Err(error) => assert!(matches!(error, AdmissionError::NoRoom { .. }), "{error}"),
        }
    }

    fn cancel(&mut self) {
        let id = SeqId(self.random.below(self.clients.requested.len().max(1) as u64));
        let id = match &self.schedule.prefill {
            Some(prefill) if self.plan.cancels_prefills && self.random.below(2) == 0 => prefill.running.id,
            _ => id,
        };
        let runs = self.schedule.prefills().any(|prefill| prefill.running.id == id);
        if runs && !self.plan.cancels_prefills {
            return;
        }
        if self.schedule.cancel(id) {
            self.cancelled_prefills += u32::from(runs);
            assert!(self.clients.cancelled.insert(id));
        }
    }

    /// Like `Engine::logits`.
    fn text(&mut self) {
        let Limits { chunk, context, .. } = self.plan.limits;
        let len = 1 + self.random.below(u64::from(context)) as usize;
        let text: Vec<u32> = (0..len).map(|_| 1 + self.random.below(90) as u32).collect();
        if self.schedule.check(&Request::new(text.clone()).max_new_tokens(0)).is_err() {
            return;
        }
        while self.schedule.is_prefilling() {
            let events = self.step();
            events.into_iter().for_each(|event| self.receive(event));
        }
        let Ok(pages) = self.schedule.lend(&[self.schedule.pages_of(len as u32)]) else { return };
        // Lending may have evicted prefixes with their units.
        self.release();
        let mut table = pages[0].clone();
        self.texts += 1;
        let mut is_lost = false;
        for start in (0..len as u32).step_by(chunk as usize) {
            let end = (start + chunk).min(len as u32);
            // Tokens after the last page are not kept.
            table.resize((end.div_ceil(PAGE_TOKENS) as usize).max(table.len()), u32::MAX);
            is_lost |= self.chunk(TEXT, &text, (&table, u32::MAX), (start, end), is_lost);
        }
        self.text_kept += u32::from(!is_lost);
        self.schedule.give(pages);
        self.release();
    }

    /// Attends to a chunk and packs its pages. Returns whether one is lost.
    fn chunk(
        &mut self,
        id: SeqId,
        tokens: &[u32],
        (pages, hot): (&[u32], u32),
        (start, end): (u32, u32),
        was_lost: bool,
    ) -> bool {
        let keys = keys(tokens);
        if !was_lost {
            self.check_keys(&keys, pages, hot, start, start);
        }
        for position in start..end {
            let is_open = self.packed() && position / PAGE_TOKENS == end / PAGE_TOKENS;
            let page = if is_open { self.hot_page(hot) } else { pages[(position / PAGE_TOKENS) as usize] };
            if page != u32::MAX {
                self.memory[(page * PAGE_TOKENS + position % PAGE_TOKENS) as usize] = keys[position as usize];
            }
        }
        let mut is_lost = false;
        if self.packed() {
            for index in start / PAGE_TOKENS..end / PAGE_TOKENS {
                let page = pages[index as usize];
                if page != u32::MAX {
                    let count = self.units_of_key(keys[((index + 1) * PAGE_TOKENS - 1) as usize]);
                    is_lost |= !self.units.pack(page, count);
                } else {
                    assert_eq!(id, TEXT, "a page of a sequence is missing");
                }
            }
        }
        is_lost
    }

    fn hot_page(&self, hot: u32) -> u32 {
        if hot == u32::MAX { hot } else { self.plan.pages + hot }
    }

    /// Checks the keys of tokens before `end`; the token at `open` is in the hot page.
    fn check_keys(&self, keys: &[u64], pages: &[u32], hot: u32, end: u32, open: u32) {
        for (position, key) in (0..end).zip(keys) {
            let is_open = self.packed() && position / PAGE_TOKENS == open / PAGE_TOKENS;
            let page = if is_open { self.hot_page(hot) } else { pages[(position / PAGE_TOKENS) as usize] };
            assert!(is_open || !self.units.lost.contains(&page), "a lost page is read");
            let memory_index = (page * PAGE_TOKENS + position % PAGE_TOKENS) as usize;
            assert_eq!(self.memory[memory_index], *key, "token {position} of {pages:?}");
        }
    }

    /// Like `Engine::step`.
    fn step(&mut self) -> Vec<Event> {
        if !self.pending.is_empty() {
            return std::mem::take(&mut self.pending);
        }
        loop {
            let next = self.schedule.next_action();
            self.release();
            match next {
                Next::Idle => return Vec::new(),
                Next::Prefill => {
                    let last = self.run_chunk();
                    if let Some(event) = self.finish_prefill(last) {
                        return vec![event];
                    }
                }
                Next::Mixed { changed } => {
                    assert!(self.in_flight.is_empty());
                    let last = self.run_chunk();
                    self.launch(changed);
                    if last.is_some() {
                        let mut events = self.read();
                        events.extend(self.finish_prefill(last));
                        if !events.is_empty() {
                            return events;
                        }
                    }
                }
                Next::Draft => {
                    draft_with(&mut self.draft_model, &mut self.random, &self.clients, &mut self.schedule);
                }
                Next::Launch { changed } => self.launch(changed),
                Next::Read => {
                    let events = self.read();
                    if !events.is_empty() {
                        return events;
                    }
                }
            }
            // The host acts only where calls of the engine return, so not here.
        }
    }

    fn read(&mut self) -> Vec<Event> {
        let Some((tokens, lost)) = self.in_flight.pop_front() else { panic!("nothing to read") };
        let mut events = Vec::new();
        self.schedule.record_step(&tokens, &lost, &mut events);
        events
    }

    /// Runs a chunk. Returns its sequence, and the number of tokens that it has received, if the chunk is the last one.
    fn run_chunk(&mut self) -> Option<(SeqId, u32)> {
        if self.prompt_is_lost && self.schedule.passes() {
            self.pending.extend(self.schedule.abort_prefill());
            return None;
        }
        self.schedule.begin_prefill();
        self.release();
        let Chunk { running, tokens, start, sets_pages, is_last } = self.schedule.next_chunk()?;
        let (id, tokens) = (running.id, tokens.to_vec());
        if sets_pages {
            self.prompt = (running.pages.clone(), running.hot);
            self.prompt_is_lost = false;
        }
        assert_eq!(self.prompt, (running.pages.clone(), running.hot), "the tables changed since the first chunk");
        let received = self.clients.received.get(&id).map_or(0, Vec::len);
        let all = self.tokens(id, received);
        let end = start + tokens.len() as u32;
        assert_eq!(tokens, all[start as usize..end as usize]);
        assert_eq!(is_last, end as usize == all.len());
        let (pages, hot) = self.prompt.clone();
        self.prompt_is_lost |= self.chunk(id, &all, (&pages, hot), (start, end), self.prompt_is_lost);
        self.schedule.note_chunk_launched();
        is_last.then_some((id, received as u32))
    }

    fn finish_prefill(&mut self, last: Option<(SeqId, u32)>) -> Option<Event> {
        let (id, received) = last?;
        assert!(self.in_flight.is_empty());
        self.is_overwritten = true;
        match self.prompt_is_lost {
            true => self.schedule.abort_prefill(),
            false => self.schedule.finish_prefill(token_of(id, received)),
        }
    }

    fn launch(&mut self, changed: bool) {
        if changed {
            assert!(self.in_flight.is_empty());
            self.rows = self.schedule.rows().iter().map(|row| self.clients.row(row)).collect();
            self.is_overwritten = false;
        }
        assert!(!self.is_overwritten, "the first row was overwritten");
        let mut rows = std::mem::take(&mut self.rows);
        assert!(rows.iter().map(|row| row.id).eq(self.schedule.rows().iter().map(|row| row.id)));
        let mut tokens = Vec::new();
        for row in &mut rows {
            let nth = row.position + 1 - self.clients.requested[&row.id].prompt as u32;
            let all = self.tokens(row.id, nth as usize);
            let keys = keys(&all);
            if !row.is_lost {
                self.check_keys(&keys, &row.pages, row.hot, row.position, row.position);
            }
            let page =
                if self.packed() { self.hot_page(row.hot) } else { row.pages[(row.position / PAGE_TOKENS) as usize] };
            self.memory[(page * PAGE_TOKENS + row.position % PAGE_TOKENS) as usize] = keys[row.position as usize];
            tokens.push(if row.is_lost { WRONG } else { token_of(row.id, nth) });
            row.position += 1;
            let mut all = all;
            for (at, (guess, position)) in row.draft.iter().zip(row.position..).enumerate() {
                all.push(*guess);
                let keys = super::keys(&all);
                self.check_keys(&keys, &row.pages, row.hot, position, position);
                let page = if self.packed() { page } else { row.pages[(position / PAGE_TOKENS) as usize] };
                self.memory[(page * PAGE_TOKENS + position % PAGE_TOKENS) as usize] = keys[position as usize];
                tokens.push(sampled(row.id, nth, &row.draft, at + 1));
                assert!(!self.packed() || (position + 1) % PAGE_TOKENS > 0, "a packed page contains a drafted token");
            }
            if self.packed() && row.position.is_multiple_of(PAGE_TOKENS) {
                let to = row.pages[(row.position / PAGE_TOKENS - 1) as usize];
                let (from, at) = (page * PAGE_TOKENS, to * PAGE_TOKENS);
                self.memory.copy_within(from as usize..(from + PAGE_TOKENS) as usize, at as usize);
                let count = self.units_of_key(keys[row.position as usize - 1]);
                row.is_lost |= !self.units.pack(to, count);
            }
        }
        let flags = rows.iter().flat_map(|row| vec![u32::from(row.is_lost); 1 + row.draft.len()]).collect();
        // Rows after guesses are unknown before these are read.
        self.is_overwritten = rows.iter().any(|row| !row.draft.is_empty());
        self.rows = rows;
        self.in_flight.push_back((tokens, flags));
        self.schedule.note_step_launched();
    }

    fn receive(&mut self, event: Event) {
        let Some(finish) = self.clients.receive(&event) else { return };
        let (seq, token, received) = (event.seq, event.token, &self.clients.received[&event.seq]);
        if finish == Finish::UnitsFull {
            // Only a sequence that would not fit alone.
            let count = received.len() - usize::from(token != NO_TOKEN);
            let needed = self.units_of_tokens(&self.tokens(seq, count));
            assert!(needed > self.plan.units, "{event:?}: {needed} units of {}, {:?}", self.plan.units, self.plan);
        }
    }

    fn check(&mut self) {
        while self.schedule.drop_idle() {}
        self.release();
        assert_eq!((self.schedule.pages.free(), self.schedule.waiting()), (self.plan.pages, 0));
        assert_eq!(self.schedule.hot_pages.free(), self.plan.limits.max_batch);
        assert_eq!(self.units.free.len() as u32, self.plan.units, "units are missing: {:?}", self.units.owned);
        self.clients.check(true, "");
    }
}

/// A random plan.
fn plan(random: &mut Random) -> Plan {
    let chunk = [64, 128, 192, 256][random.below(4) as usize];
    let kv_cache = if random.below(5) == 0 { KvCache::Bf16 } else { KvCache::Packed };
    Plan {
        limits: Limits {
            max_batch: 1 + random.below(8) as u32,
            chunk,
            kv_cache,
            mixes: random.below(2) == 0,
            shares_prefixes: random.below(4) != 0,
            steps_ahead_max: 1 + random.below(3) as u32,
            speculation: match random.below(6) {
                kind @ 0..4 => speculation([0, 1, 4, 15][kind as usize]),
                kind => model_speculation([2, 15][kind as usize - 4]),
            },
            ..LIMITS
        },
        pages: 3 + random.below(30) as u32,
        units: random.below(12) as u32,
        odds: [1, 2, 4, 16][random.below(4) as usize],
        sequences: 6 + random.below(20) as usize,
        cancels: [0, 5, 20, 100][random.below(4) as usize],
        texts: 0,
        cancels_prefills: false,
    }
}

/// The range of seeds; `KV_ATTACK_SEEDS` sets another number.
fn seeds(default: u64) -> Range<u64> {
    let count = std::env::var("KV_ATTACK_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(default);
    0..count
}

/// Runs random plans of many seeds.
fn attack(default: u64, change: impl Fn(&mut Plan)) {
    let (mut preempted, mut full, mut shared, mut prefills, mut texts, mut cancelled) = (0, 0, 0, 0, 0, 0);
    for seed in seeds(default) {
        let mut random = Random::new(seed * 7 + 3);
        let mut plan = plan(&mut random);
        change(&mut plan);
        let mut attack = Attack::new(plan, random);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| attack.run()));
        assert!(result.is_ok(), "seed {seed}: {plan:?}");
        preempted += attack.schedule.preempted();
        shared += attack.schedule.shared_prompt_tokens();
        full += attack.clients.ended.values().filter(|finish| **finish == Finish::UnitsFull).count();
        prefills += attack.cancelled_prefills;
        (texts, cancelled) = (texts + attack.text_kept, cancelled + attack.clients.cancelled.len());
    }
    eprintln!(
        "{preempted} preempted, {full} full, {shared} tokens shared, {cancelled} cancelled, {prefills} of them in \
         their prompts, {texts} texts"
    );
}

/// Everything but texts and cancellations of running prompts.
#[test]
fn no_unit_is_owned_twice_or_missing() {
    attack(200, |_| ());
}

/// A cancelled prompt returns its units, and no other sequence ends because units are missing.
#[test]
fn cancelled_prompts_release_their_units() {
    attack(200, |plan| {
        (plan.cancels_prefills, plan.cancels) = (true, plan.cancels.clamp(3, 20));
    });
}

/// Texts take pages of cached prefixes, with their units.
#[test]
fn texts_evict_cached_prefixes_with_their_units() {
    attack(200, |plan| plan.texts = 10);
}

/// A page is lost while a prompt holds all units. The prompt is cancelled before the step is read, so its units are
/// free again. The sequence is therefore computed again, and does not end.
#[test]
fn sequence_is_computed_again_after_a_prompt_was_cancelled() {
    let mut schedule = Schedule::new(PACKED, 20);
    schedule.add(request(60, 100)).unwrap();
    let id = join(&mut schedule, 10);
    for _ in 0..2 {
        step(&mut schedule, &[11], &[0]);
    }
    let prompt = schedule.add(request(600, 5)).unwrap();
    assert!(!chunk(&mut schedule));
    assert_eq!(schedule.next_action(), Next::Launch { changed: false });
    schedule.note_step_launched();
    assert!(!chunk(&mut schedule), "the chunk runs after a step");
    // This step fills the page.
    assert_eq!(schedule.next_action(), Next::Launch { changed: false });
    schedule.note_step_launched();
    assert_eq!(schedule.next_action(), Next::Read);
    let mut events = Vec::new();
    schedule.record_step(&[12], &[0], &mut events);
    assert!(schedule.cancel(prompt));
    schedule.record_step(&[13], &[1], &mut events);
    assert_eq!(events[1], Event { seq: id, token: 13, finish: None, logprobs: None }, "the units are free again");
}

/// The calls of `Engine::logits` if cached prefixes hold the pages.
#[test]
fn lent_pages_are_freed_once() {
    let mut schedule = Schedule::new(Limits { shares_prefixes: true, ..PACKED }, 6);
    let id = schedule.add(request(300, 3)).unwrap();
    join(&mut schedule, 10);
    assert!(schedule.cancel(id));
    assert_eq!(schedule.next_action(), Next::Idle);
    schedule.take_freed();
    let pages = schedule.lend(&[6]).unwrap();
    let evicted = schedule.take_freed();
    assert_eq!(evicted.len(), 3, "evicted pages must be released first");
    schedule.give(pages);
    assert_eq!(schedule.take_freed().len(), 6);
}
