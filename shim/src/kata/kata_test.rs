//! Files as Kata ships them, pods as people write them.

use std::time::Duration;

use super::*;

const FILE: &str = r#"
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
kernel = "/opt/kata/share/kata-containers/vmlinux.container"
enable_annotations = ["enable_iommu", "default_.*"]
valid_hypervisor_paths = ["/opt/kata/bin/qemu-system-x86_64"]
default_vcpus = 2.0
default_maxvcpus = 0
default_memory = 2048
shared_fs = "virtio-fs"

[agent.kata]
kernel_modules = []

[runtime]
internetworking_model = "tcfilter"
disable_guest_seccomp = true
sandbox_cgroup_only = false
create_container_timeout = 30
"#;

fn of(text: &str) -> Result<Kata, KataError> {
    Kata::of_table("configuration.toml".into(), &text.parse().unwrap())
}

fn pod(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let all = pairs.iter().map(|(k, v)| (format!("{ANNOTATIONS}{k}"), (*v).to_owned()));
    all.collect()
}

#[test]
fn a_file_of_katas_is_taken_for_what_it_means_here() {
    let kata = of(FILE).unwrap();
    let (settings, ignored) = kata.settings(&BTreeMap::new()).unwrap();
    assert_eq!(
        settings,
        Settings {
            vcpus: Some(2.0),
            memory_mib: Some(2048),
            disable_guest_seccomp: Some(true),
            create_timeout: Some(Duration::from_secs(30)),
            ..Settings::default()
        }
    );
    assert!(ignored.is_empty());
    for told in ["hypervisor.path: ", "hypervisor.valid_hypervisor_paths: not known", "agent.kernel_modules: "] {
        assert!(kata.ignored.iter().any(|line| line.starts_with(told)), "{told}: {:?}", kata.ignored);
    }
}

#[test]
fn a_pods_word_goes_before_the_files_where_that_allows_it() {
    let kata = of(FILE).unwrap();
    let (settings, ignored) = kata
        .settings(&pod(&[
            ("hypervisor.default_vcpus", "0.5"),
            ("hypervisor.default_memory", "256"),
            ("hypervisor.enable_iommu", "true"),
            ("runtime.disable_guest_seccomp", "false"),
            ("runtime.sandbox_cgroup_only", "true"),
            ("hypervisor.from_the_future", "1"),
        ]))
        .unwrap();
    assert_eq!((settings.vcpus, settings.memory_mib), (Some(0.5), Some(256)));
    assert_eq!(settings.disable_guest_seccomp, Some(false));
    assert_eq!(ignored.len(), 3, "{ignored:?}");
    assert!(ignored.iter().any(|line| line.contains("from_the_future: not known")));
}

#[test]
fn what_is_not_enabled_and_what_reaches_the_host_fails_the_pod() {
    let kata = of(FILE).unwrap();
    let refused = |pairs: &[(&str, &str)]| kata.settings(&pod(pairs)).unwrap_err().to_string();
    let said = refused(&[("hypervisor.path", "/bin/sh")]);
    assert!(said.contains("hypervisor.path is not enabled"), "{said}");
    let open = of("[hypervisor.clh]\nenable_annotations = [\".*\"]\n").unwrap();
    for (name, value) in [
        ("hypervisor.path", "/bin/sh"),
        ("hypervisor.jailer_path", "/bin/sh"),
        ("hypervisor.virtio_fs_daemon", "/bin/sh"),
        ("hypervisor.virtio_fs_extra_args", "[]"),
        ("hypervisor.kernel", "/etc/shadow"),
        ("hypervisor.kernel_params", "init=/bin/sh"),
        ("hypervisor.entropy_source", "/dev/zero"),
        ("agent.kernel_modules", "e1000e"),
        ("hypervisor.rx_rate_limiter_max_rate", "1"),
    ] {
        let said = open.settings(&pod(&[(name, value)])).unwrap_err().to_string();
        assert!(said.contains("refused") && said.contains(name), "{said}");
    }
    let path = BTreeMap::from([(CONFIG_PATH.to_owned(), "/tmp/mine.toml".to_owned())]);
    assert!(matches!(open.settings(&path), Err(KataError::Refused { .. })));
    let said = refused(&[("runtime.disable_new_netns", "true")]);
    assert!(said.contains("no network of the host's"), "{said}");
}

#[test]
fn values_that_are_none_are_told_with_their_name() {
    let kata = of(FILE).unwrap();
    for (name, value) in [
        ("hypervisor.default_vcpus", "many"),
        ("hypervisor.default_vcpus", "NaN"),
        ("hypervisor.default_memory", "-1"),
        ("hypervisor.default_memory", "4294967296"),
        ("runtime.disable_guest_seccomp", "perhaps"),
        ("runtime.create_container_timeout", "1h"),
        ("runtime.internetworking_model", "bridge"),
    ] {
        let said = kata.settings(&pod(&[(name, value)])).unwrap_err().to_string();
        assert!(said.contains(name) && said.contains(value), "{said}");
    }
}

#[test]
fn without_a_file_a_pod_may_say_how_large_it_is_and_no_more() {
    let kata = Kata::without_file().unwrap();
    let (settings, _) = kata.settings(&pod(&[("hypervisor.default_memory", "128")])).unwrap();
    assert_eq!(settings.memory_mib, Some(128));
    let error = kata.settings(&pod(&[("hypervisor.enable_iommu", "true")])).unwrap_err();
    assert!(matches!(error, KataError::NotEnabled { .. }), "{error}");
}

#[test]
fn files_that_say_what_cannot_be_are_refused_with_their_name() {
    for text in [
        "[hypervisor.q]\nenable_annotations = \"all\"\n",
        "[hypervisor.q]\nenable_annotations = [1]\n",
        "[hypervisor.q]\nenable_annotations = [\"(\"]\n",
        "[hypervisor.q]\ndefault_memory = \"much\"\n",
        "[runtime]\ndisable_new_netns = true\n",
    ] {
        let said = of(text).unwrap_err().to_string();
        assert!(said.starts_with("configuration.toml: "), "{said}");
    }
    // Sections that are no tables are nobody's.
    assert!(of("hypervisor = 1\nagent = []\nruntime = true\n").is_ok());
}
