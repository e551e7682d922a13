use super::*;

/// Runs a program as the kernel would for one call.
fn run(filter: &Filter, arch: u32, nr: u32, args: [u64; 6]) -> u32 {
    let mut data = Vec::new();
    data.extend(nr.to_ne_bytes());
    data.extend(arch.to_ne_bytes());
    data.extend(0u64.to_ne_bytes());
    args.iter().for_each(|a| data.extend(a.to_ne_bytes()));
    let (mut a, mut pc) = (0u32, 0usize);
    loop {
        let i = filter.program[pc];
        pc += 1;
        let taken = |yes: bool| usize::from(if yes { i.jt } else { i.jf });
        match i.code {
            LD_W_ABS => a = u32::from_ne_bytes(data[i.k as usize..i.k as usize + 4].try_into().unwrap()),
            AND => a &= i.k,
            JEQ => pc += taken(a == i.k),
            JGT => pc += taken(a > i.k),
            JGE => pc += taken(a >= i.k),
            RET => return i.k,
            other => panic!("instruction {other:#x}"),
        }
    }
}

/// Index, comparison, value, second value.
type Arg<'a> = (u64, &'a str, u64, u64);
/// Name, action, errno, conditions.
type Call<'a> = (&'a str, &'a str, Option<u32>, &'a [Arg<'a>]);

fn profile(default: &str, calls: &[Call<'_>]) -> Filter {
    let mut section = oci::LinuxSeccomp::new();
    section.DefaultAction = default.into();
    for (name, action, errno, args) in calls {
        let mut entry = oci::LinuxSyscall::new();
        entry.Names = vec![(*name).into(), "a_call_of_the_future".into()];
        entry.Action = (*action).into();
        entry.ErrnoRet = errno.map(oci::linux_syscall::ErrnoRet::Errnoret);
        entry.Args = args
            .iter()
            .map(|(index, op, value, two)| oci::LinuxSeccompArg {
                Index: *index,
                Op: (*op).into(),
                Value: *value,
                ValueTwo: *two,
                ..Default::default()
            })
            .collect();
        section.Syscalls.push(entry);
    }
    compile(&section).unwrap()
}

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const EPERM: u32 = libc::SECCOMP_RET_ERRNO | 1;
const X64: u32 = AUDIT_ARCH_X86_64;
const NONE: [u64; 6] = [0; 6];

#[test]
fn listed_calls_get_their_action_and_the_rest_the_default() {
    let f = profile(
        "SCMP_ACT_ERRNO",
        &[
            ("read", "SCMP_ACT_ALLOW", None, &[]),
            ("clone3", "SCMP_ACT_ERRNO", Some(38), &[]),
            ("mseal", "SCMP_ACT_ALLOW", None, &[]),
        ],
    );
    assert_eq!(run(&f, X64, 0, NONE), ALLOW);
    assert_eq!(run(&f, X64, 435, NONE), libc::SECCOMP_RET_ERRNO | 38);
    assert_eq!(run(&f, X64, 1, NONE), EPERM);
    // Newer than every call of the profile, so programs must fall back.
    assert_eq!(
        run(&f, X64, 463, NONE),
        libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32
    );
    // 32-bit and x32 calls with the same numbers are not matched.
    assert_eq!(run(&f, 0x4000_0003, 0, NONE), EPERM);
    assert_eq!(run(&f, X64, X32_BIT, NONE), EPERM);
}

#[test]
fn several_rules_for_one_call_are_tried_in_turn() {
    let f = profile(
        "SCMP_ACT_ERRNO",
        &[
            ("personality", "SCMP_ACT_ALLOW", None, &[(0, "SCMP_CMP_EQ", 0, 0)]),
            (
                "personality",
                "SCMP_ACT_ALLOW",
                None,
                &[(0, "SCMP_CMP_EQ", 0xffff_ffff, 0)],
            ),
            (
                "clone",
                "SCMP_ACT_ALLOW",
                None,
                &[(0, "SCMP_CMP_MASKED_EQ", 0x7e02_0000, 0)],
            ),
        ],
    );
    let personality = |a| run(&f, X64, 135, [a, 0, 0, 0, 0, 0]);
    assert_eq!(
        [personality(0), personality(0xffff_ffff), personality(8)],
        [ALLOW, ALLOW, EPERM]
    );
    let clone = |a| run(&f, X64, 56, [a, 0, 0, 0, 0, 0]);
    assert_eq!([clone(0x11), clone(0x1000_0000)], [ALLOW, EPERM]);
}

#[test]
fn seccomp_arguments_are_anded_and_values_of_one_ored() {
    let f = profile(
        "SCMP_ACT_ALLOW",
        &[
            (
                "socket",
                "SCMP_ACT_ERRNO",
                Some(97),
                &[(0, "SCMP_CMP_EQ", 16, 0), (2, "SCMP_CMP_EQ", 9, 0)],
            ),
            (
                "ioctl",
                "SCMP_ACT_ERRNO",
                None,
                &[(1, "SCMP_CMP_EQ", 1, 0), (1, "SCMP_CMP_EQ", 2, 0)],
            ),
        ],
    );
    let socket = |a, c| run(&f, X64, 41, [a, 0, c, 0, 0, 0]);
    assert_eq!(
        [socket(16, 9), socket(16, 8), socket(2, 9)],
        [libc::SECCOMP_RET_ERRNO | 97, ALLOW, ALLOW]
    );
    let ioctl = |b| run(&f, X64, 16, [0, b, 0, 0, 0, 0]);
    assert_eq!([ioctl(1), ioctl(2), ioctl(3)], [EPERM, EPERM, ALLOW]);
}

#[test]
fn seccomp_default_has_its_own_errno() {
    let section = oci::LinuxSeccomp {
        DefaultAction: "SCMP_ACT_ERRNO".into(),
        DefaultErrnoRet: Some(38),
        ..Default::default()
    };
    let filter = compile(&section).unwrap();
    assert_eq!(run(&filter, X64, 0, NONE), libc::SECCOMP_RET_ERRNO | 38);
}

#[test]
fn unsupported_specification_is_refused() {
    let mut section = oci::LinuxSeccomp::new();
    section.DefaultAction = "SCMP_ACT_NOTIFY".into();
    assert!(matches!(compile(&section), Err(Error::Unsupported(_))));
    section.DefaultAction = "SCMP_ACT_WHATEVER".into();
    assert!(matches!(compile(&section), Err(Error::Invalid(_))));
}

proptest::proptest! {
    #[test]
    fn every_comparison_is_that_of_64_bit_numbers(
        value in proptest::prop_oneof![proptest::num::u64::ANY, 0u64..4, 0xffff_fffeu64..0x1_0000_0002],
        near in -2i64..3,
        any in proptest::num::u64::ANY,
        pick in proptest::bool::ANY,
        two in proptest::num::u64::ANY,
        op in 0usize..7,
    ) {
        let arg = if pick { any } else { value.wrapping_add_signed(near) };
        let (name, holds) = [
            ("SCMP_CMP_EQ", arg == value),
            ("SCMP_CMP_NE", arg != value),
            ("SCMP_CMP_LT", arg < value),
            ("SCMP_CMP_LE", arg <= value),
            ("SCMP_CMP_GT", arg > value),
            ("SCMP_CMP_GE", arg >= value),
            ("SCMP_CMP_MASKED_EQ", arg & value == two & value),
        ][op];
        let f = profile("SCMP_ACT_ERRNO", &[("read", "SCMP_ACT_ALLOW", None, &[(3, name, value, two & value)])]);
        let got = run(&f, X64, 0, [9, 9, 9, arg, 9, 9]);
        proptest::prop_assert_eq!(got, if holds { ALLOW } else { EPERM });
    }
}

#[test]
fn each_published_word_is_compiled() {
    use thaw_protocol::agent::seccomp::{ACTIONS, COMPARISONS, FLAGS};
    for name in ACTIONS {
        action(name, None).unwrap();
    }
    for op in COMPARISONS {
        let mut argument = oci::LinuxSeccompArg::new();
        argument.Op = op.into();
        condition(&argument).unwrap();
    }
    flags(&FLAGS.map(String::from)).unwrap();
    assert!(action("SCMP_ACT_NOTIFY", None).is_err());
}
