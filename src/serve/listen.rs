//! Accepts connections and, when the server stops, waits for them.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io::{self, IoSlice},
    net::TcpListener,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody},
};
use hyper::{
    body::{Frame, SizeHint},
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
#[cfg(unix)]
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::{Notify, Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout, timeout_at},
};

use super::{
    options::{Ended, ServeOptions},
    prepare::{Preparer, SEND_TIMEOUT},
    routes::{Server, now, router},
    worker::Handle,
};
use crate::text::Text;

/// The maximum number of open connections. For a further one, an idle one is closed.
const CONNECTIONS_MAX: usize = 2048;
/// How long a client may take to send the first head of a connection.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may leave sent data unread.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum receive buffer of a connection, bytes; also the maximum size of a request head.
const CONNECTION_BUFFER_BYTES_MAX: usize = 64 << 10;
/// How often the server checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long connections may flush their data after the end of the grace period, or of the time of a request.
pub(super) const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The connections without a request, which are closed for new ones.
#[derive(Clone, Default)]
struct Idle(Arc<Mutex<IdleConnections>>);

/// Idle connections by numbers, which grow.
#[derive(Default)]
struct IdleConnections {
    next: u64,
    /// Those that have sent no whole head.
    silent: BTreeMap<u64, Arc<Notify>>,
    /// Those that have had a request.
    between_requests: BTreeMap<u64, Arc<Notify>>,
}

impl Idle {
    fn connections(&self) -> MutexGuard<'_, IdleConnections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection without a head.
    fn add(&self, timeout: Duration) -> Arc<Connection> {
        let (closing, deadline) = (Arc::default(), watch::Sender::new(Some(Instant::now() + FIRST_HEAD_TIMEOUT)));
        let mut connections = self.connections();
        let number = connections.add(true, &closing).into();
        let is_answered = AtomicBool::new(false);
        Arc::new(Connection { idle: self.clone(), number, closing, deadline, is_answered, timeout })
    }

    /// Closes a connection, if one is idle: of the larger kind the one that is idle longest.
    fn close_one(&self) {
        let mut connections = self.connections();
        let IdleConnections { silent, between_requests, .. } = &mut *connections;
        let kind = if silent.len() >= between_requests.len() { silent } else { between_requests };
        if let Some((_, closing)) = kind.pop_first() {
            closing.notify_one();
        }
    }
}

impl IdleConnections {
    fn add(&mut self, is_silent: bool, closing: &Arc<Notify>) -> u64 {
        self.next += 1;
        let kind = if is_silent { &mut self.silent } else { &mut self.between_requests };
        kind.insert(self.next, Arc::clone(closing));
        self.next
    }

    fn remove(&mut self, number: u64) {
        self.silent.remove(&number);
        self.between_requests.remove(&number);
    }
}

/// An open connection.
struct Connection {
    idle: Idle,
    /// Its number when it was last idle.
    number: AtomicU64,
    /// Notified when it must be closed for another.
    closing: Arc<Notify>,
    /// When it must end, unless it becomes idle before.
    deadline: watch::Sender<Option<Instant>>,
    /// Whether `hyper` has the end of the answer, and may not have written it.
    is_answered: AtomicBool,
    /// The time limit of a request.
    timeout: Duration,
}

impl Connection {
    fn begin_request(&self) {
        self.is_answered.store(false, Relaxed);
        self.idle.connections().remove(self.number.load(Relaxed));
        // The error of a request that took too long is still sent.
        self.deadline.send_replace(Some(Instant::now() + self.timeout + FLUSH_TIMEOUT));
    }

    /// Ends the request if all of its answer was passed to the system, which sends it even after the connection is
    /// closed.
    fn flushed(&self) {
        if self.is_answered.swap(false, Relaxed) {
            self.deadline.send_replace(None);
            self.number.store(self.idle.connections().add(false, &self.closing), Relaxed);
        }
    }

