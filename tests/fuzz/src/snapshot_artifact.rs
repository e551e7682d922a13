//! A snapshot in a registry: what its OCI manifest, config and chunk table say, and a pack for that table.

use std::fs::File;

use thaw_sandbox::snapshot::artifact::unpack::Placed;
use thaw_sandbox::snapshot::artifact::{Config, Listing, Table};

/// Largest file that is made: a table may say more.
const MAX_FILE: u64 = 1 << 30;

// One byte says which document; the rest is its bytes. Of a table with a pack, two bytes say where the pack begins.
pub fn run(input: &[u8]) {
    let [document, bytes @ ..] = input else { return };
    match document % 4 {
        0 => {
            if let Ok(listing) = Listing::decode(bytes) {
                assert_eq!(Listing::decode(&listing.encode()), Ok(listing));
            }
        }
        1 => {
            if let Ok(config) = Config::decode(bytes) {
                assert_eq!(Config::decode(&config.encode()), Ok(config));
            }
        }
        2 => {
            if let Ok(table) = Table::decode(bytes) {
                assert_eq!(table.encode(), bytes);
            }
        }
        _ => {
            let Some((at, rest)) = bytes.split_first_chunk() else {
                return;
            };
            let at = usize::from(u16::from_le_bytes(*at)).min(rest.len());
            let (table, pack) = rest.split_at(at);
            unpack(table, pack);
        }
    }
}

/// Unpacks the first pack of a table. Files keep their lengths.
fn unpack(table: &[u8], mut pack: &[u8]) {
    let Ok(table) = Table::decode(table) else { return };
    let sizes: Vec<u64> = table.files.iter().map(|file| file.bytes).collect();
    if sizes.iter().any(|size| *size > MAX_FILE) {
        return;
    }
    let files: Vec<File> = sizes
        .iter()
        .map(|size| {
            let file = tempfile::tempfile().expect("a file can be made");
            file.set_len(*size).expect("a file can be sized");
            file
        })
        .collect();
    drop(Placed::new(table).unpack(0, &mut pack, &files));
    for (file, size) in files.iter().zip(sizes) {
        assert_eq!(file.metadata().expect("it is open").len(), size);
    }
}
