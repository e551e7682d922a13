//! Compiles the specification's seccomp section to a BPF program
//! (Documentation/userspace-api/seccomp_filter.rst).
//!
//! The semantics are those of libseccomp and runc. The rules for a system call are tried in order. A rule
//! applies if all its argument conditions hold, except that several conditions on one argument are
//! alternatives. If no rule applies, the default action does. System call names that this agent does not know
//! are skipped. If the default is an errno, system calls newer than every call of the profile return ENOSYS, so
//! that programs fall back to older ones. Only x86-64 calls have rules: 32-bit and x32 calls get the default
//! action.

use thaw_protocol::agent::oci;

use super::syscalls;
use crate::error::{Error, Result};
use crate::warning;

/// A compiled filter.
#[derive(Clone, Debug)]
pub struct Filter {
    program: Vec<Instruction>,
    flags: libc::c_ulong,
}

type Instruction = libc::sock_filter;

// include/uapi/linux/bpf_common.h
const LD_W_ABS: u16 = 0x20;
const JEQ: u16 = 0x15;
const JGT: u16 = 0x25;
const JGE: u16 = 0x35;
const AND: u16 = 0x54;
const RET: u16 = 0x06;
// offsets in struct seccomp_data
const NR: u32 = 0;
const ARCH: u32 = 4;
const ARGS: u32 = 16;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const X32_BIT: u32 = 0x4000_0000;
/// BPF_MAXINSNS.
const MAX_INSTRUCTIONS: usize = 4096;
/// Placeholder jump targets, which are replaced when a rule is complete.
const FAIL: u8 = 0xff;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Masked,
}

#[derive(Clone, Copy, Debug)]
struct Condition {
    index: u32,
    op: Op,
    value: u64,
    /// The value that the masked argument must equal.
    datum: u64,
}

#[derive(Clone, Debug)]
struct Rule {
    action: u32,
    conditions: Vec<Condition>,
}

/// Compiles the section.
pub fn compile(section: &oci::LinuxSeccomp) -> Result<Filter> {
    let default = action(&section.DefaultAction, section.DefaultErrnoRet)?;
    let mut calls: Vec<(u32, Vec<Rule>)> = Vec::new();
    for entry in &section.Syscalls {
        let errno = match &entry.ErrnoRet {
            Some(oci::linux_syscall::ErrnoRet::Errnoret(n)) => Some(*n),
            _ => None,
        };
        let action = action(&entry.Action, errno)?;
        let rules: Vec<Rule> = alternatives(&entry.Args)?
            .into_iter()
            .map(|conditions| Rule { action, conditions })
            .collect();
        for nr in entry.Names.iter().filter_map(|name| syscalls::number(name)) {
            match calls.iter_mut().find(|(n, _)| *n == nr) {
                Some((_, there)) => there.extend(rules.iter().cloned()),
                None => calls.push((nr, rules.clone())),
            }
        }
    }
    let program = assemble(default, &calls)?;
    Ok(Filter {
        program,
        flags: flags(&section.Flags)?,
    })
}

fn action(name: &str, errno: Option<u32>) -> Result<u32> {
    let number = errno.unwrap_or(libc::EPERM as u32) & 0xffff;
    Ok(match name {
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => libc::SECCOMP_RET_KILL_THREAD,
        "SCMP_ACT_KILL_PROCESS" => libc::SECCOMP_RET_KILL_PROCESS,
        "SCMP_ACT_TRAP" => libc::SECCOMP_RET_TRAP,
        "SCMP_ACT_ERRNO" => libc::SECCOMP_RET_ERRNO | number,
        "SCMP_ACT_TRACE" => libc::SECCOMP_RET_TRACE | number,
        "SCMP_ACT_LOG" => libc::SECCOMP_RET_LOG,
        "SCMP_ACT_ALLOW" => libc::SECCOMP_RET_ALLOW,
        "SCMP_ACT_NOTIFY" => {
            return Err(Error::Unsupported(
                "seccomp: SCMP_ACT_NOTIFY needs a listener on the host and is not supported".into(),
            ));
        }
        other => return Err(Error::Invalid(format!("seccomp: action {other:?} is unknown"))),
    })
}

