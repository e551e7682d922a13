//! Many creations and deletions through the API: afterwards thawd has its earlier size, and the host is as before.
//!
//! `THAW_SOAK_CREATES` is their number; `make soak` uses 24,000.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use thaw_daemon::api::client::Client;
use thaw_protocol::api::CreateSandbox;
use thaw_tiny_guest::bare::bare;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::kernel::{Cost, objects};
use thaw_tiny_node::{Counts, Place, Thawd, asked};

/// The default number of creations.
const CREATES: usize = 200;
/// Number of creations in progress at a time.
const OVERLAP: usize = 4;
/// The size of each pool.
const READY: usize = 4;
/// The pools whose resources are descriptors.
const POOLS: [&str; 3] = ["disk", "network", "shell"];

async fn many(place: &Place, asked: &CreateSandbox, count: usize) {
    // The connections that it keeps end with it.
    let client = Client::connect(&place.socket()).unwrap();
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..OVERLAP {
        let (client, asked, next) = (client.clone(), asked.clone(), next.clone());
        workers.spawn(async move {
            while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < count) {
                let made = client.create(&asked).await.unwrap();
                client.delete(&made.sandbox.id).await.unwrap();
                if (number + 1) % 1000 == 0 {
                    eprintln!("soak: {} of {count}", number + 1);
                }
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.unwrap();
    }
}

/// The resources of an idle thawd whose pools are full.
fn settled(place: &Place, thawd: &Thawd) -> Cost {
    let cost = || Cost::of(thawd.record().pid).unwrap();
    // The number of descriptors may also stay the same because a pool waits for a processor.
    let gauge = |name: &str, pool: &str| {
        let name = format!("thaw_pool_{name}{{pool=\"{pool}\"}}");
        asked::metric(place, &name).unwrap_or_else(|| panic!("no {name}"))
    };
    eventually("nothing is made or destroyed", || {
        POOLS.iter().all(|pool| {
            let is_at_rest = gauge("making", pool) == 0.0 && gauge("doomed", pool) == 0.0;
            is_at_rest && gauge("ready", pool) >= gauge("low", pool)
        })
    });
    let mut seen = (0, cost().descriptors);
    eventually("its pools are full", || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let now = cost().descriptors;
        seen = match now == seen.1 && place.spares() == READY {
            true => (seen.0 + 1, now),
            false => (0, now),
        };
        seen.0 == 5
    });
    cost()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn creations_by_the_thousand_leave_the_host_as_it_was() {
    let count = std::env::var("THAW_SOAK_CREATES").map_or(CREATES, |n| n.parse().unwrap());
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
    let Some(place) = Place::new(binaries, &bare(0)) else {
        return;
    };
    place.fill_pools_to(READY..=READY, 0..=0);
    let asked: CreateSandbox = serde_json::from_value(place.request()).unwrap();
    let mut thawds = Vec::new();
    let mut begin = || {
        let thawd = Thawd::start(&place);
        thawds.push(thawd.record());
        thawd
    };
    // The first creations make what later ones reuse.
    let thawd = begin();
    many(&place, &asked, 2).await;
    assert!(thawd.stop().success());
    let empty = Counts::of(&place, &[]);

    let thawd = begin();
    many(&place, &asked, (count / 20).max(50)).await;
    let (before, kernel_before) = (settled(&place, &thawd), objects());
    many(&place, &asked, count).await;
    let (after, kernel_after) = (settled(&place, &thawd), objects());
    println!("{count} creations: before {before:?}, after {after:?}");
    println!("the kernel's objects, of all processes: before {kernel_before:?}, after {kernel_after:?}");
    assert!(
        after.descriptors <= before.descriptors,
        "descriptors leak: {before:?}, {after:?}"
    );
    // An allocator may keep some memory; a leak grows with the count.
    let spare_kib = 16 << 10;
    assert!(
        after.rss_kib <= before.rss_kib * 5 / 4 + spare_kib,
        "memory leaks: {before:?}, {after:?}"
    );
    // Other programs use this kernel too, so a leak shows only if at least one in ten creations leaks. The kernel frees a slot's namespace
    // and its sockets some time after the slot.
    let most = |kind: &str| kernel_before.get(kind).copied().unwrap_or_default() + count as u64 / 10 + 256;
    eventually("the kernel has freed its objects", || {
        objects().into_iter().all(|(kind, now)| now <= most(kind))
    });
    assert!(thawd.stop().success(), "{}", log(&place));
    let mut now = Counts::default();
    eventually("nothing is left", || {
        now = Counts::of(&place, &thawds);
        now == empty
    });
    println!("{count} creations: nothing left");
}
