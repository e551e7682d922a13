//! Calls about the sandbox and the guest as a whole.

use std::fmt::Write as _;
use std::fs;
use std::sync::Arc;

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::*;
use thaw_sys::lock::Lock;

use super::{blocking, etc, volumes};
use crate::error::{Error, Result, WithContext};
use crate::identity;
use crate::kernel_limits;
use crate::sandbox::Sandbox;
use crate::storage::DRIVERS;
use crate::{clock, warning};

/// Sets the hostname, name servers and storages of the sandbox. Without a hostname here, the handshake's stays.
pub async fn create_sandbox(sandbox: &Arc<Sandbox>, r: CreateSandboxRequest) -> Result<()> {
    if !r.kernel_modules.is_empty() {
        return Err(Error::Unsupported(
            "the guest kernel has everything built in: it loads no modules".into(),
        ));
    }
    if !r.guest_hook_path.is_empty() {
        return Err(Error::Unsupported("hooks in the guest are not supported".into()));
    }
    let sandbox = sandbox.clone();
    blocking(move || {
        let storages = r
            .storages
            .iter()
            .map(volumes::storage)
            .collect::<Result<Vec<_>>>()?;
        if !r.hostname.is_empty() {
            identity::set_hostname(&r.hostname)?;
        }
        if !r.dns.is_empty() || !r.hostname.is_empty() {
            etc::rewrite(&sandbox, &r.dns)?;
        }
        let mounted = sandbox.storages.acquire_all(&storages)?;
        sandbox.own_mounts.locked().extend(mounted);
        match r.sandbox_pidns {
            true => sandbox.pids.path(&sandbox.reaper).map(drop),
            false => Ok(()),
        }
    })
    .await
}

/// Kills and removes every container, unmounts the sandbox's storages, and syncs all file systems. The host
/// ends the machine afterwards.
pub async fn destroy_sandbox(sandbox: &Arc<Sandbox>) -> Result<()> {
    for container in sandbox.all() {
        if let Err(e) = super::containers::remove(sandbox, &container.id, 0).await {
            warning!("{e}");
        }
    }
    sandbox.pids.end().await;
    let sandbox = sandbox.clone();
    blocking(move || {
        let mounts = std::mem::take(&mut *sandbox.own_mounts.locked());
        sandbox.storages.release_all(&mounts);
        rustix::fs::sync();
        Ok(())
    })
    .await
}

/// Brings CPUs and memory blocks online that the host has plugged.
pub fn online(r: &OnlineCPUMemRequest) -> Result<()> {
    let wanted = if r.nb_cpus == 0 { u32::MAX } else { r.nb_cpus };
    online_below("/sys/devices/system/cpu", "cpu", wanted)?;
    if !r.cpu_only {
        online_below("/sys/devices/system/memory", "memory", u32::MAX)?;
    }
    // The kernel may have brought memory online by itself.
    kernel_limits::follow_memory();
    Ok(())
}

fn online_below(dir: &str, prefix: &str, wanted: u32) -> Result<()> {
    let mut numbers: Vec<u32> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.strip_prefix(prefix)?.parse().ok())
        .collect();
    numbers.sort_unstable();
    for n in numbers.into_iter().take(wanted as usize) {
        // The first CPU has no such file if it cannot be taken offline.
        let path = format!("{dir}/{prefix}{n}/online");
        if fs::read_to_string(&path).is_ok_and(|t| t.trim() == "0") {
            fs::write(&path, "1").with_context(|| format!("bring {prefix}{n} online"))?;
        }
    }
    Ok(())
}

pub fn set_date_time(r: &SetGuestDateTimeRequest) -> Result<()> {
    let ns = r
        .Sec
        .checked_mul(1_000_000_000)
        .and_then(|s| s.checked_add(r.Usec.checked_mul(1000)?))
        .and_then(|ns| u64::try_from(ns).ok())
        .ok_or_else(|| Error::Invalid(format!("{} s and {} µs are not a valid time", r.Sec, r.Usec)))?;
    clock::set_wall_clock(ns)
}

pub fn details(r: &GuestDetailsRequest) -> GuestDetailsResponse {
    let block = fs::read_to_string("/sys/devices/system/memory/block_size_bytes").unwrap_or_default();
    let drivers = || DRIVERS.iter().map(ToString::to_string).collect();
    GuestDetailsResponse {
        mem_block_size_bytes: if r.mem_block_size {
            u64::from_str_radix(block.trim(), 16).unwrap_or(0)
        } else {
            0
        },
        support_mem_hotplug_probe: false,
        agent_details: MessageField::some(AgentDetails {
            version: super::API_VERSION.into(),
            init_daemon: true,
            storage_handlers: drivers(),
            supports_seccomp: true,
            extra_features: vec![format!("thaw-{}", env!("CARGO_PKG_VERSION"))],
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// The guest's load, memory and CPU time in the text format of Prometheus.
pub fn metrics() -> String {
    let mut text = String::new();
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    if let Some(load) = read("/proc/loadavg").split_whitespace().next() {
        let _ = writeln!(text, "# TYPE thaw_guest_load1 gauge\nthaw_guest_load1 {load}");
    }
    let _ = writeln!(text, "# TYPE thaw_guest_memory_bytes gauge");
    for line in read("/proc/meminfo").lines() {
        let mut words = line.split_whitespace();
        if let (Some(key), Some(Ok(n)), unit) =
            (words.next(), words.next().map(str::parse::<u64>), words.next())
        {
            let bytes = if unit == Some("kB") { n * 1024 } else { n };
            let _ = writeln!(
                text,
                "thaw_guest_memory_bytes{{item=\"{}\"}} {bytes}",
                key.trim_end_matches(':')
            );
        }
    }
    let _ = writeln!(text, "# TYPE thaw_guest_cpu_ticks_total counter");
    let stat = read("/proc/stat");
    let total: Vec<&str> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .collect();
    for (mode, ticks) in [
        "user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal",
    ]
    .iter()
    .zip(total)
    {
        let _ = writeln!(text, "thaw_guest_cpu_ticks_total{{mode=\"{mode}\"}} {ticks}");
    }
    text
}
