//! `thaw ps`: from the run directory, so it needs no daemon and shows what the daemon and other callers run.

use std::time::{SystemTime, UNIX_EPOCH};

use thaw_pools::cgroup::Hierarchy;

use crate::exit::Failure;
use crate::paths::Paths;
use crate::state::{Living, Record, RunDirectory, Unreadable, vsock_socket};

pub(super) fn ps(json: bool) -> Result<u8, Failure> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    run.clean(&Hierarchy::detect());
    let (running, unreadable) = (run.running(), run.unreadable());
    if json {
        let readable = running.iter().map(|r| describe(&run, r));
        let all: Vec<_> = readable
            .chain(unreadable.iter().map(describe_unreadable))
            .collect();
        super::print(&serde_json::json!(all).to_string());
        return Ok(0);
    }
    super::print(&format!(
        "{:<12}  {:<16}  {:<8}  {:>4}  {:>8}  {:<32}  COMMAND",
        "ID", "NAME", "AGE", "CPUS", "MEMORY", "IMAGE"
    ));
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    for r in &running {
        super::print(&format!(
            "{:<12}  {:<16}  {:<8}  {:>4}  {:>5} MiB  {:<32}  {}",
            r.id,
            r.name.as_deref().unwrap_or("-"),
            age(now.saturating_sub(r.created)),
            r.vcpus,
            r.memory_mib,
            printable(&r.image),
            printable(&r.command.join(" ")),
        ));
    }
    // What is wrong with their records is in the log, which the cleaning above has written to.
    for u in &unreadable {
        super::print(&format!(
            "{:<12}  {:<16}  {:<8}  {:>4}  {:>9}  {:<32}  -",
            u.id, "-", "-", "-", "-", "(record unreadable)"
        ));
    }
    Ok(0)
}

fn describe_unreadable(unreadable: &Unreadable) -> serde_json::Value {
    serde_json::json!({
        "id": unreadable.id,
        "state": "unreadable",
        "reason": format!("its record cannot be read: {}", unreadable.why),
        "vmm_pid": match unreadable.living {
            Living::Vmm(vmm) => Some(vmm.pid),
            Living::Nothing | Living::Listening => None,
        },
    })
}

fn describe(run: &RunDirectory, record: &Record) -> serde_json::Value {
    serde_json::json!({
        "id": record.id,
        "name": record.name,
        "state": if record.ready { "running" } else { "starting" },
        "image": record.image,
        "command": record.command,
        "created": record.created,
        "cpus": record.vcpus,
        "memory_mib": record.memory_mib,
        "vmm_pid": record.vmm.map(|v| v.pid),
        "tethered": record.tethered,
        "vsock": vsock_socket(&run.directory(&record.id)).display().to_string(),
    })
}

pub(super) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn ages_are_short() {
        assert_eq!(
            [5, 90, 7200, 700_000].map(super::age),
            ["5 s", "1 min", "2 h", "8 d"]
        );
    }
}
