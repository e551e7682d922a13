//! Roots of containerd's own snapshotters, and files of the host, in a container that is a microVM.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only roots`.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use thaw_e2e::containerd::{Networks, RUNTIME};
use thaw_e2e::node::{Node, serving, until};

/// A node, with one image in containerd's own snapshotters.
struct Host {
    node: Node,
}

impl Host {
    fn new() -> Host {
        Host {
            node: Node::unpulled("busybox", Networks::nothing),
        }
    }

    fn pull(&self, snapshotter: &str) {
        self.node.containerd.ctr(&[
            "image",
            "pull",
            "--plain-http",
            "--snapshotter",
            snapshotter,
            &self.node.image,
        ]);
    }

    /// `ctr run` with words before the image.
    fn run<'a>(
        &'a self,
        snapshotter: &'a str,
        options: &[&'a str],
        id: &'a str,
        script: &'a str,
    ) -> Vec<&'a str> {
        let fixed = ["run", "--runtime", RUNTIME, "--snapshotter", snapshotter];
        [&fixed, options, &[&self.node.image, id, "sh", "-c", script]].concat()
    }

    fn exec(&self, id: &str, script: &str) -> String {
        self.node
            .containerd
            .ctr(&["task", "exec", "--exec-id", "e", id, "sh", "-c", script])
    }

    /// What its snapshot says after a word: a path.
    fn path_of(&self, snapshotter: &str, id: &str, word: &str) -> PathBuf {
        let told =
            self.node
                .containerd
                .ctr(&["snapshot", "--snapshotter", snapshotter, "mounts", "/target", id]);
        let rest = told.split_once(word).unwrap_or_else(|| panic!("{told}")).1;
        let end = rest.find([',', ' ', ':']).unwrap_or(rest.len());
        PathBuf::from(rest[..end].trim())
    }

    fn end(&self, id: &str) {
        self.node
            .containerd
            .ctr(&["task", "kill", "--signal", "SIGKILL", id]);
        until("the task has ended", || {
            self.node.containerd.ctr(&["task", "ls"]).contains("STOPPED")
        });
        // Some versions of it end with the task's code.
        self.node.containerd.run_ctr(&["task", "delete", id]);
        self.node.containerd.ctr(&["container", "delete", id]);
    }
}

fn mounts(pid: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap()
}

#[test]
#[ignore = "long"]
fn root_of_any_snapshotter_is_served_and_gets_the_writes() {
    let host = Host::new();
    let ctr = &host.node.containerd;
    host.pull("overlayfs");
    let before = mounts("self");
    let script = "set -e; echo hello > /written; rm /etc/passwd; mkdir -p /a/b; ln -s b /a/link; chmod 4755 /written; \
                  mv /written /a/link/moved; echo up; exec sleep 1000";
    ctr.ctr(&host.run("overlayfs", &["-d"], "one", script));
    until("the script is through", || {
        host.exec("one", "if test -e /a/b/moved; then echo yes; fi")
            .contains("yes")
    });
    // Where a diff of the snapshot is made from.
    let upper = host.path_of("overlayfs", "one", "upperdir=");
    assert_eq!(fs::read_to_string(upper.join("a/b/moved")).unwrap(), "hello\n");
    assert_eq!(
        fs::metadata(upper.join("a/b/moved")).unwrap().mode() & 0o7777,
        0o4755
    );
    let whiteout = fs::symlink_metadata(upper.join("etc/passwd")).unwrap();
    assert_eq!(whiteout.rdev(), 0);
    let [share] = serving()[..] else {
        panic!("{:?}", serving())
    };
    assert!(mounts(&share.to_string()).contains("- overlay "));
    assert_eq!(mounts("self"), before, "nothing is mounted in the host's tree");
    // Set-user-ID programs are such in the container, and owners are the container's.
    let said = host.exec(
        "one",
        "touch /mine; chown 7:8 /mine; stat -c %u:%g:%a /mine /a/b/moved; df / | tail -n 1",
    );
    assert!(said.contains("7:8:") && said.contains("0:0:4755"), "{said}");
    assert_eq!(fs::metadata(upper.join("mine")).unwrap().uid(), 7);
    // A mapping is written back before the machine goes.
    host.end("one");
    until("nothing serves", || serving().is_empty());
    assert_eq!(mounts("self"), before);

    host.pull("native");
    let said = ctr.ctr(&host.run(
        "native",
        &["--rm"],
        "two",
        "echo x > /y && cat /y /etc/passwd | head -n 1",
    ));
    assert_eq!(said, "x\n");
    ctr.ctr(&host.run("native", &["-d"], "three", "echo kept > /kept; exec sleep 1000"));
    until("it is written", || {
        host.exec("three", "cat /kept 2>/dev/null || true")
            .contains("kept")
    });
    let root = host.path_of("native", "three", "bind ");
    assert_eq!(fs::read_to_string(root.join("kept")).unwrap(), "kept\n");

    directory_of_the_host_is_a_root(&host, &root);
    host.end("three");
    until("nothing serves", || serving().is_empty());
    assert_eq!(mounts("self"), before);
}

