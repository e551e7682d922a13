//! A warm HTTP server in a Linux guest: its cold starts, thaws and pauses, each until its page is there.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use thaw_e2e::{page, warmed};
use thaw_protocol::api::{
    CreateSandbox, CreatedSandbox, FreezeSandbox, FrozenSandbox, PauseSandbox, PausedMemory, Sandbox,
    ThawSandbox,
};
use thaw_sandbox::error::Error;
use thaw_tiny_node::Place;

use super::stalled;
use crate::Report;
use crate::clock::{monotonic_ns, progress, us_since};
use crate::create::Node;
use crate::report::mib;
use crate::shim::memory::line;

/// The benchmark, as it says where it is.
pub const NAME: &str = "bench-snapshot-linux";

/// From the request to the server's first page: created from the image, which is stored.
pub const COLD: &str = "cold start from the image: first page";
/// The same of a thaw of a snapshot on the node that froze it.
pub const THAWED: &str = "thaw of the snapshot: first page";
/// The same of a sandbox that was paused with its memory released.
pub const RESUMED: &str = "resume of released memory: first page";
/// Until the answer to such a pause.
pub const PAUSED: &str = "pause that releases memory: answered";
/// What it then has on the disk, beside the sandbox's disks, whose blocks may be shared with those of others.
pub const PAUSED_BYTES: &str = "pause that releases memory: on disk";
/// What the machine had of its own just before: all that it wrote since it was thawed from the template.
pub const DIRTIED: &str = "pause that releases memory: dirtied since the thaw";
/// The pages that a thawed guest touched in the first second, as the node recorded them.
pub const WORKING_SET: &str = "thaw of the snapshot: working set";
/// What the server fills of its memory.
pub const FILLED: &str = "memory that the server fills";

/// How long a connection may wait: shorter than until a lost packet is sent again.
const CONNECT_LIMIT: Duration = Duration::from_millis(200);
/// Between two attempts: at least this, and so small a part of what has passed. The guest answers each, on the processor that it starts on.
const PAUSE: Duration = Duration::from_millis(2);
const PART: u32 = 100;
/// How long a server may take until its page is there. One that fills 1 GiB takes minutes on an emulated processor.
const PAGE_LIMIT: Duration = Duration::from_secs(600);
/// How long the node may take to record a working set.
const RECORD_LIMIT: Duration = Duration::from_secs(300);
/// Creations after which the templates of a size are there.
const WARM_UP: usize = 4;

/// A server.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Its language, which names its series.
    pub name: &'static str,
    /// Its test image.
    pub image: &'static str,
    /// The command that fills so many MiB with random bytes and then answers.
    command: fn(u32) -> Vec<String>,
}

/// Python's, which the end-to-end tests have too.
pub const PYTHON: Program = Program {
    name: "Python",
    image: "python3",
    command: |filled_mib| warmed::command(filled_mib).into(),
};
/// The JDK's `HttpServer` (`tests/images/long.json`).
pub const JAVA: Program = Program {
    name: "Java",
    image: "java-server",
    command: |filled_mib| {
        let heap = format!("-Xmx{}m", filled_mib + 200);
        let words = [
            "java",
            &heap,
            "-XX:+UseSerialGC",
            "-Djava.net.preferIPv4Stack=true",
            "-cp",
            "/app",
            "Warmed",
        ];
        let words = words.into_iter().map(str::to_owned);
        words.chain([filled_mib.to_string()]).collect()
    },
};

/// A guest's memory, and what the server fills of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub memory_mib: u32,
    pub filled_mib: u32,
}

/// A node and its servers.
pub struct Host {
    pub node: Node,
    pub program: Program,
    /// The image's reference.
    image: String,
}

/// A server whose page was seen.
pub struct Server {
    /// Its sandbox.
    pub id: String,
    /// The process of its machine.
    pub vmm: i64,
    /// Where the host reaches it.
    pub at: SocketAddr,
    /// From the request to the page.
    pub ms: f64,
}

impl Host {
    /// Starts a node, which pulls the image, starts a server once and makes the template of this size.
    pub async fn start(place: Place, program: Program, image: &str, size: Size) -> Result<Host, String> {
        let host = Host {
            node: Node::configured(place)?,
            program,
            image: image.to_owned(),
        };
        let filled_mib = 1;
        let server = host.cold(Size { filled_mib, ..size }).await?;
        host.delete(server).await?;
        let idle = host.request(size, vec!["sleep".into(), "infinity".into()])?;
        for _ in 1..WARM_UP {
            let made = host.node.client.create(&idle).await.map_err(failed)?;
            host.node.client.delete(&made.sandbox.id).await.map_err(failed)?;
        }
        host.node.settle().await?;
        Ok(host)
    }

