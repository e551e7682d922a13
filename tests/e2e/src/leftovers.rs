//! A count of everything a sandbox is made of, as the kernel sees it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// What exists now, by kind. Two of these are equal when nothing came or went.
#[derive(Debug, PartialEq, Eq)]
pub struct Leftovers {
    pub processes: BTreeSet<String>,
    pub interfaces: BTreeSet<String>,
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<String>,
    pub sockets: BTreeSet<String>,
    pub files: BTreeSet<String>,
}

impl Leftovers {
    /// Looks at this host.
    pub fn now() -> Leftovers {
        Leftovers {
            processes: processes(),
            interfaces: names("/sys/class/net"),
            mounts: mounts(),
            cgroups: cgroups(),
            sockets: sockets(),
            files: ["/run/thaw", "/tmp"]
                .iter()
                .flat_map(|d| walk(Path::new(d)))
                // What failed stays listed, and is meant to.
                .filter(|p| !p.contains("/run/failed") && !p.starts_with("/run/thaw/failed"))
                .collect(),
        }
    }
}

impl Leftovers {
    /// What came or went since `before`: a line each.
    pub fn changes(&self, before: &Leftovers) -> Vec<String> {
        let kinds = [
            (&self.processes, &before.processes),
            (&self.interfaces, &before.interfaces),
            (&self.mounts, &before.mounts),
            (&self.cgroups, &before.cgroups),
            (&self.sockets, &before.sockets),
            (&self.files, &before.files),
        ];
        let come = |(now, before): &(_, _)| {
            BTreeSet::difference(*now, *before)
                .map(|n| format!("came: {n}"))
                .collect::<Vec<String>>()
        };
        let gone = |(now, before): &(_, _)| {
            BTreeSet::difference(*before, *now)
                .map(|n| format!("went: {n}"))
                .collect::<Vec<String>>()
        };
        kinds
            .iter()
            .flat_map(|kind| [come(kind), gone(kind)])
            .flatten()
            .collect()
    }

    /// Fails unless all is as it was `before`, once what was told to end has had time to.
    pub fn settle(before: &Leftovers) {
        let since = Instant::now();
        loop {
            let changes = Leftovers::now().changes(before);
            if changes.is_empty() {
                return;
            }
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "it is not as it was: {changes:#?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Thaw's processes: any whose command name starts with `thaw`, but for the tests themselves.
fn processes() -> BTreeSet<String> {
    names("/proc")
        .into_iter()
        .filter(|n| n.bytes().all(|b| b.is_ascii_digit()))
        .filter_map(|pid| {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            comm.starts_with("thaw").then(|| format!("{pid} {}", comm.trim()))
        })
        .collect()
}

/// What is mounted.
pub fn mounts() -> BTreeSet<String> {
    // Without the mount ids, which say nothing about what is mounted.
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    text.lines()
        .map(|l| l.splitn(5, ' ').nth(4).unwrap().to_string())
        .collect()
}

fn cgroups() -> BTreeSet<String> {
    walk(Path::new("/sys/fs/cgroup"))
        .into_iter()
        .filter(|p| p.contains("thaw") && Path::new(p).is_dir())
        .collect()
}

fn sockets() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/net/unix").unwrap();
    text.lines()
        .filter_map(|l| l.split_whitespace().nth(7))
        .filter(|p| p.contains("thaw"))
        .map(String::from)
        .collect()
}

fn names(folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Every path below `folder`, itself not included.
pub fn walk(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            found.extend(walk(&path));
        }
        found.push(path.to_string_lossy().into_owned());
    }
    found
}
