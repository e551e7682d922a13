//! The address of a pod's shim: a socket whose path is derived from the pod's id, so that a shim started for
//! another container of the pod finds it.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Result, WithContext};

/// Directory of the shims' sockets (containerd's runtime/v2/shim).
const SOCKETS: &str = "/run/containerd/s";
/// The file in a bundle from which containerd reads the address.
const FILE: &str = "address";

/// The socket address of a pod's shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(PathBuf);

impl Address {
    /// The address for the pod with this id, in a namespace of the containerd at `containerd`.
    pub fn of(containerd: &str, namespace: &str, pod: &str) -> Address {
        let hash = Sha256::digest(format!("{containerd}/{namespace}/{pod}"));
        let name: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        Address(Path::new(SOCKETS).join(name))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The address in the form containerd reads.
    pub fn text(&self) -> String {
        format!("unix://{}", self.0.display())
    }

    /// Whether a shim listens there.
    pub fn is_served(&self) -> bool {
        std::os::unix::net::UnixStream::connect(&self.0).is_ok()
    }

    /// Writes the address into a bundle, atomically.
    pub fn write(&self, bundle: &Path) -> Result<()> {
        let (path, partial) = (bundle.join(FILE), bundle.join(".address"));
        let what = || format!("write {}", path.display());
        std::fs::write(&partial, self.text()).with_context(what)?;
        std::fs::rename(&partial, &path).with_context(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_address_is_unique() {
        let of = |namespace, pod| Address::of("/run/containerd/containerd.sock", namespace, pod);
        assert_eq!(of("k8s.io", "a"), of("k8s.io", "a"));
        assert_ne!(of("k8s.io", "a"), of("default", "a"));
        assert!(of("n", "a").path().as_os_str().len() < 108, "a socket's path");
        let bundle = tempfile::tempdir().unwrap();
        of("n", "a").write(bundle.path()).unwrap();
        let text = std::fs::read_to_string(bundle.path().join("address")).unwrap();
        assert_eq!(text, of("n", "a").text());
        assert!(!of("n", "a").is_served());
    }
}
