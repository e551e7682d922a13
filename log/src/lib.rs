//! The log of a process that serves a guest: JSON lines on standard error.
//!
//! Invariant: if standard error is a file, this crate never lets it grow beyond [`LIMIT`]. Such files are in
//! memory (/run), and a guest can cause their lines. A full file keeps its newest lines, [`KEPT`] bytes of
//! them, and a note of how many bytes were dropped. The size is read from the file each time, because an
//! earlier process may have started it, and signal handlers write to it directly. A terminal, pipe or journal
//! has no limit.

mod log_limit;

pub use log_limit::LogLimit;

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;

use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;
use tracing_subscriber::filter::LevelFilter;

/// Size limit of a log file in bytes.
pub const LIMIT: u64 = 1 << 20;
/// Most bytes of old lines that a full file keeps.
pub const KEPT: u64 = 256 << 10;
/// Longest line in bytes; the rest of a longer one is dropped.
pub const LONGEST: usize = 64 << 10;

/// Sends this process's log to standard error, as JSON lines unless it is a terminal. `THAW_LOG` sets the
/// level.
pub fn to_stderr() {
    let level = std::env::var("THAW_LOG")
        .ok()
        .and_then(|level| level.parse().ok())
        .unwrap_or(LevelFilter::INFO);
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(Mutex::new(BoundedLog::new(io::stderr())))
        .with_target(false);
    match io::stderr().is_terminal() {
        true => log.init(),
        false => log.json().init(),
    }
}

/// Ends the process, and with it the guest, if any thread panics: no part of it can be missing, and a lock may be held in an inconsistent
/// state. The panic is logged without a backtrace, which would open files.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("{panic}");
        std::process::abort();
    }));
}

/// Writes whole lines to a descriptor that other processes may share.
#[derive(Debug)]
pub struct BoundedLog<F> {
    file: F,
    dropped: u64,
}

impl<F: AsFd> BoundedLog<F> {
    /// Appends to `file`. If it is not open for reading too, a full file keeps no old lines.
    pub fn new(file: F) -> BoundedLog<F> {
        BoundedLog { file, dropped: 0 }
    }

    /// Makes room, then appends a line. A line that cannot be written is dropped, because a log must not make
    /// its caller fail.
    fn append(&mut self, line: &[u8]) {
        let line = match line.get(..LONGEST) {
            Some(start) => {
                self.dropped += (line.len() - LONGEST) as u64;
                start
            }
            None => line,
        };
        let written = self
            .make_room(line.len() as u64)
            .and_then(|()| write_all(&self.file, line));
        if written.is_err() {
            self.dropped += line.len() as u64;
        }
    }

    /// Keeps only the newest lines if the file would exceed its limit with `more` bytes.
    fn make_room(&mut self, more: u64) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(&self.file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || size + more <= LIMIT {
            return Ok(());
        }
        let kept = self.newest_lines(size);
        rustix::fs::ftruncate(&self.file, 0)?;
        // Needed if the file is not open for appending.
        rustix::fs::seek(&self.file, SeekFrom::Start(0))?;
        self.dropped += size - kept.len() as u64;
        write_all(&self.file, self.note().as_bytes())?;
        write_all(&self.file, &kept)
    }

    /// The last whole lines of a file of `size` bytes. Empty if it cannot be read.
    fn newest_lines(&self, size: u64) -> Vec<u8> {
        let mut bytes = vec![0; KEPT.min(size) as usize];
        let mut done = 0;
        let start = size - bytes.len() as u64;
        while done < bytes.len() {
            match rustix::io::pread(&self.file, &mut bytes[done..], start + done as u64) {
                Ok(0) | Err(_) => return Vec::new(),
                Ok(count) => done += count,
            }
        }
        // Skip the first line, which may be incomplete.
        let first = bytes.iter().position(|byte| *byte == b'\n');
        bytes.split_off(first.map_or(bytes.len(), |newline| newline + 1))
    }

    fn note(&self) -> String {
        format!(
            "{{\"level\":\"WARN\",\"fields\":{{\"message\":\"older lines were dropped: this file keeps {LIMIT} bytes\",\
             \"dropped_bytes\":{}}}}}\n",
            self.dropped
        )
    }
}

impl<F: AsFd> Write for BoundedLog<F> {
    /// Always accepts all of `line`.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.append(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_all(file: impl AsFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let count = rustix::io::retry_on_intr(|| rustix::io::write(&file, bytes))?;
        bytes = &bytes[count..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::Read;

    use super::*;

    fn file(options: &mut OpenOptions) -> (tempfile::TempDir, File) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        File::create(&path).unwrap();
        (directory, options.open(path).unwrap())
    }

