//! A running sandbox is paused, frozen, forked and thawed, and its workload notices nothing but a new name and new
//! randomness. `thaw-probe survive` checks itself: an open file and a mapped file on the virtio-fs root, a timer, a tree
//! of processes, a TCP connection on loopback, a thread that reads without pause, a file being written.
//!
//! Everything is counted at the end, so nothing may run beside these tests.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use thaw_e2e::leftovers::Leftovers;
use thaw_e2e::survivor::{Survivor, number};
use thaw_e2e::{PATIENCE, probe, run, thaw};

/// Longer than the time between two lines, many times over, on the slowest machine.
const QUIET: Duration = Duration::from_secs(10);
/// Expirations of the probe's timer in a second of guest time.
const EXPIRATIONS_A_SECOND: u64 = 20;

/// Where a test's snapshots are, and the image all of it runs.
struct Place {
    folder: tempfile::TempDir,
    reference: String,
}

impl Place {
    fn new() -> Place {
        // Where disks can be cloned rather than copied, as a user would choose.
        let data = std::env::var_os("THAW_DATA").map(PathBuf::from);
        let parent = data
            .and_then(|d| d.parent().map(Path::to_owned))
            .unwrap_or_else(std::env::temp_dir);
        let folder = tempfile::tempdir_in(parent).unwrap();
        let reference = probe::image(folder.path(), env!("CARGO_BIN_EXE_thaw-probe"));
        Place { folder, reference }
    }

