//! Huge pages that the guest's kernel reserves for containers and volumes
//! (Documentation/admin-guide/mm/hugetlbpage.rst).
//!
//! Invariant: the kernel's pool of a page size grows and shrinks with the reservations. Reservations without a
//! fixed size only raise the limit up to which the pool may grow on demand. A reservation that cannot be
//! satisfied completely changes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use thaw_protocol::agent::oci::LinuxHugepageLimit;
use thaw_sys::lock::Lock;

use crate::error::{Error, Result, WithContext};
use crate::warning;

/// The directory of the kernel's page sizes, with a subdirectory for each: `hugepages-2048kB`.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// The number of pages that a pool always has, and the number of additional ones that it may allocate on
/// demand.
const KEPT: &str = "nr_hugepages";
const ON_DEMAND: &str = "nr_overcommit_hugepages";
/// Number of additional pages at present. `nr_hugepages` includes them when read, but not when written.
const SURPLUS: &str = "surplus_hugepages";

/// Held while a number of a pool is read and changed.
static CHANGING: Mutex<()> = Mutex::new(());

/// Huge pages that are reserved while this exists.
#[derive(Debug)]
pub struct Reservation {
    /// The file of the pool's number that includes them.
    number: PathBuf,
    pages: u64,
}

/// Reserves the pages that a container's limits allow.
pub fn of_limits(limits: &[LinuxHugepageLimit]) -> Result<Vec<Reservation>> {
    let used = limits.iter().filter(|limit| limit.Limit > 0);
    used.map(|limit| Reservation::new(Path::new(POOLS), KEPT, &limit.Pagesize, limit.Limit))
        .collect()
}

/// Reserves the pages of a huge page file system with these options. Without a size, it may use all memory.
pub fn of_options(options: &[String]) -> Result<Reservation> {
    let value = |name: &str| {
        let given = options.iter().flat_map(|o| o.split(','));
        given.filter_map(|o| o.split_once('=')).find(|(n, _)| *n == name)
    };
    let (_, page) = value("pagesize")
        .ok_or_else(|| Error::Invalid("a file system of huge pages: its options have no pagesize=".into()))?;
    match value("size") {
        Some((_, size)) => Reservation::new(Path::new(POOLS), KEPT, page, bytes(size)?),
        None => Reservation::new(Path::new(POOLS), ON_DEMAND, page, memory()),
    }
}

/// The guest's memory, in bytes.
fn memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

impl Reservation {
    fn new(pools: &Path, number: &str, page: &str, wanted: u64) -> Result<Reservation> {
        let size = bytes(page)?;
        let number = pools.join(format!("hugepages-{}kB", size >> 10)).join(number);
        if !number.exists() {
            return Err(Error::Unsupported(format!(
                "this guest's kernel does not support huge pages of {page}: use 2MB"
            )));
        }
        let pages = wanted.div_ceil(size);
        let _alone = CHANGING.locked();
        let before = settled(&number)?;
        let whole = before.saturating_add(pages);
        write(&number, whole)?;
        let got = settled(&number)?;
        if got < whole {
            write(&number, before)?;
            return Err(Error::State(format!(
                "the guest has memory for {} of {pages} huge pages of {page}: they are part of its memory, so raise the \
                 memory limit to include them",
                got.saturating_sub(before)
            )));
        }
        Ok(Reservation { number, pages })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let _alone = CHANGING.locked();
        let smaller =
            settled(&self.number).and_then(|all| write(&self.number, all.saturating_sub(self.pages)));
        if let Err(e) = smaller {
            warning!("{e}");
        }
    }
}

/// The number that was last written to a pool's file.
fn settled(number: &Path) -> Result<u64> {
    let all = read(number)?;
    match number.ends_with(KEPT) {
        true => Ok(all.saturating_sub(read(&number.with_file_name(SURPLUS))?)),
        false => Ok(all),
    }
}

fn read(number: &Path) -> Result<u64> {
    let what = || format!("read {}", number.display());
    let text = fs::read_to_string(number).with_context(what)?;
    let pages = text.trim().parse();
    pages.map_err(|_| Error::Invalid(format!("{}: {text:?} is not a number", number.display())))
}

fn write(number: &Path, pages: u64) -> Result<()> {
    fs::write(number, pages.to_string()).with_context(|| format!("write {pages} to {}", number.display()))
}

/// Parses a size as in OCI's `pageSize` (`2MB`) or in mount options (`2M`, `2097152`). Returns bytes, at least
/// one.
fn bytes(text: &str) -> Result<u64> {
    let short = text.strip_suffix('B').unwrap_or(text);
    let digits = short.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &short[digits.len()..] {
        "" => Some(0),
        "K" | "k" => Some(10),
        "M" | "m" => Some(20),
        "G" | "g" => Some(30),
        _ => None,
    };
    let number = digits.parse::<u64>().ok();
    let size = shift.and_then(|shift| number?.checked_mul(1 << shift));
    size.filter(|size| *size > 0)
        .ok_or_else(|| Error::Invalid(format!("{text:?} is not a huge page size")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_oci_and_of_mount_options() {
        for (text, size) in [
            ("2MB", 2 << 20),
            ("2M", 2 << 20),
            ("2097152", 2 << 20),
            ("1GB", 1 << 30),
            ("64KB", 64 << 10),
        ] {
            assert_eq!(bytes(text).unwrap(), size, "{text}");
        }
        for bad in [
            "",
            "B",
            "MB",
            "0MB",
            "2TB",
            "-2MB",
            "2 MB",
            "99999999999999999999",
            "18446744073709551615G",
        ] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pool_size_follows_reservations() {
        let pools = tempfile::tempdir().unwrap();
        let pool = pools.path().join("hugepages-2048kB");
        fs::create_dir(&pool).unwrap();
        let (pool, surplus) = (pool.join(KEPT), pool.join(SURPLUS));
        fs::write(&pool, "3\n").unwrap();
        fs::write(&surplus, "0\n").unwrap();
        let one = Reservation::new(pools.path(), KEPT, "2MB", 5 << 20).unwrap();
        assert_eq!(read(&pool).unwrap(), 6);
        let other = Reservation::new(pools.path(), KEPT, "2MB", 2 << 20).unwrap();
        drop(one);
        assert_eq!(read(&pool).unwrap(), 4);
        // Of these four, one page was allocated on demand.
        fs::write(&surplus, "1\n").unwrap();
        drop(other);
        assert_eq!(read(&pool).unwrap(), 2);
        let none = Reservation::new(pools.path(), KEPT, "1GB", 1 << 30).unwrap_err();
        assert!(none.to_string().contains("1GB"), "{none}");
    }

    #[test]
    fn huge_page_options_without_a_valid_size_are_refused() {
        for bad in [&["size=2M"][..], &["pagesize=2M,size=x"], &["pagesize=2T"], &[]] {
            let options: Vec<_> = bad.iter().map(|o| (*o).to_owned()).collect();
            assert!(of_options(&options).is_err(), "{bad:?}");
        }
    }
}
