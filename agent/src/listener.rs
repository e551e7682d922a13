//! The sockets at which the host reaches the agent: vsock ports in a guest, unix sockets in a test. Only the
//! host is served: a connection from a process inside the guest is dropped.

use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use futures_util::stream;
use thaw_protocol::handshake::HANDSHAKE_PORT;
use tokio::io::{AsyncRead, AsyncWrite};
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

use crate::error::{Result, WithContext};
use crate::info;

/// The transport of the handshake and the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// In a guest.
    Vsock,
    /// In a test: unix sockets in this directory, named by port.
    Unix(PathBuf),
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    Vsock(VsockListener),
    Unix(UnixListener),
}

/// A connection from the host.
pub trait Stream: Read + Write {}
impl Stream for VsockStream {}
impl Stream for UnixStream {}

/// Limit for a connected host to send its greeting. It equals the host's own limit for a guest, because a node
/// that thaws many guests at once is slow.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Listener {
    /// Listens on `port`.
    pub fn bind(transport: &Transport, port: u32) -> Result<Self> {
        match transport {
            Transport::Vsock => VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port)
                .map(Listener::Vsock)
                .with_context(|| {
                    format!("listen on vsock port {port} (is there a virtio-vsock device and driver?)")
                }),
            Transport::Unix(dir) => {
                let path = dir.join(port.to_string());
                UnixListener::bind(&path)
                    .map(Listener::Unix)
                    .with_context(|| format!("listen on {}", path.display()))
            }
        }
    }

    /// Waits for the host to connect.
    pub fn accept(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Listener::Vsock(listener) => loop {
                let (stream, peer) = listener.accept()?;
                if peer.cid() == VMADDR_CID_HOST {
                    stream.set_read_timeout(Some(TIMEOUT))?;
                    stream.set_write_timeout(Some(TIMEOUT))?;
                    return Ok(Box::new(stream));
                }
            },
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                Ok(Box::new(stream))
            }
        }
    }

    /// Converts it to a listener of the runtime. Must be called within the runtime.
    pub fn into_async(self) -> Result<Accepting> {
        match self {
            Listener::Unix(listener) => listener
                .set_nonblocking(true)
                .and_then(|()| tokio::net::UnixListener::from_std(listener))
                .map(Accepting::Unix)
                .with_context(|| "listen on a unix socket".into()),
            Listener::Vsock(listener) => to_async(listener).map(Accepting::Vsock),
        }
    }

    /// Converts it to a listener for ttrpc. Must be called within the runtime.
    pub fn into_ttrpc(self) -> Result<ttrpc::r#async::transport::Listener> {
        match self {
            Listener::Unix(listener) => ttrpc::r#async::transport::Listener::try_from(listener)
                .with_context(|| "serve the unix socket".into()),
            Listener::Vsock(listener) => {
                let listener = to_async(listener)?;
                Ok(ttrpc::r#async::transport::Listener::new(stream::unfold(
                    listener,
                    |listener| async {
                        let connection = accept_host(&listener).await;
                        Some((connection, listener))
                    },
                )))
            }
        }
    }
}

/// A listening socket of the runtime.
#[derive(Debug)]
pub enum Accepting {
    Vsock(tokio_vsock::VsockListener),
    Unix(tokio::net::UnixListener),
}

/// A connection from the host, for the runtime.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl Connection for tokio_vsock::VsockStream {}
impl Connection for tokio::net::UnixStream {}

impl Accepting {
    /// Waits for the host to connect.
    pub async fn accept(&self) -> io::Result<Box<dyn Connection>> {
        match self {
            Accepting::Vsock(listener) => Ok(Box::new(accept_host(listener).await?)),
            Accepting::Unix(listener) => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

fn to_async(listener: VsockListener) -> Result<tokio_vsock::VsockListener> {
    listener
        .set_nonblocking(true)
        .with_context(|| "make the vsock listener non-blocking".into())?;
    // SAFETY: the descriptor was just released by its owner, so it has exactly one again.
    Ok(unsafe { tokio_vsock::VsockListener::from_raw_fd(listener.into_raw_fd()) })
}

async fn accept_host(listener: &tokio_vsock::VsockListener) -> io::Result<tokio_vsock::VsockStream> {
    loop {
        let (stream, peer) = listener.accept().await?;
        if peer.cid() == VMADDR_CID_HOST {
            return Ok(stream);
        }
    }
}

/// Tells the host that the handshake's port listens, by dialling a vsock port that the VMM always resets.
pub fn ring_doorbell(transport: &Transport) {
    if *transport == Transport::Vsock {
        match VsockStream::connect(&VsockAddr::new(VMADDR_CID_HOST, HANDSHAKE_PORT)) {
            Ok(_) => {}
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
                ) => {}
            // A VMM without a doorbell can still connect.
            Err(e) => info!("doorbell: {e}"),
        }
    }
}
