use std::collections::{BTreeMap, BTreeSet};

use unweight_format::testing::Random;

use super::*;
use crate::draft::simulated::{SimulatedModel, keys};

mod attack;
mod drafts;

/// The number of tokens of a chunk.
const CHUNK: u32 = 192;
const LIMITS: Limits = Limits {
    max_batch: 3,
    context: 1000,
    vocab: 100,
    steps_ahead_max: 2,
    waiting_max: 100,
    kv_cache: KvCache::Bf16,
    chunk: CHUNK,
    mixes: false,
    shares_prefixes: false,
    adjusted_max: 2,
    speculation: Speculation { tokens: 0, rows: 0, is_mixture: false, weight_tokens: 1, model: None },
};
/// Drafts of up to `tokens` tokens, as cheap as for a large model.
fn speculation(tokens: u32) -> Speculation {
    Speculation { tokens, rows: 64, is_mixture: false, weight_tokens: 1 << 20, model: None }
}
/// Drafts by a model whose context is shorter than some sequences.
fn model_speculation(tokens: u32) -> Speculation {
    speculation(tokens).with_model(350, 0.1)
}
const PACKED: Limits = Limits { kv_cache: KvCache::Packed, ..LIMITS };

fn event(seq: SeqId, token: u32, finish: Option<Finish>) -> Event {
    Event { seq, token, finish, logprobs: None }
}

fn request(prompt: usize, max_new_tokens: u32) -> Request {
    Request::new(vec![7; prompt]).max_new_tokens(max_new_tokens)
}

#[test]
fn rejected_requests_change_nothing() {
    let mut schedule = Schedule::new(LIMITS, 4);
    assert_eq!(schedule.add(request(0, 1)), Err(AdmissionError::Empty));
    let mut unknown = request(3, 1);
    unknown.prompt[2] = 100;
    assert_eq!(schedule.add(unknown), Err(AdmissionError::UnknownToken { id: 100, at: 2, vocab: 100 }));
    let long = AdmissionError::TooLong { prompt: 999, max_new_tokens: 2, context: 1000 };
    assert_eq!(schedule.add(request(999, 2)), Err(long));
    assert!(matches!(schedule.add(request(1, u32::MAX)), Err(AdmissionError::TooLong { .. })));
    assert_eq!(schedule.add(request(200, 57)), Err(AdmissionError::NoRoom { pages: 5, tokens: 64, total: 4 }));
    assert_eq!(schedule.next_action(), Next::Idle);
    schedule.add(request(200, 0)).unwrap();
    assert_eq!((schedule.next_action(), schedule.free_pages()), (Next::Idle, 4));
    let mut small_queue = Schedule::new(Limits { waiting_max: 1, ..LIMITS }, 4);
    small_queue.add(request(1, 1)).unwrap();
    assert_eq!(small_queue.add(request(1, 1)), Err(AdmissionError::Busy { waiting: 1 }));
}

#[test]
fn steps_run_ahead_until_a_row_ends() {
    let mut schedule = Schedule::new(LIMITS, 100);
    let id = schedule.add(request(5, 4)).unwrap();
    assert_eq!(schedule.next_action(), Next::Prefill);
    schedule.begin_prefill();
    let chunk = schedule.next_chunk().unwrap();
    assert_eq!((chunk.running.position, chunk.tokens, chunk.start, chunk.is_last), (5, &[7; 5][..], 0, true));
    schedule.note_chunk_launched();
    assert_eq!(schedule.finish_prefill(9), Some(event(id, 9, None)));
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    schedule.note_step_launched();
    assert_eq!(schedule.next_action(), Next::Launch { changed: false });
    schedule.note_step_launched();
    assert_eq!(schedule.next_action(), Next::Read, "two steps are in flight");
    let mut events = Vec::new();
    schedule.record_step(&[10], &[], &mut events);
    assert_eq!((schedule.rows()[0].position, schedule.rows()[0].last), (6, 10));
    assert_eq!(schedule.next_action(), Next::Launch { changed: false });
    schedule.note_step_launched();
    schedule.record_step(&[11], &[], &mut events);
    assert_eq!(schedule.next_action(), Next::Read, "the fourth token is in flight");
    schedule.record_step(&[12], &[], &mut events);
    let last = event(id, 12, Some(Finish::Length));
    assert_eq!((events.len(), &events[2]), (3, &last));
    assert_eq!((schedule.next_action(), schedule.free_pages()), (Next::Idle, 100));
}

#[test]
fn tokens_after_a_stop_are_not_reported() {
    let mut schedule = Schedule::new(LIMITS, 100);
    schedule.add(request(5, 50).stop(vec![3])).unwrap();
    join(&mut schedule, 9);
    let mut events = Vec::new();
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    schedule.note_step_launched();
    schedule.note_step_launched();
    schedule.record_step(&[3], &[], &mut events);
    assert_eq!(events.last().and_then(|event| event.finish), Some(Finish::Stop));
    assert_eq!(
        (schedule.next_action(), schedule.free_pages()),
        (Next::Read, 99),
        "a step in flight still writes its page"
    );
    schedule.record_step(&[4], &[], &mut events);
    assert_eq!((events.len(), schedule.next_action(), schedule.free_pages()), (1, Next::Idle, 100));
}

/// Runs a chunk, whether or not a step is due before it. Returns whether it was the last one of its prompt.
fn chunk(schedule: &mut Schedule) -> bool {
    schedule.spent = 0;
    assert_eq!(schedule.next_action(), Next::Prefill);
    schedule.begin_prefill();
    let is_last = schedule.next_chunk().unwrap().is_last;
    schedule.note_chunk_launched();
    is_last
}

/// Prefills the next sequence, whose first token is `token`.
fn join(schedule: &mut Schedule, token: u32) -> SeqId {
    while !chunk(schedule) {}
    schedule.finish_prefill(token).unwrap().seq
}

/// Launches a step and reads it.
fn step(schedule: &mut Schedule, tokens: &[u32], lost: &[u32]) -> Vec<Event> {
    assert!(matches!(schedule.next_action(), Next::Launch { .. }));
    schedule.note_step_launched();
    let mut events = Vec::new();
    schedule.record_step(tokens, lost, &mut events);
    events
}