/// Without an image, and beside another container.
fn directory_of_the_host_is_a_root(host: &Host, root: &Path) {
    let ctr = &host.node.containerd;
    let directory = root.to_str().unwrap();
    let said = ctr.ctr(&[
        "run",
        "--rm",
        "--runtime",
        RUNTIME,
        "--rootfs",
        directory,
        "four",
        "sh",
        "-c",
        "cat /kept; echo of-four > /four",
    ]);
    assert_eq!(said, "kept\n");
    assert_eq!(fs::read_to_string(root.join("four")).unwrap(), "of-four\n");
    let missing = ctr.run_ctr(&[
        "run",
        "--rm",
        "--runtime",
        RUNTIME,
        "--rootfs",
        "/no/such/root",
        "five",
        "true",
    ]);
    assert!(missing.stderr.contains("/no/such/root"), "{missing:?}");
    assert_eq!(whole_specification(host, directory), "0077\n1\n70\n");
}

/// What a program says of what `ctr` has no word for, in a container of this root: its mask, and files of its cgroup.
fn whole_specification(host: &Host, root: &str) -> String {
    let ctr = &host.node.containerd;
    let mut spec: serde_json::Value = serde_json::from_str(&ctr.ctr(&["oci", "spec"])).unwrap();
    let script = "umask; cat /sys/fs/cgroup/memory.oom.group /sys/fs/cgroup/pids.max";
    spec["root"] = json!({"path": root, "readonly": true});
    spec["process"]["args"] = json!(["sh", "-c", script]);
    spec["process"]["user"]["umask"] = json!(0o77);
    // The last numbers a disk of the host.
    spec["linux"]["resources"]["unified"] =
        json!({"memory.oom.group": "1", "pids.max": "70", "io.max": "8:0 rbps=1"});
    let cgroup =
        json!({"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]});
    spec["mounts"].as_array_mut().unwrap().push(cgroup);
    let own = json!({"type": "cgroup"});
    spec["linux"]["namespaces"].as_array_mut().unwrap().push(own);
    let config = host.node.home.scratch("specification").join("config.json");
    fs::write(&config, spec.to_string()).unwrap();
    ctr.ctr(&[
        "run",
        "--rm",
        "--runtime",
        RUNTIME,
        "--config",
        config.to_str().unwrap(),
        "whole",
    ])
}

/// Directories and files for a container's mounts, among them a ConfigMap as the kubelet writes it.
fn lay_out(place: &Path) {
    let path = |name: &str| place.join(name);
    for directory in [
        "rw",
        "ro",
        "config",
        "config/..1",
        "config/..2",
        "memory",
        "above/below",
    ] {
        fs::create_dir_all(path(directory)).unwrap();
    }
    fs::write(path("ro/file"), "read\n").unwrap();
    fs::write(path("single"), "one\n").unwrap();
    for (version, text) in [("..1", "first\n"), ("..2", "second\n")] {
        fs::write(path("config").join(version).join("key"), text).unwrap();
    }
    symlink("..1", path("config/..data")).unwrap();
    symlink("..data/key", path("config/key")).unwrap();
    symlink(path("rw"), path("link")).unwrap();
}

#[test]
#[ignore = "long"]
fn files_of_the_host_are_where_the_specification_wants_them() {
    let host = Host::new();
    let ctr = &host.node.containerd;
    host.pull("overlayfs");
    let place = host.node.home.scratch("volumes");
    let path = |name: &str| place.join(name);
    lay_out(&place);
    let _memory = Mounted::tmpfs(&path("memory"));
    fs::write(path("memory/in"), "memory\n").unwrap();
    let _below = Mounted::tmpfs(&path("above/below"));
    let bind = |source: &str, target: &str, options: &str| {
        format!(
            "type=bind,src={},dst={target},options={options}",
            path(source).display()
        )
    };
    let given = [
        bind("link", "/rw", "rbind:rw:rprivate"),
        bind("ro", "/deep/er/ro", "rbind:ro:nosuid"),
        bind("config", "/config", "rbind:ro"),
        bind("single", "/etc/single", "bind:rw"),
        bind("memory", "/memory", "rbind:rw"),
        bind("above", "/alone", "rbind:ro"),
        bind("above", "/whole", "rbind:rro"),
    ];
    let options: Vec<&str> = ["-d"]
        .into_iter()
        .chain(given.iter().flat_map(|mount| ["--mount", mount]))
        .collect();
    ctr.ctr(&host.run("overlayfs", &options, "one", "exec sleep 1000"));
    let said = host.exec(
        "one",
        "cat /deep/er/ro/file /etc/single /memory/in /config/key; echo made > /rw/made; echo two > /etc/single; \
         touch /deep/er/ro/x 2>&1 || echo refused; echo out > /memory/out",
    );
    for word in ["read\n", "one\n", "memory\n", "first\n", "refused"] {
        assert!(said.contains(word), "{word:?} in {said}");
    }
    assert_eq!(fs::read_to_string(path("rw/made")).unwrap(), "made\n");
    assert_eq!(fs::read_to_string(path("single")).unwrap(), "two\n");
    assert_eq!(fs::read_to_string(path("memory/out")).unwrap(), "out\n");
    assert!(!path("ro/x").exists());
    // What is mounted below is read-only with `rro` alone.
    let said = host.exec(
        "one",
        "for f in /alone/x /alone/below/x /whole/x /whole/below/y; do touch $f 2>/dev/null && echo $f; done; true",
    );
    assert_eq!(said, "/alone/below/x\n");
    assert!(path("above/below/x").exists());
    // As the kubelet replaces a ConfigMap's files: at once, by a link.
    symlink("..2", path("config/..new")).unwrap();
    fs::rename(path("config/..new"), path("config/..data")).unwrap();
    until("the new files are seen", || {
        host.exec("one", "cat /config/key") == "second\n"
    });
    host.end("one");
    until("nothing serves", || serving().is_empty());

    for (mount, word) in [
        (bind("missing", "/x", "rbind"), "missing"),
        (bind("rw", "/x", "rbind:rshared"), "rslave"),
    ] {
        let refused = ctr.run_ctr(&host.run("overlayfs", &["--rm", "--mount", &mount], "two", "true"));
        assert!(
            refused.stderr.contains(word) && refused.code() != 0,
            "{refused:?}"
        );
    }
    until("nothing serves", || serving().is_empty());
}

/// A file system that is unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(path: &Path) -> Mounted {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "none"])
            .arg(path)
            .status();
        assert!(mounted.unwrap().success());
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        Mounted(path.into())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
