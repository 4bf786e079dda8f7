//! Connections without requests.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Server, command, send};

/// Maximum time of a request next to idle connections.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Starts a server, and lets this process open as many connections as it may.
fn server_of_many_connections() -> Server {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    // The server raises its limit itself.
    let serve = command(&["--context", "512"]);
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