#[test]
fn preempted_sequences_are_computed_again_when_another_has_ended() {
    let mut schedule = Schedule::new(PACKED, 20);
    schedule.add(request(60, 100)).unwrap();
    schedule.add(request(70, 4)).unwrap();
    let (first, second) = (join(&mut schedule, 10), join(&mut schedule, 20));
    let events = step(&mut schedule, &[11, 21], &[1, 0]);
    assert_eq!((schedule.rows()[0].pages.len(), schedule.rows()[1].pages.len()), (1, 1));
    assert_eq!(events[0], event(first, 11, None), "the token of that step is right");
    assert!(schedule.take_freed().is_empty(), "pages are kept while a step may write them");
    assert_eq!((schedule.next_action(), schedule.preempted()), (Next::Launch { changed: true }, 1));
    assert_eq!((schedule.take_freed().len(), schedule.rows().len(), schedule.waiting()), (1, 1, 1));
    step(&mut schedule, &[22], &[0]);
    assert_eq!(schedule.next_action(), Next::Launch { changed: false }, "the second still holds its units");
    let last = step(&mut schedule, &[23], &[0]);
    assert_eq!(last, [event(second, 23, Some(Finish::Length))]);
    assert_eq!(schedule.next_action(), Next::Prefill);
    schedule.begin_prefill();
    let again = schedule.next_chunk().unwrap();
    assert_eq!(again.tokens, [vec![7; 60], vec![10, 11]].concat());
    assert_eq!((again.running.position, again.running.pages.len()), (62, 0));
    schedule.note_chunk_launched();
    assert_eq!(schedule.finish_prefill(12), Some(event(first, 12, None)));
    // 97 more tokens make 100.
    let ended = (0..97).map(|_| step(&mut schedule, &[13], &[0])[0].finish).collect::<Vec<_>>();
    assert_eq!(ended.iter().position(Option::is_some), Some(96));
    assert_eq!((schedule.next_action(), schedule.free_pages()), (Next::Idle, 20));
}

/// Returns the sizes of the chunks that run, with `s` for each step, until `rows` rows run.
fn order(schedule: &mut Schedule, rows: usize) -> String {
    let mut order = Vec::new();
    while schedule.rows().len() < rows {
        match schedule.next_action() {
            Next::Prefill => {
                schedule.begin_prefill();
                let chunk = schedule.next_chunk().unwrap();
                let (tokens, is_last) = (chunk.tokens.len(), chunk.is_last);
                order.push(tokens.to_string());
                schedule.note_chunk_launched();
                if is_last {
                    assert!(schedule.in_flight.is_empty());
                    schedule.finish_prefill(20);
                }
            }
            Next::Launch { .. } => {
                order.push("s".into());
                schedule.note_step_launched();
            }
            Next::Read => schedule.record_step(&vec![30; schedule.rows().len()], &[], &mut Vec::new()),
            Next::Mixed { .. } => {
                assert!(schedule.in_flight.is_empty());
                schedule.begin_prefill();
                let chunk = schedule.next_chunk().unwrap();
                let (tokens, is_last) = (chunk.tokens.len(), chunk.is_last);
                order.push(format!("{tokens}+s"));
                schedule.note_chunk_launched();
                schedule.note_step_launched();
                if is_last {
                    schedule.record_step(&vec![30; schedule.rows().len()], &[], &mut Vec::new());
                    schedule.finish_prefill(20);
                }
            }
            Next::Idle | Next::Draft => panic!("{order:?}"),
        }
    }
    order.join(" ")
}

#[test]
fn short_prompts_pass_a_long_one() {
    let prompt = |len: usize| Request::new(vec![7; len]).max_new_tokens(900);
    let orders = [
        (false, "1024 20 1024 s 256 s 1024 s 30 s 1024 s 512 s 392 s 256 s 1"),
        (true, "1024 20 1024+s 256+s 1024+s 30+s 1024+s 512+s 392+s 256+s 1+s"),
    ];
    for (mixes, expected) in orders {
        let limits = Limits { chunk: 1024, context: 10_000, max_batch: 16, mixes, ..LIMITS };
        let mut schedule = Schedule::new(limits, 900);
        for len in [5000, 20, 257, 256, 30] {
            schedule.add(prompt(len)).unwrap();
        }
        assert_eq!(order(&mut schedule, 5), expected, "prompts of up to 256 tokens, one after each chunk");
    }
}

#[test]
fn passed_prompts_are_cancelled_and_preempted() {
    let limits = Limits { chunk: 1024, context: 10_000, max_batch: 16, ..LIMITS };
    let begin_both = || {
        let mut schedule = Schedule::new(limits, 900);
        let [long, short] = [5000, 20].map(|len| schedule.add(request(len, 9)).unwrap());
        assert!(!chunk(&mut schedule) && schedule.passes());
        schedule.begin_prefill();
        assert_eq!((schedule.next_chunk().unwrap().running.id, schedule.waiting()), (short, 2));
        (schedule, long, short)
    };
    let (mut schedule, long, short) = begin_both();
    assert!(schedule.cancel(long));
    assert_eq!((schedule.next_chunk().unwrap().running.id, schedule.waiting()), (short, 1));
    assert!(schedule.cancel(short));
    assert_eq!((schedule.next_action(), schedule.free_pages()), (Next::Idle, 900));

    let (mut schedule, long, short) = begin_both();
    schedule.preempt_youngest();
    let next = schedule.next_chunk().unwrap();
    assert_eq!((next.running.id, next.start, next.sets_pages), (long, 1024, true), "the long prompt goes on");
    schedule.preempt_youngest();
    assert_eq!((schedule.is_prefilling(), schedule.waiting(), schedule.free_pages()), (false, 2, 900));
    assert!(schedule.cancel(long) && schedule.cancel(short));

    let (mut schedule, long, _) = begin_both();
    schedule.note_chunk_launched();
    assert_eq!(schedule.abort_prefill(), None, "a page may be lost to the units that the long prompt holds");
    assert_eq!((schedule.next_chunk().unwrap().running.id, schedule.waiting()), (long, 2));

    let (mut schedule, ..) = begin_both();
    schedule.clear();
    assert_eq!((schedule.next_action(), schedule.free_pages()), (Next::Idle, 900));
}

