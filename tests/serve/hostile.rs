//! Bundles whose tokenizer or chat template tries to crash, fill or hang the server.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{Server, ask, bundle_with, command_of, memory, send};

/// Maximum time until a request is answered.
const ANSWER_TIME: Duration = Duration::from_secs(3);
/// Maximum memory of the server and its text process, bytes: a call of 256 MiB, plus the memory of both without it.
const MEMORY: u64 = 448 << 20;

/// Templates, each used for the conversation of its name.
const TEMPLATES: [(&str, &str); 12] = [
    ("batch", "{{ range(10)|batch(10**12)|list }}"),
    ("slice", "{{ range(10)|slice(10**12)|list }}"),
    (
        "sum",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    ),
    (
        "join",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    ),
    ("tojson", "{{ messages|tojson(indent=1000000000) }}"),
    ("indent", "{{ 'a\\nb'|indent(10**10) }}"),
    ("format", "{{ '%1000000000d'|format(1) }}"),
    ("replace", "{{ ('a'*100000)|replace('a', 'b'*100000) }}"),
    (
        "nested",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    ),
    ("deep", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
    ("long", "{{ 'a'*30000000 }}"),
    ("raise", "{{ raise_exception('a'*30000000) }}"),
];

fn template() -> String {
    let cases = TEMPLATES.iter().map(|(name, template)| format!("{{% if what == '{name}' %}}{template}{{% endif %}}"));
    format!("{{% set what = messages[0].content %}}{}{{{{ what }}}}", cases.collect::<String>())
}

/// Returns this directory's tokenizer with another value for a key.
fn tokenizer(key: &str, value: Value) -> String {
    let mut tokenizer: Value = serde_json::from_str(include_str!("tokenizer.json")).unwrap();
    tokenizer[key] = value;
    tokenizer.to_string()
}

/// Returns a normalizer that expands each "a" to 10^12 bytes.
fn growing() -> String {
    let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"});
    tokenizer("normalizer", json!({"type": "Sequence", "normalizers": vec![replace; 12]}))
}

/// Returns a post-processor that prepends 20,000 times 1,000 tokens to each text.
fn many_pieces() -> String {
    let mut pieces = vec![json!({"SpecialToken": {"id": "<s>", "type_id": 0}}); 20_000];
    pieces.push(json!({"Sequence": {"id": "A", "type_id": 0}}));
    let pair = [json!({"Sequence": {"id": "A", "type_id": 0}}), json!({"Sequence": {"id": "B", "type_id": 1}})];
    let special = json!({"<s>": {"id": "<s>", "ids": vec![0; 1000], "tokens": vec!["<s>"; 1000]}});
    tokenizer(
        "post_processor",
        json!({"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special}),
    )
}

fn started(files: &[(&str, &str)], arguments: &[&str]) -> (TempDir, Server) {
    let home = bundle_with(files);
    let server = Server::start(&mut command_of(&home.path().join("tiny"), arguments));
    (home, server)
}

fn chat(what: &str) -> String {
    json!({"messages": [{"role": "user", "content": what}], "max_tokens": 2, "temperature": 0}).to_string()
}

/// Records the peak memory of a server and its text processes until it is dropped, bytes.
struct Watched {
    most: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watched {
    fn new(server: &Server) -> Self {
        let (most, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (seen, end, pid) = (Arc::clone(&most), Arc::clone(&stop), server.child.id());
        let thread = thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                seen.fetch_max(memory::resident(pid), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(10));
            }
        });
        Self { most, stop, thread: Some(thread) }
    }

    fn most(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
        let most = self.most.load(Ordering::Relaxed);
        assert!(most > 8 << 20, "nothing was measured");
        most
    }
}

/// Returns grammars that exceed a limit, as fields of a request.
fn grammars() -> Vec<(&'static str, Value)> {
    let schema = |schema: Value| json!({"json": schema});
    let nested = |levels: usize| {
        let (open, close) = (r#"{"type":"array","items":"#.repeat(levels), "}".repeat(levels));
        format!("{open}{{}}{close}")
    };
    let product: Vec<Value> = (0..24)
        .map(|at| json!({"anyOf": [{"minLength": at}, {"maxLength": 1000 + at}, {"pattern": format!("x{at}")}]}))
        .collect();
    let properties = |count: usize| -> Value { (0..count).map(|at| (format!("p{at}"), json!({}))).collect() };
    vec![
        ("deep", json!({"json": nested(120)})),
        ("too deep", json!({"json": nested(2000)})),
        ("wide", schema(json!({"type": "object", "properties": properties(3000), "required": ["p0"]}))),
        ("product", schema(json!({"allOf": product}))),
        ("circle", schema(json!({"$ref": "#"}))),
        (
            "circles",
            schema(json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        ),
        ("items", schema(json!({"type": "array", "minItems": 1_000_000_000u64, "items": {"type": "integer"}}))),
        ("some items", schema(json!({"type": "array", "minItems": 100_000, "maxItems": 200_000}))),
        ("length", schema(json!({"type": "string", "minLength": 1_000_000_000u64}))),
        ("multiple", schema(json!({"type": "integer", "multipleOf": 999_999_937u64}))),
        ("impossible", schema(json!({"type": "object", "properties": {"a": false}, "required": ["a"]}))),
        ("powers", json!({"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"})),
        ("optional", json!({"regex": format!("{}{}", "a?".repeat(5000), "a".repeat(5000))})),
        ("back", json!({"regex": "(a|b)*a(a|b){2000}"})),
        ("stars", json!({"regex": format!("{}c", "(a*)*".repeat(500))})),
        ("and", json!({"grammar": "start: A\nA: /(.*a.{20}){10}/ & /(.*b.{21}){10}/ & /(.*c.{22}){10}/"})),
        ("parentheses", json!({"grammar": format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000))})),
        ("ambiguous", json!({"grammar": "start: start start | start start start | \"a\" | \"\""})),
        ("repeated", json!({"grammar": "start: (\"a\" | \"b\"){1,1000000000}"})),
        (
            "rules",
            json!({"grammar": format!("start: {}", (0..2000).map(|at| format!("\"{at}\" start | ")).collect::<String>() + "\"x\"")}),
        ),
        ("tools", json!({})),
    ]
}

/// The cost of compiling a grammar affects only its request. A too large grammar is an error, and other requests
/// continue.
#[test]
fn hostile_grammars_are_errors_within_limits() {
    let (_home, server) = started(&[], &["--context", "2048", "--max-batch", "4"]);
    let address = server.address().to_owned();
    // The token tables are made once.
    let first = json!({"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "a"}}).to_string();
    assert_eq!(server.ask("/v1/completions", &first).0, 200);
    let done = Arc::new(AtomicBool::new(false));
    let neighbour = {
        let (done, address) = (Arc::clone(&done), address.clone());
        thread::spawn(move || {
            let mut slowest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                assert_eq!(ask(&address, "/v1/completions", r#"{"prompt": [5], "max_tokens": 2}"#).0, 200);
                slowest = slowest.max(start.elapsed());
                thread::sleep(Duration::from_millis(20));
            }
            slowest
        })
    };
    let watched = Watched::new(&server);
    let mut refused = 0;
    for (name, grammar) in grammars() {
        let body = if name == "tools" {
            let schema = json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1 << 30});
            let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
            let messages = json!([{"role": "user", "content": "x"}]);
            json!({"messages": messages, "max_tokens": 8, "tools": [tool], "tool_choice": "required"})
        } else {
            json!({"prompt": "x", "max_tokens": 64, "seed": 1, "structured_outputs": grammar})
        };
        let path = if name == "tools" { "/v1/chat/completions" } else { "/v1/completions" };
        let start = Instant::now();
        let (status, answer) = server.ask(path, &body.to_string());
        let took = start.elapsed();
        println!("{name}: {status} in {took:?}: {}", answer.chars().take(200).collect::<String>());
        // 408 if the machine is busy.
        assert!([200, 400, 408].contains(&status), "{name}: {status} {answer}");
        assert!(answer.len() < 20_000, "{name}: an answer of {} bytes", answer.len());
        assert!(took < 2 * ANSWER_TIME, "{name} took {took:?}");
        refused += usize::from(status != 200);
    }
    done.store(true, Ordering::Relaxed);
    let slowest = neighbour.join().unwrap();
    assert!(refused >= 5, "{refused} refused");
    assert!(slowest < ANSWER_TIME, "a neighbour waited {slowest:?}");
    let most = watched.most();
    println!("at most {} MiB, the slowest neighbour {slowest:?}", most >> 20);
    assert!(most < MEMORY + (256 << 20), "{} MiB", most >> 20);
}

#[test]
fn hostile_templates_are_errors_within_limits() {
    let (_home, server) = started(&[("chat_template.jinja", &template())], &["--context", "512"]);
    for (name, _) in TEMPLATES {
        let (watched, start) = (Watched::new(&server), Instant::now());
        let (status, body) = server.ask("/v1/chat/completions", &chat(name));
        let (time, most) = (start.elapsed(), watched.most());
        assert!((400..500).contains(&status), "{name}: {status} {body}");
        assert!(body.len() < 10_000, "{name}: an error of {} bytes", body.len());
        assert!(time < ANSWER_TIME, "{name}: {time:?}");
        assert!(most < MEMORY, "{name}: {} MiB", most >> 20);
        println!("{name}: {status} after {time:?}, {} MiB: {body}", most >> 20);
        assert_eq!(server.ask("/health", "").0, 200, "{name}");
    }
    let (status, body) = server.ask("/v1/chat/completions", &chat("hello"));
    assert_eq!(status, 200, "{body}");
}

#[test]
fn hostile_tokenizers_are_errors_within_limits() {
    for (name, file) in [("growing", growing()), ("pieces", many_pieces())] {
        let (_home, server) = started(&[("tokenizer.json", &file)], &["--context", "512"]);
        let (watched, start) = (Watched::new(&server), Instant::now());
        let body = json!({"prompt": "a".repeat(50), "max_tokens": 2}).to_string();
        let (status, body) = server.ask("/v1/completions", &body);
        let (time, most) = (start.elapsed(), watched.most());
        println!("{name}: {status} after {time:?}, {} MiB: {body}", most >> 20);
        assert!((status, body.contains("text_limit_exceeded")) == (400, true), "{name}: {status} {body}");
        assert!(time < ANSWER_TIME, "{name}: {time:?}");
        assert!(most < MEMORY, "{name}: {} MiB", most >> 20);
        // Token ids need no tokenizer.
        assert_eq!(server.ask("/v1/completions", r#"{"prompt": [5, 6], "max_tokens": 2}"#).0, 200, "{name}");
    }
}

/// transformers ignores these by default, too.
#[test]
fn padding_and_truncation_of_a_tokenizer_are_ignored() {
    let padding = json!({"strategy": {"Fixed": 1u64 << 40}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"});
    let truncation = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    let mut file: Value = serde_json::from_str(&tokenizer("padding", padding)).unwrap();
    file["truncation"] = truncation;
    let (_home, server) = started(&[("tokenizer.json", &file.to_string())], &[]);
    let (status, body) = server.ask("/v1/completions", r#"{"prompt": "0123456789", "max_tokens": 2}"#);
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(11)), "{body}");
}

/// Returns a template that runs until it is stopped, if the first message requests it.
fn endless() -> String {
    // Each instruction does much work, so the time limit of a call ends before the limit of instructions.
    let work = "{% for i in range(100000) %}{% set x = ('a'*400000)|upper|lower|upper|lower|length %}{% endfor %}";
    format!("{{% if messages[0].content == 'hang' %}}{work}{{% endif %}}{{{{ messages[0].content }}}}")
}

fn hang(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    send(&mut stream, "/v1/chat/completions", &chat("hang"));
    stream
}

#[test]
fn slow_templates_leave_the_others_alone() {
    let (_home, server) = started(&[("chat_template.jinja", &endless())], &["--timeout", "1"]);
    // `--timeout` applies while a template runs, and while a request waits for a process.
    let start = Instant::now();
    let waiting: Vec<TcpStream> = (0..4).map(|_| hang(&server)).collect();
    for mut stream in waiting {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("the limit of 1 s"), "{answer}");
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    // Prompts of token ids need no process. Text prompts eventually get one.
    assert_eq!(server.ask("/v1/completions", r#"{"prompt": [5, 6], "max_tokens": 2}"#).0, 200);
    let start = Instant::now();
    while server.ask("/v1/completions", r#"{"prompt": "a", "max_tokens": 2}"#).0 != 200 {
        assert!(start.elapsed() < Duration::from_secs(10), "the processes are lost");
    }
}

#[test]
fn a_disconnect_frees_the_place() {
    let (_home, server) = started(&[("chat_template.jinja", &endless())], &[]);
    // Waiting requests are dropped when their clients disconnect. Four are in progress, for at most two seconds.
    let clients: Vec<TcpStream> = (0..30).map(|_| hang(&server)).collect();
    thread::sleep(Duration::from_millis(300));
    drop(clients);
    let start = Instant::now();
    let (status, body) = server.ask("/v1/chat/completions", &chat("hello"));
    assert_eq!(status, 200, "{body}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_signal_ends_the_server_while_templates_hang() {
    let (_home, server) = started(&[("chat_template.jinja", &endless())], &["--grace", "1"]);
    let clients: Vec<TcpStream> = (0..4).map(|_| hang(&server)).collect();
    thread::sleep(Duration::from_millis(300));
    let processes = memory::children(server.child.id());
    assert_eq!(processes.len(), 4, "text processes");
    server.signal(rustix::process::Signal::TERM);
    let start = Instant::now();
    let (status, said) = server.end();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(status.code(), Some(143), "{said}");
    for mut stream in clients {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        // All are cut off when the grace period ends, before the time limit of a call.
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("shutting_down"), "{answer}");
    }
    assert!(processes.iter().all(|pid| memory::is_gone(*pid)), "text processes remain");
}

/// A text process ends with its parent, whatever it is doing.
#[test]
fn text_processes_end_with_a_killed_server() {
    let (_home, mut server) = started(&[("chat_template.jinja", &endless())], &[]);
    let _client = hang(&server);
    thread::sleep(Duration::from_millis(300));
    let processes = memory::children(server.child.id());
    assert!(!processes.is_empty());
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let start = Instant::now();
    while !processes.iter().all(|pid| memory::is_gone(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(1), "a text process runs without its server");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn files_that_cannot_be_bounded_are_refused_at_start() {
    let regex = json!({"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b"});
    let long: String = "x".repeat(2000);
    let token = json!([{"id": 261, "content": long, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false}]);
    for (file, says) in [
        (tokenizer("decoder", regex), "tokenizer.json: decoder.pattern is a regular expression"),
        (tokenizer("added_tokens", token), "tokenizer.json: model.vocab or added_tokens: token"),
    ] {
        let home = bundle_with(&[("tokenizer.json", &file)]);
        let output = command_of(&home.path().join("tiny"), &[]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(says), "{said}");
        assert!(said.contains("tokenizer-file-invalid"), "{said}");
    }
}

/// Loading is limited as well: this normalizer expands an added token to 10^11 bytes.
#[test]
fn a_tokenizer_that_fills_memory_ends_the_start() {
    let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(300_000)});
    let normalizer = json!({"type": "Sequence", "normalizers": [replace, replace]});
    let mut file: Value = serde_json::from_str(&tokenizer("normalizer", normalizer)).unwrap();
    file["added_tokens"] = json!([{"id": 66, "content": "a", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": true, "special": false}]);
    let home = bundle_with(&[("tokenizer.json", &file.to_string())]);
    let start = Instant::now();
    let mut child = command_of(&home.path().join("tiny"), &[]).spawn().unwrap();
    let mut most = 0;
    while child.try_wait().unwrap().is_none() {
        most = most.max(memory::resident(child.id()));
        thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("text-limit-exceeded"), "{said}");
    assert!(said.contains("loading the tokenizer takes more than"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(13), "{:?}", start.elapsed());
    assert!(most < MEMORY, "{} MiB", most >> 20);
}

#[test]
fn generate_has_the_same_limits() {
    let home = bundle_with(&[("chat_template.jinja", &template())]);
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("unweight"));
    let output = command.arg("generate").arg(home.path().join("tiny")).args(["--chat", "--prompt", "batch"]).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("text-limit-exceeded"), "{said}");
    assert!(said.contains("256 MiB of memory"), "{said}");
}

/// Text that exceeds any context is rejected before it is encoded.
#[test]
fn text_beyond_the_context_is_refused_early() {
    let (_home, server) = started(&[], &["--context", "512"]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a".repeat(4_000_000)})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a".repeat(4_000_000)}]})),
    ] {
        let start = Instant::now();
        let (status, body) = ask(server.address(), path, &body.to_string());
        assert_eq!((status, body.contains("context_length_exceeded")), (400, true), "{body}");
        assert!(body.contains(&format!("{}", 512 * "<|assistant|>".len())), "{body}");
        assert!(start.elapsed() < ANSWER_TIME, "{:?}", start.elapsed());
    }
    // Fewer bytes, but still too many tokens. The error states the text's number of tokens.
    let (status, body) = server.ask("/v1/completions", &json!({"prompt": "a".repeat(600)}).to_string());
    assert_eq!((status, body.contains("601")), (400, true), "{body}");
}

/// Returns a client that has sent half of its body.
pub fn half_sent(server: &Server, sent: usize, announced: usize) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {announced}\r\n\r\n");
    // A server that rejects the request closes the connection before everything is sent.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b' '; sent]));
    stream
}
