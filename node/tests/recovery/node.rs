//! A node whose thawds are killed, and the checks of its state afterwards.

use std::path::Path;
use std::time::{Duration, Instant};

use thaw_daemon::api::client::Client;
use thaw_failpoint::Failpoint;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, FreezeSandbox, Sandbox, ThawSandbox};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_test_registry::memory::Registry;
use thaw_tiny_guest::Guest;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, eventually_or, log};
use thaw_tiny_node::{Counts, Place, Thawd, counts};

/// The path that the survivor is frozen to.
const SURVIVOR: &str = "frozen/survivor";
/// Name of a partial snapshot.
const HALF: &str = ".thaw-partial-dead";
/// The directory of a sandbox whose pause was not finished.
const HALF_PAUSED: &str = "data/paused/0123456789ab";
/// The directory of a stored snapshot that was not finished.
const HALF_STORED: &str = "data/frozen/0123456789ab";
/// How long the kernel may take to remove the namespace of a slot that no process has open.
const REMOVAL: Duration = Duration::from_secs(60);
/// The directories of names.
const NAMES: [&str; 2] = ["run/names", "data/paused-names"];

/// A node, and the thawds that it has had.
pub struct Node {
    pub place: Place,
    pub thawds: Vec<ProcessRecord>,
    /// The counts when only what is reused remains.
    pub empty: Counts,
    /// The snapshots of a node whose clones have their memory in a registry.
    pub pushed: Option<Pushed>,
    /// That node, once it was needed.
    pub remote: Option<Box<Node>>,
}

impl Node {
    /// `None` if the test cannot run here; the reason has been reported.
    pub fn new() -> Option<Node> {
        let node = Node::of(&lasting())?;
        node.place.fill_pools_to(1..=1, 1..=1);
        Some(node)
    }

