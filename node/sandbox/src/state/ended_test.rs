use std::collections::BTreeMap;
use std::process::{Child, Command};

use proptest::prelude::*;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::control::CONTROL_VERSION;

use super::*;
use crate::agent_client::Output;
use crate::container::RootServing;
use crate::failure::VMM_LOG;
use crate::state::Terms;

fn record(id: &str, vmm: Option<ProcessRecord>) -> Record {
    Record {
        control: CONTROL_VERSION,
        cpu_limit_millis: None,
        stock: None,
        hostname: None,
        after_thaw: None,
        id: id.into(),
        name: Some(format!("name-{id}")),
        image: "busybox".into(),
        image_digest: None,
        command: vec!["true".into()],
        created: 1,
        owner: None,
        client: None,
        vmm,
        cgroup: None,
        tethered: false,
        ready: true,
        vcpus: 1,
        memory_mib: 128,
        provenance: None,
        network: None,
        pod_network: None,
        root: RootServing::Virtiofs,
        terms: Terms {
            labels: [("app".into(), "web".into())].into(),
            ..Terms::default()
        },
        volumes: Vec::new(),
        share: None,
        host_disks: BTreeMap::new(),
        remote: None,
    }
}

fn failed(id: &str, at: u64) -> Sandbox {
    let failure = SandboxFailure {
        at,
        ..Evidence::default().failure()
    };
    record(id, None).failed(Some(3), failure)
}

/// A process that has ended.
fn dead() -> ProcessRecord {
    let mut child = sleeper();
    let record = ProcessRecord::of(child.id() as i32).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    record
}

fn sleeper() -> Child {
    Command::new("sleep").arg("60").spawn().unwrap()
}

/// A directory as a killed owner leaves it: it exists and is not locked.
fn abandoned(run: &RunDirectory, record: &Record) -> PathBuf {
    let mut directory = run.create(record).unwrap();
    directory.keep();
    directory.path().to_owned()
}

fn ids(failed: &[Sandbox]) -> Vec<&str> {
    failed.iter().map(|s| s.id.as_str()).collect()
}

#[test]
fn what_ended_without_an_owner_is_listed_as_failed() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let cgroups = Hierarchy::V2 {
        root: root.path().join("cg"),
        favordynmods: false,
    };
    fs::create_dir(root.path().join("cg")).unwrap();
    let starved = cgroups.make("starved").unwrap();
    fs::write(starved.directories()[0].join("memory.events"), "oom_kill 1\n").unwrap();

    let died = abandoned(&run, &record("died", Some(dead())));
    fs::write(died.join(VMM_LOG), "all is well\n").unwrap();
    let forbade = abandoned(&run, &record("forbade", Some(dead())));
    let line = "thaw-vmm: forbidden system call ptrace (101) of a device thread\n";
    fs::write(forbade.join(VMM_LOG), line).unwrap();
    let starving = Record {
        cgroup: Some("starved".into()),
        ..record("starved", Some(dead()))
    };
    abandoned(&run, &starving);
    // These sandboxes did not fail.
    note_end(&abandoned(&run, &record("asked", Some(dead()))));
    let tethered = Record {
        tethered: true,
        ..record("tethered", Some(dead()))
    };
    abandoned(&run, &tethered);
    let unready = Record {
        ready: false,
        ..record("unready", Some(dead()))
    };
    abandoned(&run, &unready);
    abandoned(&run, &record("never-started", None));
    ready::note(
        &abandoned(&run, &record("waiting", Some(dead()))),
        Readiness::Waiting,
    )
    .unwrap();
    let owned = run.create(&record("owned", Some(dead()))).unwrap();
    let mut vmm = sleeper();
    abandoned(&run, &record("lives", ProcessRecord::of(vmm.id() as i32)));

    run.clean(&cgroups);
    let left = run.ended();
    let reasons: BTreeMap<_, _> = left
        .iter()
        .map(|s| (s.id.as_str(), s.failure.as_ref().unwrap().reason.as_str()))
        .collect();
    let expected = [
        ("died", "unknown"),
        ("forbade", "forbidden-call"),
        ("starved", "out-of-memory"),
    ];
    assert_eq!(reasons, expected.into());
    let died = run.find_ended("died").unwrap().unwrap();
    assert_eq!(
        (died.state.as_str(), died.labels["app"].as_str()),
        (FAILED, "web")
    );
    assert_eq!(died.failure.as_ref().unwrap().log, ["all is well"]);
    assert_eq!(run.list().len(), 2, "what failed has no directory any more");
    // A second start finds the same failures, and no more.
    run.clean(&cgroups);
    assert_eq!(run.ended(), left);
    vmm.kill().unwrap();
    vmm.wait().unwrap();
    run.clean(&cgroups);
    assert_eq!(run.ended().len(), 4);
    drop(owned);
}

#[test]
fn a_sandbox_ended_by_hand_failed_only_if_it_was_dead_before() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let mut vmm = sleeper();
    abandoned(&run, &record("lives", ProcessRecord::of(vmm.id() as i32)));
    abandoned(&run, &record("died", Some(dead())));
    for id in ["lives", "died"] {
        assert!(run.end(id, &Hierarchy::None));
    }
    assert_eq!(ids(&run.ended()), ["died"]);
    vmm.wait().unwrap();
}

