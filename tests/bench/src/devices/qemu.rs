//! The guest under QEMU's microvm machine, with vhost-net and virtiofsd.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use thaw_network::GUEST_MAC;
use thaw_protocol::handshake::{GUEST_CID, HANDSHAKE_PORT};
use thaw_protocol::share::TAG;
use vsock::VsockStream;

use super::setting::{MEMORY_MIB, Setting};
use super::{collect, transfer};
use crate::Report;
use crate::boot::cmdline;
use crate::thaw::qemu::Killed;

/// The VMM's name in rows.
pub const NAME: &str = "qemu microvm";
/// Where distributions have virtiofsd, which is in no PATH.
const VIRTIOFSD: [&str; 3] = [
    "/usr/libexec/virtiofsd",
    "/usr/lib/qemu/virtiofsd",
    "/usr/lib/virtiofsd",
];
/// Only a virtiofsd that fails takes that long to listen.
const PATIENCE: Duration = Duration::from_secs(20);

/// The virtiofsd of this host.
pub fn virtiofsd() -> Option<PathBuf> {
    VIRTIOFSD.iter().map(PathBuf::from).find(|path| path.exists())
}

/// Whether this host has vhost-net.
pub fn has_vhost_net() -> bool {
    Path::new("/dev/vhost-net").exists()
}

/// Boots the guest, and takes what it measures. Without `virtiofsd` there is no volume.
pub fn measure(
    setting: &Setting,
    virtiofsd: Option<&Path>,
    rounds: usize,
    report: &mut Report,
) -> io::Result<()> {
    setting.order(rounds, virtiofsd.is_some())?;
    let socket = setting.directory.join("virtiofsd.sock");
    let _served = virtiofsd
        .map(|program| serve(program, &setting.shared, &socket))
        .transpose()?;
    let mut command = machine(setting);
    if virtiofsd.is_some() {
        command
            .arg("-chardev")
            .arg(format!("socket,id=volume,path={}", socket.display()))
            .args([
                "-device",
                &format!("vhost-user-fs-device,chardev=volume,tag={TAG}"),
            ]);
    }
    let tap = setting.qemu.tap.as_raw_fd();
    // SAFETY: between fork and exec one system call, on a descriptor open in the child: it is to be inherited.
    unsafe {
        command.pre_exec(move || match libc::fcntl(tap, libc::F_SETFD, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut process = Killed(command.spawn()?);
    let console = process.0.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    transfer::call(|| VsockStream::connect_with_cid_port(GUEST_CID, HANDSHAKE_PORT));
    collect(console, NAME, report)
}

fn machine(setting: &Setting) -> Command {
    let mac = GUEST_MAC.map(|byte| format!("{byte:02x}")).join(":");
    let vhost = if has_vhost_net() { "on" } else { "off" };
    let mut command = Command::new("qemu-system-x86_64");
    command
        // virtiofsd maps the guest's memory.
        .arg("-M")
        .arg("microvm,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on,memory-backend=memory")
        .arg("-object")
        .arg(format!(
            "memory-backend-memfd,id=memory,size={MEMORY_MIB}M,share=on"
        ))
        .args(["-m", &MEMORY_MIB.to_string(), "-smp", "1"])
        .args(["-enable-kvm", "-cpu", "host"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-global", "virtio-mmio.force-legacy=false"])
        .arg("-kernel")
        .arg(&setting.kernel)
        .args(["-append", &cmdline("root=/dev/vda"), "-serial", "stdio"])
        .arg("-drive")
        .arg(format!(
            "id=disk,file={},format=raw,if=none,cache=writeback",
            setting.disk.display()
        ))
        .args(["-device", "virtio-blk-device,drive=disk"])
        .arg("-netdev")
        .arg(format!(
            "tap,id=net,fd={},vhost={vhost}",
            setting.qemu.tap.as_raw_fd()
        ))
        .arg("-device")
        .arg(format!("virtio-net-device,netdev=net,mac={mac}"))
        .arg("-device")
        .arg(format!("vhost-vsock-device,guest-cid={GUEST_CID}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

/// Starts virtiofsd with the settings it has by itself.
fn serve(program: &Path, directory: &Path, socket: &Path) -> io::Result<Killed> {
    // The one before left it.
    let _ = std::fs::remove_file(socket);
    let mut command = Command::new(program);
    command
        .arg("-f")
        .arg(format!("--socket-path={}", socket.display()))
        .arg("-o")
        .arg(format!("source={},cache=auto", directory.display()))
        .stdin(Stdio::null());
    let served = Killed(command.spawn()?);
    let until = Instant::now() + PATIENCE;
    while !socket.exists() {
        if Instant::now() > until {
            return Err(io::Error::other(format!("{} does not listen", program.display())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(served)
}
