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

#[test]
fn limits_of_a_guest_are_above_its_size_and_what_its_host_keeps_for_it() {
    assert_eq!(Limits::of_guest(64, 0).memory, (64 + 2 + 128) * MIB);
    assert_eq!(Limits::of_guest(65536, 0).memory, (65536 + 2048 + 128) * MIB);
    assert_eq!(Limits::of_guest(64, 8 * MIB).memory, (64 + 2 + 128 + 8) * MIB);
    assert_eq!(Limits::of_guest(64, u64::MAX).memory, u64::MAX);
}

#[test]
fn limit_where_controllers_are_there_writes_each_file() {
    let root = tempfile::tempdir().unwrap();
    let cgroup = cgroup(root.path(), "a", &["memory.max", "memory.swap.max", "pids.max"]);
    cgroup.limit(&Limits { memory: 7 * MIB }).unwrap();
    assert_eq!(said(&cgroup, "memory.max"), (7 * MIB).to_string());
    assert_eq!(said(&cgroup, "memory.swap.max"), "0");
    assert_eq!(said(&cgroup, "pids.max"), PROCESSES.to_string());
}

#[test]
fn limit_without_a_controller_names_its_file_and_makes_none() {
    let root = tempfile::tempdir().unwrap();
    let bare = cgroup(root.path(), "a", &[]);
    let error = bare.limit(&Limits { memory: MIB }).unwrap_err();
    assert!(error.to_string().contains("thaw/a/memory.max"), "{error}");
    let part = cgroup(root.path(), "b", &["memory.max"]);
    let error = part.limit(&Limits { memory: MIB }).unwrap_err();
    assert!(error.to_string().contains("thaw/b/pids.max"), "{error}");
    assert!(!part.directories()[0].join("memory.swap.max").exists());
}

#[test]
fn limit_of_a_place_of_somebody_elses_leaves_its_files() {
    let root = tempfile::tempdir().unwrap();
    let pod = cgroup(root.path(), "/pods/one", &["memory.max", "pids.max"]);
    pod.limit(&Limits { memory: MIB }).unwrap();
    pod.make_room(64).unwrap();
    assert_eq!([said(&pod, "memory.max"), said(&pod, "pids.max")], ["", ""]);
}

#[test]
fn room_for_the_memory_is_added_where_there_is_a_limit() {
    let root = tempfile::tempdir().unwrap();
    let limited = cgroup(root.path(), "a", &["memory.max", "pids.max"]);
    limited.limit(&Limits { memory: MIB }).unwrap();
    limited.make_room(64).unwrap();
    assert_eq!(said(&limited, "memory.max"), (67 * MIB).to_string());
    fs::write(limited.directories()[0].join("memory.max"), "max\n").unwrap();
    limited.make_room(64).unwrap();
    assert_eq!(said(&limited, "memory.max"), "max\n");
}

#[test]
fn controllers_are_enabled_from_the_root_on_where_they_are_missing() {
    let root = tempfile::tempdir().unwrap();
    let parent = root.path().join("thaw");
    fs::create_dir(&parent).unwrap();
    let controls = [root.path(), &parent].map(|d| d.join("cgroup.subtree_control"));
    controls.iter().for_each(|c| fs::write(c, "").unwrap());
    unified(root.path()).make("a").unwrap();
    // These are no cgroups: the second word lies over the first.
    let asked = controls.map(|c| fs::read_to_string(c).unwrap());
    assert_eq!(asked, ["+pidsry", "+pidsry"]);
}

#[test]
fn files_in_memory_count_with_their_size_and_others_do_not() {
    let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 5 * MIB).unwrap();
    assert_eq!(file_in_memory(&file), 5 * MIB);
    assert_eq!(file_in_memory(fs::File::open("/proc/self/stat").unwrap()), 0);
    assert_eq!(tree_in_memory(Path::new("/proc")), 0);
    assert_eq!(tree_in_memory(Path::new("/nowhere")), 0);
}

#[test]
fn a_real_cgroup_is_held_to_its_limits() {
    let hierarchy = Hierarchy::detect();
    let cgroup = match hierarchy.make(&format!("test-limits-{}", std::process::id())) {
        Ok(cgroup) => cgroup,
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    let limits = Limits::of_guest(64, 0);
    let set = cgroup.limit(&limits);
    let before = MEMORY.iter().find_map(|name| cgroup.number(name));
    let grown = cgroup.make_room(64);
    let after = MEMORY.iter().find_map(|name| cgroup.number(name));
    let processes = cgroup.number("pids.max");
    cgroup.destroy();
    if let Err(reason) = set {
        return eprintln!("skipped: {reason}");
    }
    grown.unwrap();
    assert_eq!((before, processes), (Some(limits.memory), Some(PROCESSES)));
    assert_eq!(after, Some(limits.memory + 66 * MIB));
}
