//! QEMU's microvm restoring a tiny guest from a saved state.
//!
//! The guest does nothing but write to the serial port, so that its first instructions after the restore do so again. It
//! is started as firmware, since QEMU's own takes minutes on a KVM that interprets guest kernels, and its memory holds no
//! data: less work for QEMU than the bare guest is for thaw-vmm.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::clock::{monotonic_ns, us_since};

const PROGRAM: &str = "qemu-system-x86_64";
/// How long starting and saving may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A state QEMU saved of a guest of some size.
pub struct Saved {
    memory_mib: u32,
    firmware: PathBuf,
    state: PathBuf,
}

impl Saved {
    /// Starts the guest and saves it, in `directory`.
    ///
    /// # Errors
    /// When QEMU is not there, or cannot run this guest on this KVM.
    pub fn build(memory_mib: u32, directory: &Path) -> io::Result<Saved> {
        let firmware = directory.join("qemu-firmware");
        std::fs::write(&firmware, writing_firmware())?;
        let saved = Saved {
            memory_mib,
            firmware,
            state: directory.join(format!("qemu-{memory_mib}.state")),
        };
        let socket = directory.join("qemu-monitor");
        let mut command = saved.command();
        command
            .arg("-qmp")
            .arg(format!("unix:{},server,wait=off", socket.display()))
            .stderr(Stdio::piped());
        let mut process = Killed(command.spawn()?);
        // It runs the guest: otherwise there is nothing to compare.
        process.first_byte()?;
        drop(process.0.stdout.take());
        let mut monitor = Monitor::connect(&socket)?;
        monitor.save(&saved.state)?;
        Ok(saved)
    }

    /// Process spawn to the guest's first byte, in microseconds.
    pub fn restore(&self) -> io::Result<f64> {
        let state = File::open(&self.state)?;
        let descriptor = state.as_raw_fd();
        let mut command = self.command();
        command.arg("-incoming").arg(format!("fd:{descriptor}"));
        command.stderr(Stdio::null());
        // SAFETY: between fork and exec one system call, on a descriptor open in the child: it is to be inherited.
        unsafe {
            command.pre_exec(move || match libc::fcntl(descriptor, libc::F_SETFD, 0) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let start = monotonic_ns();
        let mut process = Killed(command.spawn()?);
        process.first_byte()?;
        Ok(us_since(start))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .args([
                "-M",
                "microvm,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on",
            ])
            // MSR 0x10a cannot be set on a software KVM.
            .args(["-enable-kvm", "-cpu", "host,-arch-capabilities", "-smp", "1"])
            .args(["-m", &self.memory_mib.to_string()])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-serial", "stdio", "-bios"])
            .arg(&self.firmware)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }
}

/// 64 KiB that end at 4 GiB; the processor starts 16 bytes before the end, in 16-bit mode.
fn writing_firmware() -> Vec<u8> {
    let mut firmware = vec![0xf4; 64 << 10];
    // mov dx, 0x3f8; mov al, 'x'; 1: out dx, al; jmp 1b
    firmware[..8].copy_from_slice(&[0xba, 0xf8, 0x03, 0xb0, b'x', 0xee, 0xeb, 0xfd]);
    // jmp to the start: 13 bytes on, at the end, addresses wrap.
    firmware[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0x00]);
    firmware
}

/// A process killed when dropped.
pub(crate) struct Killed(pub(crate) Child);

impl Killed {
    fn first_byte(&mut self) -> io::Result<()> {
        let silent = || io::Error::other("QEMU ended before its guest wrote");
        let output = self.0.stdout.as_mut().ok_or_else(silent)?;
        let mut byte = [0u8; 1];
        match output.read(&mut byte)? {
            1 => Ok(()),
            _ => {
                let mut why = String::new();
                if let Some(errors) = &mut self.0.stderr {
                    errors.read_to_string(&mut why)?;
                }
                Err(io::Error::other(format!("{}: {}", silent(), why.trim())))
            }
        }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// QEMU's machine protocol: a line of JSON each way.
struct Monitor {
    lines: BufReader<UnixStream>,
}

impl Monitor {
    fn connect(socket: &Path) -> io::Result<Monitor> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Monitor {
            lines: BufReader::new(stream),
        };
        monitor.line()?;
        monitor.execute(r#"{"execute":"qmp_capabilities"}"#)?;
        Ok(monitor)
    }

    /// Saves the running guest's state to `path`.
    fn save(&mut self, path: &Path) -> io::Result<()> {
        let uri = serde_json::to_string(&format!("exec:cat > '{}'", path.display()))?;
        self.execute(&format!(r#"{{"execute":"migrate","arguments":{{"uri":{uri}}}}}"#))?;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let answer = self.execute(r#"{"execute":"query-migrate"}"#)?;
            match answer["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => return Err(io::Error::other(answer.to_string())),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn execute(&mut self, command: &str) -> io::Result<serde_json::Value> {
        self.lines.get_mut().write_all(command.as_bytes())?;
        loop {
            let mut line = self.line()?;
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(why) = line.get("error") {
                return Err(io::Error::other(why.to_string()));
            }
        }
    }

    fn line(&mut self) -> io::Result<serde_json::Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}
