//! Faults of registries and mirrors.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use reqwest::header::{CONTENT_RANGE, RETRY_AFTER};
use tokio::time::Instant;

use crate::registry::testing::{Network, Reply, wanted};

use super::*;

const REFERENCE: &str = "registry.example/app:1";

fn blob() -> Vec<u8> {
    pattern(1 << 20)
}

/// A reader with only a registry, which answers with `handler`.
async fn alone(
    config: Config,
    handler: impl Fn(&reqwest::Request, u64) -> Reply + Send + Sync + 'static,
) -> (Arc<Network>, Arc<Client>, Arc<dyn Ranges>) {
    let calls = Calls::default();
    let network = Network::new(move |request| handler(request, calls.next()));
    let client = Client::with_wire(config, network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    (network, client, reader)
}

#[tokio::test(start_paused = true)]
async fn a_range_is_read_and_nothing_else() {
    let blob = blob();
    let content = blob.clone();
    let (network, client, reader) = alone(Config::default(), move |request, _| {
        Reply::range(request, &content)
    })
    .await;
    let bytes = read(&*reader, &blob, 1000..5000, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob[1000..5000]);
    let seen = network.to("registry.example");
    assert_eq!(seen.len(), 1);
    let digest = Digest::of(&blob);
    assert_eq!(
        seen[0].url,
        format!("https://registry.example/v2/app/blobs/{digest}")
    );
    assert_eq!(seen[0].header("range"), Some("bytes=1000-4999"));
    assert_eq!(seen[0].header("accept-encoding"), Some("identity"));
    let counts = counts(&client, "registry.example");
    assert_eq!(
        (counts.requests, counts.demand_bytes, counts.retries),
        (1, 4000, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn a_range_outside_of_the_blob_is_refused_unasked() {
    let (network, _, reader) = alone(Config::default(), |_, _| Reply::status(500)).await;
    let blob = stored(b"0123456789");
    for range in [0..0, 5..11, 11..12] {
        let result = reader.read(&blob, range, Priority::Demand, exactly(b"")).await;
        assert_eq!(result.unwrap_err().code(), "malformed");
    }
    assert!(network.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn read_resumes_after_registry_restart() {
    let blob = blob();
    let content = blob.clone();
    let (network, client, reader) = alone(Config::default(), move |request, call| match call {
        0 => Reply::range(request, &content).cut(3000),
        1..=7 => Reply::refused(),
        _ => Reply::range(request, &content),
    })
    .await;
    let bytes = read(&*reader, &blob, 0..10_000, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob[..10_000]);
    let seen = network.to("registry.example");
    assert_eq!(seen.last().unwrap().header("range"), Some("bytes=3000-9999"));
    let counts = counts(&client, "registry.example");
    assert_eq!((counts.requests, counts.retries), (9, 8));
    assert!(counts.breaker_opens >= 1 && counts.breaker_probes >= 1);
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_stays_away_ends_the_read_within_its_budget() {
    let blob = blob();
    let (_, _, reader) = alone(Config::default(), |_, _| Reply::refused()).await;
    let start = Instant::now();
    let error = read(&*reader, &blob, 100..200, Priority::Demand)
        .await
        .unwrap_err();
    assert!(
        start.elapsed() <= Duration::from_millis(60_100),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(error.code(), "registry_unreachable");
    let text = error.to_string();
    for part in [
        "bytes 100 to 200",
        &Digest::of(&blob).to_string(),
        "connection refused",
        "registry.example",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn silence_ends_with_the_budget_too() {
    let blob = blob();
    let (_, client, reader) = alone(Config::default(), |_, _| Reply::silence()).await;
    let start = Instant::now();
    let error = read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap_err();
    assert_eq!(error.code(), "registry_unreachable");
    assert!(
        start.elapsed() <= Duration::from_millis(60_100),
        "{:?}",
        start.elapsed()
    );
    assert!(counts(&client, "registry.example").too_slow >= 2);
}

#[tokio::test(start_paused = true)]
async fn a_slow_loris_is_left_for_another_mirror() {
    let blob = blob();
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        // A byte per second: never silent, never finished.
        Some("slow.example") => Reply::range(request, &content).trickle(1, Duration::from_secs(1)),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://slow.example"]), network);
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let start = Instant::now();
    let bytes = read(&*reader, &blob, 0..200_000, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob[..200_000]);
    assert!(start.elapsed() < Duration::from_secs(12));
    assert_eq!(counts(&client, "slow.example").too_slow, 1);
    assert_eq!(counts(&client, "slow.example").retries, 1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_but_honest_link_is_waited_for() {
    let blob = blob();
    let content = blob.clone();
    // 10 KiB per second: above the required minimum.
    let (_, client, reader) = alone(Config::default(), move |request, _| {
        Reply::range(request, &content).trickle(10 << 10, Duration::from_secs(1))
    })
    .await;
    assert!(read(&*reader, &blob, 0..400_000, Priority::Demand).await.is_ok());
    assert_eq!(counts(&client, "registry.example").requests, 1);
}

#[tokio::test(start_paused = true)]
async fn wrong_bytes_are_refused_counted_and_another_mirror_asked() {
    let blob = blob();
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("wrong.example") => {
            let mut wrong = content.clone();
            wrong[150] ^= 1;
            Reply::range(request, &wrong)
        }
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://wrong.example"]), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let bytes = read(&*reader, &blob, 100..200, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob[100..200]);
    assert_eq!(counts(&client, "wrong.example").wrong_bytes, 1);
    assert_eq!(counts(&client, "registry.example").wrong_bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn wrong_bytes_everywhere_are_a_typed_error() {
    let blob = blob();
    let wrong = vec![0; 1 << 20];
    let (network, client, reader) =
        alone(Config::default(), move |request, _| Reply::range(request, &wrong)).await;
    let error = read(&*reader, &blob, 100..200, Priority::Demand)
        .await
        .unwrap_err();
    assert_eq!(error.code(), "malformed");
    assert!(error.to_string().contains("its digest is another"), "{error}");
    assert_eq!(counts(&client, "registry.example").wrong_bytes, 2);
    assert_eq!(network.seen.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn two_hundred_for_a_range_is_cut_where_that_is_cheap() {
    let blob = blob();
    let content = blob.clone();
    let config = Config {
        whole_skip: 1000,
        ..Config::default()
    };
    let (_, client, reader) = alone(config, move |_, _| Reply::status(200).body(&content)).await;
    let bytes = read(&*reader, &blob, 1000..2000, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob[1000..2000]);
    assert_eq!(counts(&client, "registry.example").requests, 1);
    let error = read(&*reader, &blob, 1001..2000, Priority::Demand)
        .await
        .unwrap_err();
    assert_eq!(error.code(), "malformed");
    assert!(error.to_string().contains("ignores ranges"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn whole_answer_for_a_far_range_moves_to_next_mirror() {
    let blob = pattern(3 << 20);
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("whole.example") => Reply::status(200).body(&content),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://whole.example"]), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    for start in [2 << 20, (2 << 20) + 5000] {
        read(&*reader, &blob, start..start + 100, Priority::Demand)
            .await
            .unwrap();
    }
    assert_eq!(network.to("whole.example").len(), 1);
    assert_eq!(network.to("registry.example").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_lying_content_range_is_refused_and_another_mirror_asked() {
    let blob = blob();
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("liar.example") => Reply::status(206)
            .header(CONTENT_RANGE, "bytes 0-99/1048576")
            .body(&content[..100]),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://liar.example"]), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 500..600, Priority::Demand).await.unwrap();
    assert_eq!(counts(&client, "liar.example").wrong_bytes, 1);
    assert_eq!(counts(&client, "liar.example").demand_bytes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_short_body_is_continued() {
    let blob = blob();
    let content = blob.clone();
    let (network, _, reader) = alone(Config::default(), move |request, call| {
        let (first, last) = wanted(request);
        // Half of the requested range, declared correctly; then a body that ends early without a declaration.
        let half = first + (last - first) / 2;
        match call {
            0 => Reply::status(206)
                .header(CONTENT_RANGE, format!("bytes {first}-{half}/*"))
                .body(&content[first..=half]),
            1 => Reply::status(206).header(CONTENT_RANGE, format!("bytes {first}-{last}/*")),
            _ => Reply::range(request, &content),
        }
    })
    .await;
    let bytes = read(&*reader, &blob, 0..1000, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob[..1000]);
    let ranges: Vec<_> = network
        .to("registry.example")
        .iter()
        .map(|it| it.header("range").unwrap().to_owned())
        .collect();
    assert_eq!(ranges, ["bytes=0-999", "bytes=500-999", "bytes=500-999"]);
}

#[tokio::test(start_paused = true)]
async fn one_byte_at_a_time_does_not_go_on_for_ever() {
    let blob = blob();
    let content = blob.clone();
    let config = Config {
        budget_ms: 10_000,
        ..Config::default()
    };
    let (network, _, reader) = alone(config, move |request, _| {
        let (first, _) = wanted(request);
        Reply::status(206)
            .header(CONTENT_RANGE, format!("bytes {first}-{first}/*"))
            .body(&content[first..=first])
    })
    .await;
    let error = read(&*reader, &blob, 0..100_000, Priority::Demand)
        .await
        .unwrap_err();
    assert_eq!(error.code(), "registry_unreachable");
    assert!(network.seen.lock().unwrap().len() < 1000);
}

#[tokio::test(start_paused = true)]
async fn blob_missing_at_mirror_is_read_from_registry_only() {
    let blob = blob();
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("empty.example") => Reply::status(404),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://empty.example"]), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    for i in 0..5 {
        read(&*reader, &blob, i * 10..i * 10 + 10, Priority::Demand)
            .await
            .unwrap();
    }
    assert_eq!(network.to("empty.example").len(), 1);
    assert!(
        network.to("empty.example")[0]
            .url
            .ends_with("?ns=registry.example")
    );
    tokio::time::advance(Duration::from_secs(61)).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(network.to("empty.example").len(), 2);
    assert_eq!(counts(&client, "empty.example").breaker_opens, 0);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_has_is_an_error_at_once() {
    let blob = blob();
    let (_, _, reader) = alone(Config::default(), |_, _| Reply::status(404)).await;
    let start = Instant::now();
    let error = read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap_err();
    assert_eq!(error.code(), "registry_not_found");
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_is_down_is_left_alone_and_tried_again_by_one() {
    let blob = blob();
    let content = blob.clone();
    let back = Arc::new(Calls::default());
    let is_back = back.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("down.example") if is_back.count() == 0 => Reply::refused(),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://down.example"]), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let one = || read(&*reader, &blob, 0..10, Priority::Demand);
    for _ in 0..10 {
        one().await.unwrap();
    }
    assert_eq!(network.to("down.example").len(), 3);
    assert_eq!(counts(&client, "down.example").breaker_opens, 1);
    // Half open: only one of many requests probes it.
    tokio::time::advance(Duration::from_secs(2)).await;
    for result in futures_util::future::join_all((0..5).map(|_| one())).await {
        result.unwrap();
    }
    assert_eq!(network.to("down.example").len(), 4);
    assert_eq!(counts(&client, "down.example").breaker_probes, 1);
    assert_eq!(counts(&client, "down.example").breaker_opens, 2);
    // It works again: the probe closes the breaker, and all requests go there again.
    back.next();
    tokio::time::advance(Duration::from_secs(3)).await;
    let before = network.to("registry.example").len();
    for _ in 0..3 {
        one().await.unwrap();
    }
    assert_eq!(network.to("registry.example").len(), before);
    assert_eq!(network.to("down.example").len(), 7);
}

#[tokio::test(start_paused = true)]
async fn readers_of_a_registry_that_is_away_wait_for_one_probe() {
    let blob = blob();
    let content = blob.clone();
    let start = Instant::now();
    let (network, _, reader) = alone(Config::default(), move |request, _| {
        if start.elapsed() < Duration::from_secs(20) {
            Reply::refused()
        } else {
            Reply::range(request, &content)
        }
    })
    .await;
    let reads = (0..50).map(|i| read(&*reader, &blob, i..i + 10, Priority::Demand));
    for result in futures_util::future::join_all(reads).await {
        result.unwrap();
    }
    // One request of each read before the breaker opened; then one probe at a time; then one request of each.
    let seen = network.seen.lock().unwrap().len();
    assert!(seen < 50 + 50 + 20, "{seen}");
}

#[tokio::test(start_paused = true)]
async fn a_read_given_up_while_it_probes_does_not_shut_the_breaker() {
    let blob = blob();
    let content = blob.clone();
    let (_, client, reader) = alone(Config::default(), move |request, call| match call {
        0..=2 => Reply::refused(),
        3 => Reply::silence(),
        _ => Reply::range(request, &content),
    })
    .await;
    let given_up = read(&*reader, &blob, 0..10, Priority::Demand);
    assert!(
        tokio::time::timeout(Duration::from_secs(10), given_up)
            .await
            .is_err()
    );
    assert_eq!(counts(&client, "registry.example").breaker_probes, 1);
    let start = Instant::now();
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_says_when_is_asked_then() {
    let blob = blob();
    let content = blob.clone();
    let (_, _, reader) = alone(Config::default(), move |request, call| match call {
        0 => Reply::status(429).header(RETRY_AFTER, "7"),
        _ => Reply::range(request, &content),
    })
    .await;
    let start = Instant::now();
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert!(
        (7..8).contains(&start.elapsed().as_secs()),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn registry_retry_after_beyond_budget_ends_the_read() {
    let blob = blob();
    let (_, _, reader) = alone(Config::default(), |_, _| {
        Reply::status(429).header(RETRY_AFTER, "3600")
    })
    .await;
    let start = Instant::now();
    let error = read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap_err();
    assert_eq!(error.code(), "registry_rate_limited");
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn mirror_retry_after_beyond_budget_moves_to_the_next() {
    let blob = blob();
    let content = blob.clone();
    let calls = Calls::default();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("busy.example") => Reply::status(429).header(RETRY_AFTER, "3600"),
        _ if calls.next() == 0 => Reply::status(503),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(mirrored(&["https://busy.example"]), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(network.to("busy.example").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_read_that_is_dropped_leaves_nothing_behind() {
    let blob = blob();
    let (_, client, reader) = alone(Config::default(), |_, _| Reply::silence()).await;
    let mut demand = Box::pin(read(&*reader, &blob, 0..10, Priority::Demand));
    assert!(demand.as_mut().now_or_never().is_none());
    assert!(client.gate.idle().now_or_never().is_none());
    drop(demand);
    assert!(client.gate.idle().now_or_never().is_some());
}
