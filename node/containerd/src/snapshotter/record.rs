//! The record of a snapshot, and its files on disk.
//!
//! ```text
//! snapshots/ID/record.json     written atomically, by a rename
//! snapshots/ID/fs, work        directories of a snapshot that containerd or a container writes to
//! snapshots/ID/whole           of a layer in the image store onto which containerd has unpacked others: its files and those of the
//!                              layers below
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use thaw_protocol::snapshots::{Info, Kind};

use thaw_records::RecordError;

/// The kind of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Writable.
    Active,
    /// Read-only.
    View,
    /// Immutable.
    Committed,
}

/// The place of a snapshot's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Files {
    /// In its directory `fs`.
    Directory,
    /// In the image store: this is layer `layer` (0 is the bottom) of an image.
    Image { digest: String, layer: usize },
}

/// One snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The name of its directory. It never changes, while a commit changes `name`.
    pub id: String,
    /// containerd's name for it.
    pub name: String,
    /// The name of its parent; empty without one.
    pub parent: String,
    pub stage: Stage,
    pub files: Files,
    pub labels: BTreeMap<String, String>,
    pub created: SystemTime,
    pub updated: SystemTime,
}

/// A record's file.
const RECORD: &str = "record.json";

impl Record {
    /// Its kind in the protocol.
    pub fn kind(&self) -> Kind {
        match self.stage {
            Stage::Active => Kind::Active,
            Stage::View => Kind::View,
            Stage::Committed => Kind::Committed,
        }
    }

    /// Its description in the protocol.
    pub fn info(&self) -> Info {
        Info {
            name: self.name.clone(),
            parent: self.parent.clone(),
            kind: self.kind().into(),
            created_at: Some(self.created.into()),
            updated_at: Some(self.updated.into()),
            labels: self.labels.clone().into_iter().collect(),
        }
    }

    /// Its directory under the snapshotter's root.
    pub fn directory(&self, root: &Path) -> PathBuf {
        root.join(&self.id)
    }

    /// For a layer in the image store onto which another was unpacked: the directory of its files and those below.
    pub fn whole(&self, root: &Path) -> PathBuf {
        self.directory(root).join("whole")
    }

    /// Writes it into its directory, which exists. Atomic even if this process or the host crashes.
    pub fn write(&self, root: &Path) -> std::io::Result<()> {
        let directory = self.directory(root);
        let partial = directory.join(format!("{RECORD}.partial"));
        let bytes = thaw_records::encode(self)?;
        let file = std::fs::File::create(&partial)?;
        std::io::Write::write_all(&mut &file, &bytes)?;
        file.sync_all()?;
        std::fs::rename(&partial, directory.join(RECORD))?;
        std::fs::File::open(&directory)?.sync_all()
    }

    /// The record in a directory.
    ///
    /// # Errors
    /// [`RecordError::Missing`] for a directory that never became a snapshot.
    pub fn read(directory: &Path) -> Result<Record, RecordError> {
        let record: Record = thaw_records::read(&directory.join(RECORD))?;
        let is_its_own = directory
            .file_name()
            .is_some_and(|name| name == record.id.as_str());
        match is_its_own {
            true => Ok(record),
            false => Err(RecordError::Missing),
        }
    }

    #[cfg(test)]
    pub fn for_test() -> Record {
        Record {
            id: "0".into(),
            name: String::new(),
            parent: String::new(),
            stage: Stage::Committed,
            files: Files::Directory,
            labels: BTreeMap::new(),
            created: SystemTime::UNIX_EPOCH,
            updated: SystemTime::UNIX_EPOCH,
        }
    }
}
