//! Node ids that stay valid when another process takes over.
//!
//! virtiofsd numbers files as it meets them, and a guest's kernel keeps those numbers: of each mount's root,
//! each working directory, and each name it has looked up. [`StableIds`] gives the guest ids of its own
//! instead, and writes them to a [`Ledger`]. A process that replaces one that died finds the files again by
//! their names, and continues with the same ids. Invariants:
//!
//! - An id never means another file than the one it was made for. Ids of different processes differ, and a file
//!   found by its name must have the recorded inode number and type. A node that is not found again returns
//!   ESTALE, after which the guest looks the path up again.
//! - A file that was opened with a process that died can be read. Other operations that need its handle return
//!   EIO, because its last writes may be lost. So does every operation on an open directory.
//!
//! An id must not change, nor a lookup fail, for a name that still exists: the guest's kernel would detach
//! everything mounted there.

mod nodes;
mod operations;
mod recovery;

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, RwLock};

use thaw_sys::lock::{Lock, Share};
use virtiofsd::filesystem::{Context, Entry, FileSystem, ROOT_ID};

use crate::ledger::{Ledger, Past, Place};
use crate::opened;
use nodes::Nodes;

/// Bits of a handle that are virtiofsd's. The bits above are the process's generation.
const HANDLE_BITS: u32 = 48;
/// Bits of a node id that count within one process. The bits above are the generation of the process that made
/// it.
const NODE_BITS: u32 = 40;

/// A file system with node ids of its own.
pub struct StableIds<F> {
    inner: F,
    nodes: RwLock<Nodes>,
    /// The generation: the number of processes of this guest before this one.
    generation: u64,
    /// The nodes of the process before, until the guest sends INIT.
    past: Mutex<HashMap<u64, Place>>,
}

fn error<T>(errno: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(errno))
}

impl<F: FileSystem<Inode = u64, Handle = u64>> StableIds<F> {
    /// Serves a guest whose ids are in `ledger`. Without a ledger, ids end with this process.
    ///
    /// # Errors
    /// The ledger cannot be read or written.
    pub fn new(inner: F, ledger: Option<File>) -> io::Result<StableIds<F>> {
        let opened = ledger.map(Ledger::open).transpose()?;
        let (ledger, past) = opened.map_or((None, Past::default()), |(ledger, past)| (Some(ledger), past));
        let generation = past.generation % (1 << (u64::BITS - HANDLE_BITS));
        let nodes = Nodes {
            next: (past.generation << NODE_BITS) + ROOT_ID + 1,
            ledger,
            ..Nodes::default()
        };
        Ok(StableIds {
            inner,
            nodes: RwLock::new(nodes),
            generation,
            past: Mutex::new(past.places),
        })
    }

    fn read<T>(&self, look: impl FnOnce(&Nodes) -> T) -> T {
        look(&self.nodes.reading())
    }

    fn write<T>(&self, change: impl FnOnce(&mut Nodes) -> T) -> T {
        change(&mut self.nodes.writing())
    }

    fn past(&self) -> MutexGuard<'_, HashMap<u64, Place>> {
        self.past.locked()
    }

    fn node(&self, id: u64) -> io::Result<u64> {
        match id {
            ROOT_ID => Ok(ROOT_ID),
            id => self
                .read(|nodes| nodes.by_id.get(&id).map(|node| node.inner))
                .ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE)),
        }
    }

    fn handle(&self, handle: u64) -> io::Result<u64> {
        match handle >> HANDLE_BITS == self.generation {
            true => Ok(handle & ((1 << HANDLE_BITS) - 1)),
            false => error(libc::EIO),
        }
    }

    fn tagged(&self, handle: Option<u64>) -> Option<u64> {
        handle.map(|handle| handle | self.generation << HANDLE_BITS)
    }

    /// Hands the file behind a new handle over to the VMM, if the VMM may have it.
    fn note_opened(&self, ctx: Context, inner: u64, handle: Option<u64>, flags: u32) {
        if let Some(handle) = handle {
            opened::note(flags, |duplicate| {
                self.inner.read(ctx, inner, handle, duplicate, 0, 0, None, flags)
            });
        }
    }

    /// Reads a file that was opened with a process that died, by opening it again. Reading cannot lose data,
    /// and an error would kill a program that is executed from the file.
    fn read_reopened<T>(
        &self,
        ctx: Context,
        inner: u64,
        read: impl FnOnce(u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let flags = libc::O_RDONLY as u32;
        let Some(handle) = self.inner.open(ctx, inner, false, flags)?.0 else {
            return error(libc::EIO);
        };
        let result = read(handle);
        self.inner
            .release(ctx, inner, flags, handle, false, false, None)?;
        result
    }

    fn entry(&self, parent: u64, name: &CStr, mut entry: Entry) -> Entry {
        if !matches!(entry.inode, 0 | ROOT_ID) {
            entry.inode = self.write(|nodes| nodes.id_of(parent, name, &entry));
        }
        entry
    }

    /// Records the new place of a node that was moved to this name.
    fn update_place(&self, ctx: Context, parent: u64, name: &CStr) {
        let Ok(there) = self
            .node(parent)
            .and_then(|inner| self.inner.lookup(ctx, inner, name))
        else {
            return;
        };
        let inner = there.inode;
        if self.read(|nodes| nodes.by_inner.contains_key(&inner)) {
            let id = self.write(|nodes| nodes.id_of(parent, name, &there));
            self.forget(ctx, id, 1);
        } else {
            self.inner.forget(ctx, inner, 1);
        }
    }
}

#[cfg(test)]
#[path = "stable_ids_test.rs"]
mod tests;
