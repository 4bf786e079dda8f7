//! Experts in host memory: on a link that others use, and where memory is too small.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use half::bf16;
use unweight::engine::{Engine, EngineError, EngineOptions};
use unweight_model::ModelConfig;
use unweight_rt::{
    DeviceBuffer, DeviceError,
    raw::device::{Pinned, Staging, Upload},
};

use crate::{
    engine::{options, tokens},
    harness::{Random, gpu, stream},
};

const EXPERTS: u32 = 32;
const VOCAB: u32 = 1024;

/// Four layers, whose compact experts take 0.8 GB.
fn config() -> ModelConfig {
    config_of(4, EXPERTS)
}

fn config_of(layers: u32, experts: u32) -> ModelConfig {
    let config = format!(
        r#"{{"model_type": "qwen3_moe", "vocab_size": {VOCAB}, "hidden_size": 2048, "intermediate_size": 768,
        "num_hidden_layers": {layers}, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": 16384, "num_experts": {experts}, "num_experts_per_tok": 8,
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

/// A chunk of a prompt that is longer than what experts process at once.
#[test]
#[ignore = "needs a GPU"]
fn long_chunks_change_no_bits() {
    let prompt = tokens(8300, VOCAB as usize, 6);
    for chunk in [4096, 8192] {
        let of = || options().chunk(chunk).context(16384).max_batch(2);
        let expected = make(of()).logits(&prompt).unwrap();
        let mut engine = make(of().resident_experts(EXPERTS / 2));
        engine.poison_experts(0xa5).unwrap();
        assert!(engine.logits(&prompt).unwrap() == expected, "chunks of {chunk}: other logits");
    }
}

/// Experts that the host cannot hold are refused before any is made.
#[test]
#[ignore = "needs a GPU"]
fn experts_beyond_host_memory_are_refused() {
    // 33 TB.
    let refused = Engine::random(gpu(), config_of(10_000, 512), None, options().resident_experts(8), &|_| {});
    let Err(error) = refused else { panic!("an engine with 10000 layers of experts") };
    let EngineError::HostMemory(memory) = &error else { panic!("{error}") };
    assert!(memory.need > 30 << 40 && memory.have > 1 << 30, "{error}");
    assert_eq!(error.code(), "host-memory-insufficient");
    assert!(error.to_string().contains("free host memory"), "{error}");
}

/// Memory that the driver cannot pin is an error, after which smaller pinned memory is copied right.
#[test]
#[ignore = "needs a GPU"]
fn memory_that_cannot_be_pinned_is_an_error() {
    let kernels = gpu();
    let stream = stream(kernels);
    let values: Vec<u32> = (0..1 << 20).collect();
    let buffer = DeviceBuffer::from_host(&stream, &values).unwrap();
    for bytes in [1 << 45, 1 << 60] {
        let error = Pinned::<u8>::zeroed(kernels.device(), bytes).expect_err("more than any machine has");
        assert!(matches!(error, DeviceError::HostRoom { bytes: got } if got == bytes as u64), "{error}");
        assert!(error.to_string().contains("free host memory and try again"), "{error}");
        let pinned = Pinned::zeroed(kernels.device(), values.len()).unwrap();
        assert!(buffer.read_later(&stream, 0, pinned).unwrap().wait().unwrap()[..] == values[..]);
    }
}
