use std::collections::BTreeMap;

use unweight_format::testing::Random;

use super::*;
use crate::draft::simulated::SimulatedModel;

const CONTEXT: u32 = 700;
const CHUNK: u32 = 192;
const VOCAB: u32 = 50;

fn request(id: u64, tokens: &[u32], count: u32) -> DraftRequest<'_> {
    DraftRequest { id: SeqId(id), tokens, count, params: SampleParams::default() }
}

/// A model whose every guess is right: the token after a text is its length.
fn next(_: SeqId, text: &[u32]) -> u32 {
    text.len() as u32 % VOCAB
}

#[test]
fn chunks_and_steps_compute_what_the_model_has_not_seen() {
    let mut cache = DraftCache::new(100, CONTEXT, CHUNK);
    let tokens: Vec<u32> = (0..400).collect();
    let follow = |cache: &mut DraftCache, len: usize| {
        let requests = [request(1, &tokens[..len], 3)];
        let (round, answers) = cache.begin(&requests);
        let sampled = vec![vec![len as u32, len as u32 + 1, 999]; round.rows.len()];
        let answers = cache.end(&requests, (&round, answers), sampled, VOCAB + 1000);
        (round.chunks, round.rows.first().map(|row| row.first), answers)
    };
    let drafted = |len: u32| vec![Proposal::Tokens(vec![len, len + 1, 999])];
    assert_eq!(follow(&mut cache, 250), (vec![(0, 0, 192)], None, vec![Proposal::Behind(192)]));
    assert_eq!(follow(&mut cache, 250), (vec![(0, 192, 249)], Some(249), drafted(250)));
    // The target accepted two tokens: the model has seen both, and the newest token is the input.
    assert_eq!(follow(&mut cache, 253), (vec![], Some(252), drafted(253)));
    // It accepted one of them.
    assert_eq!(follow(&mut cache, 255), (vec![], Some(254), drafted(255)));
    // Plain steps ran: a chunk begins with the page.
    assert_eq!(follow(&mut cache, 280), (vec![(0, 256, 279)], Some(279), drafted(280)));
    assert_eq!(follow(&mut cache, 280), (vec![], Some(279), drafted(280)), "no step ran");
    assert_eq!(cache.pages.free(), 100 - 5);
    // All three are right: the model has not seen the last one.
    let mut tokens: Vec<u32> = (0..280).chain([280, 281, 999, 300]).collect();
    let (round, _) = cache.begin(&[request(1, &tokens, 3)]);
    assert_eq!(round.rows, [DraftRow { request: 0, first: 282 }]);
    // The draft ends before a token outside of the vocabulary.
    let answers = cache.end(&[request(1, &tokens, 3)], (&round, vec![None]), vec![vec![5, u32::MAX, 6]], VOCAB);
    assert_eq!(answers, [Proposal::Tokens(vec![5])]);
    tokens.extend([5, 7]);
    let (round, _) = cache.begin(&[request(1, &tokens, 3)]);
    assert_eq!(round.rows, [DraftRow { request: 0, first: 285 }], "what followed it is not kept");
    cache.keep([SeqId(2)].into_iter());
    assert_eq!((cache.pages.free(), cache.pages(SeqId(1))), (100, &[][..]));
}

#[test]
fn sequences_without_pages_or_context_have_no_drafts() {
    let mut model = SimulatedModel::new(4, 200, 256);
    let (long, short) = (vec![1; 199], vec![1; 60]);
    let ids = [SeqId(1), SeqId(2), SeqId(3)];
    let answers = model.draft(&ids, &[request(1, &long, 4), request(2, &short, 4)], VOCAB, next);
    // The model has positions for two steps of the first sequence, which takes all four pages.
    assert_eq!(answers, [Proposal::Tokens(vec![49, 0]), Proposal::Unavailable]);
    assert_eq!(model.draft(&ids, &[request(3, &[1; 201], 4)], VOCAB, next), [Proposal::Unavailable]);
    let answers = model.draft(&ids[1..], &[request(2, &short, 4)], VOCAB, next);
    assert_eq!(answers, [Proposal::Tokens(vec![10, 11, 12, 13])], "the first sequence has ended");
    assert_eq!((model.cache.pages.free(), model.steps), (3, 6));
}

/// Sequences of any length that accept any part of their drafts, run without drafts in between, and end at any time:
/// every chunk and step attends to the keys of its own sequence.
#[test]
fn keys_are_those_of_the_sequence() {
    let (mut tokens_right, mut behind, mut unavailable, mut chunks) = (0, 0, 0, 0);
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut model = SimulatedModel::new(4 + random.below(30) as u32, CONTEXT, CHUNK);
        let (mut sequences, mut added) = (BTreeMap::<SeqId, Vec<u32>>::new(), 0);
        for _ in 0..120 {
            if sequences.len() < 4 && random.below(4) == 0 {
                let len = 1 + random.below(500) as usize;
                sequences.insert(SeqId(added), (0..len).map(|_| random.below(VOCAB.into()) as u32).collect());
                added += 1;
            }
            if random.below(30) == 0 {
                sequences.pop_first();
            }
            let running: Vec<SeqId> = sequences.keys().copied().collect();
            let asked: Vec<_> = sequences.iter().filter(|_| random.below(4) > 0).collect();
            let requests: Vec<_> =
                asked.iter().map(|(id, tokens)| request(id.0, tokens, 1 + random.below(6) as u32)).collect();
            let answers = model.draft(&running, &requests, VOCAB, |_, text| {
                if random.below(10) == 0 { u32::MAX } else { next(SeqId(0), text) }
            });
            assert_eq!(answers.len(), requests.len());
            let accepted: BTreeMap<SeqId, Vec<u32>> = requests
                .iter()
                .zip(&answers)
                .map(|(request, answer)| match answer {
                    Proposal::Tokens(tokens) => {
                        assert!(tokens.len() <= request.count as usize && tokens.iter().all(|token| *token < VOCAB));
                        let right = random.below(tokens.len() as u64 + 1) as usize;
                        tokens_right += right;
                        (request.id, tokens[..right].to_vec())
                    }
                    Proposal::Behind(seen) => {
                        assert!((*seen as usize) < request.tokens.len());
                        behind += 1;
                        (request.id, Vec::new())
                    }
                    Proposal::Unavailable => {
                        unavailable += 1;
                        (request.id, Vec::new())
                    }
                })
                .collect();
            for (id, tokens) in &mut sequences {
                tokens.extend(accepted.get(id).into_iter().flatten());
                // A step may have been plain, or not have run.
                (0..random.below(3)).for_each(|_| tokens.push(random.below(VOCAB.into()) as u32));
            }
            sequences.retain(|_, tokens| tokens.len() < CONTEXT as usize + 5);
        }
        let (pages, free) = (model.cache.pages.total(), model.cache.pages.free());
        let held: Vec<u32> = model.cache.followed.values().flat_map(|followed| followed.pages.clone()).collect();
        assert_eq!(held.len() as u32 + free, pages);
        model.cache.keep(std::iter::empty());
        assert_eq!(model.cache.pages.free(), pages);
        chunks += model.chunks;
    }
    assert!(
        tokens_right > 5000 && behind > 500 && unavailable > 500 && chunks > 2000,
        "{tokens_right} {behind} {unavailable} {chunks}: too few cases"
    );
}