#[test]
fn steps_run_between_chunks() {
    let prompt = |token: u32, len: usize| Request::new(vec![token; len]).max_new_tokens(900);
    let limits = Limits { chunk: 1024, context: 10_000, max_batch: 16, shares_prefixes: true, ..LIMITS };
    let mut schedule = Schedule::new(limits, 900);
    schedule.add(prompt(7, 700)).unwrap();
    assert_eq!(order(&mut schedule, 1), "512 188", "no other sequence runs");
    schedule.add(prompt(8, 700)).unwrap();
    assert_eq!(order(&mut schedule, 2), "256 s 256 s 188", "steps have priority");
    schedule.add(prompt(9, 3700)).unwrap();
    assert_eq!(order(&mut schedule, 3), "s 1024 s 1024 s 1024 s 512 s 116");
    // Together they are many tokens. Prompts of this length are cut in the same way, so they share their chunks.
    for _ in 0..4 {
        schedule.add(prompt(3, 700)).unwrap();
    }
    assert_eq!(order(&mut schedule, 7), "512 188 188 s 188 s 188");
    assert_eq!(schedule.shared_prompt_tokens(), 3 * 512);
    // Short prompts take longer than their number of tokens.
    for token in 20..29 {
        schedule.add(prompt(token, 5)).unwrap();
    }
    assert_eq!(order(&mut schedule, 16), "s 5 5 s 5 5 s 5 5 s 5 5 s 5");
}

#[test]
fn chunks_run_with_steps() {
    let prompt = |token: u32, len: usize| Request::new(vec![token; len]).max_new_tokens(900);
    let limits = Limits { chunk: 1024, context: 10_000, max_batch: 16, mixes: true, ..LIMITS };
    let mut schedule = Schedule::new(limits, 900);
    schedule.add(prompt(7, 700)).unwrap();
    assert_eq!(order(&mut schedule, 1), "512 188", "no other sequence runs");
    schedule.add(prompt(8, 700)).unwrap();
    assert_eq!(order(&mut schedule, 2), "256+s 256+s 188+s");
    schedule.add(prompt(9, 3700)).unwrap();
    assert_eq!(order(&mut schedule, 3), "1024+s 1024+s 1024+s 512+s 116+s");
    for token in 20..23 {
        schedule.add(prompt(token, 5)).unwrap();
    }
    assert_eq!(order(&mut schedule, 6), "5+s 5+s 5+s");
    // Also while many prompts wait, a step runs with every chunk.
    for token in 40..44 {
        schedule.add(prompt(token, 700)).unwrap();
    }
    assert_eq!(order(&mut schedule, 10), "512+s 188+s 512+s 188+s 512+s 188+s 256+s 256+s 188+s");
    // Steps run ahead again, and a prompt waits for them.
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    schedule.note_step_launched();
    schedule.add(prompt(23, 5)).unwrap();
    assert_eq!(schedule.next_action(), Next::Read);
    schedule.record_step(&[30; 10], &[], &mut Vec::new());
    assert_eq!(schedule.next_action(), Next::Mixed { changed: false });
}

#[test]
fn larger_pieces_run_between_steps_of_many_rows() {
    let prompt = |token: u32, len: usize| Request::new(vec![token; len]).max_new_tokens(900);
    let limits = Limits { chunk: 1024, context: 10_000, max_batch: 40, shares_prefixes: false, ..LIMITS };
    for (rows, expected) in [(31, "256 s 256 s 188"), (32, "512 s 188")] {
        let mut schedule = Schedule::new(limits, 2000);
        for _ in 0..rows {
            schedule.add(prompt(8, 5)).unwrap();
        }
        order(&mut schedule, rows);
        schedule.add(prompt(9, 700)).unwrap();
        let sizes = order(&mut schedule, rows + 1);
        assert_eq!(sizes.trim_start_matches("s "), expected, "{rows} rows");
    }
}

#[test]
fn youngest_sequence_is_preempted() {
    let mut schedule = Schedule::new(LIMITS, 8);
    for _ in 0..3 {
        schedule.add(request(60, 300)).unwrap();
    }
    let ids = [join(&mut schedule, 10), join(&mut schedule, 20), join(&mut schedule, 30)];
    let mut used_max = 0;
    while schedule.preempted() == 0 {
        match schedule.next_action() {
            Next::Launch { .. } => schedule.note_step_launched(),
            Next::Read => schedule.record_step(&[40; 3], &[], &mut Vec::new()),
            next => panic!("{next:?}"),
        }
        used_max = used_max.max(schedule.rows().iter().map(|row| row.pages.len()).sum());
    }
    let remaining: Vec<SeqId> = schedule.rows().iter().map(|row| row.id).collect();
    assert_eq!((remaining, used_max), (ids[..2].to_vec(), 8), "all pages are in use");
    assert_eq!(schedule.waiting(), 1);
}

#[test]
fn equal_prefixes_are_computed_once() {
    let mut schedule = Schedule::new(Limits { shares_prefixes: true, ..LIMITS }, 17);
    let request = |last| Request::new([vec![7; 300], vec![last; 20]].concat()).max_new_tokens(3);
    schedule.add(request(1)).unwrap();
    let first = join(&mut schedule, 10);
    step(&mut schedule, &[11], &[]);
    schedule.add(request(2)).unwrap();
    assert_eq!(schedule.next_action(), Next::Prefill);
    schedule.begin_prefill();
    let chunk = schedule.next_chunk().unwrap();
    assert_eq!((chunk.start, chunk.tokens.len(), chunk.is_last), (192, 128, true));
    assert_eq!(chunk.running.pages[..3], schedule.rows()[0].pages[..3]);
    assert_ne!(chunk.running.pages[3], schedule.rows()[0].pages[3]);
    assert_eq!(schedule.shared_prompt_tokens(), 192);
    assert!(schedule.cancel(first) && schedule.cancel(SeqId(1)));
    // The prefix stays cached until its pages are needed.
    assert_eq!((schedule.next_action(), schedule.free_pages(), schedule.pages.free()), (Next::Idle, 17, 12));
    schedule.add(Request::new(vec![9; 940]).max_new_tokens(50)).unwrap();
    join(&mut schedule, 10);
    assert_eq!((schedule.pages.free(), schedule.free_pages()), (2, 2));
}

#[test]
fn lost_page_ends_a_single_sequence() {
    let mut schedule = Schedule::new(PACKED, 20);
    let id = schedule.add(request(60, 100)).unwrap();
    join(&mut schedule, 10);
    let full = event(id, 11, Some(Finish::UnitsFull));
    assert_eq!(step(&mut schedule, &[11], &[1]), [full]);
    assert_eq!((schedule.next_action(), schedule.preempted(), schedule.free_pages()), (Next::Idle, 0, 20));
    // The page is lost during the prompt.
    let id = schedule.add(request(130, 100)).unwrap();
    while !chunk(&mut schedule) {}
    let full = event(id, NO_TOKEN, Some(Finish::UnitsFull));
    assert_eq!(schedule.abort_prefill(), Some(full));
    assert_eq!((schedule.next_action(), schedule.waiting(), schedule.free_pages()), (Next::Idle, 0, 20));
    // A sequence that ends with that token is complete.
    schedule.add(request(60, 2)).unwrap();
    join(&mut schedule, 10);
    assert_eq!(step(&mut schedule, &[11], &[1])[0].finish, Some(Finish::Length));
}

