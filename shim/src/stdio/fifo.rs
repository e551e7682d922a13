//! Fifos whose other end a client may open late, close and open again.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use thaw_sys::lock::Lock;
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};

/// Opens a fifo for output once a reader has opened it; data written earlier would be lost if this end closed
/// first. It is opened for reading too, so that it survives its reader and keeps data for the next.
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
        // `Release` has kept a reader open until now.
        drop(reader);
        opened
    });
    // Kept open until the fifo is open for both.
    let _opened = opened.await.map_err(io::Error::other)??;
    both()
}

/// Opens a fifo for input. With `held` the end of input is not reported while no client has it open for
/// writing.
pub fn reader(path: &Path, held: bool) -> io::Result<Receiver> {
    OpenOptions::new().read_write(held).open_receiver(path)
}

/// Unblocks a thread that waits for a fifo's reader when the future that waits for the thread is dropped.
struct Release {
    path: PathBuf,
    /// Keeps a reader open until the thread has returned from open.
    reader: Arc<Mutex<Option<File>>>,
}

impl Drop for Release {
    fn drop(&mut self) {
        let reader = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&self.path);
        *self.reader.locked() = reader.ok();
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
        // Without a reader the data stays in the fifo.
        writer.write_all(b"kept").await.unwrap();
        let mut second = reader(&path, false).unwrap();
        drop(writer);
        let mut got = Vec::new();
        second.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"kept");
    }

    #[tokio::test]
    async fn abandoned_fifo_open_leaves_no_thread() {
        let (_directory, path) = fifo();
        let mut waiting = Box::pin(writer(&path));
        tokio::select! {
            biased;
            _ = waiting.as_mut() => panic!("nobody reads"),
            () = std::future::ready(()) => {}
        }
        drop(waiting);
        // The end of the runtime waits for its threads.
    }
}
