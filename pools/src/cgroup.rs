//! A cgroup for one sandbox: `/thaw/<name>` in the unified hierarchy, or in each of a few v1 hierarchies.
//!
//! If the host does not allow one, that is not an error but a reason ([`Unavailable`]): the sandbox runs in its caller's cgroup.
//!
//! A name that begins with a slash is a foreign cgroup, below each hierarchy's root: containerd made it for a pod. Every other name is ours
//! and identifies the process that created the cgroup: `<pid>.<start time>.<number>`. It does not contain the sandbox, because cgroups are
//! created ahead of time and cgroup v2 cannot rename. Invariant: a cgroup is in the record of its sandbox, or its creator is alive, or
//! [`Hierarchy::sweep`] removes it. The kernel does not remove a cgroup with processes.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::process::ProcessRecord;
use crate::resource::{Kind, Unfit};
use thaw_failpoint::{Failpoint, reach};
use thaw_sys::backoff::Backoff;

pub(crate) mod controllers;

/// The v1 controllers that a sandbox is put under, if they are mounted.
const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Directory of all sandboxes, under each hierarchy's root.
const PARENT: &str = "thaw";
/// How long to wait until the kernel counts no process of a cgroup that was killed.
const LIMIT: Duration = Duration::from_secs(5);
/// Pauses between attempts to remove a v1 cgroup.
const PAUSES: Backoff = Backoff {
    first: Duration::from_millis(1),
    longest: Duration::from_millis(32),
};

/// The cgroup hierarchies of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// cgroup v2, mounted here with the controllers we need.
    V2 { root: PathBuf, favordynmods: bool },
    /// cgroup v1: where each controller is mounted.
    V1 { roots: Vec<PathBuf> },
    /// No cgroup file system is mounted.
    None,
}

/// Why a sandbox has no cgroup of its own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no cgroup of its own: {0}")]
pub struct Unavailable(pub String);

/// One sandbox's cgroup. Dropping it without [`Cgroup::destroy`] leaves the directories.
#[derive(Debug)]
pub struct Cgroup {
    name: String,
    directories: Vec<PathBuf>,
}

impl Hierarchy {
    /// Reads which hierarchies are mounted.
    pub fn detect() -> Hierarchy {
        fs::read_to_string("/proc/self/mountinfo").map_or(Hierarchy::None, |text| Hierarchy::parse(&text))
    }

    /// `/proc/self/mountinfo` (proc(5)): fields before ` - ` are ours, after it the filesystem's.
    fn parse(mountinfo: &str) -> Hierarchy {
        let mut v1: Vec<(usize, PathBuf)> = Vec::new();
        let mut v2 = None;
        for line in mountinfo.lines() {
            let Some((ours, theirs)) = line.split_once(" - ") else {
                continue;
            };
            let Some(place) = ours.split(' ').nth(4) else {
                continue;
            };
            let mut theirs = theirs.split(' ');
            let (kind, options) = (theirs.next().unwrap_or(""), theirs.nth(1).unwrap_or(""));
            match kind {
                "cgroup2" => {
                    v2 = Some((
                        PathBuf::from(place),
                        options.split(',').any(|o| o == "favordynmods"),
                    ))
                }
                "cgroup" => {
                    let ours = options
                        .split(',')
                        .filter_map(|o| V1_CONTROLLERS.iter().position(|c| *c == o))
                        .min();
                    if let Some(rank) = ours {
                        v1.push((rank, PathBuf::from(place)));
                    }
                }
                _ => {}
            }
        }
        // In the hybrid set-up v2 is mounted too, but the controllers are in v1.
        match (v1.is_empty(), v2) {
            (true, Some((root, favordynmods))) => Hierarchy::V2 { root, favordynmods },
            (true, None) => Hierarchy::None,
            (false, _) => {
                v1.sort();
                Hierarchy::V1 {
                    roots: v1.into_iter().map(|(_, place)| place).collect(),
                }
            }
        }
    }

    fn roots(&self) -> &[PathBuf] {
        match self {
            Hierarchy::V2 { root, .. } => std::slice::from_ref(root),
            Hierarchy::V1 { roots } => roots,
            Hierarchy::None => &[],
        }
    }

