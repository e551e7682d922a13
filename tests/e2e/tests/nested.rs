//! What a machine of its own lets a privileged container do: systemd as its first process, docker, and builds that mount. Each takes minutes.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use thaw_e2e::{Outcome, image, run, thaw};

/// How long a service may take to start where a guest is emulated.
const LIMIT: Duration = Duration::from_secs(900);

/// The image, pulled. That takes as long as it takes: it is large.
fn nested() -> String {
    let image = image("nested");
    let mut pull = thaw(&["-q", "image", "pull", &image]);
    let pulled = pull.stdout(Stdio::null()).stderr(Stdio::inherit()).status();
    assert!(pulled.unwrap().success());
    image
}

/// A busybox image as `docker load` takes it.
fn busybox() -> PathBuf {
    let layout = std::env::var("THAW_TEST_IMAGES").unwrap();
    Path::new(&layout).with_file_name("busybox.tar")
}

const FOR_DOCKER: &[&str] = &["--mount", "type=volume,target=/var/lib/docker"];

/// A detached sandbox of the image; removed when dropped.
struct Machine(&'static str);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = thaw(&["rm", "-f", self.0]).status();
    }
}

impl Machine {
    /// Starts a privileged one with enough memory and disk.
    fn start(name: &'static str, flags: &[&str], command: &[&str]) -> Machine {
        let image = nested();
        let line = [
            &[
                "run",
                "-d",
                "--name",
                name,
                "-m",
                "1g",
                "--disk",
                "4g",
                "--privileged",
            ],
            flags,
            &[image.as_str()],
            command,
        ];
        run(&mut thaw(&line.concat())).ok();
        Machine(name)
    }

    fn exec(&self, command: &[&str]) -> Outcome {
        run(&mut thaw(&[&["exec", self.0], command].concat()))
    }

    fn shell(&self, script: &str) -> String {
        self.exec(&["sh", "-ec", script]).ok()
    }

    fn copy(&self, from: &Path, to: &str) {
        let to = format!("{}:{to}", self.0);
        run(&mut thaw(&["cp", from.to_str().unwrap(), &to])).ok();
    }

    /// Repeats a command until it prints `expected`.
    fn until_printed(&self, script: &str, expected: &str) {
        let since = Instant::now();
        loop {
            let outcome = self.exec(&["sh", "-c", script]);
            if outcome.stdout.trim() == expected {
                return;
            }
            if since.elapsed() > LIMIT || outcome.stdout.contains("degraded") {
                let logs = run(&mut thaw(&["logs", "--tail", "40", self.0]));
                panic!("{script}: {outcome:?}; {logs:?}");
            }
            std::thread::sleep(Duration::from_secs(2));
        }
    }
}

/// Loads an image into docker, runs containers with a limit and with a network, and builds an image.
fn docker_works(machine: &Machine) {
    machine.copy(&busybox(), "/root/busybox.tar");
    let loaded = machine.shell("docker load -q -i /root/busybox.tar");
    assert!(loaded.contains("busybox"), "{loaded}");
    let limited = "docker run --rm -m 64m busybox cat /sys/fs/cgroup/memory.max";
    assert_eq!(machine.shell(limited), "67108864\n");
    let page = "mkdir /w; echo inner > /w/page; httpd -f -p 80 -h /w";
    machine.shell(&format!(
        "docker run -d --name web -p 8080:80 busybox sh -c '{page}'"
    ));
    // By the bridge from another container, and by the published port.
    let bridged =
        "docker run --rm --link web busybox sh -c 'until wget -qO- http://web/page; do sleep 1; done'";
    assert_eq!(machine.shell(bridged), "inner\n");
    let published = "docker run --rm --network host busybox wget -qO- http://127.0.0.1:8080/page";
    assert_eq!(machine.shell(published), "inner\n");
    let built = "printf 'FROM busybox\nRUN echo built > /made\n' | docker build -q -t made - >&2; docker run --rm made cat /made";
    assert_eq!(machine.shell(built), "built\n");
    machine.shell("docker rm -f web");
}

