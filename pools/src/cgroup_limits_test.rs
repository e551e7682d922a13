use super::*;
use crate::cgroup::Hierarchy;

const MIB: u64 = 1 << 20;

fn unified(root: &Path) -> Hierarchy {
    Hierarchy::V2 {
        root: root.into(),
        favordynmods: false,
    }
}

/// A cgroup in a directory of ours, with these files in it.
fn cgroup(root: &Path, name: &str, files: &[&str]) -> Cgroup {
    let cgroup = unified(root).make(name).unwrap();
    for file in files {
        fs::write(cgroup.directories()[0].join(file), "").unwrap();
    }
    cgroup
}

fn said(cgroup: &Cgroup, name: &str) -> String {
    fs::read_to_string(cgroup.directories()[0].join(name)).unwrap()
}

fn needs(memory_mib: u32) -> Needs {
    Needs {
        memory_mib,
        ..Needs::default()
    }
}

#[test]
fn memory_limit_covers_the_guest_and_its_overhead() {
    let memory = |needs: Needs| CgroupLimits::of(needs).memory;
    let in_files = |in_files| Needs {
        in_files,
        ..needs(64)
    };
    let shares = |memory_mib| Needs {
        shares: true,
        ..needs(memory_mib)
    };
    assert_eq!(memory(needs(64)), (64 + 2 + 128) * MIB);
    assert_eq!(memory(needs(65536)), (65536 + 2048 + 128) * MIB);
    assert_eq!(memory(in_files(8 * MIB)), (64 + 2 + 128 + 8) * MIB);
    assert_eq!(memory(in_files(u64::MAX)), u64::MAX);
    assert_eq!(memory(shares(64)), (64 + 2 + 128 + 64) * MIB);
    assert_eq!(memory(shares(65536)), (65536 + 2048 + 128 + 2048) * MIB);
}

#[test]
fn limit_where_controllers_are_there_writes_each_file() {
    let root = tempfile::tempdir().unwrap();
    let cgroup = cgroup(
        root.path(),
        "a",
        &["memory.max", "memory.swap.max", "memory.oom.group", "pids.max"],
    );
    cgroup.limit(&CgroupLimits { memory: 7 * MIB }).unwrap();
    assert_eq!(said(&cgroup, "memory.max"), (7 * MIB).to_string());
    assert_eq!(said(&cgroup, "memory.swap.max"), "0");
    assert_eq!(said(&cgroup, "memory.oom.group"), "1");
    assert_eq!(said(&cgroup, "pids.max"), PROCESSES.to_string());
}

#[test]
fn limit_without_a_controller_names_its_file_and_makes_none() {
    let root = tempfile::tempdir().unwrap();
    let bare = cgroup(root.path(), "a", &[]);
    let error = bare.limit(&CgroupLimits { memory: MIB }).unwrap_err();
    assert!(error.to_string().contains("thaw/a/memory.max"), "{error}");
    let part = cgroup(root.path(), "b", &["memory.max"]);
    let error = part.limit(&CgroupLimits { memory: MIB }).unwrap_err();
    assert!(error.to_string().contains("thaw/b/pids.max"), "{error}");
    assert!(!part.directories()[0].join("memory.swap.max").exists());
}

#[test]
fn limit_of_a_foreign_cgroup_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let pod = cgroup(root.path(), "/pods/one", &["memory.max", "pids.max", "cpu.max"]);
    pod.limit(&CgroupLimits { memory: MIB }).unwrap();
    pod.limit_cpu(500).unwrap();
    pod.make_room(needs(64)).unwrap();
    assert_eq!(
        ["memory.max", "pids.max", "cpu.max"].map(|f| said(&pod, f)),
        ["", "", ""]
    );
}