#[test]
fn adjusted_sequences_wait_for_a_state_slot() {
    let mut schedule = Schedule::new(Limits { adjusted_max: 1, ..LIMITS }, 100);
    let adjusted = || request(5, 2).adjustments(Adjustments::default().min_new_tokens(1));
    let first = schedule.add(adjusted()).unwrap();
    assert_eq!(join(&mut schedule, 9), first);
    let second = schedule.add(adjusted()).unwrap();
    assert_eq!((schedule.next_action(), schedule.waiting()), (Next::Launch { changed: true }, 1));
    let plain = schedule.add(request(5, 3)).unwrap();
    assert_eq!(join(&mut schedule, 20), plain, "it needs no slot and passes");
    step(&mut schedule, &[10, 21], &[]);
    assert_eq!(join(&mut schedule, 9), second, "the first has ended");
    let wrong = request(5, 2).adjustments(Adjustments::default().bias(vec![(100, 1.0)]));
    assert!(matches!(schedule.add(wrong), Err(AdmissionError::Params(why)) if why.contains("token 100")));
    let many = schedule.add(request(5, 2).logprobs(Some(21)));
    assert!(matches!(many, Err(AdmissionError::Params(why)) if why.contains("21")));
}

/// A prefill that lacks one of its resources takes none of the others.
#[test]
fn prefill_takes_all_of_its_resources_or_none() {
    let limits = Limits { shares_prefixes: true, ..PACKED };
    let adjusted = || request(300, 2).adjustments(Adjustments::default().min_new_tokens(1));
    let lacks: [fn(&mut Schedule); 3] = [
        |schedule| _ = schedule.pages.take(7).unwrap(),
        |schedule| _ = schedule.hot_pages.take(3).unwrap(),
        |schedule| _ = schedule.state_slots.take(2).unwrap(),
    ];
    for lack in lacks {
        let mut schedule = Schedule::new(limits, 10);
        // Leaves a prefix that the next prompt shares.
        let id = schedule.add(request(300, 2)).unwrap();
        join(&mut schedule, 10);
        assert!(schedule.cancel(id));
        assert_eq!(schedule.next_action(), Next::Idle);
        lack(&mut schedule);
        schedule.add(adjusted()).unwrap();
        let resources = |schedule: &Schedule| {
            let pools = [&schedule.pages, &schedule.hot_pages, &schedule.state_slots].map(IndexPool::free);
            (pools, schedule.free_pages(), schedule.waiting())
        };
        let before = resources(&schedule);
        assert_eq!(schedule.next_action(), Next::Idle);
        schedule.begin_prefill();
        assert_eq!(resources(&schedule), before);
        // Nor if the decision to begin was wrong.
        let shared = schedule.prefixes.find(&[7; 300]);
        assert!(!shared.is_empty() && schedule.take_holding(shared, 5, true).is_none());
        // Prefix pages may have been evicted to the pool, so both are counted together.
        let after = resources(&schedule);
        assert_eq!((&after.0[1..], after.1, after.2), (&before.0[1..], before.1, before.2));
    }
}

#[test]
fn pages_stay_free_only_for_sequences_that_may_need_one() {
    for (limits, pages) in [(LIMITS, 3), (PACKED, 0)] {
        let mut schedule = Schedule::new(limits, pages);
        for _ in 0..4 {
            schedule.add(request(60, 4)).unwrap();
        }
        let ids = [10, 20, 30].map(|token| join(&mut schedule, token));
        assert_eq!((schedule.rows().len(), schedule.waiting(), schedule.free_pages()), (3, 1, 0), "{ids:?}");
    }
    // The second token that a sequence writes needs a second page.
    let mut schedule = Schedule::new(LIMITS, 3);
    schedule.add(request(63, 4)).unwrap();
    schedule.add(request(127, 1)).unwrap();
    join(&mut schedule, 10);
    assert!(matches!(schedule.next_action(), Next::Launch { .. }), "one of two free pages is kept");
}

#[test]
fn preempted_sequences_can_be_cancelled() {
    let mut schedule = Schedule::new(PACKED, 20);
    for _ in 0..3 {
        schedule.add(request(60, 100)).unwrap();
    }
    let ids = [join(&mut schedule, 10), join(&mut schedule, 20), join(&mut schedule, 30)];
    let events = step(&mut schedule, &[11, 21, 31], &[1, 1, 0]);
    assert_eq!(events.len(), 3);
    // One is cancelled before its pages are taken back, the other while it waits.
    assert!(schedule.cancel(ids[0]) && !schedule.cancel(ids[0]));
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    assert_eq!((schedule.preempted(), schedule.waiting(), schedule.rows().len()), (1, 1, 1));
    assert!(schedule.cancel(ids[1]) && !schedule.cancel(ids[1]));
    assert!(schedule.cancel(ids[2]));
    assert_eq!((schedule.next_action(), schedule.free_pages(), schedule.waiting()), (Next::Idle, 20, 0));
}

/// Sequences that fit alone but never together end one after the other, each with all its tokens.
#[test]
fn sequences_that_fit_one_at_a_time_all_end() {
    let mut simulation = Simulation::new(PACKED, Random::new(1), Loss::Units(2));
    simulation.units = |_, _| 1;
    for _ in 0..3 {
        simulation.add(60, 100, false);
    }
    simulation.run(3, 2000);
    assert!(simulation.schedule.preempted() > 0 && simulation.prefills <= 3 + simulation.losses);
    assert!(simulation.clients.received.values().all(|received| received.len() == 100));
    simulation.check("");
}

