//! Tests `unweight serve`: the real binary with a tiny model on the CPU, and the official Python client.
#![cfg(all(feature = "cli", unix))]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;
use unweight::{
    engine::{AdmissionError, EngineOptions, Event, Request, SeqId},
    format::{
        bundle::{self, Bundle, CompressOptions, Silent},
        testing::demo_model::{self, DemoOptions},
    },
    serve::{Backend, CpuReference, Ended, Limits, Load, ServeError, ServeOptions, serve},
    text::Text,
};

mod draft;
mod flood;
mod hostile;
mod memory;
mod unread;

/// Returns a bundle with the tokenizer and the template of this directory, made once.
fn bundle() -> PathBuf {
    static HOME: OnceLock<TempDir> = OnceLock::new();
    HOME.get_or_init(|| bundle_with(&[])).path().join("tiny")
}

/// Makes a directory with such a bundle, `tiny`, with some of its files replaced.
fn bundle_with(others: &[(&str, &str)]) -> TempDir {
    bundle_of(&tiny(), others)
}

/// The shape of the model of these tests.
fn tiny() -> DemoOptions {
    DemoOptions {
        layers: 1,
        hidden: 64,
        intermediate: 128,
        heads: 4,
        kv_heads: 2,
        vocab: 264,
        ..DemoOptions::default()
    }
}

/// Like [`bundle_with`], of another model.
fn bundle_of(options: &DemoOptions, others: &[(&str, &str)]) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    demo_model::write(&model, options).unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        fs::copy(here.join(file), model.join(file)).unwrap();
    }
    for (file, text) in others {
        fs::write(model.join(file), text).unwrap();
    }
    bundle::compress(&model, &home.path().join("tiny"), &CompressOptions::default(), &Silent).unwrap();
    home
}

/// A running server, which is killed on drop.
struct Server {
    child: Child,
    report: Value,
}

fn command(arguments: &[&str]) -> Command {
    command_of(&bundle(), arguments)
}

