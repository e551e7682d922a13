//! The table of all snapshots: by name in memory, by id on disk.
//!
//! Invariants: a snapshot's parent exists and is committed; names are unique; a method returns after its change is on disk. A directory
//! without a record is a leftover, and is removed when the table is opened; a directory with an unreadable record is left to an operator,
//! because it may have a container's files.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::record::{Files, Record, Stage};
use thaw_records::RecordError;

/// An error of the table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("snapshot {0:?} does not exist")]
    NotFound(String),
    #[error("snapshot {0:?} exists already")]
    AlreadyExists(String),
    #[error("snapshot {name:?}: {problem}")]
    Precondition { name: String, problem: String },
    #[error("snapshot directory {}: {error}", path.display())]
    Io { path: PathBuf, error: std::io::Error },
}

/// The snapshots under one directory.
#[derive(Debug)]
pub struct Table {
    root: PathBuf,
    by_name: BTreeMap<String, Record>,
}

/// A snapshot to be created.
pub struct New {
    pub name: String,
    pub parent: String,
    pub stage: Stage,
    pub files: Files,
    pub labels: BTreeMap<String, String>,
}

impl Table {
    /// Reads the snapshots of a directory, and removes leftovers.
    pub fn open(root: &Path) -> Result<Table, TableError> {
        let io = |error| TableError::Io {
            path: root.into(),
            error,
        };
        std::fs::create_dir_all(root).map_err(io)?;
        // The programs of images keep their modes here, setuid included.
        std::fs::set_permissions(root, Permissions::from_mode(0o700)).map_err(io)?;
        let mut by_name = BTreeMap::new();
        for entry in std::fs::read_dir(root).map_err(io)? {
            let path = entry.map_err(io)?.path();
            match Record::read(&path) {
                Ok(record) => {
                    by_name.insert(record.name.clone(), record);
                }
                Err(RecordError::Missing) => remove(&path)?,
                Err(RecordError::Io(error)) if error.kind() == ErrorKind::NotADirectory => remove(&path)?,
                Err(error) => tracing::error!(
                    "{} is left as it is, and is no snapshot: its record cannot be read: {error}",
                    path.display()
                ),
            }
        }
        Ok(Table {
            root: root.into(),
            by_name,
        })
    }

    /// The directory of all snapshots.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All snapshots, by name.
    pub fn all(&self) -> impl Iterator<Item = &Record> {
        self.by_name.values()
    }

    /// One snapshot.
    pub fn get(&self, name: &str) -> Result<&Record, TableError> {
        self.by_name
            .get(name)
            .ok_or_else(|| TableError::NotFound(name.into()))
    }

    /// The ancestors of a snapshot, the nearest first.
    pub fn below(&self, record: &Record) -> Result<Vec<Record>, TableError> {
        let mut chain = Vec::new();
        let mut parent = record.parent.as_str();
        while !parent.is_empty() {
            let below = self.get(parent)?;
            // A parent is older than its child, so a chain ends, unless records were edited by hand.
            if chain.len() > self.by_name.len() {
                return Err(TableError::Precondition {
                    name: record.name.clone(),
                    problem: "the snapshots below it form a circle".into(),
                });
            }
            chain.push(below.clone());
            parent = &below.parent;
        }
        Ok(chain)
    }

    /// Creates a snapshot with its directories.
    pub fn insert(&mut self, new: New) -> Result<Record, TableError> {
        if self.by_name.contains_key(&new.name) {
            return Err(TableError::AlreadyExists(new.name));
        }
        if !new.parent.is_empty() && self.get(&new.parent)?.stage != Stage::Committed {
            return Err(TableError::Precondition {
                name: new.parent,
                problem: "it is not committed, so nothing can be made on it".into(),
            });
        }
        let now = SystemTime::now();
        let id = thaw_sandbox::random::<8>().map_err(|error| TableError::Io {
            path: self.root.clone(),
            error,
        })?;
        let record = Record {
            id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
            name: new.name,
            parent: new.parent,
            stage: new.stage,
            files: new.files,
            labels: new.labels,
            created: now,
            updated: now,
        };
        let directory = record.directory(&self.root);
        let made = make_directories(&directory, &record).and_then(|()| record.write(&self.root));
        if let Err(error) = made {
            let _ = std::fs::remove_dir_all(&directory);
            return Err(TableError::Io {
                path: directory,
                error,
            });
        }
        self.by_name.insert(record.name.clone(), record.clone());
        Ok(record)
    }

    /// Commits an active snapshot under another name.
    pub fn commit(
        &mut self,
        key: &str,
        name: &str,
        labels: BTreeMap<String, String>,
    ) -> Result<(), TableError> {
        if self.by_name.contains_key(name) {
            return Err(TableError::AlreadyExists(name.into()));
        }
        let active = self.get(key)?;
        if active.stage != Stage::Active {
            return Err(TableError::Precondition {
                name: key.into(),
                problem: "only an active snapshot can be committed".into(),
            });
        }
        let mut committed = active.clone();
        committed.name = name.into();
        committed.stage = Stage::Committed;
        committed.labels = labels;
        committed.updated = SystemTime::now();
        self.write(&committed)?;
        self.by_name.remove(key);
        self.by_name.insert(name.into(), committed);
        Ok(())
    }

