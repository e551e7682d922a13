//! Sizes in bytes, formatted for people.

use std::fmt;

/// A number of bytes, shown in binary units.
#[derive(Clone, Copy, Debug)]
pub struct HumanBytes(pub u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut shown = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while shown >= 1024.0 {
            shown /= 1024.0;
            unit += 1;
        }
        write!(f, "{shown:.2} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_binary_units() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (5 << 30, "5.00 GiB"),
            (u64::MAX, "16.00 EiB"),
        ] {
            assert_eq!(HumanBytes(bytes).to_string(), shown);
        }
    }
}