/// Any mixture of requests, cancellations, stops and lost pages: every sequence gets its own tokens, in order, and
/// exactly as many as it should. Pages of running sequences never overlap, and all are returned.
#[test]
fn sequences_do_not_affect_each_other() {
    let (mut preempted, mut full, mut cancelled, mut shared, mut mixed, mut passes) = (0, 0, 0, 0, 0, 0);
    let (mut drafts, mut model_drafts) = (DraftCounts::default(), DraftCounts::default());
    let add = |sum: DraftCounts, counts: DraftCounts| DraftCounts {
        drafted: sum.drafted + counts.drafted,
        accepted: sum.accepted + counts.accepted,
    };
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let (limits, loss) = match seed % 3 {
            0 => (LIMITS, Loss::None),
            1 => (PACKED, Loss::Units(random.below(6) as u32)),
            _ => (PACKED, Loss::OneIn(2 + random.below(20))),
        };
        let tokens = 1 + random.below(9) as u32;
        let speculation =
            [speculation(0), speculation(tokens), model_speculation(tokens)][[0, 1, 0, 2][seed as usize % 4]];
        let (shares_prefixes, mixes) = (random.below(2) == 0, random.below(2) == 0);
        let limits = Limits { shares_prefixes, mixes, speculation, ..limits };
        let mut simulation = Simulation::new(limits, random, loss);
        simulation.prompt_max = if seed % 5 == 0 { 800 } else { 300 };
        simulation.run(12, 40_000);
        simulation.check(&format!("seed {seed}"));
        preempted += simulation.schedule.preempted();
        shared += simulation.schedule.shared_prompt_tokens();
        mixed += simulation.mixed_passes;
        passes += simulation.passes;
        match speculation.model {
            Some(_) => model_drafts = add(model_drafts, simulation.schedule.draft_counts()),
            None => drafts = add(drafts, simulation.schedule.draft_counts()),
        }
        full += simulation.clients.ended.values().filter(|finish| **finish == Finish::UnitsFull).count();
        cancelled += simulation.clients.cancelled.iter().filter(|id| simulation.lost_once.contains(id)).count();
    }
    assert!(
        preempted > 500 && full > 50 && cancelled > 20 && shared > 10_000 && mixed > 800 && passes > 20,
        "{preempted} {full} {cancelled} {shared} {mixed} {passes}: too few cases"
    );
    for drafts in [drafts, model_drafts] {
        assert!(drafts.accepted > 5000 && drafts.drafted > drafts.accepted + 2000, "{drafts:?}");
    }
}

/// How a device loses pages.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    None,
    /// A page takes as many units as its content determines; a page that finds too few is lost.
    Units(u32),
    /// One page in this many, whatever it holds.
    OneIn(u64),
}

/// The request of a sequence.
struct Requested {
    prompt: usize,
    new: u32,
    stops: bool,
}

impl Requested {
    /// The number of tokens of the answer, unless the sequence is cancelled or the cache is full.
    fn end(&self) -> u32 {
        if self.stops { stop_of(self.new) + 1 } else { self.new }
    }
}

/// A row on the device.
struct Row {
    id: SeqId,
    position: u32,
    draft: Vec<u32>,
    pages: Vec<u32>,
    hot: u32,
    state_slot: Option<u32>,
    /// A page is lost: the row's tokens are wrong until the sequence is computed again.
    is_lost: bool,
}

/// The `nth` token of a sequence: seven that repeat, then one that does not. No token equals [`WRONG`].
fn token_of(id: SeqId, nth: u32) -> u32 {
    if nth % 8 == 7 { 4 + (id.0 as u32 * 31 + nth / 8) % 90 } else { 96 + nth % 8 % 3 }
}

/// The index of the token that ends an answer of `new` tokens; the token occurs once.
fn stop_of(new: u32) -> u32 {
    (new / 2) | 7
}

/// The token that a row of a draft samples after `guesses` guesses. After a wrong guess it is the next guess, wrong as
/// well.
fn sampled(id: SeqId, nth: u32, draft: &[u32], guesses: usize) -> u32 {
    let is_right = (nth..).zip(&draft[..guesses]).all(|(nth, guess)| *guess == token_of(id, nth));
    if is_right { token_of(id, nth + guesses as u32) } else { draft.get(guesses).copied().unwrap_or(WRONG) }
}

const WRONG: u32 = 95;

/// Two of three sequences have adjusted logits.
fn adjustments_of(id: SeqId) -> Adjustments {
    Adjustments::default().presence_penalty(if id.0.is_multiple_of(3) { 0.0 } else { 0.5 })
}

/// Prompts of two kinds with the same prefix.
fn prompt_of(id: SeqId, len: usize) -> Vec<u32> {
    (0..len).map(|at| if at < 100 { 7 } else { 1 + id.0 as u32 % 2 }).collect()
}

/// The requests of clients, and the tokens that they received.
#[derive(Default)]
struct Clients {
    requested: BTreeMap<SeqId, Requested>,
    received: BTreeMap<SeqId, Vec<u32>>,
    ended: BTreeMap<SeqId, Finish>,
    cancelled: BTreeSet<SeqId>,
}

impl Clients {
    /// Records an event: its token must be the next one of a running sequence. Returns why the sequence ends, if it
    /// does.
    fn receive(&mut self, event: &Event) -> Option<Finish> {
        let Event { seq, token, finish, .. } = *event;
        assert!(!self.cancelled.contains(&seq) && !self.ended.contains_key(&seq), "{event:?}");
        let received = self.received.entry(seq).or_default();
        if token != NO_TOKEN {
            assert_eq!(token, token_of(seq, received.len() as u32), "{event:?}");
            received.push(token);
        }
        finish.inspect(|finish| _ = self.ended.insert(seq, *finish))
    }

    /// Checks at the end that every sequence ended as requested, or as it had to.
    fn check(&self, may_be_full: bool, what: &str) {
        for (id, requested) in &self.requested {
            let received = self.received.get(id).map_or(0, Vec::len) as u32;
            let is_right = match self.ended.get(id) {
                Some(Finish::UnitsFull) => may_be_full && received <= requested.end(),
                Some(Finish::Stop) => requested.stops && received == requested.end(),
                Some(Finish::Length) => !requested.stops && received == requested.end(),
                Some(Finish::NotANumber | Finish::Complete | Finish::Constraint) => false,
                None => {
                    self.cancelled.contains(id) && received <= requested.end() || requested.new == 0 && received == 0
                }
            };
            assert!(is_right, "{what} {id:?}: {received} tokens of {}, {:?}", requested.end(), self.ended.get(id));
        }
    }

    /// A row as the device receives it: its input is the token before its position.
    fn row(&self, row: &Running) -> Row {
        let nth = row.position - self.requested[&row.id].prompt as u32;
        assert_eq!(row.last, token_of(row.id, nth), "the input of the step");
        let &Running { id, position, hot, state_slot, .. } = row;
        assert!(row.draft.is_empty() || state_slot.is_none(), "a sequence with adjusted logits has a draft");
        Row { id, position, draft: row.draft.clone(), pages: row.pages.clone(), hot, state_slot, is_lost: false }
    }
}

