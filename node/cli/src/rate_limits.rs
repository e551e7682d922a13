//! The rate limits of `thaw run` and `thaw thaw`, and `thaw limit`, which changes those of a running sandbox.

use std::ops::RangeInclusive;

use clap::Args;
use thaw_protocol::api::{ChangeSandbox, RATE_BYTES, RATE_OPS, RateLimit, RateLimits};
use thaw_sandbox::error::{Error, ErrorKind};

use super::running::Owner;
use super::size::ByteSize;

/// A rate with a burst, or no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance(Option<(u64, Option<u64>)>);

/// Rate limits of a sandbox's disks and network.
#[derive(Clone, Debug, Default, Args)]
pub struct RateLimitArguments {
    /// Bytes read and written per second, of the writable layer and of each block device of the host: bytes, or with k, m, g.
    /// BURST is the most at once after a pause [default: one second's]; `none` for no limit
    #[arg(long, value_name = "RATE[:BURST]", value_parser = parse_bytes)]
    pub disk_bps: Option<Allowance>,
    /// Requests per second to each of these disks
    #[arg(long, value_name = "RATE[:BURST]", value_parser = parse_operations)]
    pub disk_iops: Option<Allowance>,
    /// Bytes sent to the network per second
    #[arg(long, value_name = "RATE[:BURST]", value_parser = parse_bytes)]
    pub net_out_bps: Option<Allowance>,
    /// Frames sent per second; a frame that the host cuts into packets for the guest counts as one
    #[arg(long, value_name = "RATE[:BURST]", value_parser = parse_operations)]
    pub net_out_pps: Option<Allowance>,
    /// Bytes received from the network per second
    #[arg(long, value_name = "RATE[:BURST]", value_parser = parse_bytes)]
    pub net_in_bps: Option<Allowance>,
    /// Frames received per second
    #[arg(long, value_name = "RATE[:BURST]", value_parser = parse_operations)]
    pub net_in_pps: Option<Allowance>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw limit web --disk-bps 20m:100m --disk-iops 500 --net-out-bps 1m\n  thaw limit web --net-out-bps none"
)]
pub struct ChangeRateLimits {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    #[command(flatten)]
    pub limits: RateLimitArguments,
}

impl RateLimitArguments {
    /// The limits of the flags; a limit without a flag is as in `before`.
    pub(super) fn over(&self, before: RateLimits) -> RateLimits {
        RateLimits {
            disk: over(before.disk, self.disk_bps, self.disk_iops),
            net_out: over(before.net_out, self.net_out_bps, self.net_out_pps),
            net_in: over(before.net_in, self.net_in_bps, self.net_in_pps),
        }
    }

    /// The limits of a new sandbox.
    pub(super) fn limits(&self) -> RateLimits {
        // An empty limit is none.
        RateLimits::default().changed(self.over(RateLimits::default()))
    }
}

/// `None` without a flag.
fn over(
    before: Option<RateLimit>,
    bytes: Option<Allowance>,
    operations: Option<Allowance>,
) -> Option<RateLimit> {
    if bytes.is_none() && operations.is_none() {
        return None;
    }
    let mut limit = before.unwrap_or_default();
    if let Some(Allowance(bytes)) = bytes {
        limit.bytes_per_s = bytes.map(|(rate, _)| rate);
        (limit.burst_bytes, limit.once_bytes) = (bytes.and_then(|(_, burst)| burst), None);
    }
    if let Some(Allowance(operations)) = operations {
        limit.ops_per_s = operations.map(|(rate, _)| rate);
        (limit.burst_ops, limit.once_ops) = (operations.and_then(|(_, burst)| burst), None);
    }
    Some(limit)
}

/// `thaw limit`.
pub(super) async fn change(arguments: &ChangeRateLimits) -> Result<u8, Error> {
    let owner = Owner::find(&arguments.sandbox)?;
    let before = owner.client.get(&owner.id).await?.rate_limits;
    let rate_limits = arguments.limits.over(before);
    if rate_limits.is_none() {
        return Err(Error::new(ErrorKind::Runtime, "no limit is named").remedy("see `thaw limit --help`"));
    }
    let change = ChangeSandbox {
        rate_limits,
        ..ChangeSandbox::default()
    };
    owner.client.change(&owner.id, &change).await?;
    Ok(0)
}

fn parse_bytes(text: &str) -> Result<Allowance, String> {
    let number = |text: &str| text.parse().map(ByteSize::bytes);
    parse(text, RATE_BYTES, number)
}

fn parse_operations(text: &str) -> Result<Allowance, String> {
    let number = |text: &str| text.parse().map_err(|_| "write a whole number".to_owned());
    parse(text, RATE_OPS, number)
}

fn parse(
    text: &str,
    range: RangeInclusive<u64>,
    number: impl Fn(&str) -> Result<u64, String>,
) -> Result<Allowance, String> {
    if text == "none" {
        return Ok(Allowance(None));
    }
    let number = |text: &str| {
        let number = number(text)?;
        match range.contains(&number) {
            true => Ok(number),
            false => Err(format!("it is {} to {}", range.start(), range.end())),
        }
    };
    let (rate, burst) = match text.split_once(':') {
        Some((rate, burst)) => (rate, Some(number(burst)?)),
        None => (text, None),
    };
    Ok(Allowance(Some((number(rate)?, burst))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowances_are_rates_and_bursts_in_range() {
        assert_eq!(parse_bytes("10m"), Ok(Allowance(Some((10 << 20, None)))));
        assert_eq!(parse_bytes("4k:1g"), Ok(Allowance(Some((4096, Some(1 << 30))))));
        assert_eq!(parse_operations("5:9"), Ok(Allowance(Some((5, Some(9))))));
        assert_eq!(parse_operations("none"), Ok(Allowance(None)));
        for bad in [
            "", "0", "-1", "4095", "10m:", ":10m", "10m:0", "2t", "10m:1:1", "fast",
        ] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        for bad in ["0", "-5", "1k", "1000000001", "1.5"] {
            assert!(parse_operations(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn flags_change_what_they_name_and_nothing_else() {
        let before = RateLimits {
            disk: Some(RateLimit {
                bytes_per_s: Some(1 << 20),
                burst_bytes: Some(1 << 22),
                ops_per_s: Some(7),
                ..RateLimit::default()
            }),
            ..RateLimits::default()
        };
        let flags = RateLimitArguments {
            disk_bps: Some(Allowance(None)),
            net_in_pps: Some(Allowance(Some((9, Some(2))))),
            ..RateLimitArguments::default()
        };
        let after = before.changed(flags.over(before));
        let operations = |rate, burst| {
            Some(RateLimit {
                ops_per_s: Some(rate),
                burst_ops: burst,
                ..RateLimit::default()
            })
        };
        assert_eq!(after.disk, operations(7, None));
        assert_eq!((after.net_out, after.net_in), (None, operations(9, Some(2))));
        let all = RateLimitArguments {
            disk_iops: Some(Allowance(None)),
            ..flags
        };
        assert_eq!(before.changed(all.over(before)).disk, None);
        assert_eq!(all.limits().disk, None);
        assert!(RateLimitArguments::default().limits().is_none());
    }
}
