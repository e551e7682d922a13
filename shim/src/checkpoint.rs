//! A checkpoint's directory: thawd's snapshot of the microVM, packed into an archive, and the container's
//! state that the guest does not know.

mod packed;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thaw_protocol::shim::runc_options::CheckpointOptions;
use thaw_protocol::shim::{Any, Message};

use crate::any::kind;
use crate::error::{Error, Result, WithContext};

/// The container's state.
const FILE: &str = "thaw.json";
/// The archive of the snapshot.
const ARCHIVE: &str = "thaw.tar";
/// The message name of a checkpoint's options: those of containerd's runc runtime, which clients send to any
/// runtime.
const OPTIONS: &str = "containerd.runc.v1.CheckpointOptions";
/// Largest state file that is read, in bytes. It holds an id and a number.
const MAX_SIZE: usize = 4096;

/// The container's state in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The container's id in the guest.
    pub container: String,
    /// Number of execs so far, whose names are taken in the guest.
    pub execs: u64,
}

/// Whether the options ask to kill the container after the checkpoint.
pub fn exits(options: Option<&Any>) -> Result<bool> {
    let Some(options) = options.filter(|options| kind(options) == OPTIONS) else {
        return Ok(false);
    };
    let options = CheckpointOptions::parse_from_bytes(&options.value);
    let options = options.map_err(|e| Error::Invalid(format!("the checkpoint's options: {e}")))?;
    Ok(options.exit)
}

/// Directory of the snapshot before it is packed and after it is unpacked.
pub fn snapshot(directory: &Path) -> PathBuf {
    directory.join("thaw")
}

/// Packs the snapshot into the archive.
pub async fn pack(directory: &Path) -> Result<()> {
    with_paths(directory, packed::pack).await
}

/// Unpacks the archive.
pub async fn unpack(directory: &Path) -> Result<()> {
    with_paths(directory, |snapshot, archive| packed::unpack(archive, snapshot)).await
}

/// Runs `work` with the paths of the snapshot and the archive on a blocking thread.
async fn with_paths(directory: &Path, work: fn(&Path, &Path) -> Result<()>) -> Result<()> {
    let (snapshot, archive) = (snapshot(directory), directory.join(ARCHIVE));
    let done = tokio::task::spawn_blocking(move || work(&snapshot, &archive)).await;
    done.unwrap_or_else(|e| Err(Error::State(format!("a checkpoint's snapshot: {e}"))))
}

impl Checkpoint {
    /// Reads the state from a checkpoint's directory.
    pub fn read(directory: &Path) -> Result<Checkpoint> {
        let path = directory.join(FILE);
        let foreign = |why: &dyn std::fmt::Display| {
            Error::Unsupported(format!(
                "{} is no checkpoint of a microVM ({why}): make one with this runtime",
                directory.display()
            ))
        };
        let text = std::fs::read(&path).map_err(|e| foreign(&format!("{}: {e}", path.display())))?;
        if text.len() > MAX_SIZE {
            return Err(foreign(&format!("{} is too large", path.display())));
        }
        let read: Checkpoint = serde_json::from_slice(&text).map_err(|e| foreign(&e))?;
        crate::id::check_id(&read.container)?;
        Ok(read)
    }

    pub fn write(&self, directory: &Path) -> Result<()> {
        let path = directory.join(FILE);
        let text = serde_json::to_vec(self).map_err(|e| Error::malformed(&path, e))?;
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_is_read_back_and_foreign_one_refused() {
        let directory = tempfile::tempdir().unwrap();
        let refused = || Checkpoint::read(directory.path()).unwrap_err().to_string();
        assert!(refused().contains("no checkpoint of a microVM"), "{}", refused());
        let checkpoint = Checkpoint {
            container: "c".into(),
            execs: 3,
        };
        checkpoint.write(directory.path()).unwrap();
        assert_eq!(Checkpoint::read(directory.path()).unwrap(), checkpoint);
        for text in ["{}", "[", r#"{"container": "../x", "execs": 0}"#] {
            std::fs::write(directory.path().join(FILE), text).unwrap();
            assert!(!refused().is_empty());
        }
        std::fs::write(directory.path().join(FILE), " ".repeat(MAX_SIZE + 1)).unwrap();
        assert!(refused().contains("too large"));
    }
}
