use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::StreamExt;
use futures_util::stream::{iter, pending};
use tokio::time::Instant;

use super::*;
use crate::api::test_client::{JSON, ask, routes, send};

const PIECE: usize = 1 << 10;

/// A body of `count` pieces, each some time after the previous one, and the number of pieces taken.
fn pieces(count: usize) -> (Body, Arc<AtomicUsize>) {
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = taken.clone();
    let stream = iter(0..count).then(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok::<_, std::io::Error>(Bytes::from_static(&[0; PIECE]))
        }
    });
    (Body::from_stream(stream), taken)
}

/// Sends the body to a path without a route, and returns how long the answer took.
async fn answered(body: Body, expect: bool) -> Duration {
    let (_, routes) = routes();
    let mut request = ask("PUT", "/nowhere", JSON, body);
    if expect {
        request
            .headers_mut()
            .insert(EXPECT, "100-continue".parse().unwrap());
    }
    let start = Instant::now();
    assert_eq!(send(&routes, request).await.status(), 404);
    start.elapsed()
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_small_body_is_taken_before_the_answer() {
    let (body, taken) = pieces(10);
    answered(body, false).await;
    assert_eq!(taken.load(Ordering::Relaxed), 10);
}

#[tokio::test(start_paused = true)]
async fn no_more_is_taken_than_is_little() {
    let (body, taken) = pieces(1000);
    answered(body, false).await;
    assert_eq!(taken.load(Ordering::Relaxed), MOST as usize / PIECE + 1);
}

#[tokio::test]
async fn of_a_body_that_was_read_nothing_is_left() {
    let rest = Rest::default();
    let mut lent = Lent {
        body: Body::from(vec![0; 10]),
        rest: rest.clone(),
    };
    assert!(lent.frame().await.is_some() && lent.is_end_stream());
    drop(lent);
    assert!(rest.taken().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for_long() {
    let never = || Body::from_stream(pending::<std::io::Result<Bytes>>());
    assert_eq!(answered(never(), false).await, LONGEST);
    assert_eq!(
        answered(never(), true).await,
        Duration::ZERO,
        "it was not asked for"
    );
}
