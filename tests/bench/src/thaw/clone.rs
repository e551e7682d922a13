//! The bare guest under thaw-vmm: its template, and clones of it in each state of readiness.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thaw_protocol::control::{Backend, Command, DeviceId, MemoryMode};
use thaw_sandbox::page_server::{FileSource, PageServer};
use thaw_sandbox::snapshot::Hash;
use thaw_sandbox::snapshot::manifest::{CHUNK, ChunkRun, ChunkedFile};
use thaw_tiny_guest::Guest;
use thaw_tiny_guest::bare::{READY, terse};

use super::files::Files;
use crate::clock::{monotonic_ns, us_since};
use crate::vmm::{Vmm, every_device_but, open_kvm};

/// How long a clone may be silent.
const PATIENCE: Duration = Duration::from_secs(60);

/// What clones are made of and with.
pub struct Template {
    pub memory_mib: u32,
    pub(super) files: Files,
    kvm: File,
    directory: PathBuf,
    log: OwnedFd,
}

/// A clone that has not run: its VMM, and the end of its console.
pub struct Clone {
    memory_mib: u32,
    pub vmm: Vmm,
    pub console: UnixStream,
}

impl Template {
    /// Boots a bare guest of `memory_mib`, all of which holds data if `filled`, and freezes it.
    pub fn build(memory_mib: u32, filled: bool, directory: &Path) -> io::Result<Template> {
        Template::of(&terse(if filled { memory_mib } else { 0 }), memory_mib, directory)
    }

    /// Boots `guest`, one of [`thaw_tiny_guest::bare`], and freezes it.
    pub fn of(guest: &Guest, memory_mib: u32, directory: &Path) -> io::Result<Template> {
        let kvm = open_kvm()?;
        let log: OwnedFd = File::create(directory.join(format!("thaw-vmm-{memory_mib}.log")))?.into();
        let mut vmm = Vmm::spawn(directory, &log)?;
        vmm.create(&kvm, 1, memory_mib)?;
        let (mut console, theirs) = UnixStream::pair()?;
        vmm.attach(DeviceId::Console, Backend::Console, theirs.as_fd())?;
        let kernel = guest.kernel();
        let boot = Command::Boot {
            cmdline: String::new(),
        };
        vmm.call(boot, &[kernel.as_fd()])?;
        let mut line = [0u8; READY.len()];
        console.read_exact(&mut line)?;
        vmm.call(Command::Pause, &[])?;
        let files = Files::freeze(&mut vmm)?;
        Ok(Template {
            memory_mib,
            files,
            kvm,
            directory: directory.into(),
            log,
        })
    }

    /// A process that has made its machine.
    pub fn shell(&self) -> io::Result<Vmm> {
        let mut vmm = self.asked_for_a_machine()?;
        vmm.settle()?;
        Ok(vmm)
    }

    /// A clone whose memory is as `mode` says, parked. The thread that serves its faults ends with it.
    pub fn parked_as(&self, mode: MemoryMode) -> io::Result<(Clone, Option<PageServer>)> {
        let mut vmm = self.shell()?;
        let server = match mode {
            MemoryMode::Cow | MemoryMode::Populate => {
                self.files.restore(&mut vmm, None, mode)?;
                None
            }
            MemoryMode::Uffd => {
                let (regions, userfaultfd) = self.files.restore_by_userfaultfd(&mut vmm)?;
                let broken = |why: String| eprintln!("a page server: {why}");
                let source = FileSource::new(self.files.memory().try_clone()?, &self.chunks()?);
                Some(PageServer::start(userfaultfd, &regions, source, broken)?)
            }
        };
        let console = self.console(&mut vmm)?;
        let mut clone = self.clone_of(vmm, console);
        clone.vmm.settle()?;
        Ok((clone, server))
    }

    /// A clone that waits for its thaw.
    pub fn parked(&self) -> io::Result<Clone> {
        let mut clone = self.asked_to_park()?;
        clone.vmm.settle()?;
        Ok(clone)
    }

    /// As [`Self::parked`], but everything asked is not answered yet, so that several can be made at a time.
    pub fn asked_to_park(&self) -> io::Result<Clone> {
        let mut vmm = self.asked_for_a_machine()?;
        let console = self.restore(&mut vmm)?;
        Ok(self.clone_of(vmm, console))
    }

