//! The memory of request bodies, and of the server and its text processes from `/proc`.

use std::{
    fs,
    io::Read,
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{Server, ask, bundle_with, command, command_of, hostile::half_sent, send};

/// Returns the memory of a process and its children, bytes.
pub fn resident(pid: u32) -> u64 {
    children(pid).into_iter().chain([pid]).map(own).sum()
}

/// Returns the memory of a process, bytes; 0 if it has ended.
fn own(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Returns the children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let parent = |child: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).ok()?;
        // State and parent follow the name, which may contain any characters.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    pids.filter(|child| parent(*child) == Some(pid)).collect()
}

/// Returns whether a process has ended.
pub fn is_gone(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}

/// Reads an answer to its end and returns its status.
fn status(stream: &mut TcpStream) -> u16 {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

#[test]
fn half_sent_bodies_hold_what_they_sent() {
    let server = Server::start(&mut command(&["--context", "512"]));
    // They announce 8 MiB each: 1.6 GB in total.
    let small: Vec<TcpStream> = (0..200).map(|_| half_sent(&server, 1000, 8 << 20)).collect();
    server.wait_for_some("unweight_body_bytes", |bytes| bytes >= 200.0 * 1000.0);
    assert!(server.metric("unweight_body_bytes") < 2.0 * 1024.0 * 1024.0);
    assert_eq!(server.ask("/v1/completions", r#"{"prompt": [5], "max_tokens": 2}"#).0, 200);
    // Beyond 64 MiB, large bodies are rejected and small ones are served.
    let large: Vec<TcpStream> = (0..12).map(|_| half_sent(&server, 7 << 20, 8 << 20)).collect();
    server.wait_for_some("unweight_body_bytes", |bytes| bytes > f64::from(40 << 20));
    assert!(server.metric("unweight_body_bytes") <= f64::from(64 << 20));
    assert_eq!(server.ask("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#).0, 200);
    drop((small, large));
    server.wait_for("unweight_body_bytes", 0.0);
}

#[test]
fn half_sent_bodies_leave_others_alone() {
    let server = Server::start(&mut command(&["--context", "512"]));
    let small = r#"{"prompt": [5], "max_tokens": 2}"#;
    for (what, sent) in [("large", 65 << 10), ("small", 60 << 10)] {
        let half: Vec<TcpStream> = (0..300).map(|_| half_sent(&server, sent, sent + 1000)).collect();
        server.wait_for_some("unweight_body_bytes", |bytes| bytes > f64::from(14 << 20));
        // They send nothing for a second: the oldest are closed for others.
        thread::sleep(Duration::from_millis(1200));
        for path in ["/v1/completions", "/tokenize"] {
            let (status, answer) = server.ask(path, if path == "/tokenize" { r#"{"prompt": "a"}"# } else { small });
            assert_eq!(status, 200, "{what}: {answer}");
        }
        // They may be silent for 10 s.
        server.wait_for("unweight_body_bytes", 0.0);
        drop(half);
    }
}

#[test]
fn tool_calls_hold_little_memory() {
    let home = bundle_with(&[("chat_template.jinja", "{{ messages[0].tool_calls|tojson }}")]);
    let server = Server::start(&mut command_of(&home.path().join("tiny"), &["--context", "512"]));
    let chat = |calls: serde_json::Value| json!({"messages": [{"role": "assistant", "tool_calls": calls}]}).to_string();
    let call = |arguments: &str| json!({"function": {"name": "f", "arguments": arguments}});
    let (status, answer) = server.ask("/tokenize", &chat(json!([call("{}")])));
    assert_eq!(status, 200, "{answer}");
    let before = own(server.child.id());
    // 7 MB each, which are small values: as a tree they take some 500 MB.
    for calls in [json!([call(&format!(r#"{{"a":[{}0]}}"#, "0,".repeat(3 << 20)))]), json!(vec![call(""); 120_000])] {
        let (address, body) = (server.address().to_owned(), chat(calls));
        let client = thread::spawn(move || ask(&address, "/tokenize", &body));
        let mut most = 0;
        while !client.is_finished() {
            most = most.max(own(server.child.id()));
            thread::sleep(Duration::from_millis(1));
        }
        let (status, answer) = client.join().unwrap();
        println!("{status}: {} MiB, {} before: {answer:.200}", most >> 20, before >> 20);
        // The process that renders the conversation has its own limit.
        assert_eq!(status, 400, "{answer:.200}");
        assert!(most < before + (96 << 20), "{} MiB, {} before", most >> 20, before >> 20);
    }
}

#[test]
fn memory_is_given_back_after_large_bodies() {
    let server = Server::start(&mut command(&["--context", "512"]));
    assert_eq!(server.ask("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#).0, 200);
    let before = resident(server.child.id());
    let body = json!({"prompt": "a".repeat(7 << 20)}).to_string();
    let start = Instant::now();
    let clients: Vec<_> = (0..24)
        .map(|_| {
            let (address, body) = (server.address().to_owned(), body.clone());
            thread::spawn(move || {
                let mut stream = TcpStream::connect(address).unwrap();
                send(&mut stream, "/v1/completions", &body);
                status(&mut stream)
            })
        })
        .collect();
    let mut most = 0;
    while clients.iter().any(|client| !client.is_finished()) {
        most = most.max(resident(server.child.id()));
        // A small request is served at the same time.
        let start = Instant::now();
        assert_eq!(server.ask("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#).0, 200);
        assert!(start.elapsed() < Duration::from_secs(3), "a small request took {:?}", start.elapsed());
    }
    let statuses: Vec<u16> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    // Rejected as too long for the context, or as one request too many.
    assert!(statuses.iter().all(|status| [400, 503].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&400) && statuses.contains(&503), "{statuses:?}");
    let mut after = resident(server.child.id());
    while after > before + (64 << 20) && start.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(50));
        after = resident(server.child.id());
    }
    println!("before {} MiB, at most {}, after {}: {statuses:?}", before >> 20, most >> 20, after >> 20);
    assert!(most < before + (256 << 20), "at most {} MiB, {} before", most >> 20, before >> 20);
    assert!(after < before + (64 << 20), "{} MiB, {} before", after >> 20, before >> 20);
}
