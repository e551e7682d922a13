//! Pods that begin as a thawed snapshot of the node: the annotation that names it, and what the pod's only container must be.
//!
//! The processes of such a container run already when containerd creates it, and nothing of their user or environment can be changed. So what a
//! pod says of its container must be the same, or is refused by name, or is reported as ignored. The pod's volumes are mounted into it before
//! it continues.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use thaw_protocol::shim::pods::ThawedContainer;
use thaw_protocol::shim::task::CreateTaskRequest;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result, WithContext};
use crate::rootfs::Rootfs;
use crate::spec::config::{Mount, Spec};
use crate::spec::is_bind;

/// A pod's annotation with the name or the id of a stored snapshot.
pub const ANNOTATION: &str = "thaw.run/snapshot";
/// CRI's annotation with the pod's namespace in Kubernetes.
const NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Mounts of every pod that a thawed container has in a form of its own: the first three are the guest's files, with its new names.
const KNOWN: [&str; 5] = [
    "/etc/hosts",
    "/etc/hostname",
    RESOLV_CONF,
    "/dev/shm",
    "/dev/termination-log",
];
/// Largest file of name servers that is read, bytes.
const MAX_RESOLV_CONF: u64 = 64 << 10;

/// The snapshot that a pod asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted<'a> {
    pub snapshot: &'a str,
    /// The pod's namespace, to which the snapshot must be given.
    pub namespace: &'a str,
}

impl<'a> Wanted<'a> {
    /// Reads it from a pod's annotations. `None`: it begins as a new microVM.
    pub fn of(annotations: &'a BTreeMap<String, String>) -> Result<Option<Wanted<'a>>> {
        let Some(snapshot) = annotations.get(ANNOTATION) else {
            return Ok(None);
        };
        if snapshot.is_empty() || snapshot.contains('/') || snapshot.contains(char::is_control) {
            return Err(Error::Invalid(format!(
                "annotation {ANNOTATION}: {snapshot:?} is neither the name nor the id of a stored snapshot"
            )));
        }
        match annotations.get(NAMESPACE) {
            Some(namespace) if !namespace.is_empty() => Ok(Some(Wanted { snapshot, namespace })),
            _ => Err(Error::Unsupported(format!(
                "annotation {ANNOTATION}: only a pod whose container engine names its namespace ({NAMESPACE}) can be thawed"
            ))),
        }
    }
}

/// The container that was thawed with a pod's microVM.
#[derive(Debug)]
pub struct Thawed {
    container: ThawedContainer,
    /// Whether a container of the pod continues it already.
    taken: AtomicBool,
}

impl Thawed {
    pub fn new(container: ThawedContainer) -> Thawed {
        Thawed {
            container,
            taken: AtomicBool::new(false),
        }
    }

    /// The state that the pod's only container continues from.
    ///
    /// # Errors
    /// The pod's container is another than the frozen one, or one continues it already.
    pub fn take(&self, r: &CreateTaskRequest, spec: &Spec) -> Result<Checkpoint> {
        self.check(r, spec).map_err(|e| match e {
            Error::Unsupported(what) => Error::Unsupported(format!("container {}: {what}", r.id)),
            other => other,
        })?;
        match self.taken.swap(true, Ordering::AcqRel) {
            false => Ok(Checkpoint {
                container: self.container.id.clone(),
                execs: 0,
            }),
            true => Err(Error::Unsupported(format!(
                "container {}: a pod that is thawed from a snapshot has one container, which is not started again: make the pod anew",
                r.id
            ))),
        }
    }

    /// Lets another container continue it, as one could not be created.
    pub fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }

    fn check(&self, r: &CreateTaskRequest, spec: &Spec) -> Result<()> {
        let frozen = &self.container;
        let refuse = |what: String| Err(Error::Unsupported(what));
        match Rootfs::of(&r.rootfs, Path::new(&r.bundle))? {
            Rootfs::Image { digest } if digest == frozen.image_digest => {}
            Rootfs::Image { digest } => {
                return refuse(format!(
                    "its image is {digest}, and that of the snapshot {}: use the image that was frozen",
                    frozen.image_digest
                ));
            }
            Rootfs::Host(_) => {
                return refuse(
                    "its image cannot be compared with that of the snapshot: have it pulled through Thaw's snapshotter".into(),
                );
            }
        }
        let args = spec.process.as_ref().map(|process| &process.args);
        if args != Some(&frozen.args) {
            return refuse(format!(
                "its command is {:?}, and that of the snapshot {:?}: give it the command that was frozen",
                args.map_or(&[][..], Vec::as_slice),
                frozen.args
            ));
        }
        if r.terminal != frozen.terminal {
            return refuse("tty: the frozen container differs".into());
        }
        if let Some(device) = spec.linux.devices.iter().find(|device| device.kind == "b") {
            return refuse(format!(
                "the block device {}: a container that is thawed from a snapshot gets none",
                device.path
            ));
        }
        Ok(())
    }
}

/// The volumes of a pod that are mounted in its thawed container: all mounts that show files of the host, but not those that every pod has.
pub fn volumes(spec: &Spec) -> Vec<Mount> {
    let is_volume = |mount: &&Mount| is_bind(mount) && !KNOWN.contains(&mount.destination.as_str());
    spec.mounts.iter().filter(is_volume).cloned().collect()
}

/// The name servers of a container's `resolv.conf`. Blocks.
pub fn name_servers(spec: &Spec) -> Result<Vec<String>> {
    use std::io::Read;

    let Some(mount) = spec.mounts.iter().find(|m| m.destination == RESOLV_CONF) else {
        return Ok(Vec::new());
    };
    let mut text = String::new();
    let file = std::fs::File::open(&mount.source);
    file.and_then(|file| file.take(MAX_RESOLV_CONF).read_to_string(&mut text))
        .with_context(|| format!("read {}", mount.source))?;
    let servers = text.lines().filter_map(|line| line.strip_prefix("nameserver "));
    let addresses = servers
        .map(str::trim)
        .filter(|server| server.parse::<IpAddr>().is_ok());
    Ok(addresses.map(str::to_owned).collect())
}

#[cfg(test)]
#[path = "thawed_test.rs"]
mod tests;
