//! Cached redirects: the addresses to which a registry redirected reads of blobs.
//!
//! Invariant: an address is not used after its expiry, nor after it has refused a request. There are never more than [`MAX_PLACES`].

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::Url;
use tokio::time::Instant;

use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;

const MAX_PLACES: usize = 1024;
/// Longer addresses are not kept.
const MAX_URL: usize = 16 << 10;
/// A place is not used in its last moments: the request takes time, and clocks differ.
const MARGIN: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(3600);

/// The places of one endpoint's blobs.
pub struct Redirects {
    places: Mutex<HashMap<Digest, Place>>,
    /// How long an address without an expiry is used.
    life: Duration,
}

struct Place {
    url: String,
    until: Instant,
}

impl Redirects {
    pub fn new(life: Duration) -> Self {
        Self {
            places: Mutex::default(),
            life,
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut HashMap<Digest, Place>) -> T) -> T {
        change(&mut self.places.locked())
    }

    pub fn get(&self, blob: &Digest) -> Option<String> {
        let now = Instant::now();
        self.with(|places| {
            let place = places.get(blob)?;
            (now < place.until).then(|| place.url.clone())
        })
    }

    pub fn put(&self, blob: Digest, url: &Url) {
        let life = match lifetime(url, SystemTime::now()) {
            Some(life) => life.saturating_sub(MARGIN).min(LONGEST),
            None => self.life,
        };
        if life.is_zero() || url.as_str().len() > MAX_URL {
            return;
        }
        let now = Instant::now();
        self.with(|places| {
            if places.len() >= MAX_PLACES && !places.contains_key(&blob) {
                places.retain(|_, place| now < place.until);
                if places.len() >= MAX_PLACES {
                    places.clear();
                }
            }
            let (url, until) = (url.to_string(), now + life);
            places.insert(blob, Place { url, until });
        });
    }

    pub fn forget(&self, blob: &Digest) {
        self.with(|places| drop(places.remove(blob)));
    }
}

/// How long a signed address is valid: of S3 and similar stores (`X-Amz-…`, `X-Goog-…`, `Expires`) or Azure (`se`).
fn lifetime(url: &Url, now: SystemTime) -> Option<Duration> {
    let (mut date, mut seconds, mut until) = (None, None, None);
    for (name, value) in url.query_pairs() {
        match name.to_ascii_lowercase().as_str() {
            "x-amz-date" | "x-goog-date" => date = instant(&value),
            "x-amz-expires" | "x-goog-expires" => seconds = value.parse::<u64>().ok(),
            "expires" => until = value.parse::<u64>().ok(),
            "se" => until = instant(&value),
            _ => {}
        }
    }
    let until = match (date, seconds) {
        (Some(date), Some(seconds)) => date.checked_add(seconds)?,
        _ => until?,
    };
    let now = now.duration_since(UNIX_EPOCH).ok()?.as_secs();
    Some(Duration::from_secs(until.saturating_sub(now)))
}

/// Seconds since 1970 of `20240229T235959Z` or `2024-02-29T23:59:59Z`.
fn instant(text: &str) -> Option<u64> {
    let text = text.strip_suffix('Z')?;
    let digits: String = text.chars().filter(|it| !matches!(it, '-' | ':' | 'T')).collect();
    if digits.len() != 14 || !digits.bytes().all(|it| it.is_ascii_digit()) {
        return None;
    }
    let part = |range: std::ops::Range<usize>| digits[range].parse::<u64>().ok();
    let (year, month, day) = (part(0..4)?, part(4..6)?, part(6..8)?);
    let (hour, minute, second) = (part(8..10)?, part(10..12)?, part(12..14)?);
    let fits = year >= 1970 && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !(fits && hour < 24 && minute < 60 && second <= 60) {
        return None;
    }
    // Days of a calendar whose years begin in March, so that leap days come last.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(instant("19700101T000000Z"), Some(0));
        assert_eq!(instant("20240229T235959Z"), Some(1_709_251_199));
        assert_eq!(instant("2024-03-01T00:00:00Z"), Some(1_709_251_200));
        assert_eq!(instant("2026-11-21T18:53:00Z"), Some(1_795_287_180));
        for odd in [
            "",
            "Z",
            "20241329T000000Z",
            "2024-02-29T23:59:59",
            "00000101T000000Z",
            "२०२४",
        ] {
            assert_eq!(instant(odd), None, "{odd}");
        }
    }

    #[test]
    fn signed_addresses_say_how_long_they_are_valid() {
        let now = UNIX_EPOCH + Duration::from_secs(1_709_251_199);
        let life = |query: &str| {
            let url = Url::parse(&format!("https://cdn.example/x?{query}")).unwrap();
            lifetime(&url, now).map(|life| life.as_secs())
        };
        assert_eq!(
            life("X-Amz-Date=20240229T235859Z&X-Amz-Expires=900&X-Amz-Signature=1"),
            Some(840)
        );
        assert_eq!(life("X-Goog-Date=20240229T235859Z&X-Goog-Expires=60"), Some(0));
        assert_eq!(life("Expires=1709251299&Signature=x"), Some(100));
        assert_eq!(life("se=2024-03-01T00%3A00%3A09Z&sig=x"), Some(10));
        assert_eq!(life("Expires=1"), Some(0));
        assert_eq!(life("Expires=soon"), None);
        assert_eq!(life(""), None);
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_forgotten_in_time_and_are_bounded() {
        let redirects = Redirects::new(Duration::from_secs(60));
        let url = Url::parse("https://cdn.example/x").unwrap();
        let blob = Digest::of(b"x");
        redirects.put(blob, &url);
        assert_eq!(redirects.get(&blob).as_deref(), Some("https://cdn.example/x"));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(redirects.get(&blob), None);
        let expired = Url::parse("https://cdn.example/x?Expires=1").unwrap();
        redirects.put(Digest::of(b"y"), &expired);
        assert_eq!(redirects.get(&Digest::of(b"y")), None);
        for i in 0..3 * MAX_PLACES as u32 {
            redirects.put(Digest::of(&i.to_le_bytes()), &url);
        }
        assert!(redirects.with(|places| places.len()) <= MAX_PLACES);
    }
}
