//! A snapshot's files, in memory and sealed as `thawd` keeps those of a template.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use thaw_protocol::control::{Command, FreezeKind, MappedRegion, MemoryMode, Response};

use crate::vmm::Vmm;

/// Name of the memory file, as `/proc/PID/smaps` shows it.
pub const MEMORY: &str = "template-memory";

const USERFAULTFD: &str = "/dev/userfaultfd";

/// State and memory.
pub struct Files {
    state: File,
    memory: File,
}

impl Files {
    /// Freezes a paused machine.
    pub fn freeze(vmm: &mut Vmm) -> io::Result<Files> {
        let (state, memory) = (sealable("template-state")?, sealable(MEMORY)?);
        let pagemap = vmm.pagemap()?;
        let freeze = Command::Freeze {
            kind: FreezeKind::Full,
        };
        vmm.call(freeze, &[state.as_fd(), memory.as_fd(), pagemap.as_fd()])?;
        for file in [&state, &memory] {
            let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            fcntl_add_seals(file, seals)?;
        }
        Ok(Files { state, memory })
    }

    /// The memory file.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// Loads them by another process, which fills each page over `/dev/userfaultfd`: the regions to fill, and the userfaultfd.
    pub fn restore_by_userfaultfd(&self, vmm: &mut Vmm) -> io::Result<(Vec<MappedRegion>, OwnedFd)> {
        let device = File::options().read(true).write(true).open(USERFAULTFD)?;
        let restore = Command::Restore {
            // The memory file, which is not sent.
            layers: 1,
            working_set: false,
            mode: MemoryMode::Uffd,
        };
        let (response, mut fds) = vmm.call_for_descriptors(restore, &[self.state.as_fd(), device.as_fd()])?;
        match (response, fds.pop()) {
            (Response::Restored { regions, .. }, Some(userfaultfd)) => Ok((regions, userfaultfd)),
            (other, _) => Err(io::Error::other(format!("a restore was answered {other:?}"))),
        }
    }

    /// Asks `vmm` to load them.
    pub fn restore(&self, vmm: &mut Vmm, working_set: Option<&File>, mode: MemoryMode) -> io::Result<()> {
        let restore = Command::Restore {
            layers: 1,
            working_set: working_set.is_some(),
            mode,
        };
        let mut files: Vec<BorrowedFd<'_>> = vec![self.state.as_fd(), self.memory.as_fd()];
        files.extend(working_set.map(AsFd::as_fd));
        vmm.ask(restore, &files)
    }
}

/// An empty file in memory.
pub fn sealable(name: &str) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(memfd_create(name, flags)?))
}
