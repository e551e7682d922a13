//! Slots that go: what was published for them goes too, whoever owned them.
//!
//! A slot's interfaces go with its last descriptor, also where its owner and its VMM were both killed; the kernel says so to
//! whoever listens. Invariant: while a process listens, a published port leads to a slot that is there, but for the moment
//! between the two. For them what is heard only says when to look: one look serves all that went by then, and all that was not
//! heard. For connections it says of which numbers ([`crate::earlier`]).

use std::io;
use std::sync::Arc;

use crate::Error;
use crate::host::Host;
use thaw_sys::link;
use thaw_sys::netlink::Socket;

/// Listens from now on, on a thread of its own that ends with the process.
pub(super) fn listen(host: Arc<Host>) -> io::Result<()> {
    let mut links = Socket::link_events()?;
    host.earlier.heard();
    let work = move || {
        loop {
            match host.sweep() {
                // Without root no slot leads outside.
                Err(Error::System { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                    return host.earlier.deaf();
                }
                Err(e) => tracing::warn!("{e}"),
                Ok(()) => {}
            }
            if let Err(e) = wait_for_one(&mut links, &host) {
                tracing::warn!("ports of sandboxes that are killed stay published: {e}");
                return host.earlier.deaf();
            }
        }
    };
    std::thread::Builder::new()
        .name("slots gone".into())
        .spawn(work)
        .map(drop)
}

/// Waits until a slot went, or may have.
fn wait_for_one(links: &mut Socket, host: &Host) -> io::Result<()> {
    let mut gone = false;
    while !gone {
        let heard = links.hear(|kind, payload| {
            if let Some(number) = link::deleted(kind, payload).and_then(Host::number_of) {
                host.earlier.went(number);
                gone = true;
            }
        });
        match heard {
            // More was told than is kept.
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {
                host.earlier.heard();
                gone = true;
            }
            heard => heard?,
        }
    }
    Ok(())
}
