use super::*;

const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
const UNIFIED: &str =
    "26 22 0:23 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate,favordynmods\n";

#[test]
fn hierarchy_is_read_from_mountinfo() {
    let roots = vec![
        "/sys/fs/cgroup/memory".into(),
        "/sys/fs/cgroup/cpu,cpuacct".into(),
    ];
    assert_eq!(Hierarchy::parse(HYBRID), Hierarchy::V1 { roots });
    let unified = Hierarchy::V2 {
        root: "/sys/fs/cgroup".into(),
        favordynmods: true,
    };
    assert_eq!(Hierarchy::parse(UNIFIED), unified);
    assert_eq!(Hierarchy::parse("garbage"), Hierarchy::None);
}

#[test]
fn cgroup_that_cannot_be_made_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (good, file) = (directory.path().join("good"), directory.path().join("file"));
    fs::create_dir(&good).unwrap();
    fs::write(&file, b"").unwrap();
    let hierarchy = Hierarchy::V1 {
        roots: vec![good.clone(), file],
    };
    let Unavailable(reason) = hierarchy.make("x").unwrap_err();
    assert!(reason.contains("file/thaw/x"), "{reason}");
    assert_eq!(fs::read_dir(&good).unwrap().count(), 0);
    assert!(Hierarchy::None.make("x").is_err());
}

#[test]
fn cgroup_is_made_adopted_and_destroyed() {
    let root = tempfile::tempdir().unwrap();
    let hierarchy = Hierarchy::V2 {
        root: root.path().into(),
        favordynmods: false,
    };
    let (a, b) = (hierarchy.make("a").unwrap(), hierarchy.make("b").unwrap());
    assert_eq!(hierarchy.names(), ["a", "b"]);
    drop(a);
    hierarchy.adopt("a").destroy();
    assert_eq!(hierarchy.names(), ["b"]);
    b.destroy();
    assert_eq!(
        fs::read_dir(root.path()).unwrap().count(),
        0,
        "the parent goes with its last child"
    );
}

#[test]
fn cgroup_takes_all_processes_of_another() {
    let root = tempfile::tempdir().unwrap();
    let roots = ["cpu", "memory"].map(|name| root.path().join(name));
    roots.iter().for_each(|root| fs::create_dir(root).unwrap());
    let hierarchy = Hierarchy::V1 { roots: roots.into() };
    let (from, to) = (hierarchy.make("from").unwrap(), hierarchy.make("to").unwrap());
    // The last written value is visible, because these are not cgroups.
    for (directory, pids) in from.directories().iter().zip(["7\n8\n", "7\n9\n"]) {
        fs::write(directory.join("cgroup.procs"), pids).unwrap();
    }
    to.take_from(&from);
    let taken = |n: usize| fs::read_to_string(to.directories()[n].join("cgroup.procs")).unwrap();
    assert_eq!([taken(0), taken(1)], ["8", "9"]);
}

#[test]
fn sweep_removes_cgroups_of_dead_makers_alone() {
    let root = tempfile::tempdir().unwrap();
    let hierarchy = Hierarchy::V2 {
        root: root.path().into(),
        favordynmods: false,
    };
    let myself = ProcessRecord::myself().unwrap();
    let dead = ProcessRecord {
        start_time: myself.start_time + 1,
        ..myself
    };
    let ours = Cgroups::new(hierarchy.clone());
    let kept = [ours.make(&()).unwrap(), ours.make(&()).unwrap()];
    assert!(
        kept.iter()
            .all(|c| parse_name(c.name()).is_some_and(|(maker, _)| maker == myself))
    );
    for leftover in [name(dead, 0), name(dead, 7), name(dead, 8)] {
        hierarchy.make(&leftover).unwrap();
    }
    // As the kernel keeps a cgroup in which a sandbox is still alive.
    fs::write(
        root.path().join(PARENT).join(name(dead, 8)).join("inhabited"),
        b"",
    )
    .unwrap();
    for other in ["theirs", "1.2", "1.2.3.4", "1.2.x"] {
        hierarchy.make(other).unwrap();
        assert_eq!(parse_name(other), None);
    }
    assert_eq!(hierarchy.sweep(), 2);
    let mut left = hierarchy.names();
    left.retain(|n| parse_name(n).is_some());
    let mut expected = [kept[0].name(), kept[1].name(), &name(dead, 8)].map(String::from);
    expected.sort();
    assert_eq!(left, expected);
    assert_eq!(hierarchy.names().len(), 7);
}

