//! Ends the TCP connections that a clone has from the frozen sandbox. No packet arrives on them any more, so a process that only reads would
//! wait for ever.
//!
//! Connections within the guest go on, and sockets that listen stay. Workloads are stopped meanwhile.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use thaw_sys::connections::{self, Connection};
use thaw_sys::netlink::Socket;

use crate::error::{Error, Result, WithContext};
use crate::{debug, warning};

/// Most connections of the guest that are looked at; more end when their program or their timers notice.
const MOST: usize = 65_536;
/// How long a thaw waits. A process that was stopped in the middle of a send may hold its socket until it continues.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Ends the connections of these network namespaces that lead out of the guest. What fails is logged: those connections then end by their
/// timers.
pub fn end_connections(namespaces: Vec<File>) {
    let (tell, told) = mpsc::channel();
    let until = Instant::now() + TIMEOUT;
    let work = move || {
        // If nothing waits any more, this has taken too long.
        let _ = tell.send(end_in(&namespaces, until));
    };
    // setns(2) changes the calling thread, so this takes a thread that ends afterwards.
    let thread = std::thread::Builder::new().name("resets".into()).spawn(work);
    let outcome = thread
        .with_context(|| "start a thread".into())
        .and_then(|_detached| {
            told.recv_timeout(TIMEOUT)
                .unwrap_or_else(|_| Err(Error::State(format!("not done after {} s", TIMEOUT.as_secs()))))
        });
    match outcome {
        Ok(ended) => debug!("{ended} connections of the frozen sandbox ended"),
        Err(e) if e.errno() == Some(libc::EOPNOTSUPP) => debug!("this kernel cannot end connections: {e}"),
        Err(e) => warning!("connections of the frozen sandbox were not ended: {e}"),
    }
}

/// Returns how many connections were ended: none unless all are listed before `until`. Moves the calling thread into the namespaces.
fn end_in(namespaces: &[File], until: Instant) -> Result<usize> {
    let mut found: Vec<(Socket, Vec<Connection>)> = Vec::new();
    let mut room = MOST;
    for namespace in namespaces {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| "join a container's network".into())?;
        let mut socket = Socket::diagnostics().with_context(|| "open a netlink socket".into())?;
        let all = connections::list(&mut socket, room).with_context(|| "list connections".into())?;
        room = room.saturating_sub(all.len());
        found.push((socket, all));
    }
    if Instant::now() >= until {
        // Workloads may have gone on and opened some of these.
        return Err(Error::State("listing connections took too long".into()));
    }
    let all = found.iter().flat_map(|(_, all)| all);
    let ends: BTreeSet<_> = all.map(|c| (c.local, c.remote)).collect();
    let mut ended = 0;
    for (socket, all) in &mut found {
        for connection in all.iter().filter(|c| leads_out(c.local, c.remote, &ends)) {
            end(socket, connection)?;
            ended += 1;
        }
    }
    Ok(ended)
}

fn end(socket: &mut Socket, connection: &Connection) -> Result<()> {
    let Connection { local, remote, .. } = connection;
    connections::end(socket, connection)
        .with_context(|| format!("end the connection of {local} with {remote}"))
}

/// Whether the other end of a connection is outside the guest. `ends` has all ends that are in it.
fn leads_out(local: SocketAddr, remote: SocketAddr, ends: &BTreeSet<(SocketAddr, SocketAddr)>) -> bool {
    !remote.ip().is_loopback() && !ends.contains(&(remote, local))
}

#[cfg(test)]
#[path = "resets_test.rs"]
mod tests;
