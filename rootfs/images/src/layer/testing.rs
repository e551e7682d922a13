//! Tar archives for tests, block by block.

use std::io::Write;

use thaw_imagefs::tree::PAGE;

use super::tree::Extent;

/// A ustar header with a correct checksum.
pub fn header(name: &str, type_flag: u8, size: u64, link: &str) -> [u8; 512] {
    let mut block = [0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..108].copy_from_slice(b"0000644\0");
    block[108..116].copy_from_slice(b"0000000\0");
    block[116..124].copy_from_slice(b"0000000\0");
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[136..148].copy_from_slice(b"00000000017\0");
    block[156] = type_flag;
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    block
}

pub fn seal(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

pub fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(512), 0);
    padded
}

pub fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (1..)
            .find(|digits| (rest + digits).to_string().len() == *digits)
            .map(|digits| rest + digits)
            .unwrap();
        write!(body, "{length} {key}=").unwrap();
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    [&header("pax", b'x', body.len() as u64, "")[..], &padded(&body)].concat()
}

pub const END: [u8; 1024] = [0; 1024];

/// The bytes of a file whose extents are in `data`.
pub fn read_back(extents: &[Extent], data: &[u8], size: u64) -> Vec<u8> {
    let mut file = vec![0; size.next_multiple_of(PAGE) as usize];
    for extent in extents {
        let (from, to, length) = (
            extent.data_offset as usize,
            extent.file_offset as usize,
            extent.length as usize,
        );
        file[to..to + length].copy_from_slice(&data[from..from + length]);
    }
    file.truncate(size as usize);
    file
}