fn command_of(bundle: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("unweight"));
    command.arg("serve").arg(bundle).args(["--cpu-reference", "--json"]).args(arguments);
    if !arguments.contains(&"--port") {
        command.args(["--port", "0"]);
    }
    command.env_remove("UNWEIGHT_API_KEY").stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut text = String::new();
        // The JSON object ends with a bracket on its own line; the server continues to run.
        for line in BufReader::new(child.stdout.as_mut().unwrap()).lines() {
            let line = line.unwrap();
            text += &line;
            if line == "}" {
                break;
            }
        }
        let report = serde_json::from_str(&text).unwrap_or_else(|error| {
            let mut said = String::new();
            child.stderr.as_mut().unwrap().read_to_string(&mut said).unwrap();
            panic!("{error}: {text}{said}")
        });
        Self { child, report }
    }

    fn url(&self) -> &str {
        self.report["url"].as_str().unwrap()
    }

    fn address(&self) -> &str {
        self.url().trim_start_matches("http://").trim_end_matches("/v1")
    }

    fn ask(&self, path: &str, body: &str) -> (u16, String) {
        ask(self.address(), path, body)
    }

    /// Returns a value of /metrics.
    fn metric(&self, name: &str) -> f64 {
        let (status, text) = self.ask("/metrics", "");
        assert_eq!(status, 200);
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    fn wait_for(&self, name: &str, value: f64) {
        self.wait_for_some(name, |now| now == value);
    }

    /// Waits until a metric satisfies a condition.
    fn wait_for_some(&self, name: &str, is_right: impl Fn(f64) -> bool) {
        let start = Instant::now();
        while !is_right(self.metric(name)) {
            assert!(start.elapsed() < Duration::from_secs(30), "{name} is {}", self.metric(name));
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits until the server ends. Returns its exit status and stderr.
    fn end(mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(30), "the server does not end");
            thread::sleep(Duration::from_millis(20));
        }
        let mut said = String::new();
        self.child.stderr.as_mut().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap(), said)
    }

    /// Runs cases of `client.py` with the official client.
    fn client(&self, cases: &[&str]) {
        let python = std::env::var("UNWEIGHT_PYTHON").expect("UNWEIGHT_PYTHON is not set: run `cargo xtask test`");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/client.py");
        let output = Command::new(python).arg(script).arg(self.url()).args(cases).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "client.py {cases:?}\n{out}{err}");
        assert_eq!(out.lines().filter(|line| line.ends_with(": ok")).count(), cases.len(), "{out}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A test that waited for the end has already reaped it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a request and returns the status and the body of the answer. An empty body is a GET.
fn ask(address: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    send(&mut stream, path, body);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

fn send(stream: &mut TcpStream, path: &str, body: &str) {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
}

/// Starts a greedy stream of `tokens` tokens and reads its head, so that the engine has accepted the request.
fn stream_of(server: &Server, tokens: u32) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let body = format!(r#"{{"prompt": [5, 6, 7], "max_tokens": {tokens}, "stream": true, "temperature": 0}}"#);
    send(&mut stream, "/v1/completions", &body);
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    stream
}

/// Starts a stream that would run for minutes.
fn long_stream(server: &Server) -> TcpStream {
    stream_of(server, 4000)
}

#[test]
fn openai_client_works() {
    let server = Server::start(command(&["--max-batch", "4", "--context", "4096"]).args(["--model-name", "tiny"]));
    server.client(&[
        "models",
        "completions",
        "prompts",
        "chat",
        "streams_are_the_same",
        "usage",
        "stop",
        "choices",
        "seeds",
        "biases",
        "penalties",
        "ends",
        "logprobs",
        "echoes",
        "tokenize",
        "errors",
        "structured",
        "structured_neighbours",
        "tools",
        "eight_clients",
        "a_client_that_goes_away",
        "health_and_metrics",
    ]);
    server.wait_for("unweight_sequences_running", 0.0);
    assert_eq!(server.metric("unweight_kv_pages_free"), server.metric("unweight_kv_pages"));
}

/// Drafts change no answer: greedy, sampled, with log probabilities, with penalties, several at once.
#[test]
fn drafts_change_no_answer() {
    let (plain, drafting) = (Server::start(&mut command(&[])), Server::start(&mut command(&["--speculate", "6"])));
    for options in [
        r#""temperature": 0"#,
        r#""temperature": 0, "logprobs": 2, "n": 2"#,
        r#""temperature": 0.05, "seed": 3, "logprobs": 1"#,
        r#""temperature": 1, "seed": 4"#,
        r#""temperature": 0, "presence_penalty": 0.5"#,
        r#""temperature": 0, "min_tokens": 30, "stop": ["e"]"#,
    ] {
        for prompt in ["abcabcabcab", "one two three one two three one"] {
            let body = format!(r#"{{"prompt": "{prompt}", "max_tokens": 48, {options}}}"#);
            let answer = |server: &Server| {
                let (status, text) = server.ask("/v1/completions", &body);
                assert_eq!(status, 200, "{text}");
                let answer: Value = serde_json::from_str(&text).unwrap();
                (answer["choices"].clone(), answer["usage"].clone())
            };
            assert_eq!(answer(&drafting), answer(&plain), "{body}");
        }
    }
    let counts = |server: &Server| {
        let of = |what: &str| server.metric(&format!("unweight_spec_decode_num_{what}_tokens_total"));
        (of("draft"), of("accepted"))
    };
    let (drafted, accepted) = counts(&drafting);
    assert!(accepted > 60.0 && accepted < drafted, "{accepted} of {drafted}");
    assert_eq!(counts(&plain), (0.0, 0.0));
}

#[test]
fn requests_without_the_api_key_are_rejected() {
    let server = Server::start(command(&[]).env("UNWEIGHT_API_KEY", "sesame"));
    server.client(&["keys"]);
    assert_eq!(server.ask("/health", "").0, 200, "/health needs no key");
    for (scheme, status) in [("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401)] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let head = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
        write!(stream, "{head}authorization: {scheme} sesame\r\n\r\n").unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), format!("HTTP/1.1 {status}"), "{scheme}");
    }
}

#[test]
fn full_queue_is_reported_and_drains() {
    let server = Server::start(&mut command(&["--max-batch", "1", "--max-waiting", "1", "--context", "4096"]));
    let running = long_stream(&server);
    server.wait_for("unweight_sequences_running", 1.0);
    let waiting = long_stream(&server);
    server.wait_for("unweight_sequences_waiting", 1.0);
    server.client(&["queue_full"]);
    // No client reads these two streams. Their places are free as soon as the clients disconnect.
    drop(waiting);
    server.wait_for("unweight_sequences_waiting", 0.0);
    drop(running);
    server.wait_for("unweight_sequences_running", 0.0);
    assert_eq!(server.metric("unweight_cancelled_total"), 2.0);
    assert_eq!(server.metric("unweight_kv_pages_free"), server.metric("unweight_kv_pages"));
    assert_eq!(server.ask("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#).0, 200);
}

#[test]
fn requests_time_out() {
    let server = Server::start(&mut command(&["--timeout", "1", "--context", "4096"]));
    let (status, body) = server.ask("/v1/completions", r#"{"prompt": "a", "max_tokens": 4000, "temperature": 0}"#);
    assert_eq!((status, body.contains("the limit of 1 s")), (408, true), "{body}");
    let body = r#"{"prompt": "a", "max_tokens": 4000, "temperature": 0, "stream": true}"#;
    let (status, body) = server.ask("/v1/completions", body);
    assert!(status == 200 && body.contains(r#""code":"timeout""#) && !body.contains("[DONE]"), "{body}");
    server.wait_for("unweight_sequences_running", 0.0);
}

#[test]
fn body_size_is_limited() {
    let server = Server::start(&mut command(&[]));
    let mut stream = TcpStream::connect(server.address()).unwrap();
    write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 9 << 20).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    let (status, body) = server.ask("/v1/completions", &"[".repeat(100_000));
    assert_eq!((status, body.contains("not a JSON object")), (400, true), "{body}");
    // A body without a length that is too large, and one with invalid framing.
    for (chunk, status) in [(format!("{:x}\r\n{}", 9 << 20, "[".repeat(9 << 20)), 413), ("zz\r\n".to_owned(), 400)] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
        // The server may answer and close the connection before it has read everything.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(chunk.as_bytes()));
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), format!("HTTP/1.1 {status}"));
    }
    let (status, body) = server.ask("/v1/models/%ff", "");
    assert_eq!((status, body.starts_with('{')), (404, true), "{body}");
    assert_eq!(server.ask("/v1/embeddings", "{}").0, 404);
    assert_eq!(server.ask("/v1/completions", "").0, 405);
}

#[test]
fn stop_finishes_running_requests() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        // A busy machine may need more than the default of 30 s.
        let server = Server::start(&mut command(&["--context", "4096", "--grace", "600"]));
        let mut stream = stream_of(&server, 300);
        server.signal(signal);
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("\"finish_reason\":\"length\"") && answer.contains("data: [DONE]"), "{answer}");
        let address = server.address().to_owned();
        let (status, said) = server.end();
        assert_eq!((status.code(), said.as_str()), (Some(0), ""));
        assert!(TcpStream::connect(address).is_err(), "the server still listens");
    }
}

