use std::collections::BTreeMap;
use std::process::{Child, Command};

use thaw_pools::process::ProcessRecord;
use thaw_protocol::control::{CONTROL_VERSION, DeviceId};

use super::record::RECORD;
use super::*;
use crate::container::RootServing;
use crate::id::new_id;

pub(super) fn record(id: &str, vmm: Option<&Child>, tethered: bool) -> Record {
    Record {
        id: id.into(),
        name: Some(format!("name-{id}")),
        image: "busybox".into(),
        image_digest: None,
        command: vec![],
        created: 1,
        owner: ProcessRecord::myself(),
        client: None,
        vmm: vmm.map(|c| ProcessRecord::of(c.id() as i32).unwrap()),
        control: CONTROL_VERSION,
        cgroup: None,
        tethered,
        ready: true,
        vcpus: 1,
        memory_mib: 128,
        provenance: None,
        network: None,
        pod_network: None,
        root: RootServing::Virtiofs,
        terms: Terms::default(),
        volumes: Vec::new(),
        share: None,
        host_disks: BTreeMap::new(),
        cpu_limit_millis: None,
        stock: None,
        hostname: None,
        after_thaw: None,
        remote: None,
    }
}

pub(super) fn sleeper() -> Child {
    Command::new("sleep").arg("60").spawn().unwrap()
}

/// A directory as a killed owner leaves it: it exists and is not locked.
pub(super) fn abandoned(run: &RunDirectory, record: &Record) {
    let mut directory = run.create(record).unwrap();
    directory.keep();
}

#[test]
fn what_a_dead_owner_left_is_removed_and_what_lives_is_not() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let cgroups = Hierarchy::V2 {
        root: root.path().join("cg"),
        favordynmods: false,
    };
    fs::create_dir(root.path().join("cg")).unwrap();

    let (mut doomed, mut unready, mut spared) = (sleeper(), sleeper(), sleeper());
    let mut half_deleted = sleeper();
    let owned = run.create(&record("owned", None, true)).unwrap();
    let dead = Record {
        cgroup: Some("dead".into()),
        ..record("dead", Some(&doomed), true)
    };
    abandoned(&run, &dead);
    cgroups.make("dead").unwrap();
    // A cgroup made ahead by a process that has ended.
    cgroups.make("1.1.1").unwrap();
    abandoned(
        &run,
        &Record {
            ready: false,
            ..record("half-made", Some(&unready), false)
        },
    );
    abandoned(&run, &record("untethered", Some(&spared), false));
    // Its owner was killed while it deleted it.
    abandoned(&run, &record("half-deleted", Some(&half_deleted), false));
    ended::note_end(&run.directory("half-deleted"));
    abandoned(&run, &record("never-started", None, true));
    fs::create_dir(run.directory("no-record")).unwrap();
    abandoned(&run, &record("unwanted", None, false));
    assert!(run.end("unwanted", &cgroups));
    assert!(!run.end("unwanted", &cgroups) && !run.end("owned", &cgroups));

    assert_eq!(run.clean(&cgroups), 5);
    let mut left: Vec<_> = run.list().into_iter().map(|r| r.id).collect();
    left.sort();
    assert_eq!(left, ["owned", "untethered"]);
    assert!(
        doomed.try_wait().unwrap().is_some(),
        "the tethered VMM was killed"
    );
    assert!(
        unready.try_wait().unwrap().is_some(),
        "so was one its owner had not made ready"
    );
    assert!(half_deleted.try_wait().unwrap().is_some(), "so was this");
    assert!(spared.try_wait().unwrap().is_none(), "the untethered one was not");
    assert!(cgroups.names().is_empty());

    let adopted = run.adopt(&cgroups);
    assert_eq!(adopted.len(), 1);
    assert_eq!(adopted[0].0.id, "untethered");
    assert!(run.adopt(&cgroups).is_empty(), "it has an owner now");
    spared.kill().unwrap();
    spared.wait().unwrap();
    drop((owned, adopted));
    assert!(
        !root.path().join("sandboxes").exists(),
        "it goes with its last sandbox"
    );
}

#[test]
fn sandbox_that_ends_after_cleaning_is_removed_on_adoption() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let cgroups = Hierarchy::V2 {
        root: root.path().join("cg"),
        favordynmods: false,
    };
    fs::create_dir(root.path().join("cg")).unwrap();
    let mut vmm = sleeper();
    let late = Record {
        cgroup: Some("late".into()),
        ..record("late", Some(&vmm), false)
    };
    abandoned(&run, &late);
    cgroups.make("late").unwrap();
    assert_eq!(run.clean(&cgroups), 0, "it lives");
    vmm.kill().unwrap();
    vmm.wait().unwrap();

    assert!(run.adopt(&cgroups).is_empty());
    assert!(cgroups.names().is_empty());
    assert!(!run.directory("late").exists());
    let [failed] = &run.ended()[..] else {
        panic!("it is not listed as failed")
    };
    assert_eq!(failed.id, "late");
}

