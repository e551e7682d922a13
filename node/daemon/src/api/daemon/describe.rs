//! The API's description of a sandbox.

use thaw_protocol::api::{
    ContainerHealth, OnTimeout, Readiness, Sandbox as Described, SandboxAction, SandboxEvent,
};
use thaw_sandbox::state::{Record, TimeLimit};

use crate::api::machine::{Condition, Machine};

/// The state of a sandbox whose container's process has ended and is started again.
pub const RESTARTING: &str = "restarting";

/// Describes a machine in this condition.
pub(super) fn describe(machine: &dyn Machine, condition: Condition) -> Described {
    let record = machine.record();
    let mut described = Described {
        readiness: machine.readiness(),
        vsock: machine.vsock().display().to_string(),
        vmm_pid: record.vmm.map(|v| v.pid),
        ..of_record(record)
    };
    set(&mut described, condition);
    limit_time(&mut described, *machine.time_limit().borrow());
    described
}

/// Describes a sandbox whose memory is released.
pub(super) fn describe_paused(record: &Record, readiness: Option<Readiness>) -> Described {
    let mut described = Described {
        state: "paused".into(),
        memory_released: true,
        readiness,
        ..of_record(record)
    };
    limit_time(&mut described, record.terms.time_limit());
    described
}

/// What its record says.
fn of_record(record: &Record) -> Described {
    Described {
        id: record.id.clone(),
        tenant: record.terms.tenant.clone().map(String::from),
        name: record.name.clone(),
        image: record.image.clone(),
        command: record.command.clone(),
        created: record.created,
        cpus: record.vcpus,
        memory_mib: record.memory_mib,
        state: String::new(),
        memory_released: false,
        reason: None,
        failure: None,
        after_thaw: record.after_thaw.clone(),
        ended: None,
        exit_code: None,
        restarts: 0,
        health: None,
        readiness: None,
        vsock: String::new(),
        vmm_pid: None,
        network: record.network.clone(),
        rate_limits: record.terms.rate_limits.unwrap_or_default(),
        labels: record.terms.labels.clone(),
        timeout_s: None,
        idle_timeout_s: None,
        on_timeout: OnTimeout::default(),
        ends_at: None,
        resource_version: 0,
        event: None,
        volumes_error: None,
    }
}

/// Records in the description how long it may run.
pub(super) fn limit_time(described: &mut Described, limit: TimeLimit) {
    described.timeout_s = limit.timeout.map(|timeout| timeout.seconds);
    described.idle_timeout_s = limit.idle_s;
    described.on_timeout = limit.on_timeout;
    described.ends_at = limit.ends_at();
}

/// The end of a container's process.
fn died(status: i32) -> SandboxEvent {
    SandboxEvent {
        exit_code: Some(status),
        ..SandboxEvent::now(SandboxAction::Die)
    }
}

/// Records in the description that memory ran out in its container, whose process has ended.
pub(super) fn ran_out_of_memory(described: &mut Described) {
    described.event = Some(SandboxEvent::now(SandboxAction::Oom));
}

/// Records in the description that its container's process has ended.
pub(super) fn exited(described: &mut Described, status: i32) {
    // The end before a restart that a user has prevented is known.
    if described.state != RESTARTING {
        described.event = Some(died(status));
    }
    described.exit_code = Some(status);
    if ["running", RESTARTING].contains(&described.state.as_str()) {
        described.state = "exited".into();
    }
}

/// Records in the description that its container's process has ended and is started again.
pub(super) fn restarts(described: &mut Described, status: i32) {
    if described.state == "running" {
        described.state = RESTARTING.into();
    }
    described.event = Some(died(status));
}

/// Records in the description that its container's program runs, and how often its policy has started it again.
pub(super) fn started(described: &mut Described, restarts: u32) {
    if described.state == RESTARTING {
        described.state = "running".into();
    }
    described.restarts = restarts;
    described.event = Some(SandboxEvent::now(SandboxAction::Start));
}

/// Records whether its container is healthy, without the results of its checks. A change is an event.
pub(super) fn checked(described: &mut Described, health: Option<&ContainerHealth>) {
    let before = described.health.as_ref().map(|health| health.status);
    let now = health.map(|health| health.status);
    if before == now {
        return;
    }
    described.health = health.map(|health| ContainerHealth {
        log: Vec::new(),
        ..health.clone()
    });
    if before.is_some() {
        described.event = Some(SandboxEvent {
            health: now,
            ..SandboxEvent::now(SandboxAction::HealthStatus)
        });
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
