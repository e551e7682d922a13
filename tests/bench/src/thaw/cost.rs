//! What a clone costs the host while it waits or idles.

use std::io;
use std::ops::Range;

use super::files::MEMORY as TEMPLATE;
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

/// The footprint of `clone`, whose boot memory is `memory_mib`, at most 3 GiB.
pub fn footprint(clone: &Vmm, memory_mib: u32) -> io::Result<Footprint> {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", clone.pid()))?;
    let guest = guest_memory(&smaps, u64::from(memory_mib) << 20)
        .ok_or_else(|| io::Error::other("this process maps no template"))?;
    Ok(sum(&smaps, &guest))
}

/// Where `size` bytes of guest memory are: boot memory up to 3 GiB is one range, whose addresses are as far apart as the
/// offsets in the template's file.
fn guest_memory(smaps: &str, size: u64) -> Option<Range<u64>> {
    let mapping = smaps.lines().find(|line| line.contains(TEMPLATE))?;
    let mut words = mapping.split_whitespace();
    let start = start_of(words.next()?)?;
    let offset = u64::from_str_radix(words.nth(1)?, 16).ok()?;
    let base = start.checked_sub(offset)?;
    Some(base..base + size)
}

/// Sums a smaps(5) text, in which guest memory is at the addresses `guest`.
fn sum(smaps: &str, guest: &Range<u64>) -> Footprint {
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
            _ if !first.ends_with(':') => of_guest = start_of(first).is_some_and(|at| guest.contains(&at)),
            _ => {}
        }
    }
    footprint
}

/// Where a mapping, `START-END`, starts.
fn start_of(mapping: &str) -> Option<u64> {
    u64::from_str_radix(mapping.split('-').next()?, 16).ok()
}

/// `MemAvailable`, in KiB: what the kernel could still give, its own memory counted.
pub fn available() -> io::Result<f64> {
    meminfo("MemAvailable")
}

/// A line of `/proc/meminfo`, in KiB.
pub fn meminfo(name: &str) -> io::Result<f64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value
        .and_then(|value| value.trim().strip_suffix(" kB")?.parse().ok())
        .ok_or_else(|| io::Error::other(format!("/proc/meminfo has no {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_counts_once_as_vmm_written_or_template() {
        let smaps = "\
7ef0000-7f00000 rw-p 00000000 00:00 0
Pss:                   3 kB
Anonymous:             3 kB
7f00000-7f10000 rw-p 00010000 00:01 5 /memfd:template-memory (deleted)
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
        let guest = guest_memory(smaps, 0x30000).expect("the template is mapped");
        assert_eq!(guest, 0x7ef0000..0x7f20000);
        assert_eq!(
            sum(smaps, &guest),
            Footprint {
                vmm: 5.0,
                written: 23.0,
                template: 8.0
            }
        );
        assert_eq!(guest_memory("", 0x30000), None);
    }
}
