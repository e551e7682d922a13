//! A container's network: opens sockets in it, and lists its listening ports.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::net::TcpSocket;

use crate::error::{Error, Result, WithContext};
use crate::reaper::Child;

/// Most bytes read of the kernel's table of sockets, which begins with those that listen.
const MAX_TABLE: u64 = 64 * 1024;
/// Most ports listed.
const MAX_PORTS: usize = 8;

/// A container's network.
#[derive(Debug)]
pub struct Network {
    /// `None` if it is the agent's own.
    namespace: Option<OwnedFd>,
    /// PID of the container's first process.
    pid: i32,
}

impl Network {
    /// The network of a started container, given its first process.
    pub fn of(init: &Child) -> Result<Self> {
        let pid = init.pid;
        let path = format!("/proc/{pid}/ns/net");
        let theirs = match File::open(&path) {
            // A process that has ended has no namespace. Nothing listens then, and its exit is reported soon.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Network { namespace: None, pid }),
            theirs => theirs.with_context(|| format!("open {path}"))?,
        };
        // Checked afterwards: until the process's end is known, its PID belongs to no other process, so the opened namespace is its own.
        if init.exit_code().is_some() {
            return Ok(Network { namespace: None, pid });
        }
        let (a, b) = (theirs.metadata(), fs::metadata("/proc/thread-self/ns/net"));
        let identity = |m: fs::Metadata| (m.dev(), m.ino());
        let same = a
            .and_then(|a| Ok(identity(a) == identity(b?)))
            .with_context(|| format!("look at {path}"))?;
        Ok(Network {
            namespace: (!same).then(|| theirs.into()),
            pid,
        })
    }

    /// Opens a TCP socket in it, for an address of this family.
    pub async fn socket(&self, address: &SocketAddr) -> Result<TcpSocket> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = match &self.namespace {
            None => socket(family),
            Some(namespace) => {
                let namespace = namespace.try_clone().with_context(|| "copy a namespace".into())?;
                // setns(2) changes the calling thread, so this takes a thread that ends afterwards.
                let within = move || {
                    let kind = Some(LinkNameSpaceType::Network);
                    move_into_link_name_space(namespace.as_fd(), kind)
                        .with_context(|| "join the container's network".into())?;
                    socket(family)
                };
                let thread = std::thread::Builder::new().name("network".into()).spawn(within);
                let thread = thread.with_context(|| "start a thread".into())?;
                let joined = tokio::task::spawn_blocking(move || thread.join()).await;
                let failed = || Error::State("the thread in the container's network failed".into());
                joined.map_err(|_| failed())?.map_err(|_| failed())?
            }
        }?;
        Ok(TcpSocket::from_std_stream(TcpStream::from(socket)))
    }

    /// Describes which ports are listened on, if `port` is not.
    pub fn describe_listening(&self, port: u16) -> String {
        let mut ports = BTreeSet::new();
        for name in ["tcp", "tcp6"] {
            let mut table = String::new();
            if let Ok(file) = File::open(format!("/proc/{}/net/{name}", self.pid)) {
                // A truncated or missing table only shortens the list.
                let _ = file.take(MAX_TABLE).read_to_string(&mut table);
            }
            ports.extend(listening(&table));
        }
        if ports.contains(&port) {
            return format!("port {port} is listened on, but not by this container");
        }
        let named: Vec<String> = ports.iter().take(MAX_PORTS).map(ToString::to_string).collect();
        match named.as_slice() {
            [] => format!("nothing listens on port {port}, nor on any other"),
            named => format!(
                "nothing listens on port {port}; what listens is on {}",
                named.join(", ")
            ),
        }
    }
}

fn socket(family: AddressFamily) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::STREAM, flags, None).with_context(|| "make a socket".into())
}

/// The listening ports in a table of the form of `/proc/net/tcp` (proc_pid_net(5)).
fn listening(table: &str) -> impl Iterator<Item = u16> {
    const LISTEN: &str = "0A";
    table.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (_, port) = words.next()?.rsplit_once(':')?;
        let state = words.nth(1)?;
        (state == LISTEN).then(|| u16::from_str_radix(port, 16).ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_ports_are_read_from_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            \u{20}  0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 17 1\n\
            \u{20}  1: 00000000000000000000000000000000:2382 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 1 1\n\
            \u{20}  2: 0100007F:0050 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 18 1\n\
            \u{20}  3: 0100007F:zzzz 0100007F:9C40 0A 0\n   4: 0100";
        assert_eq!(listening(table).collect::<Vec<_>>(), [3000, 9090]);
    }
}
