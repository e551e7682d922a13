//! How long a freeze stops a tiny guest, by how much memory it has: all of it is written while the guest runs (Linux 6.4).

use std::path::Path;

use thaw_protocol::api::FreezeSandbox;
use thaw_tiny_guest::bare::lasting_filled;
use thaw_tiny_node::Place;

use super::server::failed;
use crate::Report;
use crate::create::Node;

/// What the guests fill of their memory, MiB.
pub const SMALL_MIB: u32 = 128;
pub const LARGE_MIB: u32 = 1024;
/// What they have beyond that, MiB.
const SPARE_MIB: u32 = 128;

/// The series of a size, as thawd measured it.
pub fn series(filled_mib: u32) -> String {
    format!("freeze of {filled_mib} MiB: the guest is stopped")
}

/// Freezes a guest of each size in turn, so often, and once more at first to warm up. thawd and thaw-vmm are in `binaries`.
///
/// # Errors
/// A request failed, or this host cannot run it.
pub async fn run(binaries: &Path, rounds: usize, report: &mut Report) -> Result<(), String> {
    let mut guests = Vec::new();
    for filled_mib in [SMALL_MIB, LARGE_MIB] {
        let place = Place::new(binaries, &lasting_filled(filled_mib));
        let node = Node::configured(place.ok_or("this host cannot run it")?)?;
        let mut request = node.request();
        request.memory_mib = filled_mib + SPARE_MIB;
        let made = node.client.create(&request).await.map_err(failed)?;
        guests.push((filled_mib, node, made.sandbox.id));
    }
    for round in 0..=rounds {
        for (filled_mib, node, id) in &guests {
            node.settle().await?;
            let frozen = node.client.freeze(id, &FreezeSandbox::default()).await;
            let frozen = frozen.map_err(failed)?;
            if round > 0 {
                report.sample(&series(*filled_mib), "ms", frozen.paused_ns as f64 / 1e6);
            }
            let snapshot = frozen.snapshot.ok_or("the node did not store the snapshot")?;
            let removed = node.client.remove_snapshot(&snapshot, true).await;
            removed.map_err(failed)?;
        }
    }
    for (_, node, id) in guests {
        node.client.delete(&id).await.map_err(failed)?;
        node.stop();
    }
    Ok(())
}
