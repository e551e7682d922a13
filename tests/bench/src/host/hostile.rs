//! What one hostile guest takes of its host: memory beyond what it was given, and a log without end.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use thaw_protocol::control::Command;
use thaw_tiny_guest::Guest;
use thaw_tiny_guest::hotplug::{BLOCK, BLOCKS, Steps};
use thaw_tiny_guest::misuse::misuse;

use crate::vmm::{Vmm, open_kvm};

/// Boot memory of these guests, MiB.
const BOOT_MIB: u32 = 64;
/// Blocks they are offered beside it: 64 MiB.
const OFFERED: u32 = 32;
const MIB: u32 = 1 << 20;
/// All memory they are given, MiB.
const MEMORY_MIB: u32 = BOOT_MIB + OFFERED * (BLOCK / MIB);

/// The most memory that a hostile guest's VMM had at once, over what the guest was given (boot memory, and what virtio-mem
/// was told to offer) and what the VMM of a guest has that touches nothing. Of several guests, all of which touch all of
/// boot memory.
pub fn touched_over_limit(directory: &Path) -> io::Result<f64> {
    let idle = Steps::new().wait_for(OFFERED).guest();
    let allowance = most_touched(directory, &idle)?;
    let limit = u64::from(MEMORY_MIB) * u64::from(MIB);
    let mut most = 0;
    for guest in greedy() {
        most = most.max(most_touched(directory, &guest)?);
    }
    Ok(most as f64 / (limit + allowance) as f64)
}

/// Guests that would have more than they are given.
fn greedy() -> [Guest; 3] {
    let all = OFFERED as u16;
    let start = || Steps::new().wait_for(OFFERED).write_boot_memory(BOOT_MIB);
    // The offer in one place after the other.
    let moving = (0..4).fold(start(), |steps, place| {
        let first = place * OFFERED;
        steps.plug(first, all).write(first, OFFERED).unplug(first, all)
    });
    // All that is in reach once everything is unplugged.
    let unplugged = start().plug(0, all).write(0, OFFERED).unplug_all();
    // All that is beside one block.
    let beside = start().plug(0, 1).write(0, 1);
    [
        moving.guest(),
        unplugged.write(0, BLOCKS).guest(),
        beside.write(1, BLOCKS - 1).guest(),
    ]
}

/// The most bytes that the VMM of `guest` had resident at once.
fn most_touched(directory: &Path, guest: &Guest) -> io::Result<u64> {
    let log = File::create(directory.join("greedy.log"))?.into();
    let mut vmm = Vmm::spawn(directory, &log)?;
    vmm.create(&open_kvm()?, 1, BOOT_MIB)?;
    run(&mut vmm, guest)?;
    // Every one of these guests waits for it, and may end before it is answered.
    let memory_mib = MEMORY_MIB;
    vmm.ask(Command::Resize { memory_mib }, &[])?;
    // It powers off, or its machine ends because it wrote where it must not.
    if let Err(error) = vmm.wait_for_end()
        && !error.to_string().contains("not plugged")
    {
        return Err(error);
    }
    most_resident(vmm.pid())
}

fn run(vmm: &mut Vmm, guest: &Guest) -> io::Result<()> {
    let boot = Command::Boot {
        cmdline: String::new(),
    };
    vmm.call(boot, &[guest.kernel().as_fd()]).map(drop)
}

/// The most bytes a process had resident at once.
fn most_resident(pid: i32) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = status.lines().find_map(|line| {
        let value = line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?;
        value.parse::<u64>().ok()
    });
    kib.map(|kib| kib * 1024)
        .ok_or_else(|| io::Error::other("/proc/PID/status has no VmHWM"))
}

/// Bytes of a VMM's log after its guest has reset and misused its devices at least `resets` times.
pub fn log_after_resets(directory: &Path, resets: u32) -> io::Result<u64> {
    let path = directory.join("misuse.log");
    let log = File::options().create(true).read(true).append(true).open(&path)?;
    let mut vmm = Vmm::spawn(directory, &log.into())?;
    vmm.create(&open_kvm()?, 1, BOOT_MIB)?;
    run(&mut vmm, &misuse(resets))?;
    vmm.wait_for_end()?;
    Ok(std::fs::metadata(&path)?.len())
}
