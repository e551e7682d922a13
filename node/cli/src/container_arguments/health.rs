//! The flags of `thaw run` for the health check of its container, as docker writes them.

use clap::Args;
use thaw_sandbox::container::{HealthOptions, shell};

#[derive(Debug, Args)]
#[command(next_help_heading = "Health check of a detached container")]
pub struct HealthArguments {
    /// With --detach, run this line in the container's shell again and again; it is healthy while the line exits with 0
    /// [default: the image's check]
    #[arg(long, value_name = "LINE")]
    pub health_cmd: Option<String>,
    /// Time from the end of a check to the next: 500ms, 30s, 1m30s [default: the image's, or 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub health_interval: Option<u64>,
    /// Number of failures in a row after which it is unhealthy [default: the image's, or 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub health_retries: Option<u32>,
    /// How long a check may take [default: the image's, or 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub health_timeout: Option<u64>,
    /// For this time after a start, failures do not count [default: the image's, or 0s]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub health_start_period: Option<u64>,
    /// Do not check its health, even if the image has a check
    #[arg(long, conflicts_with_all = ["health_cmd", "health_interval", "health_retries", "health_timeout", "health_start_period"])]
    pub no_healthcheck: bool,
}

impl HealthArguments {
    pub(crate) fn options(&self) -> HealthOptions {
        HealthOptions {
            disabled: self.no_healthcheck,
            command: self.health_cmd.as_deref().map(shell),
            interval_ms: self.health_interval,
            timeout_ms: self.health_timeout,
            start_period_ms: self.health_start_period,
            retries: self.health_retries,
        }
    }
}

/// A sum of whole numbers with the units h, m, s and ms, in milliseconds.
pub(super) fn parse_time(text: &str) -> Result<u64, String> {
    let wrong = || "a time such as 500ms, 30s or 1m30s, at most 24h".to_owned();
    let (mut total, mut rest) = (0u64, text);
    while !rest.is_empty() {
        let unit = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let (number, after) = rest.split_at(unit);
        let end = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let milliseconds = match &after[..end] {
            "h" => 3_600_000,
            "m" => 60_000,
            "s" => 1000,
            "ms" => 1,
            _ => return Err(wrong()),
        };
        let part = number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(milliseconds));
        total = part.and_then(|part| total.checked_add(part)).ok_or_else(wrong)?;
        rest = &after[end..];
    }
    match !text.is_empty() && total <= 86_400_000 {
        true => Ok(total),
        false => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_sums_of_units_to_a_day() {
        for (text, milliseconds) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("1m30s", 90_000),
            ("24h", 86_400_000),
        ] {
            assert_eq!(parse_time(text), Ok(milliseconds), "{text}");
        }
        for wrong in [
            "",
            "5",
            "s",
            "5x",
            "1.5s",
            "-1s",
            "25h",
            "99999999999999999h",
            "5µs",
        ] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