#[test]
fn sandboxes_are_found_by_id_name_and_unambiguous_beginning() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let mut vmm = sleeper();
    let _a = run.create(&record("aa11", Some(&vmm), true)).unwrap();
    let _b = run.create(&record("aa22", Some(&vmm), true)).unwrap();
    let _c = run.create(&record("cc33", None, true)).unwrap();
    assert_eq!(run.find("aa11").unwrap().id, "aa11");
    assert_eq!(run.find("name-aa22").unwrap().id, "aa22");
    assert_eq!(run.find("aa2").unwrap().id, "aa22");
    for unfit in ["aa", "cc33", "", "zz"] {
        assert_eq!(
            run.find(unfit).unwrap_err().kind,
            ErrorKind::SandboxNotFound,
            "{unfit}"
        );
    }
    let again = Record {
        name: Some("name-aa11".into()),
        ..record("dd44", None, true)
    };
    assert_eq!(run.create(&again).unwrap_err().kind, ErrorKind::NameInUse);
    vmm.kill().unwrap();
    vmm.wait().unwrap();
}

#[test]
fn many_begin_and_end_at_once() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let start = std::sync::Barrier::new(8);
    let none = Hierarchy::None;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (run, start, none) = (&run, &start, &none);
            scope.spawn(move || {
                start.wait();
                for n in 0..200 {
                    let id = format!("{thread}-{n}");
                    let directory = run.create(&record(&id, None, true)).unwrap();
                    assert!(directory.path().join(RECORD).exists());
                    match n % 3 {
                        // Each of these ways of removing a sandbox removes the directory of all sandboxes with the last one.
                        0 => drop(run.clean(none)),
                        1 => {
                            let mut directory = directory;
                            directory.keep();
                            drop(directory);
                            // A cleaner may have been faster.
                            run.end(&id, none);
                        }
                        _ => {}
                    }
                }
            });
        }
    });
    assert!(
        !root.path().join("sandboxes").exists(),
        "it goes with its last sandbox"
    );
}

fn unnamed(id: &str) -> Record {
    Record {
        name: None,
        ..record(id, None, false)
    }
}

/// The directory of a spare with this id.
fn made_ahead(run: &RunDirectory, id: &str) -> SandboxDirectory {
    let directory = run.spares().create(&unnamed(id)).unwrap();
    fs::write(directory.path().join("vsock.sock"), b"").unwrap();
    directory
}

#[test]
fn spare_that_continues_a_paused_sandbox_gets_its_id() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let paused = unnamed("paused");
    let take = |spare: &str| {
        let name = run.hold_name(&paused).unwrap();
        run.take(made_ahead(&run, spare), &paused, name)
    };
    let taken = take("one").unwrap();
    assert_eq!(taken.path(), run.directory("paused"));
    assert!(taken.vsock_socket().exists() && !run.spares().directory("one").exists());
    assert_eq!(taken.record().unwrap(), paused);
    // A machine that is there is not replaced, and the spare is removed.
    assert!(take("two").is_err() && !run.spares().directory("two").exists());
    assert_eq!(taken.record().unwrap(), paused);
    drop(taken);

    // The next process removes what a killed one left in either place.
    let unready = Record {
        ready: false,
        ..paused.clone()
    };
    for mut left in [made_ahead(&run, "three"), take("four").unwrap()] {
        left.write(&unready).unwrap();
        left.keep();
    }
    run.clean(&Hierarchy::None);
    assert!(!run.directory("paused").exists() && !run.spares().directory("three").exists());
}

#[test]
fn spare_locked_by_a_child_of_its_dead_owner_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let mut left = made_ahead(&run, "left");
    let owner = Some(ProcessRecord {
        pid: i32::MAX,
        start_time: 1,
    });
    let unowned = Record {
        owner,
        ..unnamed("left")
    };
    left.write(&unowned).unwrap();
    left.keep();
    let child = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(left);
    });
    run.clean(&Hierarchy::None);
    child.join().unwrap();
    assert!(!run.spares().directory("left").exists());
}

#[test]
fn a_taken_spare_is_the_sandbox_with_its_files_and_its_lock() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let (spares, cgroups) = (run.spares(), Hierarchy::None);
    let first = unnamed("first");
    let name = run.hold_name(&first).unwrap();
    let taken = run.take(made_ahead(&run, "first"), &first, name).unwrap();
    assert_eq!(taken.path(), run.directory("first"));
    assert!(taken.vsock_socket().exists() && !spares.directory("first").exists());
    assert_eq!(taken.record().unwrap(), first);
    run.clean(&cgroups);
    assert!(taken.path().exists(), "its owner lives");

    // The first one's end removes the directory of all sandboxes, and the second makes it again.
    drop(taken);
    assert!(!root.path().join("sandboxes").exists());
    let second = record("second", None, false);
    let name = run.hold_name(&second).unwrap();
    let mut taken = run.take(made_ahead(&run, "second"), &second, name).unwrap();
    let other = Record {
        name: second.name.clone(),
        ..record("third", None, false)
    };
    assert_eq!(run.hold_name(&other).unwrap_err().kind, ErrorKind::NameInUse);

    taken.keep();
    drop(taken);
    run.clean(&cgroups);
    assert!(!run.directory("second").exists(), "nobody owns it");
    spares.remove_if_unused();
    assert!(!root.path().join("spares").exists());
}

