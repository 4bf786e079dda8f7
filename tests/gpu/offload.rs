//! Experts in host memory on a link that others use.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use half::bf16;
use unweight::engine::{Engine, EngineOptions};
use unweight_model::ModelConfig;
use unweight_rt::{
    DeviceBuffer,
    raw::device::{Staging, Upload},
};

use crate::{
    engine::{options, tokens},
    harness::{Random, gpu, stream},
};

const EXPERTS: u32 = 32;
const VOCAB: u32 = 1024;

/// Four layers, whose compact experts take 0.8 GB.
fn config() -> ModelConfig {
    let config = format!(
        r#"{{"model_type": "qwen3_moe", "vocab_size": {VOCAB}, "hidden_size": 2048, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": 4096, "num_experts": {EXPERTS}, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0}}"#
    );
    ModelConfig::parse(&config, None).unwrap()
}

fn make(options: EngineOptions) -> Engine {
    Engine::random(gpu(), config(), None, options, &|_| {}).expect("an engine")
}

/// Returns logits of a prompt and of texts by steps, and the time they took.
fn logits(engine: &mut Engine) -> (Vec<Vec<bf16>>, Duration) {
    let texts: Vec<Vec<u32>> = (0..8).map(|row| tokens(40, VOCAB as usize, 90 + row)).collect();
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let begin = Instant::now();
    let mut logits = vec![engine.logits(&tokens(300, VOCAB as usize, 5)).unwrap()];
    logits.extend(engine.logits_by_steps(&texts[..1]).unwrap());
    logits.extend(engine.logits_by_steps(&texts).unwrap());
    (logits, begin.elapsed())
}

/// Copies of others on the same link make steps slower, and change no bits.
#[test]
#[ignore = "needs a GPU"]
fn a_busy_link_changes_no_bits() {
    let (expected, _) = logits(&mut make(options()));
    let mut engine = make(options().resident_experts(EXPERTS / 4));
    engine.poison_experts(0xa5).unwrap();
    let (alone, time) = logits(&mut engine);
    assert!(alone == expected, "an idle link: other logits");
    let (is_done, copied) = (AtomicBool::new(false), AtomicBool::new(false));
    let busy = thread::scope(|scope| {
        for seed in 0..2 {
            let (is_done, copied) = (&is_done, &copied);
            scope.spawn(move || {
                let bytes: Vec<u8> = Random::new(seed).bits().to_le_bytes().repeat(32 << 20);
                let stream = stream(gpu());
                let mut staging = Staging::new(&stream);
                while !is_done.load(Ordering::Relaxed) {
                    let mut upload = &mut staging;
                    let buffer: DeviceBuffer<u8> = upload.section(&bytes).unwrap();
                    upload.finish().unwrap();
                    copied.store(true, Ordering::Relaxed);
                    drop(buffer);
                }
            });
        }
        while !copied.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let mut times = Vec::new();
        for turn in 0..10 {
            engine.poison_experts(0x5a + turn).unwrap();
            let (got, time) = logits(&mut engine);
            assert!(got == expected, "a busy link, turn {turn}: other logits");
            times.push(time);
        }
        is_done.store(true, Ordering::Relaxed);
        times.sort();
        times[5]
    });
    println!("a busy link: {busy:.2?}, an idle one {time:.2?}; {}", engine.expert_traffic().unwrap().unwrap());
}
