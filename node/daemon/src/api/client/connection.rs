//! Connections to thawd's socket, each for one request after the other.
//!
//! Invariant: a request is sent again only if none of it was sent. Nothing runs a connection between requests: who waits for an answer
//! polls it meanwhile, so an answer wakes one task only.

use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest, handshake};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustix::net::SocketType;
use thaw_pools::vmm;
use thaw_sys::lock::Lock;
use tokio::net::UnixStream;

/// Most connections that are kept for later requests.
const MOST_IDLE: usize = 16;
/// How long they are kept. thawd keeps them for longer ([`HEAD_LIMIT`](crate::api::connection::HEAD_LIMIT)), so that it does not close one
/// while a request is on its way.
const IDLE_LIMIT: Duration = Duration::from_secs(1);

/// Why a request has no answer.
pub type Broken = Box<dyn std::error::Error + Send + Sync>;

/// A request with its whole body.
pub type Asked = Request<Full<Bytes>>;

/// A connection, which ends with this value.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` when it has ended.
    driver: Option<Driver>,
}

/// Reads and writes while it is polled.
type Driver = Box<http1::Connection<TokioIo<UnixStream>, Full<Bytes>>>;

impl Connection {
    async fn open(socket: &Path) -> Result<Connection, Broken> {
        let stream = std::os::unix::net::UnixStream::from(vmm::connect(socket, SocketType::STREAM)?);
        stream.set_nonblocking(true)?;
        let (sender, driver) = handshake(TokioIo::new(UnixStream::from_std(stream)?)).await?;
        Ok(Connection {
            sender,
            driver: Some(Box::new(driver)),
        })
    }

    /// Sends a request, and waits for the head of the answer.
    async fn send(&mut self, request: Asked) -> Result<Response<Incoming>, TrySendError<Asked>> {
        let Connection { sender, driver } = self;
        drive(driver, async {
            // Of an earlier answer, the end may still have to be read. An error of this is found again by the next call.
            let _ = sender.ready().await;
            sender.try_send_request(request).await
        })
        .await
    }

    /// Waits for what comes over this connection.
    pub async fn receive<T>(&mut self, what: impl Future<Output = T>) -> T {
        drive(&mut self.driver, what).await
    }
}

/// Polls the connection until `what` is done.
async fn drive<T>(driver: &mut Option<Driver>, what: impl Future<Output = T>) -> T {
    let mut what = pin!(what);
    poll_fn(|context| {
        if let Poll::Ready(done) = what.as_mut().poll(context) {
            return Poll::Ready(done);
        }
        let ended = driver
            .as_mut()
            .is_some_and(|driver| Pin::new(driver).poll(context).is_ready());
        if ended {
            // Its error is that of what is waited for.
            *driver = None;
        }
        what.as_mut().poll(context)
    })
    .await
}

/// The connections whose answer was received. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Connections(Arc<Mutex<Vec<(Instant, Connection)>>>);

impl Connections {
    /// Sends a request, over a connection that is kept or a new one to `socket`. Returns the head of the answer, and the connection that
    /// the rest comes over.
    ///
    /// # Errors
    /// Nobody listens at the socket, or the other end breaks off.
    pub async fn send(
        &self,
        socket: &Path,
        mut request: Asked,
    ) -> Result<(Response<Incoming>, Connection), Broken> {
        while let Some(mut kept) = self.take() {
            match kept.send(request).await {
                Ok(response) => return Ok((response, kept)),
                // The other end closed it before the request.
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(error.into_error().into()),
                },
            }
        }
        let mut new = Connection::open(socket).await?;
        let response = new.send(request).await.map_err(TrySendError::into_error)?;
        Ok((response, new))
    }

    /// Keeps a connection, of whose answer everything was received.
    pub fn keep(&self, connection: Connection) {
        let mut idle = self.0.locked();
        if connection.driver.is_some() && idle.len() < MOST_IDLE {
            idle.push((Instant::now(), connection));
        }
    }

    /// The one that was used last.
    fn take(&self) -> Option<Connection> {
        let mut idle = self.0.locked();
        idle.retain(|(since, _)| since.elapsed() < IDLE_LIMIT);
        idle.pop().map(|(_, connection)| connection)
    }
}

#[cfg(test)]
#[path = "connection_test.rs"]
mod tests;
