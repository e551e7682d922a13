//! The VM generation ID: 16 bytes in guest memory that differ between any two guests that share a past.

use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress};

use crate::layout::VMGENID_PAGE;
use crate::memory::GuestMemory;

/// Why the generation ID could not be set.
#[derive(Debug, thiserror::Error)]
pub enum VmGenIdError {
    #[error("no random bytes: {0}")]
    Random(#[from] rustix::io::Errno),
    #[error("writing the VM generation ID into guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Gives the guest a new, random generation ID.
pub fn write(memory: &GuestMemory) -> Result<(), VmGenIdError> {
    let mut id = [0u8; 16];
    // Requests of up to 256 bytes are never cut short (getrandom(2)).
    getrandom(&mut id, GetRandomFlags::empty())?;
    memory.write_slice(&id, GuestAddress(VMGENID_PAGE.start))?;
    Ok(())
}

/// Makes the page this process's own without changing it, so that [`write`] does not take a fault there.
pub fn touch(memory: &GuestMemory) -> Result<(), VmGenIdError> {
    let at = GuestAddress(VMGENID_PAGE.start);
    let first: u8 = memory.read_obj(at)?;
    memory.write_obj(first, at)?;
    Ok(())
}
