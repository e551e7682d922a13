//! The KVM state of a frozen machine: each vCPU, the interrupt controllers, the guest's clock.
//!
//! Invariants: a state is plain data, without descriptors or addresses of this process. It is written as
//! *parts*. Each is one KVM structure of linux/kvm.h (x86-64) in the kernel's layout, under a number whose
//! meaning never changes. Decoding checks that each part is known, present once, and of a valid length; KVM
//! checks the values when they are set. No input makes decoding panic.

mod clock;
mod interrupts;
#[cfg(test)]
mod state_test;
mod vcpu;

pub use clock::ClockState;
pub use interrupts::{InterruptPart, InterruptState};
pub(crate) use vcpu::XSAVE_MIN;
pub use vcpu::{VcpuPart, VcpuState, decode_cpuid};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Why bytes are not a saved state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    #[error("there is no {what} part {number}: the state is damaged, or of a newer version")]
    Unknown { what: &'static str, number: u16 },
    #[error("part {0} is there twice: the state is damaged")]
    Duplicate(String),
    #[error("part {0} is missing: the state is damaged")]
    Missing(String),
    #[error("part {part} has {actual} bytes, not {expected}: the state is damaged")]
    Length {
        part: String,
        actual: usize,
        expected: String,
    },
    #[error("part {part}: {what}: the state is damaged")]
    Content { part: String, what: &'static str },
}

/// Encodes a structure in the kernel's layout.
fn to_bytes<T: IntoBytes + Immutable>(value: &T) -> Vec<u8> {
    value.as_bytes().to_vec()
}

/// Decodes one structure from exactly its bytes.
fn decode_struct<T: FromBytes>(part: impl std::fmt::Debug, bytes: &[u8]) -> Result<T, StateError> {
    T::read_from_bytes(bytes).map_err(|_| StateError::Length {
        part: format!("{part:?}"),
        actual: bytes.len(),
        expected: size_of::<T>().to_string(),
    })
}

/// Decodes at most `most` consecutive structures.
fn decode_structs<T: FromBytes>(
    part: impl std::fmt::Debug,
    bytes: &[u8],
    most: usize,
) -> Result<Vec<T>, StateError> {
    let wrong = || StateError::Length {
        part: format!("{part:?}"),
        actual: bytes.len(),
        expected: format!("a multiple of {} up to {}", size_of::<T>(), size_of::<T>() * most),
    };
    if !bytes.len().is_multiple_of(size_of::<T>()) || bytes.len() / size_of::<T>() > most {
        return Err(wrong());
    }
    bytes
        .chunks_exact(size_of::<T>())
        .map(|chunk| T::read_from_bytes(chunk).map_err(|_| wrong()))
        .collect()
}

/// The bytes of each part in `wanted`, in that order, from parts in any order.
fn sorted<'a, P: Copy + PartialEq + std::fmt::Debug, const N: usize>(
    wanted: [P; N],
    parts: &[(P, &'a [u8])],
) -> Result<[&'a [u8]; N], StateError> {
    let mut found = [None; N];
    for &(part, bytes) in parts {
        let Some(slot) = wanted.iter().position(|&w| w == part) else {
            continue;
        };
        if found[slot].replace(bytes).is_some() {
            return Err(StateError::Duplicate(format!("{part:?}")));
        }
    }
    let mut all: [&[u8]; N] = [&[]; N];
    for ((bytes, slot), part) in found.into_iter().zip(&mut all).zip(wanted) {
        *slot = bytes.ok_or_else(|| StateError::Missing(format!("{part:?}")))?;
    }
    Ok(all)
}