/// A draft model that lacks pages for some sequences.
fn draft_model(limits: Limits, random: &mut Random) -> SimulatedModel {
    let context = limits.speculation.model.map_or(1, |model| model.context);
    SimulatedModel::new(4 + random.below(20) as u32, context, limits.chunk)
}

/// Lets a draft model draft; one guess in four is wrong.
fn draft_with(model: &mut SimulatedModel, random: &mut Random, clients: &Clients, schedule: &mut Schedule) {
    let running: Vec<SeqId> = schedule.rows().iter().map(|row| row.id).collect();
    let requests: Vec<_> = schedule.draft_requests().iter().map(|(row, count)| row.draft_request(*count)).collect();
    assert!(!requests.is_empty() && schedule.in_flight.is_empty());
    let proposals = model.draft(&running, &requests, LIMITS.vocab, |id, text| {
        let nth = (text.len() - clients.requested[&id].prompt) as u32;
        if random.below(4) == 0 { WRONG } else { token_of(id, nth) }
    });
    schedule.set_drafts(proposals);
}

/// A schedule with a simulated device and clients.
struct Simulation {
    schedule: Schedule,
    draft_model: SimulatedModel,
    random: Random,
    loss: Loss,
    /// The BF16 units of a page, by its content and its index.
    units: fn(u64, u32) -> u32,
    clients: Clients,
    rows: Vec<Row>,
    /// Keys by page and token; hot pages follow the others.
    memory: Vec<u64>,
    /// The tokens of an answer that the device has counted, by state slot.
    counted: BTreeMap<u32, Vec<u32>>,
    /// Whether the sampling of a first token has overwritten the first row.
    is_overwritten: bool,
    prompt_is_lost: bool,
    /// The tokens and flags of each step in flight.
    in_flight: VecDeque<(Vec<u32>, Vec<u32>)>,
    /// The maximum number of tokens of a prompt.
    prompt_max: u64,
    /// The units that pages hold.
    held_units: BTreeMap<u32, u32>,
    prefills: u64,
    passes: u64,
    mixed_passes: u64,
    losses: u64,
    /// The sequences that have lost a page.
    lost_once: BTreeSet<SeqId>,
}

impl Simulation {
    const PAGES: u32 = 20;

    fn new(limits: Limits, mut random: Random, loss: Loss) -> Self {
        Self {
            schedule: Schedule::new(limits, Self::PAGES),
            draft_model: draft_model(limits, &mut random),
            random,
            loss,
            // One page in three does not fit in 12 bits.
            units: |content, page| [0, 2, 0, 0, 1, 0][(content as usize * 5 + page as usize) % 6],
            clients: Clients::default(),
            rows: Vec::new(),
            memory: vec![0; ((Self::PAGES + LIMITS.max_batch) * PAGE_TOKENS) as usize],
            counted: BTreeMap::new(),
            is_overwritten: false,
            prompt_is_lost: false,
            in_flight: VecDeque::new(),
            prompt_max: 300,
            held_units: BTreeMap::new(),
            prefills: 0,
            passes: 0,
            mixed_passes: 0,
            losses: 0,
            lost_once: BTreeSet::new(),
        }
    }

    fn add(&mut self, prompt: usize, new: u32, stops: bool) {
        let id = SeqId(self.clients.requested.len() as u64);
        let stop = if stops { vec![token_of(id, stop_of(new))] } else { Vec::new() };
        let request = Request::new(prompt_of(id, prompt)).max_new_tokens(new).stop(stop);
        let request = request.adjustments(adjustments_of(id));
        assert_eq!(self.schedule.add(request), Ok(id));
        self.clients.requested.insert(id, Requested { prompt, new, stops });
    }

    /// Runs until `count` sequences were added and nothing is left to do, in fewer than `actions_max` actions.
    fn run(&mut self, count: usize, actions_max: usize) {
        for _ in 0..actions_max {
            if self.clients.requested.len() < count && self.random.below(4) == 0 {
                let (prompt, new) = (1 + self.random.below(self.prompt_max) as usize, self.random.below(180) as u32);
                let stops = self.random.below(3) == 0 && new > stop_of(new);
                self.add(prompt, new, stops);
            }
            if self.clients.requested.len() > 3 && self.random.below(200) == 0 {
                let id = SeqId(self.random.below(count as u64));
                if self.schedule.cancel(id) {
                    self.clients.cancelled.insert(id);
                }
            }
            let next = self.schedule.next_action();
            self.release();
            let events = match next {
                Next::Idle if self.clients.requested.len() >= count => return,
                Next::Idle => Vec::new(),
                Next::Prefill => {
                    let last = self.run_chunk();
                    self.finish_prefill(last).into_iter().collect()
                }
                Next::Mixed { changed } => self.mixed(changed),
                Next::Draft => {
                    draft_with(&mut self.draft_model, &mut self.random, &self.clients, &mut self.schedule);
                    Vec::new()
                }
                Next::Launch { changed } => {
                    self.launch(changed);
                    Vec::new()
                }
                Next::Read => self.read(),
            };
            events.into_iter().for_each(|event| self.receive(event));
        }
        panic!("{:?}: still busy after {actions_max} actions", self.loss);
    }

    /// Takes back the units of pages that no sequence and no prompt uses, and checks the owners of all pages.
    fn release(&mut self) {
        let freed = self.schedule.take_freed();
        let all = self.schedule.rows().iter().chain(self.schedule.prefills().map(|prefill| &prefill.running));
        let shared_pages = |row: &Running| self.schedule.prefixes.pages_of(&row.shared) as usize;
        let private = all.clone().flat_map(|row| row.pages[shared_pages(row)..].to_vec());
        let shared: BTreeSet<u32> = self.schedule.prefixes.all_pages().into_iter().collect();
        let private: Vec<u32> = private.collect();
        let (given, used): (BTreeSet<u32>, BTreeSet<u32>) =
            (freed.iter().copied().collect(), private.iter().chain(&shared).copied().collect());
        // A page may have been taken again: its new sequence has packed nothing yet.
        assert_eq!(given.len(), freed.len(), "{freed:?}");
        assert!(all.clone().all(|row| row.pages[..shared_pages(row)].iter().all(|page| shared.contains(page))));
        self.held_units.retain(|page, _| !given.contains(page));
        assert!(self.held_units.keys().all(|page| used.contains(page)), "unused pages hold units");
        let free = self.schedule.pages.free();
        assert_eq!((used.len(), used.len() as u32 + free), (private.len() + shared.len(), Self::PAGES));
        let hot: BTreeSet<u32> = all.clone().map(|row| row.hot).collect();
        assert!(hot.len() == all.count() && hot.iter().all(|hot| *hot < LIMITS.max_batch), "{hot:?}");
    }

