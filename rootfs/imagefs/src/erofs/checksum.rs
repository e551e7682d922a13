//! The superblock's checksum: CRC-32C that starts with all ones and is not inverted at the end, like the kernel's `crc32c()`.

/// The checksum of `bytes`, computed bit by bit, because it is needed only once, for 3 KiB.
pub fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82F6_3B78;
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(crc & 1))
        })
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn check_value() {
        // RFC 3720 B.4 and the CRC catalogue's check value, which invert the result.
        assert_eq!(!super::crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(!super::crc32c(&[0; 32]), 0x8A91_36AA);
    }
}
