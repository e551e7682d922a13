//! The making of a sandbox: image, disk, network, cgroup, VMM, machine, backends, kernel, agent, handshake.
//!
//! Nothing here polls: the VMM says when the agent rang. The one deadline is the guest's, for a guest may never ring.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::net::SocketType;
use thaw_pools::disk::{Disk, DiskTemplate};
use thaw_pools::network::{self, NetworkSlot};
use thaw_pools::process::ProcessRecord;
use thaw_pools::vmm;
use thaw_protocol::control::{
    Backend, CONTROL_VERSION, Command, DeviceId, MEMORY_MIB, MachineSpec, Response, StartTimes, VCPUS,
};
use thaw_rootfs::progress::Progress;
use thaw_rootfs::store::Image;

use super::files::MachineFiles;
use super::{NetworkMode, Node, READY_LIMIT, Resources, Sandbox, SandboxSpec, describe, with_console};
use crate::console::Console;
use crate::container::{IMAGE_SLOT, image_name};
use crate::control_client::{CallError, ControlClient};
use crate::exit::{ExitCode, Failure};
use crate::handshake::{self, Wanted};
use crate::images;
use crate::misses::MissServer;
use crate::state::{Record, new_id};
use crate::trace::Trace;

/// Bytes of a sandbox's writable layer, as its guest sees it; on the host it costs what is written.
const DISK_SIZE: u64 = 8 << 30;

/// The guest kernel's command line; `guest-kernel-config/README.md` says why for each word. All CPUs come up at boot. As
/// under docker ports below 1024 are anybody's, and a process may reserve more memory than there is: what it touches
/// counts, and who touches too much is killed.
const CMDLINE: &str = "console=ttyS0 loglevel=3 reboot=t panic=-1 root=/dev/pmem0 rootfstype=erofs rootflags=dax \
                       rootwait ro init=/sbin/init pci=off tsc=reliable swiotlb=noforce noreplace-smp \
                       rcupdate.rcu_expedited=1 maxcpus=1 memhp_default_state=online dummy.numdummies=0 \
                       sysctl.net.ipv4.ip_unprivileged_port_start=0 sysctl.vm.overcommit_memory=1";

/// Words to add to it, for whoever looks into a guest that does not start.
const KERNEL_ARGUMENTS: &str = "THAW_KERNEL_ARGS";
/// What the VMM writes, in the sandbox's directory.
const LOG: &str = "vmm.log";

