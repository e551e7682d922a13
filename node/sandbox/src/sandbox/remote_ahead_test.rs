//! What is fetched ahead, and when.

use super::*;
use crate::sandbox::remote_files::tests::{READ, file, originals, part, remote};

/// A working set of these runs: the first page, and how many.
pub(in crate::sandbox) fn working_set(runs: &[(u64, u32)]) -> Vec<u8> {
    let mut bytes = b"THAWWSET\x01\0\0\0".to_vec();
    bytes.resize(64, 0);
    for (page, pages) in runs {
        bytes.extend(page.to_le_bytes());
        bytes.extend(pages.to_le_bytes());
        bytes.extend([0; 4]);
    }
    bytes
}

#[tokio::test(start_paused = true)]
async fn rest_waits_until_no_machine_has_waited_for_a_while() {
    let (files, registry) = remote(&originals(), |_| {});
    let ahead = FetchAhead::of(&files, Some(&working_set(&[(2 * CHUNK / PAGE, 1)])));
    assert_eq!((ahead.working_set.len(), ahead.rest.len()), (1, 2));
    let start = Instant::now();
    let machine = async {
        sleep(QUIET / 2).await;
        assert!(files.is_present(part(0, 2)), "the working set is here");
        files.fetch(part(0, 0)).await.unwrap();
        start.elapsed()
    };
    let background = async {
        ahead.working_set(&files).await.unwrap();
        ahead.rest(&files).await.unwrap();
        start.elapsed()
    };
    let (served, done) = tokio::join!(machine, background);
    assert!(
        (QUIET..QUIET + 5 * READ).contains(&(done - served)),
        "{served:?} {done:?}"
    );
    assert_eq!(registry.reads(), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn rest_is_fetched_in_the_end_whoever_waits() {
    let (files, registry) = remote(&originals(), |_| {});
    let ahead = FetchAhead::of(&files, None);
    let start = Instant::now();
    let _waits = files.expect_demands();
    ahead.rest(&files).await.unwrap();
    let took = start.elapsed();
    assert!((LATEST..LATEST + 10 * READ).contains(&took), "{took:?}");
    assert_eq!(registry.reads(), (0, 3));
}

/// How long it takes to fetch eight parts, when it has been quiet.
async fn took(working_set: &[u8]) -> Duration {
    let parts: Vec<(u64, &[u8])> = (0..8).map(|number| (number * CHUNK, &b"touched"[..])).collect();
    let (files, registry) = remote(&[file(8 * CHUNK, &parts)], |_| {});
    let ahead = FetchAhead::of(&files, Some(working_set));
    files.quiet(QUIET).await;
    let start = Instant::now();
    ahead.working_set(&files).await.unwrap();
    ahead.rest(&files).await.unwrap();
    assert_eq!(registry.reads(), (0, 8));
    start.elapsed()
}

#[tokio::test(start_paused = true)]
async fn working_set_is_read_several_parts_at_once_and_the_rest_one() {
    let all = working_set(&[(0, (8 * CHUNK / PAGE) as u32)]);
    assert!(took(&all).await < 4 * READ);
    assert!(took(b"").await >= 8 * READ);
}
