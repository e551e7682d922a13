//! Which read goes first, and which address is read.

use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use crate::ranges::Urgency;
use crate::registry::testing::{Network, Reply};

use super::*;

const REFERENCE: &str = "registry.example/app:1";

#[tokio::test(start_paused = true)]
async fn a_prefetch_never_begins_while_a_demand_is_under_way() {
    let blob = pattern(100_000);
    let content = blob.clone();
    let network = Network::new(move |request| Reply::range(request, &content).after(Duration::from_secs(1)));
    let client = Client::with_wire(Config::default(), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let demands = async {
        for i in 0..5 {
            read(&*reader, &blob, i * 100..i * 100 + 100, Priority::Demand)
                .await
                .unwrap();
        }
    };
    let prefetch = async {
        read(&*reader, &blob, 50_000..60_000, Priority::Prefetch)
            .await
            .unwrap();
    };
    tokio::join!(demands, prefetch);
    let seen = network.to("registry.example");
    let position = seen
        .iter()
        .position(|it| it.header("range") == Some("bytes=50000-59999"));
    // Between two demands of one reader there is a moment without any. The prefetch starts then at the earliest.
    assert!(position.unwrap() >= 1, "{position:?}");
    assert_eq!(counts(&client, "registry.example").prefetch_bytes, 10_000);
    assert_eq!(counts(&client, "registry.example").demand_bytes, 500);
}

#[tokio::test(start_paused = true)]
async fn running_prefetch_yields_to_demand_without_penalty() {
    let blob = pattern(1 << 20);
    let content = blob.clone();
    let network = Network::new(move |request| match crate::registry::testing::wanted(request).0 {
        0 => Reply::range(request, &content).trickle(64 << 10, Duration::from_secs(1)),
        _ => Reply::range(request, &content).after(Duration::from_secs(14)),
    });
    let config = Config {
        budget_ms: 30_000,
        ..Config::default()
    };
    let client = Client::with_wire(config, network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let start = Instant::now();
    let prefetch = async {
        read(&*reader, &blob, 0..1 << 20, Priority::Prefetch)
            .await
            .unwrap();
        start.elapsed()
    };
    let demands = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        for _ in 0..2 {
            read(&*reader, &blob, 4096..8192, Priority::Demand).await.unwrap();
            let bytes = counts(&client, "registry.example").prefetch_bytes;
            // Only the bytes that were on their way when the demand came.
            assert!(bytes <= 5 * (64 << 10), "{bytes}");
        }
    };
    let (elapsed, ()) = tokio::join!(prefetch, demands);
    // 16 seconds of its own and 28 of the demands': more than its budget, without a retry.
    assert!(elapsed > Duration::from_secs(30), "{elapsed:?}");
    assert_eq!(network.to("registry.example").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn prefetch_that_a_caller_waits_for_stands_back_no_more() {
    let blob = pattern(1 << 20);
    let content = blob.clone();
    let piece = 64 << 10;
    let network = Network::new(move |request| match crate::registry::testing::wanted(request).0 {
        0 => Reply::range(request, &content).trickle(piece, Duration::from_secs(1)),
        4096 => Reply::range(request, &content).trickle(piece, Duration::from_secs(5)),
        _ => Reply::range(request, &content),
    });
    let config = Config {
        budget_ms: 200_000,
        ..Config::default()
    };
    let client = Client::with_wire(config, network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let (start, blob) = (Instant::now(), &blob);
    let (first, second) = (Urgency::default(), Urgency::default());
    let ahead = |range: std::ops::Range<u64>, urgency| {
        let check = exactly(&blob[range.start as usize..range.end as usize]);
        let (reader, blob) = (&reader, stored(blob));
        async move {
            reader.read_ahead(&blob, range, urgency, check).await.unwrap();
            start.elapsed().as_secs()
        }
    };
    let demand = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        read(&*reader, blob, 4096..1 << 20, Priority::Demand)
            .await
            .unwrap();
        start.elapsed().as_secs()
    };
    let queued = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        ahead(100..200, &second).await
    };
    let callers = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        first.raise();
        second.raise();
    };
    let (begun, queued, demand, ()) = tokio::join!(ahead(0..1 << 20, &first), queued, demand, callers);
    // Both would be after the demand. The one that had begun is not begun again.
    assert!(
        (30..40).contains(&begun) && queued == 20 && demand > 70,
        "{begun} {queued} {demand}"
    );
    assert_eq!(network.to("registry.example").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn prefetch_limit_does_not_count_demands() {
    let blob = pattern(100_000);
    let network = Network::new(|_| Reply::silence());
    let config = Config {
        prefetch_requests: 3,
        ..Config::default()
    };
    let client = Client::with_wire(config, network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let mut prefetches: Vec<_> = (0..10)
        .map(|i| Box::pin(read(&*reader, &blob, i * 10..i * 10 + 10, Priority::Prefetch)))
        .collect();
    for prefetch in &mut prefetches {
        assert!(prefetch.as_mut().now_or_never().is_none());
    }
    assert_eq!(network.to("registry.example").len(), 3);
    let mut demand = Box::pin(read(&*reader, &blob, 0..10, Priority::Demand));
    assert!(demand.as_mut().now_or_never().is_none());
    assert_eq!(network.to("registry.example").len(), 4);
}

#[tokio::test(start_paused = true)]
async fn prefetches_keep_to_their_bandwidth_and_demands_do_not() {
    let blob = pattern(1 << 20);
    let content = blob.clone();
    let network = Network::new(move |request| Reply::range(request, &content).after(Duration::ZERO));
    let config = Config {
        prefetch_bandwidth: Some(100_000),
        ..Config::default()
    };
    let client = Client::with_wire(config, network);
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    let start = Instant::now();
    for i in 0..11 {
        let range = i * 50_000..i * 50_000 + 50_000;
        read(&*reader, &blob, range, Priority::Prefetch).await.unwrap();
    }
    // 550 000 bytes; the first 25 000 are a burst, and the last take is paid for afterwards.
    let elapsed = start.elapsed();
    assert!((4_700..5_300).contains(&elapsed.as_millis()), "{elapsed:?}");
    let start = Instant::now();
    read(&*reader, &blob, 0..1 << 20, Priority::Demand).await.unwrap();
    assert!(start.elapsed() < Duration::from_millis(100));
}

#[tokio::test(start_paused = true)]
async fn a_foreign_blob_is_read_from_its_address_without_credentials() {
    let blob = pattern(1 << 20);
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("elsewhere.example") => Reply::range(request, &content),
        _ => Reply::status(404),
    });
    let client = Client::with_wire(Config::default(), network.clone());
    let credentials = Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let reader = reader(&client, REFERENCE, credentials).await;
    let stored = StoredBlob {
        urls: vec!["ftp://old.example/x".into(), "https://elsewhere.example/x".into()],
        ..stored(&blob)
    };
    let bytes = reader
        .read(&stored, 5..15, Priority::Demand, exactly(&blob[5..15]))
        .await;
    assert_eq!(bytes.unwrap(), blob[5..15]);
    assert!(
        network.to("elsewhere.example")[0]
            .header("authorization")
            .is_none()
    );
}