    /// The index of a token of a sequence in memory.
    fn memory_index(&self, pages: &[u32], hot: u32, position: u32, open: u32) -> usize {
        let (index, inside) = (position / PAGE_TOKENS, position % PAGE_TOKENS);
        let is_hot = self.schedule.limits.kv_cache == KvCache::Packed && index == open / PAGE_TOKENS;
        let page = if is_hot { Self::PAGES + hot } else { pages[index as usize] };
        (page * PAGE_TOKENS + inside) as usize
    }

    /// Checks the keys of tokens before `start`, and writes those of `start..end`. Afterwards, the token at `open` is
    /// in the hot page.
    fn attend(&mut self, tokens: &[u32], (pages, hot): (&[u32], u32), (start, end): (u32, u32), open: u32) {
        for (position, key) in (0..end).zip(keys(tokens)) {
            if position < start {
                let memory_index = self.memory_index(pages, hot, position, start);
                assert_eq!(self.memory[memory_index], key, "token {position} of {pages:?}");
            } else {
                let memory_index = self.memory_index(pages, hot, position, open);
                self.memory[memory_index] = key;
            }
        }
    }

    /// The BF16 units of a page of a sequence; equal prompts take the same number.
    fn units_of(&self, id: SeqId, index: u32) -> u32 {
        let end = ((index + 1) * PAGE_TOKENS) as usize;
        let content = match end {
            ..100 => 0,
            _ if end <= self.clients.requested[&id].prompt => id.0 % 2,
            _ => id.0,
        };
        (self.units)(content, index)
    }

    /// Packs page `index` of a sequence to `page`. Returns whether it is kept.
    fn pack(&mut self, id: SeqId, index: u32, page: u32) -> bool {
        let is_kept = match self.loss {
            Loss::None => true,
            Loss::OneIn(pages) => self.random.below(pages) > 0,
            Loss::Units(all) => {
                assert!(!self.held_units.contains_key(&page), "the page still holds units of an earlier sequence");
                let (need, free) = (self.units_of(id, index), all - self.held_units.values().sum::<u32>());
                self.held_units.insert(page, need.min(free));
                need <= free
            }
        };
        if !is_kept {
            self.losses += 1;
            self.lost_once.insert(id);
        }
        is_kept
    }

    fn read(&mut self) -> Vec<Event> {
        let (tokens, lost) = self.in_flight.pop_front().unwrap();
        let mut events = Vec::new();
        self.schedule.record_step(&tokens, &lost, &mut events);
        events
    }

    /// Runs a chunk and a step in one pass, as the engine does.
    fn mixed(&mut self, changed: bool) -> Vec<Event> {
        assert!(self.in_flight.is_empty() && self.schedule.rows().iter().all(|row| row.draft.is_empty()));
        self.mixed_passes += 1;
        let last = self.run_chunk();
        self.launch(changed);
        if last.is_none() {
            return Vec::new();
        }
        let events = self.read();
        events.into_iter().chain(self.finish_prefill(last)).collect()
    }

    /// Runs a chunk. Returns its sequence, and the number of tokens that it has received, if the chunk is the last one.
    fn run_chunk(&mut self) -> Option<(SeqId, u32)> {
        if self.schedule.passes() {
            if std::mem::take(&mut self.prompt_is_lost) {
                let event = self.schedule.abort_prefill();
                event.into_iter().for_each(|event| self.receive(event));
                return None;
            }
            self.passes += 1;
        }
        self.schedule.begin_prefill();
        self.release();
        let Chunk { running, tokens, start, sets_pages, is_last } = self.schedule.next_chunk().unwrap();
        assert!(!is_last || self.in_flight.is_empty());
        let (id, hot, pages) = (running.id, running.hot, running.pages.clone());
        let received = self.clients.received.get(&id).map_or(&[][..], Vec::as_slice);
        let all = [prompt_of(id, self.clients.requested[&id].prompt), received.to_vec()].concat();
        let end = start + tokens.len() as u32;
        assert_eq!(tokens, &all[start as usize..end as usize]);
        assert!(
            start.is_multiple_of(PAGE_TOKENS)
                && tokens.len() <= CHUNK as usize
                && (end as usize == all.len()) == is_last
        );
        let nth = received.len() as u32;
        self.prefills += u64::from(start == self.schedule.tokens_of(&running.shared));
        if sets_pages {
            self.prompt_is_lost = false;
        }
        self.attend(&all, (&pages, hot), (start, end), end);
        if self.schedule.limits.kv_cache == KvCache::Packed {
            for index in start / PAGE_TOKENS..end / PAGE_TOKENS {
                self.prompt_is_lost |= !self.pack(id, index, pages[index as usize]);
            }
        }
        self.schedule.note_chunk_launched();
        if !is_last {
            return None;
        }
        let slot = self.schedule.next_chunk().unwrap().running.state_slot;
        assert_eq!(slot.is_none(), adjustments_of(id).is_none());
        if let Some(slot) = slot {
            assert!(self.schedule.rows().iter().all(|row| row.state_slot != Some(slot)), "two sequences share a slot");
            let history = self.schedule.next_chunk().unwrap().running.history();
            assert_eq!(
                (history.prompt.len(), history.answer),
                (self.clients.requested[&id].prompt, &all[self.clients.requested[&id].prompt..])
            );
            self.counted.insert(slot, [history.answer, &[token_of(id, nth)]].concat());
        }
        Some((id, nth))
    }