fn flags(names: &[String]) -> Result<libc::c_ulong> {
    names.iter().try_fold(0, |set, name| {
        Ok(set
            | match name.as_str() {
                "SECCOMP_FILTER_FLAG_TSYNC" => libc::SECCOMP_FILTER_FLAG_TSYNC,
                "SECCOMP_FILTER_FLAG_LOG" => libc::SECCOMP_FILTER_FLAG_LOG,
                "SECCOMP_FILTER_FLAG_SPEC_ALLOW" => libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                other => {
                    return Err(Error::Unsupported(format!(
                        "seccomp: flag {other:?} is not supported"
                    )));
                }
            })
    })
}

/// The sets of conditions under which a rule applies.
fn alternatives(args: &[oci::LinuxSeccompArg]) -> Result<Vec<Vec<Condition>>> {
    let conditions: Vec<Condition> = args.iter().map(condition).collect::<Result<_>>()?;
    let repeated = conditions
        .iter()
        .enumerate()
        .any(|(i, c)| conditions[..i].iter().any(|d| d.index == c.index));
    Ok(if repeated {
        conditions.into_iter().map(|c| vec![c]).collect()
    } else {
        vec![conditions]
    })
}

fn condition(arg: &oci::LinuxSeccompArg) -> Result<Condition> {
    if arg.Index > 5 {
        return Err(Error::Invalid(format!(
            "seccomp: there is no argument {}",
            arg.Index
        )));
    }
    let op = match arg.Op.as_str() {
        "SCMP_CMP_EQ" => Op::Equal,
        "SCMP_CMP_NE" => Op::NotEqual,
        "SCMP_CMP_LT" => Op::Less,
        "SCMP_CMP_LE" => Op::LessOrEqual,
        "SCMP_CMP_GT" => Op::Greater,
        "SCMP_CMP_GE" => Op::GreaterOrEqual,
        "SCMP_CMP_MASKED_EQ" => Op::Masked,
        other => {
            return Err(Error::Invalid(format!(
                "seccomp: comparison {other:?} is unknown"
            )));
        }
    };
    Ok(Condition {
        index: arg.Index as u32,
        op,
        value: arg.Value,
        datum: arg.ValueTwo,
    })
}

