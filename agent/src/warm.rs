//! Runs a container before the doorbell, so that its one-time costs are paid before a template is frozen, and
//! its clones do not pay them.
//!
//! A complete container is created from the guest image, run and removed by the same code as any other. The
//! kernel then has its caches and has patched its code (the first memory cgroup, the first seccomp filter, the
//! first overlay), and the agent's heap, threads and page tables have their later size. The container's program
//! is the agent itself, which exits at once. Nothing here opens a TCP or UDP socket, reads `boot_id` or keeps a
//! random number. The costs about equal the savings, so only a guest that becomes a template does this
//! ([`thaw_protocol::handshake::WARM`]), and its first clone, which is thawed to record the pages that a
//! sandbox touches ([`thaw_protocol::handshake::Identity::rehearsal`]). It must not make a start fail, so
//! errors are only logged.

use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::CreateContainerRequest;
use thaw_protocol::agent::oci;
use tokio::runtime::Runtime;

use crate::container::Container;
use crate::error::{Error, Result, WithContext};
use crate::sandbox::Sandbox;
use crate::storage::Storage;
use crate::{clock, debug, warning};

/// The argument with which the agent's program exits at once.
pub const EXIT: &str = "--exit";
const ID: &str = "warm";
const DIR: &str = "/run/thaw/warm";
/// Limit for the container.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Creates, runs and removes a container. `sandbox` is unchanged afterwards.
pub fn up(sandbox: &Arc<Sandbox>, runtime: &Runtime) {
    let begin = clock::boottime_ns();
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = tokio::time::timeout(TIMEOUT, container(sandbox)) => outcome
                .unwrap_or_else(|_| Err(Error::State(format!("no end after {} s", TIMEOUT.as_secs())))),
            stopped = sandbox.reaper.clone().run() => stopped,
        }
    });
    match outcome {
        Ok(()) => debug!("warmed up in {} µs", (clock::boottime_ns() - begin) / 1000),
        Err(e) => warning!("this guest was not warmed up, so its clones start more slowly: {e}"),
    }
}

async fn container(sandbox: &Arc<Sandbox>) -> Result<()> {
    let on_thread = sandbox.clone();
    // On a worker thread, as calls of the API are, so that the thread exists afterwards.
    let made = tokio::task::spawn_blocking(move || {
        let container = Container::create(&request(), &storages(), &on_thread.storages, &on_thread.reaper)?;
        let started = container.start();
        Ok::<_, Error>((container, started))
    });
    let (container, started) = made
        .await
        .map_err(|e| Error::State(format!("the agent's worker failed: {e}")))??;
    if started.is_ok() {
        container.init.wait().await;
    }
    let ended = container.kill(Some(TIMEOUT)).await;
    container.remove(&sandbox.storages);
    started.and(ended)?;
    std::fs::remove_dir_all(DIR).with_context(|| format!("remove {DIR}"))
}

/// An overlay over the guest image, as a container has one over its image.
fn storages() -> [Storage; 1] {
    let make = "io.katacontainers.volume.overlayfs.create_directory=";
    [Storage {
        driver: "overlayfs".into(),
        driver_options: ["upper", "work"].map(|d| format!("{make}{DIR}/{d}")).to_vec(),
        source: "overlay".into(),
        kind: "overlay".into(),
        options: vec![
            "lowerdir=/".into(),
            format!("upperdir={DIR}/upper"),
            format!("workdir={DIR}/work"),
        ],
        mount_point: format!("{DIR}/root").into(),
        ..Default::default()
    }]
}

fn request() -> CreateContainerRequest {
    CreateContainerRequest {
        container_id: ID.into(),
        exec_id: ID.into(),
        OCI: MessageField::some(specification()),
        ..Default::default()
    }
}

/// A specification as from a container engine, including a seccomp profile and limits.
fn specification() -> oci::Spec {
    oci::Spec {
        Process: MessageField::some(process()),
        Root: MessageField::some(oci::Root {
            Path: format!("{DIR}/root"),
            ..Default::default()
        }),
        Hostname: ID.into(),
        Mounts: vec![
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "mode=755", "size=65536k"]),
            mount(
                "/dev/pts",
                "devpts",
                &["nosuid", "noexec", "newinstance", "ptmxmode=0666"],
            ),
            mount("/dev/shm", "tmpfs", &["nosuid", "mode=1777", "size=65536k"]),
            mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
            mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "ro"]),
        ],
        Linux: MessageField::some(linux()),
        ..Default::default()
    }
}

fn process() -> oci::Process {
    let capabilities = || vec!["CAP_CHOWN".to_owned()];
    oci::Process {
        Args: vec!["/sbin/init".into(), EXIT.into()],
        Env: vec!["PATH=/sbin".into()],
        Cwd: "/".into(),
        User: MessageField::some(oci::User {
            Username: "0".into(),
            ..Default::default()
        }),
        Capabilities: MessageField::some(oci::LinuxCapabilities {
            Bounding: capabilities(),
            Effective: capabilities(),
            Permitted: capabilities(),
            ..Default::default()
        }),
        Rlimits: vec![oci::POSIXRlimit {
            Type: "RLIMIT_NOFILE".into(),
            Soft: 1024,
            Hard: 1024,
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn mount(destination: &str, kind: &str, options: &[&str]) -> oci::Mount {
    oci::Mount {
        destination: destination.into(),
        type_: kind.into(),
        source: kind.into(),
        options: options.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

fn linux() -> oci::Linux {
    let namespace = |kind: &str| oci::LinuxNamespace {
        Type: kind.into(),
        ..Default::default()
    };
    let profile = oci::LinuxSeccomp {
        DefaultAction: "SCMP_ACT_ALLOW".into(),
        Syscalls: vec![oci::LinuxSyscall {
            Names: vec!["reboot".into()],
            Action: "SCMP_ACT_ERRNO".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let resources = oci::LinuxResources {
        Memory: MessageField::some(oci::LinuxMemory {
            Limit: 64 << 20,
            ..Default::default()
        }),
        Pids: MessageField::some(oci::LinuxPids {
            Limit: 16,
            ..Default::default()
        }),
        ..Default::default()
    };
    oci::Linux {
        CgroupsPath: format!("/{ID}"),
        Namespaces: ["pid", "ipc", "uts", "mount", "cgroup"].map(namespace).to_vec(),
        MaskedPaths: vec!["/proc/keys".into(), "/sys/firmware".into()],
        ReadonlyPaths: vec!["/proc/sys".into()],
        Resources: MessageField::some(resources),
        Seccomp: MessageField::some(profile),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::spec::Spec;

    #[test]
    fn warm_specification_is_valid() {
        let spec = Spec::new(ID, &specification(), None).unwrap();
        assert!(spec.seccomp.is_some());
        assert!(
            !spec.unshare.contains(rustix::thread::UnshareFlags::NEWNET),
            "no socket is opened"
        );
    }
}
