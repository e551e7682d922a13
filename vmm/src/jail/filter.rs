//! The list of system calls as filters of the whole process.
//!
//! Invariant: a VMM installs two programs, however many threads it has. The first is there before a thread is started, so
//! all inherit it; the second is put on every thread at once ([`seal`]), before any guest code exists. Filters add up: a
//! call must be on both. Few programs matter: the kernel frees each on a shared work queue (docs/jail.md).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

use super::syscalls::{CALLS, Call, Only, Stage};
use super::threads::{self, Thread};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// What becomes of a call that is not on the list: SIGSYS, whose handler says which it was and ends the process.
const FORBIDDEN: SeccompAction = SeccompAction::Trap;

/// Whether this process is jailed. A unit test is not, and its threads go without filters.
static JAILED: AtomicBool = AtomicBool::new(false);

/// Confines this thread, and with it all that it will start. While there is no other.
pub(super) fn confine_process() -> Result<(), seccompiler::Error> {
    seccompiler::apply_filter(&compile(Stage::Start)?)?;
    threads::this_thread_is(Thread::Control);
    JAILED.store(true, Ordering::Release);
    Ok(())
}

/// Takes what making a machine needs from every thread of this process, for good. The machine's threads are started; this
/// waits until each has made the system calls of its start. In a process that is not jailed it does nothing.
pub fn seal() {
    if !JAILED.load(Ordering::Acquire) {
        return;
    }
    threads::wait_until_started();
    if let Err(error) =
        compile(Stage::Made).and_then(|program| seccompiler::apply_filter_all_threads(&program))
    {
        tracing::error!(%error, "the filter of a made machine cannot be set; ending");
        std::process::exit(1);
    }
}

pub(super) fn compile(stage: Stage) -> Result<BpfProgram, seccompiler::Error> {
    let mut rules = Rules::new();
    for call in CALLS.iter().filter(|call| call.is_in(stage)) {
        rules.entry(call.number).or_default().extend(rule(call)?);
    }
    let listed: BpfProgram =
        SeccompFilter::new(rules, FORBIDDEN, SeccompAction::Allow, TargetArch::x86_64)?.try_into()?;
    Ok(without_clone3().into_iter().chain(listed).collect())
}

/// Answers clone3 with ENOSYS, and leaves any other call to what follows (linux/filter.h, linux/seccomp.h). Its flags are in
/// memory, where no filter sees them: the C library takes clone instead.
fn without_clone3() -> [sock_filter; 3] {
    let instruction = |code: u32, skip_unless: u8, k: u32| sock_filter {
        code: code as u16,
        jt: 0,
        jf: skip_unless,
        k,
    };
    let number = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, number),
        instruction(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            1,
            libc::SYS_clone3 as u32,
        ),
        instruction(
            libc::BPF_RET | libc::BPF_K,
            0,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        ),
    ]
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
