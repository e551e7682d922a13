//! `thaw run --record`: what a run reads of its image, kept for later starts.
//!
//! Invariant: the VMM is never waited for nor made to wait. What does not fit into the socket is lost and counted; a
//! recording ends with its VMM, and is written then, whole or not at all.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thaw_protocol::access::Access;
use thaw_protocol::packet::{self, PacketError};
use thaw_rootfs::digest::Digest;
use thaw_rootfs::prefetch::{self, LoadOrder, OrderedBlob, Recorder};
use thaw_rootfs::store::{Form, Image};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::exit::{ExitCode, Failure};
use crate::images::{Images, failure};
use crate::readiness::register;

/// Bytes of packets that may wait for us, so that a burst of reads is not lost.
const BUFFER: usize = 1 << 20;

/// A recording that goes on.
#[derive(Debug)]
pub struct Recording {
    task: tokio::task::JoinHandle<Recorder>,
}

/// What a recording came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Where it is written.
    pub paths: Vec<PathBuf>,
    pub runs: usize,
    pub bytes: u64,
    /// Accesses that were lost.
    pub dropped: u64,
}

impl std::fmt::Display for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let paths: Vec<String> = self.paths.iter().map(|path| path.display().to_string()).collect();
        let (bytes, runs) = (indicatif::HumanBytes(self.bytes), self.runs);
        write!(f, "recorded {bytes} in {runs} runs: {}", paths.join(", "))?;
        match self.dropped {
            0 => Ok(()),
            dropped => write!(f, "; {dropped} reads were lost"),
        }
    }
}

impl Recording {
    /// Begins. The descriptor is for the VMM; the recording ends when nobody has it any more. Within a tokio runtime.
    pub fn start() -> Result<(Recording, Arc<OwnedFd>), Failure> {
        let fail = |e: std::io::Error| Failure::system("cannot make a socket for the recording", &e);
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| fail(e.into()))?;
        // The sender's buffer is what counts between unix sockets. A smaller one loses more, and that is told.
        let _ = sockopt::set_socket_send_buffer_size(&theirs, BUFFER);
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| fail(e.into()))?;
        let socket = register(ours, Interest::READABLE).map_err(fail)?;
        let task = tokio::spawn(collect(socket));
        Ok((Recording { task }, Arc::new(theirs)))
    }

    /// Waits for its end, and writes it beside the image and, if wanted, to a file. Nothing is written of a run that read
    /// nothing: none in that case.
    pub async fn finish(
        self,
        images: &Images,
        image: &Image,
        file: Option<PathBuf>,
    ) -> Result<Option<Recorded>, Failure> {
        let recorder = self.task.await;
        let recorder = recorder.map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))?;
        if recorder.is_empty() {
            return Ok(None);
        }
        let (images, image) = (images.clone(), image.clone());
        let written = tokio::task::spawn_blocking(move || {
            let order = recorder.order(image.digest, blobs(&images, &image))?;
            write(&image, &order, file)
        });
        let written = written.await;
        let written = written.map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))?;
        written.map(Some).map_err(failure)
    }
}

fn write(image: &Image, order: &LoadOrder, file: Option<PathBuf>) -> Result<Recorded, thaw_rootfs::Error> {
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

/// The image's blobs, with the DiffIDs of the layers they are, as far as those can be told: of the image's blobs in order,
/// layer for layer, where its metadata was made of its layers.
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

async fn collect(socket: AsyncFd<OwnedFd>) -> Recorder {
    let mut recorder = Recorder::default();
    loop {
        let Ok(mut ready) = socket.readable().await else {
            return recorder;
        };
        match packet::receive::<Access>(socket.get_ref().as_fd()) {
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
            Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
            Err(PacketError::Closed) => return recorder,
            Err(e) => {
                tracing::warn!("the recording ends here: {e}");
                return recorder;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn packets_become_first_reads_until_the_last_holder_of_the_socket_is_gone() {
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
        let recorder = recording.task.await.unwrap();
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
