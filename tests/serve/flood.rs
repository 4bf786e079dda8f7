//! Many clients at once that repeat large grammars, or do not read their answers.

use std::{
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    Server, ask, bundle_with, command, command_of, memory, send,
    unread::{long_token, with_long_token},
};

/// Maximum time of a request next to a flood.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Returns a request whose schema has 1,000 properties with names that start with `name`.
fn large_schema(name: &str) -> String {
    let properties: Value = (0..1000).map(|at| (format!("{name}{at}"), json!({}))).collect();
    let schema = json!({"type": "object", "properties": properties});
    json!({"prompt": [5], "max_tokens": 1, "structured_outputs": {"json": schema}}).to_string()
}

/// Returns the body of a completion that matches a regular expression.
fn with_regex(regex: &str) -> String {
    json!({"prompt": [5], "max_tokens": 3, "structured_outputs": {"regex": regex}}).to_string()
}

/// Returns the body of a completion that matches one of many small regular expressions.
fn regex(at: usize) -> String {
    with_regex(&format!("[ab]{{{at}}}"))
}

/// Clients that send completions until this is dropped, after the server.
struct Flood {
    done: Arc<AtomicBool>,
    clients: Vec<thread::JoinHandle<()>>,
}

impl Flood {
    /// Starts clients that send `body`, which is called with the number of the client and of its request.
    fn start(server: &Server, clients: usize, body: impl Fn(usize, usize) -> String + Send + Sync + 'static) -> Self {
        let (done, body) = (Arc::new(AtomicBool::new(false)), Arc::new(body));
        let client = |client: usize| {
            let (done, body, address) = (Arc::clone(&done), Arc::clone(&body), server.address().to_owned());
            thread::spawn(move || {
                for at in 0.. {
                    let (status, answer) = ask(&address, "/v1/completions", &body(client, at));
                    assert!([200, 400, 408, 429].contains(&status), "{status} {answer}");
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            })
        };
        let clients = (0..clients).map(client).collect();
        Self { done, clients }
    }

    /// Ends the server and the clients.
    fn end(self, server: Server) {
        self.done.store(true, Ordering::Relaxed);
        drop(server);
        // Their requests have ended with the server.
        let _: Vec<_> = self.clients.into_iter().map(thread::JoinHandle::join).collect();
    }
}

/// Asks, and checks that the answer has this status and does not take long.
fn ask_fast(server: &Server, path: &str, body: &str, expected: u16) {
    let start = Instant::now();
    let (status, answer) = server.ask(path, body);
    println!("{path}: {status} after {:?}", start.elapsed());
    assert_eq!(status, expected, "{answer}");
    assert!(start.elapsed() < ANSWER_TIME, "{path} took {:?}", start.elapsed());
}

#[test]
fn large_schemas_leave_others_alone() {
    let server = Server::start(&mut command(&["--context", "8192", "--max-batch", "64"]));
    assert_eq!(server.ask("/v1/completions", &regex(1)).0, 200);
    // All schemas differ, so none is compiled already.
    let flood = Flood::start(&server, 64, |client, at| large_schema(&format!("c{client}x{at}_")));
    server.wait_for_some("unweight_texts_waiting", |waiting| waiting > 50.0);
    for at in 2..5 {
        ask_fast(&server, "/v1/completions", &regex(at), 200);
        ask_fast(&server, "/tokenize", &json!({"prompt": "abc"}).to_string(), 200);
        ask_fast(&server, "/tokenize", &json!({"prompt": "abc ".repeat(17_000)}).to_string(), 200);
    }
    flood.end(server);
}

#[test]
fn slow_small_grammars_leave_others_alone() {
    let server = Server::start(&mut command(&["--context", "8192", "--max-batch", "64", "--max-waiting", "400"]));
    assert_eq!(server.ask("/v1/completions", &regex(1)).0, 200);
    let flood = Flood::start(&server, 110, |client, at| with_regex(&format!("{}|c{client}x{at}", ".?".repeat(3900))));
    server.wait_for_some("unweight_texts_waiting", |waiting| waiting > 50.0);
    for at in 2..4 {
        ask_fast(&server, "/v1/completions", &regex(1), 200);
        ask_fast(&server, "/v1/completions", &regex(at), 200);
        ask_fast(&server, "/v1/completions", &regex(at), 200);
    }
    flood.end(server);
}

#[test]
fn slow_grammars_leave_fast_ones_alone() {
    let server = Server::start(&mut command(&["--context", "8192", "--max-batch", "64"]));
    assert_eq!(server.ask("/v1/completions", &regex(1)).0, 200);
    // They are as small as the fast ones, and take more than a second each.
    let flood = Flood::start(&server, 5, |client, at| {
        let schema = json!({"type": "integer", "multipleOf": 99_990 - 100 * client - at});
        json!({"prompt": [5], "max_tokens": 1, "structured_outputs": {"json": schema}}).to_string()
    });
    server.wait_for_some("unweight_texts_waiting", |waiting| waiting > 2.0);
    for at in 2..6 {
        ask_fast(&server, "/v1/completions", &regex(at), 200);
    }
    flood.end(server);
}

#[test]
fn texts_that_wait_leave_grammars_alone() {
    let server = Server::start(&mut command(&["--context", "8192", "--max-batch", "64"]));
    assert_eq!(server.ask("/v1/completions", &regex(1)).0, 200);
    // Their grammar is compiled already. The texts exceed the context.
    let body = json!({"prompt": "abc ".repeat(17_000), "structured_outputs": {"regex": "[ab]{1}"}}).to_string();
    let flood = Flood::start(&server, 90, move |_, _| body.clone());
    server.wait_for_some("unweight_texts_waiting", |waiting| waiting > 60.0);
    for at in 2..4 {
        ask_fast(&server, "/v1/completions", &regex(1), 200);
        ask_fast(&server, "/v1/completions", &regex(at), 200);
    }
    flood.end(server);
}

#[test]
fn a_replaced_grammar_is_compiled_again() {
    let tokenizer = with_long_token().0.to_string();
    let home = bundle_with(&[("tokenizer.json", &tokenizer)]);
    let server = Server::start(&mut command_of(&home.path().join("tiny"), &["--context", "8192", "--max-batch", "64"]));
    // A large text with few tokens waits for others, while new grammars replace the kept ones.
    let texts = Flood::start(&server, 6, |_, _| json!({"prompt": "abc ".repeat(45_000)}).to_string());
    let grammars = Flood::start(&server, 6, |client, at| with_regex(&format!("c{client}x{at}")));
    server.wait_for_some("unweight_texts_waiting", |waiting| waiting > 3.0);
    for at in 0..2 {
        let body = json!({"prompt": "y".repeat(66_000), "max_tokens": 1, "structured_outputs": {"regex": "[ab]c"}});
        let (status, answer) = server.ask("/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{at}: {answer}");
    }
    grammars.done.store(true, Ordering::Relaxed);
    texts.end(server);
}

#[test]
fn a_repeated_schema_is_compiled_once() {
    let server = Server::start(&mut command(&["--context", "512"]));
    let body = large_schema("p");
    let timed = || {
        let start = Instant::now();
        let status = server.ask("/v1/completions", &body).0;
        (start.elapsed(), status)
    };
    // A busy machine may take more than a second to compile it; it then rejects it for 10 s.
    let again = || {
        thread::sleep(Duration::from_secs(1));
        timed()
    };
    let first = (0..40).map(|_| again()).find(|(_, status)| *status == 200).unwrap().0;
    let second = (0..3).map(|_| timed()).inspect(|(_, status)| assert_eq!(*status, 200)).min().unwrap().0;
    println!("{first:?}, then {second:?}");
    assert!(second < first / 3, "{first:?}, then {second:?}");
}

#[test]
fn unread_answers_have_a_limit() {
    let (home, id) = long_token();
    let server = Server::start(&mut command_of(&home.path().join("tiny"), &["--context", "8192"]));
    assert_eq!(server.ask("/detokenize", r#"{"tokens": [5]}"#).0, 200);
    let before = memory::resident(server.child.id());
    // Answers of 4 MB.
    let large = json!({"tokens": vec![id; 4000]}).to_string();
    let clients: Vec<TcpStream> = (0..30)
        .map(|_| {
            let mut client = TcpStream::connect(server.address()).unwrap();
            send(&mut client, "/detokenize", &large);
            client
        })
        .collect();
    server.wait_for_some("unweight_answer_bytes", |bytes| bytes > f64::from(44 << 20));
    assert_eq!(server.ask("/detokenize", r#"{"tokens": [5]}"#).0, 200, "small answers have memory of their own");
    // Those that were not read for a second are dropped for another.
    thread::sleep(Duration::from_millis(1200));
    let (status, answer) = server.ask("/detokenize", &large);
    assert_eq!((status, answer.len() > 4_000_000), (200, true), "{status}");
    assert!(server.metric("unweight_answer_bytes") <= f64::from(64 << 20));
    let held = memory::resident(server.child.id());
    println!("{} MiB, {} before", held >> 20, before >> 20);
    assert!(held < before + (88 << 20), "{} MiB, {} before", held >> 20, before >> 20);
    drop(clients);
    server.wait_for("unweight_answer_bytes", 0.0);
    assert_eq!(server.ask("/detokenize", &large).0, 200);
}