    /// The same with other guests.
    pub fn of(guest: &Guest) -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
        let place = Place::new(binaries, guest)?;
        for directory in ["data/forks", "data/frozen", "data/paused", "data/working-sets"] {
            std::fs::create_dir_all(place.path(directory)).unwrap();
        }
        Some(Node {
            place,
            thawds: Vec::new(),
            empty: Counts::default(),
            pushed: None,
            remote: None,
        })
    }

    /// Another place, in which nothing was made yet.
    pub fn anew(&self) -> Node {
        let mut node = Node::new().unwrap();
        node.empty = self.empty.clone();
        node
    }

    pub fn start(&mut self) -> Thawd {
        let thawd = Thawd::start(&self.place);
        self.thawds.push(thawd.record());
        thawd
    }

    /// Starts a thawd that dies at a failpoint the `nth` time it reaches it.
    pub fn start_doomed(&mut self, point: Failpoint, nth: usize) -> Thawd {
        let mut command = self.place.thawd();
        command.args(["--failpoint", &format!("{point}:{nth}")]);
        let doomed = Thawd::begin(&self.place, command);
        self.thawds.push(doomed.record());
        doomed
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.place.socket()).unwrap()
    }

    pub fn counts(&self) -> Counts {
        Counts::of(&self.place, &self.thawds)
    }

    /// Waits until only what is reused remains.
    pub fn is_empty_again(&self, what: &str) {
        let mut now = self.counts();
        let since = Instant::now();
        while now != self.empty && since.elapsed() < REMOVAL {
            std::thread::sleep(Duration::from_millis(10));
            now = self.counts();
        }
        assert_eq!(now, self.empty, "{what}: {}", log(&self.place));
    }

    /// Makes everything once that later runs reuse, and counts what remains when nothing runs.
    pub async fn learn_what_stays(&mut self) {
        let thawd = self.start();
        self.make_one().await;
        assert!(thawd.stop().success());
        let counts = self.counts();
        assert_eq!(
            (counts.processes.len(), counts.cgroups.len()),
            (0, 0),
            "{counts:?}"
        );
        assert!(
            counts.sockets.is_empty() && counts.taps + counts.namespaces + counts.machines == 0,
            "{counts:?}"
        );
        self.empty = counts;
    }

    /// Creates a sandbox and deletes it.
    pub async fn make_one(&self) {
        let client = self.client();
        let made = client.create(&request(&self.place)).await;
        let made = made.unwrap_or_else(|e| panic!("{e}: {}", log(&self.place)));
        client.delete(&made.sandbox.id).await.unwrap();
    }

    /// Leaves a running sandbox, the resources that a killed thawd had made ahead, and a partial snapshot.
    pub async fn survivor(&mut self) -> Sandbox {
        let thawd = self.start();
        let client = self.client();
        let survivor = client.create(&request(&self.place)).await.unwrap().sandbox;
        self.make_one().await;
        eventually("a machine waits", || self.place.spares() > 0);
        thawd.kill();
        for directory in ["data/forks", "frozen"] {
            std::fs::create_dir_all(self.place.path(directory).join(HALF)).unwrap();
        }
        for half in [HALF_STORED, HALF_PAUSED] {
            std::fs::create_dir_all(self.place.path(half).join("snapshot")).unwrap();
        }
        for names in NAMES {
            let names = self.place.path(names);
            std::fs::create_dir_all(&names).unwrap();
            std::fs::write(names.join("0".repeat(64)), "0123456789ab").unwrap();
        }
        std::fs::write(self.place.path("data/verified/.1.0.dead.new"), "half").unwrap();
        survivor
    }

    /// Leaves a port that is forwarded to a sandbox which died after its thawd.
    pub async fn lost_port(&mut self) {
        let thawd = self.start();
        let mut published = request(&self.place);
        published.publish = serde_json::from_value(serde_json::json!([{"host": 0, "guest": 80}])).unwrap();
        let published = self.client().create(&published).await.unwrap().sandbox;
        thawd.kill();
        ProcessRecord::of(published.vmm_pid.unwrap()).unwrap().kill();
        // The kernel removes namespaces some time later.
        let links = || {
            counts::interfaces()
                .into_iter()
                .filter(|i| i.starts_with("thaw-n"))
        };
        eventually("no slot is left but the survivor's", || links().count() <= 1);
    }

    /// Checks that the next thawd takes over what lives, removes the rest, and works. Once it is stopped after its last sandbox, only what
    /// is reused remains. Returns the names of the sandboxes listed as failed.
    pub async fn recovers(&mut self, what: &str, survivor: Option<&Sandbox>) -> Vec<String> {
        if let Some(survivor) = survivor {
            let vmm = survivor.vmm_pid.and_then(ProcessRecord::of);
            assert!(vmm.is_some(), "{what}: the sandbox does not go on");
        }
        let next = self.start();
        let client = self.client();
        let listed = client.list().await.unwrap();
        let (failed, living): (Vec<_>, Vec<_>) = listed.into_iter().partition(|s| s.state == "failed");
        assert!(failed.len() <= 1, "{what}: {failed:?}");
        if let Some(survivor) = survivor {
            let found = living.iter().find(|s| s.id == survivor.id);
            let found = found.unwrap_or_else(|| {
                panic!(
                    "{what}: the sandbox is not taken over: {living:?}; {}",
                    log(&self.place)
                )
            });
            assert_eq!(
                (found.state.as_str(), found.vmm_pid),
                ("running", survivor.vmm_pid),
                "{what}"
            );
        }
        // The survivor, the first of the course, and the two that are made at once.
        assert!(living.len() <= 4, "{what}: {living:?}");
        // A killed process exists until the kernel removes it.
        let (paused, running): (Vec<_>, Vec<_>) = living.iter().partition(|s| s.memory_released);
        let otherwise = || {
            let processes = self.counts().processes;
            format!(
                "{what}: as many VMMs as sandboxes: {processes:?}, {living:?}; {}",
                log(&self.place)
            )
        };
        eventually_or(otherwise, || self.counts().vmms() == running.len());
        self.has_paused(&client, &paused, what).await;
        for sandbox in &living {
            assert_ne!(sandbox.state, "ended", "{what}");
        }
        // A partial snapshot of an adopted sandbox is removed; others are removed when another snapshot is made beside them.
        let frozen = || -> Vec<String> {
            let entries = std::fs::read_dir(self.place.path("frozen")).into_iter().flatten();
            let names = entries
                .flatten()
                .map(|e| e.file_name().to_string_lossy().into_owned());
            names
                .filter(|name| name != "snapshot" && name != "survivor")
                .collect()
        };
        assert!(frozen().iter().all(|name| name == HALF), "{what}: {:?}", frozen());
        if let Some(survivor) = survivor {
            // The snapshot is complete: its copy wakes and reports that.
            let at = serde_json::json!({"directory": self.place.path(SURVIVOR)});
            let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
            let thaw: ThawSandbox = serde_json::from_value(at).unwrap();
            client.freeze(&survivor.id, &freeze).await.unwrap();
            let copy = client.thaw(&thaw).await.unwrap().sandbox;
            client.delete(&copy.id).await.unwrap();
            assert!(frozen().is_empty(), "{what}: {:?}", frozen());
        }
        self.has_whole_snapshots(&client, what).await;
        // It works again.
        self.make_one().await;
        for sandbox in living.iter().chain(&failed) {
            client.delete(&sandbox.id).await.unwrap();
        }
        assert!(next.stop().success(), "{what}: {}", log(&self.place));
        let _ = std::fs::remove_dir_all(self.place.path("frozen"));
        self.is_empty_again(what);
        failed.into_iter().filter_map(|s| s.name).collect()
    }
}

