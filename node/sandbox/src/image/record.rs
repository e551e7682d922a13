//! `thaw run --record`: records which bytes of its image a run reads, for later starts.
//!
//! Invariant: the recorder and the VMM never wait for each other. Records that do not fit into the socket are lost and counted. A recording
//! ends with its VMM and is then written completely or not at all. Until then it is in a [`Journal`]: if this process is killed, a later
//! start of the image finds the recording up to that point.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thaw_imagefs::digest::Digest;
use thaw_images::form::Form;
use thaw_images::load_order::{LoadOrder, OrderedBlob};
use thaw_images::prefetch::{self, Journal, Recorder};
use thaw_images::store::Image;
use thaw_protocol::access::Access;
use thaw_protocol::packet::{PacketError, Receiver};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind};
use crate::images::{Images, failure};
use crate::readiness::register;

/// Number of bytes of packets that the socket may hold, so that a burst of reads is not lost.
const BUFFER: usize = 1 << 20;
/// Number of first reads after which they are written to the journal. Fewer are written when no more packets wait.
const UNWRITTEN: usize = 1024;

/// A recording in progress.
#[derive(Debug)]
pub struct Recording {
    task: tokio::task::JoinHandle<(Recorder, Option<Journal>)>,
    /// Takes the image once it is known.
    known: Option<oneshot::Sender<Known>>,
}

/// The image that is recorded.
#[derive(Debug)]
struct Known {
    blobs: Vec<OrderedBlob>,
    journal: Option<Journal>,
}

/// The result of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The files it was written to.
    pub paths: Vec<PathBuf>,
    pub runs: usize,
    pub bytes: u64,
    /// Number of accesses that were lost.
    pub dropped: u64,
}

impl std::fmt::Display for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let paths: Vec<String> = self.paths.iter().map(|path| path.display().to_string()).collect();
        let (bytes, runs) = (crate::human_bytes::HumanBytes(self.bytes), self.runs);
        write!(f, "recorded {bytes} in {runs} runs: {}", paths.join(", "))?;
        match self.dropped {
            0 => Ok(()),
            dropped => write!(f, "; {dropped} reads were lost"),
        }
    }
}

impl Recording {
    /// Begins a recording. The descriptor is for the VMM; the recording ends when its last copy is closed. Must be called within a tokio
    /// runtime.
    pub fn start() -> Result<(Recording, Arc<OwnedFd>), Error> {
        let fail = |e: std::io::Error| Error::system("cannot make a socket for the recording", &e);
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| fail(e.into()))?;
        // For unix sockets, the sender's buffer is the limit. A smaller one loses more accesses, which are counted.
        let _ = sockopt::set_socket_send_buffer_size(&theirs, BUFFER);
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| fail(e.into()))?;
        let socket = register(ours, Interest::READABLE).map_err(fail)?;
        let (known, awaited) = oneshot::channel();
        let recording = Recording {
            task: tokio::spawn(collect(socket, awaited)),
            known: Some(known),
        };
        Ok((recording, Arc::new(theirs)))
    }

    /// Announces the image: its recording is written to a journal, and survives this process. Must be called within a tokio runtime.
    pub fn keep_journal(&mut self, images: &Images, image: &Image) {
        let Some(sender) = self.known.take() else {
            return;
        };
        let (images, image) = (images.clone(), image.clone());
        tokio::task::spawn_blocking(move || {
            let blobs = blobs(&images, &image);
            let journal = match Journal::begin(&image, blobs.clone()) {
                Ok(None) => {
                    tracing::info!(image = %image.digest, "it is being recorded already: no journal");
                    None
                }
                Ok(journal) => journal,
                Err(e) => {
                    warn_of_loss(&e);
                    None
                }
            };
            // If the recording has ended already, there is nothing to keep.
            if let Err(Known { journal, .. }) = sender.send(Known { blobs, journal })
                && let Err(e) = journal.map_or(Ok(()), Journal::end)
            {
                warn_of_loss(&e);
            }
        });
    }

    /// Waits for the end, and writes the recording beside the image and, if `file` is given, to that file. `None` if the run read nothing:
    /// then nothing is written.
    pub async fn finish(
        self,
        images: &Images,
        image: &Image,
        file: Option<PathBuf>,
    ) -> Result<Option<Recorded>, Error> {
        let recorded = self.task.await;
        let (recorder, journal) = recorded.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
        let (images, image) = (images.clone(), image.clone());
        let written = tokio::task::spawn_blocking(move || {
            let written = match recorder.is_empty() {
                true => None,
                false => {
                    let order = recorder.order(image.digest, blobs(&images, &image))?;
                    Some(write(&image, &order, file)?)
                }
            };
            journal.map_or(Ok(()), Journal::end).map(|()| written)
        });
        let written = written.await;
        let written = written.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
        written.map_err(failure)
    }
}

