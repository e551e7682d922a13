//! How long a freeze stops a guest: as thawd measured it, and the longest time between two pages of its server, which contains what else
//! happens on the processors.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::server::{Host, Size, shows};
use crate::Report;
use crate::clock::monotonic_ns;

/// Guests whose servers fill 128 MiB and 1 GiB.
pub const SMALL: Size = Size {
    memory_mib: 384,
    filled_mib: 128,
};
pub const LARGE: Size = Size {
    memory_mib: 1280,
    filled_mib: 1024,
};

/// The series of a size, as thawd measured it: from when the guest's agent stopped the workloads until they ran on.
pub fn name(size: Size) -> String {
    format!("freeze, {} MiB filled: stopped", size.filled_mib)
}

/// The same, seen from outside.
pub fn gap(size: Size) -> String {
    format!(
        "freeze, {} MiB filled: longest time without a page",
        size.filled_mib
    )
}

/// Freezes a server of each size in turn, so often.
pub async fn measure(host: &Host, rounds: usize, report: &mut Report) -> Result<(), String> {
    let mut servers = Vec::new();
    for size in [SMALL, LARGE] {
        servers.push((size, host.cold(size).await?));
    }
    for _ in 0..rounds {
        for (size, server) in &servers {
            host.node.settle().await?;
            let watch = Watch::begin(server.at);
            let frozen = host.freeze(server).await;
            let longest = watch.longest_ms().await?;
            let frozen = frozen?;
            report.sample(&host.series(&gap(*size)), "ms", longest);
            report.sample(&host.series(&name(*size)), "ms", frozen.stopped_ns as f64 / 1e6);
            let snapshot = frozen.snapshot.ok_or("the node did not store the snapshot")?;
            host.remove_snapshot(&snapshot).await?;
        }
        report.keep()?;
    }
    for (_, server) in servers {
        host.delete(server).await?;
    }
    Ok(())
}

/// Asks a server for its page again and again.
struct Watch {
    stop: Arc<AtomicBool>,
    watching: tokio::task::JoinHandle<u64>,
}

impl Watch {
    fn begin(at: SocketAddr) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let watching = tokio::task::spawn_blocking(move || {
            let (mut last, mut longest) = (monotonic_ns(), 0);
            while !stopped.load(Ordering::Acquire) {
                if shows(at) {
                    let now = monotonic_ns();
                    longest = longest.max(now - last);
                    last = now;
                }
            }
            longest
        });
        Watch { stop, watching }
    }

    /// Ends it. The longest time between two pages.
    async fn longest_ms(self) -> Result<f64, String> {
        self.stop.store(true, Ordering::Release);
        let longest = self.watching.await.map_err(|e| e.to_string())?;
        Ok(longest as f64 / 1e6)
    }
}
