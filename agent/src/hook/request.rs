//! The request of a hook.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{timeout, timeout_at};

use super::{Ended, Limit, MAX_OUTPUT, Outcome};
use crate::readiness::http::{self, MAX_ANSWER, Request};
use crate::readiness::network::Network;

/// How long the body of a bad answer is read after its status.
const REST: Duration = Duration::from_secs(1);

/// Sends a POST request to a port of `localhost` in a container's network. At the deadline, gives it up.
pub async fn send(network: &Network, port: u16, request: &Request, limit: Limit) -> Ended {
    let ended = timeout_at(limit.deadline, attempt(network, port, request)).await;
    ended.unwrap_or_else(|_| {
        let why = format!(
            "POST {} was not answered on port {port} within {} ms",
            request.path(),
            limit.ms
        );
        without_output(Outcome::TimedOut(why))
    })
}

async fn attempt(network: &Network, port: u16, request: &Request) -> Ended {
    let Some(mut stream) = connect(network, port).await else {
        let why = format!("nothing accepts connections on port {port} of localhost");
        return without_output(Outcome::Failed(why));
    };
    match http::ask(&mut stream, &request.post(port)).await {
        Ok((200..300, _)) => without_output(Outcome::Succeeded),
        Ok((status, answer)) => Ended {
            outcome: Outcome::Failed(format!(
                "port {port} answered {status} to POST {}",
                request.path()
            )),
            output: body(stream, answer).await,
        },
        Err(how) => without_output(Outcome::Failed(format!("port {port} {how}"))),
    }
}

/// Connects to a port of `localhost`: IPv4 before IPv6, as `localhost` resolves. `None` if neither accepts.
async fn connect(network: &Network, port: u16) -> Option<TcpStream> {
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let address = SocketAddr::new(address, port);
        // The container's network may have no IPv6.
        let Ok(socket) = network.socket(&address).await else {
            continue;
        };
        // On a closed port, a socket can be given that very port as its own, and connect to itself.
        if let Ok(stream) = socket.connect(address).await
            && stream.local_addr().is_ok_and(|own| own != address)
        {
            return Some(stream);
        }
    }
    None
}

/// The beginning of an answer's body, of which `answer` has arrived.
async fn body(mut stream: TcpStream, mut answer: Vec<u8>) -> Vec<u8> {
    let rest =
        async { while answer.len() < MAX_ANSWER && matches!(stream.read_buf(&mut answer).await, Ok(1..)) {} };
    let _ = timeout(REST, rest).await;
    let body = http::body(&answer);
    body[..body.len().min(MAX_OUTPUT)].to_vec()
}

fn without_output(outcome: Outcome) -> Ended {
    Ended {
        outcome,
        output: Vec::new(),
    }
}
