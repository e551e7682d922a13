//! Several callers that want the same data at once: tasks, a prefetch and a guest, processes.

use super::*;
use thaw_sys::lock::Lock;

#[tokio::test(flavor = "multi_thread")]
async fn many_misses_of_one_span_are_one_read() {
    let layer = layer(1, TAR_GZIP, 3 << 20);
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob().clone());
    let scripted = Scripted::of(&layer, 0);
    scripted.serve(&bench, &filler);
    let one = |at: u64| {
        let (filler, id) = (filler.clone(), blob.id);
        tokio::spawn(async move {
            filler
                .fill(&id, (1 << 20) + at * 4096, 4096, Priority::Demand)
                .await
        })
    };
    let all: Vec<_> = (0..30).map(one).collect();
    while scripted.reads(Priority::Demand) == 0 {
        tokio::task::yield_now().await;
    }
    scripted.permits.add_permits(100);
    for task in all {
        task.await.unwrap().unwrap();
    }
    // The chunks lie in at most two spans.
    assert!(
        scripted.reads(Priority::Demand) <= 2,
        "{:?}",
        scripted.reads.locked()
    );
    bench.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_shared_read_is_retried_for_late_joiners() {
    let layer = layer(1, TAR_GZIP, 3 << 20);
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob().clone());
    let scripted = Scripted::of(&layer, 0);
    scripted.serve(&bench, &filler);
    scripted.failures.store(1, Ordering::Relaxed);
    let ask = || {
        let (filler, id) = (filler.clone(), blob.id);
        tokio::spawn(async move { filler.fill(&id, 1 << 20, 4096, Priority::Demand).await })
    };
    let first = ask();
    while scripted.reads(Priority::Demand) == 0 {
        tokio::task::yield_now().await;
    }
    let second = ask();
    while seen(&filler.stats().joined) == 0 {
        tokio::task::yield_now().await;
    }
    scripted.permits.add_permits(1000);
    first.await.unwrap().unwrap_err();
    second.await.unwrap().unwrap();
    assert!(bench.check() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_does_not_wait_for_a_prefetch() {
    let layer = layer(1, TAR_GZIP, 3 << 20);
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob().clone());
    let scripted = Scripted::of(&layer, 0);
    scripted.serve(&bench, &filler);
    let prefetch = tokio::spawn({
        let (filler, id) = (filler.clone(), blob.id);
        async move { filler.fill(&id, 0, u64::MAX, Priority::Prefetch).await }
    });
    while scripted.reads(Priority::Prefetch) == 0 {
        tokio::task::yield_now().await;
    }
    // The prefetch waits long for its turn; the guest reads by itself.
    let demand = tokio::spawn({
        let (filler, id) = (filler.clone(), blob.id);
        async move { filler.fill(&id, 1 << 20, 4096, Priority::Demand).await }
    });
    while scripted.reads(Priority::Demand) == 0 {
        tokio::task::yield_now().await;
    }
    assert!(seen(&filler.stats().overtaken) > 0);
    scripted.permits.add_permits(1000);
    demand.await.unwrap().unwrap();
    prefetch.await.unwrap().unwrap();
    assert_eq!(bench.check(), blob.length.div_ceil(CHUNK_SIZE));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fill_that_is_dropped_lands_nevertheless() {
    let layer = layer(1, TAR_GZIP, 3 << 20);
    let bench = Bench::one().await;
    let (filler, blob) = (bench.filler(), bench.blob().clone());
    let scripted = Scripted::of(&layer, 0);
    scripted.serve(&bench, &filler);
    let dropped = tokio::spawn({
        let (filler, id) = (filler.clone(), blob.id);
        async move { filler.fill(&id, 1 << 20, 4096, Priority::Demand).await }
    });
    while scripted.reads(Priority::Demand) == 0 {
        tokio::task::yield_now().await;
    }
    dropped.abort();
    scripted.permits.add_permits(1000);
    filler
        .fill(&blob.id, 1 << 20, 4096, Priority::Demand)
        .await
        .unwrap();
    assert_eq!(scripted.reads(Priority::Demand), 1);
    // The read leaves the list after its callers are notified.
    while !filler.inner.in_flight.locked().is_empty() {
        tokio::task::yield_now().await;
    }
}

/// Like several processes: only the files are shared.
#[tokio::test(flavor = "multi_thread")]
async fn fetchers_that_race_write_the_same() {
    let bench = Bench::new(&[layer(1, TAR_GZIP, 2 << 20), layer(2, TAR_GZIP, 1 << 20)]).await;
    let mut racers = Vec::new();
    for racer in 0..4u64 {
        let store = Store::open(bench.store.root()).unwrap();
        let filler = Filler::new(store, fetch_options());
        let blobs = bench.image.blobs.clone();
        racers.push(tokio::spawn(async move {
            for step in 0..40u64 {
                for blob in &blobs {
                    let at = (step * 7919 + racer * 104_729) * 4096 % blob.length;
                    filler
                        .fill(&blob.id, at, 200_000, Priority::Demand)
                        .await
                        .unwrap();
                }
            }
            for blob in &blobs {
                filler
                    .fill(&blob.id, 0, u64::MAX, Priority::Demand)
                    .await
                    .unwrap();
            }
        }));
    }
    for racer in racers {
        racer.await.unwrap();
    }
    let all: u64 = bench
        .image
        .blobs
        .iter()
        .map(|it| it.length.div_ceil(CHUNK_SIZE))
        .sum();
    assert_eq!(bench.check(), all);
    let report = bench.store.verify(&bench.image.digest).unwrap();
    assert!(report.is_sound() && report.checked == all);
}
