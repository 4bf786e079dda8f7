//! Clients that do not read their answers, and connections without requests.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{Server, bundle_with, command, command_of, memory, send};

/// Maximum time of a request next to clients that do not read.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Bytes of the long token of [`long_token`].
const LONG: usize = 1000;

/// Sends a request on each of many connections, which buffer little, and does not read.
const CLIENTS: &str = r#"
import socket, sys, time
address, count, path = sys.argv[1:]
body = sys.stdin.buffer.read()
head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
held = []
for _ in range(int(count)):
    client = socket.socket()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.split(":")[0], int(address.split(":")[1])))
    client.sendall(head + body)
    held.append(client)
print("sent", flush=True)
time.sleep(600)
"#;

/// Sends a request, and reads its answer after a line on stdin. Prints the size of the answer.
const SLOW: &str = r#"
import socket, sys
address, path, body = sys.argv[1:]
client = socket.socket()
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
client.connect((address.split(":")[0], int(address.split(":")[1])))
client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
print("sent", flush=True)
sys.stdin.readline()
client.settimeout(5)
answer = b""
while b"\r\n\r\n" not in answer or len(answer.partition(b"\r\n\r\n")[2]) < 65000:
    piece = client.recv(65536)
    if not piece:
        break
    answer += piece
print(len(answer.partition(b"\r\n\r\n")[2]), flush=True)
"#;

/// Clients that do not read, until they are dropped.
struct Unread(Child);

