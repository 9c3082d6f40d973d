//! Connections: how many, and how long one may keep the server waiting.

use anyhow::Context as _;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// Buffer of a connection: what a request's headers may take.
const BUFFER_BYTES: usize = 16 << 10;
/// A pause after connections cannot be accepted: for want of file descriptors, mostly.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for answers to end after a signal.
const GRACE: Duration = Duration::from_secs(3);

/// Serves until a signal asks for the end. `patience`: how long a client may take over a request's headers, pause between
/// requests, or not read what was written for it. `ending` is called when the end begins: answers should end then.
pub(crate) async fn serve(
    address: SocketAddr,
    router: Router,
    most_connections: usize,
    patience: Duration,
    ending: impl FnOnce(),
) -> anyhow::Result<()> {
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("listening on {address}"))?;
    eprintln!("listening on http://{}", listener.local_addr()?);
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let places = Arc::new(Semaphore::new(most_connections));
    let mut end = Box::pin(async move {
        let (mut interrupt, mut terminate) =
            (Box::pin(interrupt.recv()), Box::pin(terminate.recv()));
        std::future::poll_fn(|context| {
            let ended = interrupt.as_mut().poll(context).is_ready()
                || terminate.as_mut().poll(context).is_ready();
            if ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("it is never closed");
        let accepted = std::pin::pin!(listener.accept());
        let Some(accepted) = first_of(accepted, end.as_mut()).await else { break };
        let Ok((stream, _)) = accepted else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Pieces of an answer are small and wanted at once. A socket that refuses this still works.
        let _ = stream.set_nodelay(true);
        let stream = Patient { stream, patience, waiting: None };
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .max_buf_size(BUFFER_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            // How a connection ends is the client's affair.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    ending();
    let all = places.acquire_many(most_connections as u32);
    // Whoever is not done by then is cut off.
    let _ = tokio::time::timeout(GRACE, all).await;
    Ok(())
}

/// The first future's output, or None if the second is over before.
async fn first_of<T>(
    mut wanted: Pin<&mut impl Future<Output = T>>,
    mut end: Pin<&mut impl Future<Output = ()>>,
) -> Option<T> {
    std::future::poll_fn(|context| {
        if end.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        wanted.as_mut().poll(context).map(Some)
    })
    .await
}

/// A connection that fails when the other side takes nothing for too long.
struct Patient {
    stream: TcpStream,
    patience: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let until = Instant::now() + self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep_until(until)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watch(context, shut)
    }
}
