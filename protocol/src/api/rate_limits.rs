//! Rate limits of a sandbox's disks and network.
//!
//! Each limit is a token bucket: it permits a steady rate, and a burst after a pause.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};

/// Valid rates and bursts of bytes.
pub const RATE_BYTES: RangeInclusive<u64> = 4096..=1 << 40;
/// Valid rates and bursts of operations.
pub const RATE_OPS: RangeInclusive<u64> = 1..=1_000_000_000;

/// A sandbox's rate limits. In a new sandbox, an absent limit is unlimited; in a change, it keeps its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RateLimits {
    /// Reads and writes of the writable layer, and of each block device of the host; not of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<RateLimit>,
    /// What the sandbox sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_out: Option<RateLimit>,
    /// What the sandbox receives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_in: Option<RateLimit>,
}

/// A rate limit. In a change, an empty object removes the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// Bytes per second. For a network, bytes of frames.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "amount")]
    #[cfg_attr(feature = "openapi", schema(minimum = 4096, maximum = 1099511627776u64))]
    pub bytes_per_s: Option<u64>,
    /// Burst in bytes. The bytes of one second if absent.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "amount")]
    #[cfg_attr(feature = "openapi", schema(minimum = 4096, maximum = 1099511627776u64))]
    pub burst_bytes: Option<u64>,
    /// Extra bytes that are permitted once.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "amount")]
    #[cfg_attr(feature = "openapi", schema(minimum = 4096, maximum = 1099511627776u64))]
    pub once_bytes: Option<u64>,
    /// Disk requests or network frames per second. A frame that the guest leaves to the host to segment
    /// counts as one.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "amount")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 1000000000))]
    pub ops_per_s: Option<u64>,
    /// Burst in operations. The operations of one second if absent.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "amount")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 1000000000))]
    pub burst_ops: Option<u64>,
    /// Extra operations that are permitted once.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "amount")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 1000000000))]
    pub once_ops: Option<u64>,
}

impl RateLimits {
    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        let RateLimits {
            disk,
            net_out,
            net_in,
        } = self;
        disk.is_none() && net_out.is_none() && net_in.is_none()
    }

    /// These limits with a change applied.
    pub fn changed(self, change: RateLimits) -> RateLimits {
        let either = |before: Option<RateLimit>, after: Option<RateLimit>| {
            after.or(before).filter(|limit| *limit != RateLimit::default())
        };
        RateLimits {
            disk: either(self.disk, change.disk),
            net_out: either(self.net_out, change.net_out),
            net_in: either(self.net_in, change.net_in),
        }
    }

    /// Checks all values.
    ///
    /// # Errors
    /// Names the invalid field and its valid range.
    pub fn check(&self) -> Result<(), String> {
        let limits = [
            ("disk", &self.disk),
            ("net_out", &self.net_out),
            ("net_in", &self.net_in),
        ];
        for (name, limit) in limits {
            if let Some(limit) = limit {
                limit.check().map_err(|why| format!("rate_limits.{name}.{why}"))?;
            }
        }
        Ok(())
    }
}

impl RateLimit {
    fn check(&self) -> Result<(), String> {
        let fields = [
            (
                "bytes_per_s",
                self.bytes_per_s,
                "bytes_per_s",
                self.bytes_per_s,
                RATE_BYTES,
            ),
            (
                "burst_bytes",
                self.burst_bytes,
                "bytes_per_s",
                self.bytes_per_s,
                RATE_BYTES,
            ),
            (
                "once_bytes",
                self.once_bytes,
                "bytes_per_s",
                self.bytes_per_s,
                RATE_BYTES,
            ),
            ("ops_per_s", self.ops_per_s, "ops_per_s", self.ops_per_s, RATE_OPS),
            ("burst_ops", self.burst_ops, "ops_per_s", self.ops_per_s, RATE_OPS),
            ("once_ops", self.once_ops, "ops_per_s", self.ops_per_s, RATE_OPS),
        ];
        for (name, value, needs, rate, range) in fields {
            let Some(value) = value else { continue };
            if !range.contains(&value) {
                return Err(format!("{name} is {} to {}", range.start(), range.end()));
            }
            if rate.is_none() {
                return Err(format!("{name} goes with {needs}"));
            }
        }
        Ok(())
    }
}

/// Accepts any number and clamps it to `u64`, so that [`RateLimits::check`] can report the field's name and
/// range, which a deserializer does not know.
fn amount<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    struct Amount;

    impl<'de> Visitor<'de> for Amount {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a whole number")
        }

        fn visit_none<E>(self) -> Result<Option<u64>, E> {
            Ok(None)
        }

        fn visit_unit<E>(self) -> Result<Option<u64>, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<u64>, D::Error> {
            deserializer.deserialize_any(self)
        }

        fn visit_u64<E>(self, value: u64) -> Result<Option<u64>, E> {
            Ok(Some(value))
        }

        fn visit_i64<E>(self, value: i64) -> Result<Option<u64>, E> {
            Ok(Some(u64::try_from(value).unwrap_or(0)))
        }

        fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Option<u64>, E> {
            match value {
                // JSON numbers beyond 64 bits arrive as floats.
                v if v >= u64::MAX as f64 => Ok(Some(u64::MAX)),
                v if v <= i64::MIN as f64 => Ok(Some(0)),
                v => Err(E::invalid_value(serde::de::Unexpected::Float(v), &self)),
            }
        }
    }

    deserializer.deserialize_option(Amount)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(bytes_per_s: Option<u64>, ops_per_s: Option<u64>) -> Option<RateLimit> {
        Some(RateLimit {
            bytes_per_s,
            ops_per_s,
            ..RateLimit::default()
        })
    }

    #[test]
    fn change_replaces_what_it_names_and_an_empty_limit_lifts() {
        let before = RateLimits {
            disk: limit(Some(8192), Some(5)),
            net_out: limit(Some(4096), None),
            net_in: None,
        };
        let change = RateLimits {
            disk: limit(None, Some(7)),
            net_out: Some(RateLimit::default()),
            net_in: limit(Some(5000), None),
        };
        let after = before.changed(change);
        assert_eq!(after.disk, limit(None, Some(7)));
        assert_eq!(after.net_out, None);
        assert_eq!(after.net_in, limit(Some(5000), None));
        assert_eq!(before.changed(RateLimits::default()), before);
    }

    #[test]
    fn check_names_the_field_that_cannot_be() {
        let refused = |limits: RateLimits| limits.check().unwrap_err();
        let disk = |limit| RateLimits {
            disk: limit,
            ..RateLimits::default()
        };
        for zero in [0, 4095, u64::MAX, (1 << 40) + 1] {
            assert_eq!(
                refused(disk(limit(Some(zero), None))),
                "rate_limits.disk.bytes_per_s is 4096 to 1099511627776"
            );
        }
        let net_in = RateLimits {
            net_in: limit(None, Some(0)),
            ..RateLimits::default()
        };
        assert_eq!(refused(net_in), "rate_limits.net_in.ops_per_s is 1 to 1000000000");
        let burst = RateLimit {
            burst_ops: Some(3),
            ..RateLimit::default()
        };
        let net_out = RateLimits {
            net_out: Some(burst),
            ..RateLimits::default()
        };
        assert_eq!(
            refused(net_out),
            "rate_limits.net_out.burst_ops goes with ops_per_s"
        );
        assert_eq!(disk(limit(Some(4096), Some(1))).check(), Ok(()));
        assert_eq!(RateLimits::default().check(), Ok(()));
    }
}
