use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    container: ContainerArguments,
}

fn read(words: &[&str]) -> ContainerArguments {
    let line = ["run"].iter().chain(words);
    Line::try_parse_from(line).unwrap().container
}

#[test]
fn last_security_option_of_a_kind_wins() {
    let given = read(&[
        "--security-opt",
        "seccomp=unconfined",
        "--security-opt",
        "no-new-privileges",
        "--security-opt",
        "seccomp=default",
    ]);
    assert_eq!(given.seccomp().unwrap(), Seccomp::Default);
    assert!(given.settings().no_new_privileges);
    let plain = read(&[]);
    assert_eq!(plain.settings(), Settings::default());
    assert_eq!(plain.seccomp().unwrap(), Seccomp::Default);
    let missing = read(&["--security-opt", "seccomp=/missing.json"]).seccomp();
    assert!(missing.unwrap_err().what.contains("seccomp=/missing.json"));
}

#[test]
fn labels_are_pairs_and_checked() {
    let labels = read(&["-l", "app=web", "--label", "tier"]).labels().unwrap();
    assert_eq!(labels["app"], "web");
    assert_eq!(labels["tier"], "");
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, b"# comment\n\napp=db\nowner=me\n").unwrap();
    let path = file.path().to_str().unwrap();
    let labels = read(&["--label-file", path, "-l", "app=web"]).labels().unwrap();
    assert_eq!((labels["app"].as_str(), labels["owner"].as_str()), ("web", "me"));
    let missing = read(&["--label-file", "/missing"]).labels().unwrap_err();
    assert!(missing.what.contains("--label-file /missing"), "{missing}");
    assert!(read(&["-l", "=x"]).labels().unwrap_err().what.contains("--label"));
}

#[test]
fn mounts_go_where_they_belong() {
    let given = read(&[
        "--mount",
        "type=bind,source=/srv,target=/data",
        "--mount",
        "type=tmpfs,target=/run",
        "--mount",
        "type=volume,target=/var/lib/docker",
        "--tmpfs",
        "/cache",
        "--shm-size",
        "1m",
    ]);
    assert_eq!(given.volumes().count(), 1);
    let settings = given.settings();
    assert_eq!((settings.tmpfs.len(), settings.anonymous_volumes.len()), (2, 1));
    assert_eq!(settings.shm_bytes, Some(1 << 20));
}

#[test]
fn wrong_values_name_flag_and_value() {
    for (flag, value) in [
        ("--cap-add", "NET_MASTER"),
        ("--device", "/dev/sda"),
        ("--ulimit", "files=3"),
        ("--sysctl", "a"),
        ("--platform", "linux/arm64"),
        ("--tmpfs", "run"),
        ("--group-add", "a:b"),
        ("--domainname", "a b"),
    ] {
        let error = Line::try_parse_from(["run", flag, value])
            .unwrap_err()
            .to_string();
        assert!(error.contains(flag) && error.contains(value), "{error}");
    }
}

#[test]
fn cidfile_must_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("id");
    let given = read(&["--cidfile", path.to_str().unwrap()]);
    assert!(given.create_cidfile().unwrap().is_some());
    assert!(given.create_cidfile().is_err());
}
