use super::*;

/// The shape of docker's default profile, with one rule of each kind.
const DOCKERS: &str = r#"{
  "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1,
  "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}],
  "syscalls": [
    {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
    {"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "4.8"}},
    {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 40, "op": "SCMP_CMP_NE"}]},
    {"names": ["arch_prctl"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64", "x32"]}},
    {"names": ["s390_runtime_instr"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}},
    {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
    {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
    {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "comment": "no new namespaces", "excludes": {"arches": ["s390"]},
     "args": [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]}
  ]}"#;

fn names(profile: &Profile, capabilities: &[&str]) -> Vec<String> {
    let held: Vec<String> = capabilities.iter().map(|name| (*name).to_owned()).collect();
    let rules = profile.rules(&held).Syscalls;
    rules.into_iter().flat_map(|rule| rule.Names).collect()
}

#[test]
fn dockers_conditions_choose_rules() {
    let profile = Profile::parse(DOCKERS.as_bytes()).unwrap();
    let plain = [
        "read",
        "write",
        "ptrace",
        "socket",
        "arch_prctl",
        "clone3",
        "clone",
    ];
    assert_eq!(names(&profile, &[]), plain);
    let admin = [
        "read",
        "write",
        "ptrace",
        "socket",
        "arch_prctl",
        "mount",
        "clone",
    ];
    assert_eq!(names(&profile, &["CAP_SYS_ADMIN"]), admin);
    let rules = profile.rules(&[]);
    assert_eq!(rules.DefaultErrnoRet, Some(1));
    let masked = &rules.Syscalls[5].Args[0];
    assert_eq!(
        (masked.Value, masked.ValueTwo, masked.Op.as_str()),
        (0x7E02_0000, 0, "SCMP_CMP_MASKED_EQ")
    );
    assert_eq!(
        rules.Syscalls[4].ErrnoRet,
        Some(oci::linux_syscall::ErrnoRet::Errnoret(38))
    );
}

#[test]
fn oci_form_is_read_and_repeated_names_are_one() {
    let json = br#"{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"], "syscalls": [{"names": ["mkdir", "mkdir"], "action": "SCMP_ACT_ERRNO"},
        {"name": "chmod", "action": "SCMP_ACT_KILL_PROCESS", "args": null}]}"#;
    let profile = Profile::parse(json).unwrap();
    assert_eq!(names(&profile, &[]), ["mkdir", "chmod"]);
    assert_eq!(profile.rules(&[]).Flags, ["SECCOMP_FILTER_FLAG_LOG"]);
}

#[test]
fn faults_are_named_with_their_place() {
    let rule = |rest: &str| {
        format!(
            r#"{{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{{"names":["read"],"action":"SCMP_ACT_LOG"}},{{{rest}}}]}}"#
        )
    };
    for (json, told) in [
        ("".into(), "EOF"),
        ("[]".into(), "expected struct"),
        ("{}".into(), "defaultAction"),
        (
            r#"{"defaultAction":"SCMP_ACT_ALOW"}"#.into(),
            "closest is SCMP_ACT_ALLOW",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_NOTIFY"}"#.into(),
            "SCMP_ACT_NOTIFY needs",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_ALLOW","syscals":[]}"#.into(),
            "unknown field `syscals`",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_ALLOW","flags":["X"]}"#.into(),
            "flags: \"X\"",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["a"],"archMap":[]}"#.into(),
            "archMap",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/run/x"}"#.into(),
            "listenerPath",
        ),
        (rule(r#""action":"SCMP_ACT_ALLOW""#), "syscalls[1]: names"),
        (
            rule(r#""name":"a","names":["b"],"action":"SCMP_ACT_ALLOW""#),
            "exclude",
        ),
        (
            rule(r#""name":"a","action":"allow""#),
            "syscalls[1]: action: \"allow\"",
        ),
        (
            rule(r#""name":"a","action":"SCMP_ACT_ERRNO","errnoRet":4096"#),
            "4096",
        ),
        (
            rule(r#""name":"a","action":"SCMP_ACT_LOG","args":[{"index":6,"op":"SCMP_CMP_EQ"}]"#),
            "index 6",
        ),
        (
            rule(r#""name":"a","action":"SCMP_ACT_LOG","args":[{"index":0,"op":"=="}]"#),
            "op: \"==\"",
        ),
        (
            rule(r#""name":"a","action":"SCMP_ACT_LOG","includes":{"minKernel":"99.1"}"#),
            "minKernel 99.1",
        ),
        (
            rule(r#""name":"a","action":"SCMP_ACT_LOG","includes":{"minKernel":"new"}"#),
            "minKernel \"new\"",
        ),
        (" ".repeat(MAX_BYTES + 1), "larger than 256 KiB"),
    ] {
        let refused = Profile::parse(json.as_bytes()).unwrap_err();
        assert!(refused.contains(told), "{json}: {refused}");
    }
}

#[test]
fn file_errors_name_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("profile.json");
    let missing = Profile::read(&path).unwrap_err().to_string();
    assert!(missing.contains("profile.json"), "{missing}");
    std::fs::write(&path, "{").unwrap();
    let malformed = Profile::read(&path).unwrap_err().to_string();
    assert!(malformed.contains("profile.json: EOF"), "{malformed}");
    let endless = Profile::read(Path::new("/dev/zero")).unwrap_err().to_string();
    assert!(endless.contains("larger than"), "{endless}");
    std::fs::write(&path, DOCKERS).unwrap();
    Profile::read(&path).unwrap();
}
