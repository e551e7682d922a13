//! The wire: the only place that defines formats which two Thaw processes share.
//!
//! | module | between | carried by |
//! |---|---|---|
//! | [`control`] | thawd (or the CLI) and thaw-vmm | SEQPACKET unix socket, file descriptors beside the message |
//! | [`miss`] | thaw-vmm and thawd | SEQPACKET unix socket handed over [`control`] |
//! | [`share`] | who starts thaw-share, thaw-share, thaw-vmm | SEQPACKET unix socket it inherits; a stream handed over [`control`] |
//! | [`access`] | thaw-vmm to thawd | SEQPACKET unix socket handed over [`control`] |
//! | [`handshake`] | host and guest agent | vsock port [`handshake::HANDSHAKE_PORT`] |
//! | `agent` (feature `agent`) | host and guest agent | ttrpc on vsock port [`handshake::AGENT_PORT`] |
//! | `shim` (feature `shim`) | containerd and its shim; the shim and thawd | ttrpc on unix sockets |
//! | `snapshots` (feature `snapshots`) | containerd and thawd | gRPC on a unix socket |
//! | [`connect`], `e2b` (feature `e2b`) | clients of E2B and thawd | the Connect protocol over HTTP |
//! | [`device_limits`] | (types of [`control`]) | |
//! | [`disk_layer`] | thaw-vmm and thawd | a file handed over [`control`] |
//! | [`api`] | thawd and its callers | HTTP on a unix socket, JSON bodies |
//! | [`nodes`] | thawd and the thawd of another node | HTTP with TLS, JSON bodies |
//!
//! Messages without a format of their own above are [postcard](https://docs.rs/postcard) encodings of the
//! types here ([`encoding`]), in which an enum's variants have numbers of their own ([`tags`](mod@tags)).
//! [`versions`] lists the versions of each that this release speaks and understands. All decoding is of
//! untrusted bytes: it returns an error and never panics, and every frame has a size limit.

pub mod access;
#[cfg(feature = "agent")]
pub mod agent;
pub mod api;
pub mod connect;
pub mod control;
pub mod device_limits;
pub mod disk_layer;
#[cfg(feature = "e2b")]
pub mod e2b;
pub mod encoding;
pub mod handshake;
pub mod miss;
pub mod nodes;
pub mod packet;
pub mod share;
#[cfg(feature = "shim")]
pub mod shim;
#[cfg(feature = "snapshots")]
pub mod snapshots;
pub mod tags;
pub mod versions;

#[cfg(test)]
#[path = "golden_test.rs"]
mod golden;