#[test]
fn real_cgroup_holds_a_process() {
    let hierarchy = Hierarchy::detect();
    let id = format!("test-{}", std::process::id());
    let cgroup = match hierarchy.make(&id) {
        Ok(cgroup) => cgroup,
        Err(reason) => return thaw_test_skip::skip(reason),
    };
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let kind = Cgroups::new(hierarchy);
    kind.check(&cgroup).unwrap();
    let added = cgroup.add(child.id() as i32);
    let inhabited = kind.check(&cgroup);
    let seen = fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let directories = cgroup.directories().to_vec();
    cgroup.destroy();
    added.unwrap();
    inhabited.unwrap_err();
    assert!(seen.contains(&format!("/thaw/{id}")), "{seen}");
    assert!(directories.iter().all(|d| !d.exists()));
}

#[test]
fn v2_cgroup_is_removed_once_its_processes_end() {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let unified = mounts.lines().find(|l| l.contains(" - cgroup2 "));
    let Some(root) = unified.and_then(|l| l.split(' ').nth(4)) else {
        return thaw_test_skip::skip("no cgroup v2 is mounted");
    };
    let hierarchy = Hierarchy::V2 {
        root: root.into(),
        favordynmods: false,
    };
    let cgroup = match hierarchy.make(&format!("test-v2-{}", std::process::id())) {
        Ok(cgroup) => cgroup,
        Err(reason) => return thaw_test_skip::skip(reason),
    };
    let directories = cgroup.directories().to_vec();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let added = cgroup.add(child.id() as i32);
    let busy = fs::remove_dir(&directories[0]).is_err_and(|e| is_busy(&e));
    // Killed, but its end has not been waited for.
    child.kill().unwrap();
    cgroup.destroy();
    child.wait().unwrap();
    assert!(directories.iter().all(|d| !d.exists()));
    match added {
        Ok(()) => assert!(busy),
        Err(e) => thaw_test_skip::skip(format!("the process: {e}")),
    }
}

#[test]
fn foreign_cgroup_is_used_and_left() {
    let root = tempfile::tempdir().unwrap();
    let hierarchy = Hierarchy::V2 {
        root: root.path().into(),
        favordynmods: false,
    };
    let made = hierarchy.make("/pods/one/vm").unwrap();
    assert_eq!(made.directories(), [root.path().join("pods/one/vm")]);
    assert!(hierarchy.names().is_empty(), "none of ours");
    drop(made);
    hierarchy.adopt("/pods/one/vm").destroy();
    assert!(!root.path().join("pods/one/vm").exists() && root.path().join("pods/one").is_dir());
}

#[test]
fn oom_kills_are_read_from_v1_and_v2() {
    for (file, text, kills) in [
        ("memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        (
            "memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            1,
        ),
        ("memory.oom_control", "oom_kill_disable 1\nunder_oom 0\n", 0),
        ("memory.events", "oom_kill none\n", 0),
        ("cgroup.procs", "", 0),
    ] {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(file), text).unwrap();
        let cgroup = Cgroup {
            name: "n".into(),
            // A hierarchy without the memory controller comes first.
            directories: vec!["/nowhere".into(), directory.path().into()],
        };
        assert_eq!(cgroup.oom_kills(), kills, "{file}: {text}");
    }
}
