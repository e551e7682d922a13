//! What a clone costs the host while it waits or idles.

use std::io;
use std::ops::Range;

use crate::vmm::Vmm;

/// Proportional shares (PSS) of one clone's memory, in KiB: pages that several processes map are divided among them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Footprint {
    /// The VMM itself.
    pub vmm: f64,
    /// Guest memory that the clone has written.
    pub written: f64,
    /// Guest memory that is still the template's.
    pub template: f64,
}

/// The footprint of `clone`.
pub fn footprint(clone: &Vmm) -> io::Result<Footprint> {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", clone.pid()))?;
    let guest: Vec<Range<u64>> = clone
        .regions
        .iter()
        .map(|region| region.host_address..region.host_address + region.size)
        .collect();
    if guest.is_empty() {
        return Err(io::Error::other("thaw-vmm does not say where guest memory is"));
    }
    Ok(sum(&smaps, &guest))
}

/// Sums a smaps(5) text, in which guest memory is at the addresses `guest`.
fn sum(smaps: &str, guest: &[Range<u64>]) -> Footprint {
    let mut footprint = Footprint::default();
    let mut of_guest = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let kib = words.next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
        match (first, of_guest) {
            ("Pss:", false) => footprint.vmm += kib,
            ("Pss:", true) => footprint.template += kib,
            // Anonymous pages in guest memory are copies or came of nothing: its own, and whole in its Pss.
            ("Anonymous:", true) => {
                footprint.written += kib;
                footprint.template -= kib;
            }
            _ if !first.ends_with(':') => of_guest = starts_in(first, guest),
            _ => {}
        }
    }
    footprint
}

/// Whether a mapping, `START-END`, is guest memory.
fn starts_in(mapping: &str, guest: &[Range<u64>]) -> bool {
    let start = mapping.split('-').next().unwrap_or_default();
    u64::from_str_radix(start, 16).is_ok_and(|start| guest.iter().any(|range| range.contains(&start)))
}

/// `MemAvailable`, in KiB: what the kernel could still give, its own memory counted.
pub fn available() -> io::Result<f64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    meminfo
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemAvailable:")?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_counts_once_as_the_vmms_as_written_or_as_the_templates() {
        let smaps = "\
7f00000-7f10000 rw-p 00000000 00:01 5 /memfd:template-memory (deleted)
Size:                 64 kB
Pss:                  20 kB
Anonymous:            12 kB
7f10000-7f20000 rw-p 00000000 00:00 0
Pss:                   8 kB
Anonymous:             8 kB
7f20000-7f30000 rw-p 00000000 00:00 0
Pss:                   5 kB
Anonymous:             5 kB
";
        assert_eq!(
            sum(smaps, &[0x7f00000..0x7f10000, 0x7f10000..0x7f20000]),
            Footprint {
                vmm: 5.0,
                written: 20.0,
                template: 8.0
            }
        );
    }
}
