//! Floating-point and vector registers as a standard XSAVE area.
//!
//! KVM reads and writes as many bytes as KVM_CAP_XSAVE2 reports, whatever the size of the given structure.
//! All code that depends on this is in this file.

use kvm_bindings::{Xsave, kvm_xsave};
use kvm_ioctls::VcpuFd;
use zerocopy::IntoBytes;

use crate::state::XSAVE_MIN;
use crate::{Error, Result};

/// The XSAVE area of `vcpu`, of `size` bytes: what KVM_CAP_XSAVE2 reports for its machine, at least 4096.
pub(crate) fn get(vcpu: &VcpuFd, size: usize) -> Result<Vec<u8>> {
    if size <= XSAVE_MIN {
        let area = vcpu.get_xsave().map_err(Error::ioctl("KVM_GET_XSAVE"))?;
        return Ok(area.region.as_bytes().to_vec());
    }
    let mut area = Xsave::new((size - XSAVE_MIN).div_ceil(4)).map_err(|_| TOO_LARGE)?;
    // SAFETY: `area` has room for at least `size` bytes, which is what KVM writes.
    unsafe { vcpu.get_xsave2(&mut area) }.map_err(Error::ioctl("KVM_GET_XSAVE2"))?;
    let mut bytes = area.as_fam_struct_ref().xsave.region.as_bytes().to_vec();
    bytes.extend_from_slice(area.as_slice().as_bytes());
    Ok(bytes)
}

/// Sets the XSAVE area of `vcpu`, of which KVM reads `size` bytes.
///
/// # Errors
/// [`Error::XsaveSize`] if `saved` is larger.
pub(crate) fn set(vcpu: &VcpuFd, saved: &[u8], size: usize) -> Result<()> {
    let size = size.max(XSAVE_MIN);
    if saved.len() > size {
        return Err(Error::XsaveSize {
            saved: saved.len(),
            host: size,
        });
    }
    let (region, rest) = saved.split_at(saved.len().min(XSAVE_MIN));
    let mut head = kvm_xsave::default();
    head.region.as_mut_bytes()[..region.len()].copy_from_slice(region);
    if size == XSAVE_MIN {
        // SAFETY: KVM reads the least area, which is what a kvm_xsave without its tail has.
        return unsafe { vcpu.set_xsave(&head) }.map_err(Error::ioctl("KVM_SET_XSAVE"));
    }
    let mut area = Xsave::new((size - XSAVE_MIN).div_ceil(4)).map_err(|_| TOO_LARGE)?;
    area.as_mut_slice().as_mut_bytes()[..rest.len()].copy_from_slice(rest);
    // SAFETY: only the fixed part is written; the length stays what the allocation has.
    unsafe { area.as_mut_fam_struct() }.xsave.region = head.region;
    // SAFETY: `area` holds at least the `size` bytes that KVM reads.
    unsafe { vcpu.set_xsave2(&area) }.map_err(Error::ioctl("KVM_SET_XSAVE"))
}

const TOO_LARGE: Error = Error::Missing("room for its XSAVE area");
