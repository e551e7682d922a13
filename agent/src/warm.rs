//! What a first container would pay for, paid before the doorbell: a template is frozen after it, so every clone has it.
//!
//! A whole container is made from the guest image itself, run and removed by the same code as any other, so the kernel has
//! made its caches and patched its code (the first memory cgroup, the first seccomp filter, the first overlay), and the
//! agent's heap, threads and page tables are as they will be needed. Its program is the agent, which exits at once. It opens no
//! TCP or UDP socket, reads no `boot_id`, and keeps no random number. It costs about as much as it saves, so only a guest
//! that becomes a template does it ([`thaw_protocol::handshake::WARM`]), and its first clone, which is thawed to record the
//! pages a sandbox touches ([`thaw_protocol::handshake::Identity::rehearsal`]). It may not fail a start: what goes wrong is
//! logged.

use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::CreateContainerRequest;
use thaw_protocol::agent::oci;
use tokio::runtime::Runtime;

use crate::container::Container;
use crate::error::{Error, For, Result};
use crate::sandbox::Sandbox;
use crate::storage::Storage;
use crate::{clock, debug, warning};

/// The argument that makes the agent's program do nothing.
pub const EXIT: &str = "--exit";
const ID: &str = "warm";
const DIR: &str = "/run/thaw/warm";
/// A container that takes longer is given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes, runs and removes a container; `sandbox` is as empty afterwards as before.
pub fn up(sandbox: &Arc<Sandbox>, runtime: &Runtime) {
    let begin = clock::boottime_ns();
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = tokio::time::timeout(PATIENCE, container(sandbox)) => outcome
                .unwrap_or_else(|_| Err(Error::State(format!("no end after {} s", PATIENCE.as_secs())))),
            stopped = sandbox.reaper.clone().run() => stopped,
        }
    });
    match outcome {
        Ok(()) => debug!("warm after {} µs", (clock::boottime_ns() - begin) / 1000),
        Err(e) => warning!("this guest stays cold, and its clones pay for it: {e}"),
    }
}

async fn container(sandbox: &Arc<Sandbox>) -> Result<()> {
    let on_thread = sandbox.clone();
    // On a worker thread, as calls of the API are: there is one afterwards.
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
    let ended = container.kill(Some(PATIENCE)).await;
    container.remove(&sandbox.storages);
    started.and(ended)?;
    std::fs::remove_dir_all(DIR).for_(|| format!("remove {DIR}"))
}

/// An overlay above the guest image, as a container has one above its image.
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

/// What a container engine asks for, with a seccomp profile and limits too.
fn specification() -> oci::Spec {
    let mount = |destination: &str, kind: &str, options: &[&str]| oci::Mount {
        destination: destination.into(),
        type_: kind.into(),
        source: kind.into(),
        options: options.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    let namespace = |kind: &str| oci::LinuxNamespace {
        Type: kind.into(),
        ..Default::default()
    };
    let capabilities = || vec!["CAP_CHOWN".to_owned()];
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
    oci::Spec {
        Process: MessageField::some(oci::Process {
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
        }),
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
        Linux: MessageField::some(oci::Linux {
            CgroupsPath: format!("/{ID}"),
            Namespaces: ["pid", "ipc", "uts", "mount", "cgroup"].map(namespace).to_vec(),
            MaskedPaths: vec!["/proc/keys".into(), "/sys/firmware".into()],
            ReadonlyPaths: vec!["/proc/sys".into()],
            Resources: MessageField::some(resources),
            Seccomp: MessageField::some(profile),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::spec::Spec;

    #[test]
    fn the_container_is_one_this_agent_makes() {
        let spec = Spec::new(ID, &specification(), None).unwrap();
        assert!(spec.seccomp.is_some());
        assert!(
            !spec.unshare.contains(rustix::thread::UnshareFlags::NEWNET),
            "no socket is opened"
        );
    }
}
