//! thaw-share: serves host directories to one guest, in a process of its own ([`thaw_protocol::share`] is its
//! protocol).
//!
//! The file system is virtiofsd's `PassthroughFs`. This crate adds:
//!
//! | module | contents |
//! |---|---|
//! | [`tree`] | the directory it serves: each share is a mount below a read-only root |
//! | [`jail`] | the privileges that the process drops before it reads a guest's first byte |
//! | [`message`] | one FUSE message, in a form that avoids virtiofsd's known bugs |
//! | [`stable_ids`] | node ids that outlive the process, over virtiofsd's, which do not |
//! | [`ledger`] | the file that records these ids |
//! | [`opened`] | files that go to the VMM, which then reads and writes them itself |
//! | [`relay`] | serves messages from the VMM and sends replies, in a few threads |
//! | `input`, [`arrivals`] | messages from the stream, and what wakes a thread for them |
//! | [`end`] | why serving ended |
//!
//! The VMM at the other end is not trusted, because the guest may have taken it over. At worst it can do the same as the guest: read and
//! write the shared files.

pub mod arrivals;
pub mod end;
mod input;
pub mod jail;
pub mod ledger;
pub mod message;
pub mod opened;
pub mod relay;
pub mod stable_ids;
pub mod tree;

use std::fs::File;
use std::io;
use std::time::Duration;

use thaw_protocol::share::FRESH_MS;
use virtiofsd::passthrough::{CachePolicy, Config, PassthroughFs};

/// Descriptors reserved for this process's own use.
const OWN_DESCRIPTORS: u64 = 64;

/// The file system below `root`, an absolute path. `proc_self_fd` is this process's directory of descriptors,
/// which need not be reachable by a name. A guest may use up to `descriptors`, one for each file it remembers
/// or has open.
///
/// The host changes files too, so all caching is limited in time: names and attributes are cached for a second,
/// and data until a file is opened again or seems to have changed. Extended attributes are those of the host,
/// except that access control lists are not available. The kernel refuses what needs CAP_SYS_ADMIN or
/// CAP_SETFCAP (`trusted.*`, `security.capability`).
pub fn file_system(root: &str, proc_self_fd: File, descriptors: u64) -> io::Result<PassthroughFs> {
    let fresh = Duration::from_millis(FRESH_MS);
    PassthroughFs::new(Config {
        entry_timeout: fresh,
        attr_timeout: fresh,
        cache_policy: CachePolicy::Auto,
        root_dir: root.into(),
        xattr: true,
        proc_sfd_rawfd: Some(proc_self_fd),
        // Two shares may have files with the same inode number.
        announce_submounts: true,
        killpriv_v2: true,
        guest_fd_limit: descriptors.saturating_sub(OWN_DESCRIPTORS),
        ..Config::default()
    })
}
