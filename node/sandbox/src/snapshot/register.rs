//! Opens verified files as the descriptors a VMM restores from.
//!
//! A long-lived process ([`Hold::Sealed`]) copies memory into a sealed memfd while it hashes it, so that exactly the verified bytes are
//! mapped, and all clones share that copy. A process that thaws one sandbox ([`Hold::Files`]) passes on the file itself, verified once
//! since boot ([`super::stamp`]); clones share the page cache. `state` and `working-set` are small and always copied. All descriptors are
//! read-only.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};

use super::check::{CheckError, check_chunks, check_size};
use super::components::Components;
use super::directory::{SnapshotDir, read_only};
use super::disk_bases::{self, DiskBase};
use super::error::SnapshotError;
use super::hash::Hash;
use super::manifest::{ChunkedFile, MAX_LAYERS, Manifest, WholeFile};
use super::signature::{KEYS, Signatures, TrustedKeys};
use super::stamp::Stamps;
use super::working_sets::WorkingSets;
use crate::vm::SnapshotFiles;

/// Where memory is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// In sealed memory of this process.
    Sealed,
    /// In the snapshot's file.
    Files,
}

/// A snapshot ready to be restored, any number of times at once.
#[derive(Debug)]
pub struct Registered {
    pub manifest: Manifest,
    /// Hash of the manifest.
    pub hash: Hash,
    /// Its directory, which may have been removed since.
    pub directory: PathBuf,
    /// The files that a VMM restores from.
    pub files: SnapshotFiles,
    /// The registered snapshot that it shares memory with: one that it lies on.
    base: Option<Arc<Registered>>,
    /// The disks at the freeze, by id. No thaw changes them.
    pub disks: Vec<(String, OwnedFd)>,
    /// The whole disks below those that are layers.
    pub disk_bases: Vec<DiskBase>,
    /// Bytes of this process's memory that it holds, alone or with others.
    pub held_bytes: u64,
    /// Its memory was read and compared for this registration, and no start has reported that yet.
    just_read: AtomicBool,
    /// A thaw records its working set, or has.
    recording: AtomicBool,
}

impl Registered {
    /// Whether its memory had to be read and compared for this registration. True only for the first call.
    pub fn take_just_read(&self) -> bool {
        self.just_read.swap(false, Ordering::Relaxed)
    }

    /// Whether the caller is to record its working set: it has none, and no other thaw is recording one.
    pub fn take_recording(&self) -> bool {
        self.files.working_set.is_none() && !self.recording.swap(true, Ordering::Relaxed)
    }

    /// The whole disk of this name of the snapshot with this manifest, if it was verified for this registration.
    fn verified_disk(&self, id: &str, manifest: Hash) -> Option<&OwnedFd> {
        if self.hash == manifest {
            let disk = self.disks.iter().find(|(disk, _)| disk == id);
            return disk.map(|(_, file)| file);
        }
        let mut bases = self.disk_bases.iter();
        let base = bases.find(|base| base.id == id && base.manifest == manifest);
        base.map(|base| &base.file)
    }

    /// After a recording that failed: the next thaw may record.
    pub fn give_up_recording(&self) {
        self.recording.store(false, Ordering::Relaxed);
    }

    /// A snapshot whose memory another file server has: it can only be restored with a userfaultfd. `state` and `disks` have been
    /// compared with the manifest, or will be before they are used.
    pub fn without_memory(
        manifest: Manifest,
        hash: Hash,
        directory: PathBuf,
        state: &[u8],
        disks: Vec<(String, OwnedFd)>,
    ) -> io::Result<Registered> {
        let copy = memfd("thaw-state", state.len() as u64)?;
        copy.write_all_at(state, 0)?;
        Ok(Registered {
            manifest,
            hash,
            directory,
            files: SnapshotFiles {
                state: seal(&copy)?,
                memory: Vec::new(),
                working_set: None,
            },
            base: None,
            disks,
            disk_bases: Vec::new(),
            held_bytes: 0,
            just_read: false.into(),
            recording: true.into(),
        })
    }