    /// Creates the cgroup with this name.
    pub fn make(&self, name: &str) -> Result<Cgroup, Unavailable> {
        if self.roots().is_empty() {
            return Err(Unavailable("no cgroup hierarchy is mounted".into()));
        }
        let mut made = Cgroup {
            name: name.into(),
            directories: Vec::new(),
        };
        for root in self.roots() {
            let directory = directory(root, name);
            if let Err(e) = make_under_parent(&directory) {
                made.destroy();
                return Err(Unavailable(format!("cannot create {}: {e}", directory.display())));
            }
            if let (Hierarchy::V2 { .. }, true) = (self, made.is_ours()) {
                controllers::enable(root, &directory, &controllers::ALWAYS);
            }
            made.directories.push(directory);
            reach(Failpoint::CgroupDirectoryMade);
        }
        Ok(made)
    }

    /// The cgroup with this name, which another process made: those of its directories that exist.
    pub fn adopt(&self, name: &str) -> Cgroup {
        let directories = self
            .roots()
            .iter()
            .map(|r| directory(r, name))
            .filter(|d| d.is_dir())
            .collect();
        Cgroup {
            name: name.into(),
            directories,
        }
    }

    /// The names of all cgroups of Thaw in any hierarchy.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .roots()
            .iter()
            .filter_map(|r| fs::read_dir(r.join(PARENT)).ok())
            .flatten()
            .filter_map(|e| e.ok())
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .filter_map(|e| e.file_name().into_string().ok())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Removes cgroups whose makers are dead, unless they have processes. Returns how many.
    pub fn sweep(&self) -> usize {
        let dead = |name: &String| parse_name(name).is_some_and(|(maker, _)| !maker.lives());
        let mut removed = 0;
        for name in self.names().into_iter().filter(dead) {
            let cgroup = self.adopt(&name);
            // Does not wait for its processes, which others may need.
            let removals: Vec<bool> = cgroup
                .directories
                .iter()
                .map(|d| {
                    fs::remove_dir(d)
                        .inspect(|()| reach(Failpoint::CgroupSwept))
                        .is_ok()
                })
                .collect();
            removed += usize::from(removals.into_iter().any(|r| r));
            cgroup.remove_parents();
        }
        removed
    }
}

/// The directory of the cgroup with this name in a hierarchy.
fn directory(root: &Path, name: &str) -> PathBuf {
    match name.strip_prefix('/') {
        Some(place) => root.join(place),
        None => root.join(PARENT).join(name),
    }
}

/// The name of a process's `number`th cgroup.
fn name(maker: ProcessRecord, number: u64) -> String {
    format!("{}.{}.{number}", maker.pid, maker.start_time)
}

/// The process that created the cgroup with this name, and its number.
fn parse_name(name: &str) -> Option<(ProcessRecord, u64)> {
    let mut parts = name.split('.');
    let maker = ProcessRecord {
        pid: parts.next()?.parse().ok()?,
        start_time: parts.next()?.parse().ok()?,
    };
    let number = parts.next()?.parse().ok()?;
    parts.next().is_none().then_some((maker, number))
}

/// The parent is removed with its last child, so another may remove it between our two steps.
fn make_under_parent(directory: &Path) -> io::Result<()> {
    let mut result = Ok(());
    for _ in 0..8 {
        result = fs::create_dir_all(directory);
        match &result {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            _ => break,
        }
    }
    result
}

impl Cgroup {
    /// Its name, by which [`Hierarchy::adopt`] finds it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether Thaw made it: it is not a foreign cgroup.
    pub fn is_ours(&self) -> bool {
        !self.name.starts_with('/')
    }

    /// The directories, one per hierarchy.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// How many of its processes the kernel has OOM-killed, by its limit or the host's: `oom_kill` of `memory.events` (cgroup v2)
    /// or `memory.oom_control` (v1). 0 if neither file exists.
    pub fn oom_kills(&self) -> u64 {
        let of = |directory: &PathBuf| {
            let files = ["memory.events", "memory.oom_control"].map(|name| directory.join(name));
            files
                .iter()
                .find_map(|file| parse_oom_kills(&fs::read_to_string(file).ok()?))
        };
        self.directories.iter().find_map(of).unwrap_or(0)
    }

    /// Moves a process into it.
    pub fn add(&self, pid: i32) -> io::Result<()> {
        for directory in &self.directories {
            fs::write(directory.join("cgroup.procs"), pid.to_string())?;
            reach(Failpoint::CgroupEntered);
        }
        Ok(())
    }

    /// Moves every process of another cgroup into it. Before Linux 6.14 the kernel runs a worker process for each VM, in the cgroup that
    /// the VMM was in at creation (`kvm_vm_create_worker_thread`); left there, it would keep the other cgroup from being removed.
    pub fn take_from(&self, other: &Cgroup) {
        for (own, others) in self.directories.iter().zip(&other.directories) {
            let listed = fs::read_to_string(others.join("cgroup.procs")).unwrap_or_default();
            for pid in listed.lines() {
                // A process that has ended need not be moved.
                let _ = fs::write(own.join("cgroup.procs"), pid);
            }
        }
    }

