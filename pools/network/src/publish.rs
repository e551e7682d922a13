//! Published ports: ports of the host that lead to a sandbox.
//!
//! A published port is an element in a map of the host's table, and a socket that is bound to the port, so that neither another sandbox nor
//! a server on this host can take it. Dropping the [`Publication`] removes the element, unless it is kept for a later owner.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::api::PublishedPort;

use crate::Error;
use crate::host::{ANYWHERE, AT, Host};
use thaw_sys::netlink::Socket;
use thaw_sys::nft::rule::{TCP, UDP};
use thaw_sys::nft::{Field, Target, Transaction};

/// Most ports that one sandbox publishes.
pub const MAX_PORTS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Tcp,
    Udp,
}

/// A port of the host, and the guest's port that it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// `None`: every address of the host.
    address: Option<Ipv4Addr>,
    /// 0: any free port.
    host: u16,
    guest: u16,
    protocol: Protocol,
}

/// Why a port cannot be published on any host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    #[error("{0:?} is not [ADDRESS:]HOSTPORT:PORT, with /tcp or /udp after it")]
    Malformed(String),
    #[error("{0:?} is no IPv4 address of this host")]
    Address(String),
    #[error("{0:?} is no protocol: tcp or udp")]
    Protocol(String),
    #[error("the sandbox has no port 0")]
    Guest,
}

impl TryFrom<&PublishedPort> for Port {
    type Error = PortError;

    fn try_from(asked: &PublishedPort) -> Result<Port, PortError> {
        let address = asked.address.as_ref().map(|text| {
            let address = text
                .parse::<Ipv4Addr>()
                .map_err(|_| PortError::Address(text.clone()))?;
            Ok((!address.is_unspecified()).then_some(address))
        });
        let protocol = match asked.protocol.as_str() {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            other => return Err(PortError::Protocol(other.to_owned())),
        };
        match asked.guest {
            0 => Err(PortError::Guest),
            guest => Ok(Port {
                address: address.transpose()?.flatten(),
                host: asked.host,
                guest,
                protocol,
            }),
        }
    }
}

impl From<Port> for PublishedPort {
    fn from(port: Port) -> PublishedPort {
        PublishedPort {
            address: port.address.map(|a| a.to_string()),
            host: port.host,
            guest: port.guest,
            protocol: port.protocol.name().into(),
        }
    }
}

impl FromStr for Port {
    type Err = PortError;

    /// Parses a port of the command line: `[ADDRESS:]HOSTPORT:PORT[/udp]`.
    fn from_str(text: &str) -> Result<Port, PortError> {
        let malformed = || PortError::Malformed(text.to_owned());
        let (rest, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let mut parts = rest.rsplitn(3, ':');
        let number = |part: Option<&str>| {
            let part = part.filter(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
            part.and_then(|p| p.parse::<u16>().ok()).ok_or_else(malformed)
        };
        let (guest, host) = (number(parts.next())?, number(parts.next())?);
        Port::try_from(&PublishedPort {
            address: parts.next().map(str::to_owned),
            host,
            guest,
            protocol: protocol.to_owned(),
        })
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address.unwrap_or(Ipv4Addr::UNSPECIFIED);
        write!(f, "{address}:{}/{}", self.host, self.protocol.name())
    }
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        }
    }

    fn number(self) -> u8 {
        match self {
            Protocol::Tcp => TCP,
            Protocol::Udp => UDP,
        }
    }
}

impl Port {
    fn map(self) -> &'static str {
        match self.address {
            Some(_) => AT,
            None => ANYWHERE,
        }
    }

    fn key(self) -> Vec<Field> {
        let address = self.address.map(Field::Address);
        let rest = [Field::Protocol(self.protocol.number()), Field::Port(self.host)];
        address.into_iter().chain(rest).collect()
    }

    /// Binds the port, so that no other process can. Replaces port 0 by the port that the kernel chose.
    fn reserve(&mut self) -> Result<OwnedFd, Error> {
        let failed = |source: std::io::Error| match source.raw_os_error() {
            Some(libc::EADDRINUSE) => Error::PortInUse {
                port: self.to_string(),
            },
            Some(libc::EADDRNOTAVAIL) => Error::NotOurAddress {
                port: self.to_string(),
            },
            _ => Error::system("reserve a port of the host")(source),
        };
        let address = SocketAddrV4::new(self.address.unwrap_or(Ipv4Addr::UNSPECIFIED), self.host);
        let kind = match self.protocol {
            Protocol::Tcp => SocketType::STREAM,
            Protocol::Udp => SocketType::DGRAM,
        };
        let bound = rustix::net::socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, None)
            .and_then(|socket| rustix::net::bind(&socket, &address).map(|()| socket));
        let socket = bound.map_err(|e| failed(e.into()))?;
        // Bound only to learn its address, never used for traffic.
        let (socket, port) = match self.protocol {
            Protocol::Tcp => {
                let bound = TcpListener::from(socket);
                let port = bound.local_addr().map_err(failed)?.port();
                (OwnedFd::from(bound), port)
            }
            Protocol::Udp => {
                let bound = UdpSocket::from(socket);
                let port = bound.local_addr().map_err(failed)?.port();
                (OwnedFd::from(bound), port)
            }
        };
        self.host = port;
        Ok(socket)
    }
}

