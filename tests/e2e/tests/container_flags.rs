//! The flags of `docker run` that change a container, each as a program in the container sees it.

#![allow(clippy::unwrap_used)]

use thaw_e2e::{Outcome, image, run, thaw};

fn shell(flags: &[&str], script: &str) -> Outcome {
    let busybox = image("busybox");
    let args = [&["run", "--rm"], flags, &[&busybox, "sh", "-c", script]].concat();
    run(&mut thaw(&args))
}

#[test]
fn mounts_and_limits_are_as_told() {
    let flags = [
        "--tmpfs",
        "/cache:size=1m,mode=700",
        "--mount",
        "type=tmpfs,target=/more,tmpfs-size=2m",
        "--shm-size",
        "3m",
        "--ulimit",
        "nofile=77:99",
        "--sysctl",
        "net.core.somaxconn=123",
    ];
    let script = "df -k /cache /more /dev/shm | awk 'NR>1 {print $2}'; stat -c %a /cache; ulimit -n; ulimit -Hn; \
                  cat /proc/sys/net/core/somaxconn";
    assert_eq!(shell(&flags, script).ok(), "1024\n2048\n3072\n700\n77\n99\n123\n");
    let unknown = shell(&["--sysctl", "net.core.somaxcon=1"], "true");
    assert_ne!(unknown.code(), 0);
    assert!(
        unknown.stderr.contains("closest is net.core.somaxconn"),
        "{unknown:?}"
    );
}

#[test]
fn capabilities_are_added_and_dropped() {
    let bounding = "grep CapBnd /proc/self/status | cut -f 2";
    let default = shell(&[], bounding).ok();
    assert_eq!(shell(&["--cap-drop", "ALL"], bounding).ok(), "0000000000000000\n");
    // CAP_CHOWN is the first.
    assert_eq!(
        shell(&["--cap-drop", "ALL", "--cap-add", "CHOWN"], bounding).ok(),
        "0000000000000001\n"
    );
    assert_ne!(shell(&["--cap-add", "NET_ADMIN"], bounding).ok(), default);
    assert_ne!(shell(&[], "mkdir -p /m && mount -t tmpfs none /m").code(), 0);
    shell(
        &["--cap-add", "SYS_ADMIN"],
        "mkdir -p /m && mount -t tmpfs none /m",
    )
    .ok();
}

#[test]
fn privileged_container_may_do_what_the_guest_can() {
    let script = "mkdir -p /m && mount -t tmpfs none /m && echo 1 > /proc/sys/net/ipv4/ip_forward && \
                  mkdir /sys/fs/cgroup/inner && unshare -m true && test -c /dev/fuse && test -c /dev/net/tun && echo all";
    assert_eq!(shell(&["--privileged"], script).ok(), "all\n");
    assert_ne!(shell(&[], "echo 1 > /proc/sys/net/ipv4/ip_forward").code(), 0);
}

#[test]
fn seccomp_profile_from_a_file_is_enforced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("profile.json");
    let option = format!("seccomp={}", path.display());
    // Docker's form. With CAP_SYS_ADMIN the rule for mkdir is excluded.
    let profile = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["chmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO"}]}"#;
    std::fs::write(&path, profile).unwrap();
    let script = "mkdir /d 2>&1; touch /f; chmod 600 /f 2>&1; grep ^Seccomp: /proc/self/status | cut -f 2";
    let confined = shell(&["--security-opt", &option], script).ok();
    assert!(
        confined.contains("Not supported") || confined.contains("not supported"),
        "{confined}"
    );
    assert!(
        confined.contains("not permitted") && confined.ends_with("\n2\n"),
        "{confined}"
    );
    let admin = shell(&["--privileged", "--security-opt", &option], script).ok();
    assert!(
        !admin.contains("supported") && admin.contains("not permitted"),
        "{admin}"
    );
    std::fs::write(&path, profile.replace("ERRNO", "ERRNOS")).unwrap();
    let refused = shell(&["--security-opt", &option], "true");
    assert_eq!(refused.code(), 125, "{refused:?}");
    assert!(
        refused.stderr.contains("profile.json: syscalls[0]: action"),
        "{refused:?}"
    );
}

#[test]
fn devices_are_the_guests_and_only_those_asked_for() {
    let script = "test -c /dev/fuse && ! test -e /dev/net/tun && echo fuse";
    assert_eq!(shell(&["--device", "/dev/fuse"], script).ok(), "fuse\n");
    let refused = shell(&["--device", "/dev/vda"], "true");
    assert_eq!(refused.code(), 125);
    assert!(refused.stderr.contains("/dev/vda"), "{refused:?}");
}

#[test]
fn id_is_written_and_privileges_stay() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("id");
    let flags = [
        "--cidfile",
        path.to_str().unwrap(),
        "--security-opt",
        "no-new-privileges",
    ];
    assert_eq!(
        shell(&flags, "grep NoNewPrivs /proc/self/status | cut -f 2").ok(),
        "1\n"
    );
    assert_eq!(std::fs::read_to_string(&path).unwrap().len(), 12);
    let again = shell(&flags, "true");
    assert!(
        again.code() != 0 && again.stderr.contains("--cidfile"),
        "{again:?}"
    );
    assert_eq!(shell(&["--platform", "linux/arm64"], "true").code(), 125);
}
