//! Which directories are refused, and what remains of a partial one.

use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

use serde_json::{Value, json};
use thaw_protocol::control::CpuBaseline;

use super::*;
use crate::error::{Error, ErrorKind};
use crate::snapshot::draft::Draft;
use crate::snapshot::manifest::{CHUNK, Cpu, Kind, Machine, Subject, inventory};
use crate::snapshot::signature::tests::key_pair;
use crate::snapshot::signature::{Signatures, SigningKey};

pub(crate) fn subject() -> Subject {
    Subject {
        kind: Kind::Template,
        machine: Machine {
            vcpus: 4,
            memory_mib: 128,
        },
        cpu: Cpu {
            baseline: CpuBaseline::Host,
            host: "a processor".into(),
        },
        vmm: None,
        kernel: Some(Hash::of(b"kernel")),
        guest_image: Some(Hash::of(b"guest image")),
        command_line: Some("quiet".into()),
        devices: inventory(),
        base: None,
        images: Vec::new(),
        workload: None,
    }
}

/// Three chunks of memory, of which the second is a hole.
pub(crate) fn draft(target: &Path) -> Draft {
    let mut draft = Draft::begin(target).unwrap();
    draft.state().write_all_at(b"state of the machine", 0).unwrap();
    draft.memory().set_len(2 * CHUNK + 8192).unwrap();
    draft.memory().write_all_at(b"low memory", 4096).unwrap();
    draft
        .memory()
        .write_all_at(b"high memory", 2 * CHUNK + 4096)
        .unwrap();
    draft.working_set().write_all_at(b"pages touched", 0).unwrap();
    let disk = draft.add_disk("blk0").unwrap();
    disk.set_len(3 * CHUNK).unwrap();
    disk.write_all_at(b"a file system", CHUNK).unwrap();
    draft
}

fn made(target: &Path) -> SnapshotDir {
    draft(target).finish(subject(), None).unwrap()
}

fn trust_all() -> TrustedKeys {
    TrustedKeys::default()
}

fn verify(path: &Path) -> Result<(), SnapshotError> {
    SnapshotDir::open(path, &trust_all())?.verify()
}

/// Changes a file's bytes, whatever its permissions.
fn change(path: &Path, change: impl FnOnce(&File)) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    change(&File::options().read(true).write(true).open(path).unwrap());
}

fn flip(path: &Path, at: u64) {
    change(path, |file| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    });
}

#[test]
fn what_was_made_is_found_whole() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("new/parent/s");
    let snapshot = made(&target);
    snapshot.verify().unwrap();
    let again = SnapshotDir::open(&target, &trust_all()).unwrap();
    assert_eq!(
        (again.hash(), again.manifest()),
        (snapshot.hash(), snapshot.manifest())
    );
    let files = &again.manifest().files;
    let runs: Vec<_> = files
        .memory
        .chunks
        .iter()
        .map(|r| (r.first, r.blake3.len()))
        .collect();
    assert_eq!(runs, [(0, 1), (2, 1)]);
    assert_eq!(files.disks[0].contents.chunks[0].first, 1);
    let names: Vec<_> = fs::read_dir(target.parent().unwrap()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(target.join("memory")).unwrap().mode() & 0o777, 0o400);
}

#[test]
fn an_empty_working_set_is_none() {
    let place = tempfile::tempdir().unwrap();
    let draft = Draft::begin(&place.path().join("s")).unwrap();
    let snapshot = draft.finish(subject(), None).unwrap();
    assert_eq!(snapshot.manifest().files.working_set, None);
    assert!(!snapshot.path().join("working-set").exists());
    snapshot.verify().unwrap();
}

