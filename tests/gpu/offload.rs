//! Experts in host memory on a link that others use, and on a host without memory for them.

use std::{
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use half::bf16;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use unweight::engine::{Engine, EngineError, EngineOptions};
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
/// Set in the process whose memory is limited.
const CHILD: &str = "UNWEIGHT_TEST_OFFLOAD_CHILD";

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

fn make(options: EngineOptions) -> Result<Engine, EngineError> {
    Engine::random(gpu(), config(), None, options, &|_| {})
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
    let (expected, _) = logits(&mut make(options()).unwrap());
    let mut engine = make(options().resident_experts(EXPERTS / 4)).unwrap();
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

/// A host that cannot pin all experts is an error, whichever layer finds no memory; without them, the model runs.
#[test]
#[ignore = "needs a GPU"]
fn too_little_memory_to_pin_is_an_error() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["offload::limited_child", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success(), "{text}\n{}", String::from_utf8_lossy(&child.stderr));
    assert!(text.contains("refused="), "{text}");
    println!("{text}");
}

/// In its own process, because the limit is the process's.
#[test]
#[ignore = "needs a GPU, and a process of its own"]
fn limited_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let offloaded = || make(options().resident_experts(EXPERTS / 4));
    // Loads all libraries and kernels.
    let host = offloaded().unwrap().memory().host;
    let before = getrlimit(Resource::As);
    let mut refused = 0;
    for eighth in 0..8 {
        // More than the rest of loading needs, and less than the experts.
        let room = (256 << 20) + host * eighth / 8;
        setrlimit(Resource::As, Rlimit { current: Some(address_space() + room), ..before }).unwrap();
        let result = offloaded();
        setrlimit(Resource::As, before).unwrap();
        if let Err(error) = result {
            let text = error.to_string();
            assert!(text.contains("pinned host memory; free host memory and try again"), "{room}: {text}");
            refused += 1;
        }
        let (got, _) = logits(&mut offloaded().unwrap());
        assert!(got.iter().flatten().all(|logit| logit.is_finite()));
    }
    println!("refused={refused}");
    assert!(refused > 0, "the limit was never reached");
}

/// The bytes of this process's address space.
fn address_space() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().next().unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}
