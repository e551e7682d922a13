//! Removes published ports of slots that are gone, whichever process owned them.
//!
//! A slot's interfaces go with its last descriptor, even if its owner and its VMM were both killed, and the kernel reports that to
//! listeners. Invariant: while a process listens, a published port leads to an existing slot, except for the moment between the two. An
//! event only says when to sweep: one sweep covers all slots that are gone by then, including those whose events were lost. For stale
//! connections the event also says of which number ([`crate::stale_connections`]).

use std::io;
use std::sync::Arc;

use crate::Error;
use crate::host::Host;
use thaw_sys::link;
use thaw_sys::netlink::Socket;

/// Starts a thread that listens until the process ends.
pub(super) fn listen(host: Arc<Host>) -> io::Result<()> {
    let mut links = Socket::link_events()?;
    host.stale.listening();
    let work = move || {
        loop {
            match host.sweep() {
                // Without root no slot has an uplink.
                Err(Error::System { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
                    return host.stale.not_listening();
                }
                Err(e) => tracing::warn!("{e}"),
                Ok(()) => {}
            }
            if let Err(e) = wait_for_one(&mut links, &host) {
                tracing::warn!("ports of sandboxes that are killed stay published: {e}");
                return host.stale.not_listening();
            }
        }
    };
    std::thread::Builder::new()
        .name("slots gone".into())
        .spawn(work)
        .map(drop)
}

/// Waits until a slot is gone, or events were lost.
fn wait_for_one(links: &mut Socket, host: &Host) -> io::Result<()> {
    let mut gone = false;
    while !gone {
        let heard = links.hear(|kind, payload| {
            if let Some(number) = link::deleted(kind, payload).and_then(Host::number_of) {
                host.stale.slot_removed(number);
                gone = true;
            }
        });
        match heard {
            // The kernel dropped events.
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {
                host.stale.listening();
                gone = true;
            }
            heard => heard?,
        }
    }
    Ok(())
}
