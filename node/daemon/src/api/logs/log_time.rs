//! Times in requests and lines of output.

use thaw_images::index::rfc3339;

const SECOND: u64 = 1_000_000_000;

/// Reads a moment: seconds since the Unix epoch with up to nine decimals, or a time of RFC 3339. Returns nanoseconds since the Unix epoch.
pub fn parse_moment(text: &str) -> Option<u64> {
    rfc3339::parse_nanoseconds(text).or_else(|| {
        let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !is_number(seconds) || !is_number(fraction) || fraction.len() > 9 {
            return None;
        }
        let nanoseconds = format!("{fraction:0<9}").parse::<u64>().ok()?;
        seconds
            .parse::<u64>()
            .ok()?
            .checked_mul(SECOND)?
            .checked_add(nanoseconds)
    })
}

/// A moment as [`parse_moment`] reads it: seconds and nine decimals.
pub fn format_moment(at: u64) -> String {
    format!("{}.{:09}", at / SECOND, at % SECOND)
}

/// Puts the time of arrival before each line, as docker does. `begins` is whether `data` begins a line; afterwards, whether the next data
/// does.
pub(super) fn stamped(at: u64, data: &[u8], begins: &mut bool) -> Vec<u8> {
    let mut all = Vec::with_capacity(data.len() + 32);
    for line in data.split_inclusive(|b| *b == b'\n') {
        if *begins {
            all.extend_from_slice(stamp(at).as_bytes());
            all.push(b' ');
        }
        all.extend_from_slice(line);
        *begins = line.ends_with(b"\n");
    }
    all
}

/// The time in UTC with nine decimals; `-` if it is unknown.
fn stamp(at: u64) -> String {
    match at {
        0 => "-".into(),
        at => rfc3339::format_nanoseconds(at),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn moments_are_numbers_or_times() {
        for (text, at) in [
            ("0", Some(0)),
            ("1.5", Some(1_500_000_000)),
            ("1.000000001", Some(1_000_000_001)),
            ("1970-01-01T00:00:02.25Z", Some(2_250_000_000)),
            ("1970-01-01T01:00:02+01:00", Some(2_000_000_000)),
            ("", None),
            (".5", None),
            ("1.", None),
            ("1.0000000001", None),
            ("-1", None),
            ("99999999999999999999", None),
            ("1960-01-01T00:00:00Z", None),
            ("yesterday", None),
        ] {
            assert_eq!(parse_moment(text), at, "{text}");
        }
    }

    #[test]
    fn each_line_gets_the_time_of_its_first_byte() {
        let mut begins = true;
        let first = stamped(1_000_000_000, b"a\nb", &mut begins);
        let second = stamped(2_000_000_000, b"c\n\nd", &mut begins);
        assert_eq!(
            String::from_utf8([first, second].concat()).unwrap(),
            "1970-01-01T00:00:01.000000000Z a\n1970-01-01T00:00:01.000000000Z bc\n\
             1970-01-01T00:00:02.000000000Z \n1970-01-01T00:00:02.000000000Z d"
        );
        let mut begins = true;
        assert_eq!(stamped(0, b"x", &mut begins), b"- x");
    }

    proptest! {
        #[test]
        fn moment_is_read_as_it_was_written(at: u64) {
            prop_assert_eq!(parse_moment(&format_moment(at)), Some(at));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = parse_moment(&text);
        }
    }
}
