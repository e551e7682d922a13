//! A node whose thawds are killed, and what must be of it after.

use std::path::Path;
use std::time::{Duration, Instant};

use thaw_daemon::api::client::Client;
use thaw_failpoint::Failpoint;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, FreezeSandbox, Sandbox, ThawSandbox};
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd, counts};

/// Where the survivor is frozen to.
const SURVIVOR: &str = "frozen/survivor";
/// A snapshot half made.
const HALF: &str = ".thaw-partial-dead";

/// A node, and which thawds it has had.
pub struct Node {
    pub place: Place,
    pub thawds: Vec<ProcessRecord>,
    /// What there is when nothing is there but what stays.
    pub empty: Counts,
}

impl Node {
    /// None, having said why, where it cannot run.
    pub fn new() -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent().unwrap();
        let place = Place::new(binaries, &lasting())?;
        place.fill_pools_to(1..=1, 1..=1);
        std::fs::create_dir_all(place.path("data/forks")).unwrap();
        Some(Node {
            place,
            thawds: Vec::new(),
            empty: Counts::default(),
        })
    }

    /// Another place, where nothing was made yet of what stays.
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

    /// Starts one that is to die at a failpoint, the `nth` time it comes there.
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

    fn counts(&self) -> Counts {
        Counts::of(&self.place, &self.thawds)
    }

    /// Waits until there is nothing more than what stays.
    pub fn is_empty_again(&self, what: &str) {
        let mut now = self.counts();
        let since = Instant::now();
        while now != self.empty && since.elapsed().as_secs() < 20 {
            std::thread::sleep(Duration::from_millis(10));
            now = self.counts();
        }
        assert_eq!(now, self.empty, "{what}: {}", log(&self.place));
    }

    /// Makes everything once that then stays, and counts what is there when nothing of it runs.
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

    /// Makes a sandbox and deletes it.
    pub async fn make_one(&self) {
        let client = self.client();
        let made = client.create(&request(&self.place)).await;
        let made = made.unwrap_or_else(|e| panic!("{e}: {}", log(&self.place)));
        client.delete(&made.sandbox.id).await.unwrap();
    }

    /// Leaves a running sandbox, what a killed thawd had made ahead, and what one was writing.
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
        std::fs::write(self.place.path("data/verified/.1.0.dead.new"), "half").unwrap();
        survivor
    }

    /// Leaves a port that leads to a sandbox which died after its thawd.
    pub async fn lost_port(&mut self) {
        let thawd = self.start();
        let mut published = request(&self.place);
        published.publish = serde_json::from_value(serde_json::json!([{"host": 0, "guest": 80}])).unwrap();
        let published = self.client().create(&published).await.unwrap().sandbox;
        thawd.kill();
        ProcessRecord::of(published.vmm_pid.unwrap()).unwrap().kill();
        // The kernel takes namespaces apart when it comes to it.
        let links = || {
            counts::interfaces()
                .into_iter()
                .filter(|i| i.starts_with("thaw-n"))
        };
        eventually("no slot is left but the survivor's", || links().count() <= 1);
    }

    /// Whoever is dead now, the next thawd takes over what lives and removes the rest, and works; stopped after its last
    /// sandbox, it leaves what stays, and nothing else. The names of those it lists as failed.
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
        // A process that was killed is there until the kernel comes to it.
        let as_many = format!(
            "{what}: as many VMMs as sandboxes: {living:?}; {}",
            log(&self.place)
        );
        eventually(&as_many, || self.counts().vmms() == living.len());
        for sandbox in &living {
            assert_ne!(sandbox.state, "ended", "{what}");
        }
        // Half a snapshot is none, of a sandbox that is taken over; others' go when another is made there.
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
            // It is all there: its copy wakes, and says so.
            let at = serde_json::json!({"directory": self.place.path(SURVIVOR)});
            let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
            let thaw: ThawSandbox = serde_json::from_value(at).unwrap();
            client.freeze(&survivor.id, &freeze).await.unwrap();
            let copy = client.thaw(&thaw).await.unwrap().sandbox;
            client.delete(&copy.id).await.unwrap();
            assert!(frozen().is_empty(), "{what}: {:?}", frozen());
        }
        // It does all that again.
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

/// A creation.
pub fn request(place: &Place) -> CreateSandbox {
    serde_json::from_value(place.request()).unwrap()
}
