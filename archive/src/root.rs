//! A directory below which paths are resolved, by the kernel (`openat2`).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// What happens to links in a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// They are followed as if the root were `/`: a container's links, as its processes follow them.
    WithinRoot,
    /// A path with a link is refused: a link in an archive must not redirect the entries after it.
    Refused,
}

/// A root directory. No path that is opened through it leads out of it.
#[derive(Clone, Copy, Debug)]
pub struct Root<'a> {
    directory: BorrowedFd<'a>,
    links: Links,
}

impl<'a> Root<'a> {
    /// Uses an open directory as the root.
    pub fn new(directory: BorrowedFd<'a>, links: Links) -> Root<'a> {
        Root { directory, links }
    }

    /// Opens a path below it. An empty path is the root itself. With `NOFOLLOW` and `PATH`, a link at the end is opened itself.
    pub fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let resolve = match self.links {
            Links::WithinRoot => ResolveFlags::IN_ROOT,
            Links::Refused => ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
        };
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        loop {
            let resolve = resolve | ResolveFlags::NO_MAGICLINKS;
            match rustix::fs::openat2(
                self.directory,
                path,
                flags | OFlags::CLOEXEC,
                Mode::empty(),
                resolve,
            ) {
                // A component was moved meanwhile.
                Err(Errno::AGAIN) => {}
                opened => return opened,
            }
        }
    }
}
