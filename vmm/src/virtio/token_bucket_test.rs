use std::num::NonZeroU64;

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn setting(per_second: u64, burst: u64, once: u64) -> Bucket {
    Bucket {
        per_second: NonZeroU64::new(per_second).unwrap(),
        burst: NonZeroU64::new(burst).unwrap(),
        once,
    }
}

fn bucket(per_second: u64, burst: u64, once: u64) -> TokenBucket {
    TokenBucket::new(setting(per_second, burst, once), 0)
}

/// Takes tokens if they are available now.
fn try_take(bucket: &mut TokenBucket, tokens: u64, now: u64) -> bool {
    let can = bucket.wait(tokens, now) == 0;
    if can {
        bucket.take(tokens, now);
    }
    can
}

#[test]
fn take_burst_at_once_then_waits_for_the_rate() {
    let mut bucket = bucket(100, 10, 0);
    for _ in 0..10 {
        assert!(try_take(&mut bucket, 1, 0));
    }
    assert_eq!(bucket.wait(1, 0), SECOND / 100);
    assert_eq!(bucket.wait(10, 0), SECOND / 10);
    assert!(!try_take(&mut bucket, 1, SECOND / 100 - 1));
    assert!(try_take(&mut bucket, 1, SECOND / 100));
    assert!(!try_take(&mut bucket, 1, SECOND / 100));
}

#[test]
fn take_over_the_burst_waits_for_a_full_bucket_and_is_paid() {
    let mut bucket = bucket(10, 10, 0);
    assert!(try_take(&mut bucket, 1, 0));
    assert_eq!(bucket.wait(50, 0), SECOND / 10, "until it is full");
    assert!(try_take(&mut bucket, 50, SECOND / 10));
    // 50 tokens are owed. One is available when 41 of them are paid.
    assert_eq!(bucket.wait(1, SECOND / 10), 41 * SECOND / 10);
    assert!(try_take(&mut bucket, 1, SECOND / 10 + 41 * SECOND / 10));
}

#[test]
fn take_tokens_that_come_once_do_not_come_again() {
    let mut bucket = bucket(1, 5, 100);
    assert!(try_take(&mut bucket, 105, 0));
    assert!(!try_take(&mut bucket, 1, 0));
    let year = 365 * 24 * 3600 * SECOND;
    assert!(try_take(&mut bucket, 5, year));
    assert!(!try_take(&mut bucket, 1, year));
}

#[test]
fn clock_that_goes_back_gives_nothing() {
    let mut bucket = TokenBucket::new(setting(1, 1, 0), 10 * SECOND);
    bucket.take(1, 10 * SECOND);
    assert_eq!(bucket.wait(1, 0), SECOND);
    assert_eq!(bucket.wait(1, 10 * SECOND), SECOND);
}

#[test]
fn huge_numbers_saturate_and_never_overflow() {
    let mut bucket = bucket(u64::MAX, u64::MAX, u64::MAX);
    for now in [0, 1, u64::MAX - 1, u64::MAX] {
        // At this rate, each request adds at most a second of debt.
        assert!(bucket.wait(u64::MAX, now) <= 4 * SECOND);
        bucket.take(u64::MAX, now);
    }
    let mut slow = self::bucket(1, 1, 0);
    for _ in 0..1000 {
        slow.take(u64::MAX, 0);
    }
    assert_eq!(slow.wait(1, 0), u64::MAX);
}

#[test]
fn limiter_the_slower_bucket_decides() {
    let limit = DeviceLimit {
        bytes: Some(setting(1000, 1000, 0)),
        operations: Some(setting(10, 2, 0)),
    };
    let mut limiter = RateLimiter::new(limit, 0);
    assert!(limiter.limits() && !RateLimiter::default().limits());
    assert_eq!(limiter.later(100, 1, 0), None);
    limiter.charge(100, 1, 0);
    assert_eq!(limiter.later(0, 1, 0), None);
    limiter.charge(0, 1, 0);
    assert_eq!(limiter.later(0, 1, 0), Some(SECOND / 10), "no operation is left");
    assert_eq!(limiter.later(1000, 1, SECOND / 20), Some(SECOND / 10));
    assert_eq!(limiter.later(1000, 1, SECOND), None);
    limiter.charge(1000, 1, SECOND);
    assert_eq!(
        limiter.later(1, 1, SECOND),
        Some(SECOND + SECOND / 1000),
        "no byte is left"
    );
    assert_eq!(RateLimiter::default().later(u64::MAX, 1, 0), None);
}

