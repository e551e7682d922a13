//! Determines from an answer's head alone which bytes the answer holds.
//!
//! Invariant: if [`judge`] accepts an answer, the wanted bytes, or a beginning of them, follow after no more than the allowed number of
//! bytes to discard. An answer that names other bytes, or none, is refused.

use std::ops::Range;

use reqwest::StatusCode;
use reqwest::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName};

/// A `Content-Range`: `bytes FIRST-LAST/TOTAL`, TOTAL perhaps `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentRange {
    pub bytes: Range<u64>,
    pub total: Option<u64>,
}

impl ContentRange {
    pub fn parse(text: &str) -> Option<Self> {
        let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let bytes = number(first)?..number(last)?.checked_add(1)?;
        let total = match total {
            "*" => None,
            total => Some(number(total)?),
        };
        let fits = bytes.start < bytes.end && total.is_none_or(|total| bytes.end <= total);
        fits.then_some(Self { bytes, total })
    }
}

/// Digits only: `str::parse` also accepts a sign.
fn number(text: &str) -> Option<u64> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}

/// How the wanted bytes are cut out of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes before them.
    pub skip: u64,
    /// Number of these bytes; fewer than wanted if the server sends a part.
    pub take: u64,
}

/// The defect of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The server ignores ranges, and the wanted bytes are too far from the start.
    Whole,
    /// It contradicts the request or the blob.
    Lie(String),
}

/// What an endpoint may do.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Bytes before the wanted ones that may be discarded if the server sends the whole blob.
    pub skip: u64,
    /// Refuse answers without a `Content-Range`.
    pub strict: bool,
}

/// Judges an answer to a request for `wanted` of a blob of `size` bytes. The status is a success.
pub fn judge(
    status: StatusCode,
    headers: &HeaderMap,
    wanted: &Range<u64>,
    size: u64,
    terms: Terms,
) -> Result<Cut, Misfit> {
    let lie = |problem: String| Err(Misfit::Lie(problem));
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if let Some(encoding) = text(CONTENT_ENCODING).filter(|it| !it.eq_ignore_ascii_case("identity")) {
        return lie(format!("the body is encoded ({})", short(encoding)));
    }
    if text(CONTENT_TYPE).is_some_and(|it| it.to_ascii_lowercase().starts_with("multipart/byteranges")) {
        return lie("several ranges were sent where one was asked for".into());
    }
    if headers.get_all(CONTENT_RANGE).iter().count() > 1 {
        return lie("there is more than one Content-Range".into());
    }
    let length = text(CONTENT_LENGTH).map(number);
    match text(CONTENT_RANGE) {
        Some(range) if matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) => {
            let Some(sent) = ContentRange::parse(range) else {
                return lie(format!("its Content-Range is {:?}", short(range)));
            };
            if sent.total.is_some_and(|total| total != size) {
                return lie(format!(
                    "its Content-Range is {range:?} of a blob of {size} bytes"
                ));
            }
            if sent.bytes.start != wanted.start || sent.bytes.end > wanted.end {
                let last = wanted.end - 1;
                return lie(format!(
                    "its Content-Range is {range:?}, asked was {}-{last}",
                    wanted.start
                ));
            }
            let take = sent.bytes.end - sent.bytes.start;
            if length.is_some_and(|length| length != Some(take)) {
                return lie(format!(
                    "its Content-Range {range:?} and its Content-Length disagree"
                ));
            }
            Ok(Cut { skip: 0, take })
        }
        None if status == StatusCode::OK && !terms.strict => {
            if length.is_some_and(|length| length != Some(size)) {
                return lie(format!("its body is not the blob's {size} bytes"));
            }
            if wanted.start > terms.skip {
                return Err(Misfit::Whole);
            }
            Ok(Cut {
                skip: wanted.start,
                take: wanted.end - wanted.start,
            })
        }
        None if status == StatusCode::OK => Err(Misfit::Whole),
        None if status == StatusCode::PARTIAL_CONTENT => lie("it is a part, but does not say which".into()),
        _ => lie(format!("it has status {status}")),
    }
}

