//! Sizes of memory and disks, as `docker run --memory` takes them.

use std::fmt;
use std::str::FromStr;

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(u64);

impl ByteSize {
    /// In MiB, rounded up.
    pub fn mebibytes(self) -> u32 {
        u32::try_from(self.0.div_ceil(1 << 20)).unwrap_or(u32::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    /// A number, then nothing or `b` (bytes), `k`, `m`, `g` or `t` (powers of 1024), also as `kb` or `kib`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || "write a number with k, m or g, as in 512m".to_owned();
        let lower = text.trim().to_ascii_lowercase();
        let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
        let (number, unit) = lower.split_at(digits);
        let number: u64 = number.parse().map_err(|_| bad())?;
        let shift = match unit {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        number.checked_mul(1 << shift).map(ByteSize).ok_or_else(bad)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}m", self.mebibytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_dockers() {
        let mib = |text: &str| text.parse::<ByteSize>().map(ByteSize::mebibytes);
        assert_eq!(mib("512m"), Ok(512));
        assert_eq!(mib("1G"), Ok(1024));
        assert_eq!(mib("2GiB"), Ok(2048));
        assert_eq!(mib("134217728"), Ok(128));
        assert_eq!(mib("1"), Ok(1), "rounded up");
        assert!(mib("999999999999t").is_err());
        for bad in ["", "m", "1.5g", "-1m", "1x", "99999999999999999999"] {
            assert!(mib(bad).is_err(), "{bad}");
        }
        assert!(mib("16777216t").is_err(), "overflow is an error");
    }
}
