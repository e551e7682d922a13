//! A container's cgroup (Documentation/admin-guide/cgroup-v2.rst): its limits, freezer, kill switch and
//! processes.
//!
//! The specification has the values of cgroup v1; they are converted as runc does. The devices controller is
//! not applied, because all devices of this guest belong to the sandbox (docs/agent-api.md).

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::retry_on_intr;
use thaw_protocol::agent::oci;

use crate::error::{Error, Result, WithContext};
use crate::warning;

/// Mount point of the hierarchy.
pub const ROOT: &str = "/sys/fs/cgroup";

/// The cgroup in which a container that manages its own cgroups begins: one that has children with controllers must have no process itself.
/// systemd gives its own cgroup this name, so it finds what it would make.
const FIRST: &str = "init.scope";

/// Enables every controller of `path`'s cgroup for its children. A controller that cannot be enabled is
/// skipped; a limit that needs it fails later and names it.
pub fn enable_controllers(path: &Path) -> Result<()> {
    let dir = Path::new(ROOT).join(path);
    let controllers = dir.join("cgroup.controllers");
    let list = fs::read_to_string(&controllers).with_context(|| format!("read {}", controllers.display()))?;
    for controller in list.split_whitespace() {
        if let Err(e) = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}")) {
            warning!("cgroup {}: enable {controller}: {e}", dir.display());
        }
    }
    Ok(())
}

/// One container's cgroup.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Creates the cgroup and its ancestors, with their controllers enabled.
    pub fn create(relative: &Path) -> Result<Self> {
        let mut at = PathBuf::new();
        let mut parts = relative.components().peekable();
        while let Some(part) = parts.next() {
            at.push(part);
            let dir = Path::new(ROOT).join(&at);
            match fs::create_dir(&dir) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| format!("create cgroup {}", dir.display())),
            }
            if parts.peek().is_some() {
                enable_controllers(&at)?;
            }
        }
        Ok(Cgroup {
            path: Path::new(ROOT).join(relative),
        })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens `cgroup.procs` for writing: a process joins by writing 0 to it.
    pub fn open_procs(&self) -> Result<OwnedFd> {
        let path = self.path.join("cgroup.procs");
        rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
            .with_context(|| format!("open {}", path.display()))
    }

    /// Creates the cgroup in which a container that manages its own cgroups begins, and opens its `cgroup.procs`.
    pub fn open_first(&self) -> Result<OwnedFd> {
        let path = self.path.join(FIRST);
        fs::create_dir(&path).with_context(|| format!("create cgroup {}", path.display()))?;
        Cgroup { path }.open_procs()
    }

    /// Enables every controller for the cgroups below it. No process may be in it itself.
    pub fn enable_below(&self) -> Result<()> {
        let relative = self.path.strip_prefix(ROOT).unwrap_or(&self.path);
        enable_controllers(relative)
    }

    /// Opens `cgroup.procs` of the cgroup of process `pid`, if that is below this one: the container may have moved the process since its start.
    pub fn open_procs_of(&self, pid: i32) -> Result<OwnedFd> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        match below(&self.path, &text) {
            Some(path) => Cgroup { path }.open_procs(),
            None => self.open_procs(),
        }
    }

    /// Sets the limits.
    pub fn apply(&self, resources: &oci::LinuxResources) -> Result<()> {
        for (file, value) in settings(resources)? {
            self.write(&file, &value)?;
        }
        if let Some(weight) = resources.BlockIO.as_ref().map(|b| b.Weight).filter(|w| *w != 0) {
            // Which of the files exists depends on the I/O scheduler.
            if self.path.join("io.bfq.weight").exists() {
                self.write("io.bfq.weight", &weight.to_string())?;
            } else {
                self.write("io.weight", &io_weight(weight).to_string())?;
            }
        }
        Ok(())
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        // Without O_CREAT, because a missing file must cause an error.
        let written = fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|mut file| file.write_all(value.as_bytes()));
        match written {
            Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::Unsupported(format!(
                "{file} = {value}: this guest kernel has no such limit (its controller is not built in)"
            ))),
            other => other.with_context(|| format!("write {value:?} to {}", path.display())),
        }
    }

    /// Reads one of its files, if that exists.
    pub fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.path.join(file)).ok()
    }

    /// The number in the line of `key` in a flat keyed file.
    pub fn read_key(&self, file: &str, key: &str) -> Option<u64> {
        keyed(&self.read(file)?, key)
    }

    /// The processes in it and below.
    pub fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        let mut pending = vec![self.path.clone()];
        while let Some(dir) = pending.pop() {
            if let Ok(text) = fs::read_to_string(dir.join("cgroup.procs")) {
                found.extend(
                    text.lines()
                        .filter_map(|l| l.parse::<i32>().ok())
                        .filter(|pid| *pid > 0),
                );
            }
            pending.extend(subdirectories(&dir));
        }
        found
    }

    /// Kills every process in it and below, including those that are being forked.
    pub fn kill(&self) -> Result<()> {
        self.write("cgroup.kill", "1")
    }

    /// Freezes or thaws all its processes.
    pub fn freeze(&self, frozen: bool) -> Result<()> {
        self.write("cgroup.freeze", if frozen { "1" } else { "0" })
    }

    /// Whether freezing was requested, even if not all processes are frozen yet.
    pub fn is_told_to_freeze(&self) -> Result<bool> {
        let path = self.path.join("cgroup.freeze");
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(text.trim() == "1")
    }

    /// Reads `cgroup.events`.
    pub fn events(&self) -> Events {
        let text = self.read("cgroup.events").unwrap_or_default();
        Events {
            populated: keyed(&text, "populated") == Some(1),
            frozen: keyed(&text, "frozen") == Some(1),
        }
    }

    /// Opens one of its files for waiting: POLLPRI signals a change.
    pub fn open_events(&self, file: &str) -> Result<OwnedFd> {
        let path = self.path.join(file);
        rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .with_context(|| format!("open {}", path.display()))
    }

    /// Kills all its processes and waits until it is empty, at most five seconds. Blocks.
    pub fn kill_and_wait(&self) -> Result<()> {
        let events = self.open_events("cgroup.events")?;
        self.kill()?;
        let most = rustix::time::Timespec {
            tv_sec: 5,
            tv_nsec: 0,
        };
        while self.events().populated {
            let mut buffer = [0u8; 128];
            // Reading re-arms the kernel's notification.
            let _ = rustix::io::pread(&events, &mut buffer, 0);
            if !self.events().populated {
                break;
            }
            let mut polled = [PollFd::new(&events, PollFlags::PRI)];
            // The SIGCHLD of an ended process interrupts `poll`, which the kernel never restarts (signal(7)).
            let changed = retry_on_intr(|| poll(&mut polled, Some(&most)));
            if changed.with_context(|| "wait for a cgroup to empty".into())? == 0 {
                return Err(Error::State(format!(
                    "processes {:?} did not end",
                    self.processes()
                )));
            }
        }
        Ok(())
    }

    /// Removes it and the cgroups its processes created below it. It must be empty.
    pub fn remove(&self) -> Result<()> {
        remove_tree(&self.path)
    }
}

