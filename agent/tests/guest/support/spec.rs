//! A container's root file system and specification.

use std::fs;
use std::path::Path;

use thaw_protocol::agent::{MessageField, oci};

use super::Guest;

pub fn make_rootfs(root: &Path) {
    for dir in ["bin", "etc", "proc", "sys", "dev", "tmp", "run"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let busybox = ["/usr/bin/busybox", "/bin/busybox"]
        .iter()
        .find(|p| Path::new(p).exists())
        .unwrap();
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    for applet in
        "sh cat echo id sleep true false wc head hostname stty pwd ls mount grep mkdir touch test tr"
            .split_whitespace()
    {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nwww:x:33:34::/var/www:/bin/sh\n",
    )
    .unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nwww:x:34:\nmore:x:50:www\n").unwrap();
}

pub fn capabilities(names: &[&str]) -> oci::LinuxCapabilities {
    let set: Vec<String> = names.iter().map(ToString::to_string).collect();
    oci::LinuxCapabilities {
        Bounding: set.clone(),
        Effective: set.clone(),
        Permitted: set,
        ..Default::default()
    }
}

pub fn process(args: &[&str]) -> oci::Process {
    oci::Process {
        Args: args.iter().map(ToString::to_string).collect(),
        Env: vec!["PATH=/bin".into()],
        Cwd: "/".into(),
        User: MessageField::some(oci::User::new()),
        Capabilities: MessageField::some(capabilities(&[
            "CAP_CHOWN",
            "CAP_SETUID",
            "CAP_SETGID",
            "CAP_KILL",
            "CAP_DAC_OVERRIDE",
        ])),
        ..Default::default()
    }
}

pub fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> oci::Mount {
    oci::Mount {
        destination: destination.into(),
        type_: kind.into(),
        source: source.into(),
        options: options.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

pub fn bind(source: &str, destination: &str, options: &[&str]) -> oci::Mount {
    mount(destination, "bind", source, options)
}

/// A specification as a container engine writes it.
pub fn spec(g: &Guest, args: &[&str]) -> oci::Spec {
    let namespace = |kind: &str| oci::LinuxNamespace {
        Type: kind.into(),
        ..Default::default()
    };
    oci::Spec {
        Process: MessageField::some(process(args)),
        Root: MessageField::some(oci::Root {
            Path: g.rootfs().to_str().unwrap().into(),
            ..Default::default()
        }),
        Mounts: vec![
            mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount(
                "/dev",
                "tmpfs",
                "tmpfs",
                &["nosuid", "strictatime", "mode=755", "size=65536k"],
            ),
            mount(
                "/dev/pts",
                "devpts",
                "devpts",
                &[
                    "nosuid",
                    "noexec",
                    "newinstance",
                    "ptmxmode=0666",
                    "mode=0620",
                    "gid=5",
                ],
            ),
            mount(
                "/dev/shm",
                "tmpfs",
                "shm",
                &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
            ),
            mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ],
        Linux: MessageField::some(oci::Linux {
            Namespaces: ["pid", "ipc", "uts", "mount", "cgroup"].map(namespace).to_vec(),
            ..Default::default()
        }),
        ..Default::default()
    }
}
