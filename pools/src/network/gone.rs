//! Slots that go: what was published for them goes too, whoever owned them.
//!
//! A slot's interfaces go with its last descriptor, also where its owner and its VMM were both killed; the kernel says so to
//! whoever listens. Invariant: while a process listens, a published port leads to a slot that is there, but for the moment
//! between the two. What is heard only says when to look: one look serves all that went by then, and all that was not heard.

use std::io;
use std::sync::Arc;

use super::host::{Host, LINKS};
use crate::Error;
use crate::link;
use crate::netlink::Socket;

/// Listens from now on, on a thread of its own that ends with the process.
pub(super) fn listen(host: Arc<Host>) -> io::Result<()> {
    let mut links = Socket::link_events()?;
    let work = move || {
        loop {
            match host.sweep() {
                // Without root no slot leads outside.
                Err(Error::System { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                    return;
                }
                Err(e) => tracing::warn!("{e}"),
                Ok(()) => {}
            }
            if let Err(e) = wait_for_one(&mut links) {
                tracing::warn!("ports of sandboxes that are killed stay published: {e}");
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("slots gone".into())
        .spawn(work)
        .map(drop)
}

/// Waits until a slot went, or may have.
fn wait_for_one(links: &mut Socket) -> io::Result<()> {
    let mut gone = false;
    while !gone {
        let heard = links.hear(|kind, payload| {
            gone |= link::deleted(kind, payload).is_some_and(|name| name.starts_with(LINKS));
        });
        match heard {
            // More was told than is kept.
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => gone = true,
            heard => heard?,
        }
    }
    Ok(())
}
