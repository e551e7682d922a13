//! The courses of events during which thawd is killed.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_failpoint::Failpoint;
use thaw_images::load_order::OrderedBlob;
use thaw_images::prefetch::{Journal, Recorder};
use thaw_images::store::{Image, Store};
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{
    ChangeSnapshot, CreateSandbox, FreezeSandbox, Hooks, NetworkPolicy, PauseSandbox, PausedMemory,
    ThawSandbox,
};
use thaw_sandbox::container::Running;
use thaw_sandbox::error::Error;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, asked};

use crate::copies;
use crate::node::{Node, gone, request};
use crate::pods;
use crate::remote;
use crate::store;

/// The name of the sandbox that fails.
const FAILS: &str = "fails";
/// The path that a sandbox is frozen to.
const FROZEN: &str = "frozen/snapshot";
/// How long a machine may take to be made.
const PATIENCE: Duration = Duration::from_secs(60);
/// Files beside an image: a recording in progress, and a finished one.
const RECORDING: &str = "recording";
const RECORDED: &str = "load-order-recorded.json";

/// A course of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// The life of sandboxes: created, frozen, paused, thawed, deleted; the start and the end of thawd.
    Life,
    /// The same in a new place, where the first run makes what later runs reuse.
    Cold,
    /// Other requests: ports, policies, recordings, forks, processes in a guest.
    Deeds,
    /// A sandbox fails: its VMM is killed, its record is listed, and then removed.
    Failure,
    /// A template is removed, by `thaw`.
    Eviction,
    /// The image store is changed, by `thaw`.
    Store,
    /// Pods, made for containerd's shim.
    Pods,
    /// A paused sandbox is copied to a registry, and another node takes it over.
    Copies,
    /// Clones whose memory is in a registry fault, while snapshots are pushed and pulled.
    Remote,
}

/// Failpoints that are reached only when something is made that later runs reuse.
const COLD: [&str; 15] = [
    "disk.template-begun",
    "disk.template-formatted",
    "disk.template-made",
    "stamp.made",
    "stamp.written",
    "stamp.placed",
    "template.lock-made",
    "template.locked",
    "template.drafted",
    "template.booted",
    "template.frozen",
    "template.rehearsed",
    "template.unlocked",
    "tethered.unlisted",
    "store.directory-made",
];
const DEEDS: [&str; 13] = [
    "answer.",
    "container.",
    "fork.",
    "journal.",
    "object.",
    "paused.",
    "policy.",
    "publish.inserted",
    "publish.removed",
    "publish.reserved",
    "resume.",
    "scratch.",
    "store.order-",
];
const REMOTE: [&str; 4] = ["pages.", "pull.", "push.", "remote."];
const EVICTION: [&str; 3] = ["snapshot.doomed", "snapshot.removed", "snapshot.forgotten"];

impl Course {
    pub const ALL: [Course; 9] = [
        Course::Life,
        Course::Cold,
        Course::Deeds,
        Course::Failure,
        Course::Eviction,
        Course::Store,
        Course::Pods,
        Course::Copies,
        Course::Remote,
    ];

    /// The course that reaches a failpoint first.
    pub fn of(point: Failpoint) -> Course {
        let name = point.name();
        let begins = |with: &[&str]| with.iter().any(|with| name.starts_with(with));
        if COLD.contains(&name) {
            Course::Cold
        } else if begins(&DEEDS) || name.starts_with("store.recording-") {
            Course::Deeds
        } else if name.starts_with("failed.") {
            Course::Failure
        } else if EVICTION.contains(&name) {
            Course::Eviction
        } else if begins(&["store.", "layout."]) {
            Course::Store
        } else if begins(&["pod."]) {
            Course::Pods
        } else if begins(&["copy."]) {
            Course::Copies
        } else if begins(&REMOTE) {
            Course::Remote
        } else {
            Course::Life
        }
    }

