//! Configuration files as distributions ship them, and as owners write them.

use super::*;

const DEBIAN: &str = "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    \
    [plugins.\"io.containerd.grpc.v1.cri\".cni]\n      bin_dir = \"/usr/lib/cni\"\n      conf_dir = \"/etc/cni/net.d\"\n  \
    [plugins.\"io.containerd.internal.v1.opt\"]\n    path = \"/var/lib/containerd/opt\"\n";

fn setting() -> Setting {
    Setting {
        snapshots: "/run/thaw/snapshots.sock".into(),
        images: "/var/lib/thaw/images".into(),
        shim: None,
    }
}

fn installed(owners: &str) -> (Block, Table) {
    let block = setting().block(owners).unwrap();
    let table = format!("{owners}\n{}", block.lines).parse().unwrap();
    (block, table)
}

fn had<'a>(table: &'a Table, path: &[&str]) -> &'a Value {
    at(table, path).unwrap_or_else(|| panic!("no {path:?} in {table}"))
}

#[test]
fn a_file_of_debians_keeps_its_runtime_and_has_ours() {
    let (block, table) = installed(DEBIAN);
    assert!(block.lazy);
    let cri = ["plugins", "io.containerd.grpc.v1.cri"];
    let cri = had(&table, &cri);
    assert_eq!(cri["cni"]["bin_dir"].as_str(), Some("/usr/lib/cni"));
    let runtimes = &cri["containerd"]["runtimes"];
    assert_eq!(
        runtimes["runc"]["runtime_type"].as_str(),
        Some("io.containerd.runc.v2")
    );
    assert_eq!(runtimes["thaw"]["runtime_type"].as_str(), Some(RUNTIME));
    assert_eq!(runtimes["thaw"]["snapshotter"].as_str(), Some("thaw"));
    assert_eq!(
        cri["containerd"]["disable_snapshot_annotations"].as_bool(),
        Some(false)
    );
    let address = had(&table, &["proxy_plugins", "thaw", "address"]);
    assert_eq!(address.as_str(), Some("/run/thaw/snapshots.sock"));
    let root = had(&table, &["proxy_plugins", "thaw", "exports", "root"]);
    assert_eq!(root.as_str(), Some("/var/lib/thaw/images"));
    assert!(!block.lines.contains("runtime_platforms"));
}

#[test]
fn a_runtime_of_the_owners_is_not_written_again() {
    let owners = format!(
        "{DEBIAN}[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n"
    );
    let (block, table) = installed(&owners);
    assert!(!block.lines.contains("runtimes.runc"), "{}", block.lines);
    assert!(block.lazy);
    assert!(table.contains_key("proxy_plugins"));
}

#[test]
fn where_the_table_is_written_already_images_are_pulled_whole() {
    let owners = format!(
        "{DEBIAN}[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"runc\"\n"
    );
    let (block, _) = installed(&owners);
    assert!(
        !block.lazy && !block.lines.contains("snapshotter = "),
        "{}",
        block.lines
    );
    let (block, _) = installed(&format!("{owners}disable_snapshot_annotations = false\n"));
    assert!(block.lazy && !block.lines.contains("disable_snapshot_annotations"));
    let (block, _) = installed(&format!("{owners}disable_snapshot_annotations = true\n"));
    assert!(!block.lazy);
}

#[test]
fn containerd_2_has_its_plugins_under_other_names() {
    for version in [3, 4] {
        let (block, table) = installed(&format!("version = {version}\n"));
        assert!(block.lazy && !block.lines.contains("runtimes.runc"));
        let runtime = [
            "plugins",
            "io.containerd.cri.v1.runtime",
            "containerd",
            "runtimes",
            "thaw",
        ];
        assert_eq!(had(&table, &runtime)["runtime_type"].as_str(), Some(RUNTIME));
        let images = had(&table, &["plugins", "io.containerd.cri.v1.images"]);
        assert_eq!(images["disable_snapshot_annotations"].as_bool(), Some(false));
        let platform = &images["runtime_platforms"]["thaw"];
        assert_eq!(platform["snapshotter"].as_str(), Some("thaw"));
    }
}

#[test]
fn what_leaves_no_room_is_refused_with_its_reason() {
    for (owners, why) in [
        ("root = \"/x\"\n", "version 1"),
        ("version = 1\n", "version 1"),
        ("version = \n", ""),
        (
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.thaw]\nruntime_type = \"x\"\n",
            "already",
        ),
        ("version = 2\nplugins = {}\n", ""),
    ] {
        let refused = setting().block(owners).unwrap_err();
        assert!(
            refused.contains(why) && !refused.is_empty(),
            "{owners}: {refused}"
        );
    }
}

#[test]
fn a_shim_elsewhere_is_named() {
    let elsewhere = Setting {
        shim: Some("/opt/a \"b\"/containerd-shim-thaw-v2".into()),
        ..setting()
    };
    let table: Table = elsewhere.block("").unwrap().lines.parse().unwrap();
    let runtime = [
        "plugins",
        "io.containerd.grpc.v1.cri",
        "containerd",
        "runtimes",
        "thaw",
    ];
    let path = had(&table, &runtime)["runtime_path"].as_str();
    assert_eq!(path, Some("/opt/a \"b\"/containerd-shim-thaw-v2"));
    assert_eq!(table["version"].as_integer(), Some(2));
}

#[test]
fn a_file_is_changed_once_and_then_back() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("config.toml");
    fs::write(&path, DEBIAN).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let install = || {
        let file = ConfigFile::read(&path).unwrap();
        file.install(&file.block(&setting()).unwrap(), &["word"]).unwrap()
    };
    assert!(install());
    assert!(!install(), "a second time");
    let file = ConfigFile::read(&path).unwrap();
    assert!(file.has_block() && file.remembers("word") && !file.remembers(MADE_FILE));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    assert!(file.uninstall().unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), DEBIAN);
    assert!(!ConfigFile::read(&path).unwrap().uninstall().unwrap());
    assert_eq!(
        fs::read_dir(place.path()).unwrap().count(),
        1,
        "nothing is left beside it"
    );
}

#[test]
fn a_file_there_was_not_goes_with_its_directory() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("etc/config.toml");
    for _ in 0..2 {
        let file = ConfigFile::read(&path).unwrap();
        file.install(&file.block(&setting()).unwrap(), &[]).unwrap();
    }
    assert!(ConfigFile::read(&path).unwrap().uninstall().unwrap());
    assert!(!place.path().join("etc").exists());
    // If the directory contains another file, it stays.
    let file = ConfigFile::read(&path).unwrap();
    file.install(&file.block(&setting()).unwrap(), &[]).unwrap();
    fs::write(&path, format!("# mine\n{}", fs::read_to_string(&path).unwrap())).unwrap();
    assert!(ConfigFile::read(&path).unwrap().uninstall().unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), "# mine\n");
}

#[test]
fn a_link_is_followed_and_stays() {
    let place = tempfile::tempdir().unwrap();
    let (file, link) = (place.path().join("real"), place.path().join("config.toml"));
    fs::write(&file, DEBIAN).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let config = ConfigFile::read(&link).unwrap();
    config.install(&config.block(&setting()).unwrap(), &[]).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read_to_string(&file).unwrap().contains(RUNTIME));
}