#[test]
#[ignore = "long"]
fn systemd_is_the_first_process_and_runs_docker() {
    let machine = Machine::start("of-systemd", FOR_DOCKER, &[]);
    let settled =
        "systemctl is-system-running | grep -v -e starting -e initializing && systemctl --failed --quiet";
    machine.until_printed(settled, "running");
    machine.shell("systemctl is-active multi-user.target");
    let limit = "cat /sys/fs/cgroup$(cut -d : -f 3 /proc/self/cgroup)/memory.max";
    let unit =
        format!("systemd-run --wait --pipe --quiet -p MemoryMax=64M -p PrivateTmp=yes sh -c '{limit}'");
    assert_eq!(machine.shell(&unit), "67108864\n");
    machine.shell("systemctl start docker");
    machine.until_printed(
        "docker info --format '{{.Driver}} {{.CgroupDriver}}'",
        "overlay2 systemd",
    );
    docker_works(&machine);
    // The image names systemd's signal for an orderly end.
    run(&mut thaw(&["stop", "-t", "240", machine.0])).ok();
    let status = run(&mut thaw(&["wait", machine.0])).ok();
    assert_ne!(status, "137\n", "it was not killed");
}

#[test]
#[ignore = "long"]
fn dockerd_runs_containers_without_systemd() {
    let flags = [FOR_DOCKER, &["--init"]].concat();
    let machine = Machine::start("of-dockerd", &flags, &["dockerd"]);
    let info = "docker info --format '{{.Driver}} {{.CgroupDriver}} {{.CgroupVersion}}'";
    machine.until_printed(info, "overlay2 cgroupfs 2");
    docker_works(&machine);
}

const MOUNTS: &str = "cd /root
truncate -s 64M disk; mkfs.ext4 -q disk; mkdir mnt
mount -o loop disk mnt; echo looped > mnt/file; umount mnt; mount -o loop,ro disk mnt; cat mnt/file; umount mnt
cd /var/lib/containers; mkdir low up work all; echo overlaid > low/file
mount -t overlay -o lowerdir=low,upperdir=up,workdir=work overlay all; cat all/file; umount all
cd /root; mkdir low up work; echo fused > low/file
fuse-overlayfs -o lowerdir=low,upperdir=up,workdir=work mnt; cat mnt/file; echo x > mnt/file; cat up/file; umount mnt
ip tuntap add dev tap0 mode tap; ip link set tap0 up; ip -o link show tap0 | cut -d : -f 2
nft add table inet t; nft list tables; unshare --user --map-root-user --mount true";

const BUILD: &str = "cd; printf 'FROM docker-archive:/busybox.tar\nRUN echo built > /made\n' > Dockerfile
buildah $1 bud -q $2 -t made . >/dev/null
buildah $1 from --name done made >/dev/null; buildah $1 run $2 done cat /made";

#[test]
#[ignore = "long"]
fn loop_overlay_fuse_tap_and_builds_work() {
    let volume = ["--mount", "type=volume,target=/var/lib/containers"];
    let machine = Machine::start("of-builds", &volume, &["sleep", "100000"]);
    assert_eq!(
        machine.shell(MOUNTS),
        "looped\noverlaid\nfused\nx\n tap0\ntable inet t\n"
    );
    machine.copy(&busybox(), "/busybox.tar");
    let built = |user: &[&str], storage: &str, isolation: &str| {
        let build = ["sh", "-ec", BUILD, "build", storage, isolation];
        machine.exec(&[user, &build].concat()).ok()
    };
    assert_eq!(
        built(&[], "--storage-driver=overlay", "--isolation=oci"),
        "built\n"
    );
    // Without root, in a user namespace.
    let user = [
        "setpriv",
        "--reuid=builder",
        "--regid=builder",
        "--init-groups",
        "env",
        "HOME=/home/builder",
    ];
    assert_eq!(
        built(&user, "--storage-driver=vfs", "--isolation=chroot"),
        "built\n"
    );
}

#[test]
#[ignore = "long"]
fn a_capability_and_a_device_suffice_for_tap_and_loop() {
    let image = nested();
    let printed = |flags: &[&str], script: &str| {
        let line = [&["run", "--rm"], flags, &[image.as_str(), "sh", "-ec", script]];
        run(&mut thaw(&line.concat())).ok()
    };
    let tap = "ip tuntap add dev tap0 mode tap; ip link set tap0 up; ip -o link show tap0 | cut -d : -f 2";
    let flags = ["--cap-add", "NET_ADMIN", "--device", "/dev/net/tun"];
    assert_eq!(printed(&flags, tap), " tap0\n");
    let script = "cd /root; truncate -s 16M disk; mkfs.ext4 -q disk; mkdir mnt; mount -o loop disk mnt; \
                  df --output=fstype mnt | tail -n 1";
    let flags = [
        "--cap-add",
        "SYS_ADMIN",
        "--device",
        "/dev/loop-control",
        "--device",
        "/dev/loop0",
    ];
    assert_eq!(printed(&flags, script), "ext4\n");
}