#[test]
fn stop_cuts_requests_after_the_grace_period() {
    let server = Server::start(&mut command(&["--context", "4096", "--grace", "0"]));
    let mut stream = long_stream(&server);
    server.wait_for("unweight_sequences_running", 1.0);
    server.signal(rustix::process::Signal::TERM);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("shutting_down") && !answer.contains("[DONE]"), "{answer}");
    let (status, said) = server.end();
    assert_eq!(status.code(), Some(143), "{said}");
    assert!(said.contains("cut off"), "{said}");
}

#[test]
fn unsupported_requests_are_explained() {
    let server = Server::start(&mut command(&[]));
    let port = server.address().rsplit(':').next().unwrap().to_owned();
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run(&mut command(&["--port", &port]));
    assert!(said.contains("cannot listen on") && said.contains("--port"), "{said}");
    let said = run(command(&[]).env("UNWEIGHT_API_KEY", "two words"));
    assert!(said.contains("API key"), "{said}");
    let mut keys: Vec<_> = server.report.as_object().unwrap().keys().map(String::as_str).collect();
    keys.retain(|key| !["command", "unweight_version"].contains(key));
    let text = include_str!("../../docs/reference/json.md");
    let section = text.split("\n### serve\n").nth(1).unwrap().split("\n### ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut documented: Vec<_> = rows.collect();
    documented.sort_unstable();
    keys.sort_unstable();
    assert_eq!(keys, documented, "json.md, serve");
}

/// The model on the CPU, which fails after a number of steps.
struct Failing(CpuReference, u32);

#[derive(Debug, PartialEq, Eq)]
struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("broken")
    }
}