    /// Removes it. Its processes must have been killed. Blocks until the kernel no longer counts any of them, so callers must not wait for
    /// it.
    pub fn destroy(self) {
        for directory in &self.directories {
            if let Err(e) = remove(directory)
                && e.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!("cannot remove {}: {e}", directory.display());
            }
            reach(Failpoint::CgroupDirectoryRemoved);
        }
        self.remove_parents();
    }

    /// Removing a parent fails while it contains other cgroups, as intended. The parents of a foreign cgroup are not removed.
    fn remove_parents(&self) {
        if !self.is_ours() {
            return;
        }
        for parent in self.directories.iter().filter_map(|d| d.parent()) {
            let _ = fs::remove_dir(parent);
            reach(Failpoint::CgroupParentRemoved);
        }
    }
}

/// The value of `oom_kill` among lines of a name and a value.
fn parse_oom_kills(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("oom_kill "))?;
    value.trim().parse().ok()
}

/// Removes a cgroup's directory, waiting while its processes end.
fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(e) if is_busy(&e) => {}
        done => return done,
    }
    match File::open(directory.join("cgroup.events")) {
        Ok(events) => {
            wait_until_empty(&events)?;
            fs::remove_dir(directory)
        }
        Err(_) => remove_with_retries(directory),
    }
}

/// cgroup v2 shows in `cgroup.events` whether there are processes, and raises `POLLPRI` when that changes.
fn wait_until_empty(events: &File) -> io::Result<()> {
    let end = Instant::now() + LIMIT;
    loop {
        let mut text = [0; 256];
        let length = events.read_at(&mut text, 0)?;
        let populated = text[..length]
            .split(|b| *b == b'\n')
            .any(|line| line == b"populated 1");
        let left = end.saturating_duration_since(Instant::now());
        if !populated || left.is_zero() {
            return Ok(());
        }
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(events, PollFlags::PRI)], Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// cgroup v1 does not notify when a cgroup is empty, so removal is retried, with growing pauses.
fn remove_with_retries(directory: &Path) -> io::Result<()> {
    let end = Instant::now() + LIMIT;
    let mut attempts = 0;
    loop {
        match fs::remove_dir(directory) {
            Err(e) if is_busy(&e) && Instant::now() < end => attempts += 1,
            done => return done,
        }
        std::thread::sleep(PAUSES.pause(attempts));
    }
}

fn is_busy(error: &io::Error) -> bool {
    rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::BUSY)
}

/// The kind of resource: all cgroups are alike, named after the process that made them.
#[derive(Debug)]
pub struct Cgroups {
    hierarchy: Hierarchy,
    maker: Option<ProcessRecord>,
}

/// How many cgroups this process has named, so that no two have the same name.
static NAMED: AtomicU64 = AtomicU64::new(0);

impl Cgroups {
    /// Made by this process.
    pub fn new(hierarchy: Hierarchy) -> Cgroups {
        Cgroups {
            hierarchy,
            maker: ProcessRecord::myself(),
        }
    }
}

impl Kind for Cgroups {
    const NAME: &'static str = "cgroup";
    type Want = ();
    type Resource = Cgroup;
    type Error = Unavailable;

    fn make(&self, (): &()) -> Result<Cgroup, Unavailable> {
        let unknown = || Unavailable("/proc does not say who this process is".into());
        let maker = self.maker.ok_or_else(unknown)?;
        let number = NAMED.fetch_add(1, Ordering::Relaxed);
        self.hierarchy.make(&name(maker, number))
    }

    /// A fit cgroup has all its directories and no process in them.
    fn check(&self, cgroup: &Cgroup) -> Result<(), Unfit> {
        for directory in &cgroup.directories {
            let procs = directory.join("cgroup.procs");
            match fs::read(&procs) {
                Ok(text) if text.is_empty() => {}
                Ok(_) => return Err(Unfit(format!("there are processes in {}", directory.display()))),
                Err(e) => return Err(Unfit(format!("cannot read {}: {e}", procs.display()))),
            }
        }
        Ok(())
    }

    fn destroy(&self, cgroup: Cgroup) {
        cgroup.destroy();
    }
}

#[cfg(test)]
#[path = "cgroup_test.rs"]
mod tests;
