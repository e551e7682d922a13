//! A network namespace of its own, which ends with its value.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::thread::LinkNameSpaceType;

/// A network namespace.
pub struct Namespace {
    /// Keeps it.
    holder: Child,
}

impl Namespace {
    /// Makes one. Takes root, and unshare(1).
    pub fn make() -> Result<Namespace, String> {
        let holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("unshare: {e}"))?;
        let mut made = Namespace { holder };
        // It is there once it says so.
        let said = made
            .holder
            .stdout
            .as_mut()
            .map(|said| std::io::Read::read(said, &mut [0]));
        match said {
            Some(Ok(1)) => Ok(made),
            _ => Err("unshare: it makes no network namespace".into()),
        }
    }

    /// A process in it.
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// Does `work` on a thread in it. Sockets that it makes stay there.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, String> {
        let failed = |e: rustix::io::Errno| format!("enter a network namespace: {e}");
        let path = format!("/proc/{}/ns/net", self.pid());
        let open = OFlags::RDONLY | OFlags::CLOEXEC;
        let namespace: OwnedFd = rustix::fs::open(path, open, Mode::empty()).map_err(failed)?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let kind = Some(LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).map_err(failed)?;
                Ok(work())
            });
            thread
                .join()
                .unwrap_or_else(|_| Err("it panicked in a network namespace".into()))
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
