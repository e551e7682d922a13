//! The API's description of a sandbox.

use thaw_protocol::api::Sandbox as Described;

use crate::api::container_monitor::ContainerLife;
use crate::api::machine::{Condition, Machine};

/// The state of a sandbox whose container's process has ended and is started again.
pub const RESTARTING: &str = "restarting";

/// Describes a machine in this condition.
pub(super) fn describe(machine: &dyn Machine, condition: Condition) -> Described {
    let record = machine.record();
    let mut described = Described {
        id: record.id.clone(),
        tenant: record.terms.tenant.clone().map(String::from),
        name: record.name.clone(),
        image: record.image.clone(),
        command: record.command.clone(),
        created: record.created,
        cpus: record.vcpus,
        memory_mib: record.memory_mib,
        state: String::new(),
        reason: None,
        failure: None,
        ended: None,
        exit_code: None,
        restarts: 0,
        readiness: machine.readiness(),
        vsock: machine.vsock().display().to_string(),
        vmm_pid: record.vmm.map(|v| v.pid),
        network: record.network.clone(),
        rate_limits: record.terms.rate_limits.unwrap_or_default(),
        labels: record.terms.labels.clone(),
        timeout_s: record.terms.timeout.map(|t| t.seconds),
        resource_version: 0,
        volumes_error: None,
    };
    set(&mut described, condition);
    described
}

/// Records in the description that its container's process has ended.
pub(super) fn exited(described: &mut Described, status: i32) {
    described.exit_code = Some(status);
    if ["running", RESTARTING].contains(&described.state.as_str()) {
        described.state = "exited".into();
    }
}

/// Records the life of its container in the description.
pub(super) fn lives(described: &mut Described, life: &ContainerLife) {
    described.restarts = life.restarts;
    match (described.state.as_str(), life.restarting) {
        ("running", Some(_)) => described.state = RESTARTING.into(),
        (RESTARTING, None) => described.state = "running".into(),
        _ => {}
    }
}

/// Sets the state and the reason by its machine's condition.
pub(super) fn set(described: &mut Described, condition: Condition) {
    let (state, reason) = match condition {
        Condition::Running if described.exit_code.is_some() => ("exited", None),
        Condition::Running if described.state == RESTARTING => (RESTARTING, None),
        Condition::Running => ("running", None),
        Condition::Paused => ("paused", None),
        Condition::Ended(reason) => ("ended", Some(reason)),
    };
    (described.state, described.reason) = (state.into(), reason);
}