#[test]
fn failed_sandboxes_are_found_by_id_name_and_beginning() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    assert!(run.ended().is_empty() && !run.forget_ended("aa11"));
    for (id, at) in [("aa11", 5), ("aa22", 3)] {
        run.note_ended(&Sandbox {
            name: Some("web".into()),
            ..failed(id, at)
        })
        .unwrap();
    }
    assert_eq!(ids(&run.ended()), ["aa22", "aa11"]);
    let found = |wanted: &str| run.find_ended(wanted).map(|s| s.map(|s| s.id));
    assert_eq!(found("aa22").unwrap().unwrap(), "aa22");
    assert_eq!(found("web").unwrap().unwrap(), "aa11", "the last that failed");
    assert_eq!(found("aa1").unwrap().unwrap(), "aa11");
    assert_eq!(found("zz").unwrap(), None);
    assert_eq!(found("").unwrap(), None);
    assert_eq!(found("aa").unwrap_err().kind, ErrorKind::SandboxNotFound);
    assert!(run.forget_ended("aa11") && run.forget_ended("aa22"));
    assert!(
        !root.path().join("failed").exists(),
        "the directory goes with its last"
    );
}

#[test]
fn old_failures_and_half_written_ones_expire() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let retention = Retention {
        seconds: 100,
        most: 2,
    };
    run.expire_ended(retention);
    for (id, age) in [("old", 200), ("first", 30), ("second", 20), ("third", 10)] {
        run.note_ended(&failed(id, now() - age)).unwrap();
    }
    let directory = root.path().join("failed");
    fs::write(directory.join("half.new"), "{").unwrap();
    fs::write(directory.join("later.json"), r#"{"version":2,"sandbox":{}}"#).unwrap();
    run.expire_ended(retention);
    assert_eq!(ids(&run.ended()), ["second", "third"]);
    assert!(!directory.join("half.new").exists());
    assert!(
        directory.join("later.json").exists(),
        "a later release may still want it"
    );
    run.expire_ended(Retention { seconds: 0, most: 2 });
    assert!(!directory.exists());
}

#[test]
fn exited_sandbox_is_kept_with_its_output_until_it_is_forgotten() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let directory = run.create(&record("aa11", None)).unwrap();
    let journal = Journal::open(directory.path()).unwrap();
    journal.append(Output::Stdout, b"hello\n").unwrap();
    run.note_ended(&record("aa11", None).exited(7)).unwrap();
    drop(directory);
    let ended = run.find_ended("name-aa11").unwrap().unwrap();
    assert_eq!((ended.state.as_str(), ended.exit_code), (EXITED, Some(7)));
    assert!(ended.failure.is_none() && ended.ended_at() > Some(0));
    let kept = Journal::kept(&run.ended_output("aa11")).unwrap().unwrap();
    assert_eq!(kept.read(0).unwrap().frames[0].data, b"hello\n");
    run.expire_ended(Retention {
        seconds: 100,
        most: 2,
    });
    assert!(run.ended_output("aa11").exists());
    assert!(run.forget_ended("aa11"));
    assert!(!root.path().join("failed").exists());
}

#[test]
fn output_of_the_oldest_goes_first_and_records_stay() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    for id in ["aa", "bb", "cc"] {
        let directory = run.create(&record(id, None)).unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        journal.append(Output::Stdout, &[b'x'; 1000]).unwrap();
        run.note_ended(&record(id, None).exited(0)).unwrap();
    }
    run.bound_output(["cc", "bb", "aa"].into_iter(), 2100);
    let kept = ["aa", "bb", "cc"].map(|id| run.ended_output(id).exists());
    assert_eq!(kept, [false, true, true]);
    assert_eq!(run.ended().len(), 3);
    run.expire_ended(Retention { seconds: 0, most: 9 });
    assert!(
        !root.path().join("failed").exists(),
        "output expires with its record"
    );
}

#[test]
fn a_damaged_record_hides_no_other() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    run.note_ended(&failed("good", 1)).unwrap();
    run.note_ended(&failed("cut", 2)).unwrap();
    let file = root.path().join("failed/cut.json");
    let whole = fs::read(&file).unwrap();
    for length in (0..whole.len()).step_by(11) {
        fs::write(&file, &whole[..length]).unwrap();
        assert_eq!(ids(&run.ended()), ["good"], "cut at {length}");
    }
    fs::write(&file, &whole).unwrap();
    assert_eq!(ids(&run.ended()), ["good", "cut"]);
}

proptest! {
    #[test]
    fn retention_keeps_the_newest_that_are_young(
        mut ages in proptest::collection::vec(0u64..200, 0..30), seconds in 0u64..200, most in 0usize..30,
    ) {
        ages.sort_by(|a, b| b.cmp(a));
        let all: Vec<Sandbox> = ages.iter().enumerate().map(|(n, age)| failed(&format!("{n:02}"), 1000 - age)).collect();
        let known: Vec<&Sandbox> = all.iter().collect();
        let overdue = Retention { seconds, most }.overdue(&known, 1000);
        let kept: Vec<u64> = all.iter().filter(|s| !overdue.contains(&s.id.as_str())).map(|s| 1000 - ended_at(s)).collect();
        prop_assert!(kept.len() <= most && kept.iter().all(|age| *age < seconds));
        let young = ages.iter().filter(|age| **age < seconds).count();
        prop_assert_eq!(kept.len(), young.min(most));
        prop_assert_eq!(&ages[ages.len() - kept.len()..], &kept[..]);
    }
}
