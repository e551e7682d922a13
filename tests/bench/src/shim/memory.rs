//! What a pod takes that does nothing: proportional shares (PSS) of the memory of its processes, in which pages that several
//! map are divided among them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::{Node, Way};
use crate::Report;

/// Pods that are measured together.
const PODS: usize = 10;
/// How long they idle first.
const SETTLED: Duration = Duration::from_secs(3);

/// Measures pods of every way.
///
/// # Errors
/// Says which could not be run or looked at.
pub fn measure(node: &Node, report: &mut Report) -> Result<(), String> {
    for way in Way::ALL {
        let ids: Vec<String> = (0..PODS).map(|n| format!("idle-{n}")).collect();
        for id in &ids {
            let outcome = node.run(way, &["-d"], id, &["sleep", "100000"]);
            if !outcome.status.success() {
                return Err(format!("{}: {outcome:?}", way.name()));
            }
        }
        std::thread::sleep(SETTLED);
        let shares = shares(&vmms(node)?)?;
        let each = |name: &str| shares.get(name).copied().unwrap_or(0.0) / PODS as f64;
        let parts: &[(&str, &str)] = match way {
            Way::Runc => &[("containerd-shim-runc-v2", "shim"), ("sleep", "process")],
            Way::Overlayfs | Way::Own => &[
                ("containerd-shim-thaw-v2", "shim"),
                ("thaw-vmm", "VMM and guest"),
                (WRITTEN, "of that, written by VMM and guest"),
                ("thaw-share", "thaw-share"),
            ],
        };
        for (program, part) in parts {
            report.sample(
                &format!("{}: idle pod's {part}", way.name()),
                "KiB",
                each(program),
            );
        }
        let whole: f64 = parts
            .iter()
            .filter(|(p, _)| *p != WRITTEN)
            .map(|(p, _)| each(p))
            .sum();
        report.sample(&whole_row(way), "KiB", whole);
        ids.iter().try_for_each(|id| node.remove(id))?;
    }
    Ok(())
}

/// The name of the row of all of a pod.
pub fn whole_row(way: Way) -> String {
    format!("{}: idle pod", way.name())
}

/// Not a program: private pages of VMMs that are not as they were mapped.
const WRITTEN: &str = "written";

/// The VMMs of microVMs; those that wait in pools are not any pod's.
fn vmms(node: &Node) -> Result<Vec<i64>, String> {
    let listed = thaw_e2e::run(&mut node.home.thaw(&["--json", "ps"])).ok();
    let listed: Vec<serde_json::Value> =
        serde_json::from_str(&listed).map_err(|e| format!("what thaw ps says: {e}"))?;
    Ok(listed.iter().filter_map(|s| s["vmm_pid"].as_i64()).collect())
}

/// KiB by program, of every process; of VMMs only those of `vmms`.
fn shares(vmms: &[i64]) -> Result<BTreeMap<String, f64>, String> {
    let mut shares: BTreeMap<String, f64> = BTreeMap::new();
    let processes = std::fs::read_dir("/proc").map_err(|e| format!("/proc: {e}"))?;
    for process in processes.flatten() {
        let Ok(pid) = process.file_name().to_string_lossy().parse::<i64>() else {
            continue;
        };
        // One that ended meanwhile is no pod's.
        let Ok(program) = std::fs::read_link(process.path().join("exe")) else {
            continue;
        };
        let Ok(rollup) = std::fs::read_to_string(process.path().join("smaps_rollup")) else {
            continue;
        };
        let name = program
            .file_name()
            .unwrap_or(Path::new("").as_os_str())
            .to_string_lossy();
        if name == "thaw-vmm" {
            if !vmms.contains(&pid) {
                continue;
            }
            *shares.entry(WRITTEN.into()).or_default() += line(&rollup, "Private_Dirty:");
        }
        *shares.entry(name.into_owned()).or_default() += line(&rollup, "Pss:");
    }
    Ok(shares)
}

/// A line of smaps_rollup (proc_pid_smaps(5)), KiB.
pub(crate) fn line(rollup: &str, name: &str) -> f64 {
    let found = rollup.lines().find_map(|line| line.strip_prefix(name));
    let number = found.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok());
    number.unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_whole_name() {
        let rollup = "7f00-7fff ---p 00000000 00:00 0 [rollup]\nRss:  100 kB\nPss:   30 kB\nPss_Dirty: 9 kB\nPrivate_Dirty: 7 kB\n";
        assert_eq!(
            (line(rollup, "Pss:"), line(rollup, "Private_Dirty:")),
            (30.0, 7.0)
        );
        assert_eq!(line(rollup, "Swap:"), 0.0);
    }
}