#[test]
fn a_flipped_byte_is_refused_in_every_region_of_every_file() {
    let place = tempfile::tempdir().unwrap();
    // File, position, and the text that the error names.
    let regions: [(&str, &[u64], &str); 8] = [
        ("state", &[0, 10, 19], "state is not"),
        (
            "memory",
            &[0, 4096, 4105, CHUNK - 1],
            "memory: chunk 0 (at 0 MiB)",
        ),
        // A hole, where only zeros are allowed.
        (
            "memory",
            &[CHUNK, CHUNK + 70_000, 2 * CHUNK - 1],
            "memory: chunk 1 (at 2 MiB)",
        ),
        (
            "memory",
            &[2 * CHUNK, 2 * CHUNK + 8191],
            "memory: chunk 2 (at 4 MiB)",
        ),
        ("working-set", &[0, 12], "working-set is not"),
        ("disks/blk0", &[0, CHUNK - 1], "disks/blk0: chunk 0 (at 0 MiB)"),
        ("disks/blk0", &[CHUNK], "disks/blk0: chunk 1 (at 2 MiB)"),
        ("manifest.b3", &[0, 63, 64, 66], "manifest.json"),
    ];
    for (file, positions, named) in regions {
        for at in positions {
            let target = place.path().join("s");
            let snapshot = made(&target);
            flip(&target.join(file), *at);
            let error = verify(&target).unwrap_err();
            assert!(error.to_string().contains(named), "{file} at {at}: {error}");
            assert_eq!(
                Error::from(error).kind,
                ErrorKind::SnapshotDamaged,
                "{file} at {at}"
            );
            snapshot
                .remove(&Stamps::open(&place.path().join("stamps")).unwrap())
                .unwrap();
        }
    }
}

#[test]
fn a_flipped_byte_anywhere_in_the_manifest_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("s");
    drop(made(&target));
    let path = target.join("manifest.json");
    let bytes = fs::read(&path).unwrap();
    change(&path, |file| {
        for at in 0..bytes.len() as u64 {
            for bit in [0x01, 0x10, 0x80] {
                let byte = bytes[at as usize];
                file.write_all_at(&[byte ^ bit], at).unwrap();
                assert!(SnapshotDir::open(&target, &trust_all()).is_err(), "byte {at}");
                file.write_all_at(&[byte], at).unwrap();
            }
        }
    });
    verify(&target).unwrap();
}

