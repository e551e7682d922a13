//! What `make bench-shim` measures: containers by `ctr run`, with runc and with Thaw, beside each other.
//!
//! | module | what is measured |
//! |---|---|
//! | [`starts`] | one after the other, in turn, and many at once |
//! | [`stages`] | where thawd's part of a start went, and whether its template was there |
//! | [`memory`] | what a pod takes that does nothing |

pub mod memory;
pub mod stages;
pub mod starts;

use std::process::Child;

use thaw_e2e::Outcome;
use thaw_e2e::containerd::{Containerd, RUNTIME};
use thaw_e2e::home::Home;
use thaw_e2e::upstream::Upstream;

/// How a container is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Runc,
    /// Its image's layers are directories of the host, and an overlay of them is shared with the guest.
    Overlayfs,
    /// Its image is in thawd's store.
    Own,
}

impl Way {
    /// In the order they are run.
    pub const ALL: [Way; 3] = [Way::Runc, Way::Overlayfs, Way::Own];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Runc => "runc",
            Way::Overlayfs => "thaw, overlayfs",
            Way::Own => "thaw",
        }
    }

    pub fn is_thaw(self) -> bool {
        self != Way::Runc
    }

    fn runtime(self) -> &'static str {
        match self.is_thaw() {
            true => RUNTIME,
            false => "io.containerd.runc.v2",
        }
    }

    fn snapshotter(self) -> &'static str {
        match self {
            Way::Own => "thaw",
            Way::Runc | Way::Overlayfs => "overlayfs",
        }
    }
}

/// A node with containerd and one image, which every way can run.
pub struct Node {
    // Stopped in this order.
    containerd: Containerd,
    thawd: Child,
    _upstream: Upstream,
    home: Home,
    image: String,
}

impl Node {
    /// Starts it, and pulls the image for each snapshotter. Whatever fails here panics: there is nothing to measure.
    pub fn start() -> Node {
        let home = Home::new();
        let upstream = Upstream::test_images(&home.scratch("registry"), None);
        let socket = home.run().join("snapshots.sock");
        let thawd = home.thawd(&["--snapshots-socket", &socket.display().to_string()]);
        let image = format!("{}/busybox:latest", upstream.host);
        let containerd = Containerd::start(&home, &socket, &image);
        if let Err(e) = containerd.pull(&image) {
            panic!("pulling {image}: {e}");
        }
        let pull = ["images", "pull", "--plain-http", "--snapshotter", "overlayfs"];
        containerd.ctr(&[&pull[..], &[&image]].concat());
        Node {
            containerd,
            thawd,
            _upstream: upstream,
            home,
            image,
        }
    }

    /// `ctr run` with words before the image: what it did.
    fn run(&self, way: Way, options: &[&str], id: &str, command: &[&str]) -> Outcome {
        let fixed = [
            "run",
            "--runtime",
            way.runtime(),
            "--snapshotter",
            way.snapshotter(),
        ];
        self.containerd
            .run_ctr(&[&fixed, options, &[&self.image, id], command].concat())
    }

    /// Kills and removes a container that was run with `-d`.
    fn remove(&self, id: &str) -> Result<(), String> {
        self.containerd
            .try_ctr(&["task", "delete", "--force", id])
            .and_then(|_| self.containerd.try_ctr(&["container", "delete", id]))
            .map(drop)
            .map_err(|e| format!("removing {id}: {e}"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.thawd.kill();
        let _ = self.thawd.wait();
    }
}
