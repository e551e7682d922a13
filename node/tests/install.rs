//! `thaw install` with an installed containerd: containerd can parse what it adds, and `uninstall` leaves no trace.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use toml::{Table, Value};

const CRI: &str = "io.containerd.grpc.v1.cri";
/// The file in Debian's package.
const DEBIAN: &str = "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    \
    [plugins.\"io.containerd.grpc.v1.cri\".cni]\n      bin_dir = \"/usr/lib/cni\"\n      conf_dir = \"/etc/cni/net.d\"\n";

/// A copy of thaw with a shim beside it, and the paths it uses.
struct Installation {
    place: tempfile::TempDir,
}

impl Installation {
    fn new() -> Installation {
        let place = tempfile::tempdir().unwrap();
        // Copied by another process. Otherwise a child of another test could inherit the writable descriptor, and the copy could not be
        // executed.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_thaw"))
            .arg(place.path().join("thaw"))
            .status();
        assert!(copied.unwrap().success());
        fs::write(place.path().join("containerd-shim-thaw-v2"), "").unwrap();
        Installation { place }
    }

    fn config(&self) -> PathBuf {
        self.place.path().join("etc/config.toml")
    }

    fn thaw(&self, words: &[&str]) -> Output {
        Command::new(self.place.path().join("thaw"))
            .args(words)
            .args(["--runtime", "containerd", "--no-restart", "--config"])
            .arg(self.config())
            .env("THAW_RUN", self.place.path().join("run"))
            .output()
            .unwrap()
    }

    fn ok(&self, words: &[&str]) -> String {
        let output = self.thaw(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// containerd's parsed form of a file, with its defaults.
fn dump(config: &Path) -> Table {
    let output = Command::new("containerd")
        .arg("--config")
        .arg(config)
        .args(["config", "dump"])
        .output()
        .expect("containerd is installed (./setup test)");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().parse().unwrap()
}

fn plugin<'a>(table: &'a Table, name: &str) -> &'a Value {
    &table["plugins"][name]
}

#[test]
fn containerd_has_the_runtime_and_its_own_and_then_what_it_had() {
    let thaw = Installation::new();
    fs::create_dir(thaw.config().parent().unwrap()).unwrap();
    fs::write(thaw.config(), DEBIAN).unwrap();
    let said: serde_json::Value = serde_json::from_str(&thaw.ok(&["--json", "install"])).unwrap();
    assert_eq!(
        (&said["configured"], &said["lazy"]),
        (&true.into(), &true.into()),
        "{said}"
    );

    let table = dump(&thaw.config());
    let cri = plugin(&table, CRI);
    assert_eq!(cri["cni"]["bin_dir"].as_str(), Some("/usr/lib/cni"));
    assert_eq!(
        cri["containerd"]["disable_snapshot_annotations"].as_bool(),
        Some(false)
    );
    let runtimes = &cri["containerd"]["runtimes"];
    assert_eq!(
        runtimes["runc"]["runtime_type"].as_str(),
        Some("io.containerd.runc.v2")
    );
    assert_eq!(
        runtimes["thaw"]["runtime_type"].as_str(),
        Some("io.containerd.thaw.v2")
    );
    let snapshots = thaw.place.path().join("run/snapshots.sock");
    assert_eq!(
        table["proxy_plugins"]["thaw"]["address"].as_str(),
        snapshots.to_str()
    );

    let installed = fs::read(thaw.config()).unwrap();
    let said: serde_json::Value = serde_json::from_str(&thaw.ok(&["--json", "install"])).unwrap();
    assert_eq!(said["configured"], false);
    assert_eq!(fs::read(thaw.config()).unwrap(), installed);

    thaw.ok(&["uninstall"]);
    assert_eq!(fs::read_to_string(thaw.config()).unwrap(), DEBIAN);
    thaw.ok(&["uninstall"]);
    assert_eq!(fs::read_dir(thaw.config().parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn where_there_was_no_file_there_is_none_again() {
    let thaw = Installation::new();
    let printed = thaw.ok(&["install", "--print"]);
    assert!(printed.contains("[proxy_plugins.thaw]"), "{printed}");
    assert!(!thaw.config().exists());
    thaw.ok(&["install"]);
    let table = dump(&thaw.config());
    let runtimes = &plugin(&table, CRI)["containerd"]["runtimes"];
    assert!(
        runtimes.get("runc").is_some() && runtimes.get("thaw").is_some(),
        "{runtimes}"
    );
    thaw.ok(&["uninstall"]);
    assert!(!thaw.config().parent().unwrap().exists());
}

#[test]
fn a_file_containerd_would_not_read_stays_as_it_was() {
    let thaw = Installation::new();
    fs::create_dir(thaw.config().parent().unwrap()).unwrap();
    for (text, word) in [
        (
            "version = 2\noom_score = \"high\"\n",
            "containerd would not take it",
        ),
        ("version = 2\n[broken\n", "cannot be changed"),
        ("root = \"/var/lib/containerd\"\n", "version 1"),
    ] {
        fs::write(thaw.config(), text).unwrap();
        let output = thaw.thaw(&["install"]);
        assert_eq!(output.status.code(), Some(100), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(word) && said.contains("config.toml"), "{said}");
        assert_eq!(fs::read_to_string(thaw.config()).unwrap(), text);
        assert_eq!(fs::read_dir(thaw.config().parent().unwrap()).unwrap().count(), 1);
    }
}