    /// The same snapshot with another working set.
    pub fn with_working_set(&self, working_set: OwnedFd) -> io::Result<Registered> {
        let memory = self.files.memory.iter().map(OwnedFd::try_clone);
        let disk = |(id, file): &(String, OwnedFd)| Ok((id.clone(), file.try_clone()?));
        Ok(Registered {
            manifest: self.manifest.clone(),
            hash: self.hash,
            directory: self.directory.clone(),
            files: SnapshotFiles {
                state: self.files.state.try_clone()?,
                memory: memory.collect::<io::Result<_>>()?,
                working_set: Some(working_set),
            },
            base: self.base.clone(),
            disks: self.disks.iter().map(disk).collect::<io::Result<_>>()?,
            disk_bases: self
                .disk_bases
                .iter()
                .map(DiskBase::try_clone)
                .collect::<io::Result<_>>()?,
            held_bytes: self.held_bytes,
            just_read: false.into(),
            recording: false.into(),
        })
    }
}

/// Opens snapshots under this node's trust settings.
#[derive(Clone, Debug)]
pub struct Registry {
    stamps: Stamps,
    components: Components,
    working_sets: WorkingSets,
    trusted: TrustedKeys,
    hold: Hold,
}

impl Registry {
    /// A registry with the stamps and keys under the data directory: `verified/` and `keys/`.
    pub fn open(data: &Path, hold: Hold, signatures: Signatures) -> Result<Registry, SnapshotError> {
        let stamps = Stamps::open(&data.join("verified"))?;
        Ok(Registry {
            components: Components::of(data, stamps.clone()),
            working_sets: WorkingSets::of(data),
            stamps,
            trusted: TrustedKeys::load(&data.join(KEYS), signatures)?,
            hold,
        })
    }

    /// A registry with the same trust and hold, and with the stamps and components under another data directory.
    pub fn below(&self, data: &Path) -> Result<Registry, SnapshotError> {
        let stamps = Stamps::open(&data.join("verified"))?;
        Ok(Registry {
            components: Components::of(data, stamps.clone()),
            working_sets: WorkingSets::of(data),
            stamps,
            ..self.clone()
        })
    }

    /// The stamps of verified files.
    pub fn stamps(&self) -> &Stamps {
        &self.stamps
    }

    /// The store of components.
    pub fn components(&self) -> &Components {
        &self.components
    }

    /// Whether this process copies the memory of snapshots into its own.
    pub fn holds_memory(&self) -> bool {
        self.hold == Hold::Sealed
    }

    /// The store of recorded working sets.
    pub fn working_sets(&self) -> &WorkingSets {
        &self.working_sets
    }

    /// The trusted keys.
    pub fn trusted(&self) -> &TrustedKeys {
        &self.trusted
    }

    /// Opens a snapshot's directory. Checks its manifest, but not its files.
    pub fn find(&self, directory: &Path) -> Result<SnapshotDir, SnapshotError> {
        SnapshotDir::open(directory, &self.trusted)
    }

    /// Verifies a snapshot and its bases, and holds what a VMM needs of them. Blocks while it reads.
    pub fn register(&self, directory: &Path) -> Result<Registered, SnapshotError> {
        self.register_with(directory, &|_| None)
    }

