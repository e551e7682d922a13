//! The CPUID in the `state` of a snapshot, which thaw-vmm writes. `docs/snapshot-format.md` has its format.

/// Most bytes of a `state`.
pub const MAX_STATE: u64 = 16 << 20;
/// Bytes of its header, which the snapshot's manifest covers as it covers the rest.
const HEADER: usize = 64;
/// What it begins with: the magic and version 1.
const BEGINNING: &[u8] = b"THAWSTAT\x01\0\0\0";
/// Bytes in front of a record's payload.
const RECORD: usize = 12;
/// The kind of the record with a vCPU's CPUID.
const CPUID: u16 = 0x101;

/// The payload of the record with the first vCPU's CPUID: what [`thaw_hypervisor::state::decode_cpuid`] decodes. `None` if these bytes
/// are not a `state` of version 1 with such a record.
pub fn cpuid(state: &[u8]) -> Option<&[u8]> {
    let mut left = state.strip_prefix(BEGINNING)?.get(HEADER - BEGINNING.len()..)?;
    loop {
        let (head, rest) = left.split_at_checked(RECORD)?;
        let (&kind, head) = head.split_first_chunk()?;
        let (&version, head) = head.split_first_chunk()?;
        let (&vcpu, head) = head.split_first_chunk()?;
        let (&length, _) = head.split_first_chunk()?;
        let length = usize::try_from(u32::from_le_bytes(length)).ok()?;
        let (payload, rest) = rest.split_at_checked(length)?;
        let is_it = u16::from_le_bytes(kind) == CPUID && u32::from_le_bytes(vcpu) == 0;
        if is_it {
            return (u16::from_le_bytes(version) == 1).then_some(payload);
        }
        left = rest;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A `state` with only these records: kind, vCPU, payload.
    pub fn made(records: &[(u16, u32, &[u8])]) -> Vec<u8> {
        let mut bytes = BEGINNING.to_vec();
        bytes.resize(HEADER, 0);
        for (kind, vcpu, payload) in records {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(1u16.to_le_bytes());
            bytes.extend(vcpu.to_le_bytes());
            bytes.extend((payload.len() as u32).to_le_bytes());
            bytes.extend(*payload);
        }
        bytes
    }

    #[test]
    fn cpuid_of_the_first_vcpu_is_found() {
        let state = made(&[(1, 0, b"machine"), (CPUID, 0, b"first"), (CPUID, 1, b"second")]);
        assert_eq!(cpuid(&state), Some(&b"first"[..]));
        assert_eq!(cpuid(&made(&[(CPUID, 1, b"second")])), None);
        assert_eq!(cpuid(b"THAWWSET"), None);
        for cut in 0..HEADER + 2 * RECORD + 12 {
            assert_eq!(cpuid(&state[..cut]), None, "{cut}");
        }
    }
}
