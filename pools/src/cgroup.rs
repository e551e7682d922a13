//! A cgroup for one sandbox: `/thaw/<name>` in the unified hierarchy, or in each of a few v1 hierarchies.
//!
//! Not being allowed to make one is not an error but a reason: the sandbox runs in its caller's cgroup.
//!
//! A name says who made the cgroup, `<pid>.<start time>.<number>`: one is made before anybody knows whose it will be, and
//! cgroup v2 cannot rename. Invariant: a cgroup is in the record of the sandbox that has it, or its maker lives, or
//! [`Hierarchy::sweep`] removes it; one that a sandbox lives in it cannot remove.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::process::ProcessRecord;
use crate::resource::{Kind, Unfit};

/// The v1 controllers a sandbox is put under, where they are mounted.
const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Directory of all sandboxes, under each hierarchy's root.
const PARENT: &str = "thaw";
/// How long the kernel may take to agree that the processes of a cgroup have ended.
const LIMIT: Duration = Duration::from_secs(5);
/// The longest pause between two questions, where it must be asked.
const PAUSE: Duration = Duration::from_millis(32);

/// What this host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// cgroup v2, mounted here with the controllers we need.
    V2 { root: PathBuf, favordynmods: bool },
    /// cgroup v1: where each controller is mounted.
    V1 { roots: Vec<PathBuf> },
    /// Neither.
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
    /// Reads what is mounted.
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

    /// Makes the cgroup of this name.
    pub fn make(&self, name: &str) -> Result<Cgroup, Unavailable> {
        if self.roots().is_empty() {
            return Err(Unavailable("no cgroup hierarchy is mounted".into()));
        }
        let mut made = Cgroup {
            name: name.into(),
            directories: Vec::new(),
        };
        for root in self.roots() {
            let directory = root.join(PARENT).join(name);
            if let Err(e) = make_under_parent(&directory) {
                made.destroy();
                return Err(Unavailable(format!("cannot create {}: {e}", directory.display())));
            }
            made.directories.push(directory);
        }
        Ok(made)
    }

    /// The cgroup of this name that a process now dead made: whatever directories exist.
    pub fn adopt(&self, name: &str) -> Cgroup {
        let directories = self
            .roots()
            .iter()
            .map(|r| r.join(PARENT).join(name))
            .filter(|d| d.is_dir())
            .collect();
        Cgroup {
            name: name.into(),
            directories,
        }
    }

    /// The names of those that have a directory in any hierarchy.
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

    /// Removes those whose makers are dead, but for those somebody lives in. How many.
    pub fn sweep(&self) -> usize {
        let dead = |name: &String| parse_name(name).is_some_and(|(maker, _)| !maker.lives());
        let mut removed = 0;
        for name in self.names().into_iter().filter(dead) {
            let cgroup = self.adopt(&name);
            // No waiting for its processes: they are not ours to end.
            let removals: Vec<bool> = cgroup
                .directories
                .iter()
                .map(|d| fs::remove_dir(d).is_ok())
                .collect();
            removed += usize::from(removals.into_iter().any(|r| r));
            cgroup.remove_parents();
        }
        removed
    }
}

/// The name of a process's `number`th cgroup.
fn name(maker: ProcessRecord, number: u64) -> String {
    format!("{}.{}.{number}", maker.pid, maker.start_time)
}

/// Who made the cgroup of this name, and its number.
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

    /// The directories, one per hierarchy.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Puts a process in.
    pub fn add(&self, pid: i32) -> io::Result<()> {
        for directory in &self.directories {
            fs::write(directory.join("cgroup.procs"), pid.to_string())?;
        }
        Ok(())
    }

    /// Removes it. Its processes must have been killed; the kernel may take a moment to agree that they have ended, which
    /// is waited for here, off anybody's path.
    pub fn destroy(self) {
        for directory in &self.directories {
            if let Err(e) = remove(directory)
                && e.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!("cannot remove {}: {e}", directory.display());
            }
        }
        self.remove_parents();
    }

    /// Fails while there are others, as it should.
    fn remove_parents(&self) {
        for parent in self.directories.iter().filter_map(|d| d.parent()) {
            let _ = fs::remove_dir(parent);
        }
    }
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
        Err(_) => remove_by_trying(directory),
    }
}

/// cgroup v2 says in `cgroup.events` whether there are processes, and raises POLLPRI when that changes.
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

/// cgroup v1 tells nobody when a cgroup is empty: it is tried again, more and more rarely.
fn remove_by_trying(directory: &Path) -> io::Result<()> {
    let (end, mut wait) = (Instant::now() + LIMIT, Duration::from_millis(1));
    loop {
        match fs::remove_dir(directory) {
            Err(e) if is_busy(&e) && Instant::now() < end => {}
            done => return done,
        }
        std::thread::sleep(wait);
        wait = (wait * 2).min(PAUSE);
    }
}

fn is_busy(error: &io::Error) -> bool {
    rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::BUSY)
}

/// The kind: all are alike, named by who made them.
#[derive(Debug)]
pub struct Cgroups {
    hierarchy: Hierarchy,
    maker: Option<ProcessRecord>,
}

