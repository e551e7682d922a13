//! Resource versions.
//!
//! Invariant: a new version is greater than all earlier versions, of this thawd or a previous one. A start continues above the versions
//! that the previous one reserved on disk, and above the clock's seconds times 2^20. Either alone suffices, so versions repeat only if the
//! file is lost and the clock was set back. Versions stay below 2^53, the limit of JSON numbers, until the year 2242.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use thaw_failpoint::{Failpoint, reach};

/// How many versions are reserved by one write.
const RESERVE: u64 = 1 << 32;
/// Versions for each second of the clock.
const PER_SECOND_BITS: u32 = 20;

/// Generates versions.
#[derive(Debug)]
pub struct Versions {
    last: u64,
    /// The last reserved version.
    reserved: u64,
    file: Option<PathBuf>,
}

impl Versions {
    /// Continues above the versions that `file` reserves.
    ///
    /// # Errors
    /// The reservation cannot be written.
    pub fn open(file: PathBuf) -> io::Result<Versions> {
        Versions::open_at(file, clock())
    }

    fn open_at(file: PathBuf, seconds: u64) -> io::Result<Versions> {
        let mut versions = Versions {
            last: (seconds << PER_SECOND_BITS).max(read(&file)),
            reserved: 0,
            file: Some(file),
        };
        versions.reserve()?;
        Ok(versions)
    }

    /// For a process with one sandbox, which no later process serves. Reserves nothing on disk.
    pub fn of_clock() -> Versions {
        Versions {
            last: clock() << PER_SECOND_BITS,
            reserved: u64::MAX,
            file: None,
        }
    }

    /// The last version.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// The next version.
    pub fn advance(&mut self) -> u64 {
        if self.last == self.reserved
            && let Err(e) = self.reserve()
        {
            // The clock still keeps the next start above these versions.
            tracing::error!("resource versions cannot be reserved: {e}");
            self.reserved = self.reserved.saturating_add(RESERVE);
        }
        self.last += 1;
        self.last
    }

    fn reserve(&mut self) -> io::Result<()> {
        let up_to = self.last.saturating_add(RESERVE);
        if let Some(file) = &self.file {
            write(file, up_to)?;
        }
        self.reserved = up_to;
        Ok(())
    }
}

fn clock() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// The reserved version; 0 if the file is missing or invalid.
fn read(file: &Path) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    let reserved = text.trim().parse().unwrap_or(0);
    // A number that cannot have been reached is from a damaged file.
    if reserved < 1 << 60 { reserved } else { 0 }
}

fn write(file: &Path, reserved: u64) -> io::Result<()> {
    let new = file.with_extension("new");
    let mut writer = File::create(&new)?;
    writeln!(writer, "{reserved}")?;
    writer.sync_all()?;
    reach(Failpoint::VersionsWritten);
    fs::rename(&new, file)?;
    reach(Failpoint::VersionsReserved);
    match file.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_above_the_last_one_by_the_file_or_by_the_clock() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("resource-version");
        let mut first = Versions::open_at(file.clone(), 1000).unwrap();
        let given = (0..10).map(|_| first.advance()).last().unwrap();
        assert_eq!(given, (1000 << 20) + 10);
        // The clock went back.
        assert!(Versions::open_at(file.clone(), 1).unwrap().advance() > given);
        for damage in ["", "x", "99999999999999999999999", "18446744073709551615"] {
            fs::write(&file, damage).unwrap();
            assert!(Versions::open_at(file.clone(), 1001).unwrap().advance() > given);
        }
    }

    #[test]
    fn more_than_was_reserved_is_reserved_before_it_is_given() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("resource-version");
        let mut versions = Versions::open_at(file.clone(), 0).unwrap();
        versions.last = versions.reserved;
        let given = versions.advance();
        assert!(read(&file) >= given);
    }
}
