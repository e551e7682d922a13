//! A relay that copies bytes between a caller and a server and looks at none: the least that any program between them does.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

/// Bytes copied at once.
const BLOCK: usize = 64 << 10;

/// Starts a relay to this server, and returns where it listens. It ends with this process.
///
/// # Errors
/// No port or no thread is left.
pub fn start(server: SocketAddr) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("relay".into()).spawn(move || {
        for caller in listener.incoming() {
            // The caller sees that the connection has ended.
            let _ = caller.and_then(|caller| serve(caller, server));
        }
    })?;
    Ok(address)
}

/// Serves one caller until either end closes. Others wait.
fn serve(caller: TcpStream, server: SocketAddr) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    let ends = [&caller, &server];
    for end in ends {
        end.set_nodelay(true)?;
    }
    let mut block = vec![0; BLOCK];
    loop {
        let mut ready = ends.map(|end| PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN));
        retry_on_intr(|| poll(&mut ready, None))?;
        for (from, to) in [(0, 1), (1, 0)] {
            if ready[from].revents().is_empty() {
                continue;
            }
            let (mut from, mut to) = (ends[from], ends[to]);
            match from.read(&mut block)? {
                0 => return Ok(()),
                length => to.write_all(&block[..length])?,
            }
        }
    }
}
