//! Step graphs of random models, run by an interpreter whose values are digests. Every order that streams and events
//! allow must result in the tokens of a serial run.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
};

use proptest::prelude::*;
use unweight_codegen::spec::DecodeOutput;
use unweight_format::testing::Random;

use super::*;

mod simulate;

use simulate::{Span, Timeline, simulate};

const HARD: Mlp = [Pipeline::Exponents, Pipeline::FullDecode, Pipeline::Transcode];
const EASY: Mlp = [Pipeline::Palette, Pipeline::Palette, Pipeline::Raw];

fn digest(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The tokens of a model, computed without buffers, streams and slots.
fn expected(layers: &[Mlp]) -> u64 {
    let product = |layer: u32, projection: Projection, pipeline: Pipeline, x: u64| {
        let weights = pipeline.decodes().map(|output| digest((layer, projection, output)));
        digest(("linear", layer, projection, pipeline, x, weights))
    };
    let mut hidden = digest(("embed", digest("ids")));
    for (layer, [gate, up, down]) in (0..).zip(layers) {
        let normed = digest(("norm", Some((layer, Place::Attention)), hidden));
        let attended = digest(("attention", layer, digest(("qkv", layer, normed))));
        hidden = digest(("o", layer, attended, hidden));
        let normed = digest(("norm", Some((layer, Place::Mlp)), hidden));
        let active = if (*gate, *up) == (Pipeline::Packed, Pipeline::Packed) {
            digest(("gate, up", layer, normed))
        } else {
            let gate = product(layer, Projection::Gate, *gate, normed);
            digest(("silu", layer, gate, product(layer, Projection::Up, *up, normed)))
        };
        hidden = digest(("add", hidden, product(layer, Projection::Down, *down, active)));
    }
    digest(("sample", digest(("head", digest(("norm", None::<(u32, Place)>, hidden))))))
}

/// Memory whose values are digests of what was computed. Memory that was never written is poison.
#[derive(Default)]
struct Interpreter {
    values: HashMap<Buffer, u64>,
}

impl Interpreter {
    fn value(&self, buffer: Buffer) -> u64 {
        self.values.get(&buffer).copied().unwrap_or_else(|| digest(("poison", buffer)))
    }

    fn run(&mut self, job: &Job) {
        let of = |buffer| self.value(buffer);
        let (buffer, value) = match *job {
            Job::Embed => (Buffer::Hidden, digest(("embed", of(Buffer::Ids)))),
            Job::Norm(at) => (Buffer::Normed, digest(("norm", at, of(Buffer::Hidden)))),
            Job::Qkv { layer } => (Buffer::Qkv, digest(("qkv", layer, of(Buffer::Normed)))),
            Job::Attention { layer } => (Buffer::Attended, digest(("attention", layer, of(Buffer::Qkv)))),
            Job::Output { layer } => (Buffer::Hidden, digest(("o", layer, of(Buffer::Attended), of(Buffer::Hidden)))),
            Job::GateUp { layer } => (Buffer::Gate, digest(("gate, up", layer, of(Buffer::Normed)))),
            Job::Linear { layer, projection, pipeline, slot } => {
                let weights = slot.map(|slot| of(Buffer::Slot(slot, projection)));
                let x = of(if projection == Projection::Down { Buffer::Gate } else { Buffer::Normed });
                let product = digest(("linear", layer, projection, pipeline, x, weights));
                match projection {
                    Projection::Gate => (Buffer::Gate, product),
                    Projection::Up => (Buffer::Up, product),
                    Projection::Down => (Buffer::Hidden, digest(("add", of(Buffer::Hidden), product))),
                }
            }
            Job::Activate { layer } => (Buffer::Gate, digest(("silu", layer, of(Buffer::Gate), of(Buffer::Up)))),
            Job::Decode { layer, projection, output, slot } => {
                (Buffer::Slot(slot, projection), digest((layer, projection, output)))
            }
            Job::Head => (Buffer::Logits, digest(("head", of(Buffer::Normed)))),
            Job::Sample => (Buffer::Ids, digest(("sample", of(Buffer::Logits)))),
        };
        self.values.insert(buffer, value);
    }
}

/// Runs the head of the stream that `choose` picks among those that are ready, until none is. Returns the tokens;
/// `None` if the graph hangs.
fn interpret(graph: &StepGraph, mut choose: impl FnMut(&[u8]) -> u8) -> Option<u64> {
    let streams = usize::from(graph.streams);
    let mut queues = vec![Vec::new(); streams];
    graph.steps.iter().for_each(|step| queues[usize::from(step.stream())].push(step));
    let (mut next, mut recorded) = (vec![0; streams], vec![false; graph.events as usize]);
    let mut interpreter = Interpreter::default();
    interpreter.values.insert(Buffer::Ids, digest("ids"));
    loop {
        let ready: Vec<u8> = (0..graph.streams)
            .filter(|stream| match queues[usize::from(*stream)].get(next[usize::from(*stream)]) {
                Some(Step::Wait { event, .. }) => recorded[*event as usize],
                head => head.is_some(),
            })
            .collect();
        if ready.is_empty() {
            break;
        }
        let stream = usize::from(choose(&ready));
        match queues[stream][next[stream]] {
            Step::Run { job, .. } => interpreter.run(job),
            Step::Record { event, .. } => recorded[*event as usize] = true,
            Step::Wait { .. } => {}
        }
        next[stream] += 1;
    }
    let done = (0..streams).all(|stream| next[stream] == queues[stream].len());
    done.then(|| interpreter.value(Buffer::Ids))
}

/// Runs one stream before all others.
fn eager(stream: u8) -> impl FnMut(&[u8]) -> u8 {
    move |ready| if ready.contains(&stream) { stream } else { ready[0] }
}

/// Runs one stream after all others.
fn starved(stream: u8) -> impl FnMut(&[u8]) -> u8 {
    move |ready| ready.iter().copied().find(|other| *other != stream).unwrap_or(stream)
}

fn without(graph: &StepGraph, step: usize) -> StepGraph {
    let mut graph = graph.clone();
    graph.steps.remove(step);
    graph
}

fn waits(graph: &StepGraph) -> Vec<usize> {
    let steps = graph.steps.iter().enumerate();
    steps.filter(|(_, step)| matches!(step, Step::Wait { .. })).map(|(index, _)| index).collect()
}

fn ranks(layers: &[Mlp]) -> usize {
    layers.iter().filter(|mlp| is_hard(mlp)).count()
}

/// Whether a wait only makes decoders share their multiprocessors, or only lets its stream begin. Values do not depend
/// on such a wait.
fn orders_no_values(graph: &StepGraph, wait: usize) -> bool {
    matches!(
        check(&without(graph, wait)),
        Err(Violation::Unforked { .. } | Violation::Race { buffer: Buffer::Share(_) | Buffer::Workspace(_), .. })
    )
}

prop_compose! {
    fn models(layers_max: usize)(
        layers in prop::collection::vec(prop::collection::vec(0..6usize, 3), 1..=layers_max),
        pattern in 0..5u8,
        slots in 1..=4u8,
        consumers in 1..=2u8,
        decode_sms in 3..100u32,
    ) -> (Vec<Mlp>, Layout) {
        let last = layers.len() - 1;
        let layers = layers.iter().enumerate().map(|(at, pipelines)| {
            let mlp: Mlp = std::array::from_fn(|projection| Pipeline::ALL[pipelines[projection]]);
            // As drawn; none hard; all but the first hard; only the last hard; every other one hard.
            match pattern {
                0 => mlp,
                1 => mlp.map(|pipeline| if pipeline.decodes().is_some() { Pipeline::Palette } else { pipeline }),
                2 if at == 0 => [Pipeline::Raw; 3],
                3 if at < last => EASY,
                4 if at % 2 == 1 => EASY,
                _ => HARD,
            }
        }).collect();
        (layers, Layout { slots, consumers, decode_sms, ..Layout::default() })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the model: nothing races, and every order results in the tokens of a serial run.
    #[test]
    fn every_interleaving_gives_the_serial_tokens((layers, layout) in models(80), seed: u64) {
        let graph = build(&layers, &layout).unwrap();
        prop_assert_eq!(check(&graph), Ok(()));
        let expected = expected(&layers);
        let mut random = Random::new(seed);
        for _ in 0..4 {
            let tokens = interpret(&graph, |ready| ready[random.below(ready.len() as u64) as usize]);
            prop_assert_eq!(tokens, Some(expected));
        }
        for stream in 0..graph.streams {
            prop_assert_eq!(interpret(&graph, eager(stream)), Some(expected), "stream {} first", stream);
            prop_assert_eq!(interpret(&graph, starved(stream)), Some(expected), "stream {} last", stream);
        }
    }

    /// Every hard tensor is decoded once, to the encoding that its product needs. Without hard tensors there is one
    /// stream and no event.
    #[test]
    fn hard_tensors_are_decoded_once((layers, layout) in models(80)) {
        let graph = build(&layers, &layout).unwrap();
        let mut decoded: HashMap<(u32, Projection), Vec<DecodeOutput>> = HashMap::new();
        for step in &graph.steps {
            if let Step::Run { job: Job::Decode { layer, projection, output, .. }, .. } = step {
                decoded.entry((*layer, *projection)).or_default().push(*output);
            }
        }
        for (layer, mlp) in (0..).zip(&layers) {
            for projection in Projection::ALL {
                let outputs: Vec<DecodeOutput> = mlp[projection as usize].decodes().into_iter().collect();
                prop_assert_eq!(decoded.remove(&(layer, projection)).unwrap_or_default(), outputs);
            }
        }
        prop_assert!(decoded.is_empty());
        if ranks(&layers) == 0 {
            prop_assert_eq!((graph.streams, graph.events, graph.slots), (1, 0, 0));
        } else {
            prop_assert_eq!(graph.streams, 2 + 3 * layout.slots);
        }
    }

    /// If decoding takes no time, all slots but one are filled ahead. If it takes long, the step is not longer than all
    /// jobs in sequence, and no multiprocessor runs two jobs.
    #[test]
    fn slots_are_filled_ahead((layers, layout) in models(80)) {
        let graph = build(&layers, &layout).unwrap();
        let time = |decode_us: f64, other_us: f64| {
            let cost = move |job: &Job, _: u32| if matches!(job, Job::Decode { .. }) { decode_us } else { other_us };
            simulate(&graph, &cost).unwrap()
        };
        let free = time(0.0, 1.0);
        let depth = usize::from(layout.slots - 1).min(ranks(&layers).saturating_sub(1));
        // Layers that decode different projections share no buffers, and may be decoded further ahead.
        let alike = layers.iter().filter(|mlp| is_hard(mlp)).all(|mlp| *mlp == HARD);
        let right = if alike { free.depth() == depth } else { free.depth() >= depth };
        prop_assert!(right, "{} of {}", free.depth(), depth);
        let slow = time(50.0, 7.0);
        let jobs = graph.steps.iter().filter(|step| matches!(step, Step::Run { .. })).count();
        prop_assert_eq!(slow.spans.len(), jobs);
        let serial: f64 = slow.spans.iter().map(|span| span.end_us - span.start_us).sum();
        prop_assert!(slow.total_us() <= serial && slow.overlap_us() <= slow.decode_us());
        let sms = |span: &Span| match &graph.steps[span.step] {
            Step::Run { sms, .. } => *sms,
            _ => 0,
        };
        for at in &slow.spans {
            let parallel = slow.spans.iter().filter(|span| span.start_us <= at.start_us && at.start_us < span.end_us);
            prop_assert!(parallel.map(sms).sum::<u32>() <= graph.sms, "{:?}", at);
        }
    }

    /// Every wait is necessary: without it, `check` finds a violation.
    #[test]
    fn missing_wait_is_a_violation((layers, layout) in models(24)) {
        let graph = build(&layers, &layout).unwrap();
        for wait in waits(&graph) {
            prop_assert!(check(&without(&graph, wait)).is_err(), "step {}: {:?}", wait, graph.steps[wait]);
        }
    }
}

/// Without a wait, some order also results in other tokens: `check` raises no false alarm.
#[test]
fn missing_wait_changes_the_result() {
    let (mut cases, mut random) = (0, Random::new(3));
    for slots in 1..=4 {
        let layers = [
            [Pipeline::Raw; 3],
            HARD,
            HARD,
            EASY,
            HARD,
            [Pipeline::Packed, Pipeline::Exponents, Pipeline::Packed],
            HARD,
            HARD,
        ];
        let graph = build(&layers, &Layout { slots, ..Layout::default() }).unwrap();
        for wait in waits(&graph).into_iter().filter(|wait| !orders_no_values(&graph, *wait)) {
            let broken = without(&graph, wait);
            let differs = |tokens: Option<u64>| tokens != Some(expected(&layers));
            let found = (0..graph.streams).any(|stream| {
                differs(interpret(&broken, eager(stream))) || differs(interpret(&broken, starved(stream)))
            });
            let found = found
                || (0..200)
                    .any(|_| differs(interpret(&broken, |ready| ready[random.below(ready.len() as u64) as usize])));
            assert!(found, "{slots} slots, without step {wait}: {:?}", graph.steps[wait]);
            cases += 1;
        }
    }
    assert!(cases > 100, "{cases}");
}

/// Layers 4 and 5 share slot 0 by the report's rule, and 5 is decoded before 4 is read.
#[test]
fn the_reports_slots_race_for_adjacent_hard_layers() {
    let mut layers = [EASY; 8];
    layers[0] = [Pipeline::Raw; 3];
    (layers[4], layers[5]) = (HARD, HARD);
    let report = Layout { rule: SlotRule::HalfOfLayer, ..Layout::default() };
    let graph = build(&layers, &report).unwrap();
    let error = check(&graph).unwrap_err();
    assert!(matches!(error, Violation::Race { buffer: Buffer::Slot(0, Projection::Gate), .. }), "{error:?}");
    let Violation::Race { first, second, .. } = error else { unreachable!() };
    let job = |step: usize| match graph.steps[step] {
        Step::Run { job, .. } => job,
        _ => panic!("step {step} is not a job"),
    };
    assert!(matches!((job(first), job(second)), (Job::Decode { layer: 5, .. }, Job::Linear { layer: 4, .. })));
    // If hard layers alternate with easy ones, as in the report's own bundles, its rule is sound.
    for (layer, mlp) in layers.iter_mut().enumerate().skip(1) {
        *mlp = if layer % 2 == 0 { HARD } else { EASY };
    }
    assert_eq!(check(&build(&layers, &report).unwrap()), Ok(()));
    let adjacent = [HARD; 8];
    assert_eq!(check(&build(&adjacent, &Layout::default()).unwrap()), Ok(()));
    assert!(check(&build(&adjacent, &report).unwrap()).is_err());
}

/// With the report's own waits, for whole streams (its Algorithms 6 and 7), the product is ordered after the wrong
/// decoder.
#[test]
fn the_reports_waits_for_streams_give_stale_weights() {
    let mut graph = StepGraph { streams: 8, slots: 2, sms: 132, ..StepGraph::default() };
    let gate = |slot| Buffer::Slot(slot, Projection::Gate);
    let (mut event, output) = (0, DecodeOutput::Full);
    let sync = |steps: &mut Vec<Step>, event: &mut u32, from: u8, to: u8| {
        steps.extend([Step::Record { stream: from, event: *event }, Step::Wait { stream: to, event: *event }]);
        *event += 1;
    };
    let run = |stream, job, reads, writes| Step::Run { stream, job, reads, writes, sms: 66, dependent: false };
    for layer in [4, 5] {
        if layer == 4 {
            sync(&mut graph.steps, &mut event, 0, 2);
            let job = Job::Decode { layer: 4, projection: Projection::Gate, output, slot: 0 };
            graph.steps.push(run(2, job, vec![], vec![gate(0)]));
            sync(&mut graph.steps, &mut event, 0, 2);
            let job = Job::Decode { layer: 5, projection: Projection::Gate, output, slot: 0 };
            graph.steps.push(run(2, job, vec![], vec![gate(0)]));
        }
        sync(&mut graph.steps, &mut event, 2, 0);
        let (projection, pipeline) = (Projection::Gate, Pipeline::FullDecode);
        let job = Job::Linear { layer, projection, pipeline, slot: Some(0) };
        graph.steps.push(run(0, job, vec![gate(0)], vec![Buffer::Gate]));
    }
    graph.events = event;
    let found = check(&graph).unwrap_err();
    let (want, stale) = ((4, output), Some((5, output)));
    assert_eq!(found, Violation::Stale { step: 8, slot: 0, projection: Projection::Gate, want, found: stale });
}

/// Each violation results from the smallest change of a sound step graph.
#[test]
fn every_violation_is_found() {
    let layers = [EASY, HARD, HARD, EASY, HARD];
    let sound = build(&layers, &Layout::default()).unwrap();
    assert_eq!(check(&sound), Ok(()));
    let at = |of: &dyn Fn(&Step) -> bool| sound.steps.iter().position(of).unwrap();
    let decoder = at(&|step| matches!(step, Step::Run { job: Job::Decode { .. }, .. }));
    let other = at(&|step| matches!(step, Step::Run { job: Job::Decode { slot: 1, .. }, .. }));
    let product =
        at(&|step| matches!(step, Step::Run { job: Job::Linear { layer: 1, projection: Projection::Down, .. }, .. }));
    let broken = |change: &dyn Fn(&mut StepGraph)| {
        let mut graph = sound.clone();
        change(&mut graph);
        check(&graph).unwrap_err()
    };
    let (step, event) = (sound.steps.len(), sound.events);
    let error = broken(&|graph| {
        graph.steps.push(Step::Wait { stream: 0, event });
        graph.events += 1;
    });
    assert_eq!(error, Violation::WaitBeforeRecord { step, event });
    assert_eq!(broken(&|graph| graph.steps.push(Step::Wait { stream: 0, event })), Violation::OutOfRange { step });
    assert_eq!(broken(&|graph| graph.steps.push(Step::Record { stream: 8, event: 0 })), Violation::OutOfRange { step });
    let error = broken(&|graph| graph.steps.push(Step::Record { stream: 0, event: 1 }));
    assert_eq!(error, Violation::RecordTwice { step, event: 1 });
    let fork = at(&|step| matches!(step, Step::Wait { stream: 2, .. }));
    assert_eq!(broken(&|graph| drop(graph.steps.remove(fork))), Violation::Unforked { step: fork, stream: 2 });
    let again = sound.steps[decoder].clone();
    let error = broken(&|graph| graph.steps.insert(decoder, again.clone()));
    let twice = Violation::DecodedTwice { step: decoder + 1, layer: 1, projection: Projection::Gate };
    assert_eq!(error, twice);
    let error = broken(&|graph| graph.hard[0][1] = Some(DecodeOutput::Full));
    assert_eq!(error, Violation::NeverDecoded { layer: 0, projection: Projection::Up });
    let error = broken(&|graph| {
        let Step::Run { job: Job::Decode { output, .. }, .. } = &mut graph.steps[decoder] else { unreachable!() };
        *output = DecodeOutput::Palette;
    });
    let stale = (1, DecodeOutput::Palette);
    assert!(matches!(error, Violation::Stale { found, .. } if found == Some(stale)), "{error:?}");
    assert_eq!(broken(&|graph| graph.slots = 1), Violation::OutOfRange { step: other });
    // A product that reads stored weights where they were decoded.
    let unread = Violation::Unread { layer: 1, projection: Projection::Down };
    let error = broken(&|graph| {
        let Step::Run { job: Job::Linear { pipeline, slot, .. }, reads, dependent, .. } = &mut graph.steps[product]
        else {
            unreachable!()
        };
        (*pipeline, *slot, *dependent) = (Pipeline::Palette, None, false);
        reads.retain(|buffer| !matches!(buffer, Buffer::Slot(..)));
    });
    assert_eq!(error, unread);
    let decoded_product =
        at(&|step| matches!(step, Step::Run { stream: 0, job: Job::Linear { slot: Some(0), .. }, .. }));
    let error = broken(&|graph| {
        let Step::Run { dependent, .. } = &mut graph.steps[decoded_product] else { unreachable!() };
        *dependent = true;
    });
    assert_eq!(error, Violation::DependentAfterWait { step: decoded_product });
    // A separate stream for the last token, which no stream waits for.
    let error = broken(&|graph| {
        graph.steps.push(Step::Record { stream: 0, event });
        graph.steps.push(Step::Wait { stream: 1, event });
        let (reads, writes) = (vec![Buffer::Logits], vec![Buffer::Up]);
        graph.steps.push(Step::Run { stream: 1, job: Job::Sample, reads, writes, sms: 1, dependent: false });
        graph.events += 1;
    });
    assert_eq!(error, Violation::Unjoined { stream: 1 });
    let packed = |stream, writes| {
        let job = Job::Linear { layer: 0, projection: Projection::Gate, pipeline: Pipeline::Packed, slot: None };
        Step::Run { stream, job, reads: vec![], writes: vec![writes], sms: 132, dependent: false }
    };
    let mut two = StepGraph { streams: 2, events: 2, sms: 132, ..StepGraph::default() };
    two.steps = vec![Step::Record { stream: 0, event: 0 }, Step::Wait { stream: 1, event: 0 }];
    two.steps.extend([packed(0, Buffer::Gate), packed(1, Buffer::Up)]);
    two.steps.extend([Step::Record { stream: 1, event: 1 }, Step::Wait { stream: 0, event: 1 }]);
    assert_eq!(check(&two), Err(Violation::Crowded { first: 2, second: 3 }));
    // A step that omits one of the buffers of its job, for each of them.
    for (step, entry) in sound.steps.iter().enumerate() {
        let Step::Run { reads, writes, .. } = entry else { continue };
        for buffer in reads.iter().chain(writes) {
            let error = broken(&|graph| {
                let Step::Run { reads, writes, .. } = &mut graph.steps[step] else { unreachable!() };
                reads.retain(|other| other != buffer);
                writes.retain(|other| other != buffer);
            });
            assert_eq!(error, Violation::Undeclared { step, buffer: *buffer });
        }
    }
}

#[test]
fn layouts_out_of_range_are_rejected() {
    let build = |layout| build(&[HARD, EASY], &layout).map(|graph| graph.streams);
    let layout = Layout::default();
    assert_eq!(build(layout), Ok(8));
    assert_eq!(build(Layout { slots: 0, ..layout }), Err(BuildError::Slots(0)));
    assert_eq!(build(Layout { slots: 5, ..layout }), Err(BuildError::Slots(5)));
    assert_eq!(build(Layout { consumers: 3, ..layout }), Err(BuildError::Consumers(3)));
    for decode_sms in [0, 2, 132] {
        let error = BuildError::Partition { decode_sms, sms: 132, least: 3 };
        assert_eq!(build(Layout { decode_sms, ..layout }), Err(error));
    }
    let rule = SlotRule::HalfOfLayer;
    assert_eq!(build(Layout { slots: 3, rule, ..layout }), Err(BuildError::HalfOfLayer(3)));
}

/// Of 132 multiprocessors, some decode, shared by the decoded projections, and the others multiply.
#[test]
fn decoders_and_products_share_the_multiprocessors() {
    let sms = |layers: &[Mlp]| {
        let graph = build(layers, &Layout { decode_sms: 25, ..Layout::default() }).unwrap();
        let mut sms: Vec<(bool, u32)> = Vec::new();
        for step in &graph.steps {
            if let Step::Run { job, sms: own, .. } = step {
                sms.push((matches!(job, Job::Decode { .. }), *own));
            }
        }
        sms.sort_unstable();
        sms.dedup();
        sms
    };
    assert_eq!(sms(&[EASY, HARD]), [(false, 107), (true, 8)]);
    let gate_alone = [Pipeline::Exponents, Pipeline::Raw, Pipeline::Raw];
    assert_eq!(sms(&[EASY, gate_alone]), [(false, 107), (true, 25)]);
    assert_eq!(sms(&[EASY, EASY]), [(false, 132)]);
}

/// In a model without hard layers, a step is one chain of programmatic dependents, as in the engine; cuBLAS breaks it.
#[test]
fn a_step_of_packed_weights_is_one_chain() {
    let graph = build(&[[Pipeline::Packed; 3]; 2], &Layout::default()).unwrap();
    let dependents = |graph: &StepGraph| -> Vec<bool> {
        graph
            .steps
            .iter()
            .filter_map(|step| if let Step::Run { dependent, .. } = step { Some(*dependent) } else { None })
            .collect()
    };
    let chain = dependents(&graph);
    assert_eq!(chain.len(), 1 + 2 * 7 + 3);
    assert!(!chain[0] && chain[1..].iter().all(|dependent| *dependent));
    let cublas = dependents(&build(&[[Pipeline::Raw; 3]], &Layout::default()).unwrap());
    // Gate, up and down, and the jobs that follow one of them.
    assert_eq!(cublas.iter().filter(|dependent| !**dependent).count(), 1 + 3 + 2);
}

#[test]
fn timeline_shows_overlap() {
    let layers = [[Pipeline::Raw; 3], HARD, EASY, HARD];
    let graph = build(&layers, &Layout::default()).unwrap();
    let cost = |decode_us: f64| {
        simulate(&graph, &move |job: &Job, _: u32| if matches!(job, Job::Decode { .. }) { decode_us } else { 10.0 })
    };
    // Two rounds of three decoders: the first during the first layer, the second as soon as its slot is free.
    let hidden = cost(5.0).unwrap();
    assert_eq!((hidden.decode_us(), hidden.stalled_us(), hidden.depth()), (30.0, 0.0, 1));
    let slow = cost(500.0).unwrap();
    assert!(slow.stalled_us() > 500.0, "{}", slow.stalled_us());
    assert!(slow.total_us() > hidden.total_us());
    assert_eq!(Timeline::default().total_us(), 0.0);
    // A graph that hangs is reported.
    let mut stuck = graph.clone();
    stuck.steps.insert(0, Step::Wait { stream: 0, event: 1 });
    assert!(matches!(simulate(&stuck, &|_: &Job, _| 1.0), Err(Violation::WaitBeforeRecord { step: 0, .. })));
}

/// A writer must follow all streams that read the buffer. A stream that waits only for a stream outside of the step is
/// outside, too.
#[test]
fn readers_on_several_streams_are_all_waited_for() {
    let run = |stream, job, reads, writes| Step::Run { stream, job, reads, writes, sms: 1, dependent: false };
    let product = |stream, projection, y| {
        let job = Job::Linear { layer: 0, projection, pipeline: Pipeline::Raw, slot: None };
        run(stream, job, vec![Buffer::Normed], vec![y, Buffer::Workspace(stream)])
    };
    let of = |steps: Vec<Step>| StepGraph { steps, streams: 3, events: 3, sms: 132, ..StepGraph::default() };
    let checked = |waits: &[u32]| {
        let wait = |event: &u32| Step::Wait { stream: 0, event: *event };
        let mut steps = vec![Step::Record { stream: 0, event: 0 }];
        steps.extend([Step::Wait { stream: 1, event: 0 }, Step::Wait { stream: 2, event: 0 }]);
        steps.extend([product(1, Projection::Up, Buffer::Up), Step::Record { stream: 1, event: 1 }]);
        steps.extend([product(2, Projection::Gate, Buffer::Gate), Step::Record { stream: 2, event: 2 }]);
        steps.extend(waits.iter().map(wait));
        steps.push(run(0, Job::Norm(None), vec![Buffer::Hidden], vec![Buffer::Normed]));
        steps.extend([1, 2].iter().map(wait));
        check(&of(steps))
    };
    assert_eq!(checked(&[1, 2]), Ok(()));
    for (waited, first) in [(1, 5), (2, 3)] {
        assert_eq!(checked(&[waited]), Err(Violation::Race { first, second: 8, buffer: Buffer::Normed }));
    }
    let mut steps = vec![Step::Record { stream: 1, event: 0 }, Step::Wait { stream: 2, event: 0 }];
    steps.push(product(2, Projection::Gate, Buffer::Gate));
    assert_eq!(check(&of(steps)), Err(Violation::Unforked { step: 2, stream: 2 }));
}