fn write(image: &Image, order: &LoadOrder, file: Option<PathBuf>) -> Result<Recorded, thaw_images::Error> {
    let mut paths = Vec::new();
    if let Some(file) = file {
        prefetch::write(&file, order)?;
        paths.push(file);
    }
    paths.push(prefetch::keep(image, order)?);
    Ok(Recorded {
        paths,
        runs: order.runs.len(),
        bytes: order.bytes(),
        dropped: order.dropped,
    })
}

/// The image's blobs in order, with the DiffIDs of their layers if those can be determined: if the image's metadata was made from its
/// layers, blobs and layers correspond one to one.
pub fn blobs(images: &Images, image: &Image) -> Vec<OrderedBlob> {
    let layers = images
        .store
        .inspect(&image.digest)
        .map(|it| it.layers)
        .unwrap_or_default();
    let diff_ids = image.config.rootfs().diff_ids();
    let diff_id = |key: &Digest| {
        let at = layers.iter().position(|layer| layer.key == *key)?;
        match layers[at].form {
            Form::Tar => Some(*key),
            Form::Soci | Form::Estargz if layers.len() == diff_ids.len() => diff_ids[at].parse().ok(),
            _ => None,
        }
    };
    let blobs = image.blobs.iter().map(|blob| OrderedBlob {
        digest: blob.id,
        layer: diff_id(&blob.id),
        length: blob.length,
    });
    blobs.collect()
}

/// Collects the accesses that the VMM reports until it closes its end. A VMM may report without end, and accesses to blobs it does not
/// have. [`Recorder`] bounds what is kept, and other tasks get their turn.
async fn collect(
    socket: AsyncFd<OwnedFd>,
    mut awaited: oneshot::Receiver<Known>,
) -> (Recorder, Option<Journal>) {
    let mut receiver = Receiver::default();
    let mut recorder = Recorder::default();
    let mut journal = None;
    let mut written = 0;
    let end = loop {
        tokio::task::consume_budget().await;
        let mut ready = tokio::select! {
            known = &mut awaited, if !awaited.is_terminated() => {
                if let Ok(known) = known {
                    recorder.only(&known.blobs);
                    journal = known.journal;
                }
                follow(&mut journal, &recorder);
                written = recorder.len();
                continue;
            }
            ready = socket.readable() => match ready {
                Ok(ready) => ready,
                Err(e) => break PacketError::Io(e),
            },
        };
        match receiver.receive::<Access>(socket.get_ref().as_fd()) {
            Ok((access, _)) => {
                let Access {
                    blob,
                    offset,
                    length,
                    dropped,
                } = access;
                recorder.lost(dropped.into());
                recorder.access(&Digest::from(blob), offset, length.into());
            }
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => {
                ready.clear_ready();
                follow(&mut journal, &recorder);
                written = recorder.len();
                continue;
            }
            Err(e) => break e,
        }
        if recorder.len() - written >= UNWRITTEN {
            follow(&mut journal, &recorder);
            written = recorder.len();
        }
    };
    if !matches!(end, PacketError::Closed) {
        tracing::warn!("the recording ends here: {end}");
    }
    if recorder.foreign() > 0 {
        let accesses = recorder.foreign();
        tracing::warn!(
            accesses,
            "a VMM told of accesses to what is not in its image: they are not recorded"
        );
    }
    (recorder, journal)
}

fn warn_of_loss(e: &thaw_images::Error) {
    tracing::warn!("the recording would be lost with this process: {e}");
}

/// Appends new accesses to the journal: some lines, into the page cache. Gives up a journal that cannot be written.
fn follow(journal: &mut Option<Journal>, recorder: &Recorder) {
    if let Some(Err(e)) = journal.as_mut().map(|it| it.follow(recorder)) {
        tracing::warn!("what is recorded from now on would be lost with this process: {e}");
        *journal = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::packet;

    #[tokio::test]
    async fn recording_keeps_first_reads_until_its_socket_closes() {
        let (recording, socket) = Recording::start().unwrap();
        let blob = Digest::of(b"blob");
        let sender = socket.clone();
        drop(socket);
        let sent = std::thread::spawn(move || {
            for (offset, dropped) in [(262_144, 0), (0, 3), (262_200, 0)] {
                let access = Access {
                    blob: *blob.bytes(),
                    offset,
                    length: 4096,
                    dropped,
                };
                packet::send(sender.as_fd(), &access, &[]).unwrap();
            }
        });
        let (recorder, _) = recording.task.await.unwrap();
        sent.join().unwrap();
        let known = OrderedBlob {
            digest: blob,
            layer: None,
            length: 1 << 20,
        };
        let order = recorder.order(Digest::of(b"image"), vec![known]).unwrap();
        let offsets: Vec<_> = order.runs.iter().map(|run| run.offset).collect();
        assert_eq!(offsets, [262_144, 0]);
        assert_eq!(order.dropped, 3);
    }
}
