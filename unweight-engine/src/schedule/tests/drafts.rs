//! Tests which drafts are verified, and how their tokens are counted.

use super::*;
use crate::draft::{Acceptance, Proposal};

fn drafting(limits: Limits, tokens: u32) -> Schedule {
    Schedule::new(Limits { speculation: speculation(tokens), ..limits }, 100)
}

/// A sequence that has repeated `abab...` for some steps, with all guesses right.
fn repeating(schedule: &mut Schedule, max_new_tokens: u32) -> SeqId {
    let id = schedule.add(request(5, max_new_tokens)).unwrap();
    join(schedule, 10);
    for _ in 0..6 {
        right(schedule);
    }
    id
}

/// The draft of a row.
fn draft(row: &Running) -> Vec<u32> {
    row.inputs().skip(1).map(|(token, _)| token).collect()
}

/// Runs a step in which all sequences continue `abab...`. Returns its number of rows.
fn right(schedule: &mut Schedule) -> u32 {
    assert!(matches!(schedule.next_action(), Next::Launch { .. }));
    let other = |token: u32| if token == 10 { 11 } else { 10 };
    let tokens: Vec<u32> = schedule
        .rows()
        .iter()
        .flat_map(|row| row.inputs().map(|(token, _)| other(token)).collect::<Vec<_>>())
        .collect();
    schedule.note_step_launched();
    schedule.record_step(&tokens, &[], &mut Vec::new());
    tokens.len() as u32
}

#[test]
fn accepted_drafts_yield_several_tokens() {
    let mut schedule = drafting(LIMITS, 3);
    let id = repeating(&mut schedule, 200);
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    let row = &schedule.rows()[0];
    let (position, last) = (row.position, row.last);
    let expected = if last == 10 { [10, 11, 10, 11] } else { [11, 10, 11, 10] };
    assert!(row.inputs().eq(expected.into_iter().zip(position..)), "{row:?}");
    schedule.note_step_launched();
    assert_eq!((schedule.step_rows(), schedule.next_action()), (4, Next::Read), "no step runs after a draft");
    let mut events = Vec::new();
    // The second guess is wrong: the token sampled for it is right, and later ones are dropped.
    let [_, first, second, _] = expected;
    schedule.record_step(&[first, 50, second, 60], &[], &mut events);
    assert_eq!(events, [event(id, first, None), event(id, 50, None)]);
    let row = &schedule.rows()[0];
    assert_eq!((row.position, row.last, row.launched), (position + 2, 50, row.produced));
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    assert!(draft(&schedule.rows()[0]).is_empty(), "50 did not occur before");
    // All guesses are right.
    let before = schedule.draft_counts();
    repeating(&mut drafting(LIMITS, 3), 200);
    let mut schedule = drafting(LIMITS, 3);
    repeating(&mut schedule, 200);
    let (counts, tokens) = (schedule.draft_counts(), schedule.rows()[0].produced);
    assert_eq!((right(&mut schedule), schedule.rows()[0].produced), (4, tokens + 4));
    let after = schedule.draft_counts();
    assert_eq!((after.drafted - counts.drafted, after.accepted - counts.accepted), (3, 3));
    assert!(before.accepted < before.drafted);
}

#[test]
fn drafts_end_with_the_sequence_or_a_stop_token() {
    let mut schedule = drafting(LIMITS, 8);
    repeating(&mut schedule, 60);
    let mut rows_max = 0;
    while schedule.next_action() != Next::Idle {
        let row = &schedule.rows()[0];
        rows_max = rows_max.max(row.step_rows());
        // The last token is sampled, but never the input of a row.
        assert!(row.produced + row.step_rows() <= 60, "{row:?}");
        right(&mut schedule);
    }
    assert_eq!((rows_max, schedule.free_pages()), (9, 100));
    let mut schedule = drafting(LIMITS, 4);
    let id = schedule.add(request(5, 200).stop(vec![77])).unwrap();
    join(&mut schedule, 10);
    (0..6).for_each(|_| _ = right(&mut schedule));
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    let guesses = draft(&schedule.rows()[0]);
    schedule.note_step_launched();
    let mut events = Vec::new();
    schedule.record_step(&[guesses[0], 77, guesses[2], guesses[3], 5], &[], &mut events);
    assert_eq!(events, [event(id, guesses[0], None), event(id, 77, Some(Finish::Stop))]);
    assert_eq!((schedule.next_action(), schedule.free_pages()), (Next::Idle, 100));
}

#[test]
fn drafts_do_not_fill_a_packed_page() {
    for (limits, may_cross) in [(LIMITS, true), (PACKED, false)] {
        let mut schedule = drafting(limits, 15);
        repeating(&mut schedule, 300);
        let mut crossed = false;
        while schedule.next_action() != Next::Idle {
            let row = &schedule.rows()[0];
            let end = row.position + row.step_rows() - 1;
            let crosses = row.step_rows() > 1 && (end + 1) / PAGE_TOKENS > row.position / PAGE_TOKENS;
            crossed |= crosses;
            assert!(may_cross || !crosses, "{row:?}");
            assert!(limits.kv_cache == KvCache::Packed || end < row.pages.len() as u32 * PAGE_TOKENS, "{row:?}");
            right(&mut schedule);
        }
        assert_eq!(crossed, may_cross);
    }
}

