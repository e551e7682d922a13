//! A snapshot in a registry: what versions of it take there, and its first thaw on a node that has never had it.
//!
//! The registry is Debian's docker-registry behind a proxy that carries 100 Mbit/s and answers after 5 ms; bytes are counted there.
//! Pushes, and pulls of the image, go past the proxy.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thaw_e2e::upstream::Upstream;
use thaw_protocol::api::{PullSnapshot, PushSnapshot};
use thaw_test_registry::proxy::{Link, Proxy};

use super::server::{Host, Server, failed};
use crate::Report;
use crate::clock::{monotonic_ns, us_since};
use crate::report::mib;

/// From the request to the server's first page, on a node that has the image and nothing of the snapshot.
pub const REMOTE: &str = "from the registry: first page";
/// What the registry sent until then.
pub const FETCHED: &str = "from the registry: fetched until the first page";
/// All that the snapshot has there, over the same link, into nothing.
pub const WHOLE: &str = "from the registry: all of it downloaded";
/// The pages that the thawed guest touched, as the node recorded them.
pub const WORKING_SET: &str = "from the registry: working set";
/// What the registry has after the first push.
pub const ONE: &str = "stored in the registry: one version";

/// Repository of the snapshots.
const REPOSITORY: &str = "web";
/// The first version's tag.
const FIRST: &str = "v1";
/// Pages that the server shows between two versions.
const VISITS: usize = 10;
/// How long the node may take to record a working set.
const RECORDED: Duration = Duration::from_secs(60);

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
    /// One that has an image of a layout, in `directory`.
    pub fn start(directory: &Path, layout: &str, image: &str) -> Result<Registry, String> {
        let upstream = Upstream::empty(&directory.join("registry"));
        upstream.push(&format!("oci:{layout}:{image}"), &format!("{image}:latest"));
        let proxy = Proxy::start(&upstream.host, Link::SLOW);
        Ok(Registry {
            proxy: proxy.map_err(|e| format!("the proxy: {e}"))?,
            upstream,
        })
    }

    /// The reference of the image.
    pub fn image(&self, image: &str) -> String {
        format!("{}/{image}:latest", self.upstream.host)
    }

    /// Freezes and pushes a server so often: versions of the same application, which was used in between.
    pub async fn push_versions(
        &self,
        host: &Host,
        server: &Server,
        count: usize,
        report: &mut Report,
    ) -> Result<(), String> {
        let client = &host.node.client;
        let mut stored = 0;
        for number in 1..=count {
            let frozen = host.freeze(server).await?;
            let snapshot = frozen.snapshot.ok_or("the node did not store the snapshot")?;
            let to = json!({"reference": format!("{}/{REPOSITORY}:v{number}", self.upstream.host)});
            let to: PushSnapshot = serde_json::from_value(to).map_err(|e| e.to_string())?;
            let pushed = client.push_snapshot(&snapshot, &to).await.map_err(failed)?;
            stored += pushed.sent_bytes;
            if number == 1 {
                report.sample(ONE, "MiB", mib(stored));
            }
            host.remove_snapshot(&snapshot).await?;
            for _ in 0..VISITS {
                server.visit().await?;
            }
        }
        report.sample(&versions(count), "MiB", mib(stored));
        Ok(())
    }

    /// Times first thaws of the first version on a node that has nothing of it, and downloads of all of it, in turn.
    pub async fn first_thaws(&self, host: &Host, rounds: usize, report: &mut Report) -> Result<(), String> {
        let from = json!({"reference": format!("{}/{REPOSITORY}:{FIRST}", self.proxy.host())});
        let from: PullSnapshot = serde_json::from_value(from).map_err(|e| e.to_string())?;
        for _ in 0..rounds {
            host.node.settle().await?;
            self.proxy.reset();
            let began = monotonic_ns();
            let pulled = host.node.client.pull_snapshot(&from).await.map_err(failed)?;
            let server = host.thaw(&pulled.id, began).await?;
            report.sample(REMOTE, "ms", server.ms);
            report.sample(FETCHED, "MiB", mib(self.proxy.counts().down));
            let touched = working_set(&host.node.place.path("data/working-sets")).await?;
            report.sample(WORKING_SET, "MiB", mib(touched));
            host.delete(server).await?;
            host.remove_snapshot(&pulled.id).await?;

            let place = self.proxy.host();
            let began = monotonic_ns();
            let downloaded = tokio::task::spawn_blocking(move || download(&place));
            let downloaded = downloaded.await.map_err(|e| e.to_string())?;
            downloaded.map_err(|e| format!("a download of all blobs: {e}"))?;
            report.sample(WHOLE, "ms", us_since(began) / 1e3);
        }
        Ok(())
    }
}

/// Downloads the config and all layers of the first version from `place` (`host:port`). Blocks.
fn download(place: &str) -> io::Result<()> {
    let mut manifest = String::new();
    get(place, &format!("manifests/{FIRST}"))?.read_to_string(&mut manifest)?;
    let manifest: Value = serde_json::from_str(&manifest)?;
    let layers = manifest["layers"].as_array().into_iter().flatten();
    for blob in layers.chain([&manifest["config"]]) {
        let digest = blob["digest"].as_str().unwrap_or_default();
        let received = io::copy(&mut get(place, &format!("blobs/{digest}"))?, &mut io::sink())?;
        if Some(received) != blob["size"].as_u64() {
            return Err(io::Error::other(format!("{digest}: {received} bytes")));
        }
    }
    Ok(())
}

/// The body of an answer of the registry, to its end.
fn get(place: &str, path: &str) -> io::Result<impl Read + use<>> {
    let mut stream = TcpStream::connect(place)?;
    write!(
        stream,
        "GET /v2/{REPOSITORY}/{path} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\
         Accept: application/vnd.oci.image.manifest.v1+json\r\n\r\n"
    )?;
    let mut answer = BufReader::new(stream);
    let mut status = String::new();
    answer.read_line(&mut status)?;
    if !status.contains(" 200 ") {
        return Err(io::Error::other(format!("{path}: {}", status.trim_end())));
    }
    let mut line = String::from(" ");
    while !line.trim_end_matches(['\r', '\n']).is_empty() {
        line.clear();
        answer.read_line(&mut line)?;
    }
    Ok(answer)
}

/// Waits until the node has recorded a working set. Bytes of the pages in the largest.
async fn working_set(directory: &Path) -> Result<u64, String> {
    let since = Instant::now();
    loop {
        let files = fs::read_dir(directory).into_iter().flatten().flatten();
        let touched = files.filter_map(|file| pages(&fs::read(file.path()).ok()?));
        if let Some(pages) = touched.max() {
            return Ok(pages * 4096);
        }
        if since.elapsed() > RECORDED {
            return Err(format!("no working set in {}", directory.display()));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How many pages a working set has (docs/snapshot-format.md).
fn pages(file: &[u8]) -> Option<u64> {
    let runs = file.get(64..)?.chunks_exact(16);
    let pages = runs.map(|run| Some(u64::from(u32::from_le_bytes(run.get(8..12)?.try_into().ok()?))));
    pages.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_all_runs_are_counted() {
        let mut file = vec![0; 64];
        for (first, pages) in [(1u64, 3u32), (9, 70_000)] {
            file.extend(first.to_le_bytes());
            file.extend(pages.to_le_bytes());
            file.extend([1, 0, 0, 0]);
        }
        assert_eq!(pages(&file), Some(70_003));
        assert_eq!(pages(&file[..60]), None);
    }
}
