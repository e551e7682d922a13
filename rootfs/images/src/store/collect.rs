//! Garbage collection: removes leftovers of killed processes, layers that no image has, and references that point to no image.

use std::collections::HashSet;
use std::path::Path;

use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::digest::Digest;

use crate::error::Error;

use super::record::Record;
use super::{PARTIAL, REMOVED, Store};

impl Store {
    /// Collects garbage unless a layer or an image is being created; a later call then does it.
    pub(crate) fn collect_if_idle(&self) -> Result<(), Error> {
        match self.try_lock("store")? {
            Some(_store) => self.collect(),
            None => Ok(()),
        }
    }

    /// Removes everything unneeded. The `store` lock is held exclusively.
    pub(super) fn collect(&self) -> Result<(), Error> {
        let mut images = HashSet::new();
        let mut layers = HashSet::new();
        for digest in self.names("images")? {
            let directory = self.image_directory(&digest);
            match Record::read(&directory)? {
                Some(record) => {
                    images.insert(digest);
                    layers.extend(record.layers.iter().map(|layer| layer.key));
                }
                // Of another version or torn, and therefore useless.
                None => self.remove_directory(&directory)?,
            }
        }
        for kind in ["images", "layers"] {
            for name in self.entries(kind)? {
                let unneeded = match Digest::from_hex(&name) {
                    Some(digest) => kind == "layers" && !layers.contains(&digest),
                    None => name.ends_with(PARTIAL) || name.ends_with(REMOVED),
                };
                if unneeded {
                    self.remove_directory(&self.root.join(kind).join(name))?;
                }
            }
        }
        for name in self.entries("refs")? {
            let target = self.reference_target(&name)?;
            if !target.is_some_and(|digest| images.contains(&digest)) {
                remove_file(&self.root.join("refs").join(name))?;
            }
        }
        self.collect_locks(&images, &layers)
    }

    /// Removes lock files of images and layers that no longer exist. It leaves alone those of readers that look at a layer without the
    /// `store` lock.
    fn collect_locks(&self, images: &HashSet<Digest>, layers: &HashSet<Digest>) -> Result<(), Error> {
        for name in self.entries("locks")? {
            let needed = match name.split_once('-') {
                Some(("layer", hex)) => Digest::from_hex(hex).is_some_and(|it| layers.contains(&it)),
                Some(("image", hex)) => Digest::from_hex(hex).is_some_and(|it| images.contains(&it)),
                _ => name == "store",
            };
            if !needed && let Some(_held) = self.try_lock(&name)? {
                remove_file(&self.root.join("locks").join(&name))?;
            }
        }
        Ok(())
    }

    /// Renames a directory away, so that it is never seen half removed, then removes it.
    pub(super) fn remove_directory(&self, path: &Path) -> Result<(), Error> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        if !name.to_string_lossy().ends_with(REMOVED) {
            name.push(REMOVED);
        }
        let removed = path.with_file_name(name);
        if removed != path {
            let _ = std::fs::remove_dir_all(&removed);
            std::fs::rename(path, &removed).map_err(|error| Error::io(path, error))?;
            reach(Failpoint::StoreDirectoryDoomed);
        }
        std::fs::remove_dir_all(&removed).map_err(|error| Error::io(&removed, error))?;
        reach(Failpoint::StoreDirectoryRemoved);
        Ok(())
    }
}

fn remove_file(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, error)),
        _ => {
            reach(Failpoint::StoreFileRemoved);
            Ok(())
        }
    }
}
