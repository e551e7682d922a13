//! Snapshots and templates that are not what they were: each is refused with the right exit code and a sentence that
//! says which file and where, before any vCPU has run, and nothing of the attempt is left.
//!
//! The whole host is looked at after each refusal, so nothing may run beside these tests.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::SeekFrom;
use serde_json::Value;
use thaw_e2e::entries::Entries;
use thaw_e2e::leftovers::{Leftovers, walk};
use thaw_e2e::{Outcome, image, run, thaw};

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
        // What is remembered of files that were read.
        data.retain(|path| !path.contains("/verified"));
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

/// A way to spoil a snapshot's directory: what it is called, the code of the refusal, words of its sentence, the deed.
struct Spoiled {
    what: String,
    code: i32,
    words: Vec<String>,
    deed: Box<dyn Fn(&Path)>,
}

fn spoiled(what: String, code: i32, words: &[&str], deed: impl Fn(&Path) + 'static) -> Spoiled {
    let words = words.iter().map(|w| (*w).to_owned()).collect();
    Spoiled {
        what,
        code,
        words,
        deed: Box::new(deed),
    }
}

/// A copy that shares what the file system lets it share, in place of what is at `to`.
fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let copied = Command::new("cp")
        .args(["-a", "--reflink=auto", "--sparse=always"])
        .args([from, to])
        .status();
    assert!(copied.unwrap().success());
    for path in walk(to) {
        let mode = if Path::new(&path).is_dir() { 0o700 } else { 0o600 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// Flips one byte.
fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x5a], at).unwrap();
}

fn cut(path: &Path, length: u64) {
    OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(length)
        .unwrap();
}

/// Where the data of a sparse file begins and ends, piece by piece.
fn data(path: &Path) -> Vec<(u64, u64)> {
    let file = File::open(path).unwrap();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Ok(begin) = rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
        at = rustix::fs::seek(file.as_fd(), SeekFrom::Hole(begin)).unwrap();
        found.push((begin, at));
    }
    assert!(!found.is_empty(), "{} is empty", path.display());
    found
}

/// A byte in each region of a sparse file: its data's beginning, middle and end, and the largest hole.
fn regions(path: &Path) -> Vec<(&'static str, u64)> {
    let length = fs::metadata(path).unwrap().len();
    let data = data(path);
    let middle = data[data.len() / 2];
    let begins = data.iter().map(|(begin, _)| *begin).skip(1).chain([length]);
    let (_, hole, end) = data
        .iter()
        .zip(begins)
        .map(|((_, end), next)| (next - end, *end, next))
        .max()
        .unwrap();
    let mut found = vec![
        ("the first page", data[0].0),
        ("the middle", middle.0 + (middle.1 - middle.0) / 2),
        ("the last byte of data", data[data.len() - 1].1 - 1),
    ];
    if hole < end {
        found.push(("a hole", hole + (end - hole) / 2));
    }
    found
}

/// A byte in each part of `state` and `working-set`: docs/snapshot-format.md.
fn parts(path: &Path) -> Vec<(&'static str, u64)> {
    let length = fs::metadata(path).unwrap().len();
    vec![
        ("the magic", 0),
        ("the version", 8),
        ("the length", 16),
        ("the hash", 40),
        ("the first record", 64),
        ("the middle", length / 2),
        ("the last byte", length - 1),
    ]
}

