//! Everything a node has on its host, counted by who holds it, so that others on the same host do not show.
//!
//! A process is a place's when it has something of the place's directory open or in its environment; taps, network namespaces
//! and machines have no names, and are found among its processes' descriptors. Cgroups are named by their makers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use thaw_pools::cgroup::Hierarchy;
use thaw_pools::process::ProcessRecord;

use crate::place::Place;

/// What exists of a place now, by kind. Two are equal when nothing came or went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Their names, each with its number.
    pub processes: BTreeSet<String>,
    /// Held taps.
    pub taps: usize,
    /// Network namespaces that are not this thread's.
    pub namespaces: usize,
    /// Virtual machines.
    pub machines: usize,
    pub mounts: BTreeSet<String>,
    /// Of these makers.
    pub cgroups: BTreeSet<String>,
    /// Named sockets that are bound.
    pub sockets: BTreeSet<String>,
    /// Network interfaces of this thread's namespace.
    pub interfaces: BTreeSet<String>,
    /// Below the data and run directories, but for what the image store keeps, what snapshots need, and notes of what was verified.
    pub files: BTreeSet<String>,
}

impl Counts {
    /// Counts now what is of `place`, and of the thawds that were started over it.
    pub fn of(place: &Place, makers: &[ProcessRecord]) -> Counts {
        let mark = place.root().display().to_string();
        let mut counts = Counts {
            mounts: lines("/proc/self/mountinfo")
                .into_iter()
                .filter(|l| l.contains(&mark) || l.contains(" nsfs "))
                .filter_map(|l| l.split(' ').nth(4).map(str::to_owned))
                .collect(),
            cgroups: Hierarchy::detect()
                .names()
                .into_iter()
                .filter(|name| makers.iter().any(|m| is_by(name, *m)))
                .collect(),
            sockets: lines("/proc/thread-self/net/unix")
                .into_iter()
                .filter(|l| l.contains(&mark))
                .filter_map(|l| l.split_whitespace().nth(7).map(str::to_owned))
                .collect(),
            interfaces: interfaces(),
            ..Counts::default()
        };
        let mut namespaces = BTreeSet::new();
        for pid in names(Path::new("/proc")) {
            if pid.bytes().all(|b| b.is_ascii_digit()) {
                counts.look_at(&pid, &mark, &mut namespaces);
            }
        }
        namespaces.remove(&link(Path::new("/proc/thread-self/ns/net")));
        counts.namespaces = namespaces.len();
        for below in ["data", "run"] {
            walk(&place.path(below), &mut |path| {
                let name = path
                    .strip_prefix(place.root())
                    .unwrap_or(path)
                    .display()
                    .to_string();
                let kept = ["data/images/", "data/verified/", "data/components/"];
                // What is half written is kept nowhere.
                if !kept.iter().any(|k| name.starts_with(k)) || name.ends_with(".new") {
                    counts.files.insert(name);
                }
            });
        }
        counts
    }

    /// What one process has, if it is the place's.
    fn look_at(&mut self, pid: &str, mark: &str, namespaces: &mut BTreeSet<String>) {
        let process = Path::new("/proc").join(pid);
        let held: Vec<String> = names(&process.join("fd"))
            .iter()
            .map(|fd| link(&process.join("fd").join(fd)))
            .collect();
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        let is_ours = held.iter().any(|h| h.starts_with(mark))
            || environment.windows(mark.len()).any(|w| w == mark.as_bytes());
        let dead = fs::read_to_string(process.join("stat")).is_ok_and(|s| s.contains(") Z "));
        if !is_ours || dead || pid == std::process::id().to_string() {
            return;
        }
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        self.processes.insert(format!("{} {pid}", name.trim()));
        self.taps += held.iter().filter(|h| *h == "/dev/net/tun").count();
        self.machines += held.iter().filter(|h| *h == "anon_inode:kvm-vm").count();
        namespaces.extend(held.into_iter().filter(|h| h.starts_with("net:[")));
        let own = link(&process.join("ns/net"));
        namespaces.extend(Some(own).filter(|o| !o.is_empty()));
    }

    /// How many VMMs.
    pub fn vmms(&self) -> usize {
        self.processes
            .iter()
            .filter(|p| p.starts_with("thaw-vmm"))
            .count()
    }
}

/// The network interfaces of this thread's namespace, the links of slots among them.
pub fn interfaces() -> BTreeSet<String> {
    let text = lines("/proc/thread-self/net/dev");
    let named = text.iter().filter_map(|l| l.split_once(':'));
    named.map(|(name, _)| name.trim().to_owned()).collect()
}

/// Whether a cgroup's name is of this maker (`<pid>.<start time>.<number>`).
fn is_by(name: &str, maker: ProcessRecord) -> bool {
    name.starts_with(&format!("{}.{}.", maker.pid, maker.start_time))
}

fn lines(file: &str) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

fn link(path: &Path) -> String {
    fs::read_link(path).unwrap_or_default().display().to_string()
}

fn walk(directory: &Path, seen: &mut impl FnMut(&PathBuf)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&path, seen);
        }
        seen(&path);
    }
}
