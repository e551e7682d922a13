//! Sizes of memory and disks in the syntax of `docker run --memory`, and CPU limits in that of `docker run --cpus`.

use std::fmt;
use std::str::FromStr;

use thaw_protocol::api::CPU_LIMIT_MILLIS;

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(u64);

impl ByteSize {
    /// In bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }

    /// In MiB, rounded up.
    pub fn mebibytes(self) -> u32 {
        u32::try_from(self.0.div_ceil(1 << 20)).unwrap_or(u32::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    /// A number, followed by nothing or `b` (bytes), `k`, `m`, `g` or `t` (powers of 1024), or forms such as `kb` and `kib`.
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

/// A limit of CPU time, within [`CPU_LIMIT_MILLIS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuLimit(u32);

impl CpuLimit {
    /// In thousandths of a CPU.
    pub fn millis(self) -> u32 {
        self.0
    }
}

impl FromStr for CpuLimit {
    type Err = String;

    /// A number of CPUs with at most three decimals.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            let [least, most] =
                [CPU_LIMIT_MILLIS.start(), CPU_LIMIT_MILLIS.end()].map(|m| f64::from(*m) / 1e3);
            format!("write a number of CPUs, {least} to {most}, with at most three decimals, as in 0.5")
        };
        let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(part) || part.len() > 3 {
            return Err(bad());
        }
        let millis = format!("{whole}{part:0<3}").parse().map_err(|_| bad())?;
        match CPU_LIMIT_MILLIS.contains(&millis) {
            true => Ok(CpuLimit(millis)),
            false => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_limit_out_of_range_is_refused() {
        let millis = |text: &str| text.parse::<CpuLimit>().map(CpuLimit::millis);
        assert_eq!(millis("0.5"), Ok(500));
        assert_eq!(millis("2"), Ok(2000));
        assert_eq!(millis("0.01"), Ok(10));
        assert_eq!(millis("64.000"), Ok(64_000));
        for bad in [
            "",
            "0",
            "0.009",
            "-1",
            "64.001",
            "1e3",
            ".5",
            "1.",
            "0.0001",
            "inf",
            "NaN",
            "99999999999",
            "1,5",
        ] {
            let error = millis(bad).unwrap_err();
            assert!(error.contains("0.01 to 64"), "{bad}: {error}");
        }
    }

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
