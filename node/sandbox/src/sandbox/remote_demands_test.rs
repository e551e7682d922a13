//! When it is quiet.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Demands;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn it_is_quiet_some_time_after_the_last_caller() {
    let demands = Demands::new();
    let start = Instant::now();
    let callers = async {
        sleep(SECOND).await;
        let first = demands.begin();
        sleep(SECOND).await;
        let second = demands.begin();
        drop(first);
        // Longer than it takes to be quiet: it still waits.
        sleep(5 * SECOND).await;
        drop(second);
        sleep(SECOND).await;
        drop(demands.begin());
    };
    let background = async {
        demands.quiet(2 * SECOND).await;
        start.elapsed().as_secs()
    };
    assert_eq!(tokio::join!(callers, background).1, 10);
    demands.quiet(2 * SECOND).await;
    assert_eq!(start.elapsed().as_secs(), 10, "it still is");
}

#[tokio::test(start_paused = true)]
async fn nobody_makes_it_quiet_from_the_beginning() {
    let demands = Demands::new();
    let start = Instant::now();
    demands.quiet(2 * SECOND).await;
    assert_eq!(start.elapsed().as_secs(), 2);
}