/// The contents of `cgroup.events`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Events {
    pub populated: bool,
    pub frozen: bool,
}

/// The directory of the cgroup that `/proc/PID/cgroup` names, if it is below `path`.
fn below(path: &Path, proc_cgroup: &str) -> Option<PathBuf> {
    let relative = proc_cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let is_plain = Path::new(relative)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let found = Path::new(ROOT).join(relative);
    (is_plain && found.starts_with(path)).then_some(found)
}

fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|l| {
        l.split_once(' ')
            .filter(|(k, _)| *k == key)?
            .1
            .trim()
            .parse()
            .ok()
    })
}

fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| e.path())
        .collect()
}

fn remove_tree(dir: &Path) -> Result<()> {
    for child in subdirectories(dir) {
        remove_tree(&child)?;
    }
    match fs::remove_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other.with_context(|| format!("remove cgroup {}", dir.display())),
    }
}

/// The file and value of every limit that is set.
fn settings(r: &oci::LinuxResources) -> Result<Vec<(String, String)>> {
    let mut set: Vec<(String, String)> = Vec::new();
    let mut push = |file: &str, value: String| set.push((file.to_owned(), value));
    if let Some(m) = r.Memory.as_ref() {
        if m.Limit != 0 {
            push("memory.max", limit(m.Limit));
        }
        if let Some(swap) = swap_max(m.Limit, m.Swap)? {
            push("memory.swap.max", swap);
        }
        if m.Reservation != 0 {
            push("memory.low", limit(m.Reservation));
        }
    }
    if let Some(c) = r.CPU.as_ref() {
        if c.Shares != 0 {
            push("cpu.weight", cpu_weight(c.Shares).to_string());
        }
        if c.Quota != 0 || c.Period != 0 {
            let quota = if c.Quota > 0 {
                c.Quota.to_string()
            } else {
                "max".into()
            };
            let period = if c.Period == 0 { 100_000 } else { c.Period };
            push("cpu.max", format!("{quota} {period}"));
        }
        if !c.Cpus.is_empty() {
            push("cpuset.cpus", c.Cpus.clone());
        }
        if !c.Mems.is_empty() {
            push("cpuset.mems", c.Mems.clone());
        }
    }
    if let Some(p) = r.Pids.as_ref().filter(|p| p.Limit != 0) {
        push("pids.max", limit(p.Limit));
    }
    if let Some(b) = r.BlockIO.as_ref() {
        for (key, devices) in [
            ("rbps", &b.ThrottleReadBpsDevice),
            ("wbps", &b.ThrottleWriteBpsDevice),
            ("riops", &b.ThrottleReadIOPSDevice),
            ("wiops", &b.ThrottleWriteIOPSDevice),
        ] {
            for d in devices {
                let rate = if d.Rate == 0 {
                    "max".into()
                } else {
                    d.Rate.to_string()
                };
                push("io.max", format!("{}:{} {key}={rate}", d.Major, d.Minor));
            }
        }
    }
    for h in &r.HugepageLimits {
        if h.Pagesize.is_empty() || !h.Pagesize.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(Error::Invalid(format!(
                "{:?} is not a huge page size",
                h.Pagesize
            )));
        }
        push(&format!("hugetlb.{}.max", h.Pagesize), h.Limit.to_string());
    }
    let mut named: Vec<_> = r.Unified.iter().collect();
    named.sort();
    for (file, value) in named {
        check_named(file)?;
        push(file, value.clone());
    }
    Ok(set)
}

