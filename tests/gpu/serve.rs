//! The server with a real engine: HTTP answers match the engine's, with many clients at once.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use unweight::{
    engine::{Engine, EngineOptions, Request, SampleParams},
    serve::{Ended, ServeOptions, serve},
    text::Text,
};
use unweight_format::{
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    testing::demo_model::{self, DemoOptions},
};

use crate::harness::gpu;

/// Returns status and body of an answer.
fn post(address: SocketAddr, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("a connection");
    let (method, length) = (if body.is_empty() { "GET" } else { "POST" }, body.len());
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, answer.split_once("\r\n\r\n").expect("a body").1.to_owned())
}

fn metric(address: SocketAddr, name: &str) -> f64 {
    let (_, text) = post(address, "/metrics", "");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

#[test]
#[ignore = "needs a GPU"]
fn served_tokens_equal_the_engine() {
    let home = tempfile::tempdir().unwrap();
    let model = DemoOptions {
        layers: 2,
        hidden: 256,
        intermediate: 512,
        heads: 4,
        kv_heads: 2,
        vocab: 264,
        ..DemoOptions::default()
    };
    demo_model::write(&home.path().join("model"), &model).unwrap();
    let options = CompressOptions::default().profile(Profile::Packed);
    bundle::compress(&home.path().join("model"), &home.path().join("bundle"), &options, &Silent).unwrap();
    let bundle = Bundle::open(&home.path().join("bundle")).unwrap();
    let options = EngineOptions::default().max_batch(8).context(1024).chunk(128).memory(4 << 30);
    let mut engine = Engine::load(gpu(), &bundle, options, &|_| {}).expect("an engine");
    let text = Text::new(include_bytes!("../serve/tokenizer.json"), None, None).expect("a tokenizer");

    // Steps of the same size give the same bits, so a text is the same alone in the engine and alone over HTTP.
    let (prompt, eos) = (vec![0, 70, 75, 80], engine.config().eos.clone());
    let params = SampleParams::default().temperature(1.0).seed(7);
    engine.add(Request::new(prompt.clone()).params(params).max_new_tokens(40).stop(eos.clone())).expect("a sequence");
    let mut ids = Vec::new();
    while !engine.is_idle() {
        ids.extend(engine.step().expect("a step").iter().map(|event| event.token));
    }
    let tokens = ids.len();
    if ids.last().is_some_and(|last| eos.contains(last)) {
        ids.pop();
    }
    let mut stream = text.stream();
    let mut expected: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    expected += &stream.finish().unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, stop) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
    let clients = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            // The server must end even if a client panics.
            let clients_result = std::panic::catch_unwind(|| {
                let body = json!({ "prompt": prompt, "max_tokens": 40, "seed": 7 });
                let (status, answer) = post(address, "/v1/completions", &body.to_string());
                let answer: Value = serde_json::from_str(&answer).expect("JSON");
                assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some(expected.as_str())), "{answer}");
                assert_eq!(answer["usage"]["completion_tokens"], tokens);
                // More clients than rows, including streams, and some that disconnect without waiting.
                let clients: Vec<_> = (0..24)
                    .map(|client: u32| {
                        thread::spawn(move || {
                            let body = json!({
                                "prompt": [0, 70 + client], "max_tokens": 100 + client, "temperature": 0,
                                "n": 1 + client % 3, "stream": client % 2 == 1,
                            });
                            if client % 5 == 4 {
                                let mut disconnected = TcpStream::connect(address).expect("a connection");
                                let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length:";
                                let body = body.to_string();
                                write!(disconnected, "{head} {}\r\n\r\n{body}", body.len()).expect("a request");
                                return;
                            }
                            let (status, answer) = post(address, "/v1/completions", &body.to_string());
                            assert_eq!(status, 200, "{answer}");
                            assert_eq!(answer.contains("data: [DONE]"), client % 2 == 1, "{answer}");
                            let ends = answer.matches("\"finish_reason\":\"").count();
                            assert_eq!(ends as u32, 1 + client % 3, "{answer}");
                        })
                    })
                    .collect();
                clients.into_iter().for_each(|client| client.join().expect("a client"));
                // Disconnected clients are noticed soon.
                let start = Instant::now();
                while metric(address, "unweight_sequences_running") + metric(address, "unweight_sequences_waiting")
                    > 0.0
                    || metric(address, "unweight_kv_pages_free") < metric(address, "unweight_kv_pages")
                {
                    assert!(start.elapsed() < Duration::from_secs(20), "pages are not free again after 20 s");
                    thread::sleep(Duration::from_millis(10));
                }
            });
            stop.store(true, Ordering::Relaxed);
            clients_result
        }
    });
    let ended = serve(&mut engine, text, listener, ServeOptions::new("tiny"), stop);
    clients.join().unwrap().expect("all clients succeed");
    assert_eq!(ended.expect("a server"), Ended::Done);
    // The engine is still usable.
    engine.add(Request::new(vec![1, 2]).max_new_tokens(1)).expect("a sequence");
    assert_eq!(engine.step().expect("a step").len(), 1);
}
