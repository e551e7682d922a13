use oci_spec::image::ImageConfiguration;
use thaw_protocol::agent::oci;

use super::*;
use crate::container::seccomp_profile::Profile;
use crate::container::{Options, spec};

fn made(settings: Settings) -> oci::Spec {
    let text = r#"{"architecture":"amd64","os":"linux","config":{"Cmd":["x"]},"rootfs":{"type":"layers","diff_ids":[]}}"#;
    let image = ImageConfiguration::from_reader(text.as_bytes()).unwrap();
    let options = Options {
        settings,
        ..Options::default()
    };
    spec("c", &image, &options).unwrap()
}

fn mount<'a>(spec: &'a oci::Spec, path: &str) -> &'a oci::Mount {
    spec.Mounts
        .iter()
        .find(|mount| mount.destination == path)
        .unwrap()
}

#[test]
fn privileged_container_has_all_of_the_guest() {
    let spec = made(Settings {
        privileged: true,
        ..Settings::default()
    });
    assert_eq!(spec.Process.Capabilities.Effective.len(), 41);
    assert!(spec.Linux.Seccomp.is_none());
    assert!(spec.Linux.MaskedPaths.is_empty() && spec.Linux.ReadonlyPaths.is_empty());
    assert!(spec.Linux.Devices.iter().any(|device| device.Path == "/dev/fuse"));
    for path in ["/sys", "/sys/fs/cgroup"] {
        assert!(!mount(&spec, path).options.contains(&"ro".into()), "{path}");
    }
}

#[test]
fn plain_container_has_dockers_defaults() {
    let spec = made(Settings::default());
    assert_eq!(spec.Process.Capabilities.Effective.len(), 14);
    assert!(spec.Linux.Seccomp.is_some() && spec.Linux.Devices.is_empty());
    assert!(mount(&spec, "/sys").options.contains(&"ro".into()));
    assert!(mount(&spec, "/dev/shm").options.contains(&"size=65536k".into()));
    assert!(!spec.Process.NoNewPrivileges);
}

#[test]
fn settings_change_what_they_name() {
    let spec = made(Settings {
        tmpfs: vec!["/run:size=1m".parse().unwrap()],
        anonymous_volumes: vec![AnonymousVolume::new("/data", false).unwrap()],
        shm_bytes: Some(1 << 20),
        ulimits: vec!["nofile=9".parse().unwrap()],
        sysctls: vec!["net.core.somaxconn=7".parse().unwrap()],
        capabilities: Chosen {
            add: vec!["SYS_ADMIN".parse().unwrap()],
            drop: vec!["CHOWN".parse().unwrap()],
        },
        devices: vec!["/dev/net/tun".parse().unwrap()],
        no_new_privileges: true,
        privileged: false,
        groups: vec!["audio".parse().unwrap()],
        domainname: Some("corp.example".parse().unwrap()),
    });
    assert_eq!(mount(&spec, "/run").type_, "tmpfs");
    assert_eq!(mount(&spec, "/data").source, "/run/thaw/disk/c/volumes/0");
    assert!(mount(&spec, "/dev/shm").options.contains(&"size=1048576".into()));
    assert_eq!((spec.Process.Rlimits[0].Soft, spec.Process.Rlimits.len()), (9, 1));
    assert_eq!(spec.Linux.Sysctl["net.core.somaxconn"], "7");
    assert_eq!(spec.Linux.Sysctl["kernel.domainname"], "corp.example");
    let running = crate::container::running("c", &spec);
    let exec = crate::container::exec_process(&running, &Options::default());
    assert_eq!(exec.User.AdditionalGroups, ["audio"]);
    let bounding = &spec.Process.Capabilities.Bounding;
    assert!(bounding.contains(&"CAP_SYS_ADMIN".into()) && !bounding.contains(&"CAP_CHOWN".into()));
    assert_eq!(spec.Linux.Devices[0].Path, "/dev/net/tun");
    assert!(spec.Process.NoNewPrivileges);
    let allowed = |call: &str| {
        let rules = spec.Linux.Seccomp.Syscalls.iter();
        rules.flat_map(|rule| &rule.Names).any(|name| name == call)
    };
    assert!(allowed("mount"));
}

#[test]
fn profile_of_the_caller_confines_privileged_containers() {
    let text = r#"{"architecture":"amd64","os":"linux","config":{"Cmd":["x"]},"rootfs":{"type":"layers","diff_ids":[]}}"#;
    let image = ImageConfiguration::from_reader(text.as_bytes()).unwrap();
    let profile =
        br#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"name":"chmod","action":"SCMP_ACT_ERRNO"}]}"#;
    let options = Options {
        seccomp: Seccomp::Profile(Profile::parse(profile).unwrap()),
        settings: Settings {
            privileged: true,
            ..Settings::default()
        },
        ..Options::default()
    };
    let spec = spec("c", &image, &options).unwrap();
    assert_eq!(spec.Linux.Seccomp.DefaultAction, "SCMP_ACT_ALLOW");
    assert_eq!(spec.Linux.Seccomp.Syscalls[0].Names, ["chmod"]);
}

#[test]
fn exec_has_the_capabilities_of_its_container() {
    let spec = made(Settings {
        capabilities: Chosen {
            add: Vec::new(),
            drop: vec!["ALL".parse().unwrap()],
        },
        ..Settings::default()
    });
    let options = Options {
        command: vec!["id".into()],
        seccomp: Seccomp::Default,
        ..Options::default()
    };
    let running = crate::container::running("c", &spec);
    let process = crate::container::exec_process(&running, &options);
    assert!(process.Capabilities.Bounding.is_empty());
    let of_older_release = crate::container::Running {
        capabilities: None,
        ..running
    };
    let process = crate::container::exec_process(&of_older_release, &options);
    assert_eq!(process.Capabilities.Bounding.len(), 14);
}
