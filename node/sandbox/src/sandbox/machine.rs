//! A VMM process with its machine: starts it in its jail, creates the machine, and explains a failure to do so.

use std::os::fd::AsFd;
use std::path::Path;

use thaw_pools::vmm::VmmProcess;
use thaw_protocol::control::{Command, ExitReason, JAIL_LACKS_CODE, MachineSpec, Response, StartTimes};
use tokio::sync::watch;

use super::files::MachineFiles;
use super::vmm_log::{LOG, log_tail};
use super::{READY_LIMIT, Resources, with_console};
use crate::control_client::{CallError, ControlClient, Life, Vmm};
use crate::error::{Error, ErrorKind};
use crate::vm::{MachineError, Process, Vm, VmmOptions};

/// Starts a VMM and makes its machine. `started` is called as soon as the process exists, and records it: until it is asked for a machine,
/// a VMM ends with our connection; an untethered VMM then no longer does.
pub(super) async fn make(
    program: &Path,
    options: &VmmOptions,
    files: &MachineFiles,
    machine: MachineSpec,
    started: impl FnOnce(&VmmProcess) -> Result<(), Error>,
) -> Result<(ControlClient, VmmProcess), Error> {
    let process = Process::start(program, options).map_err(failure)?;
    started(process.process())?;
    let (process, socket, _) = Vm::Process(process).into_parts();
    let mut control = ControlClient::new(socket, Vmm(process.record().pid))?;
    match control.create(machine, files.kvm.as_fd()).await {
        Ok(()) => Ok((control, process)),
        Err(e) => Err(vmm_failure(e, process, &options.log)),
    }
}

/// The error for a VMM that did not start, or did not make or change its machine.
pub(super) fn failure(error: MachineError) -> Error {
    match error {
        MachineError::Start(e) => e.into(),
        MachineError::Refused(e) => CallError::Refused(e).into(),
        other => Error::new(ErrorKind::VmmFailed, other.to_string()),
    }
}

/// When each step of its start was done.
pub(super) async fn times(control: &ControlClient) -> Result<StartTimes, Error> {
    match control.call(Command::Status, &[]).await? {
        Response::Status { times, .. } => Ok(times),
        other => Err(unexpected_answer(&other)),
    }
}

/// Waits for the doorbell of a booting machine. Returns when it rang, CLOCK_MONOTONIC nanoseconds.
pub(super) async fn doorbell(control: &ControlClient) -> Result<u64, Error> {
    let mut life = control.life();
    let told = life.wait_for(|l| l.doorbell.is_some() || l.exited.is_some() || l.closed);
    let told = tokio::time::timeout(READY_LIMIT, told).await.map_err(|_| {
        let what = format!(
            "the guest did not become ready within {} s",
            READY_LIMIT.as_secs()
        );
        Error::new(ErrorKind::GuestNotReady, what).lost()
    })?;
    let told = told.map(|l| l.clone()).unwrap_or_default();
    match (told.doorbell, &told.exited) {
        (Some(at), None) => Ok(at),
        (_, Some(reason)) => Err(Error::new(
            ErrorKind::GuestNotReady,
            format!("before it was ready, {}", describe(reason)),
        )
        .lost()),
        (_, None) => {
            let what = format!("{} while the guest booted", told.closed_because());
            Err(Error::new(ErrorKind::VmmFailed, what).lost())
        }
    }
}

/// The error for a reply of the wrong kind.
pub(super) fn unexpected_answer(answer: &Response) -> Error {
    Error::new(
        ErrorKind::VmmFailed,
        format!("thaw-vmm answered another question: {answer:?}"),
    )
}

/// Waits until a machine has ended, and returns why.
pub(super) async fn ended(mut life: watch::Receiver<Life>) -> String {
    let ended = life.wait_for(|l| l.exited.is_some() || l.closed).await;
    match ended.as_ref().map(|l| (l.exited.as_ref(), l)) {
        Ok((Some(reason), _)) => describe(reason),
        Ok((None, life)) => life.closed_because(),
        Err(_) => "thaw-vmm ended".into(),
    }
}

/// Why a machine ended, in words.
pub(super) fn describe(reason: &ExitReason) -> String {
    match reason {
        ExitReason::PowerOff => "the guest powered off".into(),
        ExitReason::Reset => "the guest's kernel panicked or its agent died".into(),
        ExitReason::Fault(what) => format!("the guest's CPU could not go on: {what}"),
    }
}

/// Why the VMM did not make its machine: its refusal, or the last lines of its log.
fn vmm_failure(error: CallError, mut process: VmmProcess, log: &Path) -> Error {
    if matches!(error, CallError::Refused(_)) {
        return error.into();
    }
    process.kill();
    let status = process.wait().ok().flatten();
    let failure = match status.and_then(|status| status.code()) {
        // Another VMM would fail in the same way.
        Some(JAIL_LACKS_CODE) => Error::new(ErrorKind::JailIncomplete, "thaw-vmm cannot close its jail"),
        _ => error.into(),
    };
    Error {
        context: log_tail(log),
        ..failure
    }
}

/// Adds the last lines of the console and the VMM's log to a failure. They alone show that a guest ran out of memory before it was ready.
pub(super) fn explain(failure: Error, resources: &Resources) -> Error {
    let mut failure = with_console(failure, resources.console.as_ref());
    let starved = |l: &String| l.contains("Out of memory") || l.contains("System is deadlocked on memory");
    if failure.kind == ErrorKind::GuestNotReady && failure.context.iter().any(starved) {
        failure.kind = ErrorKind::MemoryTooSmall;
        // Another machine would run out of memory too.
        failure.machine_lost = false;
        failure.what.push_str(": it ran out of memory");
    }
    failure
        .context
        .extend(log_tail(&resources.directory.path().join(LOG)));
    failure
}