impl Node {
    /// Checks that there is nothing else among the paused sandboxes, and that each is resumed and is then there no more.
    async fn has_paused(&self, client: &Client, paused: &[&Sandbox], what: &str) {
        let on_disk = || std::fs::read_dir(self.place.path("data/paused")).unwrap().count();
        assert_eq!(
            on_disk(),
            paused.len(),
            "{what}: {paused:?}; {}",
            log(&self.place)
        );
        for sandbox in paused {
            resume(client, &sandbox.id).await;
            let resumed = client.get(&sandbox.id).await.unwrap();
            assert_eq!(
                (resumed.state.as_str(), resumed.memory_released),
                ("running", false)
            );
        }
        assert_eq!(on_disk(), 0, "{what}");
    }

    /// Checks that every stored snapshot is whole, and that there is nothing else in the store. Removes them.
    async fn has_whole_snapshots(&self, client: &Client, what: &str) {
        let stored = client.snapshots().await.unwrap();
        let entries = std::fs::read_dir(self.place.path("data/frozen")).unwrap();
        assert_eq!(entries.count(), stored.len(), "{what}: {stored:?}");
        for snapshot in stored {
            let verified = client.verify_snapshot(&snapshot.id).await.unwrap();
            assert!(verified.damaged.is_empty(), "{what}: {verified:?}");
            client.remove_snapshot(&snapshot.id, false).await.unwrap();
        }
    }
}

/// Resumes a sandbox. If thawd was killed while it resumed this one, the sandbox's port leads to the slot of that resume until the kernel
/// removes the slot's namespace, which is some time after its last process has ended.
async fn resume(client: &Client, id: &str) {
    let began = Instant::now();
    while let Err(e) = client.resume(id).await {
        let is_leaving = e.kind == ErrorKind::PortUnavailable && began.elapsed() < REMOVAL;
        assert!(is_leaving, "{e}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A snapshot in a registry, and another one that the node stores.
pub struct Pushed {
    pub registry: Registry,
    /// The id of the stored one.
    pub other: String,
}

impl Pushed {
    /// The snapshots differ by tag, because the test registry ignores the name of the repository.
    pub fn reference(&self, name: &str) -> String {
        format!("{}/snapshots:{name}", self.registry.host())
    }
}

/// The error of a caller whose thawd has died.
pub fn gone() -> Error {
    Error::new(ErrorKind::DaemonUnreachable, "it does not answer")
}

/// A request for a sandbox.
pub fn request(place: &Place) -> CreateSandbox {
    serde_json::from_value(place.request()).unwrap()
}
