//! What `make bench-service` measures: a node as a service to others, by E2B's API.
//!
//! | module | what is measured |
//! |---|---|
//! | [`sdk`] | E2B's Python SDK beside thawd's own API, and the gateway beside direct requests, with Linux guests |
//! | [`crowd`] | the gateway beside many connections, without a guest |
//! | [`paused`] | thawd's memory for paused sandboxes |
//!
//! [`driver`] is the Python program that [`sdk`] has take its times, [`relay`] the least that a gateway does, [`http`] what [`crowd`] speaks.

pub mod crowd;
pub mod driver;
pub mod http;
pub mod paused;
pub mod relay;
pub mod sdk;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;

use thaw_tiny_node::Place;

/// An administrator's token, which is an API key of E2B's API too.
const KEY: &str = "key-of-the-benchmark-0123456789abcdef";
/// The domain of the sandboxes' host names. Nothing resolves it.
const DOMAIN: &str = "sandboxes.example";

/// Where a node serves its APIs.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    e2b: SocketAddr,
    api: SocketAddr,
}

impl Addresses {
    /// Two at which nothing listens.
    fn free() -> Result<Addresses, String> {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let found = || -> io::Result<Addresses> {
            let (e2b, api) = (bind()?, bind()?);
            Ok(Addresses {
                e2b: e2b.local_addr()?,
                api: api.local_addr()?,
            })
        };
        found().map_err(|e| format!("free ports: {e}"))
    }

    /// The lines of `thawd.toml` by which the next thawd serves there. Writes the token.
    fn configuration(&self, place: &Place) -> Result<String, String> {
        let Addresses { e2b, api } = self;
        let file = place.path("tokens");
        fs::write(&file, format!("bench {KEY} role=admin\n"))
            .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o600)))
            .map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(format!(
            "[api]\nlisten = \"{api}\"\ntokens = {file:?}\n[e2b]\nlisten = \"{e2b}\"\ndomain = \"{DOMAIN}\"\n"
        ))
    }
}