fn statement(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn assemble(default: u32, calls: &[(u32, Vec<Rule>)]) -> Result<Vec<Instruction>> {
    let mut p = vec![
        statement(LD_W_ABS, ARCH),
        jump(JEQ, AUDIT_ARCH_X86_64, 1, 0),
        statement(RET, default),
        statement(LD_W_ABS, NR),
        jump(JGE, X32_BIT, 0, 1),
        statement(RET, default),
    ];
    let newest = calls.iter().map(|(nr, _)| *nr).max();
    if let (Some(newest), true) = (newest, default & 0xffff_0000 == libc::SECCOMP_RET_ERRNO) {
        p.push(jump(JGT, newest, 0, 1));
        p.push(statement(RET, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32));
    }
    for (nr, rules) in calls {
        let mut block = Vec::new();
        for rule in rules {
            block.extend(rule_code(rule)?);
            if rule.conditions.is_empty() {
                break;
            }
        }
        if rules.iter().all(|r| !r.conditions.is_empty()) {
            block.push(statement(RET, default));
        }
        // The accumulator holds the number here, because a block that matches always ends in a return.
        let length = u8::try_from(block.len())
            .map_err(|_| Error::Unsupported(format!("seccomp: too many conditions on system call {nr}")))?;
        p.push(jump(JEQ, *nr, 0, length));
        p.extend(block);
    }
    p.push(statement(RET, default));
    if p.len() > MAX_INSTRUCTIONS {
        return Err(Error::Unsupported(format!(
            "seccomp: the profile needs {} instructions, the kernel takes {MAX_INSTRUCTIONS}",
            p.len()
        )));
    }
    Ok(p)
}

/// Emits all conditions and then the action. A condition that does not hold jumps past the action.
fn rule_code(rule: &Rule) -> Result<Vec<Instruction>> {
    let mut code: Vec<Instruction> = rule.conditions.iter().flat_map(condition_code).collect();
    code.push(statement(RET, rule.action));
    let end = code.len();
    for (at, instruction) in code.iter_mut().enumerate() {
        for target in [&mut instruction.jt, &mut instruction.jf] {
            if *target == FAIL {
                *target = u8::try_from(end - at - 1)
                    .ok()
                    .filter(|t| *t != FAIL)
                    .ok_or_else(|| Error::Unsupported("seccomp: a rule is too long".into()))?;
            }
        }
    }
    Ok(code)
}

/// Compares 64 bits in two halves of 32 bits. Falls through if the comparison holds, else jumps to [`FAIL`].
fn condition_code(c: &Condition) -> Vec<Instruction> {
    let (low, high) = (ARGS + 8 * c.index, ARGS + 8 * c.index + 4);
    let (value_low, value_high) = (c.value as u32, (c.value >> 32) as u32);
    let load = |at| statement(LD_W_ABS, at);
    match c.op {
        Op::Equal => vec![
            load(high),
            jump(JEQ, value_high, 0, FAIL),
            load(low),
            jump(JEQ, value_low, 0, FAIL),
        ],
        Op::NotEqual => vec![
            load(high),
            jump(JEQ, value_high, 0, 2),
            load(low),
            jump(JEQ, value_low, FAIL, 0),
        ],
        Op::Masked => vec![
            load(high),
            statement(AND, value_high),
            jump(JEQ, (c.datum >> 32) as u32, 0, FAIL),
            load(low),
            statement(AND, value_low),
            jump(JEQ, c.datum as u32, 0, FAIL),
        ],
        Op::Greater => ordered(load(high), load(low), value_high, value_low, JGT, false),
        Op::GreaterOrEqual => ordered(load(high), load(low), value_high, value_low, JGE, false),
        Op::LessOrEqual => ordered(load(high), load(low), value_high, value_low, JGT, true),
        Op::Less => ordered(load(high), load(low), value_high, value_low, JGE, true),
    }
}

/// `arg > value` (JGT) or `arg >= value` (JGE), inverted by `not`. The high halves decide unless they are
/// equal.
fn ordered(
    load_high: Instruction,
    load_low: Instruction,
    high: u32,
    low: u32,
    code: u16,
    not: bool,
) -> Vec<Instruction> {
    let (holds, fails) = if not { (FAIL, 0) } else { (0, FAIL) };
    // Jumps past the low comparison if the high halves decide. Distances are relative to each jump.
    let (above, below) = if not { (FAIL, 2) } else { (3, FAIL) };
    vec![
        load_high,
        jump(JGT, high, above, 0),
        jump(JEQ, high, 0, below),
        load_low,
        jump(code, low, holds, fails),
    ]
}

/// Sets the filter for this process. Needs no_new_privs or CAP_SYS_ADMIN.
pub fn apply(filter: &Filter) -> Result<()> {
    let program = libc::sock_fprog {
        len: filter.program.len() as u16,
        filter: filter.program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies `len` instructions from `filter`, which outlives the call, and writes nothing.
    let set = |flags: libc::c_ulong| unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    if set(filter.flags) == 0 {
        return Ok(());
    }
    let failure = Error::last("set the seccomp filter");
    // A kernel that lacks one of the optional flags returns EINVAL; the filter itself is required.
    if filter.flags != 0 && failure.errno() == Some(libc::EINVAL) && set(0) == 0 {
        warning!("seccomp: this kernel lacks one of the flags {:#x}", filter.flags);
        return Ok(());
    }
    Err(failure)
}

#[cfg(test)]
#[path = "seccomp_test.rs"]
mod tests;
