//! Merges layers into one tree, by the rules of the OCI image-spec (layer.md).
//!
//! Layers are applied bottom first, each in the order of its tar stream. A whiteout or an opaque mark hides names of *lower* layers and no
//! name of its own layer, regardless of its position in the stream. As containerd does, symbolic links in the directory part of a name are
//! followed inside the tree (an image whose `/lib` is a link to `usr/lib` may have an upper layer with `lib/x`), and a parent that no layer
//! describes is created with mode 0755 and owner root.

use std::collections::{BTreeMap, HashSet};

use thaw_imagefs::tree::{Attributes, Inode, InodeIndex, Kind, Tree};

use crate::layer::tree::{Change, LayerTree, Leaf};

/// Symbolic links followed in one name, as many as Linux follows.
const MAX_LINKS: usize = 40;
/// Components walked in one name, links included.
const MAX_STEPS: usize = 32 << 10;

/// Why layers cannot be merged. Layers count from 0, the bottom.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    #[error(
        "layer {layer}: \"{path}\" is a hard link to \"{target}\", which neither this layer has before it nor a lower one"
    )]
    MissingLinkTarget {
        layer: usize,
        path: String,
        target: String,
    },
    #[error("layer {layer}: \"{path}\" is a hard link to the directory \"{target}\"")]
    LinkToDirectory {
        layer: usize,
        path: String,
        target: String,
    },
    #[error("layer {layer}: a parent of \"{path}\" is not a directory")]
    NotADirectory { layer: usize, path: String },
    #[error("layer {layer}: \"{path}\" leads through more than 40 symbolic links or too long ones")]
    SymlinkLoop { layer: usize, path: String },
    #[error("the image has more than 2^32 inodes")]
    TooManyInodes,
}

/// Applies layers, bottom first. The extents' `blob` is the index of the layer whose data file has a file's data.
///
/// # Errors
/// If a layer does not fit on those below it; see [`MergeError`].
pub fn flatten(layers: &[LayerTree]) -> Result<Tree, MergeError> {
    let mut merger = Merger {
        tree: Tree::new(Attributes::implied_directory()),
        layer: 0,
        named: None,
        last_parent: None,
    };
    for (index, layer) in layers.iter().enumerate() {
        let hides = |change: &Change| matches!(change, Change::Whiteout | Change::Opaque);
        merger.layer = index;
        merger.named = layer
            .entries
            .iter()
            .any(|entry| hides(&entry.change))
            .then(HashSet::new);
        merger.last_parent = None;
        for entry in &layer.entries {
            merger.apply(&entry.path, &entry.change)?;
        }
    }
    Ok(merger.tree)
}

/// A directory and a name in it.
type Name = (InodeIndex, Box<[u8]>);

struct Merger {
    tree: Tree,
    layer: usize,
    /// The names that this layer added so far, including the directories on their paths. Kept only for a layer that hides names.
    named: Option<HashSet<Name>>,
    /// The directory part that was resolved last, because entries come in runs. Cleared when a name gets another inode.
    last_parent: Option<(Vec<u8>, InodeIndex)>,
}

/// The result of a walk.
enum Walk {
    Directory(InodeIndex),
    Missing,
    NotADirectory,
}

