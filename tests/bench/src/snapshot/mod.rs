//! What `make bench-snapshot` measures. Here: thaws of a user's snapshot through thawd's API, beside creations from the template. The guest
//! is a few instructions long, so what is timed is the host's part. [`size`] measures how long a freeze stops such guests. The other modules
//! measure an HTTP server in a Linux guest:
//!
//! | module | what is measured |
//! |---|---|
//! | [`server`] | cold starts, thaws and pauses, until the server's page is there |
//! | [`clones`] | the memory of many clones |
//! | [`remote`] | the snapshot in a registry, and its first thaw on another node |
//! | [`stop`] | how long a freeze stops the server |

pub mod clones;
pub mod remote;
pub mod server;
pub mod size;
mod stalled;
pub mod stop;

use std::path::PathBuf;

use thaw_protocol::api::{CreatedSandbox, FreezeSandbox, ThawSandbox};

use crate::Report;
use crate::clock::{monotonic_ns, us_since};
use crate::create::{Node, Ready};

/// From a creation's request to its answer: the guest runs, from the template, in a parked machine.
pub const CREATED: &str = "creation from the template, parked";
/// The same of a thaw whose machine was parked with the snapshot in it.
pub const PARKED: &str = "thaw of a snapshot, parked";
/// The first thaw of a new snapshot, which thawd holds since the freeze.
pub const FIRST: &str = "thaw of a snapshot, the first";
/// The next one: no machine is parked with it yet.
pub const SECOND: &str = "thaw of a snapshot, the second";
/// The first thaw by a thawd that did not freeze it: the snapshot is read and compared with its hashes.
pub const UNHELD: &str = "thaw of a snapshot, the first after thawd's restart";
/// How long a freeze stops the guest.
pub const STOPPED: &str = "freeze: the guest is stopped";
/// From a freeze's request to its answer.
pub const FROZEN: &str = "freeze: answered";

/// How many machines wait for each origin.
pub const EACH: usize = 4;

/// A node with a sandbox whose snapshots are thawed.
pub struct Snapshots {
    node: Node,
    /// The sandbox.
    original: String,
    made: usize,
}

impl Snapshots {
    /// Makes the sandbox.
    pub async fn begin(node: Node) -> Result<Snapshots, String> {
        let made = node.client.create(&node.request()).await;
        Ok(Snapshots {
            original: made.map_err(|e| e.to_string())?.sandbox.id,
            node,
            made: 0,
        })
    }

    /// Times creations from the template, one at a time.
    pub async fn creations(&self, rounds: usize, report: &mut Report) -> Result<(), String> {
        for _ in 0..rounds {
            self.node.settle().await?;
            let began = monotonic_ns();
            let made = self.node.client.create(&self.node.request()).await;
            report.sample(CREATED, "ms", us_since(began) / 1e3);
            self.delete(made.map_err(|e| e.to_string())?, &[]).await?;
        }
        Ok(())
    }

    /// Freezes the sandbox, and times the freeze and the first two thaws of the snapshot. Returns its directory.
    pub async fn first_thaws(&mut self, report: &mut Report) -> Result<PathBuf, String> {
        self.made += 1;
        let directory = self.node.place.path(&format!("frozen-{}", self.made));
        let request = serde_json::json!({"directory": directory});
        let request: FreezeSandbox = serde_json::from_value(request).map_err(|e| e.to_string())?;
        let began = monotonic_ns();
        let frozen = self.node.client.freeze(&self.original, &request).await;
        let frozen = frozen.map_err(|e| e.to_string())?;
        report.sample(FROZEN, "ms", us_since(began) / 1e3);
        report.sample(STOPPED, "ms", frozen.paused_ns as f64 / 1e6);
        for series in [FIRST, SECOND] {
            self.node.settle().await?;
            let made = self.thaw(&directory, series, report).await?;
            self.delete(made, &[]).await?;
        }
        Ok(directory)
    }

    /// Times thaws of a snapshot with whose memory machines are parked, one at a time.
    pub async fn parked_thaws(
        &mut self,
        directory: &std::path::Path,
        rounds: usize,
        report: &mut Report,
    ) -> Result<(), String> {
        let mut warm_up = Report::new("warm-up");
        // The second makes a pool. Its working set, recorded meanwhile, makes another.
        for _ in 0..4 {
            let made = self.thaw(directory, SECOND, &mut warm_up).await?;
            tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
            self.delete(made, &[]).await?;
        }
        self.node.wait_for_more(EACH);
        for _ in 0..rounds {
            self.node.settle().await?;
            let made = self.thaw(directory, PARKED, report).await?;
            self.delete(made, &["no-parked-vm"]).await?;
        }
        Ok(())
    }

    /// Starts thawd again, as often, and times the first thaw of a snapshot by each.
    pub async fn thaws_after_restarts(
        mut self,
        directory: &std::path::Path,
        rounds: usize,
        report: &mut Report,
    ) -> Result<Snapshots, String> {
        for _ in 0..rounds {
            let node = Node::start(self.node.stop(), Ready::Parked, EACH..=2 * EACH).await?;
            self = Snapshots { node, ..self };
            let made = self.thaw(directory, UNHELD, report).await?;
            self.delete(made, &[]).await?;
        }
        Ok(self)
    }

    /// Ends the node.
    pub async fn end(self) -> Result<(), String> {
        let deleted = self.node.client.delete(&self.original).await;
        deleted.map_err(|e| e.to_string())?;
        self.node.stop();
        Ok(())
    }

    async fn thaw(
        &self,
        directory: &std::path::Path,
        series: &str,
        report: &mut Report,
    ) -> Result<CreatedSandbox, String> {
        let request = serde_json::json!({"directory": directory});
        let request: ThawSandbox = serde_json::from_value(request).map_err(|e| e.to_string())?;
        let began = monotonic_ns();
        let made = self.node.client.thaw(&request).await;
        let ms = us_since(began) / 1e3;
        let made = made.map_err(|e| format!("{e}; {}", e.context.join("; ")))?;
        report.sample(series, "ms", ms);
        for stage in &made.account.stages {
            let name = format!("{series}: stage {}", stage.name);
            report.sample(&name, "ms", stage.duration_ns as f64 / 1e6);
        }
        Ok(made)
    }

    /// Deletes a sandbox. Fails if it was slow for one of these reasons.
    async fn delete(&self, made: CreatedSandbox, never: &[&str]) -> Result<(), String> {
        let deleted = self.node.client.delete(&made.sandbox.id).await;
        deleted.map_err(|e| e.to_string())?;
        let mut reasons = made.account.reasons.iter();
        match reasons.find(|reason| never.contains(&reason.code.as_str())) {
            Some(reason) => Err(format!("a thaw was not of a parked machine: {}", reason.text)),
            None => Ok(()),
        }
    }
}
