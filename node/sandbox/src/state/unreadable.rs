//! Sandboxes whose record cannot be read: whether their VMM lives, and which process it is.
//!
//! A record may be damaged or of a newer release. Invariant: its VMM is still found, by the name of a file beside the record ([`mark`]),
//! which cannot be written partially, or by its control socket, on which only a VMM listens. While the VMM may live, its directory stays.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::SocketType;
use serde::Deserialize;
use thaw_pools::process::ProcessRecord;
use thaw_pools::vmm;
use thaw_protocol::control::{Command, Request};
use thaw_protocol::packet;

use super::CONTROL_SOCKET;
use super::names::entry_name;
use super::record::{RECORD, Record};
use crate::state::PodNamespace;

/// Name of the file that identifies a sandbox's VMM, before `.PID.START`.
const MARK: &str = "vmm";
/// How long a VMM may take to end after a request to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two checks whether the VMM has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// What still runs of a sandbox whose record cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Living {
    /// No VMM is left.
    Nothing,
    /// This VMM.
    Vmm(ProcessRecord),
    /// A VMM listens at the sandbox's control socket. Its process is unknown, because the release before this one left no mark.
    Listening,
}

/// Records in the name of an empty file in a sandbox's directory which process its VMM is.
pub(super) fn mark(directory: &Path, vmm: ProcessRecord) -> io::Result<()> {
    let name = format!("{MARK}.{}.{}", vmm.pid, vmm.start_time);
    File::create(directory.join(name)).map(drop)
}

fn marked(name: &str) -> Option<ProcessRecord> {
    let mut parts = name.split('.');
    let is_mark = parts.next() == Some(MARK);
    let (pid, start_time) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    (is_mark && parts.next().is_none()).then_some(ProcessRecord { pid, start_time })
}

impl Living {
    /// Looks for the VMM of the sandbox in this directory.
    pub fn of(directory: &Path) -> Living {
        let names = fs::read_dir(directory).into_iter().flatten();
        let mut marks = names.filter_map(|entry| marked(entry.ok()?.file_name().to_str()?));
        let recorded = || Remains::of(directory).vmm.filter(ProcessRecord::lives);
        match marks.find(ProcessRecord::lives).or_else(recorded) {
            Some(vmm) => Living::Vmm(vmm),
            None if vmm::may_listen(&directory.join(CONTROL_SOCKET)) => Living::Listening,
            None => Living::Nothing,
        }
    }

    /// Ends the VMM. Returns whether it has ended.
    pub(super) fn end(self, directory: &Path) -> bool {
        match self {
            Living::Nothing => true,
            Living::Vmm(vmm) => {
                vmm.kill();
                !vmm.lives()
            }
            Living::Listening => shut_down(&directory.join(CONTROL_SOCKET)),
        }
    }
}

/// Asks the VMM that listens to end, and waits until nothing listens.
fn shut_down(socket: &Path) -> bool {
    let ask = || -> Option<()> {
        let connection = vmm::connect(socket, SocketType::SEQPACKET).ok()?;
        let request = Request {
            id: 1,
            command: Command::Shutdown,
        };
        packet::send(&connection, &request, &[]).ok()
    };
    let _ = ask();
    let began = Instant::now();
    while vmm::may_listen(socket) {
        if began.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// The resources of an ended sandbox, from its record.
#[derive(Debug, Default)]
pub(super) struct Remains {
    pub vmm: Option<ProcessRecord>,
    pub share: Option<ProcessRecord>,
    pub cgroup: Option<String>,
    pub pod_network: Option<PodNamespace>,
    /// The file name of the entry of its name.
    pub name: Option<String>,
}

impl From<Record> for Remains {
    fn from(record: Record) -> Remains {
        Remains {
            name: entry_name(&record),
            vmm: record.vmm,
            share: record.share,
            cgroup: record.cgroup,
            pod_network: record.pod_network,
        }
    }
}

impl Remains {
    /// The resources in a record that cannot be read as a whole: takes each field by itself, if the file is JSON at all.
    pub(super) fn of(directory: &Path) -> Remains {
        let bytes = fs::read(directory.join(RECORD)).unwrap_or_default();
        let record: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
        fn field<T: for<'de> Deserialize<'de>>(record: &serde_json::Value, name: &str) -> Option<T> {
            T::deserialize(record.get(name)?).ok()
        }
        Remains {
            vmm: field(&record, "vmm"),
            share: field(&record, "share"),
            cgroup: field(&record, "cgroup"),
            pod_network: field(&record, "pod_network"),
            // An entry whose sandbox is gone is removed by the next cleaning.
            name: None,
        }
    }
}

#[cfg(test)]
#[path = "unreadable_test.rs"]
mod tests;
