//! How many seccomp programs a VMM installs for itself.

use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::vmm::{Vmm, open_kvm};

/// Programs that one VMM of `vcpus` has installed once its machine is made: those of its only thread before that, as
/// /proc/PID/status says, and the seccomp(2) calls that strace(1) sees while the machine is made. Programs it inherited from
/// this process do not count.
pub fn installed(directory: &Path, vcpus: u8) -> io::Result<usize> {
    let log = std::fs::File::create(directory.join("filters.log"))?.into();
    let mut vmm = Vmm::spawn(directory, &log)?;
    // Its jail is closed when it answers.
    vmm.status()?;
    let status = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/status"));
    let (own, inherited) = (status(&vmm.pid().to_string())?, status("self")?);
    if field(&own, "Threads:")? != 1 {
        return Err(io::Error::other(
            "a VMM without a machine has more than one thread",
        ));
    }
    let before = field(&own, "Seccomp_filters:")? - field(&inherited, "Seccomp_filters:")?;
    let trace = directory.join("filters.strace");
    let (mut strace, said) = trace_of(vmm.pid(), &trace)?;
    vmm.create(&open_kvm()?, vcpus, 64)?;
    vmm.settle()?;
    drop(vmm);
    strace.wait()?;
    drop(said);
    let text = std::fs::read_to_string(&trace)?;
    Ok(before
        + text
            .lines()
            .filter(|line| line.contains("seccomp(SECCOMP_SET_MODE_FILTER"))
            .count())
}

/// strace, which has attached to process `pid` and will to the threads it starts; and what it says of that, to be kept open until it
/// has ended.
fn trace_of(pid: i32, output: &Path) -> io::Result<(Child, impl Sized)> {
    let mut strace = Command::new("strace")
        .args(["-f", "-e", "trace=seccomp", "-p", &pid.to_string(), "-o"])
        .arg(output)
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("strace: {e}")))?;
    // It says "Process N attached" when it has.
    let stderr = strace.stderr.take();
    let mut lines = io::BufReader::new(stderr.ok_or_else(|| io::Error::other("strace has no stderr"))?);
    let mut said = String::new();
    io::BufRead::read_line(&mut lines, &mut said)?;
    match said.contains("attached") {
        true => Ok((strace, lines)),
        false => Err(io::Error::other(format!("strace: {}", said.trim()))),
    }
}

/// A number of a status file.
fn field(status: &str, name: &str) -> io::Result<usize> {
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.ok_or_else(|| io::Error::other(format!("/proc/PID/status has no {name}")))
}
