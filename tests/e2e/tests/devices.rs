//! Block devices of the host in containers that are microVMs: loop devices, given by `ctr` and by CRI.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only devices`.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use thaw_e2e::cri;
use thaw_e2e::node::{Node, until};

/// Bytes of most.
const SIZE: u64 = 8 << 20;

/// A loop device.
struct Loop {
    node: PathBuf,
    file: PathBuf,
}

impl Loop {
    /// Of a new file that begins and ends with a word.
    fn new(file: PathBuf, size: u64, word: &str, options: &[&str]) -> Loop {
        let made = File::create_new(&file).unwrap();
        made.set_len(size).unwrap();
        made.write_all_at(word.as_bytes(), 0).unwrap();
        made.write_all_at(word.as_bytes(), size - word.len() as u64)
            .unwrap();
        let attached = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(&file)
            .output()
            .unwrap();
        assert!(attached.status.success(), "{attached:?}");
        let node = String::from_utf8(attached.stdout).unwrap().trim().into();
        Loop { node, file }
    }

    fn path(&self) -> &str {
        self.node.to_str().unwrap()
    }

    /// What is there at an offset, as the host's processes see it.
    fn read(&self, at: u64, length: usize) -> String {
        let mut bytes = vec![0; length];
        File::open(&self.node)
            .unwrap()
            .read_exact_at(&mut bytes, at)
            .unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Its number as `stat -c %t:%T` has it.
    fn number(&self) -> String {
        let number = fs::metadata(&self.node).unwrap().rdev();
        format!("{:x}:{:x}", rustix::fs::major(number), rustix::fs::minor(number))
    }

    /// Detaches it, and waits until it is free: the kernel keeps a device that udev still reads.
    fn is_free(&self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.node).status();
        assert!(detached.unwrap().success());
        let name = self.node.file_name().unwrap();
        let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
        until(&format!("{} is free", self.path()), || !backing.exists());
        fs::remove_file(&self.file).unwrap();
    }
}

/// Writes a word at an offset, for good.
fn write(word: &str, device: &str, at: u64) -> String {
    format!("printf {word} | dd of={device} bs=1 seek={at} conv=notrunc,fsync status=none")
}

#[test]
#[ignore = "long"]
fn ctr_container_gets_block_devices_and_frees_them() {
    let node = Node::new();
    let ctr = &node.containerd;
    let place = node.home.scratch("disks");
    let disks: Vec<Loop> = (0..4)
        .map(|n| Loop::new(place.join(n.to_string()), SIZE, &format!("disk-{n}"), &[]))
        .collect();
    let first = disks[0].path();
    ctr.ctr(&node.run(&["-d", "--device", first], "one", &["sleep", "1000"]));
    let exec = |script: &str| ctr.run_ctr(&["task", "exec", "--exec-id", "e", "one", "sh", "-c", script]);
    let size = "import os; print(os.lseek(os.open(os.environ['D'], os.O_RDONLY), 0, 2))";
    let script = format!(
        "head -c 6 {first}; echo; tail -c 6 {first}; echo; D={first} python3 -c \"{size}\"; stat -c '%F %u:%g %a' {first}; {}",
        write("from-guest", first, 4096)
    );
    let said = exec(&script);
    let on_host = fs::metadata(first).unwrap();
    assert_eq!(
        (said.code(), said.stdout.as_str()),
        (
            0,
            format!(
                "disk-0\ndisk-0\n{SIZE}\nblock special file {}:{} {:o}\n",
                on_host.uid(),
                on_host.gid(),
                on_host.mode() & 0o7777
            )
            .as_str()
        ),
        "{said:?}"
    );
    assert_eq!(disks[0].read(4096, 10), "from-guest");
    let number = exec(&format!("stat -c %t:%T {first}"));
    assert_ne!(
        number.stdout.trim(),
        disks[0].number(),
        "it has the guest's number"
    );
    let beyond = exec(&write("x", first, SIZE));
    assert!(beyond.code() != 0, "{beyond:?}");
    // Not to be frozen, as what is on it is the host's; it goes on.
    let frozen = ctr.run_ctr(&["container", "checkpoint", "--task", "one", "checkpoint/of:one"]);
    assert!(
        frozen.code() != 0 && frozen.stderr.contains("block device"),
        "{frozen:?}"
    );
    // Written and not synced: the guest's end writes it back.
    let unsynced = exec(&format!(
        "printf at-the-end | dd of={first} bs=1 seek=8192 conv=notrunc status=none"
    ));
    assert_eq!(unsynced.code(), 0, "{unsynced:?}");
    ctr.ctr(&["task", "kill", "--signal", "SIGKILL", "one"]);
    until("the task has ended", || {
        ctr.ctr(&["task", "ls"]).contains("STOPPED")
    });
    ctr.run_ctr(&["task", "delete", "one"]);
    ctr.ctr(&["container", "delete", "one"]);
    node.is_empty_soon();
    assert_eq!(disks[0].read(8192, 10), "at-the-end");

    let three: Vec<&str> = ["--rm"]
        .into_iter()
        .chain(disks[1..].iter().flat_map(|disk| ["--device", disk.path()]))
        .collect();
    let names: Vec<&str> = disks[1..].iter().map(Loop::path).collect();
    let script = format!("for d in {}; do head -c 6 $d; echo; done", names.join(" "));
    let said = ctr.ctr(&node.run(&three, "two", &["sh", "-c", &script]));
    assert_eq!(said, "disk-1\ndisk-2\ndisk-3\n");
    let four: Vec<&str> = three.iter().copied().chain(["--device", first]).collect();
    let refused = ctr.run_ctr(&node.run(&four, "three", &["true"]));
    assert!(
        refused.stderr.contains("has 3 of the host's at a time") && refused.code() != 0,
        "{refused:?}"
    );
    ctr.run_ctr(&["container", "delete", "three"]);
    node.is_empty_soon();
    disks.iter().for_each(Loop::is_free);
}

