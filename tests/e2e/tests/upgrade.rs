//! A container across a change of release: of thawd, of its `thaw` and of the VMMs it makes. The guest is this tree's in both.
//!
//! `THAW_PREVIOUS` names the programs of the previous release: `THAW_PREVIOUS=$(tests/upgrade/build-previous) tests/e2e/run --only
//! upgrade`.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use thaw_e2e::home::Home;
use thaw_e2e::{binary, image, pid_of, run};

/// The programs of one release, over one home.
struct Release<'a> {
    home: &'a Home,
    programs: PathBuf,
}

impl Release<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command
            .env("THAW_DATA", self.home.data())
            .env("THAW_RUN", self.home.run())
            .env("THAW_VMM", self.programs.join("thaw-vmm"))
            .env("THAW_SHARE", self.programs.join("thaw-share"))
            // Else looked for beside the program.
            .env("THAW_GUEST_IMAGE", binary("guest.erofs"));
        command
    }

    fn thawd(&self) -> Child {
        self.home.thawd_by(&mut self.command("thawd"), &[])
    }

    fn thaw(&self, arguments: &[&str]) -> String {
        let mut command = self.command("thaw");
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        run(&mut command).ok()
    }

    /// How often the container has written.
    fn beats(&self, sandbox: &str) -> u64 {
        let counted = self.thaw(&["exec", sandbox, "sh", "-c", "wc -l < /beats"]);
        counted.trim().parse().unwrap()
    }

    /// That it goes on.
    fn beats_on(&self, sandbox: &str) {
        let before = self.beats(sandbox);
        self.thaw(&["exec", sandbox, "sleep", "1"]);
        assert!(self.beats(sandbox) > before, "{sandbox} has stopped at {before}");
    }
}

fn goes_from_to(before: &Path, after: &Path) {
    let home = Home::new();
    let release = |programs: &Path| Release {
        home: &home,
        programs: programs.to_owned(),
    };
    let (before, after) = (release(before), release(after));
    let frozen = [
        home.scratch("frozen").join("before"),
        home.scratch("frozen").join("after"),
    ];
    let [frozen_before, frozen_after] = frozen.each_ref().map(|path| path.to_str().unwrap());

    let mut thawd = before.thawd();
    let script = "while :; do echo beat >> /beats; sleep 0.1; done";
    let busybox = image("busybox");
    before.thaw(&["run", "-d", "--name", "survivor", &busybox, "sh", "-c", script]);
    before.beats_on("survivor");
    before.thaw(&["freeze", "survivor", frozen_before]);
    thawd.kill().unwrap();
    thawd.wait().unwrap();

    // Its release's exec needs no thawd, and neither does the other's.
    before.beats_on("survivor");
    let mut thawd = after.thawd();
    after.beats_on("survivor");
    after.thaw(&["pause", "survivor"]);
    after.thaw(&["resume", "survivor"]);
    after.beats_on("survivor");
    after.thaw(&["freeze", "survivor", frozen_after]);
    for (name, snapshot) in [("of-before", frozen_before), ("of-after", frozen_after)] {
        after.thaw(&["thaw", "-d", "--name", name, snapshot]);
        after.beats_on(name);
    }
    let clones = after.thaw(&["fork", "survivor"]);
    let clone = clones.split_whitespace().next().unwrap();
    after.beats_on(clone);
    after.beats_on("survivor");
    after.thaw(&["rm", "survivor", "of-before", "of-after", clone]);
    rustix::process::kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}

fn current() -> PathBuf {
    binary("thaw").parent().unwrap().to_owned()
}

fn previous() -> Option<PathBuf> {
    let previous = std::env::var_os("THAW_PREVIOUS").map(PathBuf::from);
    if previous.is_none() {
        thaw_test_skip::skip("THAW_PREVIOUS names no programs of the previous release");
    }
    previous
}

#[test]
fn container_goes_on_from_the_previous_release_to_this() {
    let Some(previous) = previous() else { return };
    goes_from_to(&previous, &current());
}

#[test]
fn container_goes_on_from_this_release_to_the_previous() {
    let Some(previous) = previous() else { return };
    goes_from_to(&current(), &previous);
}