#[test]
fn a_file_cut_short_grown_missing_or_no_file_is_refused() {
    let place = tempfile::tempdir().unwrap();
    for name in ["state", "memory", "working-set", "disks/blk0"] {
        for (what, spoil) in [
            (
                "one byte less",
                (|p| change(p, |f| f.set_len(f.metadata().unwrap().len() - 1).unwrap())) as fn(&Path),
            ),
            ("empty", |p| change(p, |f| f.set_len(0).unwrap())),
            ("longer by zeros", |p| {
                change(p, |f| f.set_len(f.metadata().unwrap().len() + 4096).unwrap())
            }),
            ("missing", |p| fs::remove_file(p).unwrap()),
            ("a directory", |p| {
                fs::remove_file(p).unwrap();
                fs::create_dir(p).unwrap();
            }),
            ("a link", |p| {
                fs::rename(p, p.with_extension("moved")).unwrap();
                symlink(p.with_extension("moved"), p).unwrap();
            }),
        ] {
            let target = place.path().join("s");
            drop(made(&target));
            spoil(&target.join(name));
            let error = verify(&target).unwrap_err();
            assert!(error.to_string().contains(name), "{name}, {what}: {error}");
            assert_eq!(
                Error::from(error).kind,
                ErrorKind::SnapshotDamaged,
                "{name}, {what}"
            );
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

/// Changes the manifest and updates its hash.
fn with_manifest(target: &Path, edit: impl FnOnce(&mut Value)) {
    let path = target.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut value);
    let bytes = serde_json::to_vec(&value).unwrap();
    for (path, bytes) in [
        (path, bytes.clone()),
        (target.join("manifest.b3"), hash_line(&Hash::of(&bytes)).into()),
    ] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn unknown_fields_are_read_and_unknown_versions_are_not() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("s");
    drop(made(&target));
    with_manifest(&target, |m| {
        m["later"] = json!({"field": [1]});
        m["files"]["memory"]["compression"] = json!("none");
    });
    verify(&target).unwrap();
    for version in [json!(0), json!(3), json!(4_294_967_297_u64)] {
        with_manifest(&target, |m| m["format"] = version);
        let error = verify(&target).unwrap_err();
        assert!(error.to_string().contains("version"), "{error}");
        assert_eq!(Error::from(error).kind, ErrorKind::SnapshotIncompatible);
    }
    with_manifest(&target, |m| m["format"] = json!("1"));
    assert_eq!(
        Error::from(verify(&target).unwrap_err()).kind,
        ErrorKind::SnapshotDamaged
    );
}

#[test]
fn a_manifest_that_contradicts_itself_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let hash = Hash::of(b"x").to_string();
    type Edit = fn(&mut Value, &str);
    let edits: [(&str, Edit); 8] = [
        ("more memory than any machine has", |m, _| {
            m["files"]["memory"]["bytes"] = json!(u64::MAX)
        }),
        ("chunks beyond the end", |m, h| {
            m["files"]["memory"]["chunks"] = json!([{"first": 3, "blake3": [h]}]);
        }),
        ("a chunk number that overflows", |m, h| {
            m["files"]["memory"]["chunks"] = json!([{"first": u64::MAX, "blake3": [h]}]);
        }),
        ("chunks in no order", |m, h| {
            m["files"]["memory"]["chunks"] =
                json!([{"first": 1, "blake3": [h]}, {"first": 0, "blake3": [h]}]);
        }),
        ("a hash in capitals", |m, h| {
            m["files"]["state"]["blake3"] = json!(h.to_uppercase())
        }),
        ("a disk elsewhere", |m, _| {
            m["files"]["disks"][0]["id"] = json!("../../etc/passwd")
        }),
        ("a disk twice", |m, _| {
            let disk = m["files"]["disks"][0].clone();
            m["files"]["disks"].as_array_mut().unwrap().push(disk);
        }),
        ("no memory", |m, _| {
            drop(m["files"].as_object_mut().unwrap().remove("memory"))
        }),
    ];
    for (what, edit) in edits {
        let target = place.path().join("s");
        drop(made(&target));
        with_manifest(&target, |m| edit(m, &hash));
        let error = SnapshotDir::open(&target, &trust_all()).expect_err(what);
        assert_eq!(Error::from(error).kind, ErrorKind::SnapshotDamaged, "{what}");
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn a_signature_is_asked_for_where_keys_are_trusted() {
    let place = tempfile::tempdir().unwrap();
    let (ours, theirs) = (place.path().join("ours"), place.path().join("theirs"));
    fs::create_dir(&ours).unwrap();
    fs::create_dir(&theirs).unwrap();
    let key = SigningKey::load(&key_pair(&ours, "k")).unwrap();
    key_pair(&theirs, "k");
    let (trusted, others) = (
        TrustedKeys::load(&ours, Signatures::AsKeysSay).unwrap(),
        TrustedKeys::load(&theirs, Signatures::AsKeysSay).unwrap(),
    );
    let target = place.path().join("s");
    drop(draft(&target).finish(subject(), Some(&key)).unwrap());
    SnapshotDir::open(&target, &trusted).unwrap().verify().unwrap();
    SnapshotDir::open(&target, &trust_all())
        .unwrap()
        .verify()
        .unwrap();
    let refused = |trusted: &TrustedKeys| Error::from(SnapshotDir::open(&target, trusted).unwrap_err()).kind;
    assert_eq!(refused(&others), ErrorKind::SnapshotSignature, "by another key");
    let signature = target.join("manifest.sig");
    flip(&signature, 63);
    assert_eq!(refused(&trusted), ErrorKind::SnapshotSignature, "a bad one");
    fs::remove_file(&signature).unwrap();
    assert_eq!(refused(&trusted), ErrorKind::SnapshotSignature, "none");
    // A writer of the files can correct the hash, but not the signature.
    drop(fs::remove_dir_all(&target));
    drop(draft(&target).finish(subject(), Some(&key)).unwrap());
    with_manifest(&target, |m| m["command_line"] = json!("init=/bin/evil"));
    SnapshotDir::open(&target, &trust_all()).unwrap();
    assert_eq!(
        refused(&trusted),
        ErrorKind::SnapshotSignature,
        "of another manifest"
    );
}

#[test]
fn what_is_not_there_is_not_found() {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("file"), b"").unwrap();
    for path in [
        place.path().to_owned(),
        place.path().join("none"),
        place.path().join("file"),
    ] {
        let error = SnapshotDir::open(&path, &trust_all()).unwrap_err();
        assert_eq!(
            Error::from(error).kind,
            ErrorKind::SnapshotNotFound,
            "{}",
            path.display()
        );
    }
}

#[test]
fn verified_once_means_until_something_changes() {
    let place = tempfile::tempdir().unwrap();
    let stamps = Stamps::open(&place.path().join("stamps")).unwrap();
    let target = place.path().join("s");
    drop(made(&target));
    // A stamp is valid only for a file older than the clock's tick.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let open = || SnapshotDir::open(&target, &trust_all()).unwrap();
    assert!(open().verify_once(&stamps).unwrap(), "read");
    assert_eq!(fs::read_dir(place.path().join("stamps")).unwrap().count(), 1);
    assert!(!open().verify_once(&stamps).unwrap(), "believed");
    for (name, at) in [
        ("state", 3),
        ("memory", CHUNK + 5),
        ("working-set", 1),
        ("disks/blk0", CHUNK),
    ] {
        flip(&target.join(name), at);
        let error = open().verify_once(&stamps).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        flip(&target.join(name), at);
        open().verify_once(&stamps).unwrap();
    }
}

#[test]
fn a_stamp_spares_the_reading() {
    let place = tempfile::tempdir().unwrap();
    let stamps = Stamps::open(&place.path().join("stamps")).unwrap();
    let target = place.path().join("s");
    drop(made(&target));
    let damaged = SnapshotDir::open(&target, &trust_all()).unwrap();
    flip(&target.join("memory"), 0);
    std::thread::sleep(std::time::Duration::from_millis(100));
    // With a stamp for exactly these files, they are not read again.
    let files = damaged.files().identities().unwrap();
    let place = fs::canonicalize(&target).unwrap();
    stamps.remember(&place, files, damaged.hash(), SystemTime::now());
    damaged.verify_once(&stamps).unwrap();
    stamps.forget(&place);
    damaged.verify_once(&stamps).unwrap_err();
}

#[test]
fn partial_directories_of_dead_makers_only_are_removed() {
    let place = tempfile::tempdir().unwrap();
    let names = || {
        let mut names: Vec<_> = fs::read_dir(place.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    // As a killed maker leaves it: files, even a manifest, under a temporary name, and no lock.
    let dead = draft(&place.path().join("dead"));
    let left = dead.path.clone();
    drop(dead);
    fs::create_dir(&left).unwrap();
    fs::write(left.join("manifest.json"), b"{}").unwrap();
    let living = draft(&place.path().join("living"));
    drop(made(&place.path().join("made")));
    assert_eq!(names().len(), 2, "{:?}", names());
    drop(living.finish(subject(), None).unwrap());
    assert_eq!(names(), ["living", "made"]);
    drop(draft(&place.path().join("dropped")));
    assert_eq!(names(), ["living", "made"]);
}

#[test]
fn a_name_is_given_once() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("s");
    let (first, second) = (draft(&target), draft(&target));
    let first = first.finish(subject(), None).unwrap();
    assert!(matches!(
        second.finish(subject(), None),
        Err(SnapshotError::Exists { .. })
    ));
    assert!(matches!(Draft::begin(&target), Err(SnapshotError::Exists { .. })));
    first.verify().unwrap();
    let stamps = Stamps::open(&place.path().join("stamps")).unwrap();
    first.remove(&stamps).unwrap();
    assert!(!target.exists());
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "only the stamps");
}

#[test]
fn disks_have_plain_names() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = Draft::begin(&place.path().join("s")).unwrap();
    for bad in ["", "..", "a/b", "a.b", "é", &"x".repeat(33)] {
        assert!(draft.add_disk(bad).is_err(), "{bad:?}");
    }
    draft.add_disk("blk0").unwrap();
    assert!(draft.add_disk("blk0").is_err());
}
