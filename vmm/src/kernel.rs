//! The guest kernel's ELF file: checked against the machine, then loaded.
//!
//! The program headers are read here before linux-loader copies anything. So a kernel that does not fit gets a different error than a file
//! that is no kernel, and the boot information below 1 MiB is not overwritten.

use std::fs::File;
use std::os::unix::fs::FileExt;

use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use vm_memory::{Address, GuestMemory as _, GuestMemoryRegion};

use crate::memory::GuestMemory;

const MIB: u64 = 1 << 20;
/// Memory that a kernel needs beyond its own image to reach user space: page tables, per-CPU areas, hash tables, devices.
const MARGIN: u64 = 16 * MIB;

const ELF_HEADER_SIZE: usize = 64;
const PROGRAM_HEADER_SIZE: usize = 56;
const PT_LOAD: u32 = 1;
const ELF_MAGIC: &[u8] = b"\x7fELF";
/// `EI_CLASS` 64-bit, `EI_DATA` little-endian.
const ELF_64_LITTLE: &[u8] = &[2, 1];
/// `e_machine`.
const EM_X86_64: u16 = 62;

/// Why a kernel cannot boot.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error(
        "the kernel is not an ELF file for x86-64 ({0}): an uncompressed vmlinux is needed, not a bzImage"
    )]
    NotElf(&'static str),
    #[error("the kernel has no PVH entry note: it must be built with CONFIG_PVH=y")]
    NoPvhNote,
    #[error("the kernel file is damaged: {0}")]
    Damaged(&'static str),
    #[error(
        "the guest has {have} MiB of memory and this kernel needs at least {need} MiB: give it more (--memory)"
    )]
    MemoryTooSmall { have: u64, need: u64 },
    #[error("reading the kernel: {0}")]
    Io(#[from] std::io::Error),
    #[error("loading the kernel: {0}")]
    Load(linux_loader::loader::Error),
}

/// Loads the kernel and returns its PVH entry address.
pub fn load(memory: &GuestMemory, file: &mut File) -> Result<u64, KernelError> {
    let end = check(file)?;
    require_memory(memory, end)?;
    let loaded = Elf::load(memory, None, file, None).map_err(KernelError::Load)?;
    match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(entry) => Ok(entry.raw_value()),
        _ => Err(KernelError::NoPvhNote),
    }
}

/// Checks headers and segment bounds; returns the guest address at which the last segment ends.
fn check(file: &File) -> Result<u64, KernelError> {
    let mut header = [0u8; ELF_HEADER_SIZE];
    file.read_exact_at(&mut header, 0).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => KernelError::NotElf("it is too short"),
        _ => e.into(),
    })?;
    if &header[..4] != ELF_MAGIC {
        return Err(KernelError::NotElf("it has no ELF magic number"));
    }
    if &header[4..6] != ELF_64_LITTLE || u16_at(&header, 18) != EM_X86_64 {
        return Err(KernelError::NotElf("it is for another processor"));
    }
    let file_size = file.metadata()?.len();
    let (offset, count) = (u64_at(&header, 32), u16_at(&header, 56));
    let mut end = 0;
    for index in 0..u64::from(count) {
        let mut segment = [0u8; PROGRAM_HEADER_SIZE];
        let at = offset
            .checked_add(index * PROGRAM_HEADER_SIZE as u64)
            .filter(|at| {
                at.checked_add(PROGRAM_HEADER_SIZE as u64)
                    .is_some_and(|end| end <= file_size)
            })
            .ok_or(KernelError::Damaged(
                "its program headers lie beyond the end of the file",
            ))?;
        file.read_exact_at(&mut segment, at)?;
        end = end.max(check_segment(&segment, file_size)?);
    }
    match end {
        0 => Err(KernelError::Damaged("it has nothing to load")),
        _ => Ok(end),
    }
}

/// Checks one program header. Returns the guest address at which its segment ends, or 0 if the segment is not loaded.
fn check_segment(segment: &[u8; PROGRAM_HEADER_SIZE], file_size: u64) -> Result<u64, KernelError> {
    let (offset, address) = (u64_at(segment, 8), u64_at(segment, 24));
    let (in_file, in_memory) = (u64_at(segment, 32), u64_at(segment, 40));
    if offset.checked_add(in_file).is_none_or(|end| end > file_size) {
        return Err(KernelError::Damaged(
            "it is cut short: a segment lies beyond the end of the file",
        ));
    }
    if u32_at(segment, 0) != PT_LOAD || in_memory == 0 {
        return Ok(0);
    }
    if in_file > in_memory {
        return Err(KernelError::Damaged(
            "a segment is larger in the file than in memory",
        ));
    }
    if address < MIB {
        return Err(KernelError::Damaged(
            "a segment lies below 1 MiB, where the boot information is",
        ));
    }
    address.checked_add(in_memory).ok_or(KernelError::Damaged(
        "a segment reaches past the end of the address space",
    ))
}

/// Checks that the low part of memory holds the kernel and leaves room for it to work.
fn require_memory(memory: &GuestMemory, kernel_end: u64) -> Result<(), KernelError> {
    let low = memory.iter().next().map_or(0, GuestMemoryRegion::len);
    let total: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
    // Linux describes each 4096-byte page by 64 bytes.
    let need = kernel_end.saturating_add(MARGIN).saturating_add(total / 64);
    match need <= low {
        true => Ok(()),
        false => Err(KernelError::MemoryTooSmall {
            have: total / MIB,
            need: need.div_ceil(MIB),
        }),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
