//! Limits of a sandbox on its host: they are set before its guest runs, or the creation fails.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::cgroup_limits::{CgroupLimits, Needs, PROCESSES};
use thaw_pools::vmm::LARGEST_FILE;
use thaw_protocol::api::{CreateSandbox, CreatedSandbox};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd, without_limits};

const MIB: u64 = 1 << 20;

/// `None` if the test cannot run here; the reason has been reported.
fn place() -> Option<Place> {
    let place = Place::new(
        Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap(),
        &lasting(),
    )?;
    place.fill_pools_to(1..=1, 1..=1);
    Some(place)
}

/// The same; also `None` if sandboxes cannot be limited here.
fn place_with_limits() -> Option<Place> {
    if !without_limits().is_empty() {
        thaw_test_skip::skip("this host cannot limit sandboxes");
        return None;
    }
    place()
}

async fn try_create(place: &Place, fields: Value) -> Result<CreatedSandbox, Error> {
    let mut request = place.request();
    for (key, value) in fields.as_object().unwrap() {
        request[key] = value.clone();
    }
    let request: CreateSandbox = serde_json::from_value(request).unwrap();
    Client::connect(&place.socket()).unwrap().create(&request).await
}

/// Deletes a sandbox. Needed because stopping thawd leaves its sandboxes running.
async fn delete(place: &Place, id: &str) {
    Client::connect(&place.socket())
        .unwrap()
        .delete(id)
        .await
        .unwrap();
}

async fn create(place: &Place, fields: Value) -> (String, i32) {
    let made = try_create(place, fields).await;
    let made = made.unwrap_or_else(|e| panic!("{e} {:?}: {}", e.context, log(place)));
    (made.sandbox.id, made.sandbox.vmm_pid.unwrap())
}

