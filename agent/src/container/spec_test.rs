use super::*;
use thaw_protocol::agent::MessageField;

fn minimal() -> oci::Spec {
    let mut spec = oci::Spec::new();
    let mut root = oci::Root::new();
    root.Path = "/run/c/rootfs".into();
    spec.Root = MessageField::some(root);
    let mut process = oci::Process::new();
    process.Args = vec!["/bin/true".into()];
    spec.Process = MessageField::some(process);
    spec.Linux = MessageField::some(oci::Linux::new());
    spec
}

#[test]
fn minimal_spec_gets_own_mount_namespace_and_cgroup() {
    let spec = Spec::new("c1", &minimal(), None).unwrap();
    assert_eq!(spec.unshare, UnshareFlags::NEWNS);
    assert_eq!(spec.cgroup, Path::new("thaw/c1"));
    assert_eq!(spec.process.cwd, Path::new("/"));
}

#[test]
fn hooks_of_every_kind_are_refused_by_name() {
    type Field = fn(&mut oci::Hooks) -> &mut Vec<oci::Hook>;
    let kinds: [(&str, Field); 6] = [
        ("prestart", |h| &mut h.Prestart),
        ("poststart", |h| &mut h.Poststart),
        ("poststop", |h| &mut h.Poststop),
        ("createRuntime", |h| &mut h.CreateRuntime),
        ("createContainer", |h| &mut h.CreateContainer),
        ("startContainer", |h| &mut h.StartContainer),
    ];
    for (name, field) in kinds {
        let mut spec = minimal();
        let mut hooks = oci::Hooks::new();
        field(&mut hooks).push(oci::Hook {
            Path: "/bin/hook".into(),
            ..Default::default()
        });
        spec.Hooks = MessageField::some(hooks);
        let e = Spec::new("c", &spec, None).unwrap_err();
        assert!(
            matches!(e, Error::Unsupported(_)) && e.to_string().contains(name),
            "{e}"
        );
    }
}

#[test]
fn escaping_copy_paths_are_refused() {
    let mut spec = minimal();
    spec.Linux.as_mut().unwrap().CgroupsPath = "/a/../../b".into();
    assert!(Spec::new("c", &spec, None).is_err());
    let mut spec = minimal();
    spec.Root.as_mut().unwrap().Path = "/".into();
    assert!(Spec::new("c", &spec, None).is_err());
    let mut spec = minimal();
    spec.Linux
        .as_mut()
        .unwrap()
        .Sysctl
        .insert("net/../../x".into(), "1".into());
    assert!(Spec::new("c", &spec, None).is_err());
    let mut spec = minimal();
    spec.Process.as_mut().unwrap().Args = vec![];
    assert!(Spec::new("c", &spec, None).is_err());
}

#[test]
fn systemd_cgroup_paths_become_plain_ones() {
    assert_eq!(
        cgroup_path("c", "pods.slice:cri:abc").unwrap(),
        Path::new("pods.slice/cri-abc")
    );
    assert_eq!(cgroup_path("c", "/docker/abc").unwrap(), Path::new("docker/abc"));
    assert!(cgroup_path("c", "a:b").is_err());
}

#[test]
fn user_name_precedes_numbers() {
    let user = oci::User {
        UID: 5,
        Username: "www:web".into(),
        ..Default::default()
    };
    assert_eq!(
        user_spec(Some(&user), None),
        UserSpec::Name {
            user: "www:web".into(),
            more_groups: Vec::new()
        }
    );
    let strings = StringUser {
        uid: "7".into(),
        gid: "8".into(),
        ..Default::default()
    };
    assert_eq!(
        user_spec(Some(&user), Some(&strings)),
        UserSpec::Name {
            user: "7:8".into(),
            more_groups: Vec::new()
        }
    );
}