    /// What creates a sandbox of the image with this command.
    fn request(&self, size: Size, command: Vec<String>) -> Result<CreateSandbox, String> {
        let request = json!({
            "image": self.image, "cpus": 1, "memory_mib": size.memory_mib,
            "container": {"command": command},
        });
        serde_json::from_value(request).map_err(|e| e.to_string())
    }

    /// The series of a quantity of its servers.
    pub fn series(&self, what: &str) -> String {
        series(self.program, what)
    }

    /// Starts a server from the image.
    pub async fn cold(&self, size: Size) -> Result<Server, String> {
        let request = self.request(size, (self.program.command)(size.filled_mib))?;
        let began = monotonic_ns();
        let made = self.node.client.create(&request).await.map_err(failed)?;
        Server::of(&self.node.place, made, began).await
    }

    /// Thaws a stored snapshot. `began`: when what is timed began.
    pub async fn thaw(&self, snapshot: &str, began: u64) -> Result<Server, String> {
        let request = json!({"snapshot": snapshot});
        let request: ThawSandbox = serde_json::from_value(request).map_err(|e| e.to_string())?;
        let made = self.node.client.thaw(&request).await.map_err(failed)?;
        Server::of(&self.node.place, made, began).await
    }

    /// Has the node store a snapshot of a server.
    pub async fn freeze(&self, server: &Server) -> Result<FrozenSandbox, String> {
        let stored = FreezeSandbox::default();
        let frozen = self.node.client.freeze(&server.id, &stored);
        frozen.await.map_err(failed)
    }

    /// Stops a server's processors, and keeps its memory.
    pub async fn hold(&self, server: &Server) -> Result<(), String> {
        let kept = PauseSandbox {
            memory: PausedMemory::Keep,
        };
        let held = self.node.client.pause_as(&server.id, &kept);
        held.await.map_err(failed)
    }

    /// Deletes a server.
    pub async fn delete(&self, server: Server) -> Result<(), String> {
        self.node.client.delete(&server.id).await.map_err(failed)
    }

    /// Removes a stored snapshot, whatever was thawed from it.
    pub async fn remove_snapshot(&self, snapshot: &str) -> Result<(), String> {
        let removed = self.node.client.remove_snapshot(snapshot, true);
        removed.await.map_err(failed)
    }

    /// Times cold starts.
    pub async fn cold_starts(&self, size: Size, rounds: usize, report: &mut Report) -> Result<(), String> {
        for _ in 0..rounds {
            self.node.settle().await?;
            let server = self.cold(size).await?;
            report.sample(&self.series(COLD), "ms", server.ms);
            progress(NAME, format!("{} {:.0} ms", self.series(COLD), server.ms));
            self.delete(server).await?;
        }
        Ok(())
    }

    /// Thaws a snapshot until the node has recorded its working set, and times further thaws.
    pub async fn thaws(&self, snapshot: &str, rounds: usize, report: &mut Report) -> Result<(), String> {
        let recorded = self.node.place.path("data/working-sets");
        // Those of templates are there too.
        let before = names(&recorded);
        let server = self.thaw(snapshot, monotonic_ns()).await?;
        let touched = working_set(&recorded, &before).await?;
        report.sample(&self.series(WORKING_SET), "MiB", mib(touched));
        self.delete(server).await?;
        for _ in 0..rounds {
            self.node.settle().await?;
            let server = self.thaw(snapshot, monotonic_ns()).await?;
            report.sample(&self.series(THAWED), "ms", server.ms);
            progress(NAME, format!("{} {:.0} ms", self.series(THAWED), server.ms));
            self.delete(server).await?;
        }
        Ok(())
    }

    /// Pauses servers with their memory released and resumes them, each once: a second pause writes what the first wrote, too.
    pub async fn pauses(&self, size: Size, rounds: usize, report: &mut Report) -> Result<(), String> {
        let client = &self.node.client;
        for _ in 0..rounds {
            let server = self.cold(size).await?;
            self.node.settle().await?;
            let dirtied = dirtied(server.vmm)?;
            report.sample(&self.series(DIRTIED), "MiB", mib(dirtied));
            let release = PauseSandbox {
                memory: PausedMemory::Release,
            };
            let began = monotonic_ns();
            let paused = client.pause_as(&server.id, &release);
            paused.await.map_err(failed)?;
            report.sample(&self.series(PAUSED), "ms", us_since(began) / 1e3);
            let on_disk = occupied(&self.node.place.path("data/paused"));
            let on_disk = on_disk.map_err(|e| format!("data/paused: {e}"))?;
            report.sample(&self.series(PAUSED_BYTES), "MiB", mib(on_disk));
            let began = monotonic_ns();
            client.resume(&server.id).await.map_err(failed)?;
            let shown = client.get(&server.id).await.map_err(failed)?;
            let server = Server::shown(&self.node.place, shown, began).await?;
            report.sample(&self.series(RESUMED), "ms", server.ms);
            self.delete(server).await?;
        }
        Ok(())
    }
}