/// Every file flipped in each of its regions, cut, grown and gone. `whole` is as it should be.
fn every_damage(whole: &Path) -> Vec<Spoiled> {
    let mut all = Vec::new();
    let mut files = vec!["state", "memory"];
    files.extend(
        ["working-set", "disks/blk0"]
            .into_iter()
            .filter(|f| whole.join(f).exists()),
    );
    for name in files {
        let path = whole.join(name);
        let length = fs::metadata(&path).unwrap().len();
        let places = match name {
            "memory" | "disks/blk0" => regions(&path),
            _ => parts(&path),
        };
        for (place, at) in places {
            let chunk = format!("{name}: chunk {} ", at >> 21);
            let word = if matches!(name, "memory" | "disks/blk0") {
                chunk
            } else {
                name.into()
            };
            all.push(spoiled(
                format!("{name} flipped in {place}"),
                DAMAGED,
                &[&word],
                move |d| flip(&d.join(name), at),
            ));
        }
        for left in [0, length / 2, length - 1, length + 1] {
            let words = [name, &format!("{left} bytes instead of {length}")];
            all.push(spoiled(
                format!("{name} of {left} bytes"),
                DAMAGED,
                &words,
                move |d| cut(&d.join(name), left),
            ));
        }
        all.push(spoiled(format!("{name} gone"), DAMAGED, &[name], move |d| {
            fs::remove_file(d.join(name)).unwrap()
        }));
    }
    let length = fs::metadata(whole.join("manifest.json")).unwrap().len();
    for at in [0, length / 3, length / 2, length - 3] {
        all.push(spoiled(
            format!("manifest.json flipped at {at}"),
            DAMAGED,
            &["manifest.json"],
            move |d| {
                flip(&d.join("manifest.json"), at);
            },
        ));
    }
    for at in [0, 63, 66] {
        all.push(spoiled(
            format!("manifest.b3 flipped at {at}"),
            DAMAGED,
            &["manifest.b3"],
            move |d| {
                flip(&d.join("manifest.b3"), at);
            },
        ));
    }
    all.push(spoiled(
        "manifest.json cut".into(),
        DAMAGED,
        &["manifest.json"],
        move |d| {
            cut(&d.join("manifest.json"), length / 2);
        },
    ));
    all.push(spoiled(
        "manifest.b3 gone".into(),
        DAMAGED,
        &["manifest.b3"],
        |d| {
            fs::remove_file(d.join("manifest.b3")).unwrap();
        },
    ));
    all
}

/// Changes the manifest and makes its hash right again, as whoever wrote it could have.
fn forge(directory: &Path, change: impl Fn(&mut Value)) {
    let path = directory.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    let bytes = manifest.to_string().into_bytes();
    fs::write(&path, &bytes).unwrap();
    fs::write(
        directory.join("manifest.b3"),
        format!("{}  manifest.json\n", blake3::hash(&bytes)),
    )
    .unwrap();
}

/// Changes `state` and makes its hashes right again.
fn forge_state(directory: &Path, change: impl Fn(&mut Vec<u8>)) {
    let path = directory.join("state");
    let mut state = fs::read(&path).unwrap();
    change(&mut state);
    let hash = blake3::hash(&state[64..]);
    state[32..64].copy_from_slice(hash.as_bytes());
    fs::write(&path, &state).unwrap();
    forge(directory, |manifest| {
        manifest["files"]["state"]["blake3"] = blake3::hash(&state).to_string().into()
    });
}

/// What is whole, but of another version or another machine. `cpus` and `memory`: words of what is said of those.
fn every_misfit(cpus: &str, memory: &str) -> Vec<Spoiled> {
    vec![
        spoiled(
            "a manifest of version 2".into(),
            INCOMPATIBLE,
            &["version 2"],
            |d| forge(d, |m| m["format"] = 2.into()),
        ),
        spoiled("a state of version 2".into(), DAMAGED, &["version 2"], |d| {
            forge_state(d, |s| s[8] = 2)
        }),
        spoiled("a state of no kind we know".into(), DAMAGED, &["state"], |d| {
            forge_state(d, |s| s[0] ^= 1)
        }),
        spoiled(
            "of a machine with other CPUs".into(),
            INCOMPATIBLE,
            &[cpus],
            |d| {
                forge(d, |m| m["machine"]["vcpus"] = 1.into());
            },
        ),
        spoiled(
            "of a machine with other memory".into(),
            INCOMPATIBLE,
            &[memory],
            |d| {
                forge(d, |m| m["machine"]["memory_mib"] = 256.into());
            },
        ),
    ]
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