    /// Changes labels, the only thing of a snapshot that can change.
    pub fn relabel(
        &mut self,
        name: &str,
        change: impl FnOnce(&mut BTreeMap<String, String>),
    ) -> Result<Record, TableError> {
        let mut record = self.get(name)?.clone();
        change(&mut record.labels);
        record.updated = SystemTime::now();
        self.write(&record)?;
        self.by_name.insert(name.into(), record.clone());
        Ok(record)
    }

    /// Removes a snapshot without children, and its files.
    pub fn remove(&mut self, name: &str) -> Result<(), TableError> {
        let record = self.get(name)?;
        if let Some(child) = self.all().find(|other| other.parent == name) {
            return Err(TableError::Precondition {
                name: name.into(),
                problem: format!("snapshot {:?} stands on it", child.name),
            });
        }
        remove(&record.directory(&self.root))?;
        self.by_name.remove(name);
        Ok(())
    }

    fn write(&self, record: &Record) -> Result<(), TableError> {
        record.write(&self.root).map_err(|error| TableError::Io {
            path: record.directory(&self.root),
            error,
        })
    }
}

/// Creates `fs`, and `work` for a writable overlay.
fn make_directories(directory: &Path, record: &Record) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir(directory)?;
    if record.files == Files::Directory {
        let fs = directory.join("fs");
        std::fs::create_dir(&fs)?;
        std::fs::set_permissions(&fs, std::fs::Permissions::from_mode(0o755))?;
        if record.stage == Stage::Active {
            std::fs::create_dir(directory.join("work"))?;
        }
    }
    Ok(())
}

/// Removes the record first, so that a crash leaves a leftover, which the next start removes.
fn remove(directory: &Path) -> Result<(), TableError> {
    let io = |error| TableError::Io {
        path: directory.into(),
        error,
    };
    if !directory.is_dir() {
        return std::fs::remove_file(directory).map_err(io);
    }
    match std::fs::remove_file(directory.join("record.json")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    std::fs::remove_dir_all(directory).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(name: &str, parent: &str, stage: Stage) -> New {
        New {
            name: name.into(),
            parent: parent.into(),
            stage,
            files: Files::Directory,
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn a_table_read_again_is_the_same_and_leftovers_are_gone() {
        let root = tempfile::tempdir().unwrap();
        let mut table = Table::open(root.path()).unwrap();
        table.insert(new("extract", "", Stage::Active)).unwrap();
        table
            .commit("extract", "base", [("a".to_owned(), "b".to_owned())].into())
            .unwrap();
        let top = table.insert(new("container", "base", Stage::Active)).unwrap();
        assert!(top.directory(root.path()).join("work").is_dir());
        std::fs::create_dir(root.path().join("killed-while-made")).unwrap();
        let before: Vec<Record> = table.all().cloned().collect();
        let table = Table::open(root.path()).unwrap();
        assert_eq!(table.all().cloned().collect::<Vec<_>>(), before);
        assert!(!root.path().join("killed-while-made").exists());
        assert_eq!(table.get("base").unwrap().labels["a"], "b");
        assert_eq!(table.below(table.get("container").unwrap()).unwrap().len(), 1);
    }

    #[test]
    fn records_of_the_previous_release_are_read() {
        let layer: Record = thaw_record_fixtures::check("layer.json");
        assert!(matches!(layer.files, Files::Image { layer: 0, .. }));
        let writable: Record = thaw_record_fixtures::check("writable.json");
        assert_eq!(
            (writable.stage, writable.files),
            (Stage::Active, Files::Directory)
        );
    }

    #[test]
    fn snapshot_with_an_unreadable_record_keeps_its_files() {
        let root = tempfile::tempdir().unwrap();
        let mut table = Table::open(root.path()).unwrap();
        let made = table.insert(new("container", "", Stage::Active)).unwrap();
        let directory = made.directory(root.path());
        let record = std::fs::read(directory.join("record.json")).unwrap();
        for damage in [&record[..record.len() / 2], b"", br#"{"version": 3}"#] {
            std::fs::write(directory.join("record.json"), damage).unwrap();
            let table = Table::open(root.path()).unwrap();
            assert_eq!(table.all().count(), 0);
            assert!(directory.join("fs").is_dir());
        }
        std::fs::write(directory.join("record.json"), record).unwrap();
        assert_eq!(Table::open(root.path()).unwrap().get("container").unwrap(), &made);
    }

    #[test]
    fn what_must_not_be_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let mut table = Table::open(root.path()).unwrap();
        table.insert(new("one", "", Stage::Active)).unwrap();
        assert!(matches!(
            table.insert(new("one", "", Stage::View)),
            Err(TableError::AlreadyExists(_))
        ));
        // Nothing stands on what may still change, or is not there.
        assert!(matches!(
            table.insert(new("two", "one", Stage::Active)),
            Err(TableError::Precondition { .. })
        ));
        assert!(matches!(
            table.insert(new("two", "none", Stage::Active)),
            Err(TableError::NotFound(_))
        ));
        table.commit("one", "base", BTreeMap::new()).unwrap();
        table.insert(new("two", "base", Stage::View)).unwrap();
        assert!(matches!(
            table.remove("base"),
            Err(TableError::Precondition { .. })
        ));
        assert!(matches!(
            table.commit("two", "three", BTreeMap::new()),
            Err(TableError::Precondition { .. })
        ));
        table.remove("two").unwrap();
        table.remove("base").unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