#[test]
fn ids_differ() {
    let (a, b) = (new_id().unwrap(), new_id().unwrap());
    assert_eq!(a.len(), 12);
    assert_ne!(a, b);
}

#[test]
fn who_waits_for_an_owner_waits_until_its_sandbox_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let owned = run.create(&record("owned", None, true)).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            run.wait_for_owner("owned").unwrap();
            assert!(!run.directory("owned").exists());
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!waiting.is_finished());
        drop(owned);
        waiting.join().unwrap();
    });
    run.wait_for_owner("owned").unwrap();
}

#[test]
fn records_of_the_previous_release_are_read() {
    let sandbox: Record = thaw_record_fixtures::check("sandbox.json");
    assert!(sandbox.outlives_owner());
    assert_eq!((sandbox.control, sandbox.vmm.map(|v| v.pid)), (4, Some(1201)));
    assert_eq!(sandbox.host_disks.keys().collect::<Vec<_>>(), [&DeviceId::Blk1]);
    let spare: Record = thaw_record_fixtures::check("spare.json");
    assert!(!spare.outlives_owner());
}

/// A record of a new sandbox has every field that the previous release requires.
#[test]
fn record_of_this_release_has_what_the_previous_requires() {
    let written = thaw_records::encode(&record("a", None, false)).unwrap();
    let written: serde_json::Value = serde_json::from_slice(&written).unwrap();
    let required = [
        "id",
        "name",
        "image",
        "image_digest",
        "command",
        "created",
        "owner",
        "client",
        "vmm",
        "tethered",
        "ready",
        "vcpus",
        "memory_mib",
    ];
    for field in required {
        assert!(written.get(field).is_some(), "{field}");
    }
}

fn of_tenant(id: &str, tenant: Option<&str>) -> Record {
    Record {
        name: Some("web".into()),
        terms: Terms {
            tenant: tenant.map(|t| t.parse().unwrap()),
            ..Terms::default()
        },
        ..record(id, None, true)
    }
}

#[test]
fn name_is_taken_within_its_tenant_alone() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let tenants = [None, Some("acme"), Some("other")];
    let held: Vec<_> = tenants
        .iter()
        .enumerate()
        .map(|(n, tenant)| run.create(&of_tenant(&format!("{n}"), *tenant)).unwrap())
        .collect();
    for tenant in tenants {
        let again = run.create(&of_tenant("again", tenant)).unwrap_err();
        assert_eq!(again.kind, ErrorKind::NameInUse, "{tenant:?}");
    }
    // No name may look like an id, so a request by id tells a tenant nothing about other tenants.
    let of_an_id = |name: &str, tenant| {
        let record = Record {
            name: Some(name.into()),
            ..of_tenant("new", tenant)
        };
        run.create(&record).map(drop).map_err(|e| e.kind)
    };
    for tenant in tenants {
        assert_eq!(of_an_id("1", tenant), Err(ErrorKind::NameInUse));
    }
    drop(held);
}

#[test]
fn name_on_the_host_is_that_of_no_tenant() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let mut vmm = sleeper();
    let living = |id: &str, tenant| Record {
        vmm: record(id, Some(&vmm), true).vmm,
        ..of_tenant(id, tenant)
    };
    let acme = run.create(&living("aa", Some("acme"))).unwrap();
    assert_eq!(run.find("web").unwrap_err().kind, ErrorKind::SandboxNotFound);
    let found = run.find("aa").unwrap();
    assert_eq!(
        found.terms.tenant,
        Some("acme".parse().unwrap()),
        "its record has it"
    );
    let ours = run.create(&living("bb", None)).unwrap();
    assert_eq!(run.find("web").unwrap().id, "bb");
    drop((acme, ours));
    vmm.kill().unwrap();
    vmm.wait().unwrap();
}

/// Such a record comes from another release or another program, and its tenant is invalid.
#[test]
fn record_with_a_wrong_tenant_is_unreadable() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let directory = run.create(&of_tenant("a", Some("acme"))).unwrap();
    let path = directory.path().join(RECORD);
    let written = fs::read_to_string(&path).unwrap();
    assert!(read_record(directory.path()).is_ok() && written.contains("\"acme\""));
    fs::write(&path, written.replace("\"acme\"", "\"../acme\"")).unwrap();
    assert!(matches!(
        read_record(directory.path()),
        Err(RecordError::Malformed(_))
    ));
}