impl std::error::Error for Broken {}

impl Backend for Failing {
    type Error = Broken;

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn load(&self) -> Load {
        self.0.load()
    }

    fn add(&mut self, request: Request) -> Result<SeqId, AdmissionError> {
        self.0.add(request)
    }

    fn cancel(&mut self, sequence: SeqId) -> bool {
        self.0.cancel(sequence)
    }

    fn step(&mut self) -> Result<Vec<Event>, Broken> {
        self.1 = self.1.checked_sub(1).ok_or(Broken)?;
        self.0.step().map_err(|_| Broken)
    }

    fn is_idle(&self) -> bool {
        self.0.is_idle()
    }
}

/// Serves in this process while `clients` send requests, with an engine that fails after `steps` steps.
fn serve_in_process(steps: u32, clients: impl FnOnce(&str) + Send + 'static) -> Result<Ended, ServeError<Broken>> {
    let model = Bundle::open(&bundle()).unwrap();
    let cpu = CpuReference::load(&model, &EngineOptions::default().context(1024)).unwrap();
    let text = Text::new(include_bytes!("tokenizer.json"), None, None).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, stop) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicBool::new(false)));
    let asking = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            // The server must end even if a client panics.
            let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clients(&address)));
            stop.store(true, Ordering::Relaxed);
            asked
        }
    });
    let ended = serve(&mut Failing(cpu, steps), text, listener, ServeOptions::new("tiny"), stop);
    asking.join().unwrap().expect("what clients see");
    ended
}

#[test]
fn engine_failure_is_reported_to_every_request() {
    let ended = serve_in_process(60, |address| {
        assert_eq!(ask(address, "/v1/completions", r#"{"prompt": "a", "max_tokens": 3}"#).0, 200);
        let streams: Vec<_> = (0..2)
            .map(|_| {
                let mut stream = TcpStream::connect(address).unwrap();
                let body = r#"{"prompt": [5, 6], "max_tokens": 500, "stream": true, "temperature": 0}"#;
                send(&mut stream, "/v1/completions", body);
                stream
            })
            .collect();
        let body = r#"{"prompt": [5, 6], "max_tokens": 500, "temperature": 0}"#;
        let (status, answer) = ask(address, "/v1/completions", body);
        assert!(status == 503 && answer.contains("engine_failed"), "{answer}");
        for mut stream in streams {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.contains("engine_failed") && !answer.contains("[DONE]"), "{answer}");
        }
        assert_eq!(ask(address, "/health", "").0, 503);
        assert_eq!(ask(address, "/v1/completions", r#"{"prompt": "a"}"#).0, 503);
        assert_eq!(ask(address, "/v1/models", "").0, 200);
    });
    assert!(matches!(ended, Err(ServeError::Backend(Broken))), "{ended:?}");
}

/// A template without a tool call format.
#[test]
fn tools_without_a_format_are_explained() {
    let home = bundle_with(&[("chat_template.jinja", "{{ messages[0].content }}{{ tools }}")]);
    let server = Server::start(&mut command_of(&home.path().join("tiny"), &[]));
    let tools = r#""tools": [{"type": "function", "function": {"name": "f"}}]"#;
    let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {tools}}}"#);
    let (status, answer) = server.ask("/v1/chat/completions", &body);
    assert!(status == 400 && answer.contains("leave tools out"), "{answer}");
}

#[test]
fn base_model_rejects_chat() {
    let ended = serve_in_process(u32::MAX, |address| {
        let body = r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}"#;
        let (status, answer) = ask(address, "/v1/chat/completions", body);
        assert!(status == 400 && answer.contains("no_chat_template"), "{answer}");
        assert_eq!(ask(address, "/v1/completions", r#"{"prompt": "a", "max_tokens": 3}"#).0, 200);
    });
    assert_eq!(ended.unwrap(), Ended::Done);
}
