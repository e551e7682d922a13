//! A copy of a paused sandbox in a registry: what it needs beside the snapshot to be the same sandbox on another node, and the note that
//! there is one.
//!
//! Invariant: while the note is there, another node may have taken the sandbox over. So it is resumed only after this node has its claim
//! ([`Copied`]), and the note is removed then.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};

use super::paused::{KEPT, PausedRecord, create};
use super::{Paused, Record, TimeLimit};
use crate::error::{Error, ErrorKind};
use crate::journal;

/// The note, in the directory of the paused sandbox.
const NOTE: &str = "copy.json";
/// Largest file beside the record that goes into a copy, bytes. The output of the container does not.
const MAX_FILE: u64 = 64 << 10;

/// The note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// The reference that the node writes which resumes the sandbox.
    pub claim: String,
    /// What this node writes there.
    pub nonce: String,
    /// Whether the copy is in the registry. If not, it may be there nevertheless: thawd was killed, or got no answer.
    #[serde(default)]
    pub is_complete: bool,
}

/// What a copy has beside the snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct Portable {
    record: PausedRecord,
    /// Small files that are kept of its container, in base64, by name.
    files: BTreeMap<String, String>,
    /// See [`Copied::claim`].
    pub claim: String,
}

impl Portable {
    /// The sandbox's record, without what is of the node that paused it.
    pub fn record(&self) -> Record {
        Record {
            owner: None,
            client: None,
            vmm: None,
            cgroup: None,
            share: None,
            remote: None,
            ..self.record.clone().into_record()
        }
    }

    /// Writes the files into the directory of a paused sandbox, and the note, before that has a record. Blocks.
    ///
    /// # Errors
    /// The file system's; a file is none that a paused sandbox has.
    pub fn unpack(&self, directory: &Path, note: &Copied) -> Result<(), Error> {
        let unpack = || -> io::Result<()> {
            for (name, text) in &self.files {
                let bytes = STANDARD.decode(text).map_err(io::Error::other)?;
                if !KEPT.contains(&name.as_str()) {
                    return Err(io::Error::other(format!("a copy has no file {name:?}")));
                }
                create(&directory.join(name))?.write_all(&bytes)?;
            }
            write_note(directory, note)
        };
        unpack().map_err(|e| Error::system(format!("cannot write into {}", directory.display()), &e))
    }
}

impl Paused {
    /// What a copy of it has beside the snapshot, as JSON. `claim` is [`Copied::claim`]. Blocks.
    ///
    /// # Errors
    /// The file system's.
    pub fn portable(&self, claim: &str) -> Result<String, Error> {
        let read = || -> io::Result<String> {
            let mut files = BTreeMap::new();
            for name in KEPT {
                if let Some(bytes) = read_kept(&self.directory().join(name), name)? {
                    files.insert(name.to_owned(), STANDARD.encode(bytes));
                }
            }
            let portable = Portable {
                // It stays until it is resumed.
                record: self.paused_record(TimeLimit {
                    timeout: None,
                    ..self.record().terms.time_limit()
                }),
                files,
                claim: claim.to_owned(),
            };
            serde_json::to_string(&portable).map_err(io::Error::other)
        };
        read().map_err(|e| Error::system(format!("cannot read {}", self.directory().display()), &e))
    }

    /// The note of a copy in a registry, if there is one. Blocks.
    ///
    /// # Errors
    /// It cannot be read: another node may have taken the sandbox over.
    pub fn copied(&self) -> Result<Option<Copied>, Error> {
        let file = self.directory().join(NOTE);
        match thaw_records::read(&file) {
            Ok(note) => Ok(Some(note)),
            Err(thaw_records::RecordError::Missing) => Ok(None),
            Err(e) => {
                let what = format!("{} cannot be read: {e}", file.display());
                Err(Error::new(ErrorKind::Runtime, what))
            }
        }
    }

    /// Notes that there is a copy, or will be. Blocks.
    ///
    /// # Errors
    /// The file system's.
    pub fn note_copied(&self, note: &Copied) -> Result<(), Error> {
        let written = write_note(self.directory(), note);
        written.map_err(|e| Error::system(format!("cannot write into {}", self.directory().display()), &e))
    }

    /// Notes that the copy is in the registry, if the note is still there. The caller has made sure that nothing else changes the note
    /// meanwhile. Blocks.
    ///
    /// # Errors
    /// Those of [`Paused::copied`] and [`Paused::note_copied`].
    pub fn note_complete(&self) -> Result<(), Error> {
        match self.copied()? {
            Some(note) => self.note_copied(&Copied {
                is_complete: true,
                ..note
            }),
            None => Ok(()),
        }
    }

    /// Removes the note: no other node can take it over. Blocks.
    ///
    /// # Errors
    /// The file system's.
    pub fn forget_copied(&self) -> Result<(), Error> {
        let file = self.directory().join(NOTE);
        match fs::remove_file(&file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::system(format!("cannot remove {}", file.display()), &e))
            }
            _ => {
                reach(Failpoint::CopyForgotten);
                Ok(())
            }
        }
    }
}

/// A file that goes into a copy. Instead of the output there is an empty file, so that it is kept from the resume on.
fn read_kept(file: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    match fs::metadata(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
        Ok(_) if name == journal::FILE => Ok(Some(Vec::new())),
        Ok(_) if name == journal::FILE_BEFORE => Ok(None),
        Ok(metadata) if metadata.len() > MAX_FILE => Ok(None),
        Ok(_) => fs::read(file).map(Some),
    }
}

/// Writes the note durably, completely or not at all.
fn write_note(directory: &Path, note: &Copied) -> io::Result<()> {
    let new = directory.join("copy.new");
    let mut file = create(&new)?;
    file.write_all(&thaw_records::encode(note)?)?;
    file.sync_all()?;
    reach(Failpoint::CopyBegun);
    fs::rename(new, directory.join(NOTE))?;
    File::open(directory)?.sync_all()?;
    reach(Failpoint::CopyNoted);
    Ok(())
}

#[cfg(test)]
#[path = "paused_copy_test.rs"]
mod tests;
