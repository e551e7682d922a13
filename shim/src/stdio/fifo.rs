//! Fifos, each end opened so that a client may come late, go away and come back.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};

/// Opens a fifo for output, once somebody reads it: what is written before is lost if we close it first. It is open for reading
/// too, so that it outlives its reader, and holds what the next one reads.
pub async fn writer(path: &Path) -> io::Result<Sender> {
    let both = || OpenOptions::new().read_write(true).open_sender(path);
    match OpenOptions::new().open_sender(path) {
        Ok(_reader_is_there) => return both(),
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => {}
        Err(e) => return Err(e),
    }
    let release = Release {
        path: path.into(),
        reader: Arc::default(),
    };
    let (name, reader) = (path.to_owned(), release.reader.clone());
    let opened = tokio::task::spawn_blocking(move || {
        let opened = File::options().write(true).open(name);
        // Whoever let us go has kept a reader for us until now.
        drop(reader);
        opened
    });
    // Held until there is another end.
    let _opened = opened.await.map_err(io::Error::other)??;
    both()
}

/// Opens a fifo for input. With `held`, it does not end while nobody has it open to write.
pub fn reader(path: &Path, held: bool) -> io::Result<Receiver> {
    OpenOptions::new().read_write(held).open_receiver(path)
}

/// Lets a thread go that waits for a fifo's reader, where nobody waits for the thread any more.
struct Release {
    path: PathBuf,
    /// There for as long as the thread wants one.
    reader: Arc<Mutex<Option<File>>>,
}

impl Drop for Release {
    fn drop(&mut self) {
        let reader = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&self.path);
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = reader.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn fifo() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        (directory, path)
    }

    #[tokio::test]
    async fn output_waits_for_its_first_reader_and_outlives_it() {
        let (_directory, path) = fifo();
        let waiting = tokio::spawn({
            let path = path.clone();
            async move { writer(&path).await }
        });
        let first = {
            let path = path.clone();
            tokio::task::spawn_blocking(move || File::open(path))
                .await
                .unwrap()
                .unwrap()
        };
        let mut writer = waiting.await.unwrap().unwrap();
        drop(first);
        // Nobody reads: it is kept.
        writer.write_all(b"kept").await.unwrap();
        let mut second = reader(&path, false).unwrap();
        drop(writer);
        let mut got = Vec::new();
        second.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"kept");
    }

    #[tokio::test]
    async fn who_gives_up_waiting_leaves_no_thread() {
        let (_directory, path) = fifo();
        let mut waiting = Box::pin(writer(&path));
        tokio::select! {
            biased;
            _ = waiting.as_mut() => panic!("nobody reads"),
            () = std::future::ready(()) => {}
        }
        drop(waiting);
        // The runtime's end waits for its threads.
    }
}