    /// The same. `held` finds a registered snapshot by the hash of its manifest: the memory of the highest base that it finds is not read again,
    /// but shared, and that stays registered as long as this one. Blocks while it reads.
    pub fn register_with(
        &self,
        directory: &Path,
        held: &dyn Fn(Hash) -> Option<Arc<Registered>>,
    ) -> Result<Registered, SnapshotError> {
        let layers = self.chain(directory)?;
        let base = held_base(&layers, held);
        let shared = base.iter().flat_map(|base| &base.files.memory);
        let shared = shared.map(OwnedFd::try_clone).collect::<io::Result<Vec<_>>>();
        let mut memory = shared.map_err(SnapshotError::io("hold the bases of", directory))?;
        let shared = memory.len();
        let mut just_read = self.hold == Hold::Sealed;
        for layer in layers[..layers.len() - shared].iter().rev() {
            memory.push(match self.hold {
                Hold::Sealed => sealed_memory(layer)?,
                Hold::Files => {
                    just_read |= layer.verify_once(&self.stamps)?;
                    read_only(&layer.files().memory).map_err(io_at(layer))?
                }
            });
        }
        let bases_of_disks = self.disk_bases(&layers, base.as_deref())?;
        // There is at least one layer, the snapshot itself.
        let top = layers.into_iter().next().ok_or_else(|| SnapshotError::NotFound {
            directory: directory.to_owned(),
        })?;
        let (files, expected) = (top.files(), &top.manifest().files);
        let state = sealed_whole(&top, "state", &files.state, &expected.state)?;
        let working_set = match (&files.working_set, &expected.working_set) {
            (Some(file), Some(expected)) => Some(sealed_whole(&top, "working-set", file, expected)?),
            _ => self.working_sets.find(top.hash()).map(OwnedFd::from),
        };
        if self.hold == Hold::Sealed {
            for ((id, file), disk) in files.disks.iter().zip(&expected.disks) {
                top.check(|| check_chunks(&format!("disks/{id}"), file, &disk.contents, None))?;
            }
        }
        let held_bytes = match self.hold {
            Hold::Sealed => memory
                .iter()
                .map(allocated)
                .sum::<io::Result<u64>>()
                .map_err(io_at(&top))?,
            Hold::Files => 0,
        };
        let (hash, directory) = (top.hash(), top.path().to_owned());
        let (manifest, files) = top.into_files();
        Ok(Registered {
            manifest,
            hash,
            directory,
            files: SnapshotFiles {
                state,
                memory,
                working_set,
            },
            base,
            disks: files.disks.into_iter().map(|(id, f)| (id, f.into())).collect(),
            disk_bases: bases_of_disks,
            held_bytes,
            just_read: just_read.into(),
            recording: false.into(),
        })
    }

    /// The whole disks below those of the first of `layers`, verified. `held` is registered with all below it.
    fn disk_bases(
        &self,
        layers: &[SnapshotDir],
        held: Option<&Registered>,
    ) -> Result<Vec<DiskBase>, SnapshotError> {
        let open = |found: disk_bases::Whole<'_>| {
            let verified = held.and_then(|held| held.verified_disk(found.id(), found.manifest()));
            // A file was verified with its snapshot.
            if verified.is_none() && self.hold == Hold::Sealed {
                found.verify()?;
            }
            found.open(verified)
        };
        disk_bases::find(layers)?.into_iter().map(open).collect()
    }

    /// The disk of this name of the next snapshot from `directory` down in which it is whole. It is not verified.
    ///
    /// # Errors
    /// Those of [`Registry::chain`].
    pub fn whole_disk(&self, directory: &Path, id: &str) -> Result<Option<File>, SnapshotError> {
        let layers = self.chain(directory)?;
        let found = layers.iter().find_map(|layer| disk_bases::whole(layer, id));
        let file = found.map(|found| found.file.try_clone()).transpose();
        file.map_err(SnapshotError::io("open a disk of", directory))
    }

    /// The snapshot and its bases, top first. There is at least one, and at most [`MAX_LAYERS`]. Their manifests are checked, and that each lies
    /// on the next; their files are not.
    ///
    /// # Errors
    /// [`SnapshotError::NoBase`], [`SnapshotError::OtherBase`], [`SnapshotError::Incompatible`], those of [`Registry::find`].
    pub fn chain(&self, directory: &Path) -> Result<Vec<SnapshotDir>, SnapshotError> {
        let mut layers = vec![self.find(directory)?];
        while let Some(base) = layers.last().and_then(|top| top.manifest().base()) {
            let top = &layers[layers.len() - 1];
            if layers.len() == MAX_LAYERS {
                return Err(SnapshotError::Incompatible {
                    directory: directory.to_owned(),
                    reason: format!("it lies on more than {} others", MAX_LAYERS - 1),
                });
            }
            let place = top.path().join(&base.place);
            let under = self.find(&place).map_err(|e| match e {
                SnapshotError::NotFound { .. } => SnapshotError::NoBase {
                    directory: top.path().to_owned(),
                    base: place.clone(),
                },
                other => other,
            })?;
            if under.hash() != base.manifest {
                return Err(SnapshotError::OtherBase {
                    directory: top.path().to_owned(),
                    base: place,
                    wanted: base.manifest,
                    found: under.hash(),
                });
            }
            layers.push(under);
        }
        Ok(layers)
    }
}

