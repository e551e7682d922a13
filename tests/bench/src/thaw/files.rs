//! A snapshot's files, in memory and sealed as `thawd` keeps those of a template.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use thaw_protocol::control::{Command, FreezeKind, MemoryMode};

use crate::vmm::Vmm;

/// Name of the memory file, as `/proc/PID/smaps` shows it.
pub const MEMORY: &str = "template-memory";

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

    /// Asks `vmm` to load them.
    pub fn restore(&self, vmm: &mut Vmm, working_set: Option<&File>) -> io::Result<()> {
        let restore = Command::Restore {
            layers: 1,
            working_set: working_set.is_some(),
            mode: MemoryMode::Cow,
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
