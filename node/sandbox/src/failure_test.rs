use proptest::prelude::*;

use super::*;

fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::to_owned).collect()
}

fn reason(evidence: Evidence) -> (String, String) {
    let failure = evidence.failure();
    (failure.reason, failure.message)
}

#[test]
fn a_reset_is_explained_by_the_console() {
    let reset = |console: &str| {
        reason(Evidence {
            exited: Some(ExitReason::Reset),
            // thawd killed the VMM after the guest had ended.
            vmm: VmmEnd::Known(Ended::Signal(9)),
            console: lines(console),
            ..Evidence::default()
        })
    };
    let (code, message) = reset(
        "[ 1.0] sysrq: Trigger a crash\n[ 1.1] Kernel panic - not syncing: sysrq triggered crash\n---[ end",
    );
    assert_eq!(code, "guest-panic");
    assert!(message.ends_with("sysrq triggered crash"), "{message}");
    let (code, _) = reset("Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100");
    assert_eq!(code, "agent-died");
    assert_eq!(reset("all is well").0, "guest-reset");
}

#[test]
fn an_end_of_the_guest_hides_how_thawd_ended_its_vmm() {
    let failure = Evidence {
        exited: Some(ExitReason::Fault("triple fault\x1b[31m at 0x10".into())),
        vmm: VmmEnd::Known(Ended::Signal(9)),
        oom_kills: 1,
        ..Evidence::default()
    };
    let failure = failure.failure();
    assert_eq!((failure.reason.as_str(), failure.signal), ("cpu-fault", None));
    assert!(!failure.message.contains('\x1b'));
}

#[test]
fn lost_memory_hides_how_thawd_ended_the_vmm() {
    let failure = Evidence {
        memory_lost: Some("memory chunk 7: \x1b[31mno answer".into()),
        vmm: VmmEnd::Known(Ended::Signal(9)),
        oom_kills: 1,
        ..Evidence::default()
    };
    let failure = failure.failure();
    assert_eq!((failure.reason.as_str(), failure.signal), ("memory-lost", None));
    assert!(failure.message.contains("chunk 7") && !failure.message.contains('\x1b'));
}

#[test]
fn a_killed_vmm_ran_out_of_memory_if_the_kernel_says_so() {
    let killed = |vmm, oom_kills| {
        reason(Evidence {
            vmm,
            oom_kills,
            ..Evidence::default()
        })
        .0
    };
    assert_eq!(killed(VmmEnd::Known(Ended::Signal(9)), 1), "out-of-memory");
    assert_eq!(killed(VmmEnd::Unknown, 1), "out-of-memory");
    assert_eq!(killed(VmmEnd::WithoutThawd, 2), "out-of-memory");
    assert_eq!(killed(VmmEnd::Known(Ended::Signal(9)), 0), "signal");
    assert_eq!(killed(VmmEnd::Known(Ended::Signal(6)), 1), "signal");
    assert_eq!(killed(VmmEnd::Known(Ended::Code(1)), 1), "vmm-error");
    assert_eq!(killed(VmmEnd::Lives, 1), "vmm-lost");
    assert_eq!(killed(VmmEnd::Unknown, 0), "unknown");
    assert_eq!(killed(VmmEnd::WithoutThawd, 0), "unknown");
}

#[test]
fn a_forbidden_call_is_named_also_where_nobody_saw_the_status() {
    let log = lines("{\"level\":\"INFO\"}\nthaw-vmm: forbidden system call ptrace (101) of a device thread");
    for vmm in [
        VmmEnd::WithoutThawd,
        VmmEnd::Unknown,
        VmmEnd::Known(Ended::Code(FORBIDDEN_CODE)),
    ] {
        let log = log.clone();
        let (code, message) = reason(Evidence {
            vmm,
            log,
            ..Evidence::default()
        });
        assert_eq!(code, "forbidden-call");
        assert!(message.contains("ptrace (101)"), "{message}");
    }
    let unnamed = Evidence {
        vmm: VmmEnd::Known(Ended::Code(FORBIDDEN_CODE)),
        ..Evidence::default()
    };
    assert_eq!(reason(unnamed).0, "forbidden-call");
}

#[test]
fn a_vmm_that_misbehaved_is_told_by_what_it_did() {
    let evidence = Evidence {
        misconduct: Some("it sent what is no message".into()),
        vmm: VmmEnd::Known(Ended::Signal(9)),
        ..Evidence::default()
    };
    let failure = evidence.failure();
    assert_eq!((failure.reason.as_str(), failure.signal), ("vmm-lost", None));
    assert!(failure.message.contains("no message"), "{}", failure.message);
}

#[test]
fn signals_and_statuses_are_told_as_numbers_too() {
    let ended = |ended| {
        let evidence = Evidence {
            vmm: VmmEnd::Known(ended),
            ..Evidence::default()
        };
        let failure = evidence.failure();
        (failure.exit_status, failure.signal, failure.message)
    };
    let (code, signal, message) = ended(Ended::Signal(9));
    assert_eq!((code, signal), (None, Some(9)));
    assert!(message.contains("SIGKILL"), "{message}");
    let (code, signal, message) = ended(Ended::Code(1));
    assert_eq!((code, signal), (Some(1), None));
    assert!(message.contains("status 1"), "{message}");
    assert!(ended(Ended::Signal(40)).2.contains("signal 40"));
}

#[test]
fn a_directory_tells_what_was_written_last() {
    let directory = tempfile::tempdir().unwrap();
    assert!(Evidence::written_in(directory.path()).log.is_empty());
    let log: String = (0..5000).map(|n| format!("line {n}\n")).collect();
    std::fs::write(directory.path().join(VMM_LOG), log).unwrap();
    let journal = Journal::open(directory.path()).unwrap();
    let output = crate::agent_client::Output::Stdout;
    journal.append(output, b"first\n\x1b[1mlast\n").unwrap();
    let evidence = Evidence::written_in(directory.path());
    assert_eq!(evidence.log.len(), MOST_LINES);
    assert_eq!(evidence.log[MOST_LINES - 1], "line 4999");
    assert_eq!(evidence.output, ["first", "[1mlast"]);
}

proptest! {
    #[test]
    fn what_is_kept_is_bounded_and_the_newest(lengths in proptest::collection::vec(0usize..300, 0..100)) {
        let lines: Vec<String> = lengths.into_iter().map(|length| "x".repeat(length)).collect();
        let kept = bounded(lines.clone());
        prop_assert!(kept.len() <= MOST_LINES);
        prop_assert!(kept.iter().map(String::len).sum::<usize>() <= MOST_BYTES);
        prop_assert_eq!(&lines[lines.len() - kept.len()..], &kept[..]);
    }
}