    /// Thaw of a parked clone to its first byte, in microseconds.
    pub fn from_parked(&self) -> io::Result<f64> {
        let mut clone = self.parked()?;
        let start = monotonic_ns();
        clone.thaw()?;
        clone.first_byte()?;
        let taken = us_since(start);
        clone.vmm.settle()?;
        Ok(taken)
    }

    /// A shell and the template to the first byte, in microseconds.
    pub fn from_shell(&self) -> io::Result<f64> {
        let mut vmm = self.shell()?;
        let start = monotonic_ns();
        let console = self.restore(&mut vmm)?;
        let mut clone = self.clone_of(vmm, console);
        clone.thaw()?;
        clone.first_byte()?;
        let taken = us_since(start);
        clone.vmm.settle()?;
        Ok(taken)
    }

    /// Nothing to the first byte, in microseconds.
    pub fn from_nothing(&self) -> io::Result<f64> {
        let start = monotonic_ns();
        let mut vmm = self.asked_for_a_machine()?;
        let console = self.restore(&mut vmm)?;
        let mut clone = self.clone_of(vmm, console);
        clone.thaw()?;
        clone.first_byte()?;
        let taken = us_since(start);
        clone.vmm.settle()?;
        Ok(taken)
    }

    /// The hashes of its memory file.
    fn chunks(&self) -> io::Result<ChunkedFile> {
        let memory = self.files.memory();
        let bytes = memory.metadata()?.len();
        let mut blake3 = Vec::new();
        let mut chunk = vec![0; CHUNK as usize];
        for at in (0..bytes).step_by(CHUNK as usize) {
            let length = CHUNK.min(bytes - at) as usize;
            memory.read_exact_at(&mut chunk[..length], at)?;
            blake3.push(Hash::of(&chunk[..length]));
        }
        Ok(ChunkedFile {
            bytes,
            data_bytes: bytes,
            chunks: vec![ChunkRun { first: 0, blake3 }],
        })
    }

    fn clone_of(&self, vmm: Vmm, console: UnixStream) -> Clone {
        Clone {
            memory_mib: self.memory_mib,
            vmm,
            console,
        }
    }

    fn asked_for_a_machine(&self) -> io::Result<Vmm> {
        let mut vmm = Vmm::spawn(&self.directory, &self.log)?;
        vmm.create(&self.kvm, 1, self.memory_mib)?;
        Ok(vmm)
    }

    /// Asks `vmm` to load the template and gives its console a socket; our end of it.
    fn restore(&self, vmm: &mut Vmm) -> io::Result<UnixStream> {
        self.files.restore(vmm, None, MemoryMode::Cow)?;
        self.console(vmm)
    }

    /// Gives `vmm` a console: our end of it.
    fn console(&self, vmm: &mut Vmm) -> io::Result<UnixStream> {
        let (console, theirs) = UnixStream::pair()?;
        console.set_read_timeout(Some(PATIENCE))?;
        vmm.attach(DeviceId::Console, Backend::Console, theirs.as_fd())?;
        Ok(console)
    }
}

impl Clone {
    /// Asks for its thaw.
    pub fn thaw(&mut self) -> io::Result<()> {
        let thaw = Command::Thaw {
            memory_mib: self.memory_mib,
            empty: every_device_but(&[DeviceId::Console]),
        };
        self.vmm.ask(thaw, &[])
    }

    /// Waits for the first byte its guest writes, which it does when it sees another generation ID than when frozen.
    ///
    /// # Errors
    /// What the VMM refused, if the guest writes nothing.
    pub fn first_byte(&mut self) -> io::Result<()> {
        let mut byte = [0u8; 1];
        match self.console.read(&mut byte) {
            Ok(1) if byte == *b"\n" => Ok(()),
            Ok(1) => Err(io::Error::other(format!("the guest wrote {:#x}", byte[0]))),
            _ => Err(self.why_silent()),
        }
    }

    fn why_silent(&mut self) -> io::Error {
        match self.vmm.settle() {
            Err(why) => why,
            Ok(_) => io::Error::other("the VMM is content, but its guest writes nothing"),
        }
    }
}
