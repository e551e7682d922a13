//! A snapshot in a registry: what versions of it take there, and its first thaw on a node that has never had it.
//!
//! The registry is Debian's docker-registry behind a proxy that carries 100 Mbit/s and answers after 5 ms; bytes are counted there.
//! Pushes, and pulls of the image, go past the proxy.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use thaw_e2e::upstream::Upstream;
use thaw_protocol::api::{PullSnapshot, PushSnapshot};
use thaw_test_registry::proxy::{Link, Proxy};

use super::server::{Host, Server, failed};
use crate::Report;
use crate::clock::monotonic_ns;
use crate::report::mib;

/// From the request to the server's first page, on a node that has the image and nothing of the snapshot: thawed by its reference.
pub const REMOTE: &str = "from the registry, by its reference: first page";
/// What the registry sent until then, the documents and the disk included. thawd fetches the rest later, in the background.
pub const FETCHED: &str = "from the registry, by its reference: fetched until the first page";
/// The same of a snapshot that is pulled, and thawed then.
pub const WHOLE: &str = "from the registry, pulled before: first page";
/// What the registry has after the first push.
pub const ONE: &str = "stored in the registry: one version";

/// The first version's tag.
const FIRST: &str = "v1";
/// Pages that the server shows between two versions.
const VISITS: usize = 10;
/// A registry that was asked for nothing for so long is asked for nothing more: thawd fetches the rest of a snapshot two seconds after its
/// guest last waited for a part.
const QUIET: Duration = Duration::from_secs(5);

/// The series of so many versions.
pub fn versions(count: usize) -> String {
    format!("stored in the registry: {count} versions")
}

/// A registry and the link to it.
pub struct Registry {
    upstream: Upstream,
    proxy: Proxy,
}

impl Registry {
    /// One that has these images of a layout, in `directory`.
    pub fn start(directory: &Path, layout: &str, images: &[&str]) -> Result<Registry, String> {
        let upstream = Upstream::empty(&directory.join("registry"));
        for image in images {
            upstream.push(&format!("oci:{layout}:{image}"), &format!("{image}:latest"));
        }
        let proxy = Proxy::start(&upstream.host, Link::SLOW);
        Ok(Registry {
            proxy: proxy.map_err(|e| format!("the proxy: {e}"))?,
            upstream,
        })
    }

    /// The reference of an image.
    pub fn image(&self, image: &str) -> String {
        format!("{}/{image}:latest", self.upstream.host)
    }

    /// Pushes a snapshot of a server, and as many more that there are `count` in all: versions of the same application, which was used in
    /// between.
    pub async fn push_versions(
        &self,
        host: &Host,
        server: &Server,
        first: String,
        count: usize,
        report: &mut Report,
    ) -> Result<(), String> {
        let mut stored = self.push(host, first, FIRST).await?;
        report.sample(&host.series(ONE), "MiB", mib(stored));
        for number in 2..=count {
            for _ in 0..VISITS {
                server.visit().await?;
            }
            let frozen = host.freeze(server).await?;
            let snapshot = frozen.snapshot.ok_or("the node did not store the snapshot")?;
            stored += self.push(host, snapshot, &format!("v{number}")).await?;
        }
        report.sample(&host.series(&versions(count)), "MiB", mib(stored));
        Ok(())
    }

    /// Pushes a snapshot and removes it from the node. Bytes that the registry did not have.
    async fn push(&self, host: &Host, snapshot: String, tag: &str) -> Result<u64, String> {
        let to = json!({"reference": reference(&self.upstream.host, host, tag)});
        let to: PushSnapshot = serde_json::from_value(to).map_err(|e| e.to_string())?;
        let pushed = host.node.client.push_snapshot(&snapshot, &to).await;
        let pushed = pushed.map_err(failed)?;
        host.remove_snapshot(&snapshot).await?;
        Ok(pushed.sent_bytes)
    }

    /// Times first thaws of the first version on a node that has nothing of it: by its reference, and after a pull, in turn.
    pub async fn first_thaws(&self, host: &Host, rounds: usize, report: &mut Report) -> Result<(), String> {
        let reference = reference(&self.proxy.host(), host, FIRST);
        let pull: PullSnapshot =
            serde_json::from_value(json!({"reference": reference})).map_err(|e| e.to_string())?;
        for _ in 0..rounds {
            self.forget(host).await?;
            let server = host.thaw(&reference, monotonic_ns()).await?;
            let fetched = self.proxy.counts().down;
            report.sample(&host.series(REMOTE), "ms", server.ms);
            report.sample(&host.series(FETCHED), "MiB", mib(fetched));
            host.delete(server).await?;
            self.forget(host).await?;
            let began = monotonic_ns();
            let pulled = host.node.client.pull_snapshot(&pull).await.map_err(failed)?;
            let server = host.thaw(&pulled.id, began).await?;
            report.sample(&host.series(WHOLE), "ms", server.ms);
            host.delete(server).await?;
            report.keep()?;
        }
        Ok(())
    }

    /// Waits until the node fetches nothing, and removes all snapshots that it has.
    async fn forget(&self, host: &Host) -> Result<(), String> {
        while self.proxy.reset().0.down > 0 {
            tokio::time::sleep(QUIET).await;
        }
        let client = &host.node.client;
        for snapshot in client.snapshots().await.map_err(failed)? {
            host.remove_snapshot(&snapshot.id).await?;
        }
        host.node.settle().await?;
        self.proxy.reset();
        Ok(())
    }
}

/// The reference of a version, through `registry`, which is the registry itself or the proxy.
fn reference(registry: &str, host: &Host, tag: &str) -> String {
    format!("{registry}/warm-{}:{tag}", host.program.image)
}
