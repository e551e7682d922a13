//! The list of system calls, compiled into one filter for the whole process.
//!
//! Invariant: a VMM installs one program, however many threads it has, and puts it on all threads at once ([`seal`]) before a
//! byte of a guest, an image or a snapshot reaches the process. The number of programs matters, because the kernel frees each on
//! a shared work queue (docs/jail.md).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::syscalls::{CALLS, Call, Only};
use super::threads::{self, Thread};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The action for a call that is not on the list: SIGSYS, whose handler logs the call and ends the process.
const FORBIDDEN: SeccompAction = SeccompAction::Trap;

/// Whether this process is jailed. Unit tests are not, so their threads have no filter.
static JAILED: AtomicBool = AtomicBool::new(false);

/// Makes [`seal`] confine this process. Must be called while there is one thread.
pub(super) fn will_seal() {
    threads::this_thread_is(Thread::Control);
    JAILED.store(true, Ordering::Release);
}

/// Confines every thread of this process permanently. The machine's threads must have been started; this waits until each has made the
/// system calls of its start. Does nothing in a process that is not jailed.
pub fn seal() {
    if !JAILED.load(Ordering::Acquire) {
        return;
    }
    threads::wait_until_started();
    if let Err(error) = compile().and_then(|program| seccompiler::apply_filter_all_threads(&program)) {
        tracing::error!(%error, "the filter of a made machine cannot be set; ending");
        std::process::exit(1);
    }
}

fn compile() -> Result<BpfProgram, seccompiler::Error> {
    let mut rules = Rules::new();
    for call in CALLS {
        rules.entry(call.number).or_default().extend(rule(call)?);
    }
    SeccompFilter::new(rules, FORBIDDEN, SeccompAction::Allow, TargetArch::x86_64)?
        .try_into()
        .map_err(Into::into)
}

/// The conditions on a call's arguments, or `None` if every argument is allowed.
fn rule(call: &Call) -> Result<Option<SeccompRule>, seccompiler::Error> {
    let condition = |argument, comparison, value: u32| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, comparison, value.into())
    };
    let masked = |bits: u32| SeccompCmpOp::MaskedEq(bits.into());
    let conditions = match call.only {
        Only::Any => return Ok(None),
        Only::NoExec(argument) => vec![condition(argument, masked(libc::PROT_EXEC as u32), 0)?],
        Only::Is(argument, value, _) => vec![condition(argument, SeccompCmpOp::Eq, value)?],
        Only::Has(argument, bits, _) => vec![condition(argument, masked(bits), bits)?],
        Only::OwnThread(signal, _) => vec![
            condition(0, SeccompCmpOp::Eq, std::process::id())?,
            condition(2, SeccompCmpOp::Eq, signal as u32)?,
        ],
    };
    Ok(Some(SeccompRule::new(conditions)?))
}

#[cfg(test)]
#[path = "filter_test.rs"]
mod tests;