pub(super) async fn create(
    node: &Node,
    spec: SandboxSpec,
    trace: &Trace,
    progress: Arc<dyn Progress>,
) -> Result<Sandbox, Failure> {
    check_shape(&spec)?;
    let files = MachineFiles::open(&node.paths)?;
    let program = vmm::find()?;
    let image = {
        let _stage = trace.stage("image");
        node.images
            .pull(&spec.image, spec.pull, spec.plain_http, progress)
            .await?
    };

    let id = new_id().map_err(|e| Failure::system("cannot read random bytes", &e))?;
    let mut record = record(&id, &spec, &image);
    let mut resources = Resources {
        control: None,
        vmm: None,
        misses: None,
        console: None,
        cgroup: None,
        lease: Some(image.lease().map_err(images::failure)?),
        directory: node.run.create(&record)?,
        keep: false,
    };
    let disk = {
        let _stage = trace.stage("disk");
        make_disk(node.paths.disks()).await?
    };
    let network = {
        let _stage = trace.stage("network");
        make_network(spec.network).await?
    };
    {
        let _stage = trace.stage("cgroup");
        match node.cgroups.make(&id) {
            Ok(cgroup) => resources.cgroup = Some(cgroup),
            Err(reason) => tracing::info!("{reason}"),
        }
    }

    let spawned = crate::trace::monotonic_ns();
    let control = spawn(&spec, &program, &files, &mut resources, &mut record, trace).await?;
    let control = &*resources.control.insert(control);
    let life = control.life();
    let attached = {
        let _stage = trace.stage("attach");
        let image = images::export(&image, image_name(IMAGE_SLOT))?;
        let fds: Vec<BorrowedFd<'_>> = image.descriptors.iter().map(|f| f.as_fd()).collect();
        control
            .call(
                Command::AddImage {
                    slot: IMAGE_SLOT,
                    image: image.spec,
                },
                &fds,
            )
            .await?;
        attach(
            control,
            DeviceId::Blk0,
            Backend::Disk { read_only: false },
            &disk.file,
        )
        .await?;
        if let Some(network) = &network {
            attach(
                control,
                DeviceId::Net,
                Backend::Tap {
                    mac: network.config.mac,
                },
                &network.tap,
            )
            .await?;
        }
        let vsock = vmm::listen(&resources.directory.vsock_socket(), SocketType::STREAM)?;
        attach(control, DeviceId::Vsock, Backend::Vsock, &vsock).await?;
        attach(control, DeviceId::Pmem0, Backend::Pmem, &files.guest_image).await
    };
    attached?;
    let (misses, console) = {
        let (server, misses) = MissServer::start(node.images.clone())
            .map_err(|e| Failure::system("cannot make a miss socket", &e))?;
        attach(control, DeviceId::Root, Backend::Misses, &misses).await?;
        let (console, write) =
            Console::new().map_err(|e| Failure::system("cannot make a console pipe", &e))?;
        attach(control, DeviceId::Console, Backend::Console, &write).await?;
        (server, console)
    };
    (resources.misses, resources.console) = (Some(misses), Some(console));

    let booted = boot(&resources, &files).await;
    let doorbell = booted.map_err(|e| explain(e, &resources))?;
    let times = times(&resources).await?;

    let wanted = Wanted {
        hostname: spec.hostname.clone().unwrap_or_else(|| id.clone()),
        network: network.as_ref().map(|n| n.config.clone()),
        cpus: spec.vcpus,
        memory_mib: spec.memory_mib,
        test_hooks: true,
    };
    let performed = {
        let _stage = trace.stage("handshake");
        let path = resources.directory.vsock_socket();
        let performed =
            tokio::task::spawn_blocking(move || handshake::perform(&path, wanted, READY_LIMIT)).await;
        performed
            .map_err(|e| Failure::new(ExitCode::HandshakeFailed, e.to_string()))?
            .map_err(|e| explain(e, &resources))?
    };
    record.ready = true;
    resources.directory.write(&record)?;
    // The guest's clock and ours tick alike but began apart: only the agent's own span is taken from the guest.
    let said = &performed.acknowledgement;
    let agent = said.agent_ready.saturating_sub(said.agent_started);
    let agent_started = doorbell.saturating_sub(agent).max(times.entered);
    trace.add_monotonic("vmm start", spawned, times.jailed);
    trace.add_monotonic("machine", times.jailed, times.created);
    trace.add_monotonic("kernel", times.entered, agent_started);
    trace.add_monotonic("agent", agent_started, doorbell);
    Ok(Sandbox {
        record,
        config: Some(image.config),
        life,
        resources,
    })
}

fn check_shape(spec: &SandboxSpec) -> Result<(), Failure> {
    if spec.memory_mib < *MEMORY_MIB.start() {
        let what = format!(
            "{} MiB of memory is too small for a guest: the least is {}",
            spec.memory_mib,
            MEMORY_MIB.start()
        );
        return Err(Failure::new(ExitCode::MemoryTooSmall, what));
    }
    if spec.memory_mib > *MEMORY_MIB.end() {
        let what = format!(
            "{} MiB of memory is more than a guest can have: {}",
            spec.memory_mib,
            MEMORY_MIB.end()
        );
        return Err(Failure::new(ExitCode::Runtime, what).remedy("give it less with --memory"));
    }
    if !VCPUS.contains(&spec.vcpus) {
        let what = format!(
            "a guest cannot have {} CPUs: {} to {}",
            spec.vcpus,
            VCPUS.start(),
            VCPUS.end()
        );
        return Err(Failure::new(ExitCode::Runtime, what).remedy("choose another --cpus"));
    }
    Ok(())
}

