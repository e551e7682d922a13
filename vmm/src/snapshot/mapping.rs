//! Changes what is mapped behind guest memory, in place. The `unsafe` code for that is in this module.
//!
//! Guest memory is address space that `vm-memory`'s regions own; KVM's memory slots and the devices know it by address, so all
//! of them see a new mapping at once. Every function checks that the range it changes lies inside one region, so it cannot hit
//! another mapping of this process.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use vm_memory::{GuestAddress, GuestMemory as _, GuestMemoryRegion, MemoryRegionAddress};

use crate::memory::GuestMemory;

const FLAGS: MapFlags = MapFlags::PRIVATE
    .union(MapFlags::FIXED)
    .union(MapFlags::NORESERVE);
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// The host address of the `size` bytes of guest memory at `guest_address`, if one region contains them all.
pub fn host_address(memory: &GuestMemory, guest_address: u64, size: u64) -> Option<u64> {
    let (region, offset) = memory.to_region_addr(GuestAddress(guest_address))?;
    let MemoryRegionAddress(offset) = offset;
    let inside = offset.checked_add(size).is_some_and(|end| end <= region.len());
    inside.then(|| region.as_ptr() as u64 + offset)
}

fn checked(memory: &GuestMemory, guest_address: u64, size: u64) -> io::Result<*mut std::ffi::c_void> {
    let host = host_address(memory, guest_address, size).ok_or(Errno::FAULT)?;
    Ok(std::ptr::with_exposed_provenance_mut(host as usize))
}

/// Maps `size` bytes of `file` at `offset`, privately, over guest memory.
pub fn map_file(
    memory: &GuestMemory,
    guest_address: u64,
    size: u64,
    file: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<()> {
    let host = checked(memory, guest_address, size)?;
    // SAFETY: the range is inside a mapping that a region owns (checked) and will unmap whole. No Rust reference points
    // into guest memory: this process reads and writes it by volatile accesses only, as the guest does.
    unsafe { mmap(host, size as usize, READ_WRITE, FLAGS, file, offset) }?;
    Ok(())
}

/// Makes guest memory anonymous and zero.
pub fn map_nothing(memory: &GuestMemory, guest_address: u64, size: u64) -> io::Result<()> {
    let host = checked(memory, guest_address, size)?;
    // SAFETY: as in `map_file`.
    unsafe { mmap_anonymous(host, size as usize, READ_WRITE, FLAGS) }?;
    Ok(())
}

/// Advice for the kernel about guest memory. It never changes contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Map the pages for reading now.
    PopulateRead,
    /// Map the pages for writing now: private copies of a file's.
    PopulateWrite,
}

/// Gives the kernel this advice.
pub fn advise(memory: &GuestMemory, guest_address: u64, size: u64, hint: Hint) -> io::Result<()> {
    let host = checked(memory, guest_address, size)?;
    let advice = match hint {
        Hint::PopulateRead => Advice::LinuxPopulateRead,
        Hint::PopulateWrite => Advice::LinuxPopulateWrite,
    };
    // SAFETY: the range is inside a mapping (checked), and these leave its contents alone.
    unsafe { madvise(host, size as usize, advice) }?;
    Ok(())
}
