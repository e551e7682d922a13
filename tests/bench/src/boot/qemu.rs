//! One cold boot under QEMU's microvm machine: the same kernel, the guest image as a virtio-blk root, vhost-vsock.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use thaw_protocol::handshake::{GUEST_CID, HANDSHAKE_PORT};
use vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};

use super::{Boot, MEMORY_MIB, agent_span, cmdline};
use crate::clock::monotonic_ns;

/// Whether QEMU and its vsock device can be used here; if not, why.
pub fn usable() -> Result<(), String> {
    if !Path::new("/dev/vhost-vsock").exists() {
        return Err("no /dev/vhost-vsock (modprobe vhost_vsock)".into());
    }
    match Command::new("qemu-system-x86_64")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
    {
        Ok(status) if status.success() => Ok(()),
        _ => Err("no qemu-system-x86_64 (package qemu-system-x86)".into()),
    }
}

/// Boots once.
pub fn boot(kernel: &Path, guest_image: &Path, directory: &Path) -> io::Result<Boot> {
    // The agent dials the host here when it is ready: the same doorbell as under thaw-vmm.
    let doorbell = VsockListener::bind(&VsockAddr::new(VMADDR_CID_ANY, HANDSHAKE_PORT))?;
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args([
            "-M",
            "microvm,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on",
        ])
        .args([
            "-enable-kvm",
            "-cpu",
            "host",
            "-smp",
            "1",
            "-m",
            &MEMORY_MIB.to_string(),
        ])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .arg("-kernel")
        .arg(kernel)
        .args(["-append", &cmdline("root=/dev/vda"), "-serial"])
        .arg(format!("file:{}", directory.join("qemu-console.log").display()))
        .arg("-drive")
        .arg(format!(
            "id=root,file={},format=raw,if=none,readonly=on",
            guest_image.display()
        ))
        .args(["-device", "virtio-blk-device,drive=root", "-device"])
        .arg(format!("vhost-vsock-device,guest-cid={GUEST_CID}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());

    let spawned = monotonic_ns();
    let mut process = command.spawn()?;
    let rung = doorbell.accept();
    let total = (monotonic_ns() - spawned) as f64 / 1e6;
    let agent = rung
        .and_then(|_| VsockStream::connect_with_cid_port(GUEST_CID, HANDSHAKE_PORT))
        .and_then(agent_span);
    process.kill()?;
    process.wait()?;
    Ok(Boot {
        vmm: None,
        kernel: None,
        agent: agent?,
        total,
    })
}
