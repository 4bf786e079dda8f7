//! Many clients at once that repeat large grammars, or do not read their answers.

use std::{
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{Server, ask, command, command_of, memory, send, unread::long_token};

/// Maximum time of a request next to a flood.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Returns a request whose schema has 1,000 properties with names that start with `name`.
fn large_schema(name: &str) -> String {
    let properties: Value = (0..1000).map(|at| (format!("{name}{at}"), json!({}))).collect();
    let schema = json!({"type": "object", "properties": properties});
    json!({"prompt": [5], "max_tokens": 1, "structured_outputs": {"json": schema}}).to_string()
}

#[test]
fn large_schemas_leave_others_alone() {
    let server = Server::start(&mut command(&["--context", "8192", "--max-batch", "64"]));
    let regex = |at: usize| {
        json!({"prompt": [5], "max_tokens": 3, "structured_outputs": {"regex": format!("[ab]{{{at}}}")}}).to_string()
    };
    assert_eq!(server.ask("/v1/completions", &regex(1)).0, 200);
    let (done, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..64)
        .map(|client| {
            let (done, answered, address) = (Arc::clone(&done), Arc::clone(&answered), server.address().to_owned());
            thread::spawn(move || {
                // All schemas differ, so none is compiled already.
                let mut at = 0;
                while !done.load(Ordering::Relaxed) {
                    at += 1;
                    let (status, answer) = ask(&address, "/v1/completions", &large_schema(&format!("c{client}x{at}_")));
                    assert!([200, 400].contains(&status), "{status} {answer}");
                    answered.fetch_add(usize::from(status == 200), Ordering::Relaxed);
                }
            })
        })
        .collect();
    server.wait_for_some("unweight_texts_waiting", |waiting| waiting > 50.0);
    for at in 2..5 {
        for (path, body) in [
            ("/v1/completions", regex(at)),
            ("/tokenize", json!({"prompt": "abc"}).to_string()),
            ("/tokenize", json!({"prompt": "abc ".repeat(17_000)}).to_string()),
        ] {
            let start = Instant::now();
            let (status, answer) = server.ask(path, &body);
            println!("{path}: {status} after {:?}", start.elapsed());
            assert_eq!(status, 200, "{answer}");
            assert!(start.elapsed() < ANSWER_TIME, "{path} took {:?}", start.elapsed());
        }
    }
    done.store(true, Ordering::Relaxed);
    drop(server);
    // Their requests have ended with the server.
    let _: Vec<_> = clients.into_iter().map(thread::JoinHandle::join).collect();
    println!("{} large schemas answered", answered.load(Ordering::Relaxed));
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
    // A busy machine may take more than a second to compile it.
    let first = (0..20).map(|_| timed()).find(|(_, status)| *status == 200).unwrap().0;
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
