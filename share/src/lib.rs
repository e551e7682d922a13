//! thaw-share: host directories for one guest, in a process of its own ([`thaw_protocol::share`] is its contract).
//!
//! The file system is virtiofsd's `PassthroughFs`; here is what is around it:
//!
//! | module | what it is |
//! |---|---|
//! | [`tree`] | the one directory it serves: each share a mount, under a root that nobody can write |
//! | [`jail`] | what the process gives up before it reads a guest's first byte |
//! | [`message`] | one FUSE message, made so that no bug virtiofsd is known to have is met |
//! | [`lasting`] | node ids that outlive the process, over virtiofsd's, which do not |
//! | [`ledger`] | the file in which they are written down |
//! | [`relay`] | messages from the VMM and replies to it, by a few threads |
//!
//! The VMM at the other end is not trusted: it has the guest next to it. What it can do at worst is what the guest can: to
//! read and write what is shared.

pub mod jail;
pub mod lasting;
pub mod ledger;
pub mod message;
pub mod relay;
pub mod tree;

use std::fs::File;
use std::io;
use std::time::Duration;

use thaw_protocol::share::FRESH_MS;
use virtiofsd::passthrough::{CachePolicy, Config, PassthroughFs};

/// Descriptors kept from the guest, for our own use.
const OWN_DESCRIPTORS: u64 = 64;

/// The file system under `root`, an absolute path. `proc_self_fd` is this process's directory of descriptors, which need not be
/// within reach by name; a guest may use up to `descriptors`, one for each file it remembers or has open.
///
/// Every caching is bounded in time, for the host changes files too: names and attributes are believed for a second, data until
/// a file is opened again or seems to have changed. Extended attributes are the host's own, but for access control lists,
/// which are not there. What needs CAP_SYS_ADMIN or CAP_SETFCAP (`trusted.*`, `security.capability`) is refused by the kernel.
pub fn file_system(root: &str, proc_self_fd: File, descriptors: u64) -> io::Result<PassthroughFs> {
    let fresh = Duration::from_millis(FRESH_MS);
    PassthroughFs::new(Config {
        entry_timeout: fresh,
        attr_timeout: fresh,
        cache_policy: CachePolicy::Auto,
        root_dir: root.into(),
        xattr: true,
        proc_sfd_rawfd: Some(proc_self_fd),
        // Two shares may have files of the same number.
        announce_submounts: true,
        killpriv_v2: true,
        guest_fd_limit: descriptors.saturating_sub(OWN_DESCRIPTORS),
        ..Config::default()
    })
}
