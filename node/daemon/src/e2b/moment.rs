//! Times in answers: RFC 3339 in UTC with milliseconds.

use std::time::{SystemTime, UNIX_EPOCH};

use thaw_images::index::rfc3339;

const SECOND_NS: u64 = 1_000_000_000;
/// The end of a sandbox without a timeout: the last second that every client can read.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Seconds since the Unix epoch, now.
pub fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs()
}

/// A time in nanoseconds since the Unix epoch.
pub fn of_nanoseconds(at: u64) -> String {
    // Without the last six of nine decimals, which not every client reads.
    let text = rfc3339::format_nanoseconds(at);
    match text.get(..text.len().saturating_sub(7)) {
        Some(shorter) => format!("{shorter}Z"),
        None => text,
    }
}

/// A time in seconds since the Unix epoch.
pub fn of_seconds(at: u64) -> String {
    of_nanoseconds(at.saturating_mul(SECOND_NS))
}

/// When a sandbox's time is over.
pub fn of_end(at: Option<u64>) -> String {
    at.map_or_else(|| NEVER.to_owned(), of_seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_milliseconds() {
        assert_eq!(of_seconds(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(
            of_nanoseconds(1_798_761_599_123_456_789),
            "2026-12-31T23:59:59.123Z"
        );
        assert_eq!(of_end(None), "9999-12-31T23:59:59Z");
    }
}
