//! Controllers of cgroup v2: a directory has the files of those that every directory above it enables for its children
//! (Documentation/admin-guide/cgroup-v2.rst, "Enabling and Disabling").

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// The controllers that limit every sandbox, each with a file that shows that it is enabled.
pub(super) const ALWAYS: [(&str, &str); 2] = [("+memory", "memory.max"), ("+pids", "pids.max")];

/// Enables controllers for a directory of ours, two levels below the root, if the host allows it. If it does not, setting the limit names
/// the missing one.
pub(crate) fn enable(root: &Path, directory: &Path, controllers: &[(&str, &str)]) {
    for (controller, sign) in controllers {
        if directory.join(sign).exists() {
            continue;
        }
        for above in [Some(root), directory.parent()].into_iter().flatten() {
            let file = above.join("cgroup.subtree_control");
            if let Err(error) = write(&file, controller) {
                tracing::debug!("cannot write {controller} to {}: {error}", file.display());
            }
        }
    }
}

/// Writes to a file of the kernel; never creates one.
pub(crate) fn write(file: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .open(file)?
        .write_all(text.as_bytes())
}