fn record(id: &str, spec: &SandboxSpec, image: &Image) -> Record {
    Record {
        id: id.into(),
        name: spec.name.clone(),
        image: spec.image.clone(),
        image_digest: Some(image.digest.to_string()),
        command: spec.command.clone(),
        created: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        owner: ProcessRecord::myself(),
        client: spec.client,
        vmm: None,
        tethered: spec.tethered,
        ready: false,
        vcpus: spec.vcpus,
        memory_mib: spec.memory_mib,
    }
}

async fn make_disk(directory: PathBuf) -> Result<Disk, Failure> {
    let made =
        tokio::task::spawn_blocking(move || DiskTemplate::open_or_make(&directory, DISK_SIZE)?.make()).await;
    Ok(made.map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))??)
}

async fn make_network(mode: NetworkMode) -> Result<Option<NetworkSlot>, Failure> {
    if mode == NetworkMode::None {
        return Ok(None);
    }
    let made = tokio::task::spawn_blocking(network::make).await;
    let made = made.map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))?;
    made.map(Some)
        .map_err(|e| Failure::new(ExitCode::NetworkUnavailable, e.to_string()))
}

/// Starts the VMM and makes its machine.
///
/// We connect, and ask for the machine, before the process exists: the socket keeps both for it. So however early we
/// are killed, a tethered VMM finds a closed connection and ends.
async fn spawn(
    spec: &SandboxSpec,
    program: &std::path::Path,
    files: &MachineFiles,
    resources: &mut Resources,
    record: &mut Record,
    trace: &Trace,
) -> Result<ControlClient, Failure> {
    let _stage = trace.stage("spawn");
    let path = resources.directory.control_socket();
    let listener = vmm::listen(&path, SocketType::SEQPACKET)?;
    let control = ControlClient::connect(&path)?;
    if spec.tethered {
        // Nobody else is to connect, now or later.
        std::fs::remove_file(&path)
            .map_err(|e| Failure::system(format!("cannot unlink {}", path.display()), &e))?;
    }
    let log_path = resources.directory.path().join(LOG);
    let log = open_log(&log_path)?;
    let machine = MachineSpec {
        vcpus: spec.vcpus,
        memory_mib: spec.memory_mib,
        cpu: Default::default(),
        tethered: spec.tethered,
    };
    let kvm = [files.kvm.as_fd()];
    let created = control.call(
        Command::Create {
            version: CONTROL_VERSION,
            machine,
        },
        &kvm,
    );
    let started = async {
        let process = vmm::spawn(program, &listener, &log)?;
        record.vmm = Some(process.record());
        resources.directory.write(record)?;
        if let Some(cgroup) = &resources.cgroup
            && let Err(e) = cgroup.add(process.record().pid)
        {
            tracing::warn!("the VMM stays in the caller's cgroup: {e}");
        }
        Ok::<_, Failure>(process)
    };
    // The request is sent when first polled, so before the process is started.
    let (created, process) = tokio::join!(created, started);
    drop(listener);
    let process = resources.vmm.insert(process?);
    created.map_err(|e| vmm_failure(e, process, &log_path))?;
    Ok(control)
}

fn open_log(path: &std::path::Path) -> Result<OwnedFd, Failure> {
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .read(true)
        .open(path);
    Ok(file
        .map_err(|e| Failure::system(format!("cannot open {}", path.display()), &e))?
        .into())
}

/// Why the VMM did not make its machine: its refusal, or what it wrote before it ended.
fn vmm_failure(error: CallError, process: &vmm::VmmProcess, log: &std::path::Path) -> Failure {
    let refused = matches!(error, CallError::Refused(_));
    let mut failure = Failure::from(error);
    if !refused {
        process.kill();
        failure.context = log_tail(log);
    }
    failure
}

