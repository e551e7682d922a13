use super::*;
use serde_json::json;

fn spec(value: serde_json::Value) -> Spec {
    serde_json::from_value(value).unwrap()
}

fn whole() -> serde_json::Value {
    json!({
        "ociVersion": "1.1.0",
        "process": {
            "terminal": true, "consoleSize": {"height": 24, "width": 80},
            "user": {"uid": 7, "gid": 8, "additionalGids": [9, 10], "umask": 63},
            "args": ["sh", "-c", "x"], "env": ["A=b"], "cwd": "/w",
            "capabilities": {"bounding": ["CAP_CHOWN"], "ambient": null},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 2, "soft": 1}],
            "noNewPrivileges": true, "apparmorProfile": "docker-default", "oomScoreAdj": -5
        },
        "root": {"path": "rootfs", "readonly": true},
        "hostname": "h",
        "annotations": {"k": "v"},
        "linux": {
            "sysctl": {"net.ipv4.ip_forward": "1"},
            "cgroupsPath": "kubepods.slice:cri-containerd:abc",
            "namespaces": [
                {"type": "pid"}, {"type": "network", "path": "/run/netns/x"}, {"type": "ipc", "path": "/proc/1/ns/ipc"},
                {"type": "mount"}, {"type": "uts"}, {"type": "cgroup"}, {"type": "time"}
            ],
            "resources": {
                "devices": [{"allow": false, "access": "rwm"}],
                "memory": {"limit": 1024, "swap": 2048}, "cpu": {"shares": 2, "quota": 3, "period": 4, "cpus": "0-1"},
                "pids": {"limit": 5}, "hugepageLimits": null,
                "unified": {"memory.oom.group": "1", "cpuset.cpus": "3", "io.max": "8:0 rbps=1"}
            },
            "seccomp": {
                "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW", "errnoRet": 1,
                    "args": [{"index": 1, "value": 2, "valueTwo": 3, "op": "SCMP_CMP_EQ"}]}]
            },
            "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys"], "rootfsPropagation": "private"
        }
    })
}

#[test]
fn agent_api_has_every_supported_call() {
    let made = guest("c", Path::new("/bundle"), &spec(whole()), "/root".into())
        .unwrap()
        .spec;
    let process = &made.Process;
    assert_eq!((process.User.UID, process.User.GID), (7, 8));
    assert_eq!(process.User.AdditionalGids, [9, 10]);
    assert_eq!(process.User.Umask, Some(63));
    assert_eq!(
        (process.Args.len(), process.Cwd.as_str(), process.Terminal),
        (3, "/w", true)
    );
    assert_eq!((process.ConsoleSize.Height, process.ConsoleSize.Width), (24, 80));
    assert_eq!(process.Capabilities.Bounding, ["CAP_CHOWN"]);
    assert_eq!(
        (process.Rlimits[0].Type.as_str(), process.Rlimits[0].Soft),
        ("RLIMIT_NOFILE", 1)
    );
    assert!(process.NoNewPrivileges && process.ApparmorProfile.is_empty());
    assert_eq!(process.OOMScoreAdj, -5);
    assert_eq!((made.Root.Path.as_str(), made.Root.Readonly), ("/root", true));
    let linux = &made.Linux;
    assert_eq!(linux.Sysctl["net.ipv4.ip_forward"], "1");
    assert_eq!(linux.MaskedPaths, ["/proc/kcore"]);
    assert_eq!(linux.ReadonlyPaths, ["/proc/sys"]);
    let resources = &linux.Resources;
    assert_eq!(
        (resources.Memory.Limit, resources.CPU.Quota, resources.Pids.Limit),
        (1024, 3, 5)
    );
    // The host's devices and CPUs are not the guest's.
    assert!(resources.Devices.is_empty() && resources.CPU.Cpus.is_empty());
    let named: Vec<_> = resources.Unified.iter().collect();
    assert_eq!(named, [(&"memory.oom.group".to_owned(), &"1".to_owned())]);
    assert_eq!(linux.CgroupsPath, "/c");
    assert_eq!(linux.Seccomp.DefaultErrnoRet, Some(38));
    let rule = &linux.Seccomp.Syscalls[0];
    assert_eq!((rule.Names[0].as_str(), rule.Args[0].ValueTwo), ("read", 3));
    assert_eq!(rule.ErrnoRet, Some(oci::linux_syscall::ErrnoRet::Errnoret(1)));
}

#[test]
fn pod_namespaces_are_dropped_and_others_made_in_the_guest() {
    let made = guest("c", Path::new("/bundle"), &spec(whole()), "/root".into())
        .unwrap()
        .spec;
    let kinds: Vec<_> = made.Linux.Namespaces.iter().map(|n| n.Type.as_str()).collect();
    assert_eq!(kinds, ["pid", "mount", "uts", "cgroup"]);
    let mut user = whole();
    user["linux"]["namespaces"] = json!([{"type": "user"}]);
    assert!(
        guest("c", Path::new("/bundle"), &spec(user), "/r".into())
            .unwrap_err()
            .to_string()
            .contains("user namespace")
    );
}