#[test]
fn cpu_limit_is_a_quota_of_each_period() {
    let root = tempfile::tempdir().unwrap();
    let unified = cgroup(root.path(), "a", &["cpu.max"]);
    unified.limit_cpu(1500).unwrap();
    assert_eq!(said(&unified, "cpu.max"), "150000 100000");
    let v1 = cgroup(root.path(), "b", &["cpu.cfs_quota_us", "cpu.cfs_period_us"]);
    v1.limit_cpu(10).unwrap();
    assert_eq!(said(&v1, "cpu.cfs_quota_us"), "1000");
    assert_eq!(said(&v1, "cpu.cfs_period_us"), "100000");
    let error = cgroup(root.path(), "c", &[]).limit_cpu(10).unwrap_err();
    assert!(error.to_string().contains("thaw/c/cpu.max"), "{error}");
}

#[test]
fn room_for_a_freeze_counts_files_in_memory_once_each() {
    let root = tempfile::tempdir().unwrap();
    let limited = cgroup(root.path(), "a", &["memory.max", "memory.stat", "pids.max"]);
    let limit = CgroupLimits::of(needs(64));
    limited.limit(&limit).unwrap();
    let stat = limited.directories()[0].join("memory.stat");
    let room = |in_files: u64| {
        fs::write(&stat, format!("anon 5\nfile 6\nshmem {in_files}\n")).unwrap();
        limited.make_room(needs(64)).unwrap();
        said(&limited, "memory.max").parse::<u64>().unwrap() - limit.memory
    };
    assert_eq!(room(0), 66 * MIB);
    assert_eq!(room(66 * MIB), 132 * MIB);
    // Once the first is removed, its room goes too.
    assert_eq!(room(0), 66 * MIB);
    fs::write(limited.directories()[0].join("memory.max"), "max\n").unwrap();
    limited.make_room(needs(64)).unwrap();
    assert_eq!(said(&limited, "memory.max"), "max\n");
}

#[test]
fn missing_controllers_are_enabled_from_the_root_down() {
    let root = tempfile::tempdir().unwrap();
    let parent = root.path().join("thaw");
    fs::create_dir(&parent).unwrap();
    let controls = [root.path(), &parent].map(|d| d.join("cgroup.subtree_control"));
    controls.iter().for_each(|c| fs::write(c, "").unwrap());
    unified(root.path()).make("a").unwrap();
    // These are not cgroups, so the second word overwrites the first.
    let asked = controls.map(|c| fs::read_to_string(c).unwrap());
    assert_eq!(asked, ["+pidsry", "+pidsry"]);
}

#[test]
fn files_in_memory_count_and_others_do_not() {
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 5 * MIB).unwrap();
    assert_eq!(file_in_memory(&file), 5 * MIB);
    assert_eq!(file_in_memory(fs::File::open("/proc/self/stat").unwrap()), 0);
    assert_eq!(tree_in_memory(Path::new("/proc")), 0);
    assert_eq!(tree_in_memory(Path::new("/nowhere")), 0);
}

#[test]
fn real_cgroup_is_held_to_its_limits() {
    let hierarchy = Hierarchy::detect();
    let cgroup = match hierarchy.make(&format!("test-limits-{}", std::process::id())) {
        Ok(cgroup) => cgroup,
        Err(reason) => return thaw_test_skip::skip(reason),
    };
    let limits = CgroupLimits::of(needs(64));
    let set = cgroup.limit(&limits);
    let before = MEMORY.iter().find_map(|name| cgroup.number(name));
    let grown = cgroup.make_room(needs(64));
    let after = MEMORY.iter().find_map(|name| cgroup.number(name));
    let processes = cgroup.number("pids.max");
    let cpu = cgroup.limit_cpu(500);
    let quota = ["cpu.max", "cpu.cfs_quota_us"].map(|name| {
        let mut read = cgroup.directories().iter().map(|d| d.join(name));
        read.find_map(|file| fs::read_to_string(file).ok())
    });
    cgroup.destroy();
    if let Err(reason) = set {
        return thaw_test_skip::skip(reason);
    }
    grown.unwrap();
    assert_eq!((before, processes), (Some(limits.memory), Some(PROCESSES)));
    assert_eq!(after, Some(limits.memory + 66 * MIB));
    cpu.unwrap();
    let quota = quota.into_iter().flatten().next().unwrap();
    assert!(quota.starts_with("50000"), "{quota}");
}
