use std::collections::BTreeMap;

use thaw_protocol::api::OnTimeout;

use super::super::tests::record;
use super::*;
use crate::agent_client::Output;
use crate::journal::Journal;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::{Base, Subject};

/// A data directory, a sandbox's directory with output in it, and the paused sandboxes.
struct Place {
    data: tempfile::TempDir,
    running: tempfile::TempDir,
    all: PausedSandboxes,
    stamps: Stamps,
}

impl Place {
    fn new() -> Place {
        let (data, running) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let journal = Journal::open(running.path()).unwrap();
        journal.append(Output::Stdout, b"hello").unwrap();
        fs::write(running.path().join("record.json"), b"{}").unwrap();
        Place {
            all: PausedSandboxes::under(data.path()),
            stamps: Stamps::open(&data.path().join("verified")).unwrap(),
            data,
            running,
        }
    }

    fn pause(&self, record: Record) -> Paused {
        let draft = self.all.begin(&record.id).unwrap();
        fs::create_dir(draft.snapshot()).unwrap();
        fs::write(draft.snapshot().join("memory"), b"secret").unwrap();
        draft.finish(record, self.running.path()).unwrap()
    }

    /// Everything below the directory of paused sandboxes.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.data.path().join(PAUSED)).into_iter().flatten();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn place_of_a_paused_sandbox_is_not_made_again() {
    let place = Place::new();
    let paused = place.pause(record("0123456789ab", None, false));
    let again = place.all.begin_absent("0123456789ab").unwrap_err();
    assert_eq!(again.kind, ErrorKind::NameInUse, "{again}");
    assert!(paused.snapshot().join("memory").exists());
    place.all.begin_absent("0123456789ac").unwrap();
    place.all.begin_absent("0123456789ac").unwrap();
}

#[test]
fn paused_sandbox_is_found_with_what_was_kept_of_it() {
    let place = Place::new();
    let id = "0123456789ab";
    place.pause(record(id, None, false));
    let found = place.all.list();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].record(), &record(id, None, false));
    for wanted in [id, "name-0123456789ab", "0123"] {
        assert_eq!(place.all.find(wanted).unwrap().record().id, id, "{wanted}");
    }
    assert!(place.all.find("").is_none() && place.all.find("other").is_none());
    assert!(place.all.holds(&found[0].snapshot()));
    assert!(!place.all.holds(place.data.path()));
    let kept = Journal::kept(&found[0].output()).unwrap().unwrap();
    assert_eq!(kept.read(0).unwrap().frames[0].data, b"hello");
    let resumed = tempfile::tempdir().unwrap();
    found[0].restore(resumed.path()).unwrap();
    assert!(Journal::exists(resumed.path()));
    assert!(!resumed.path().join("record.json").exists(), "only what is named");
    found[0].remove(&place.stamps).unwrap();
    assert!(place.names().is_empty());
    found[0].remove(&place.stamps).unwrap();
}

#[test]
fn unfinished_and_half_removed_ones_are_swept() {
    let place = Place::new();
    drop(place.all.begin("aaaaaaaaaaaa").unwrap());
    assert!(place.names().is_empty(), "a failed pause leaves nothing");
    let living = place.all.begin("bbbbbbbbbbbb").unwrap();
    let dead = place.all.begin("cccccccccccc").unwrap();
    fs::create_dir(dead.snapshot()).unwrap();
    // As after a kill: the lock is released, and everything else stays.
    rustix::fs::flock(&*dead._lock, FlockOperation::Unlock).unwrap();
    std::mem::forget(dead);
    let kept = place.pause(record("dddddddddddd", None, false));
    fs::write(kept.directory().join(NEW), b"half").unwrap();
    let half = place.pause(record("eeeeeeeeeeee", None, false));
    fs::remove_file(half.directory().join(RECORD)).unwrap();
    place.all.sweep(&place.stamps);
    assert_eq!(place.names(), ["bbbbbbbbbbbb", "dddddddddddd"]);
    assert!(!kept.directory().join(NEW).exists());
    drop(living);
    assert_eq!(place.all.list().len(), 1);
}

#[test]
fn pause_replaces_what_a_failed_removal_left() {
    let place = Place::new();
    let id = "0123456789ab";
    let first = place.pause(record(id, None, false));
    fs::remove_file(first.directory().join(RECORD)).unwrap();
    fs::write(first.snapshot().join("old"), b"").unwrap();
    let second = place.pause(record(id, None, false));
    assert!(!second.snapshot().join("old").exists());
    assert_eq!(place.all.list().len(), 1);
}