/// Requests: the number of tokens of each, and the time between its first try and the request before it.
fn requests() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let tokens = prop_oneof![0..4u64, 0..10_000u64, any::<u64>()];
    let pause = prop_oneof![Just(0), 0..1000u64, 0..10 * SECOND, any::<u64>()];
    proptest::collection::vec((tokens, pause), 1..100)
}

fn settings() -> impl Strategy<Value = (u64, u64, u64)> {
    let number = || prop_oneof![1..10u64, 1..100_000u64, any::<u64>()];
    (number(), number(), prop_oneof![Just(0), number()])
}

proptest! {
    /// Between any two points in time, at most the burst, the rate's tokens and the one-time tokens are taken. One request larger than the
    /// burst may exceed that.
    #[test]
    fn taken_is_at_most_burst_and_rate(
        (per_second, burst, once) in settings(),
        requests in requests(),
    ) {
        let mut bucket = bucket(per_second, burst, once);
        let mut now = 0u64;
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for (tokens, pause) in requests {
            now = now.saturating_add(pause);
            if try_take(&mut bucket, tokens, now) {
                taken.push((now, tokens));
            }
        }
        for first in 0..taken.len() {
            let mut sum = 0u128;
            for (at, tokens) in &taken[first..] {
                sum += u128::from(*tokens);
                let passed = u128::from(at - taken[first].0);
                let largest = taken[first..].iter().map(|t| t.1).max().unwrap_or(0);
                let most = (u128::from(burst.max(largest)) + u128::from(once)) * UNITS
                    + passed * u128::from(per_second);
                prop_assert!(sum * UNITS <= most, "{sum} after {passed} ns");
            }
        }
    }

    /// The returned wait is sufficient, and a nanosecond less is not.
    #[test]
    fn wait_is_exact(
        (per_second, burst, once) in settings(),
        requests in requests(),
        last in any::<u64>(),
    ) {
        let mut bucket = bucket(per_second, burst, once);
        let mut now = 0u64;
        for (tokens, pause) in requests {
            now = now.saturating_add(pause);
            bucket.take(tokens, now);
        }
        let wait = bucket.wait(last, now);
        // The longest wait that fits the type is 584 years, which may be too short.
        if wait > 0 && wait < u64::MAX && let Some(then) = now.checked_add(wait) {
            prop_assert!(bucket.clone().wait(last, then - 1) > 0);
            prop_assert_eq!(bucket.clone().wait(last, then), 0);
        }
    }

    /// A caller that waits as long as required gets each of its requests. The sum over a long time equals the rate.
    #[test]
    fn requests_one_after_another_never_starve(
        per_second in 1..1_000_000u64,
        burst in 1..1_000_000u64,
        requests in proptest::collection::vec(1..1_000_000u64, 1..50),
    ) {
        let mut bucket = bucket(per_second, burst, 0);
        let mut now = 0u64;
        let mut sum = 0u128;
        for tokens in &requests {
            now += bucket.wait(*tokens, now);
            prop_assert!(try_take(&mut bucket, *tokens, now));
            sum += u128::from(*tokens);
        }
        // A caller that never waits longer than required is never slower than the rate, except for at most a nanosecond of rounding per
        // request.
        let most = sum * UNITS / u128::from(per_second) + requests.len() as u128;
        let largest = requests.iter().max().map_or(0, |most| u128::from(*most));
        let full = u128::from(burst).max(largest) * UNITS / u128::from(per_second);
        prop_assert!(u128::from(now) <= most + full, "{now} ns for {sum}");
    }

    /// The bucket has tokens exactly when a model has them that the rate fills up to its burst and that requests empty.
    #[test]
    fn tokens_are_there_when_the_definition_says(
        (per_second, burst, once) in settings(),
        requests in requests(),
    ) {
        let units = UNITS as i128;
        let mut bucket = bucket(per_second, burst, once);
        let (mut level, mut once_left, mut now) = (i128::from(burst) * units, once, 0u64);
        for (tokens, pause) in requests {
            let then = now.saturating_add(pause);
            let gained = u128::from(then - now) * u128::from(per_second);
            // More than any debt and any burst.
            level = (level + gained.min(1 << 126) as i128).min(i128::from(burst) * units);
            now = then;
            let more = tokens.saturating_sub(once_left);
            // A request larger than the burst requires a full bucket.
            let has = more == 0 || level >= i128::from(more.min(burst)) * units;
            prop_assert_eq!(try_take(&mut bucket, tokens, now), has);
            if has {
                once_left -= tokens.min(once_left);
                level -= i128::from(more) * units;
            }
        }
    }

    /// While time stands still, requests no larger than the burst take at most the burst and the one-time tokens.
    #[test]
    fn a_moment_gives_the_burst_and_what_comes_once(
        burst in 1..1_000_000u64,
        once in 0..1_000_000u64,
        requests in proptest::collection::vec(any::<u64>(), 1..100),
    ) {
        let mut bucket = bucket(u64::MAX, burst, once);
        let mut left = burst + once;
        for request in requests {
            let tokens = request % burst + 1;
            let took = try_take(&mut bucket, tokens, 0);
            prop_assert_eq!(took, tokens <= left);
            left -= if took { tokens } else { 0 };
        }
    }

    /// Only a full bucket admits a request larger than the burst, and its excess is paid before anything else is admitted. This is the only
    /// exception.
    #[test]
    fn only_a_full_bucket_goes_into_debt(
        (per_second, burst, once) in settings(),
        requests in requests(),
    ) {
        let mut bucket = bucket(per_second, burst, once);
        let mut now = 0u64;
        for (tokens, pause) in requests {
            now = now.saturating_add(pause);
            let mut before = bucket.clone();
            before.refill(now);
            if try_take(&mut bucket, tokens, now) {
                let more = tokens.saturating_sub(before.once);
                let is_in_debt = bucket.missing > u128::from(burst) * UNITS;
                // One-time tokens are available to a bucket in debt, too.
                prop_assert!(more == 0 || is_in_debt == (more > burst));
                prop_assert!(more <= burst || before.missing == 0);
            }
        }
    }

    /// A clock that goes back counts as standing still until it reaches its earlier value.
    #[test]
    fn a_clock_that_goes_back_stands_still(
        (per_second, burst, once) in settings(),
        moments in proptest::collection::vec((any::<u64>(), any::<u64>()), 1..100),
    ) {
        let (mut jumping, mut steady) = (bucket(per_second, burst, once), bucket(per_second, burst, once));
        let mut latest = 0;
        for (tokens, now) in moments {
            latest = latest.max(now);
            prop_assert_eq!(jumping.wait(tokens, now), steady.wait(tokens, latest));
            prop_assert_eq!(try_take(&mut jumping, tokens, now), try_take(&mut steady, tokens, latest));
        }
    }

    /// Two buckets admit a request that both admit, and no sooner than the later of them.
    #[test]
    fn a_limiter_waits_for_the_later_of_its_buckets(
        bytes in settings(),
        operations in settings(),
        requests in proptest::collection::vec((any::<u64>(), 1..300u64, 0..10 * SECOND), 1..50),
    ) {
        let limit = DeviceLimit {
            bytes: Some(setting(bytes.0, bytes.1, bytes.2)),
            operations: Some(setting(operations.0, operations.1, operations.2)),
        };
        let mut limiter = RateLimiter::new(limit, 0);
        let (mut bytes, mut operations) = (bucket(bytes.0, bytes.1, bytes.2), bucket(operations.0, operations.1, operations.2));
        let mut now = 0;
        for (size, count, pause) in requests {
            now += pause;
            let wait = bytes.wait(size, now).max(operations.wait(count, now));
            let expected = (wait > 0).then(|| now.saturating_add(wait));
            prop_assert_eq!(limiter.later(size, count, now), expected);
            if expected.is_none() {
                limiter.charge(size, count, now);
                bytes.take(size, now);
                operations.take(count, now);
            }
        }
    }
}