    /// Kills a process at a failpoint the `nth` time that it is reached, and checks what is left. Returns whether it was reached that
    /// often.
    pub async fn killed_at(self, node: &mut Node, point: Failpoint, nth: usize) -> bool {
        let what = format!("{point}:{nth} in {self:?}");
        match self {
            Course::Life | Course::Deeds => {
                let survivor = node.survivor().await;
                match point {
                    Failpoint::PublishSwept => node.lost_port().await,
                    Failpoint::CgroupSwept => lose_cgroup(),
                    _ => {}
                }
                let died = self.doomed(node, point, nth, &what).await;
                node.recovers(&what, Some(&survivor)).await;
                died
            }
            Course::Failure => {
                let survivor = node.survivor().await;
                let died = self.doomed(node, point, nth, &what).await;
                let failed = node.recovers(&what, Some(&survivor)).await;
                let was_removed = !died || point == Failpoint::FailedForgotten;
                let is_listed = failed.iter().any(|name| name == FAILS);
                if point.name().starts_with("failed.") {
                    assert_ne!(is_listed, was_removed, "{what}: {failed:?}; {}", log(&node.place));
                }
                died
            }
            Course::Cold => {
                let mut cold = node.anew();
                let died = Course::Life.doomed(&mut cold, point, nth, &what).await;
                cold.recovers(&what, None).await;
                died
            }
            Course::Eviction => {
                let mut other = node.anew();
                let thawd = other.start();
                other.make_one().await;
                assert!(thawd.stop().success());
                let died = evict_template(&other.place, point, nth, &what);
                other.recovers(&what, None).await;
                died
            }
            Course::Store => store::killed_at(&node.place, point, nth, &what),
            Course::Pods => pods::killed_at(node, point, nth, &what).await,
            Course::Copies => copies::killed_at(node, point, nth, &what).await,
            Course::Remote => {
                let mut remote = match node.remote.take() {
                    Some(remote) => remote,
                    None => Box::new(remote::prepare().await),
                };
                if point == Failpoint::RemoteServedAgain {
                    let earlier = remote.start();
                    remote::thaw_clones(&remote).unwrap();
                    earlier.kill();
                }
                let died = self.doomed(&mut remote, point, nth, &what).await;
                remote::recovers(&mut remote, &what).await;
                node.remote = Some(remote);
                died
            }
        }
    }

    /// Runs the course against a thawd that will die. Returns whether it died.
    async fn doomed(self, node: &mut Node, point: Failpoint, nth: usize, what: &str) -> bool {
        let mut doomed = node.start_doomed(point, nth);
        if doomed.serves(&node.place)
            && let Some(client) = Client::connect(&node.place.socket())
        {
            let mut ended = || doomed.has_ended();
            let done = match self {
                Course::Deeds => deeds(&node.place, &client, &mut ended).await,
                Course::Failure => failure(&node.place, &client).await,
                Course::Remote => remote::course(node, &client, &mut ended).await,
                _ => life(&node.place, &client).await,
            };
            // Its clients see its death first.
            if let Err(e) = done {
                eventually(&format!("{what}: thawd ends, and not {e}"), || doomed.has_ended());
            }
        }
        let status = doomed.stop();
        let died = status.signal() == Some(9);
        assert!(
            died || status.success(),
            "{what}: {status:?}: {}",
            log(&node.place)
        );
        died
    }
}

/// Leaves the cgroup of a process that never exists (the kernel's `PID_MAX_LIMIT` is 4194304).
fn lose_cgroup() {
    Hierarchy::detect().make("4194305.1.0").unwrap();
}

/// The life of sandboxes. Ends at the first failure, such as thawd's death.
async fn life(place: &Place, client: &Client) -> Result<(), Error> {
    let named = CreateSandbox {
        name: Some("life".into()),
        ..request(place)
    };
    let first = client.create(&named).await?.sandbox;
    let at = json!({"directory": place.path(FROZEN)});
    let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
    client.freeze(&first.id, &freeze).await?;
    client.pause(&first.id).await?;
    let thaw: ThawSandbox = serde_json::from_value(at).unwrap();
    let thawed = client.thaw(&thaw).await?.sandbox;
    client.delete(&thawed.id).await?;
    // More than are ready, so that some are made now.
    let asked = request(place);
    let (one, two) = tokio::join!(client.create(&asked), client.create(&asked));
    for made in [one?, two?] {
        client.delete(&made.sandbox.id).await?;
    }
    machine_waits(client, "parked").await?;
    let taken = client.create(&asked).await?.sandbox;
    client.delete(&taken.id).await?;
    client.delete(&first.id).await
}

