//! What a clone costs the host while it waits or idles.

use std::io;

/// Memory of one process, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Footprint {
    /// Its proportional share of all it has mapped but the template.
    pub own: f64,
    /// Its proportional share of the template's file.
    pub template: f64,
}

/// The footprint of process `pid`; the template is what it maps of files in memory whose name has `template`.
pub fn footprint(pid: i32, template: &str) -> io::Result<Footprint> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    Ok(sum(&smaps, template))
}

/// Sums `Pss:` of a smaps(5) text. A private page of the template is the clone's own: it wrote it.
fn sum(smaps: &str, template: &str) -> Footprint {
    let mut footprint = Footprint::default();
    let mut of_template = false;
    let mut private = 0.0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let kib = || {
            words
                .clone()
                .next()
                .and_then(|n| n.parse::<f64>().ok())
                .unwrap_or(0.0)
        };
        match first {
            "Pss:" if of_template => footprint.template += kib(),
            "Pss:" => footprint.own += kib(),
            "Anonymous:" => private += if of_template { kib() } else { 0.0 },
            _ if !first.ends_with(':') => of_template = line.contains(template),
            _ => {}
        }
    }
    // Anonymous pages of a private file mapping are copies, counted whole in its Pss.
    footprint.own += private;
    footprint.template -= private;
    footprint
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
    fn pages_of_the_template_that_were_written_are_the_clones_own() {
        let smaps = "\
7f00-7f10 rw-p 00000000 00:01 5 /memfd:memory (deleted)
Size:                 64 kB
Pss:                  20 kB
Anonymous:            12 kB
7f20-7f30 rw-p 00000000 00:00 0
Pss:                   5 kB
Anonymous:             5 kB
";
        assert_eq!(
            sum(smaps, "memfd:memory"),
            Footprint {
                own: 17.0,
                template: 8.0
            }
        );
    }
}