/// The last lines of a VMM's log.
fn log_tail(path: &std::path::Path) -> Vec<String> {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(super::CONSOLE_LINES);
    lines[from..]
        .iter()
        .map(|line| format!("thaw-vmm: {line}"))
        .collect()
}

async fn attach(
    control: &ControlClient,
    device: DeviceId,
    backend: Backend,
    fd: &OwnedFd,
) -> Result<(), Failure> {
    control
        .call(Command::Attach { device, backend }, &[fd.as_fd()])
        .await?;
    Ok(())
}

/// A new miss socket for a VMM that had one from a thawd now gone.
pub(super) async fn attach_misses(
    control: &ControlClient,
    node: &Node,
    resources: &mut Resources,
) -> Result<(), Failure> {
    let (server, socket) = MissServer::start(node.images.clone())
        .map_err(|e| Failure::system("cannot make a miss socket", &e))?;
    attach(control, DeviceId::Root, Backend::Misses, &socket).await?;
    resources.misses = Some(server);
    Ok(())
}

/// A new console, likewise.
pub(super) async fn attach_console(
    control: &ControlClient,
    resources: &mut Resources,
) -> Result<(), Failure> {
    let (console, write) = Console::new().map_err(|e| Failure::system("cannot make a console pipe", &e))?;
    attach(control, DeviceId::Console, Backend::Console, &write).await?;
    resources.console = Some(console);
    Ok(())
}

/// Boots and waits for the doorbell: when it rang, CLOCK_MONOTONIC nanoseconds.
async fn boot(resources: &Resources, files: &MachineFiles) -> Result<u64, Failure> {
    let control = connection(resources)?;
    control
        .call(
            Command::Boot {
                cmdline: cmdline(std::env::var(KERNEL_ARGUMENTS).ok().as_deref()),
            },
            &[files.kernel.as_fd()],
        )
        .await?;
    let mut life = control.life();
    let told = life.wait_for(|l| l.doorbell.is_some() || l.exited.is_some() || l.closed);
    let told = tokio::time::timeout(READY_LIMIT, told).await.map_err(|_| {
        let what = format!(
            "the guest did not become ready within {} s",
            READY_LIMIT.as_secs()
        );
        Failure::new(ExitCode::GuestNotReady, what)
    })?;
    let told = told.map(|l| l.clone()).unwrap_or_default();
    match (told.doorbell, &told.exited) {
        (Some(at), None) => Ok(at),
        (_, Some(reason)) => Err(Failure::new(
            ExitCode::GuestNotReady,
            format!("before it was ready, {}", describe(reason)),
        )),
        (_, None) => Err(Failure::new(
            ExitCode::VmmFailed,
            "thaw-vmm ended while the guest booted",
        )),
    }
}

async fn times(resources: &Resources) -> Result<StartTimes, Failure> {
    match connection(resources)?.call(Command::Status, &[]).await? {
        Response::Status { times, .. } => Ok(times),
        _ => Ok(StartTimes::default()),
    }
}

fn connection(resources: &Resources) -> Result<&ControlClient, Failure> {
    resources
        .control
        .as_ref()
        .ok_or_else(|| Failure::new(ExitCode::VmmFailed, "no connection to thaw-vmm"))
}

/// What the console and the VMM's log say of a failure. A guest that ran out of memory before it was ready says so only
/// there.
fn explain(failure: Failure, resources: &Resources) -> Failure {
    let mut failure = with_console(failure, resources.console.as_ref());
    let starved = |l: &String| l.contains("Out of memory") || l.contains("System is deadlocked on memory");
    if failure.code == ExitCode::GuestNotReady && failure.context.iter().any(starved) {
        failure.code = ExitCode::MemoryTooSmall;
        failure.what.push_str(": it ran out of memory");
    }
    failure
        .context
        .extend(log_tail(&resources.directory.path().join(LOG)));
    failure
}

fn cmdline(more: Option<&str>) -> String {
    match more {
        Some(more) if !more.trim().is_empty() => format!("{CMDLINE} {}", more.trim()),
        _ => CMDLINE.into(),
    }
}