    /// Samples the first token of a sequence whose last chunk was run.
    fn finish_prefill(&mut self, last: Option<(SeqId, u32)>) -> Option<Event> {
        let (id, nth) = last?;
        self.is_overwritten = true;
        if std::mem::take(&mut self.prompt_is_lost) {
            return self.schedule.abort_prefill();
        }
        self.schedule.finish_prefill(token_of(id, nth))
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
            let prompt = self.clients.requested[&row.id].prompt;
            let nth = row.position + 1 - prompt as u32;
            let received = (0..nth).map(|nth| token_of(row.id, nth));
            let mut all: Vec<u32> = prompt_of(row.id, prompt).into_iter().chain(received).collect();
            if !row.is_lost {
                self.attend(&all, (&row.pages, row.hot), (row.position, row.position + 1), row.position);
                if let Some(slot) = row.state_slot {
                    let counted = self.counted.get_mut(&slot).unwrap();
                    assert_eq!(counted, &all[prompt..], "penalties count the tokens so far");
                    counted.push(token_of(row.id, nth));
                }
            }
            tokens.push(if row.is_lost { WRONG } else { token_of(row.id, nth) });
            row.position += 1;
            let packs = self.schedule.limits.kv_cache == KvCache::Packed;
            for (at, (guess, position)) in row.draft.iter().zip(row.position..).enumerate() {
                all.push(*guess);
                self.attend(&all, (&row.pages, row.hot), (position, position + 1), position);
                tokens.push(sampled(row.id, nth, &row.draft, at + 1));
                assert!(!packs || (position + 1) % PAGE_TOKENS > 0, "a packed page contains a drafted token");
            }
            if row.position.is_multiple_of(PAGE_TOKENS) && packs {
                let index = row.position / PAGE_TOKENS - 1;
                let page = row.pages[index as usize];
                row.is_lost |= !self.pack(row.id, index, page);
                let (from, to) = ((Self::PAGES + row.hot) * PAGE_TOKENS, page * PAGE_TOKENS);
                self.memory.copy_within(from as usize..(from + PAGE_TOKENS) as usize, to as usize);
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
        if let (Finish::UnitsFull, Loss::Units(all)) = (finish, self.loss) {
            // Only a sequence that would not fit alone. The token of a step has no keys and values yet.
            let tokens = self.clients.requested[&seq].prompt + received.len() - usize::from(token != NO_TOKEN);
            let pages = tokens as u32 / PAGE_TOKENS;
            let need: u32 = (0..pages).map(|page| self.units_of(seq, page)).sum();
            assert!(need > all, "{event:?}: {need} units of {all}");
        }
        assert!(token != NO_TOKEN || finish == Finish::UnitsFull);
    }

    /// Checks at the end what every sequence received.
    fn check(&self, what: &str) {
        assert_eq!((self.schedule.free_pages(), self.schedule.waiting()), (Self::PAGES, 0), "{what}");
        assert_eq!(self.schedule.hot_pages.free(), LIMITS.max_batch, "{what}");
        assert_eq!(self.schedule.state_slots.free(), LIMITS.adjusted_max, "{what}");
        // A prefill is the first of its sequence, or follows a lost page. Longer prompts are also preempted for pages.
        let again = if self.prompt_max > 300 { self.schedule.preempted() } else { self.losses };
        assert!(self.prefills <= self.clients.requested.len() as u64 + again, "{what}");
        self.clients.check(self.loss != Loss::None, what);
    }
}

/// A constraint that allows the tokens of a list in order.
#[derive(Clone, Debug)]
struct Script(Vec<u32>);

impl crate::Constraint for Script {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(self.clone())
    }
}

impl ConstraintState for Script {
    fn allow(&mut self, mask: &mut [u32]) {
        self.0.first().into_iter().for_each(|token| mask[*token as usize / 32] |= 1 << (token % 32));
    }

    fn take(&mut self, token: u32) -> bool {
        assert_eq!(token, self.0.remove(0));
        self.0.is_empty()
    }
}

fn scripted(tokens: &[u32]) -> Request {
    request(5, 50).constraint(Some(std::sync::Arc::new(Script(tokens.to_vec()))))
}

fn mask(token: u32) -> Vec<u32> {
    (0..4).map(|word| if token / 32 == word { 1 << (token % 32) } else { 0 }).collect()
}

/// Adds a request and runs its prompt. Its first token is the one that its constraint allows, or else `free`.
fn begin(schedule: &mut Schedule, request: Request, free: u32) -> SeqId {
    let id = schedule.add(request).unwrap();
    // It does not matter here whether a step is due first.
    schedule.next_action();
    schedule.begin_prefill();
    let mask = schedule.prefill_mask();
    schedule.note_chunk_launched();
    let token = mask.iter().position(|word| *word != 0).map(|at| at as u32 * 32 + mask[at].trailing_zeros());
    schedule.finish_prefill(token.unwrap_or(free)).unwrap();
    id
}

#[test]
fn masks_follow_the_tokens_that_were_read() {
    let mut schedule = Schedule::new(LIMITS, 100);
    let ids = [scripted(&[40, 41, 99]), request(5, 50), scripted(&[3, 2])];
    let ids = ids.map(|request| begin(&mut schedule, request, 7));
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    schedule.note_step_launched();
    assert_eq!(schedule.masks(), [mask(41), mask(2)].concat(), "one mask per constrained row, in order");
    let mut events = Vec::new();
    schedule.record_step(&[41, 8, 2], &[], &mut events);
    let complete = Some(Finish::Complete);
    assert_eq!(events, [event(ids[0], 41, None), event(ids[1], 8, None), event(ids[2], 2, complete)]);
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    schedule.note_step_launched();
    assert_eq!(schedule.masks(), mask(99));
    events.clear();
    schedule.record_step(&[NO_TOKEN, NO_TOKEN], &[], &mut events);
    let why: Vec<_> = events.iter().map(|event| event.finish.unwrap()).collect();
    assert_eq!(why, [Finish::Constraint, Finish::NotANumber]);
}

#[test]
fn preempted_sequences_keep_the_state_of_their_constraint() {
    let mut schedule = Schedule::new(Limits { adjusted_max: 1, ..LIMITS }, 100);
    let id = begin(&mut schedule, scripted(&[10, 11, 12, 13]), 0);
    let other = begin(&mut schedule, request(5, 50), 7);
    // Only one slot exists, so the second sequence waits.
    schedule.add(scripted(&[1, 2])).unwrap();
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    schedule.note_step_launched();
    let mut events = Vec::new();
    schedule.record_step(&[11, 8], &[1, 0], &mut events);
    assert_eq!(events, [event(id, 11, None), event(other, 8, None)]);
    // The sequence has lost a page: it waits, and continues with the third token.
    schedule.next_action();
    assert!(schedule.cancel(other));
    assert_eq!((schedule.next_action(), schedule.preempted()), (Next::Prefill, 1));
    schedule.begin_prefill();
    assert_eq!(schedule.prefill_mask(), mask(12));
    schedule.note_chunk_launched();
    assert_eq!(schedule.finish_prefill(12), Some(event(id, 12, None)));
}