#[test]
fn name_of_a_paused_sandbox_is_in_use() {
    let place = Place::new();
    let paused = record("0123456789ab", None, false);
    place.pause(paused.clone());
    let other = Record {
        id: "ffffffffffff".into(),
        ..paused.clone()
    };
    let refused = place.all.refuse_used_name(&other).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NameInUse);
    place.all.refuse_used_name(&paused).unwrap();
    let mut of_tenant = other.clone();
    of_tenant.terms.tenant = Some("acme".parse().unwrap());
    place.all.refuse_used_name(&of_tenant).unwrap();
    let unnamed = Record { name: None, ..other };
    place.all.refuse_used_name(&unnamed).unwrap();
}

#[test]
fn name_is_free_once_no_paused_sandbox_has_it() {
    let place = Place::new();
    let mine = record("0123456789ab", None, false);
    let other = Record {
        id: "ffffffffffff".into(),
        ..mine.clone()
    };
    let is_free = || place.all.refuse_used_name(&other).is_ok();
    let entries = place.data.path().join(NAMES);
    let paused = place.pause(mine.clone());
    assert!(!is_free());
    // An earlier release wrote no entry.
    fs::remove_dir_all(&entries).unwrap();
    assert!(is_free());
    place.all.index_names(&place.all.list());
    assert!(!is_free());
    paused.remove(&place.stamps).unwrap();
    assert!(is_free() && !entries.exists());
    // As after a kill before the record was written.
    let half = place.pause(mine);
    fs::remove_file(half.directory().join(RECORD)).unwrap();
    assert!(is_free() && entries.exists());
    place.all.sweep(&place.stamps);
    assert!(!entries.exists());
}

#[test]
fn time_goes_on_while_a_sandbox_is_paused() {
    let place = Place::new();
    let limit = TimeLimit {
        timeout: Some(Timeout::after(600)),
        idle_s: None,
        on_timeout: OnTimeout::Delete,
    };
    let mut asked = record("0123456789ab", None, false);
    asked.terms = asked.terms.within(limit);
    place.pause(asked);
    let left = || {
        place.all.list()[0]
            .record()
            .terms
            .timeout
            .unwrap()
            .left()
            .as_secs()
    };
    assert!((590..=600).contains(&left()), "{}", left());
    let longer = TimeLimit {
        timeout: Some(Timeout::after(3600)),
        idle_s: None,
        on_timeout: OnTimeout::Pause,
    };
    place.all.list()[0].note_time_limit(longer).unwrap();
    assert!((3590..=3600).contains(&left()), "{}", left());
    let none = TimeLimit::default();
    place.all.list()[0].note_time_limit(none).unwrap();
    assert_eq!(place.all.list()[0].record().terms.time_limit(), none);
}

#[test]
fn vmm_tells_which_of_two_is_the_later() {
    let place = Place::new();
    let mut child = super::super::tests::sleeper();
    let running = record("0123456789ab", Some(&child), false);
    let paused = place.pause(running.clone());
    assert!(paused.froze(&running));
    let resumed = Record { vmm: None, ..running };
    assert!(!paused.froze(&resumed));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn record_that_cannot_be_read_is_not_listed_and_stays() {
    let place = Place::new();
    let paused = place.pause(record("0123456789ab", None, false));
    fs::write(paused.directory().join(RECORD), b"{torn").unwrap();
    assert!(place.all.list().is_empty());
    place.all.sweep(&place.stamps);
    assert_eq!(place.names(), ["0123456789ab"]);
    let newer = BTreeMap::from([("version", 99)]);
    fs::write(
        paused.directory().join(RECORD),
        serde_json::to_vec(&newer).unwrap(),
    )
    .unwrap();
    assert!(place.all.list().is_empty());
}

#[test]
fn snapshot_that_a_paused_sandbox_lies_on_is_known() {
    let place = Place::new();
    let base = place.data.path().join("templates/k");
    let under = draft(&base).finish(subject(), None).unwrap();
    assert_eq!(place.all.place_of(&base), base, "nothing is paused yet");
    let id = "0123456789ab";
    let paused = place.all.begin(id).unwrap();
    let over = Subject {
        base: Some(Base {
            manifest: under.hash(),
            place: place.all.place_of(&fs::canonicalize(&base).unwrap()),
        }),
        ..subject()
    };
    assert_eq!(place.all.over(under.hash()), None);
    let top = draft(&paused.snapshot()).finish(over, None).unwrap();
    // Also before it has a record.
    assert_eq!(place.all.over(under.hash()).as_deref(), Some(id));
    assert_eq!(place.all.over(top.hash()), None);
    let under = top.manifest().subject.base.as_ref().unwrap();
    assert_eq!(under.place, Path::new("../../../templates/k"));
    assert_eq!(
        fs::canonicalize(top.path().join(&under.place)).unwrap(),
        fs::canonicalize(&base).unwrap()
    );
    fs::remove_file(top.path().join("state")).unwrap();
    assert_eq!(
        place.all.over(under.manifest).as_deref(),
        Some(id),
        "whatever it lacks"
    );
    drop(paused);
    assert_eq!(place.all.over(under.manifest), None);
}
