//! The real guest: kernel, guest image, agent. Cold boot to acknowledged handshake, and the same guest thawed.
//!
//! Both have one vCPU and the same memory. The handshake ends both, and so a clone is only counted when it has new
//! entropy, clock and identity.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::net::SocketType;
use thaw_pools::vmm;
use thaw_protocol::control::{Backend, Command, DeviceId, MemoryMode};
use thaw_protocol::handshake::WARM;

use super::files::{Files, sealable};
use crate::boot::{MEMORY_MIB, cmdline, handshake, thaw::dial};
use crate::clock::{monotonic_ns, us_since};
use crate::vmm::{Vmm, every_device_but, open_kvm};

/// What machines are made with.
pub struct Host {
    kvm: File,
    kernel: File,
    guest_image: File,
    directory: PathBuf,
    log: OwnedFd,
    console: OwnedFd,
}

/// A frozen guest, which waited for its handshake.
pub struct Template {
    files: Files,
    working_set: Option<File>,
}

/// How far a clone is made before the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Nothing,
    Shell,
    Parked,
}

/// A guest whose handshake is acknowledged.
pub struct Ready {
    pub vmm: Vmm,
    /// From the claim to the acknowledgement.
    pub ms: f64,
    /// Page faults of its vCPU until then.
    pub faults: u64,
    /// KVM exits until then; none where the kernel does not tell.
    pub exits: Option<u64>,
}

impl Host {
    /// Opens what machines need; `directory` is for sockets and logs.
    pub fn open(kernel: &Path, guest_image: &Path, directory: &Path) -> io::Result<Host> {
        Ok(Host {
            kvm: open_kvm()?,
            kernel: File::open(kernel)?,
            guest_image: File::open(guest_image)?,
            directory: directory.into(),
            log: File::create(directory.join("thaw-vmm.log"))?.into(),
            console: File::create(directory.join("console.log"))?.into(),
        })
    }

    /// Boots a guest and shakes hands: spawn of its VMM to the acknowledgement.
    pub fn cold(&self) -> io::Result<Ready> {
        let start = monotonic_ns();
        let (vmm, vsock) = self.booted(&command_line())?;
        self.shake_hands(vmm, &vsock, start)
    }

    /// Boots a guest as templates are booted, and freezes it before its handshake.
    pub fn template(&self) -> io::Result<Template> {
        let (mut vmm, _vsock) = self.booted(&format!("{} {WARM}", command_line()))?;
        vmm.call(Command::Pause, &[])?;
        Ok(Template {
            files: Files::freeze(&mut vmm)?,
            working_set: None,
        })
    }

    /// A clone of `template`: from the claim, before which it was made as far as `start` says, to the acknowledgement.
    pub fn clone(&self, template: &Template, start: Start, use_working_set: bool) -> io::Result<Ready> {
        let vsock = Vsock::listen(&self.directory)?;
        let mut claimed = monotonic_ns();
        let mut vmm = Vmm::spawn(&self.directory, &self.log)?;
        vmm.create(&self.kvm, 1, MEMORY_MIB)?;
        if start != Start::Nothing {
            vmm.settle()?;
            claimed = monotonic_ns();
        }
        let working_set = template.working_set.as_ref().filter(|_| use_working_set);
        template.files.restore(&mut vmm, working_set, MemoryMode::Cow)?;
        self.attach(&mut vmm, &vsock)?;
        vmm.settle()?;
        if start == Start::Parked {
            claimed = monotonic_ns();
        }
        let thaw = Command::Thaw {
            memory_mib: MEMORY_MIB,
            empty: every_device_but(&USED),
        };
        vmm.call(thaw, &[])?;
        self.shake_hands(vmm, &vsock, claimed)
    }

    /// Records which pages a clone of `template` touches until its handshake is acknowledged.
    pub fn record_working_set(&self, template: &mut Template) -> io::Result<()> {
        let mut ready = self.clone(template, Start::Parked, false)?;
        let file = sealable("working-set")?;
        let pagemap = ready.vmm.pagemap()?;
        ready
            .vmm
            .call(Command::WorkingSet, &[file.as_fd(), pagemap.as_fd()])?;
        template.working_set = Some(file);
        Ok(())
    }

    /// A guest that has rung, and its vsock.
    fn booted(&self, command_line: &str) -> io::Result<(Vmm, Vsock)> {
        let vsock = Vsock::listen(&self.directory)?;
        let mut vmm = Vmm::spawn(&self.directory, &self.log)?;
        vmm.create(&self.kvm, 1, MEMORY_MIB)?;
        self.attach(&mut vmm, &vsock)?;
        vmm.settle()?;
        let boot = Command::Boot {
            cmdline: command_line.into(),
        };
        vmm.call(boot, &[self.kernel.as_fd()])?;
        vmm.doorbell()?;
        Ok((vmm, vsock))
    }

    /// Gives the devices in [`USED`] their backends.
    fn attach(&self, vmm: &mut Vmm, vsock: &Vsock) -> io::Result<()> {
        vmm.attach(DeviceId::Vsock, Backend::Vsock, vsock.listener.as_fd())?;
        vmm.attach(DeviceId::Pmem0, Backend::Pmem, self.guest_image.as_fd())?;
        vmm.attach(DeviceId::Console, Backend::Console, self.console.as_fd())
    }

    fn shake_hands(&self, mut vmm: Vmm, vsock: &Vsock, start: u64) -> io::Result<Ready> {
        handshake(dial(&vsock.path)?, MEMORY_MIB)?;
        let ms = us_since(start) / 1e3;
        let (_, faults) = vmm.status()?;
        let exits = exits(vmm.pid());
        Ok(Ready {
            vmm,
            ms,
            faults,
            exits,
        })
    }
}

fn command_line() -> String {
    cmdline("root=/dev/pmem0 rootflags=dax")
}

/// Devices that have a backend; the others have none.
const USED: [DeviceId; 3] = [DeviceId::Vsock, DeviceId::Pmem0, DeviceId::Console];

/// A listening socket, whose name is removed with it.
struct Vsock {
    listener: OwnedFd,
    path: PathBuf,
}

impl Vsock {
    fn listen(directory: &Path) -> io::Result<Vsock> {
        let path = directory.join("vsock");
        let listener = vmm::listen(&path, SocketType::STREAM).map_err(io::Error::other)?;
        Ok(Vsock { listener, path })
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The exits KVM counts in debugfs for the machine of process `pid`, whose directory is named by the thread that made it.
fn exits(pid: i32) -> Option<u64> {
    let threads: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .filter_map(|entry| Some(format!("{}-", entry.ok()?.file_name().to_str()?)))
        .collect();
    for machine in std::fs::read_dir("/sys/kernel/debug/kvm").ok()? {
        let machine = machine.ok()?;
        let name = machine.file_name();
        if threads
            .iter()
            .any(|thread| name.to_string_lossy().starts_with(thread))
        {
            let count = std::fs::read_to_string(machine.path().join("exits")).ok()?;
            return count.trim().parse().ok();
        }
    }
    None
}
