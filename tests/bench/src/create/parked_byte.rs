//! What a creation is compared with: a parked machine of the same kind of guest, thawed by this program alone, to its first byte.

use std::io;

use crate::Report;
use crate::thaw::clone::Template;
use crate::thaw::storm;

/// Guest memory, MiB: that of the creations.
const MEMORY_MIB: u32 = 128;

/// The series of so many at once.
pub fn name(count: usize) -> String {
    format!("{count} at once, without thawd: parked to first byte")
}

/// Measures one at a time, and `few` at once.
pub fn run(report: &mut Report, rounds: usize, few: (usize, usize)) -> io::Result<()> {
    let directory = tempfile::tempdir()?;
    let template = Template::build(MEMORY_MIB, false, directory.path())?;
    for round in 0..=rounds {
        let us = template.from_parked()?;
        if round > 0 {
            report.sample(&name(1), "ms", us / 1e3);
        }
    }
    let (count, rounds) = few;
    for round in 0..=rounds {
        let mut clones = storm::park(&template, count)?;
        let taken = storm::thaw(&mut clones)?;
        storm::end(clones);
        if round > 0 {
            taken
                .into_iter()
                .for_each(|us| report.sample(&name(count), "ms", us / 1e3));
        }
    }
    Ok(())
}
