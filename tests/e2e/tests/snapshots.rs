//! Snapshots and templates that are not what they were: each is refused with the right exit code and a sentence that
//! says which file and where, before any vCPU has run, and nothing of the attempt is left.
//!
//! The whole host is looked at after each refusal, so nothing may run beside these tests.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use thaw_e2e::entries::Entries;
use thaw_e2e::leftovers::{Leftovers, walk};
use thaw_e2e::{Outcome, image, run, thaw};

#[path = "snapshots/spoil.rs"]
mod spoil;

use spoil::{Spoiled, copy, cut, data, every_damage, every_misfit, flip, forge, spoiled};

const DAMAGED: i32 = 96;
const INCOMPATIBLE: i32 = 97;
const UNSIGNED: i32 = 98;
const NOT_FOUND: i32 = 99;
const NOT_STORED: i32 = 92;
const REFUSED_BY_VMM: i32 = 87;

/// A data directory of the test's own, with a template, and the frozen sandbox made from it.
struct Place {
    folder: tempfile::TempDir,
    entries: Option<Entries>,
}

impl Place {
    fn new() -> Place {
        // Where copies can share what they have in common.
        let data = std::env::var_os("THAW_DATA").map(PathBuf::from);
        let parent = data.and_then(|d| d.parent().map(Path::to_owned));
        let folder = tempfile::tempdir_in(parent.unwrap_or_else(std::env::temp_dir)).unwrap();
        let entries = Entries::watch();
        assert!(
            entries.is_some() || std::env::var_os("THAW_LAB").is_none(),
            "the lab's kernel traces"
        );
        if entries.is_none() {
            eprintln!("this kernel does not trace: whether a vCPU ran is not looked at");
        }
        Place { folder, entries }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `thaw` with the data directory of this test.
    fn thaw(&self, arguments: &[&str]) -> Command {
        let mut command = thaw(arguments);
        command.env("THAW_DATA", self.path("data"));
        command
    }

    /// Runs one sandbox as a user would; builds the template if there is none. What is said of vCPUs is checked here: a
    /// count that stays zero here would say nothing elsewhere.
    fn run_one(&self) {
        self.entered();
        assert_eq!(
            run(&mut self.thaw(&["run", &image("busybox"), "echo", "here"])).ok(),
            "here\n"
        );
        assert!(
            self.entries.is_none() || self.entered() > 0,
            "a guest ran, and no vCPU was seen to"
        );
    }

    fn entered(&self) -> usize {
        self.entries.as_ref().map_or(0, Entries::count)
    }

    /// The directory of the only template.
    fn template(&self) -> PathBuf {
        let all = fs::read_dir(self.path("data/templates")).unwrap();
        let mut all: Vec<PathBuf> = all.map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    /// A running sandbox, frozen to `directory` and ended.
    fn freeze(&self, directory: &str, how: &[&str]) -> PathBuf {
        let (target, before) = (self.path(directory), Leftovers::now());
        let busybox = image("busybox");
        run(&mut self.thaw(&["run", "--detach", "--name", "source", &busybox, "sleep", "10000"])).ok();
        let line = [&["freeze", "--stop", "source", target.to_str().unwrap()], how].concat();
        run(&mut self.thaw(&line)).ok();
        // Who kept it has ended too.
        Leftovers::settle(&before);
        target
    }

    /// Everything there is, on the host and in the data directory.
    fn everything(&self) -> (Leftovers, Vec<String>) {
        let mut data = walk(&self.path("data"));
        // What is remembered of files that were read, and of sandboxes that were thawed.
        data.retain(|path| !path.contains("/verified") && !path.contains("/working-sets"));
        data.sort();
        (Leftovers::now(), data)
    }

    /// Runs what must be refused: with this code, in one sentence that has each of `words`, before a vCPU ran, and
    /// nothing is left.
    fn refused(&self, what: &str, command: &mut Command, code: i32, words: &[&str]) {
        self.entered();
        let before = self.everything();
        let outcome = run(command);
        let sentence = sentence(what, &outcome);
        assert_eq!(outcome.status.code(), Some(code), "{what}: {outcome:?}");
        for word in words {
            assert!(sentence.contains(word), "{what}: {word:?} is not in {sentence:?}");
        }
        assert_eq!(outcome.stdout, "", "{what}");
        assert_eq!(self.entered(), 0, "{what}: a vCPU ran");
        let (host, data) = self.everything();
        assert_eq!(
            host.changes(&before.0),
            Vec::<String>::new(),
            "{what}: something is left"
        );
        assert_eq!(data, before.1, "{what}: something is left");
    }
}

/// The one line that says why.
fn sentence(what: &str, outcome: &Outcome) -> String {
    let lines: Vec<&str> = outcome
        .stderr
        .lines()
        .filter(|l| l.starts_with("thaw:"))
        .collect();
    assert_eq!(lines.len(), 1, "{what}: one clear line: {outcome:?}");
    lines[0].to_owned()
}

/// Trusts a new key in the test's data directory; where its secret is.
fn trusted_key(place: &Place) -> PathBuf {
    let keys = place.path("data/keys");
    fs::create_dir_all(&keys).unwrap();
    let made = |arguments: &[&str]| {
        let made = Command::new("openssl").args(arguments).output().unwrap();
        assert!(made.status.success(), "{made:?}");
    };
    let (secret, public) = (place.path("key"), keys.join("test.pub"));
    let (secret_text, public_text) = (secret.to_str().unwrap(), public.to_str().unwrap());
    made(&["genpkey", "-algorithm", "ed25519", "-out", secret_text]);
    made(&["pkey", "-in", secret_text, "-pubout", "-out", public_text]);
    secret
}

/// Spoils the template in each way; a run is refused each time.
fn refused_templates(place: &Place, whole: &Path, all: &[Spoiled]) {
    let template = place.template();
    for spoiled in all {
        copy(whole, &template);
        (spoiled.deed)(&template);
        let mut words: Vec<&str> = spoiled.words.iter().map(String::as_str).collect();
        words.push(template.to_str().unwrap());
        let what = format!("template: {}", spoiled.what);
        place.refused(
            &what,
            &mut place.thaw(&["run", &image("busybox"), "true"]),
            spoiled.code,
            &words,
        );
    }
    copy(whole, &template);
    place.run_one();
    println!("{} spoiled templates were refused", all.len());
}

#[test]
#[ignore = "long: run with --all yes"]
fn a_template_of_something_else_is_refused_wherever_it_differs() {
    let place = Place::new();
    place.run_one();
    let whole = place.path("whole");
    copy(&place.template(), &whole);
    let mut all = every_misfit("machine", "machine");
    // Whole, and of something else than its place says.
    for (field, word) in [
        ("kernel", "kernel"),
        ("guest_image", "guest image"),
        ("vmm", "thaw-vmm"),
    ] {
        let what = format!("of another {word}");
        all.push(spoiled(what, INCOMPATIBLE, &[word], move |d| {
            forge(d, |m| m[field] = "00".repeat(32).into());
        }));
    }
    refused_templates(&place, &whole, &all);
}

#[test]
#[ignore = "long: run with --all yes"]
fn a_damaged_template_is_refused_where_none_may_be_built() {
    let place = Place::new();
    let secret = trusted_key(&place);
    // Nobody but who has the key can build another, so every damage must be seen and said.
    run(&mut place.thaw(&["template", "build", "--sign", secret.to_str().unwrap()])).ok();
    place.run_one();
    let whole = place.path("whole");
    copy(&place.template(), &whole);
    let mut all = every_damage(&whole);
    // A manifest that differs is not what was signed, which is found first.
    all.retain(|spoiled| !spoiled.what.starts_with("manifest.json"));
    refused_templates(&place, &whole, &all);
}

#[test]
fn a_damaged_template_is_built_again_once_and_then_thawed() {
    let place = Place::new();
    place.run_one();
    let template = place.template();
    let whole = place.path("whole");
    copy(&template, &whole);
    let key = template.file_name().unwrap().to_str().unwrap().to_owned();
    let in_memory = data(&whole.join("memory"))[0].0;
    let ways = [
        spoiled("state flipped".into(), 0, &["state"], |d| {
            flip(&d.join("state"), 64)
        }),
        spoiled("memory flipped".into(), 0, &["memory: chunk"], move |d| {
            flip(&d.join("memory"), in_memory);
        }),
        spoiled("memory gone".into(), 0, &["memory"], |d| {
            fs::remove_file(d.join("memory")).unwrap();
        }),
        spoiled("manifest flipped".into(), 0, &["manifest.json"], |d| {
            flip(&d.join("manifest.json"), 0);
        }),
        spoiled("manifest gone".into(), 0, &["there is no snapshot"], |d| {
            fs::remove_file(d.join("manifest.json")).unwrap();
        }),
    ];
    let listed = || run(&mut place.thaw(&["template", "ls"])).ok();
    for way in &ways {
        copy(&whole, &template);
        (way.deed)(&template);
        let verified = run(&mut place.thaw(&["template", "verify", &key]));
        assert!(!verified.status.success(), "{}: {verified:?}", way.what);
        assert!(listed().contains("damaged: "), "{}: {}", way.what, listed());
        let again = run(&mut place.thaw(&["run", &image("busybox"), "echo", "here"]));
        assert_eq!(again.stdout, "here\n", "{}: {again:?}", way.what);
        assert!(
            again.stderr.contains("built again"),
            "{} was not said: {again:?}",
            way.what
        );
        for word in &way.words {
            assert!(again.stderr.contains(word.as_str()), "{}: {again:?}", way.what);
        }
        run(&mut place.thaw(&["template", "verify", &key])).ok();
        assert!(listed().contains("current"), "{}: {}", way.what, listed());
        let next = run(&mut place.thaw(&["run", &image("busybox"), "echo", "here"]));
        assert_eq!(next.stdout, "here\n", "{}: {next:?}", way.what);
        assert!(!next.stderr.contains("built again"), "{}: {next:?}", way.what);
    }
}

#[test]
fn altered_snapshot_is_refused_wherever_it_is_altered() {
    let place = Place::new();
    place.run_one();
    let whole = place.freeze("whole", &[]);
    let snapshot = place.path("snapshot");
    let directory = snapshot.to_str().unwrap();
    let mut all = every_damage(&whole);
    all.extend(every_misfit("vCPU", "MiB"));
    all.push(spoiled("its manifest gone".into(), NOT_FOUND, &[], |d| {
        fs::remove_file(d.join("manifest.json")).unwrap()
    }));
    all.push(spoiled(
        "a disk smaller than it was".into(),
        REFUSED_BY_VMM,
        &["Blk0", "smaller"],
        |d| {
            let half = fs::metadata(d.join("disks/blk0")).unwrap().len() / 2;
            cut(&d.join("disks/blk0"), half);
            forge(d, |m| {
                let disk = &mut m["files"]["disks"][0];
                disk["bytes"] = half.into();
                disk["chunks"]
                    .as_array_mut()
                    .unwrap()
                    .retain(|run| run["first"].as_u64().unwrap() << 21 < half);
            });
        },
    ));
    all.push(spoiled("without its disk".into(), INCOMPATIBLE, &["blk0"], |d| {
        forge(d, |m| m["files"]["disks"] = serde_json::json!([]));
    }));
    all.push(spoiled(
        "of a guest image that is not here".into(),
        INCOMPATIBLE,
        &["guest image"],
        |d| {
            forge(d, |m| m["guest_image"] = "00".repeat(32).into());
        },
    ));
    all.push(spoiled(
        "of an image that is not here".into(),
        NOT_STORED,
        &["sha256:0000"],
        |d| {
            forge(d, |m| {
                m["images"][0]["digest"] = format!("sha256:{}", "00".repeat(32)).into()
            });
        },
    ));
    all.push(spoiled(
        "of other metadata of its image".into(),
        INCOMPATIBLE,
        &["metadata"],
        |d| {
            forge(d, |m| m["images"][0]["metadata"] = "00".repeat(32).into());
        },
    ));
    for spoiled in &all {
        copy(&whole, &snapshot);
        (spoiled.deed)(&snapshot);
        let mut words: Vec<&str> = spoiled.words.iter().map(String::as_str).collect();
        // What an image lacks is not the snapshot's doing, and a VMM knows no places: then these are not told.
        let elsewhere = [NOT_STORED, REFUSED_BY_VMM].contains(&spoiled.code);
        if !elsewhere && !spoiled.what.contains("metadata") && !spoiled.what.contains("guest image") {
            words.push(directory);
        }
        let what = format!("sandbox: {}", spoiled.what);
        place.refused(&what, &mut place.thaw(&["thaw", directory]), spoiled.code, &words);
    }
    copy(&whole, &snapshot);
    assert!(
        run(&mut place.thaw(&["thaw", "--detach", "--name", "whole", directory]))
            .status
            .success()
    );
    run(&mut place.thaw(&["rm", "whole"])).ok();
    println!("{} spoiled snapshots were refused", all.len());
}

#[test]
fn what_is_no_snapshot_for_this_is_told_apart() {
    let place = Place::new();
    place.run_one();
    let template = place.template();
    let template = template.to_str().unwrap();
    let nowhere = place.path("nowhere");
    place.refused(
        "nothing",
        &mut place.thaw(&["thaw", nowhere.to_str().unwrap()]),
        NOT_FOUND,
        &["nowhere"],
    );
    place.refused(
        "a template",
        &mut place.thaw(&["thaw", template]),
        INCOMPATIBLE,
        &["template"],
    );

    // A delta whose base is another than it was made over, and then none.
    let delta = place.freeze("delta", &["--delta"]);
    let delta = delta.to_str().unwrap();
    let busybox = image("busybox");
    let (base, whole) = (Path::new(template), place.path("whole"));
    copy(base, &whole);
    forge(base, |m| m["created"] = 1.into());
    place.refused(
        "on another base",
        &mut place.thaw(&["thaw", delta]),
        INCOMPATIBLE,
        &[delta, template],
    );
    fs::remove_dir_all(base).unwrap();
    place.refused(
        "without its base",
        &mut place.thaw(&["thaw", delta]),
        NOT_FOUND,
        &[template],
    );
    copy(&whole, base);

    // From when keys are trusted, what nobody signed is refused.
    let secret = trusted_key(&place);
    place.refused(
        "an unsigned template",
        &mut place.thaw(&["run", &busybox, "true"]),
        UNSIGNED,
        &[template],
    );
    place.refused(
        "an unsigned snapshot",
        &mut place.thaw(&["thaw", delta]),
        UNSIGNED,
        &[delta],
    );
    run(&mut place.thaw(&["template", "rm", base.file_name().unwrap().to_str().unwrap()])).ok();
    run(&mut place.thaw(&["template", "build", "--sign", secret.to_str().unwrap()])).ok();
    place.run_one();
}