/// Pairs that were followed by another token before: after accepted drafts, some guesses are tried, then no more.
/// Without these, none is tried, because wrong guesses are noticed without verification.
#[test]
fn wrong_guesses_end_drafts() {
    for (repeats, expected) in [(8, 7..=7 * 6), (0, 0..=0)] {
        let mut schedule = drafting(Limits { vocab: 10_000, ..LIMITS }, 7);
        let prompt: Vec<u32> = (0..200).flat_map(|at| [100 + at, 101 + at, 5000 + at]).collect();
        schedule.add(Request::new(prompt).max_new_tokens(190)).unwrap();
        join(&mut schedule, 10);
        (0..repeats).for_each(|_| _ = right(&mut schedule));
        let (before, mut token) = (schedule.draft_counts(), 99);
        assert_eq!(before.accepted > 0, repeats > 0);
        loop {
            match schedule.next_action() {
                Next::Launch { .. } => schedule.note_step_launched(),
                Next::Idle => break,
                _ => {
                    token += 1;
                    let tokens = [vec![token], vec![9000; schedule.step_rows() as usize - 1]].concat();
                    schedule.record_step(&tokens, &[], &mut Vec::new());
                }
            }
        }
        let after = schedule.draft_counts();
        assert_eq!(after.accepted, before.accepted);
        assert!(token > 200 && expected.contains(&(after.drafted - before.drafted)), "{before:?} {after:?}");
    }
}

/// The number of rows of a step, depending on what makes rows expensive.
#[test]
fn draft_lengths_follow_the_cost_of_rows() {
    let rows = |sequences: u64, speculation: Speculation| {
        let limits = Limits { max_batch: 64, speculation, ..LIMITS };
        let mut schedule = Schedule::new(limits, 300);
        for _ in 0..sequences {
            schedule.add(request(1, 200)).unwrap();
        }
        (0..sequences).for_each(|_| _ = join(&mut schedule, 10));
        while schedule.rows()[0].produced < 60 {
            right(&mut schedule);
        }
        right(&mut schedule)
    };
    let cheap = speculation(15);
    assert_eq!([rows(1, cheap), rows(4, cheap)], [16, 64], "the maximum");
    assert_eq!(rows(60, cheap), 60, "four drafted tokens do not justify a verification");
    assert_eq!(rows(1, Speculation { rows: 9, ..cheap }), 9);
    assert_eq!(rows(64, cheap), 64, "no drafts");
    assert_eq!(rows(1, Speculation { is_mixture: true, ..cheap }), 16, "a mixture, too");
    // If attention takes most of the time, less likely guesses do not pay.
    let shorter = rows(1, Speculation { weight_tokens: 1, ..cheap });
    assert!((2..16).contains(&shorter), "{shorter}");
    assert_eq!(rows(1, Speculation { tokens: 0, ..cheap }), 1);
}

/// A sequence of a schedule with a draft model, and a clock that runs as the schedule assumes.
struct Timed {
    schedule: Schedule,
    model: SimulatedModel,
    speculation: Speculation,
    time: f32,
    tokens: u32,
}

impl Timed {
    fn new(step_time: f32, chance: Acceptance) -> Self {
        let speculation = speculation(4).with_model(100_000, step_time);
        let limits = Limits { context: 100_000, chunk: 1024, speculation, ..LIMITS };
        let mut schedule = Schedule::new(limits, 2000);
        schedule.drafts.acceptance = chance;
        let model = SimulatedModel::new(2000, 100_000, 1024);
        Self { schedule, model, speculation, time: 0.0, tokens: 0 }
    }

    /// Runs a request to its end. Every guess is right if `is_right`, else none is.
    fn run(&mut self, prompt: usize, new: u32, is_right: bool) {
        let id = self.schedule.add(request(prompt, new)).unwrap();
        join(&mut self.schedule, 1);
        let step_time = self.speculation.model.unwrap().step_time;
        loop {
            match self.schedule.next_action() {
                Next::Draft => {
                    let (chunks, steps) = (self.model.chunks, self.model.steps);
                    let requests = self.schedule.draft_requests();
                    let requests: Vec<_> = requests.iter().map(|(row, count)| row.draft_request(*count)).collect();
                    let proposals = self.model.draft(&[id], &requests, LIMITS.vocab, |_, text| {
                        (text.len() - prompt) as u32 % 50 + u32::from(!is_right)
                    });
                    self.schedule.set_drafts(proposals);
                    let (chunks, steps) = (self.model.chunks - chunks, self.model.steps - steps);
                    // A chunk of the model takes up to eight times as long as its step.
                    self.time += step_time * (steps + chunks * 8.min(prompt as u64 / 128 + 1)) as f32 + 0.05;
                }
                Next::Launch { .. } => {
                    let rows = self.schedule.step_rows();
                    self.time += self.speculation.step_time(rows) + if rows > 1 { 0.1 } else { 0.0 };
                    self.schedule.note_step_launched();
                }
                Next::Read => {
                    let row = &self.schedule.rows()[0];
                    let nth = row.position + 1 - prompt as u32;
                    let tokens: Vec<u32> = (nth..nth + row.step_rows()).map(|nth| nth % 50).collect();
                    let mut events = Vec::new();
                    self.schedule.record_step(&tokens, &[], &mut events);
                    self.tokens += events.len() as u32;
                    assert!(events.iter().zip(&tokens).all(|(event, token)| event.token == *token));
                    if events.iter().any(|event| event.finish.is_some()) {
                        break;
                    }
                }
                next => panic!("{next:?}"),
            }
        }
    }