/// The contents of these files in the sandbox's cgroup; `None` if a file is in no hierarchy.
fn cgroup(place: &Place, id: &str, names: &[&str]) -> Option<String> {
    let record = fs::read(place.path("run/sandboxes").join(id).join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let cgroup = Hierarchy::detect().adopt(record["cgroup"].as_str().unwrap());
    let mut files = names
        .iter()
        .flat_map(|name| cgroup.directories().iter().map(move |d| d.join(name)))
        .collect::<Vec<PathBuf>>()
        .into_iter();
    files
        .find_map(|file| fs::read_to_string(file).ok())
        .map(|text| text.trim().to_owned())
}

/// Whether this process has CAP_SYS_RESOURCE.
fn may_limit_others() -> bool {
    let capabilities = rustix::thread::capabilities(None).unwrap();
    capabilities
        .effective
        .contains(rustix::thread::CapabilitySet::SYS_RESOURCE)
}

fn max_file_size(pid: i32) -> u64 {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max file size"))
        .unwrap();
    let mut words = line.split_whitespace();
    let (soft, hard) = (words.next().unwrap(), words.next().unwrap());
    assert_eq!(soft, hard, "it could raise its own limit");
    soft.parse().unwrap()
}

/// The regular files that a process has open: path, metadata, and whether the process may write the file.
fn open_files(pid: i32) -> Vec<(PathBuf, fs::Metadata, bool)> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let files = descriptors.filter_map(|entry| {
        let path = entry.unwrap().path();
        // Closed since it was listed, or without an inode of its own.
        let (place, metadata) = (fs::read_link(&path).ok()?, fs::metadata(&path).ok()?);
        let number = path.file_name().unwrap().to_str().unwrap();
        let about = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap();
        let flags = about
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .unwrap();
        let flags = i32::from_str_radix(flags.trim(), 8).unwrap();
        Some((place, metadata, flags & libc::O_ACCMODE != libc::O_RDONLY))
    });
    files.filter(|(_, metadata, _)| metadata.is_file()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vmm_may_write_its_disk_and_its_log_and_no_other_file() {
    use std::os::unix::fs::MetadataExt;
    let Some(place) = place_with_limits() else { return };
    let thawd = Thawd::start(&place);
    // A link, and the kernel names the files in what it leads to.
    let run = place.path("run").canonicalize().unwrap();
    let (mut ids, mut disks) = (Vec::new(), Vec::new());
    // A booted one, one from a template, and one from a pool.
    for disk_mib in [64, 1024, 1024] {
        let (id, vmm) = create(&place, json!({"disk_mib": disk_mib})).await;
        let (writable, read_only): (Vec<_>, Vec<_>) = open_files(vmm).into_iter().partition(|file| file.2);
        // Files shared with other sandboxes must show, or this test detects nothing.
        let image = place.path("data");
        assert!(
            read_only.iter().any(|file| file.0.starts_with(&image)),
            "{read_only:?}"
        );
        for (path, metadata, _) in writable {
            if path == run.join("sandboxes").join(&id).join("vmm.log") {
                continue;
            }
            assert_eq!(
                (metadata.nlink(), metadata.len()),
                (0, disk_mib * MIB),
                "{path:?}"
            );
            disks.push((metadata.dev(), metadata.ino()));
        }
        ids.push(id);
    }
    assert_eq!(disks.len(), 3, "a disk each");
    disks.sort_unstable();
    disks.dedup();
    assert_eq!(disks.len(), 3, "a disk of its own each");
    for id in ids {
        delete(&place, &id).await;
    }
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_those_of_the_sandboxs_size() {
    let Some(place) = place_with_limits() else { return };
    let thawd = Thawd::start(&place);
    // The first boots its template, the second restores it, and later ones may be parked. All must have the same limits.
    for disk_mib in [64, 1024, 1024, 1024] {
        let (id, vmm) = create(&place, json!({"memory_mib": 128, "disk_mib": disk_mib})).await;
        let memory = cgroup(&place, &id, &["memory.max", "memory.limit_in_bytes"]).unwrap();
        let least = CgroupLimits::of(Needs {
            memory_mib: 128,
            ..Needs::default()
        });
        // If the disk is on a file system in memory, or one that may be, the limit includes its size.
        let in_files = memory.parse::<u64>().unwrap() - least.memory;
        assert!([0, disk_mib * MIB].contains(&in_files), "{memory}");
        let processes = cgroup(&place, &id, &["pids.max"]).unwrap();
        assert_eq!(processes, PROCESSES.to_string());
        let swap = cgroup(&place, &id, &["memory.swap.max", "memory.memsw.limit_in_bytes"]);
        assert!(swap.is_none_or(|swap| swap == "0" || swap == memory));
        // By then the VMM runs as another user.
        let expected = match may_limit_others() {
            true => (disk_mib * MIB).max((128 + 512) * MIB),
            false => LARGEST_FILE,
        };
        assert_eq!(max_file_size(vmm), expected);
        Client::connect(&place.socket())
            .unwrap()
            .delete(&id)
            .await
            .unwrap();
    }
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cpu_limit_of_a_request_is_set_and_a_wrong_one_is_named() {
    let Some(place) = place_with_limits() else { return };
    let thawd = Thawd::start(&place);
    let (id, _) = create(&place, json!({"cpu_limit_millis": 250})).await;
    let quota = cgroup(&place, &id, &["cpu.max", "cpu.cfs_quota_us"]).unwrap();
    assert!(["25000", "25000 100000"].contains(&&*quota), "{quota}");
    delete(&place, &id).await;
    let (id, _) = create(&place, json!({})).await;
    let quota = cgroup(&place, &id, &["cpu.max", "cpu.cfs_quota_us"]);
    assert!(quota.is_none_or(|quota| quota == "-1" || quota.starts_with("max")));
    delete(&place, &id).await;
    for wrong in [0u32, 9, 64_001, u32::MAX] {
        let refused = try_create(&place, json!({"cpu_limit_millis": wrong}))
            .await
            .unwrap_err();
        let says = format!("cpu_limit_millis is {wrong}; it may be 10 to 64000");
        assert!(refused.to_string().contains(&says), "{refused}");
    }
    for (fields, says) in [
        (json!({"cpu_limit_millis": -1}), "cpu_limit_millis: invalid value"),
        (json!({"memory_mib": 1u64 << 40}), "memory_mib: invalid value"),
        (json!({"memory_mib": 0}), "memory_mib is 0"),
        (json!({"disk_mib": -5}), "disk_mib: invalid value"),
        (json!({"disk_mib": 0}), "disk_mib is 0; it may be 64"),
    ] {
        let refused = ask(&place, fields);
        assert!(refused.contains(says), "{refused}");
    }
    assert!(thawd.stop().success());
}

/// thawd's answer to a creation with arbitrary fields, which no client of ours would send.
fn ask(place: &Place, fields: Value) -> String {
    let mut request = place.request();
    for (key, value) in fields.as_object().unwrap() {
        request[key] = value.clone();
    }
    let stream = thaw_tiny_node::asked::ask(place, "POST /v1/sandboxes", None, &request).unwrap();
    let (status, body) = thaw_tiny_node::asked::answer(stream).unwrap();
    assert!(status.contains(" 4"), "{status} {body}");
    body
}

/// thawd without a mounted cgroup hierarchy.
fn without_cgroups(place: &Place) -> Command {
    let thawd = place.thawd();
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c"])
        .arg("umount -R -l /sys/fs/cgroup && exec \"$0\" \"$@\"")
        .arg(thawd.get_program())
        .args(thawd.get_args());
    for (name, value) in thawd.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_without_cgroups_is_refused_unless_allowed() {
    if !rustix::process::geteuid().is_root() {
        thaw_test_skip::skip("it takes root to unmount");
        return;
    }
    let Some(place) = place() else { return };
    place.configure_as_is("[sandbox]\n");
    let mut thawd = Thawd::begin(&place, without_cgroups(&place));
    assert!(thawd.serves(&place), "{}", log(&place));
    let refused = try_create(&place, json!({})).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::LimitsUnavailable, "{refused}");
    assert!(refused.to_string().contains("require_limits"), "{refused}");
    let makers = [thawd.record()];
    assert!(thawd.stop().success());
    eventually("no process and no cgroup is left", || {
        let left = Counts::of(&place, &makers);
        left.processes.is_empty() && left.cgroups.is_empty()
    });

    place.configure_as_is("[sandbox]\nrequire_limits = false\n");
    let mut thawd = Thawd::begin(&place, without_cgroups(&place));
    assert!(thawd.serves(&place), "{}", log(&place));
    let (id, _) = create(&place, json!({})).await;
    delete(&place, &id).await;
    // A requested limit is never ignored.
    let refused = try_create(&place, json!({"cpu_limit_millis": 500}))
        .await
        .unwrap_err();
    assert_eq!(refused.kind, ErrorKind::LimitsUnavailable, "{refused}");
    assert!(thawd.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jail_that_cannot_be_whole_is_refused_with_its_reason() {
    let Some(place) = place() else { return };
    place.fill_pools_to(0..=0, 0..=0);
    let vmm = place.path("poor-vmm");
    let script =
        "#!/bin/sh\necho \"THAW_JAIL=$THAW_JAIL\" >&2\necho 'the jail would lack Landlock' >&2\nexit 3\n";
    // By the shell's child: one that another test is just starting would have it open for writing.
    let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let mut shell = Command::new("/bin/sh");
    let written = shell.args(["-c", write]).arg(&vmm).arg(script).status();
    assert!(written.unwrap().success());
    let mut command = place.thawd();
    command.env("THAW_VMM", &vmm);
    let mut thawd = Thawd::begin(&place, command);
    assert!(thawd.serves(&place), "{}", log(&place));
    let refused = try_create(&place, json!({})).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::JailIncomplete, "{refused}");
    assert!(refused.to_string().contains("require_jail"), "{refused}");
    let context = refused.context.join("\n");
    assert!(
        context.contains("THAW_JAIL=whole") && context.contains("lack Landlock"),
        "{context}"
    );
    assert!(thawd.stop().success());
}
