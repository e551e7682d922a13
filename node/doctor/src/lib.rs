//! The checks of `thaw doctor`: what this host has and lacks, what each lack costs, and the fix.
//!
//! Each check examines one thing and reports what it found. Checks read the host through [`Host`], so tests can present any host; a few
//! checks try a system call, because there is no other way to know.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use thaw_sandbox::config::Config;
use thaw_sandbox::paths::Paths;

mod files;
mod host;
mod kernel;
mod kvm;
mod memory;
mod processor;
mod signatures;
mod table;

pub use table::render;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Good.
    Ok,
    /// Works, at a cost.
    Warn,
    /// Something does not work.
    Missing,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The subject of the check.
    pub check: &'static str,
    pub state: State,
    /// What was found.
    pub found: String,
    /// What that costs; empty if nothing.
    pub cost: String,
    /// The fix; empty if none is needed.
    pub fix: String,
    /// Whether sandboxes cannot run without it.
    pub essential: bool,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Check {
        let found = found.into();
        Check {
            check,
            state: State::Ok,
            found,
            cost: String::new(),
            fix: String::new(),
            essential: false,
        }
    }

    fn warn(
        check: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        Check {
            state: State::Warn,
            cost: cost.into(),
            fix: fix.into(),
            ..Check::ok(check, found)
        }
    }

    fn missing(
        check: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        fix: impl Into<String>,
    ) -> Check {
        Check {
            state: State::Missing,
            ..Check::warn(check, found, cost, fix)
        }
    }

    fn essential(self) -> Check {
        Check {
            essential: true,
            ..self
        }
    }
}

/// All checks.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether nothing essential is missing.
    pub ready: bool,
    /// Whether Linux guests run at the CPU's speed. If not, only tiny test guests do.
    pub native: bool,
    pub checks: Vec<Check>,
}

/// The host that checks examine.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// This host.
    pub fn this() -> Host {
        Host { root: "/".into() }
    }

    /// A directory with a host's files, for tests.
    pub fn at(root: &Path) -> Host {
        Host {
            root: root.to_owned(),
        }
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// The trimmed text of a file.
    fn read(&self, absolute: &str) -> Option<String> {
        fs::read_to_string(self.path(absolute))
            .ok()
            .map(|text| text.trim().to_owned())
    }

    fn exists(&self, absolute: &str) -> bool {
        self.path(absolute).exists()
    }

    /// The names of a directory's entries, sorted.
    fn names(&self, absolute: &str) -> Option<Vec<String>> {
        let mut names: Vec<String> = fs::read_dir(self.path(absolute))
            .ok()?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort_unstable();
        Some(names)
    }

    /// Whether the CPU has a feature, by its name in /proc/cpuinfo.
    fn cpu_has(&self, flag: &str) -> bool {
        let Some(text) = self.read("/proc/cpuinfo") else {
            return false;
        };
        text.lines()
            .find_map(|line| line.strip_prefix("flags")?.split_once(':'))
            .is_some_and(|(_, flags)| flags.split_ascii_whitespace().any(|f| f == flag))
    }

    /// The running kernel's version: major, minor, and the whole name.
    fn kernel(&self) -> Option<(u32, u32, String)> {
        let name = self.read("/proc/sys/kernel/osrelease")?;
        let mut numbers = name
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|n| n.parse().ok());
        let version = (numbers.next()?, numbers.next()?);
        Some((version.0, version.1, name))
    }
}

/// Whether Linux guests run at the CPU's speed here, because hardware virtualisation is available.
pub fn hardware_virtualisation(host: &Host) -> bool {
    host.cpu_has("svm") || host.cpu_has("vmx")
}

/// Runs all checks.
pub fn examine(host: &Host, paths: &Paths) -> Report {
    let mut checks = kvm::checks(host);
    checks.extend(kernel::checks(host));
    checks.extend(host::checks(host));
    checks.extend(memory::checks(host));
    checks.extend(processor::checks(host));
    checks.extend(files::checks(paths));
    checks.push(signatures::check(paths, Config::from_env()));
    let ready = !checks.iter().any(|c| c.essential && c.state == State::Missing);
    Report {
        ready,
        native: ready && hardware_virtualisation(host),
        checks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with nothing but these files.
    pub(super) fn host_with(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host::at(root.path());
        (root, host)
    }

    fn paths(root: &Path) -> Paths {
        Paths {
            data: root.join("d"),
            run: root.join("r"),
            kernel: root.join("k"),
            guest_image: root.join("g"),
        }
    }

    #[test]
    fn empty_host_is_not_ready_and_each_lack_has_cost_and_fix() {
        let (root, host) = host_with(&[]);
        let report = examine(&host, &paths(root.path()));
        assert!(!report.ready && !report.native);
        for check in &report.checks {
            if check.state != State::Ok {
                assert!(!check.cost.is_empty() && !check.fix.is_empty(), "{check:?}");
            }
        }
        let kvm = report.checks.iter().find(|c| c.check == "/dev/kvm").unwrap();
        assert!(kvm.essential && kvm.state == State::Missing);
    }

    #[test]
    fn flags_and_versions_are_read_whole() {
        let (_root, host) = host_with(&[
            ("/proc/cpuinfo", "processor : 0\nflags\t\t: fpu svm_lock x2apic\n"),
            ("/proc/sys/kernel/osrelease", "6.1.0-49-cloud-amd64\n"),
        ]);
        assert!(host.cpu_has("x2apic"));
        assert!(!host.cpu_has("svm"), "svm_lock is another flag");
        let (major, minor, _) = host.kernel().unwrap();
        assert_eq!((major, minor), (6, 1));
    }

    #[test]
    fn the_report_is_stable_json() {
        let (root, host) = host_with(&[]);
        let json = serde_json::to_value(examine(&host, &paths(root.path()))).unwrap();
        assert_eq!(json["ready"], false);
        let first = &json["checks"][0];
        for key in ["check", "state", "found", "cost", "fix", "essential"] {
            assert!(!first[key].is_null(), "{key}");
        }
        assert_eq!(first["state"], "missing");
    }

    #[test]
    fn the_document_of_production_hosts_has_the_checks_there_are() {
        let document = include_str!("../../../docs/production-hosts.md");
        let tables = document.split("| row of `thaw doctor` |").skip(1);
        // Behind the rest of the head, and the line below it.
        let lines = tables.flat_map(|table| table.lines().skip(2).take_while(|line| line.starts_with('|')));
        let rows: Vec<&str> = lines
            .map(|line| line.split('`').nth(1).expect("a row's first cell"))
            .collect();
        let (root, host) = host_with(&[]);
        let report = examine(&host, &paths(root.path()));
        for row in &rows {
            assert!(report.checks.iter().any(|c| c.check == *row), "no check {row}");
        }
        let of_production = memory::checks(&host).into_iter().chain(processor::checks(&host));
        for check in of_production {
            assert!(rows.contains(&check.check), "the document lacks {}", check.check);
        }
    }

    #[test]
    fn this_host_can_be_examined() {
        let report = examine(&Host::this(), &Paths::from_env());
        assert!(report.checks.len() > 25);
        assert!(!render(&report, 100, false).is_empty());
    }
}
