//! Many clients at once with large grammars.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{Server, ask, command};

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
        let (status, answer) = server.ask("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        start.elapsed()
    };
    let first = timed();
    let second = (0..3).map(|_| timed()).min().unwrap();
    println!("{first:?}, then {second:?}");
    assert!(second < first / 3, "{first:?}, then {second:?}");
}