#[test]
fn mounts_are_made_in_the_guest_shared_or_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let of_the_host = directory.path().to_str().unwrap();
    let hosts = directory.path().join("hosts");
    std::fs::write(&hosts, "1.2.3.4 x\n").unwrap();
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mount = |destination: &str, kind: &str, source: &str| json!({"destination": destination, "type": kind, "source": source, "options": ["rbind", "ro"]});
    let mut given = whole();
    given["mounts"] = json!([
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
        mount("/etc/hosts", "bind", hosts.to_str().unwrap()),
        mount("/dev/shm", "bind", "/dev/shm"),
        mount("/masked", "bind", "/dev/null"),
        {"destination": "/data", "type": "none", "source": of_the_host, "options": ["bind", "nosuid", "rslave", "rro"]},
    ]);
    let made = guest("c", Path::new("/bundle"), &spec(given.clone()), "/r".into()).unwrap();
    let kinds: Vec<_> = made.spec.Mounts.iter().map(|m| m.type_.as_str()).collect();
    assert_eq!(kinds, ["proc", "cgroup2", "bind", "bind", "bind", "bind"]);
    let copied = &made.files[0];
    assert_eq!(
        (copied.path.as_str(), copied.data.as_slice()),
        ("/run/thaw/files/c/0", &b"1.2.3.4 x\n"[..])
    );
    assert_eq!(made.spec.Mounts[2].source, copied.path);
    assert_eq!(made.storages[0].driver, "ephemeral");
    assert_eq!(made.spec.Mounts[3].source, made.storages[0].mount_point);
    assert_eq!(made.spec.Mounts[4].source, "/dev/null");
    // The host has only the options that it handles itself; the guest has all of them.
    let [bound] = &made.shared_mounts[..] else {
        panic!("{:?}", made.shared_mounts)
    };
    assert_eq!((bound.mount, bound.source.source.as_str()), (5, of_the_host));
    assert_eq!(bound.source.options, ["bind", "rro", "rslave"]);
    assert_eq!(made.spec.Mounts[5].options, ["bind", "nosuid", "rslave", "ro"]);

    for (mount, words) in [
        (mount("/data", "bind", "/srv/missing"), "/srv/missing"),
        (mount("/data", "bind", "missing"), "/bundle/missing"),
        (mount("/data", "bind", socket.to_str().unwrap()), "is a socket"),
        (mount("/data", "bind", "/proc"), "(proc)"),
        (mount("/etc/hosts", "bind", of_the_host), "is not a file"),
        (
            json!({"destination": "/d", "type": "bind", "source": of_the_host, "options": ["rshared"]}),
            "rslave",
        ),
        (
            json!({"destination": "/n", "type": "nfs", "source": "a:/b"}),
            "\"nfs\"",
        ),
    ] {
        given["mounts"] = json!([mount]);
        let error = guest("c", Path::new("/bundle"), &spec(given.clone()), "/r".into())
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn only_tmpfs_is_the_pods_shared_memory() {
    let of_a_disk = env!("CARGO_MANIFEST_DIR");
    let mut given = whole();
    given["mounts"] = json!([{"destination": "/dev/shm", "source": of_a_disk, "options": ["bind"]}]);
    let made = guest("c", Path::new("/bundle"), &spec(given), "/r".into()).unwrap();
    assert!(made.storages.is_empty(), "{:?}", made.storages);
    assert_eq!(made.shared_mounts[0].source.source, of_a_disk);
}

#[test]
fn host_block_device_becomes_a_disk_if_rules_allow_it() {
    let mut given = whole();
    given["linux"]["devices"] = json!([
        {"path": "/dev/xvda", "type": "b", "major": 202, "minor": 1, "fileMode": 0o640, "uid": 3, "gid": 4}
    ]);
    let refused = guest("c", Path::new("/bundle"), &spec(given.clone()), "/r".into());
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("/dev/xvda is a block device"), "{error}");
    given["linux"]["resources"]["devices"] = json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "b", "major": 202, "minor": 1, "access": "r"}
    ]);
    let made = guest("c", Path::new("/bundle"), &spec(given), "/r".into()).unwrap();
    let [disk] = &made.disks[..] else {
        panic!("{:?}", made.disks)
    };
    assert!(disk.path == "/dev/xvda" && disk.device.read_only);
    let node = &made.spec.Linux.Devices[0];
    assert_eq!((node.FileMode, node.UID, node.GID), (0o640, 3, 4));
}

#[test]
fn invalid_specification_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    std::fs::write(&path, "{\"process\": 3}").unwrap();
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    let error = guest("c", Path::new("/bundle"), &Spec::default(), "/r".into())
        .unwrap_err()
        .to_string();
    assert!(error.contains("no process"), "{error}");
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        let _ = serde_json::from_str::<Spec>(&text);
    }
}