#[test]
#[ignore = "long"]
fn pod_containers_share_block_devices_and_slots_are_reused() {
    let node = Node::new();
    let place = node.home.scratch("disks");
    let data = Loop::new(place.join("data"), SIZE, "the-data", &[]);
    let large = ["--sector-size", "4096"];
    let fixed = Loop::new(place.join("fixed"), SIZE, "is-fixed", &large);
    let pod = node.pod("pod");
    let device = |disk: &Loop, path: &str, permissions: &str| cri::Device {
        container_path: path.into(),
        host_path: disk.path().into(),
        permissions: permissions.into(),
    };
    let container = |name: &str, devices: &[cri::Device]| {
        pod.container_with(name, "sleep 1000", |config, _| config.devices = devices.to_vec())
    };
    let both = [
        device(&data, "/dev/xvda", "rwm"),
        device(&fixed, "/dev/deep/er", "r"),
    ];
    let first = container("first", &both);
    assert_eq!(
        node.said(
            &first,
            "head -c 8 /dev/xvda; head -c 8 /dev/deep/er; tail -c 8 /dev/deep/er"
        ),
        "the-datais-fixedis-fixed"
    );
    // Programs that care find the block size that there is.
    let block = "cat /sys/dev/block/$(printf %d:%d $(stat -c '0x%t 0x%T' DEVICE))/queue/logical_block_size";
    assert_eq!(node.said(&first, &block.replace("DEVICE", "/dev/xvda")), "512\n");
    assert_eq!(
        node.said(&first, &block.replace("DEVICE", "/dev/deep/er")),
        "4096\n"
    );
    node.said(&first, &write("written", "/dev/xvda", 512));
    assert_eq!(data.read(512, 7), "written");
    let (_, refusal, code) = node.exec(&first, &write("written", "/dev/deep/er", 512));
    assert!(code != 0 && refusal.contains("not permitted"), "{refusal}");
    assert_eq!(fixed.read(512, 7), "\0".repeat(7));

    // Of another container's, who has it too, changes are seen at once.
    let second = container("second", &both[..1]);
    node.said(
        &second,
        "printf unsynced | dd of=/dev/xvda bs=1 seek=1024 conv=notrunc status=none",
    );
    let read = "dd if=/dev/xvda bs=1 skip=1024 count=8 status=none";
    assert_eq!(node.said(&first, read), "unsynced");
    node.stop(&first, 0);
    node.remove(&first);
    fixed.is_free();
    assert_eq!(node.said(&second, read), "unsynced");
    node.stop(&second, 0);
    node.remove(&second);
    assert_eq!(data.read(1024, 8), "unsynced", "it is written back");
    data.is_free();

    // The pod goes on, and its next containers have other devices in those slots.
    let other = Loop::new(place.join("other"), SIZE / 2, "an-other", &[]);
    for name in ["third", "fourth"] {
        let again = container(name, &[device(&other, "/dev/xvda", "rw")]);
        assert_eq!(
            node.said(&again, "head -c 8 /dev/xvda; tail -c 8 /dev/xvda"),
            "an-otheran-other"
        );
        assert_eq!(node.said(&again, "wc -c < /dev/xvda"), format!("{}\n", SIZE / 2));
        // Left running: the pod's end takes it.
        if name == "third" {
            node.stop(&again, 0);
            node.remove(&again);
        }
    }
    pod.remove();
    node.is_empty_soon();
    other.is_free();
}