/// Waits until a machine of this pool is complete. Its directory alone does not say so: that is made first.
async fn machine_waits(client: &Client, pool: &str) -> Result<(), Error> {
    let began = Instant::now();
    loop {
        let pools = client.usage().await?.pools;
        if pools.iter().any(|p| p.pool == pool && p.ready > 0) {
            return Ok(());
        }
        assert!(began.elapsed() < PATIENCE, "no {pool} machine waits: {pools:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A sandbox fails, is listed and removed.
async fn failure(place: &Place, client: &Client) -> Result<(), Error> {
    let asked = CreateSandbox {
        name: Some(FAILS.into()),
        ..request(place)
    };
    let fails = client.create(&asked).await?.sandbox;
    ProcessRecord::of(fails.vmm_pid.unwrap()).unwrap().kill();
    while client.get(&fails.id).await?.state != "failed" {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    client.delete(&fails.id).await
}

/// All other requests.
async fn deeds(place: &Place, client: &Client, ended: &mut impl FnMut() -> bool) -> Result<(), Error> {
    let images = Store::open(&place.path("data/images")).unwrap().images().unwrap();
    let image = images.first().unwrap();
    leave_a_recording(image);
    let policy = |text: &str| -> NetworkPolicy {
        serde_json::from_value(json!({"egress": [{"deny": text}], "default": "allow"})).unwrap()
    };
    let mut asked = request(place);
    asked.publish = serde_json::from_value(json!([{"host": 0, "guest": 80}])).unwrap();
    (asked.record, asked.prefetch) = (true, true);
    asked.name = Some("deeds".into());
    let first = client.create(&asked).await?.sandbox;
    let recording = image.metadata.with_file_name(RECORDING);
    let length = || recording.metadata().map_or(0, |m| m.len());
    eventually("it is recorded, or thawd has ended", || length() > 0 || ended());
    // Its slot had no policy, so the first one ends its fast path. The clone below starts with the second.
    for denied in ["192.0.2.0/24", "198.51.100.0/24"] {
        client.set_network_policy(&first.id, &policy(denied)).await?;
    }
    client.pause(&first.id).await?;
    client.resume(&first.id).await?;
    let release = PauseSandbox {
        memory: PausedMemory::Release,
    };
    for resumes in 0..4 {
        // The first ones make thawd keep machines of this shape, so that others take one.
        if resumes > 1 {
            machine_waits(client, "shell").await?;
        }
        client.pause_as(&first.id, &release).await?;
        client.resume(&first.id).await?;
    }
    store_and_remove(client, &first.id).await?;
    // Its guest has no agent, so a record must claim that a container runs.
    let running = Running {
        container_id: first.id.clone(),
        tty: false,
        env: Vec::new(),
        cwd: "/".into(),
        user: String::new(),
        groups: Vec::new(),
        capabilities: None,
        life: None,
        health: None,
        hooks: Hooks::default(),
        args: Vec::new(),
        readiness: None,
    };
    running.write(&place.path("run/sandboxes").join(&first.id))?;
    for id in fork(place, &first.id)? {
        client.delete(&id).await?;
    }
    client.delete(&first.id).await?;
    // The recording ends with the machine, and a task that is not awaited writes it.
    eventually("the recording has ended, or thawd has", || {
        length() == 0 || ended()
    });
    Ok(())
}

/// Stores a snapshot of a sandbox, names it and removes it.
async fn store_and_remove(client: &Client, id: &str) -> Result<(), Error> {
    let stored = client
        .freeze(id, &FreezeSandbox::default())
        .await?
        .snapshot
        .unwrap();
    let named: ChangeSnapshot = serde_json::from_value(json!({"name": "deed"})).unwrap();
    client.change_snapshot(&stored, &named).await?;
    client.remove_snapshot("deed", false).await
}

/// Clones a sandbox, with a key. Returns the clones' ids.
fn fork(place: &Place, id: &str) -> Result<Vec<String>, Error> {
    let request = format!("POST /v1/sandboxes/{id}/fork");
    let asked = asked::ask(place, &request, Some("fork"), &json!({"count": 1})).ok_or_else(gone)?;
    let (status, body) = asked::answer(asked).ok_or_else(gone)?;
    assert!(status.contains("201"), "{status} {body}; {}", log(place));
    let forked: Value = serde_json::from_str(&body).map_err(|_| gone())?;
    let clones = forked["items"].as_array().unwrap().iter();
    Ok(clones
        .map(|made| made["sandbox"]["id"].as_str().unwrap().to_owned())
        .collect())
}

/// Leaves the files of a process that was killed while it recorded which bytes an image's run reads.
fn leave_a_recording(image: &Image) {
    let blobs: Vec<OrderedBlob> = image
        .blobs
        .iter()
        .map(|blob| OrderedBlob {
            digest: blob.id,
            layer: None,
            length: blob.length,
        })
        .collect();
    let mut recorder = Recorder::default();
    recorder.access(&blobs[0].digest, 0, 1);
    let journal = Journal::begin(image, blobs).unwrap();
    // An earlier run may have finished the leftovers; a complete recording would take precedence over the ones left now.
    let _ = std::fs::remove_file(image.metadata.with_file_name(RECORDED));
    journal.unwrap().follow(&recorder).unwrap();
}

/// Removes the place's only template.
fn evict_template(place: &Place, point: Failpoint, nth: usize, what: &str) -> bool {
    let templates = std::fs::read_dir(place.path("data/templates")).unwrap();
    let keys: Vec<String> = templates
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let [key] = keys.as_slice() else {
        panic!("{what}: {keys:?}")
    };
    let mut command = place.command("thaw");
    command.args(["--failpoint", &format!("{point}:{nth}"), "template", "rm", key]);
    let output = command.output().unwrap();
    let died = output.status.signal() == Some(9);
    assert!(died || output.status.success(), "{what}: {output:?}");
    died
}