impl Server {
    async fn of(place: &Place, made: CreatedSandbox, began: u64) -> Result<Server, String> {
        Server::shown(place, made.sandbox, began).await
    }

    /// Waits for its page.
    async fn shown(place: &Place, sandbox: Sandbox, began: u64) -> Result<Server, String> {
        let address = sandbox.network.map(|network| network.address);
        let address: Option<IpAddr> = address.and_then(|address| address.parse().ok());
        let address = address.ok_or_else(|| format!("sandbox {} has no address", sandbox.id))?;
        let at = SocketAddr::new(address, warmed::PORT);
        let waiting = tokio::task::spawn_blocking(move || first_page(at, began));
        let vmm = sandbox.vmm_pid.unwrap_or_default().into();
        let ms = waiting.await.map_err(|e| e.to_string())?;
        Ok(Server {
            ms: ms.map_err(|e| format!("{e}; {}", stalled::describe(place, &sandbox.id, vmm)))?,
            id: sandbox.id,
            vmm,
            at,
        })
    }

    /// Asks for its page.
    pub async fn visit(&self) -> Result<(), String> {
        let at = self.at;
        let visited = tokio::task::spawn_blocking(move || first_page(at, monotonic_ns()));
        visited.await.map_err(|e| e.to_string())?.map(drop)
    }
}

/// The series of a quantity of a program's servers.
pub fn series(program: Program, what: &str) -> String {
    format!("{}: {what}", program.name)
}

/// Whether a server shows its page now.
pub fn shows(at: SocketAddr) -> bool {
    // Java's answers with another version of the protocol than it was asked in.
    page::get(at, CONNECT_LIMIT).is_ok_and(|answer| answer.get(8..13) == Some(" 200 "))
}

/// Waits for a server's page. Milliseconds since `began`. Blocks.
fn first_page(at: SocketAddr, began: u64) -> Result<f64, String> {
    let since = Instant::now();
    while !shows(at) {
        if since.elapsed() > PAGE_LIMIT {
            return Err(format!("the server at {at} shows no page"));
        }
        std::thread::sleep(PAUSE.max(since.elapsed() / PART));
    }
    Ok(us_since(began) / 1e3)
}

/// What the API refused, with its context.
pub fn failed(e: Error) -> String {
    format!("{e}; {}", e.context.join("; "))
}

/// Files of a directory, none if it is not there.
fn names(directory: &Path) -> BTreeSet<PathBuf> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    files.map(|file| file.path()).collect()
}

/// Waits until a node has recorded a working set that was not there before. Bytes of its pages.
async fn working_set(directory: &Path, before: &BTreeSet<PathBuf>) -> Result<u64, String> {
    let since = Instant::now();
    loop {
        let recorded = names(directory);
        let new = recorded.difference(before);
        let mut touched = new.filter_map(|file| pages(&fs::read(file).ok()?));
        if let Some(pages) = touched.next() {
            return Ok(pages * 4096);
        }
        if since.elapsed() > RECORD_LIMIT {
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

/// Bytes that a VMM has of its own: what its guest wrote, and about a mebibyte of its own.
pub(super) fn dirtied(vmm: i64) -> Result<u64, String> {
    let path = format!("/proc/{vmm}/smaps_rollup");
    let rollup = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    Ok(line(&rollup, "Anonymous:") as u64 * 1024)
}

/// Bytes that the files below a directory occupy, but for those in directories called `disks`: blocks that are shared with other files count as
/// those of each.
fn occupied(directory: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += match metadata.is_dir() {
            true if entry.file_name() == "disks" => 0,
            true => occupied(&entry.path())?,
            false => metadata.blocks() * 512,
        };
    }
    Ok(bytes)
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

    #[test]
    fn holes_occupy_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("a");
        fs::create_dir(&below).unwrap();
        let file = fs::File::create(below.join("sparse")).unwrap();
        file.set_len(64 << 20).unwrap();
        assert!(occupied(directory.path()).unwrap() < 1 << 20);
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; 2 << 20], 0).unwrap();
        file.sync_all().unwrap();
        assert!(occupied(directory.path()).unwrap() >= 2 << 20);
        fs::rename(below, directory.path().join("disks")).unwrap();
        assert!(occupied(directory.path()).unwrap() < 1 << 20);
    }
}
