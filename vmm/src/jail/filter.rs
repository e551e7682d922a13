//! The list of system calls as filters, and the threads they are put on.
//!
//! Filters add up: a thread has that of [`Thread::Start`], which it was born with, and its own; a call must be on both.
//! They are there before any guest code is, and a thread that cannot have its own ends the process.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::signals;
use super::syscalls::{CALLS, Call, Only, Thread};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// What becomes of a call that is not on the list: SIGSYS, whose handler says which it was and ends the process.
const FORBIDDEN: SeccompAction = SeccompAction::Trap;

/// Whether this process is jailed. A unit test is not, and its threads go without filters.
static JAILED: AtomicBool = AtomicBool::new(false);

/// Confines this thread, and with it all that it will start. While there is no other.
pub(super) fn confine_process() -> Result<(), seccompiler::Error> {
    // Its flags are in memory, where no filter sees them: the C library takes clone instead.
    seccompiler::apply_filter(&without_clone3()?)?;
    seccompiler::apply_filter(&compile(Thread::Start)?)?;
    signals::this_thread_is(Thread::Start);
    JAILED.store(true, Ordering::Release);
    Ok(())
}

/// Confines this thread to what its kind does, from now on. In a process that is not jailed it does nothing.
pub fn confine(thread: Thread) {
    if !JAILED.load(Ordering::Acquire) {
        return;
    }
    if let Err(error) = program(thread).and_then(|program| seccompiler::apply_filter(program)) {
        tracing::error!(%error, "the filter of a {} thread cannot be set; ending", thread.name());
        std::process::exit(1);
    }
    signals::this_thread_is(thread);
}

/// The filter of a kind, compiled once.
fn program(thread: Thread) -> Result<&'static BpfProgram, seccompiler::Error> {
    static PROGRAMS: [OnceLock<BpfProgram>; Thread::ALL.len()] =
        [const { OnceLock::new() }; Thread::ALL.len()];
    let place = &PROGRAMS[thread as usize];
    match place.get() {
        Some(program) => Ok(program),
        None => {
            let program = compile(thread)?;
            Ok(place.get_or_init(|| program))
        }
    }
}

fn without_clone3() -> Result<BpfProgram, seccompiler::Error> {
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    let rules = Rules::from([(libc::SYS_clone3, vec![])]);
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, refuse, TargetArch::x86_64)?.try_into()?)
}

pub(super) fn compile(thread: Thread) -> Result<BpfProgram, seccompiler::Error> {
    let mut rules = Rules::new();
    for call in CALLS.iter().filter(|call| call.is_for(thread)) {
        rules.entry(call.number).or_default().extend(rule(call)?);
    }
    if thread == Thread::Start {
        // It never comes through: the other filter answers first.
        rules.insert(libc::SYS_clone3, vec![]);
    }
    Ok(SeccompFilter::new(rules, FORBIDDEN, SeccompAction::Allow, TargetArch::x86_64)?.try_into()?)
}

/// None where every argument will do.
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
