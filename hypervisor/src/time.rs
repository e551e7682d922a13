//! Guest time across a thaw: it continues from where the freeze stopped it.
//!
//! Invariant: all vCPUs of a machine get the same TSC. The TSC of each is set to its value *now*, computed
//! from one common start, so it does not matter when each is set. KVM recognises that the values agree and
//! uses one offset for all.

use std::time::Instant;

use crate::msr;
use crate::state::VcpuState;

/// The time of a thawed machine's vCPUs: their saved TSC, and when it started again.
#[derive(Clone, Copy, Debug)]
pub struct GuestTime {
    tsc: u64,
    tsc_khz: u32,
    start: Instant,
}

impl GuestTime {
    /// Starts time now, from the latest TSC of `vcpus`, for [`crate::Vcpu::start_time`] of each.
    pub fn start(vcpus: &[VcpuState]) -> GuestTime {
        GuestTime {
            tsc: vcpus.iter().filter_map(|v| v.msr(msr::TSC)).max().unwrap_or(0),
            tsc_khz: vcpus.first().map_or(0, VcpuState::tsc_khz),
            start: Instant::now(),
        }
    }

    /// The guest's TSC now.
    pub fn tsc(&self) -> u64 {
        self.tsc_at(self.start.elapsed().as_nanos())
    }

    fn tsc_at(&self, elapsed_ns: u128) -> u64 {
        // Cycles are kHz times ns over 10^6; TSCs wrap.
        let cycles = elapsed_ns * u128::from(self.tsc_khz) / 1_000_000;
        self.tsc.wrapping_add(cycles as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_runs_at_the_saved_frequency_for_centuries() {
        let time = GuestTime {
            tsc: 5,
            tsc_khz: 3_000_000,
            start: Instant::now(),
        };
        assert_eq!(time.tsc_at(0), 5);
        assert_eq!(time.tsc_at(1), 8);
        assert_eq!(time.tsc_at(1_000_000_000), 3_000_000_005);
        let century = 100 * 365 * 86_400 * 1_000_000_000;
        assert_eq!(time.tsc_at(century), 100 * 365 * 86_400 * 3_000_000_000 + 5);
    }
}