    /// Waits until the connection must be closed.
    async fn is_over(&self) {
        let mut deadline = self.deadline.subscribe();
        let late = async {
            loop {
                // `self` keeps the sender, so `changed` does not fail.
                let at = *deadline.borrow_and_update();
                let Some(at) = at else {
                    let _ = deadline.changed().await;
                    continue;
                };
                if timeout_at(at.into(), deadline.changed()).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = late => {}
            () = self.closing.notified() => {}
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.idle.connections().remove(self.number.load(Relaxed));
    }
}

/// The socket of a connection. `hyper` flushes it when it has written all data.
struct Socket {
    stream: TcpStream,
    connection: Arc<Connection>,
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, out)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.flushed();
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The body of a response, which is dropped when `hyper` has taken its end.
struct Answering {
    body: Body,
    connection: Arc<Connection>,
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.connection.is_answered.store(true, Relaxed);
    }
}

/// Lets the process open as many files as the system allows, because each connection takes one.
#[cfg(unix)]
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, fewer connections are open at a time.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Accepts connections until `stop` is set, then waits for them.
pub(super) async fn listen(
    listener: TcpListener,
    handle: Handle,
    text: Text,
    options: ServeOptions,
    stop: Arc<AtomicBool>,
) -> io::Result<Ended> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    #[cfg(unix)]
    raise_file_limit();
    let shared = Arc::clone(&handle.shared);
    let (grace, request_timeout) = (options.grace, options.timeout);
    let preparer = Preparer::new(text.clone(), handle, &options.model);
    preparer.prepare_for_grammars();
    let app = router(Server { preparer, options: Arc::new(options), started: now() });
    let (closing, closed) = watch::channel(false);
    let (connection_permits, idle) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Idle::default());
    let mut connections = JoinSet::new();
    let stopped = async {
        while !stop.load(Relaxed) {
            sleep(POLL_INTERVAL).await;
        }
    };
    let mut stopped = pin!(stopped);
    loop {
        let accept = async {
            let accepted = listener.accept().await?;
            if connection_permits.available_permits() == 0 {
                idle.close_one();
            }
            Ok::<_, io::Error>((accepted, Arc::clone(&connection_permits).acquire_owned().await))
        };
        let accepted = tokio::select! {
            accepted = accept => accepted,
            () = &mut stopped => break,
        };
        match accepted {
            Ok(((stream, _), permit)) => {
                let (app, closed, open) = (app.clone(), closed.clone(), idle.add(request_timeout));
                connections.spawn(async move {
                    connection(stream, app, open, closed).await;
                    drop(permit);
                });
            }
            // Out of file descriptors, or a client that has already disconnected: continue with others.
            Err(_) => {
                idle.close_one();
                sleep(POLL_INTERVAL).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
    drop((listener, app));
    shared.stopping.store(true, Relaxed);
    // Fails if there are no connections, and therefore no receiver.
    let _ = closing.send(true);
    let mut ended = Ended::Done;
    // Connections without a request need a moment, too.
    if timeout(grace.max(POLL_INTERVAL), join_all(&mut connections)).await.is_err() {
        ended = Ended::Cut;
        // Requests in preparation are answered now, and the text processes end.
        shared.abort.send_replace(true);
        text.stop();
        let _ = timeout(FLUSH_TIMEOUT, join_all(&mut connections)).await;
    }
    // Drops clients that still do not read, together with their handles.
    connections.shutdown().await;
    text.stop();
    Ok(ended)
}

async fn join_all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, app: Router, open: Arc<Connection>, mut closed: watch::Receiver<bool>) {
    // Send tokens at once, because they are small. If the socket refuses the option, it is only slower.
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, READ_TIMEOUT.as_millis() as u32);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(SEND_TIMEOUT).max_buf_size(CONNECTION_BUFFER_BYTES_MAX);
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request| {
        open.begin_request();
        let (response, connection) = (app.call(request), Arc::clone(&open));
        async move { Ok::<_, Infallible>(response.await?.map(|body| Answering { body, connection })) }
    });
    let socket = Socket { stream, connection: Arc::clone(&open) };
    let mut connection = pin!(http.serve_connection(TokioIo::new(socket), service));
    let closing = async {
        // The sender exists as long as there are connections.
        let _ = closed.wait_for(|closed| *closed).await;
    };
    // Connection errors concern only the client.
    tokio::select! {
        _ = connection.as_mut() => {}
        () = open.is_over() => {}
        () = closing => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
