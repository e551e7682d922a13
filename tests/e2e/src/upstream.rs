//! Debian's docker-registry on loopback: with the test images, read-only, or empty and writable.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One of them, stopped when dropped.
pub struct Upstream {
    state: PathBuf,
    /// `host:port`.
    pub host: String,
}

impl Upstream {
    /// Serves the test images; over TLS with a folder of certificates. Its files are at `state`, which it makes.
    pub fn test_images(state: &Path, certificates: Option<&Path>) -> Upstream {
        let mut command = tool(state, "start");
        if let Some(folder) = certificates {
            command.env("THAW_REGISTRY_TLS", folder);
        }
        Upstream::start(state, &mut command)
    }

    /// Serves the test images, to `guest` by the password `opens-it`.
    pub fn private(state: &Path) -> Upstream {
        let mut command = tool(state, "start");
        command.env("THAW_REGISTRY_PRIVATE", "yes");
        Upstream::start(state, &mut command)
    }

    /// Empty; takes what is pushed.
    pub fn empty(state: &Path) -> Upstream {
        let mut command = tool(state, "start");
        command
            .env("THAW_REGISTRY_WRITABLE", "yes")
            .env("THAW_REGISTRY_STORAGE", state.with_extension("storage"));
        Upstream::start(state, &mut command)
    }

    fn start(state: &Path, command: &mut Command) -> Upstream {
        // Its own output would be kept open by the registry it leaves behind.
        let log = std::fs::File::create(state.with_extension("url")).unwrap();
        assert!(command.stdout(log).status().unwrap().success());
        let url = std::fs::read_to_string(state.with_extension("url")).unwrap();
        Upstream {
            state: state.into(),
            host: url.trim().split_once("://").unwrap().1.to_string(),
        }
    }

    /// Copies an image of an OCI layout into it.
    pub fn push(&self, reference: &str, name: &str) {
        let to = format!("docker://{}/{name}", self.host);
        let copied = Command::new("skopeo")
            .args(["copy", "-q", "--all", "--dest-tls-verify=false", reference, &to])
            .output()
            .unwrap();
        assert!(copied.status.success(), "{reference} to {to}: {copied:?}");
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = tool(&self.state, "stop").status();
    }
}

fn tool(state: &Path, verb: &str) -> Command {
    let mut command = Command::new(std::env::current_dir().unwrap().join("tests/images/registry"));
    command
        .arg(verb)
        .env("THAW_REGISTRY_STATE", state)
        .stdin(Stdio::null());
    command
}