impl Unread {
    fn new(server: &Server, count: usize, path: &str, body: &Value) -> Self {
        let python = std::env::var("UNWEIGHT_PYTHON").expect("UNWEIGHT_PYTHON is not set: run `cargo xtask test`");
        let mut command = Command::new(python);
        command.args(["-c", CLIENTS, server.address(), &count.to_string(), path]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(body.to_string().as_bytes()).unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "sent\n");
        Self(child)
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a bundle whose tokenizer has a token of [`LONG`] bytes, `y` repeated, and the id of the token. Its decoder
/// joins tokens, which is fast.
pub fn long_token() -> (TempDir, Value) {
    let (mut tokenizer, id) = with_long_token();
    tokenizer["decoder"] = Value::Null;
    (bundle_with(&[("tokenizer.json", &tokenizer.to_string())]), id)
}

/// Returns a tokenizer with a token of [`LONG`] bytes, and the id of the token.
pub fn with_long_token() -> (Value, Value) {
    let mut tokenizer: Value = serde_json::from_str(include_str!("tokenizer.json")).unwrap();
    let long = "y".repeat(LONG);
    let token = tokenizer["added_tokens"].as_array_mut().unwrap().last_mut().unwrap();
    let old = std::mem::replace(&mut token["content"], json!(long)).as_str().unwrap().to_owned();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let id = vocab.remove(&old).unwrap();
    vocab.insert(long, id.clone());
    (tokenizer, id)
}

fn start(home: &Path, arguments: &[&str]) -> Server {
    Server::start(command_of(&home.join("tiny"), &["--context", "8192"]).args(arguments))
}

/// Asks for small answers for some seconds. Returns the most memory of the server.
fn others_are_answered(server: &Server, seconds: u64) -> u64 {
    let (begin, mut most) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_secs(seconds) {
        for (path, body) in [
            ("/v1/completions", json!({"prompt": "a", "max_tokens": 2})),
            ("/tokenize", json!({"prompt": "abc"})),
            ("/detokenize", json!({"tokens": [5]})),
        ] {
            let start = Instant::now();
            let (status, answer) = server.ask(path, &body.to_string());
            assert_eq!(status, 200, "{path}: {answer}");
            assert!(start.elapsed() < ANSWER_TIME, "{path} took {:?}", start.elapsed());
            most = most.max(memory::resident(server.child.id()));
        }
    }
    most
}

#[test]
fn decoded_texts_leave_others_alone() {
    let (home, id) = long_token();
    let server = start(home.path(), &[]);
    others_are_answered(&server, 0);
    let before = memory::resident(server.child.id());
    // Texts of 7.5 MB: 1.1 GB in total.
    let _clients = Unread::new(&server, 150, "/detokenize", &json!({"tokens": vec![id; 7500]}));
    let most = others_are_answered(&server, 6);
    println!("{} MiB, {} before", most >> 20, before >> 20);
    assert!(most < before + (128 << 20), "{} MiB, {} before", most >> 20, before >> 20);
}

#[test]
fn unread_echoes_hold_little_memory() {
    let (home, id) = long_token();
    let server = start(home.path(), &["--max-waiting", "1000", "--max-batch", "64"]);
    others_are_answered(&server, 0);
    let before = memory::resident(server.child.id());
    // 25 prompts of 250 KB each, as text and as token ids, echoed 8 times: 100 MB in total.
    let of = |prompt: Value| json!({"prompt": prompt, "n": 8, "echo": true, "max_tokens": 1, "stream": true});
    let _texts = Unread::new(&server, 25, "/v1/completions", &of(json!("y".repeat(250 * LONG))));
    let _ids = Unread::new(&server, 25, "/v1/completions", &of(json!(vec![id; 250])));
    server.wait_for_some("unweight_prompt_tokens_total", |tokens| tokens > f64::from(50 * 8 * 250));
    server.wait_for("unweight_sequences_waiting", 0.0);
    server.wait_for("unweight_sequences_running", 0.0);
    let held = memory::resident(server.child.id());
    println!("{} MiB, {} before", held >> 20, before >> 20);
    assert!(server.metric("unweight_body_bytes") > f64::from(10 << 20), "they count");
    assert!(held < before + (64 << 20), "{} MiB, {} before", held >> 20, before >> 20);
    others_are_answered(&server, 1);
}

#[test]
fn unread_answers_end_with_their_requests() {
    let (home, id) = long_token();
    let server = start(home.path(), &["--timeout", "8"]);
    // Answers of 200 KB: 54 MB in total.
    let large = json!({"tokens": vec![id; 200]});
    let clients = Unread::new(&server, 270, "/detokenize", &large);
    server.wait_for_some("unweight_answer_bytes", |bytes| bytes > f64::from(20 << 20));
    others_are_answered(&server, 2);
    assert_eq!(server.ask("/detokenize", &large.to_string()).0, 200);
    // 8 s for the request, and a moment for its error.
    server.wait_for("unweight_answer_bytes", 0.0);
    drop(clients);
}

/// Starts a server of the usual model, and lets this process open as many connections as it may.
fn server_of_many_connections() -> Server {
    many_connections(&command(&["--context", "512"]))
}

fn many_connections(serve: &Command) -> Server {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    // The server raises its limit itself.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -S -n 512 && exec \"$@\"", "sh"]).arg(serve.get_program()).args(serve.get_args());
    Server::start(limited.env_remove("UNWEIGHT_API_KEY").stderr(Stdio::piped()).stdout(Stdio::piped()))
}

/// Asks on an open connection and reads the whole answer.
fn ask_again(stream: &mut TcpStream) {
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    stream.set_read_timeout(Some(ANSWER_TIME)).unwrap();
    let (mut answer, mut piece) = (Vec::new(), [0; 1000]);
    while !answer.ends_with(b"}") {
        let length = stream.read(&mut piece).unwrap();
        assert!(length > 0, "the connection was closed");
        answer.extend(&piece[..length]);
    }
}

fn is_open(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    // No data arrives; an open connection reaches the time limit.
    stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn silent_connections_are_closed() {
    let server = server_of_many_connections();
    let mut kept = TcpStream::connect(server.address()).unwrap();
    ask_again(&mut kept);
    let start = Instant::now();
    let mut silent = Vec::new();
    for at in 0..2100 {
        silent.push(TcpStream::connect(server.address()).unwrap());
        // The system's queue of connections to accept is short.
        if at % 64 == 0 {
            assert_eq!(server.ask("/health", "").0, 200);
        }
    }
    assert_eq!(server.ask("/health", "").0, 200);
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    assert!(!is_open(&mut silent[0]), "the oldest is closed");
    assert!(is_open(&mut silent[2099]));
    ask_again(&mut kept);
    thread::sleep(Duration::from_secs(11).saturating_sub(start.elapsed()) + Duration::from_secs(1));
    assert!(!is_open(&mut silent[2099]), "the time for the first head is over");
    ask_again(&mut kept);
}

#[test]
fn idle_connections_are_closed_for_new_ones() {
    let server = server_of_many_connections();
    let mut idle = Vec::new();
    let mut running = None;
    for at in 0..2100 {
        if at == 2000 {
            let stream = running.insert(TcpStream::connect(server.address()).unwrap());
            send(
                stream,
                "/v1/completions",
                r#"{"prompt": [5], "max_tokens": 400, "stream": true, "ignore_eos": true}"#,
            );
        }
        let mut stream = TcpStream::connect(server.address()).unwrap();
        ask_again(&mut stream);
        idle.push(stream);
    }
    assert!(!is_open(&mut idle[0]), "the one that is idle longest is closed");
    ask_again(&mut idle[2099]);
    let mut answer = String::new();
    running.unwrap().read_to_string(&mut answer).unwrap();
    assert!(answer.contains("[DONE]"), "{answer}");
}

#[test]
fn slow_readers_are_not_idle() {
    let (home, id) = long_token();
    let server = many_connections(&command_of(&home.path().join("tiny"), &["--context", "512"]));
    // A small answer, which counts nowhere.
    let body = json!({"tokens": vec![id; 65]}).to_string();
    let python = std::env::var("UNWEIGHT_PYTHON").expect("UNWEIGHT_PYTHON is not set: run `cargo xtask test`");
    let mut slow = Command::new(python);
    slow.args(["-c", SLOW, server.address(), "/detokenize", &body]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut slow = slow.spawn().unwrap();
    let mut said = BufReader::new(slow.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "sent");
    let idle: Vec<TcpStream> = (0..2100)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            ask_again(&mut stream);
            stream
        })
        .collect();
    slow.stdin.take().unwrap().write_all(b"read\n").unwrap();
    let read: usize = said.next().unwrap().unwrap().parse().unwrap();
    assert!(read >= 65 * LONG, "the answer ends after {read} bytes");
    slow.wait().unwrap();
    drop(idle);
}