impl Manifest {
    fn base(&self) -> Option<super::manifest::Base> {
        self.subject.base.clone()
    }
}

/// The highest snapshot below the first that is held with the memory of all its layers.
fn held_base(
    layers: &[SnapshotDir],
    held: &dyn Fn(Hash) -> Option<Arc<Registered>>,
) -> Option<Arc<Registered>> {
    let mut bases = layers.iter().enumerate().skip(1);
    bases.find_map(|(at, base)| {
        // One whose memory comes page by page has no files of it.
        let is_whole = |base: &Arc<Registered>| base.files.memory.len() == layers.len() - at;
        held(base.hash()).filter(is_whole)
    })
}

fn io_at(layer: &SnapshotDir) -> impl FnOnce(io::Error) -> SnapshotError {
    SnapshotError::io("hold the snapshot at", layer.path())
}

/// Bytes that a file occupies.
fn allocated(file: &OwnedFd) -> io::Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_blocks).unwrap_or(0) * 512)
}

/// Copies memory and compares it meanwhile.
fn sealed_memory(layer: &SnapshotDir) -> Result<OwnedFd, SnapshotError> {
    let expected: &ChunkedFile = &layer.manifest().files.memory;
    layer.check(|| {
        let copy = memfd("thaw-memory", expected.bytes)?;
        check_chunks("memory", &layer.files().memory, expected, Some(&copy))?;
        Ok(seal(&copy)?)
    })
}

/// Copies a small file, and compares the copy.
fn sealed_whole(
    layer: &SnapshotDir,
    name: &str,
    file: &File,
    expected: &WholeFile,
) -> Result<OwnedFd, SnapshotError> {
    layer.check(|| {
        check_size(name, file, expected.bytes)?;
        let copy = memfd("thaw-state", expected.bytes)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let (mut at, mut from) = (0, (Positioned { file, at: 0 }).take(expected.bytes));
        loop {
            let n = from.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            copy.write_all_at(&buffer[..n], at)?;
            at += n as u64;
        }
        match at == expected.bytes && Hash::from(hasher.finalize()) == expected.blake3 {
            true => Ok(seal(&copy)?),
            false => Err(CheckError::Damaged(name.to_owned())),
        }
    })
}

/// Reads by position, because other holders share the descriptor's own offset.
struct Positioned<'a> {
    file: &'a File,
    at: u64,
}

impl Read for Positioned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read_at(buffer, self.at) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => {
                    self.at += *result.as_ref().unwrap_or(&0) as u64;
                    return result;
                }
            }
        }
    }
}

fn memfd(name: &str, bytes: u64) -> io::Result<File> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    file.set_len(bytes)?;
    Ok(file)
}

/// Seals the file: no process can write to it any more, not even this one. The returned descriptor is read-only.
fn seal(file: &File) -> io::Result<OwnedFd> {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(file, seals)?;
    read_only(file)
}

#[cfg(test)]
#[path = "register_test.rs"]
mod tests;