/// How many cgroups this process has named: no two have one name.
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

    /// What is fit has all its directories and nobody in them.
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
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const UNIFIED: &str =
        "26 22 0:23 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate,favordynmods\n";

    #[test]
    fn hierarchies_are_read_as_mounted() {
        let roots = vec![
            "/sys/fs/cgroup/memory".into(),
            "/sys/fs/cgroup/cpu,cpuacct".into(),
        ];
        assert_eq!(Hierarchy::parse(HYBRID), Hierarchy::V1 { roots });
        let unified = Hierarchy::V2 {
            root: "/sys/fs/cgroup".into(),
            favordynmods: true,
        };
        assert_eq!(Hierarchy::parse(UNIFIED), unified);
        assert_eq!(Hierarchy::parse("garbage"), Hierarchy::None);
    }

    #[test]
    fn what_cannot_be_made_is_a_reason_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (good, file) = (directory.path().join("good"), directory.path().join("file"));
        fs::create_dir(&good).unwrap();
        fs::write(&file, b"").unwrap();
        let hierarchy = Hierarchy::V1 {
            roots: vec![good.clone(), file],
        };
        let Unavailable(reason) = hierarchy.make("x").unwrap_err();
        assert!(reason.contains("file/thaw/x"), "{reason}");
        assert_eq!(fs::read_dir(&good).unwrap().count(), 0);
        assert!(Hierarchy::None.make("x").is_err());
    }

    #[test]
    fn made_found_again_and_destroyed() {
        let root = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::V2 {
            root: root.path().into(),
            favordynmods: false,
        };
        let (a, b) = (hierarchy.make("a").unwrap(), hierarchy.make("b").unwrap());
        assert_eq!(hierarchy.names(), ["a", "b"]);
        drop(a);
        hierarchy.adopt("a").destroy();
        assert_eq!(hierarchy.names(), ["b"]);
        b.destroy();
        assert_eq!(
            fs::read_dir(root.path()).unwrap().count(),
            0,
            "the parent goes with its last child"
        );
    }

    #[test]
    fn what_dead_makers_left_is_swept_and_what_the_living_have_is_not() {
        let root = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::V2 {
            root: root.path().into(),
            favordynmods: false,
        };
        let myself = ProcessRecord::myself().unwrap();
        let dead = ProcessRecord {
            start_time: myself.start_time + 1,
            ..myself
        };
        let ours = Cgroups::new(hierarchy.clone());
        let kept = [ours.make(&()).unwrap(), ours.make(&()).unwrap()];
        assert!(
            kept.iter()
                .all(|c| parse_name(c.name()).is_some_and(|(maker, _)| maker == myself))
        );
        for leftover in [name(dead, 0), name(dead, 7), name(dead, 8)] {
            hierarchy.make(&leftover).unwrap();
        }
        // As the kernel keeps one in which a sandbox lives on.
        fs::write(
            root.path().join(PARENT).join(name(dead, 8)).join("inhabited"),
            b"",
        )
        .unwrap();
        for other in ["theirs", "1.2", "1.2.3.4", "1.2.x"] {
            hierarchy.make(other).unwrap();
            assert_eq!(parse_name(other), None);
        }
        assert_eq!(hierarchy.sweep(), 2);
        let mut left = hierarchy.names();
        left.retain(|n| parse_name(n).is_some());
        let mut expected = [kept[0].name(), kept[1].name(), &name(dead, 8)].map(String::from);
        expected.sort();
        assert_eq!(left, expected);
        assert_eq!(hierarchy.names().len(), 7);
    }

    #[test]
    fn a_real_cgroup_holds_a_process() {
        let hierarchy = Hierarchy::detect();
        let id = format!("test-{}", std::process::id());
        let cgroup = match hierarchy.make(&id) {
            Ok(cgroup) => cgroup,
            Err(reason) => return eprintln!("skipped: {reason}"),
        };
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let kind = Cgroups::new(hierarchy);
        kind.check(&cgroup).unwrap();
        let added = cgroup.add(child.id() as i32);
        let inhabited = kind.check(&cgroup);
        let seen = fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let directories = cgroup.directories().to_vec();
        cgroup.destroy();
        added.unwrap();
        inhabited.unwrap_err();
        assert!(seen.contains(&format!("/thaw/{id}")), "{seen}");
        assert!(directories.iter().all(|d| !d.exists()));
    }

    #[test]
    fn a_v2_cgroup_is_removed_when_its_processes_have_ended() {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let unified = mounts.lines().find(|l| l.contains(" - cgroup2 "));
        let Some(root) = unified.and_then(|l| l.split(' ').nth(4)) else {
            return eprintln!("skipped: no cgroup v2 is mounted");
        };
        let hierarchy = Hierarchy::V2 {
            root: root.into(),
            favordynmods: false,
        };
        let cgroup = match hierarchy.make(&format!("test-v2-{}", std::process::id())) {
            Ok(cgroup) => cgroup,
            Err(reason) => return eprintln!("skipped: {reason}"),
        };
        let directories = cgroup.directories().to_vec();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let added = cgroup.add(child.id() as i32);
        let busy = fs::remove_dir(&directories[0]).is_err_and(|e| is_busy(&e));
        // Killed, and nobody has waited for it to be gone.
        child.kill().unwrap();
        cgroup.destroy();
        child.wait().unwrap();
        assert!(directories.iter().all(|d| !d.exists()));
        match added {
            Ok(()) => assert!(busy),
            Err(e) => eprintln!("skipped the process: {e}"),
        }
    }
}
