//! Times of RFC 3339 with up to nine digits of a second, as Go writes them in tables of contents, and as people name them.
//!
//! Hand-written: this is one format, and its text comes from registries. The crates `time`, `chrono` and `jiff` parse many formats, which
//! is more code that a hostile registry could reach.

use thaw_imagefs::tree::Timestamp;

const DAY: i64 = 86400;
/// Nanoseconds.
const SECOND: u64 = 1_000_000_000;

/// Days from the epoch to a date of the proleptic Gregorian calendar. Years are counted from March, so that the leap
/// day is a year's last, in eras of 400 years, which all have the same number of days.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month and day of a number of days after the epoch.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    (year, month, of_year - (153 * shifted + 2) / 5 + 1)
}

/// Reads `YYYY-MM-DDTHH:MM:SS[.FRACTION](Z|±HH:MM)`; digits after nanoseconds are dropped.
pub fn parse(text: &[u8]) -> Option<Timestamp> {
    let number = |range: std::ops::Range<usize>| {
        text.get(range)?.iter().try_fold(0i64, |value, digit| {
            digit
                .is_ascii_digit()
                .then(|| value * 10 + i64::from(digit - b'0'))
        })
    };
    let is = |at: usize, byte: u8| (text.get(at) == Some(&byte)).then_some(());
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    is(4, b'-')?;
    is(7, b'-')?;
    is(10, b'T')?;
    is(13, b':')?;
    is(16, b':')?;
    // An invalid date converts to another date.
    let day_number = days(year, month, day);
    let in_day = hour < 24 && minute < 60 && second < 60;
    if !(1..=12).contains(&month) || date(day_number) != (year, month, day) || !in_day {
        return None;
    }
    let mut at = 19;
    let mut nanoseconds = 0;
    if is(at, b'.').is_some() {
        let digits = text[at + 1..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        if digits == 0 {
            return None;
        }
        let digit = |index: usize| {
            if index < digits {
                u32::from(text[at + 1 + index] - b'0')
            } else {
                0
            }
        };
        nanoseconds = (0..9).fold(0, |value, index| value * 10 + digit(index));
        at += 1 + digits;
    }
    let offset = match text.get(at..)? {
        b"Z" => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) = (number(at + 1..at + 3)?, number(at + 4..at + 6)?);
            if hours > 24 || minutes > 59 {
                return None;
            }
            (hours * 3600 + minutes * 60) * if *sign == b'+' { 1 } else { -1 }
        }
        _ => return None,
    };
    Some(Timestamp {
        seconds: day_number * DAY + hour * 3600 + minute * 60 + second - offset,
        nanoseconds,
    })
}

/// Writes a time in UTC, without trailing zeros; `None` if the year does not have four digits.
pub fn format(time: Timestamp) -> Option<String> {
    let (year, month, day) = date(time.seconds.div_euclid(DAY));
    if !(0..=9999).contains(&year) || time.nanoseconds >= 1_000_000_000 {
        return None;
    }
    let of_day = time.seconds.rem_euclid(DAY);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let mut text = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    if time.nanoseconds > 0 {
        let fraction = format!(".{:09}", time.nanoseconds);
        text.push_str(fraction.trim_end_matches('0'));
    }
    text.push('Z');
    Some(text)
}

/// As [`parse`], in nanoseconds since the Unix epoch; `None` also for a time before it or after the year 2554.
pub fn parse_nanoseconds(text: &str) -> Option<u64> {
    let time = parse(text.as_bytes())?;
    let seconds = u64::try_from(time.seconds).ok()?;
    seconds.checked_mul(SECOND)?.checked_add(time.nanoseconds.into())
}

/// Nanoseconds since the Unix epoch as a time in UTC, always with nine decimals.
pub fn format_nanoseconds(at: u64) -> String {
    let time = Timestamp {
        seconds: (at / SECOND) as i64,
        nanoseconds: 0,
    };
    let whole = format(time).unwrap_or_default();
    format!("{}.{:09}Z", whole.trim_end_matches('Z'), at % SECOND)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: i64, nanoseconds: u32) -> Option<Timestamp> {
        Some(Timestamp { seconds, nanoseconds })
    }

    #[test]
    fn known_times() {
        for (text, time) in [
            ("1970-01-01T00:00:00Z", at(0, 0)),
            ("0001-01-01T00:00:00Z", at(-62_135_596_800, 0)),
            ("2024-02-29T12:34:56.000000001Z", at(1_709_210_096, 1)),
            ("1969-12-31T23:59:58.75Z", at(-2, 750_000_000)),
            ("9999-12-31T23:59:59Z", at(253_402_300_799, 0)),
        ] {
            assert_eq!(parse(text.as_bytes()), time, "{text}");
            assert_eq!(time.and_then(format).as_deref(), Some(text));
        }
        assert_eq!(parse(b"1970-01-01T02:00:00+02:00"), at(0, 0));
        assert_eq!(parse(b"1969-12-31T22:30:00.1234567899-01:30"), at(0, 123_456_789));
        assert_eq!(
            format(Timestamp {
                seconds: 253_402_300_800,
                nanoseconds: 0
            }),
            None
        );
        for wrong in [
            "",
            "Z",
            "2023-02-29T00:00:00Z",
            "2024-13-01T00:00:00Z",
            "2024-00-10T00:00:00Z",
            "2024-01-01T24:00:00Z",
            "2024-01-01T00:00:00",
            "2024-01-01T00:00:00.Z",
            "2024-01-01 00:00:00Z",
            "2024-01-01T00:00:00Zx",
            "2024-01-01T00:00:00+0100",
            "+024-01-01T00:00:00Z",
            "2024-01-0éT00:00:00Z",
        ] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn nanoseconds_are_read_as_they_were_written(at: u64) {
            let text = format_nanoseconds(at);
            prop_assert_eq!((parse_nanoseconds(&text), text.len()), (Some(at), 30));
        }

        #[test]
        fn text_and_back(seconds in -62_167_219_200i64..253_402_300_800, nanoseconds in 0u32..1_000_000_000) {
            let time = Timestamp { seconds, nanoseconds };
            let text = format(time).unwrap();
            prop_assert_eq!(parse(text.as_bytes()), Some(time));
        }

        #[test]
        fn any_seconds_have_an_answer(seconds in any::<i64>()) {
            let _ = format(Timestamp { seconds, nanoseconds: 0 });
        }
    }
}