    /// The path of a snapshot to be.
    fn snapshot(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// A sandbox of this name with the workload, running.
    fn survivor(&self, name: &str) -> Survivor {
        let mut survivor = Survivor::start(
            name,
            &mut thaw(&[
                "run",
                "--name",
                name,
                &self.reference,
                "/probe",
                "survive",
                probe::FILE,
            ]),
        );
        survivor.go_on(3);
        survivor
    }

    /// Fills the store and builds the template, which stay; then counts what there is.
    fn before(&self) -> Leftovers {
        run(&mut thaw(&["run", &self.reference, "/probe", "identity"])).ok();
        Leftovers::now()
    }
}

/// Freezes; what it said, as JSON.
fn freeze(arguments: &[&str]) -> Value {
    let said = run(&mut thaw(&[&["--json", "freeze"], arguments].concat())).ok();
    serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"))
}

fn thawed(directory: &str, name: &str) -> Survivor {
    Survivor::start(name, &mut thaw(&["thaw", "--name", name, directory]))
}

fn end<const N: usize>(sandboxes: [Survivor; N], place: Place, before: &Leftovers) {
    sandboxes.into_iter().for_each(Survivor::remove);
    drop(place);
    Leftovers::settle(before);
}

/// Lets each go on and compares: what was said before the freeze is the same in all, and what is said after it has
/// randomness and a name of its own in each. Gives the first tick after the freeze.
fn compare(original: &mut Survivor, clones: &mut [Survivor]) -> u64 {
    for clone in clones.iter_mut() {
        clone.go_on(8);
    }
    let begin = clones.iter().map(|c| number(&c.seen()[0], "tick")).max().unwrap();
    // What was in the pipe at the freeze is told again by each, and is no more than a pause's worth.
    let (first, last) = loop {
        let last = clones.iter().map(Survivor::tick).max().unwrap();
        original.reach(last);
        clones.iter_mut().for_each(|c| c.reach(last));
        let told = lines(original, clones, last);
        if let Some(first) = (begin..last).find(|tick| differ(&lines(original, clones, *tick), "random")) {
            assert!(first - begin < 30, "{} lines were alike", first - begin);
            break (first, last);
        }
        assert!(last - begin < 40, "all alike: {told:?}");
        clones.iter_mut().for_each(|c| c.go_on(1));
    };
    // The tick in which it was frozen may have drawn its bytes before and read its name after: it is the last that is
    // alike, or the first that differs.
    for tick in begin..first {
        let mut same = lines(original, clones, tick);
        if tick + 1 == first {
            same.iter_mut().for_each(|line| line["hostname"] = Value::Null);
        }
        assert!(
            same.windows(2).all(|pair| pair[0] == pair[1]),
            "half alike: {same:?}"
        );
    }
    for tick in first + 1..=last {
        let told = lines(original, clones, tick);
        assert!(differ(&told, "random"), "tick {tick}: {told:?}");
        assert!(differ(&told, "hostname"), "tick {tick}: {told:?}");
    }
    first
}

/// What each said at a tick.
fn lines(original: &Survivor, clones: &[Survivor], tick: u64) -> Vec<Value> {
    let all = clones.iter().chain([original]);
    all.map(|s| s.at(tick).unwrap_or_else(|| panic!("no tick {tick}")).clone())
        .collect()
}

fn differ(lines: &[Value], name: &str) -> bool {
    let mut values: Vec<String> = lines.iter().map(|l| l[name].to_string()).collect();
    values.sort();
    values.windows(2).all(|pair| pair[0] != pair[1])
}

/// The guest's clock went on from the freeze: it did not feel the time it was not there. A busy host may stop a guest for any time between
/// two ticks, so the bound is the time since the thaw began. `at_freeze`: the timer's expirations until the freeze, or some more.
fn no_jump(clone: &Survivor, at_freeze: u64, since: Instant) {
    let fired = number(clone.seen().last().unwrap(), "timer").saturating_sub(at_freeze);
    let most = since.elapsed().as_millis() as u64 * EXPIRATIONS_A_SECOND / 1000 + 2;
    assert!(fired <= most, "the timer fired {fired} times, and not {most}");
}

/// Waits until the workload of `sandbox`, which nobody attends, has gone on past `tick` under a name of its own.
fn goes_on_unattended(sandbox: &str, tick: u64) -> Vec<Value> {
    let since = Instant::now();
    loop {
        let text = run(&mut thaw(&["exec", sandbox, "/probe", "cat", probe::TICKS])).ok();
        let lines: Vec<Value> = text.lines().map_while(|l| serde_json::from_str(l).ok()).collect();
        for (expected, line) in lines.iter().enumerate() {
            assert_eq!(
                number(line, "tick"),
                expected as u64,
                "the written file lacks a line: {text}"
            );
        }
        if lines.last().is_some_and(|l| number(l, "tick") > tick) {
            return lines;
        }
        assert!(
            since.elapsed() < PATIENCE,
            "{sandbox} does not go on past {tick}: {:?}",
            lines.last()
        );
    }
}

/// Sandboxes nobody attends: removed when this goes, also by a failed test.
struct Unattended(Vec<String>);

impl Drop for Unattended {
    fn drop(&mut self) {
        for sandbox in &self.0 {
            run(&mut thaw(&["rm", sandbox]));
        }
    }
}

fn name(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

#[test]
fn a_paused_sandbox_does_nothing_and_goes_on_where_it_was() {
    let place = Place::new();
    let before = place.before();
    let name = name("pause");
    let mut original = place.survivor(&name);
    run(&mut thaw(&["pause", &name])).ok();
    original.drain(QUIET);
    let paused = original.tick();
    original.drain(QUIET);
    assert_eq!(original.tick(), paused, "it ran while it was paused");
    run(&mut thaw(&["resume", &name])).ok();
    assert_eq!(number(original.next_line(), "tick"), paused + 1);
    original.go_on(3);
    end([original], place, &before);
}

/// An open file, a mapped file, a timer, a process tree, a TCP connection, a reading thread, a written file: all of it in
/// the original, in two clones, and in a clone of a clone.
#[test]
fn workload_survives_freeze_in_clones_and_clones_of_clones() {
    let place = Place::new();
    let before = place.before();
    let name = name("freeze");
    let mut original = place.survivor(&name);
    let directory = place.snapshot("first");
    let frozen = freeze(&[&name, &directory]);
    assert!(
        number(&frozen, "memory_bytes") > 0 && number(&frozen, "paused_ns") > 0,
        "{frozen}"
    );
    // Longer than a thaw takes, so that a jump shows.
    original.go_on(20);

    let since = Instant::now();
    let mut clones = [thawed(&directory, "elder"), thawed(&directory, "younger")];
    let first = compare(&mut original, &mut clones);
    assert!(first <= original.tick());
    original.go_on(1);
    // In this tick, the timer was certainly read after the freeze.
    let at_freeze = number(original.at(first + 1).unwrap(), "timer");
    clones.iter().for_each(|c| no_jump(c, at_freeze, since));

    // Another command in a clone: it is who it was told to be.
    let identity = run(&mut thaw(&["exec", "elder", "/probe", "identity"])).ok();
    let identity: Value = serde_json::from_str(&identity).unwrap();
    let [mut elder, younger] = clones;
    assert_eq!(identity["hostname"], elder.next_line()["hostname"]);

    // The second generation: a clone is frozen, and goes on, and so does what is thawed from it.
    let directory = place.snapshot("second");
    freeze(&["elder", &directory]);
    elder.go_on(3);
    let grandchild = thaw(&["thaw", "--name", "grandchild", "--hostname", "little", &directory]);
    let mut grandchildren = [Survivor::start("grandchild", &mut { grandchild })];
    let first = compare(&mut elder, &mut grandchildren);
    assert_eq!(grandchildren[0].at(first + 1).unwrap()["hostname"], "little");

    let [grandchild] = grandchildren;
    end([original, elder, younger, grandchild], place, &before);
}

/// Deltas hold what was written since the thaw; one can lie on another.
#[test]
fn deltas_are_small_and_lie_on_one_another() {
    let place = Place::new();
    let before = place.before();
    let name = name("delta");
    let mut original = place.survivor(&name);
    let (full, delta, over) = (
        place.snapshot("full"),
        place.snapshot("delta"),
        place.snapshot("over"),
    );
    let all = number(&freeze(&[&name, &full]), "memory_bytes");
    let written = number(&freeze(&[&name, &delta, "--delta"]), "memory_bytes");
    assert!(written < all, "a delta of {written} bytes, all of it is {all}");
    let mut clones = [thawed(&delta, "elder"), thawed(&delta, "younger")];
    compare(&mut original, &mut clones);
    let [mut elder, younger] = clones;
    let more = number(&freeze(&["elder", &over, "--delta"]), "memory_bytes");
    assert!(
        more < all,
        "a delta over a delta of {more} bytes, all of it is {all}"
    );
    let mut grandchildren = [thawed(&over, "grandchild")];
    compare(&mut elder, &mut grandchildren);
    let [grandchild] = grandchildren;
    end([original, elder, younger, grandchild], place, &before);
}

#[test]
fn a_fork_makes_many_of_one_each_on_a_disk_of_its_own() {
    let place = Place::new();
    let before = place.before();
    let name = name("fork");
    let mut original = place.survivor(&name);
    let said = run(&mut thaw(&["fork", &name, "-n", "3"])).ok();
    let clones = Unattended(said.lines().map(str::to_owned).collect());
    assert_eq!(clones.0.len(), 3, "{said}");
    original.go_on(3);
    let tick = original.tick();
    let mut names = vec![original.seen().last().unwrap()["hostname"].clone()];
    for clone in &clones.0 {
        let lines = goes_on_unattended(clone, tick);
        names.push(lines.last().unwrap()["hostname"].clone());
    }
    names.sort_by_key(Value::to_string);
    names.dedup();
    assert_eq!(names.len(), 4, "{names:?}");
    let listed = run(&mut thaw(&["--json", "ps"])).ok();
    assert!(clones.0.iter().all(|c| listed.contains(c)), "{listed}");
    drop(clones);
    original.go_on(3);
    end([original], place, &before);
}

#[test]
fn sandbox_stopped_by_freeze_continues_when_thawed() {
    let place = Place::new();
    let before = place.before();
    let (name, again) = (name("stop"), name("again"));
    let mut original = place.survivor(&name);
    let directory = place.snapshot("stopped");
    freeze(&[&name, &directory, "--stop"]);
    let listed = run(&mut thaw(&["--json", "ps"])).ok();
    assert!(!listed.contains(&name), "{listed}");
    let told = original.tick();
    original.wait();
    run(&mut thaw(&["thaw", "--detach", "--name", &again, &directory])).ok();
    let again = Unattended(vec![again]);
    goes_on_unattended(&again.0[0], told + 5);
    drop(again);
    end([], place, &before);
}
