//! The image store, changed by a series of `thaw image` commands, one of which is killed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use rustix::fs::{FlockOperation, flock};
use thaw_failpoint::Failpoint;
use thaw_tiny_node::Place;

/// The repositories of converted and of indexed images.
const CONVERTED: &str = "converted";
const INDEXED: &str = "indexed";

/// Kills a `thaw` at a failpoint the `nth` time it is reached; the next one must complete all changes. Returns whether it was reached that
/// often.
pub fn killed_at(place: &Place, point: Failpoint, nth: usize, what: &str) -> bool {
    let store = Images::anew(place);
    let died = store.change(Some(&format!("{point}:{nth}")), what);
    // The next command repeats incomplete work.
    assert!(!store.change(None, what));
    assert_eq!(store.left(), BTreeSet::new(), "{what}");
    died
}

/// A separate store, and two places that images are written to.
struct Images<'a> {
    place: &'a Place,
    root: tempfile::TempDir,
}

impl Images<'_> {
    fn anew(place: &Place) -> Images<'_> {
        Images {
            place,
            root: tempfile::tempdir_in(place.root()).unwrap(),
        }
    }

    fn thaw(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command("thaw");
        command
            .env("THAW_DATA", self.root.path())
            .arg("image")
            .args(arguments);
        command
    }

    fn layout(&self, name: &str) -> String {
        format!("oci:{}:x", self.root.path().join(name).display())
    }

    /// All changes of a store, from empty to empty. Returns true as soon as a process died.
    fn change(&self, failpoint: Option<&str>, what: &str) -> bool {
        let (plain, compressed) = (self.place.image(), self.place.compressed_image());
        let (converted, indexed) = (self.layout(CONVERTED), self.layout(INDEXED));
        let died = |arguments: &[&str]| {
            let mut command = self.thaw(arguments);
            if let Some(failpoint) = failpoint {
                command.args(["--failpoint", failpoint]);
            }
            let output = command.output().unwrap();
            let died = output.status.signal() == Some(9);
            assert!(
                died || output.status.success(),
                "{what}: {arguments:?}: {}",
                text(&output)
            );
            died
        };
        if self.with_leftovers(|| died(&["pull", &plain])) {
            return true;
        }
        self.leave_half_a_blob();
        let steps: [&[&str]; 10] = [
            &[
                "convert",
                "--chunking",
                "fixed",
                "--chunk-size",
                "4k",
                &plain,
                &converted,
            ],
            &["pull", &converted],
            &["pull", "--full", &converted],
            &[
                "index",
                "--min-layer-size",
                "1",
                "--span-size",
                "256k",
                &compressed,
                &indexed,
            ],
            &["pull", &indexed],
            &["pull", "--full", &indexed],
            &["verify"],
            &["prune"],
            &["pull", "--full", &plain],
            &["verify"],
        ];
        steps.into_iter().any(&died) || died(&["prune", "--all"])
    }

    /// Runs a pull while another process makes an image, so that nothing is collected, and while the leftovers of a dead maker exist.
    fn with_leftovers(&self, pull: impl FnOnce() -> bool) -> bool {
        let images = self.root.path().join("images");
        let known = |kind: &str| fs::read_dir(self.place.path("data/images").join(kind)).unwrap();
        let locks = images.join("locks");
        fs::create_dir_all(&locks).unwrap();
        let making = File::create(locks.join("store")).unwrap();
        flock(&making, FlockOperation::LockShared).unwrap();
        for kind in ["layers", "images"] {
            for entry in known(kind) {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let half = images.join(kind).join(format!("{name}.partial"));
                fs::create_dir_all(&half).unwrap();
                fs::write(half.join("half"), "half").unwrap();
            }
        }
        pull()
    }

    /// Leaves a partial blob in the layout.
    fn leave_half_a_blob(&self) {
        let blobs = self.root.path().join(CONVERTED).join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(".writing-dead"), "half").unwrap();
    }

    /// The files that an empty store or layout would not have.
    fn left(&self) -> BTreeSet<String> {
        let mut left = BTreeSet::new();
        walk(self.root.path(), &mut |path| {
            let name = path.strip_prefix(self.root.path()).unwrap().display().to_string();
            let is_of_the_store = name.starts_with("images/") && name != "images/locks/store";
            if is_of_the_store || name.contains(".writing-") {
                left.insert(name);
            }
        });
        left
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Visits all files below a directory.
fn walk(directory: &Path, seen: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|t| t.is_dir()) {
            true => walk(&entry.path(), seen),
            false => seen(&entry.path()),
        }
    }
}