    fn appended() -> (tempfile::TempDir, File) {
        file(File::options().read(true).append(true))
    }

    fn text(directory: &tempfile::TempDir) -> String {
        std::fs::read_to_string(directory.path().join("log")).unwrap()
    }

    /// The number of dropped bytes in the newest note.
    fn dropped(text: &str) -> u64 {
        let (_, number) = text.split_once("\"dropped_bytes\":").expect("a note");
        number[..number.find('}').unwrap()].parse().unwrap()
    }

    #[test]
    fn many_lines_leave_the_newest_within_the_limit() {
        let (directory, file) = appended();
        let mut log = BoundedLog::new(&file);
        for number in 0..100_000 {
            writeln!(log, "a guest resets its devices, for the time {number}").unwrap();
            assert!(number % 1000 != 0 || file.metadata().unwrap().len() <= LIMIT);
        }
        let text = text(&directory);
        assert!(text.len() as u64 <= LIMIT && text.len() as u64 > KEPT);
        assert!(text.ends_with("for the time 99999\n"));
        let first: Vec<_> = text.lines().take(2).collect();
        assert!(first[0].contains("older lines were dropped"), "{}", first[0]);
        assert!(first[1].starts_with("a guest"), "whole lines: {}", first[1]);
        assert!(dropped(&text) > 3 * LIMIT);
    }

    #[test]
    fn dropped_bytes_and_kept_bytes_are_all_that_was_written() {
        let (directory, file) = appended();
        let mut log = BoundedLog::new(&file);
        let line = [&[b'x'; 99][..], b"\n"].concat();
        let lines = 2 * LIMIT / line.len() as u64;
        (0..lines).for_each(|_| log.write_all(&line).unwrap());
        let text = text(&directory);
        let kept: u64 = text
            .lines()
            .filter(|line| line.starts_with('x'))
            .map(|line| line.len() as u64 + 1)
            .sum();
        // Dropped notes count as well; each is shorter than two lines.
        let all = dropped(&text) + kept;
        assert!((lines * 100..lines * 100 + 600).contains(&all), "{all}");
    }

    #[test]
    fn file_that_others_write_to_is_bounded_all_the_same() {
        let (directory, file) = appended();
        let mut log = BoundedLog::new(&file);
        (&file).write_all(&vec![b'y'; 3 * LIMIT as usize]).unwrap();
        log.write_all(b"mine\n").unwrap();
        let text = text(&directory);
        assert!(text.len() < 300 && text.ends_with("mine\n"), "{text}");
    }

    #[test]
    fn file_that_is_not_appended_to_does_not_get_a_hole() {
        let (directory, file) = file(File::options().read(true).write(true));
        let mut log = BoundedLog::new(&file);
        (0..20_000).for_each(|number| writeln!(log, "{number:0100}").unwrap());
        let text = text(&directory);
        assert!(text.len() as u64 <= LIMIT && !text.contains('\0'));
    }

    #[test]
    fn file_that_cannot_be_read_keeps_the_last_line() {
        let (directory, file) = file(File::options().append(true));
        let mut log = BoundedLog::new(&file);
        (0..20_000).for_each(|number| writeln!(log, "{number:0100}").unwrap());
        let text = text(&directory);
        assert!(text.len() as u64 <= LIMIT && text.ends_with("19999\n"));
        assert!(dropped(&text) > 0);
    }

    #[test]
    fn line_without_end_is_cut() {
        let (directory, file) = appended();
        let mut log = BoundedLog::new(&file);
        log.write_all(&vec![b'z'; 100 << 20]).unwrap();
        assert_eq!(text(&directory).len(), LONGEST);
    }

    #[test]
    fn pipe_gets_every_line() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut log = BoundedLog::new(write);
        log.write_all(b"one\n").unwrap();
        log.write_all(b"two\n").unwrap();
        drop(log);
        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\ntwo\n");
    }

    proptest::proptest! {
        /// Whatever the lengths of lines, the file stays within its limit and ends with the newest line.
        #[test]
        fn bounded_log_ends_with_the_newest_line(lengths in proptest::collection::vec(1usize..200_000, 1..60)) {
            let (directory, file) = appended();
            let mut log = BoundedLog::new(&file);
            for (number, length) in lengths.into_iter().enumerate() {
                let letter = b'a' + (number % 26) as u8;
                let line = [&vec![letter; length][..], b"\n"].concat();
                log.write_all(&line).unwrap();
                let bytes = std::fs::read(directory.path().join("log")).unwrap();
                proptest::prop_assert!(bytes.len() as u64 <= LIMIT);
                proptest::prop_assert!(bytes.ends_with(&line[..line.len().min(LONGEST)]));
            }
        }
    }
}
