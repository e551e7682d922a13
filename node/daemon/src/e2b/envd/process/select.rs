//! The process that a call names, by its PID in the container or by its tag.

use std::sync::Arc;

use thaw_protocol::agent::processes::ProcessInfo;
use thaw_protocol::connect::Code;
use thaw_protocol::e2b::process::ProcessSelector;
use thaw_protocol::e2b::process::process_selector::Selector;

use crate::api::kept::Processes;

use super::super::call::Call;
use super::super::failure::Failure;
use super::super::relay::Relay;

/// A process that runs.
pub struct Selected {
    /// Its id in the guest.
    pub id: String,
    pub pid: u32,
    /// `None` for one that thawd does not relay: an earlier thawd started it, or another caller.
    pub relay: Option<Arc<Relay>>,
    pub processes: Arc<dyn Processes>,
}

/// Finds a process.
///
/// # Errors
/// None that runs is named so.
pub async fn select(call: &Call, selector: Option<ProcessSelector>) -> Result<Selected, Failure> {
    let selector = selector.and_then(|selector| selector.selector);
    let selector = selector.ok_or_else(|| Failure::invalid("process is a pid or a tag"))?;
    let processes = call.processes().await?;
    let relay = call.sandbox.relays.find(|relay| match &selector {
        Selector::Pid(pid) => relay.pid == *pid,
        Selector::Tag(tag) => relay.about.tag.as_ref() == Some(tag),
    });
    if let Some(relay) = relay {
        return Ok(Selected {
            id: relay.id.clone(),
            pid: relay.pid,
            relay: Some(relay),
            processes,
        });
    }
    let found = match selector {
        Selector::Pid(pid) => {
            let list = processes.list().await?;
            let found = list.into_iter().find(|info| running_pid(info) == Some(pid));
            found.ok_or_else(|| format!("pid {pid}"))
        }
        Selector::Tag(tag) => Err(format!("tag {:?}", tag.chars().take(64).collect::<String>())),
    };
    let found = found.map_err(|named| {
        Failure::new(
            Code::NotFound,
            format!("there is no process with {named}, or it has ended"),
        )
    })?;
    Ok(Selected {
        pid: running_pid(&found).unwrap_or_default(),
        id: found.exec_id,
        relay: None,
        processes,
    })
}

/// The PID of a process that has not ended.
pub fn running_pid(info: &ProcessInfo) -> Option<u32> {
    u32::try_from(info.pid).ok().filter(|pid| *pid > 0 && !info.ended)
}
