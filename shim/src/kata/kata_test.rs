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

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn pod(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let all = pairs
        .iter()
        .map(|(k, v)| (format!("{ANNOTATIONS}{k}"), (*v).to_owned()));
    all.collect()
}

#[test]
fn kata_file_sets_what_it_means_here() {
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
    for told in [
        "hypervisor.path",
        "hypervisor.valid_hypervisor_paths",
        "agent.kernel_modules",
    ] {
        assert!(
            kata.ignored.iter().any(|name| name == told),
            "{told}: {:?}",
            kata.ignored
        );
    }
}

#[test]
fn pod_annotation_precedes_file_if_enabled() {
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
    assert!(
        ignored
            .iter()
            .any(|line| line.contains("from_the_future: not known"))
    );
}

#[test]
fn disabled_and_host_annotations_fail_the_pod() {
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
fn invalid_values_are_refused_by_name() {
    let kata = of(FILE).unwrap();
    for (name, value) in [
        ("hypervisor.default_vcpus", "many"),
        ("hypervisor.default_vcpus", "NaN"),
        ("hypervisor.default_memory", "-1"),
        ("hypervisor.default_memory", "64"),
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
fn rate_limits_are_bits_and_operations_and_0_is_none() {
    let open =
        of("[hypervisor.clh]\nenable_annotations = [\".*\"]\ndisk_rate_limiter_ops_max_rate = 50\n").unwrap();
    let (settings, ignored) = open
        .settings(&pod(&[
            ("hypervisor.disk_rate_limiter_bw_max_rate", "80000000"),
            ("hypervisor.disk_rate_limiter_bw_one_time_burst", "800000"),
            ("hypervisor.net_rate_limiter_ops_max_rate", "1000"),
            ("hypervisor.net_rate_limiter_ops_one_time_burst", "7"),
            ("hypervisor.rx_rate_limiter_max_rate", "8000000"),
            ("hypervisor.tx_rate_limiter_max_rate", "0"),
        ]))
        .unwrap();
    assert!(ignored.is_empty(), "{ignored:?}");
    let disk = settings.disk_rate;
    assert_eq!(
        (disk.bytes_per_s, disk.once_bytes),
        (Some(10_000_000), Some(100_000))
    );
    assert_eq!(disk.ops_per_s, Some(50), "of the file");
    assert_eq!(settings.net_in_rate.bytes_per_s, Some(1_000_000));
    assert_eq!(settings.net_out_rate.bytes_per_s, None);
    for way in [settings.net_in_rate, settings.net_out_rate] {
        assert_eq!((way.ops_per_s, way.once_ops), (Some(1000), Some(7)));
    }
    for value in ["-1", "1", "much", "18446744073709551616", "18446744073709551615"] {
        let name = "hypervisor.tx_rate_limiter_max_rate";
        let said = open.settings(&pod(&[(name, value)])).unwrap_err().to_string();
        assert!(said.contains(name) && said.contains(value), "{said}");
    }
}

#[test]
fn pod_may_set_only_its_size_without_a_file() {
    let kata = Kata::without_file().unwrap();
    let (settings, _) = kata
        .settings(&pod(&[("hypervisor.default_memory", "128")]))
        .unwrap();
    assert_eq!(settings.memory_mib, Some(128));
    let error = kata
        .settings(&pod(&[("hypervisor.enable_iommu", "true")]))
        .unwrap_err();
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
    // Sections that are not tables are ignored.
    assert!(of("hypervisor = 1\nagent = []\nruntime = true\n").is_ok());
}

#[test]
fn kata_configuration_is_read_with_its_drop_in_files() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("configuration.toml");
    write(&file, FILE);
    write(
        &directory.path().join("config.d/20-last.toml"),
        "[hypervisor.qemu]\ndefault_memory = 512\nenable_annotations = [\"^default_memory$\"]\n",
    );
    write(
        &directory.path().join("config.d/10-first.toml"),
        "[hypervisor.qemu]\ndefault_memory = 1024\ndefault_vcpus = 3\n",
    );
    write(&directory.path().join("config.d/notes.txt"), "not TOML");
    let options = Options::File(file.clone());
    let settings = settings(&BTreeMap::new(), &options).unwrap();
    assert_eq!((settings.memory_mib, settings.vcpus), (Some(512), Some(3.0)));
    let error = super::settings(&pod(&[("hypervisor.default_vcpus", "1")]), &options).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("default_vcpus is not enabled") && said.contains(file.to_str().unwrap()),
        "{said}"
    );
    write(&directory.path().join("config.d/30-broken.toml"), "[");
    let said = super::settings(&BTreeMap::new(), &options)
        .unwrap_err()
        .to_string();
    assert!(said.contains("30-broken.toml"), "{said}");
    let gone = Options::File(directory.path().join("gone.toml"));
    let said = super::settings(&BTreeMap::new(), &gone).unwrap_err().to_string();
    assert!(said.contains("gone.toml: it cannot be read"), "{said}");
    let large = directory.path().join("large.toml");
    write(&large, &"#".repeat(MAX_FILE as usize + 1));
    let said = super::settings(&BTreeMap::new(), &Options::File(large))
        .unwrap_err()
        .to_string();
    assert!(said.contains("larger than 1 MiB"), "{said}");
}

#[test]
fn sections_in_containerds_own_file_are_katas_too() {
    let options = Options::Text("[hypervisor.thaw]\ndefault_memory = 300\n".into());
    let settings = settings(&BTreeMap::new(), &options).unwrap();
    assert_eq!(settings.memory_mib, Some(300));
}
