//! A checkpoint's directory: thawd's snapshot of the microVM, packed, and what of the container the guest does not know.

mod packed;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thaw_protocol::shim::runc_options::CheckpointOptions;
use thaw_protocol::shim::{Any, Message};

use crate::error::{Error, For, Result};
use crate::options::kind;

/// What is said of the container.
const FILE: &str = "thaw.json";
/// The snapshot, packed.
const ARCHIVE: &str = "thaw.tar";
/// The name of the message in an `Any` that says how one is made: that of containerd's own runtime, which clients give any.
const OPTIONS: &str = "containerd.runc.v1.CheckpointOptions";
/// Largest file that is read: an id and a number.
const MOST: usize = 4096;

/// What a checkpoint says of its container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// As the guest calls it.
    pub container: String,
    /// How many processes were executed in it: names that are taken in the guest.
    pub execs: u64,
}

/// Whether the options of a checkpoint have its container killed once it is made.
pub fn exits(told: Option<&Any>) -> Result<bool> {
    let Some(told) = told.filter(|told| kind(told) == OPTIONS) else {
        return Ok(false);
    };
    let options = CheckpointOptions::parse_from_bytes(&told.value);
    let options = options.map_err(|e| Error::Invalid(format!("the checkpoint's options: {e}")))?;
    Ok(options.exit)
}

/// Where the snapshot is while it is made, and when it has been unpacked.
pub fn snapshot(directory: &Path) -> PathBuf {
    directory.join("thaw")
}

/// Packs the snapshot.
pub async fn pack(directory: &Path) -> Result<()> {
    by_its_paths(directory, packed::pack).await
}

/// Unpacks the snapshot.
pub async fn unpack(directory: &Path) -> Result<()> {
    by_its_paths(directory, |snapshot, archive| packed::unpack(archive, snapshot)).await
}

/// Does what takes as long as the disk takes, with the snapshot's directory and its archive.
async fn by_its_paths(directory: &Path, work: fn(&Path, &Path) -> Result<()>) -> Result<()> {
    let (snapshot, archive) = (snapshot(directory), directory.join(ARCHIVE));
    let done = tokio::task::spawn_blocking(move || work(&snapshot, &archive)).await;
    done.unwrap_or_else(|e| Err(Error::State(format!("a checkpoint's snapshot: {e}"))))
}

impl Checkpoint {
    /// Of a directory that containerd says is one.
    pub fn read(directory: &Path) -> Result<Checkpoint> {
        let path = directory.join(FILE);
        let foreign = |why: &dyn std::fmt::Display| {
            Error::Unsupported(format!(
                "{} is no checkpoint of a microVM ({why}): make one with this runtime",
                directory.display()
            ))
        };
        let text = std::fs::read(&path).map_err(|e| foreign(&format!("{}: {e}", path.display())))?;
        if text.len() > MOST {
            return Err(foreign(&format!("{} is too large", path.display())));
        }
        let read: Checkpoint = serde_json::from_slice(&text).map_err(|e| foreign(&e))?;
        crate::service::check_id(&read.container)?;
        Ok(read)
    }

    pub fn write(&self, directory: &Path) -> Result<()> {
        let path = directory.join(FILE);
        let text = serde_json::to_vec(self).map_err(|e| Error::malformed(&path, e))?;
        std::fs::write(&path, text).for_(|| format!("write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_not_ours_is_refused() {
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
        std::fs::write(directory.path().join(FILE), " ".repeat(MOST + 1)).unwrap();
        assert!(refused().contains("too large"));
    }
}
