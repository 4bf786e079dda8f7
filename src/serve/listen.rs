//! Accepts connections and, when the server stops, waits for them.

use std::{
    collections::BTreeMap,
    future::pending,
    net::TcpListener,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::Router;
use hyper::{
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
    net::TcpStream,
    sync::{Notify, Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    options::{Ended, ServeOptions},
    prepare::{Preparer, SEND_TIMEOUT},
    routes::{Server, now, router},
    worker::Handle,
};
use crate::text::Text;

/// The maximum number of open connections. For a further one, the oldest that has sent no whole head is closed.
const CONNECTIONS_MAX: usize = 2048;
/// How long a client may take to send the first head of a connection.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may leave sent data unread.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum receive buffer of a connection, bytes; also the maximum size of a request head.
const CONNECTION_BUFFER_BYTES_MAX: usize = 64 << 10;
/// How often the server checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long connections may flush their data after all sequences have ended.
pub(super) const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The connections that have sent no whole head, the oldest first.
#[derive(Clone, Default)]
struct Silent(Arc<Mutex<BTreeMap<u64, Arc<Notify>>>>);

impl Silent {
    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Notify>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection.
    fn add(&self, number: u64) -> Silence {
        let closing = Arc::clone(self.connections().entry(number).or_default());
        Silence { silent: self.clone(), number, closing }
    }

    /// Closes the oldest connection, if there is one.
    fn close_oldest(&self) {
        if let Some((_, closing)) = self.connections().pop_first() {
            closing.notify_one();
        }
    }
}

/// The silence of a connection before its first head.
struct Silence {
    silent: Silent,
    number: u64,
    closing: Arc<Notify>,
}

impl Silence {
    /// Ends the silence. Returns whether it lasted until now.
    fn end(&self) -> bool {
        self.silent.connections().remove(&self.number).is_some()
    }

    /// Waits until the connection must be closed for its silence.
    async fn is_too_long(&self) {
        tokio::select! {
            () = self.closing.notified() => {}
            () = sleep(FIRST_HEAD_TIMEOUT) => {
                if !self.end() {
                    pending::<()>().await;
                }
            }
        }
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        self.end();
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
) -> std::io::Result<Ended> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    #[cfg(unix)]
    raise_file_limit();
    let shared = Arc::clone(&handle.shared);
    let grace = options.grace;
    let preparer = Preparer::new(text.clone(), handle, &options.model);
    let app = router(Server { preparer, options: Arc::new(options), started: now() });
    let (closing, closed) = watch::channel(false);
    let (connection_permits, silent) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Silent::default());
    let mut connections = JoinSet::new();
    let stopped = async {
        while !stop.load(Relaxed) {
            sleep(POLL_INTERVAL).await;
        }
    };
    let mut stopped = pin!(stopped);
    for number in 0.. {
        let accept = async {
            let accepted = listener.accept().await?;
            if connection_permits.available_permits() == 0 {
                silent.close_oldest();
            }
            Ok::<_, std::io::Error>((accepted, Arc::clone(&connection_permits).acquire_owned().await))
        };
        let accepted = tokio::select! {
            accepted = accept => accepted,
            () = &mut stopped => break,
        };
        match accepted {
            Ok(((stream, _), permit)) => {
                let (app, closed, silence) = (app.clone(), closed.clone(), silent.add(number));
                connections.spawn(async move {
                    connection(stream, app, silence, closed).await;
                    drop(permit);
                });
            }
            // Out of file descriptors, or a client that has already disconnected: continue with others.
            Err(_) => {
                silent.close_oldest();
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

async fn connection(stream: TcpStream, app: Router, silence: Silence, mut closed: watch::Receiver<bool>) {
    // Send tokens at once, because they are small. If the socket refuses the option, it is only slower.
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, READ_TIMEOUT.as_millis() as u32);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(SEND_TIMEOUT).max_buf_size(CONNECTION_BUFFER_BYTES_MAX);
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request| {
        silence.end();
        app.call(request)
    });
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let closing = async {
        // The sender exists as long as there are connections.
        let _ = closed.wait_for(|closed| *closed).await;
    };
    // Connection errors concern only the client.
    tokio::select! {
        _ = connection.as_mut() => {}
        () = silence.is_too_long() => {}
        () = closing => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
