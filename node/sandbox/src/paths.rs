//! Paths of files and directories: each has one environment variable and one default.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The variables, what each names, and its default: shown by `thaw --help`.
pub const VARIABLES: [(&str, &str); 11] = [
    (
        "THAW_DATA",
        "images and disks [/var/lib/thaw for root, else $XDG_DATA_HOME/thaw or ~/.local/share/thaw]",
    ),
    (
        "THAW_CACHE",
        "what can be made again, the guest kernel [$XDG_CACHE_HOME/thaw or ~/.cache/thaw]",
    ),
    (
        "THAW_RUN",
        "running sandboxes [/run/thaw for root, else $XDG_RUNTIME_DIR/thaw]",
    ),
    (
        "THAW_CONFIG",
        "the configuration file [/etc/thaw/thawd.toml for root, else ~/.config/thaw/thawd.toml]",
    ),
    (
        "THAW_KERNEL",
        "the guest kernel [kernel/vmlinux-6.1 in the cache, else vmlinux in ../lib/thaw from thaw, else in /usr/lib/thaw]",
    ),
    (
        "THAW_GUEST_IMAGE",
        "the guest image [guest.erofs beside thaw, else in ../lib/thaw from there, else in /usr/lib/thaw]",
    ),
    (
        "THAW_KERNEL_ARGS",
        "words added to the guest kernel's command line",
    ),
    (
        "THAW_MEMORY_MODE",
        "how thawed guests get their memory: cow, populate or uffd [cow]",
    ),
    ("THAW_VMM", "the VMM's binary [thaw-vmm beside thaw]"),
    (
        "THAW_SHARE",
        "the volume server's binary [thaw-share beside thaw]",
    ),
    (
        "THAW_LOG",
        "what is logged to stderr: error, warn, info, debug, trace, or target=level,...",
    ),
];

/// All paths, resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paths {
    /// Images, chunk store, disk templates.
    pub data: PathBuf,
    /// One directory per running sandbox, and thawd's socket.
    pub run: PathBuf,
    /// The guest kernel: the first candidate that exists, otherwise the first candidate.
    pub kernel: PathBuf,
    /// The guest image, chosen likewise.
    pub guest_image: PathBuf,
}

impl Paths {
    /// The paths from this process's environment.
    pub fn from_env() -> Paths {
        let beside = std::env::current_exe()
            .ok()
            .and_then(|exe| exe.parent().map(Path::to_owned));
        Paths::resolve(
            |name| std::env::var_os(name),
            rustix::process::geteuid().as_raw(),
            beside.as_deref(),
        )
    }

    fn resolve(variable: impl Fn(&str) -> Option<OsString>, uid: u32, beside: Option<&Path>) -> Paths {
        let path = |name: &str| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = path("HOME").unwrap_or_else(|| "/".into());
        let cache = path("THAW_CACHE").unwrap_or_else(|| {
            path("XDG_CACHE_HOME")
                .unwrap_or_else(|| home.join(".cache"))
                .join("thaw")
        });
        let data = path("THAW_DATA").unwrap_or_else(|| match uid {
            0 => "/var/lib/thaw".into(),
            _ => path("XDG_DATA_HOME")
                .unwrap_or_else(|| home.join(".local/share"))
                .join("thaw"),
        });
        let run = path("THAW_RUN").unwrap_or_else(|| match (uid, path("XDG_RUNTIME_DIR")) {
            (0, _) => "/run/thaw".into(),
            (_, Some(runtime)) => runtime.join("thaw"),
            (uid, None) => format!("/tmp/thaw-{uid}").into(),
        });
        let installed = |name: &str| {
            let of_ours = beside.map(|b| b.join("../lib/thaw").join(name));
            of_ours.into_iter().chain([Path::new("/usr/lib/thaw").join(name)])
        };
        let kernel = path("THAW_KERNEL").unwrap_or_else(|| {
            let built = [cache.join("kernel/vmlinux-6.1")];
            first_existing(built.into_iter().chain(installed("vmlinux")))
        });
        let guest_image = path("THAW_GUEST_IMAGE").unwrap_or_else(|| {
            let built = beside.map(|b| b.join("guest.erofs"));
            first_existing(built.into_iter().chain(installed("guest.erofs")))
        });
        Paths {
            data,
            run,
            kernel,
            guest_image,
        }
    }

    /// Where thawd listens.
    pub fn daemon_socket(&self) -> PathBuf {
        self.run.join("thawd.sock")
    }

    /// Where thawd serves containerd's shims.
    pub fn pods_socket(&self) -> PathBuf {
        self.run.join("pods.sock")
    }

    /// Where thawd serves containerd as a snapshotter, if configured to.
    pub fn snapshots_socket(&self) -> PathBuf {
        self.run.join("snapshots.sock")
    }

    /// The image store.
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    /// containerd's snapshots.
    pub fn snapshots(&self) -> PathBuf {
        self.data.join("snapshots")
    }

    /// The snapshots of sandboxes that the node stores.
    pub fn frozen(&self) -> PathBuf {
        self.data.join("frozen")
    }

    /// Disk templates, and the disks cloned from them, which must be on the same filesystem.
    pub fn disks(&self) -> PathBuf {
        self.data.join("disks")
    }
}

fn first_existing(candidates: impl IntoIterator<Item = PathBuf>) -> PathBuf {
    let candidates: Vec<PathBuf> = candidates.into_iter().collect();
    candidates
        .iter()
        .find(|p| p.exists())
        .or(candidates.first())
        .cloned()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)], uid: u32) -> Paths {
        Paths::resolve(
            |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).into()),
            uid,
            None,
        )
    }

    #[test]
    fn root_and_user_have_their_own_places() {
        let root = with(&[("HOME", "/root")], 0);
        assert_eq!(
            (root.data, root.run),
            ("/var/lib/thaw".into(), "/run/thaw".into())
        );
        let user = with(&[("HOME", "/home/u"), ("XDG_RUNTIME_DIR", "/run/user/7")], 7);
        assert_eq!(
            (user.data, user.run),
            ("/home/u/.local/share/thaw".into(), "/run/user/7/thaw".into())
        );
        assert_eq!(
            user.kernel,
            PathBuf::from("/home/u/.cache/thaw/kernel/vmlinux-6.1")
        );
        let bare = with(&[], 7);
        assert_eq!(bare.run, PathBuf::from("/tmp/thaw-7"));
    }

    #[test]
    fn every_path_can_be_named() {
        let named = with(
            &[
                ("THAW_DATA", "/d"),
                ("THAW_RUN", "/r"),
                ("THAW_KERNEL", "/k"),
                ("THAW_GUEST_IMAGE", "/g"),
                ("HOME", "/h"),
            ],
            0,
        );
        let all = Paths {
            data: "/d".into(),
            run: "/r".into(),
            kernel: "/k".into(),
            guest_image: "/g".into(),
        };
        assert_eq!(named, all);
        let cached = with(&[("THAW_CACHE", "/c"), ("HOME", "/h")], 0);
        assert_eq!(cached.kernel, PathBuf::from("/c/kernel/vmlinux-6.1"));
    }
}