/// A server's words, of a length for messages.
fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TERMS: Terms = Terms {
        skip: 100,
        strict: false,
    };

    fn head(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()))
            .collect()
    }

    fn partial(range: &str) -> Result<Cut, Misfit> {
        let headers = head(&[(CONTENT_RANGE, range)]);
        judge(StatusCode::PARTIAL_CONTENT, &headers, &(200..300), 1000, TERMS)
    }

    #[test]
    fn a_range_that_was_asked_for_is_taken() {
        let whole = Cut { skip: 0, take: 100 };
        assert_eq!(partial("bytes 200-299/1000"), Ok(whole));
        assert_eq!(partial("bytes 200-299/*"), Ok(whole));
        assert_eq!(partial("bytes 200-249/1000"), Ok(Cut { skip: 0, take: 50 }));
    }

    #[test]
    fn a_lying_content_range_is_refused() {
        for range in [
            "bytes 201-299/1000",
            "bytes 100-299/1000",
            "bytes 200-300/1000",
            "bytes 200-299/999",
            "bytes 200-199/1000",
            "bytes 200-18446744073709551615/*",
            "bytes */1000",
            "bytes +200-299/1000",
            "bytes 200-299",
            "items 200-299/1000",
            "",
        ] {
            assert!(matches!(partial(range), Err(Misfit::Lie(_))), "{range}");
        }
    }

    #[test]
    fn a_part_that_does_not_say_which_is_refused() {
        let judged = judge(
            StatusCode::PARTIAL_CONTENT,
            &HeaderMap::new(),
            &(0..10),
            1000,
            TERMS,
        );
        assert!(matches!(judged, Err(Misfit::Lie(_))));
        let headers = head(&[(CONTENT_TYPE, "multipart/byteranges; boundary=x")]);
        let judged = judge(StatusCode::PARTIAL_CONTENT, &headers, &(0..10), 1000, TERMS);
        assert!(matches!(judged, Err(Misfit::Lie(_))));
    }

    #[test]
    fn a_whole_blob_is_cut_where_that_is_cheap() {
        let ok = |wanted: Range<u64>, length: &str, strict| {
            let headers = head(&[(CONTENT_LENGTH, length)]);
            judge(StatusCode::OK, &headers, &wanted, 1000, Terms { strict, ..TERMS })
        };
        assert_eq!(ok(50..60, "1000", false), Ok(Cut { skip: 50, take: 10 }));
        assert_eq!(ok(100..1000, "1000", false), Ok(Cut { skip: 100, take: 900 }));
        assert_eq!(ok(101..200, "1000", false), Err(Misfit::Whole));
        assert!(matches!(ok(0..10, "999", false), Err(Misfit::Lie(_))));
        assert_eq!(ok(0..10, "1000", true), Err(Misfit::Whole));
    }

    #[test]
    fn dragonfly_may_say_200_with_a_content_range() {
        let strict = Terms {
            strict: true,
            ..TERMS
        };
        let headers = head(&[(CONTENT_RANGE, "bytes 200-299/1000"), (CONTENT_LENGTH, "100")]);
        assert_eq!(
            judge(StatusCode::OK, &headers, &(200..300), 1000, strict),
            Ok(Cut { skip: 0, take: 100 })
        );
        assert!(judge(StatusCode::OK, &headers, &(201..300), 1000, strict).is_err());
    }

    #[test]
    fn an_encoded_body_is_refused() {
        let headers = head(&[(CONTENT_RANGE, "bytes 200-299/1000"), (CONTENT_ENCODING, "gzip")]);
        let judged = judge(StatusCode::PARTIAL_CONTENT, &headers, &(200..300), 1000, TERMS);
        assert!(matches!(judged, Err(Misfit::Lie(_))));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(start in 0..u64::MAX - 1, length in 1..u64::MAX, total in proptest::option::of(0..=u64::MAX)) {
            let end = start.saturating_add(length);
            let text = format!("bytes {start}-{}/{}", end - 1, total.map_or("*".into(), |it: u64| it.to_string()));
            let read = ContentRange::parse(&text);
            if total.is_some_and(|total| total < end) {
                prop_assert_eq!(read, None);
            } else {
                prop_assert_eq!(read, Some(ContentRange { bytes: start..end, total }));
            }
        }

        #[test]
        fn whatever_is_read_is_a_range(text in "(bytes )?[-0-9+*/ a-z]{0,40}") {
            if let Some(read) = ContentRange::parse(&text) {
                prop_assert!(read.bytes.start < read.bytes.end);
                prop_assert!(read.total.is_none_or(|total| read.bytes.end <= total));
            }
        }

        #[test]
        fn what_is_accepted_leads_to_the_wanted_bytes(
            partial in any::<bool>(), strict in any::<bool>(),
            sent in proptest::option::of((0u64..1000, 1u64..1000, proptest::option::of(900u64..1100))),
            length in proptest::option::of(0u64..1100), start in 0u64..999, count in 1u64..1000,
        ) {
            let size = 1000;
            let wanted = start..(start + count).min(size);
            let mut headers = HeaderMap::new();
            if let Some((start, length, total)) = sent {
                let total = total.map_or("*".into(), |it: u64| it.to_string());
                let text = format!("bytes {start}-{}/{total}", start + length - 1);
                headers.insert(CONTENT_RANGE, text.parse().unwrap());
            }
            if let Some(length) = length {
                headers.insert(CONTENT_LENGTH, length.to_string().parse().unwrap());
            }
            let status = if partial { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
            if let Ok(cut) = judge(status, &headers, &wanted, size, Terms { skip: 100, strict }) {
                let first = sent.map_or(0, |(start, _, _)| start);
                prop_assert_eq!(first + cut.skip, wanted.start);
                prop_assert!(cut.take >= 1 && cut.skip + cut.take <= size && first + cut.skip + cut.take <= wanted.end);
                prop_assert!(cut.skip <= 100);
            }
        }
    }
}
