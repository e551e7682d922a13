//! Tar streams of a container's directories, to and from the host, in pieces.
//!
//! Invariants: a transfer has one thread and at most [`PARTS`] pieces of the stream; there are at most [`MAX_TRANSFERS`]; one that its
//! host forgets ends after [`super::sessions::IDLE`]. The thread resolves all names within the container's root.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thaw_archive::{Feed, Links, Part, Root, Sink, Unpacking};
use thaw_protocol::agent::files::{PackRequest, UnpackRequest};
use tokio::sync::{mpsc, oneshot};

use super::files::{checked_bytes, resolve};
use super::sessions::Sessions;
use crate::error::{Error, Result, WithContext};

/// Most transfers at once.
const MAX_TRANSFERS: usize = 8;
/// Pieces of a stream between the host and the thread.
const PARTS: usize = 2;

/// The transfers of this guest, by name.
#[derive(Clone, Debug)]
pub struct Transfers(Sessions<Direction>);

impl Default for Transfers {
    fn default() -> Transfers {
        Transfers(Sessions::new("transfer", MAX_TRANSFERS))
    }
}

/// A transfer's state.
#[derive(Debug)]
enum Direction {
    Pack(mpsc::Receiver<Part>),
    Unpack {
        parts: mpsc::Sender<Part>,
        done: oneshot::Receiver<Result<(), thaw_archive::Error>>,
        at: u64,
    },
}

impl Transfers {
    /// Begins to pack a file or directory. Must be called within the runtime.
    pub fn pack(&self, root: OwnedFd, r: &PackRequest) -> Result<()> {
        let path = checked_bytes(&r.path)?;
        let flags = match r.follow {
            true => OFlags::empty(),
            false => OFlags::NOFOLLOW,
        };
        let top = resolve(root.as_fd(), path, flags)?;
        let name = PathBuf::from(OsString::from_vec(r.name.clone()));
        let is_plain = name.file_name() == Some(name.as_os_str()) || name == Path::new(".");
        if !is_plain {
            return Err(Error::Invalid(format!(
                "{} is not the name of an entry",
                name.display()
            )));
        }
        let (sender, receiver) = mpsc::channel(PARTS);
        self.begin(&r.transfer, Direction::Pack(receiver), move || {
            let mut sink = Sink::new(sender);
            let packed = thaw_archive::pack(top, &name, &mut sink);
            sink.finish(packed);
        })
    }

    /// The next piece of a stream; empty at its end.
    pub async fn next_piece(&self, name: &str) -> Result<Vec<u8>> {
        let transfer = self.0.find(name)?;
        let mut direction = transfer.lock().await;
        let Direction::Pack(parts) = &mut *direction else {
            return Err(Error::Invalid(format!("transfer {name:?} is an upload")));
        };
        let part = parts.recv().await;
        transfer.touch();
        match part {
            Some(Part::Data(data)) => Ok(data),
            other => {
                self.abandon(name);
                match other {
                    Some(Part::Failed(e)) => Err(refused(e)),
                    Some(_) => Ok(Vec::new()),
                    None => Err(Error::State("the thread that packs has ended".into())),
                }
            }
        }
    }

    /// Takes a piece of a stream; the first begins the transfer. After the last, returns when all is unpacked. Must be called within the
    /// runtime.
    pub async fn unpack(&self, root: impl FnOnce() -> Result<OwnedFd>, r: UnpackRequest) -> Result<()> {
        if r.offset == 0 {
            self.begin_unpack(root()?, &r)?;
        }
        let transfer = self.0.find(&r.transfer)?;
        let mut direction = transfer.lock().await;
        let Direction::Unpack { parts, done, at } = &mut *direction else {
            return Err(Error::Invalid(format!("transfer {:?} is a download", r.transfer)));
        };
        if *at != r.offset {
            return Err(Error::State(format!(
                "the next piece begins at {at}, not {}",
                r.offset
            )));
        }
        *at += r.data.len() as u64;
        let mut sent = parts.send(Part::Data(r.data)).await;
        if r.last && sent.is_ok() {
            sent = parts.send(Part::End).await;
        }
        let over = r.last || sent.is_err();
        let result = match over {
            true => done.await.unwrap_or_else(|_| {
                let what = "the thread that unpacks has ended".into();
                Err(thaw_archive::Error::Refused(what))
            }),
            false => Ok(()),
        };
        transfer.touch();
        if over {
            self.abandon(&r.transfer);
        }
        result.map_err(refused)
    }

    /// Forgets a transfer. Its thread ends at its next piece.
    pub fn abandon(&self, name: &str) {
        self.0.forget(name);
    }

    fn begin_unpack(&self, root: OwnedFd, r: &UnpackRequest) -> Result<()> {
        let path = checked_bytes(&r.path)?.to_owned();
        resolve(root.as_fd(), &path, OFlags::DIRECTORY)?;
        let (parts, receiver) = mpsc::channel(PARTS);
        let (tell, done) = oneshot::channel();
        let how = Unpacking {
            keep_owner: r.keep_owner,
            trusted: true,
            only: None,
        };
        let direction = Direction::Unpack { parts, done, at: 0 };
        self.begin(&r.transfer, direction, move || {
            let root = Root::new(root.as_fd(), Links::WithinRoot);
            let unpacked = thaw_archive::unpack(root, &path, Feed::new(receiver), &how);
            // A host that has gone does not hear of it.
            let _ = tell.send(unpacked);
        })
    }

    fn begin(&self, name: &str, direction: Direction, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.0.begin(name, || {
            let thread = std::thread::Builder::new().name("archive".into()).spawn(work);
            thread.with_context(|| "start a thread".into())?;
            Ok(direction)
        })
    }
}

/// An error of the container's file system, or of the archive, is not a failure of the agent. A full disk has its own code.
fn refused(error: thaw_archive::Error) -> Error {
    match error {
        thaw_archive::Error::File { doing, name, source } if source.raw_os_error() == Some(libc::ENOSPC) => {
            let what = format!("cannot {doing} {name}");
            Error::System { what, source }
        }
        other => Error::State(other.to_string()),
    }
}

#[cfg(test)]
#[path = "archive_test.rs"]
mod tests;