/// Checks that a specification may set a file: it must be a controller's, in the cgroup itself. The agent
/// manages the container through the files of no controller (`cgroup.…`).
fn check_named(file: &str) -> Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let controller = file.split_once('.').map_or("", |(controller, _)| controller);
    match file.bytes().all(plain) && !controller.is_empty() && controller != "cgroup" {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "{file:?} is not a file of a cgroup controller, as unified resources require"
        ))),
    }
}

fn limit(n: i64) -> String {
    if n < 0 { "max".into() } else { n.to_string() }
}

/// The swap limit of v1 includes memory; that of v2 does not.
fn swap_max(memory: i64, both: i64) -> Result<Option<String>> {
    match (memory, both) {
        (_, 0) => Ok(None),
        (_, b) if b < 0 => Ok(Some("max".into())),
        (m, b) if m > 0 && b >= m => Ok(Some((b - m).to_string())),
        (m, b) => Err(Error::Invalid(format!(
            "memory and swap limit {b} is below the memory limit {m}, or that is not set"
        ))),
    }
}

/// Converts shares of 2..=262144 to a weight of 1..=10000, as runc does.
fn cpu_weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// Converts a weight of 10..=1000 to one of 1..=10000.
fn io_weight(weight: u32) -> u64 {
    1 + (u64::from(weight.clamp(10, 1000)) - 10) * 9999 / 990
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::agent::MessageField;

    #[test]
    fn weights_keep_minimum_and_maximum() {
        assert_eq!(
            [
                cpu_weight(2),
                cpu_weight(1024),
                cpu_weight(262_144),
                cpu_weight(u64::MAX)
            ],
            [1, 39, 10_000, 10_000]
        );
        assert_eq!([io_weight(10), io_weight(1000)], [1, 10_000]);
    }

    #[test]
    fn cgroup_of_a_process_is_used_below_the_containers() {
        let container = Path::new("/sys/fs/cgroup/c");
        let found = |text: &str| below(container, text);
        assert_eq!(found("0::/c/init.scope\n"), Some(container.join("init.scope")));
        assert_eq!(found("1:cpu:/\n0::/c\n"), Some(container.to_path_buf()));
        for elsewhere in ["0::/other", "0::/", "0::/c/../other", "0::/cc", "1:cpu:/c", ""] {
            assert_eq!(found(elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    fn limits_become_v2_files() {
        let mut r = oci::LinuxResources::new();
        r.Memory = MessageField::some(oci::LinuxMemory {
            Limit: 64 << 20,
            Swap: 96 << 20,
            ..Default::default()
        });
        r.CPU = MessageField::some(oci::LinuxCPU {
            Quota: 150_000,
            Period: 100_000,
            Cpus: "0-1".into(),
            ..Default::default()
        });
        r.Pids = MessageField::some(oci::LinuxPids {
            Limit: -1,
            ..Default::default()
        });
        let got = settings(&r).unwrap();
        let got: Vec<(&str, &str)> = got.iter().map(|(f, v)| (f.as_str(), v.as_str())).collect();
        assert_eq!(
            got,
            [
                ("memory.max", "67108864"),
                ("memory.swap.max", "33554432"),
                ("cpu.max", "150000 100000"),
                ("cpuset.cpus", "0-1"),
                ("pids.max", "max"),
            ]
        );
    }

    #[test]
    fn unified_files_are_written_last_and_of_controllers() {
        let named = |file: &str| oci::LinuxResources {
            Pids: MessageField::some(oci::LinuxPids {
                Limit: 7,
                ..Default::default()
            }),
            Unified: [(file.to_owned(), "1".to_owned())].into(),
            ..Default::default()
        };
        let set = settings(&named("memory.oom.group")).unwrap();
        assert_eq!(set[1], ("memory.oom.group".into(), "1".into()));
        for file in [
            "",
            "memory",
            ".max",
            "cgroup.procs",
            "cgroup.kill",
            "../memory.max",
            "a/memory.max",
            "memory.m\0",
        ] {
            assert!(
                matches!(settings(&named(file)), Err(Error::Invalid(_))),
                "{file:?}"
            );
        }
    }

    #[test]
    fn a_swap_limit_below_the_memory_limit_is_refused() {
        assert!(swap_max(10, 5).is_err());
        assert!(swap_max(0, 5).is_err());
        assert_eq!(swap_max(10, -1).unwrap().as_deref(), Some("max"));
    }
}