fn show(path: &[u8]) -> String {
    path.escape_ascii().to_string()
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

impl Merger {
    fn apply(&mut self, path: &[u8], change: &Change) -> Result<(), MergeError> {
        let (parent_path, name) = split(path);
        match change {
            Change::Whiteout => {
                if let Some(parent) = self.existing_directory(parent_path, path)? {
                    self.hide(parent, Some(name));
                }
                Ok(())
            }
            Change::Opaque => {
                if let Some(directory) = self.existing_directory(path, path)? {
                    self.hide(directory, None);
                }
                Ok(())
            }
            Change::Directory(attributes) if path.is_empty() => {
                self.tree.inodes[Tree::ROOT as usize].attributes = attributes.clone();
                Ok(())
            }
            Change::Directory(attributes) => {
                let parent = self.parent(parent_path, path)?;
                match self.child(parent, name) {
                    Some(index) if self.tree.entries(index).is_some() => {
                        self.tree.inodes[index as usize].attributes = attributes.clone();
                        self.remember(parent, name);
                    }
                    _ => {
                        let index = self.add(
                            attributes.clone(),
                            Kind::Directory {
                                entries: BTreeMap::new(),
                            },
                        )?;
                        self.set(parent, name, index);
                    }
                }
                Ok(())
            }
            Change::Leaf(attributes, leaf) => {
                let parent = self.parent(parent_path, path)?;
                let kind = match leaf.clone() {
                    Leaf::File { size, extents } => Kind::File {
                        size,
                        extents: extents
                            .into_iter()
                            .map(|extent| extent.of_blob(self.layer as u32))
                            .collect(),
                    },
                    Leaf::Symlink { target } => Kind::Symlink { target },
                    Leaf::CharDevice { major, minor } => Kind::CharDevice { major, minor },
                    Leaf::BlockDevice { major, minor } => Kind::BlockDevice { major, minor },
                    Leaf::Fifo => Kind::Fifo,
                    Leaf::Socket => Kind::Socket,
                };
                let index = self.add(attributes.clone(), kind)?;
                self.set(parent, name, index);
                Ok(())
            }
            Change::HardLink { target } => self.hard_link(path, target),
        }
    }

    fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), MergeError> {
        let (parent_path, name) = split(path);
        let (target_parent, target_name) = split(target);
        let found = match self.existing_directory(target_parent, path)? {
            Some(directory) => self.child(directory, target_name),
            None => None,
        };
        let Some(inode) = found else {
            return Err(MergeError::MissingLinkTarget {
                layer: self.layer,
                path: show(path),
                target: show(target),
            });
        };
        if self.tree.entries(inode).is_some() {
            return Err(MergeError::LinkToDirectory {
                layer: self.layer,
                path: show(path),
                target: show(target),
            });
        }
        let parent = self.parent(parent_path, path)?;
        self.set(parent, name, inode);
        Ok(())
    }

    fn child(&self, directory: InodeIndex, name: &[u8]) -> Option<InodeIndex> {
        self.tree.entries(directory)?.get(name).copied()
    }

    fn add(&mut self, attributes: Attributes, kind: Kind) -> Result<InodeIndex, MergeError> {
        let index = InodeIndex::try_from(self.tree.inodes.len()).map_err(|_| MergeError::TooManyInodes)?;
        self.tree.inodes.push(Inode { attributes, kind });
        Ok(index)
    }

    /// Gives a name to an inode and removes it from the inode that had it.
    fn set(&mut self, directory: InodeIndex, name: &[u8], inode: InodeIndex) {
        if let Kind::Directory { entries } = &mut self.tree.inodes[directory as usize].kind
            && entries.insert(name.into(), inode).is_some()
        {
            self.last_parent = None;
        }
        self.remember(directory, name);
    }

    fn remember(&mut self, directory: InodeIndex, name: &[u8]) {
        if let Some(named) = &mut self.named {
            named.insert((directory, name.into()));
        }
    }

    /// Removes names of lower layers: one name in a directory, or all. A directory that this layer also uses stays, without the lower
    /// layers' names.
    fn hide(&mut self, directory: InodeIndex, only: Option<&[u8]>) {
        self.last_parent = None;
        let empty = HashSet::new();
        let named = self.named.as_ref().unwrap_or(&empty);
        let mut shared = Vec::new();
        let mut pending = vec![directory];
        let mut only = only;
        while let Some(directory) = pending.pop() {
            let only = only.take();
            let Kind::Directory { entries } = &mut self.tree.inodes[directory as usize].kind else {
                continue;
            };
            entries.retain(|name, inode| {
                if only.is_some_and(|only| only != &**name) {
                    return true;
                }
                let stays = named.contains(&(directory, name.clone()));
                if stays {
                    shared.push(*inode);
                }
                stays
            });
            pending.append(&mut shared);
        }
    }

    /// The directory of an entry, which is created if it is missing.
    fn parent(&mut self, path: &[u8], entry: &[u8]) -> Result<InodeIndex, MergeError> {
        if let Some((last, index)) = &self.last_parent
            && last == path
        {
            return Ok(*index);
        }
        match self.walk(path, entry, true)? {
            Walk::Directory(index) => {
                self.last_parent = Some((path.to_vec(), index));
                Ok(index)
            }
            Walk::Missing | Walk::NotADirectory => Err(MergeError::NotADirectory {
                layer: self.layer,
                path: show(entry),
            }),
        }
    }

    /// The directory at a path, if there is one.
    fn existing_directory(&mut self, path: &[u8], entry: &[u8]) -> Result<Option<InodeIndex>, MergeError> {
        match self.walk(path, entry, false)? {
            Walk::Directory(index) => Ok(Some(index)),
            Walk::Missing | Walk::NotADirectory => Ok(None),
        }
    }

    /// Walks a path from the root and follows symbolic links inside the tree, where `..` stops at the root.
    fn walk(&mut self, path: &[u8], entry: &[u8], make: bool) -> Result<Walk, MergeError> {
        let layer = self.layer;
        let too_far = || MergeError::SymlinkLoop {
            layer,
            path: show(entry),
        };
        let components = |path: &[u8]| -> Vec<Box<[u8]>> {
            let parts = path
                .split(|byte| *byte == b'/')
                .filter(|part| !matches!(*part, b"" | b"."));
            parts.rev().map(Box::from).collect()
        };
        // Reversed: the next component is last.
        let mut pending = components(path);
        let mut trail = vec![Tree::ROOT];
        let (mut links, mut steps) = (0, 0);
        while let Some(name) = pending.pop() {
            steps += 1;
            if steps > MAX_STEPS {
                return Err(too_far());
            }
            let directory = trail.last().copied().unwrap_or(Tree::ROOT);
            if *name == *b".." {
                trail.pop();
                if trail.is_empty() {
                    trail.push(Tree::ROOT);
                }
                continue;
            }
            let Some(child) = self.child(directory, &name) else {
                if !make {
                    return Ok(Walk::Missing);
                }
                let kind = Kind::Directory {
                    entries: BTreeMap::new(),
                };
                let child = self.add(Attributes::implied_directory(), kind)?;
                self.set(directory, &name, child);
                trail.push(child);
                continue;
            };
            match &self.tree.inode(child).kind {
                Kind::Directory { .. } => {
                    trail.push(child);
                    if make {
                        self.remember(directory, &name);
                    }
                }
                Kind::Symlink { target } => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(too_far());
                    }
                    if target.starts_with(b"/") {
                        trail.truncate(1);
                    }
                    pending.append(&mut components(target));
                }
                _ => return Ok(Walk::NotADirectory),
            }
        }
        Ok(Walk::Directory(trail.last().copied().unwrap_or(Tree::ROOT)))
    }
}

#[cfg(test)]
#[path = "merge_test.rs"]
mod tests;