    /// The tokens per time, relative to steps without drafts.
    fn speed(&self) -> f32 {
        self.tokens as f32 / self.time
    }
}

#[test]
fn draft_steps_take_the_time_of_weights_and_layers() {
    // Llama-3.2-1B and Llama-3.1-8B, packed.
    let small = draft_step_time((1_860_000_000, 16), (12_080_000_000, 32));
    assert!((0.18..0.22).contains(&small), "{small}");
    assert_eq!(draft_step_time((5, 2), (5, 2)), 1.0);
    assert!(draft_step_time((0, 0), (0, 0)) < 1.0);
}

#[test]
fn draft_models_of_wrong_guesses_cost_little() {
    for step_time in [0.05, 0.2, 0.4] {
        // A first sequence, then more of them; the last one has a long prompt, which the model does not see.
        let mut timed = Timed::new(step_time, Acceptance::default());
        timed.run(100, 400, false);
        let first = timed.speed();
        (0..10).for_each(|_| timed.run(100, 400, false));
        let (all, chunks) = (timed.speed(), timed.model.chunks);
        timed.run(20_000, 100, false);
        assert!(first > 0.975 && all > 0.985, "{step_time}: {first}, then {all}");
        assert!(timed.model.chunks <= chunks + 1 && chunks > 1, "{step_time}");
        let counts = timed.schedule.draft_counts();
        assert!(counts.accepted == 0 && counts.drafted > 10, "{counts:?}");
    }
}

#[test]
fn draft_models_of_right_guesses_shorten_the_time() {
    for (step_time, expected) in [(0.05, 2.5), (0.2, 1.8), (0.4, 1.2)] {
        let mut timed = Timed::new(step_time, Acceptance::default());
        timed.run(100, 400, true);
        let first = timed.speed();
        timed.run(3000, 400, true);
        let all = timed.speed();
        assert!(first > expected && all > expected, "{step_time}: {first}, then {all}");
    }
    // After many wrong guesses, trials find that guesses are right.
    let mut timed = Timed::new(0.2, Acceptance::default());
    (0..3).for_each(|_| timed.run(100, 400, false));
    (0..8).for_each(|_| timed.run(100, 400, true));
    let before = timed.schedule.draft_counts();
    timed.run(100, 400, true);
    let after = timed.schedule.draft_counts();
    assert!(after.accepted - before.accepted > 250, "{before:?} {after:?}");
    // A model as slow as its target is never used but for trials.
    let mut timed = Timed::new(1.0, Acceptance::default());
    timed.run(100, 800, true);
    assert!(timed.speed() > 0.98 && timed.schedule.draft_counts().drafted < 10);
}

/// Drafts are dropped if another sequence joins before they are verified, and a cancelled sequence takes its own along.
#[test]
fn drafts_do_not_outlive_the_rows_that_they_are_for() {
    let draft = |schedule: &mut Schedule| {
        assert_eq!(schedule.next_action(), Next::Draft);
        let proposals = schedule.draft_requests().iter().map(|_| Proposal::Tokens(vec![3; 9])).collect();
        schedule.set_drafts(proposals);
    };
    let mut schedule = Schedule::new(Limits { speculation: model_speculation(4), ..LIMITS }, 100);
    let first = schedule.add(request(5, 200)).unwrap();
    join(&mut schedule, 10);
    draft(&mut schedule);
    assert!((2..=5).contains(&schedule.step_rows()), "no more than requested");
    schedule.add(request(5, 200)).unwrap();
    let second = join(&mut schedule, 20);
    assert_eq!(schedule.step_rows(), 2, "the draft is dropped");
    draft(&mut schedule);
    let rows: Vec<u32> = schedule.rows().iter().map(Running::step_rows).collect();
    assert!(rows.iter().all(|rows| *rows > 1));
    assert!(schedule.cancel(first));
    assert_eq!(schedule.next_action(), Next::Launch { changed: true });
    assert_eq!((schedule.step_rows(), schedule.rows()[0].id), (rows[1], second));
    schedule.note_step_launched();
    // No guess is right, so the next step needs a new draft; without an answer it has none.
    schedule.record_step(&vec![7; rows[1] as usize], &[], &mut Vec::new());
    assert_eq!(schedule.next_action(), Next::Draft);
    schedule.set_drafts(Vec::new());
    assert_eq!((schedule.next_action(), schedule.step_rows()), (Next::Launch { changed: true }, 1));
}