/// A port that is published for a slot.
#[derive(Debug)]
pub(super) struct Publication {
    pub port: Port,
    host: Arc<Host>,
    /// `None` if the slot is adopted and another process has bound the port meanwhile.
    _reserved: Option<OwnedFd>,
    keep: bool,
}

impl Publication {
    /// Publishes all of these ports, or none.
    pub fn all(host: &Arc<Host>, slot: Ipv4Addr, ports: &[Port]) -> Result<Vec<Publication>, Error> {
        let mut reserved = Vec::with_capacity(ports.len());
        for port in ports {
            let mut port = *port;
            let socket = port.reserve()?;
            reach(Failpoint::PublishReserved);
            reserved.push((port, socket));
        }
        let insert = || {
            let mut transaction = Transaction::new(&host.table);
            for (port, _) in &reserved {
                let target = Target {
                    address: slot,
                    port: port.guest,
                };
                transaction.insert(port.map(), &port.key(), target);
            }
            Socket::netfilter().and_then(|mut socket| transaction.commit(&mut socket))
        };
        let mut inserted = insert();
        if matches!(&inserted, Err(e) if e.raw_os_error() == Some(libc::EEXIST)) {
            // The port was free to bind, so the process that published it is dead; perhaps its sandbox is too.
            host.sweep()?;
            inserted = insert();
        }
        inserted.map_err(|source| match source.raw_os_error() {
            Some(libc::EEXIST) => Error::PortInUse { port: list(ports) },
            _ => Error::system("publish ports")(source),
        })?;
        reach(Failpoint::PublishInserted);
        let publications = reserved.into_iter().map(|(port, socket)| Publication {
            port,
            host: host.clone(),
            _reserved: Some(socket),
            keep: false,
        });
        Ok(publications.collect())
    }

    /// A publication that an earlier owner kept.
    pub fn kept(host: &Arc<Host>, mut port: Port) -> Publication {
        let reserved = port.reserve();
        if let Err(e) = &reserved {
            tracing::warn!("a published port is not reserved any more: {e}");
        }
        Publication {
            port,
            host: host.clone(),
            _reserved: reserved.ok(),
            keep: false,
        }
    }

    /// Leaves the port published when this is dropped.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        let mut transaction = Transaction::new(&self.host.table);
        transaction.remove(self.port.map(), &self.port.key());
        let removed = Socket::netfilter().and_then(|mut socket| transaction.commit(&mut socket));
        reach(Failpoint::PublishRemoved);
        match removed {
            Err(e) if e.raw_os_error() != Some(libc::ENOENT) => {
                tracing::warn!("port {} stays published: {e}", self.port);
            }
            _ => {}
        }
    }
}

fn list(ports: &[Port]) -> String {
    let ports: Vec<String> = ports.iter().map(Port::to_string).collect();
    ports.join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_docker_writes_them() {
        let read = |text: &str| text.parse::<Port>().map(PublishedPort::from);
        let port = |address: Option<&str>, host, guest, protocol: &str| PublishedPort {
            address: address.map(str::to_owned),
            host,
            guest,
            protocol: protocol.into(),
        };
        assert_eq!(read("8080:80"), Ok(port(None, 8080, 80, "tcp")));
        assert_eq!(read("0.0.0.0:8080:80/tcp"), Ok(port(None, 8080, 80, "tcp")));
        assert_eq!(
            read("127.0.0.1:0:53/udp"),
            Ok(port(Some("127.0.0.1"), 0, 53, "udp"))
        );
        for (text, why) in [
            ("80", "HOSTPORT"),
            ("", "HOSTPORT"),
            ("a:80", "HOSTPORT"),
            ("8080:65536", "HOSTPORT"),
            ("8080:+80", "HOSTPORT"),
            ("8080:80/sctp", "no protocol"),
            ("8080:0", "port 0"),
            ("::1:8080:80", "no IPv4"),
            ("host:8080:80", "no IPv4"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
