//! What `make bench-devices` measures: disk, network, volume and vsock of one guest, under thaw-vmm and under QEMU's microvm in turn; and
//! the output of a command in a container.
//!
//! The guest is Thaw's kernel with `bench-guest-devices` as PID 1. It does the same under both, and says on its console what it measured.
//! Both have the same disk and the same directory, and taps that are alike.
//!
//! | module | holds |
//! |---|---|
//! | [`setting`] | what both use, and the server that the guest talks to |
//! | [`thaw`], [`qemu`] | the guest under each |
//! | [`transfer`] | how guest and server exchange bytes |
//! | [`stdout`] | a command's output |

pub mod qemu;
pub mod setting;
pub mod stdout;
pub mod thaw;
pub mod transfer;

use std::io::{self, BufRead, BufReader, Read};
use std::net::SocketAddrV4;

use serde::{Deserialize, Serialize};
use thaw_protocol::handshake::Network;

use crate::Report;

/// What the guest writes before each measurement: `WHAT|UNIT|VALUE` follows.
pub const RESULT: &str = "result ";
/// What the guest writes last.
pub const END: &str = "measured all";
/// The guest's disk. Under QEMU it begins with the guest's root, whose place is left free under thaw-vmm.
pub const DISK: &str = "/dev/vda";
/// Where the disk has the [`Order`], as JSON that zeros follow: behind the largest root.
pub const ORDER_AT: u64 = 8 << 20;
pub const ORDER_BYTES: usize = 4096;
/// The part of the disk that is read and written.
pub const AREA_AT: u64 = 16 << 20;
pub const AREA_BYTES: u64 = 256 << 20;
/// The entry of the volume, and its file.
pub const VOLUME: &str = "data";
pub const VOLUME_FILE: &str = "file";
pub const VOLUME_BYTES: u64 = 64 << 20;
/// Bytes of a read or write of disk or volume.
pub const BLOCK: usize = 4096;

pub const DISK_READS: &str = "random reads of the disk";
pub const DISK_WRITES: &str = "random writes of the disk";
pub const DISK_BOTH: &str = "random reads and writes of the disk";
pub const VOLUME_WRITES: &str = "random buffered writes of a volume";
pub const NET_OUT: &str = "TCP out";
pub const NET_IN: &str = "TCP in";
pub const VSOCK_OUT: &str = "vsock out";
pub const VSOCK_IN: &str = "vsock in";

/// What the guest is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    pub rounds: usize,
    pub network: Network,
    pub server: SocketAddrV4,
    /// Whether there is a volume.
    pub volume: bool,
}

/// Takes what the guest says on its console until it has measured all. `vmm` is the name in rows.
///
/// # Errors
/// The guest's last lines, if it ends before.
pub fn collect(console: impl Read, vmm: &str, report: &mut Report) -> io::Result<()> {
    let mut said = Vec::new();
    for line in BufReader::new(console).lines() {
        let line = line?;
        let line = line.trim_end();
        eprintln!("{vmm}: {line}");
        if line == END {
            return Ok(());
        }
        match line.strip_prefix(RESULT).map(parts) {
            Some(Some((what, unit, value))) => report.sample(&row(what, vmm), unit, value),
            _ => said.push(line.to_owned()),
        }
    }
    Err(io::Error::other(format!(
        "the guest ended before it had measured all: {}",
        said.join("\n")
    )))
}

/// The name of a row.
pub fn row(what: &str, vmm: &str) -> String {
    format!("{what}: {vmm}")
}

fn parts(result: &str) -> Option<(&str, &str, f64)> {
    let mut parts = result.split('|');
    let (what, unit) = (parts.next()?, parts.next()?);
    Some((what, unit, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_become_samples_until_the_end() {
        let console =
            format!("booting\r\n{RESULT}a|op/s|2.5\r\n{RESULT}a|op/s|3.5\r\n{END}\r\n{RESULT}a|op/s|9\n");
        let mut report = Report::new("x");
        collect(console.as_bytes(), "thaw", &mut report).unwrap();
        assert_eq!(report.percentile(("a: thaw", 100.0)), Ok(3.5));
    }

    #[test]
    fn guest_that_ends_early_is_an_error_with_its_last_lines() {
        let console = format!("{RESULT}a|op/s|2.5\nguest-devices: no disk\n");
        let error = collect(console.as_bytes(), "thaw", &mut Report::new("x")).unwrap_err();
        assert!(error.to_string().contains("no disk"), "{error}");
    }
}
