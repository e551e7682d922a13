//! A VMM gets exactly what was frozen, and cannot change it.

use super::*;
use crate::error::{Error, ErrorKind};
use crate::snapshot::Draft;
use crate::snapshot::directory::tests::{draft, subject};
use crate::snapshot::manifest::{Base, CHUNK, LAYERED_FORMAT, Subject};
use std::fs;
use std::os::fd::AsFd;
use thaw_protocol::disk_layer::file_bytes;

fn registry(place: &Path, hold: Hold) -> Registry {
    Registry::open(&place.join("data"), hold, Signatures::AsKeysSay).unwrap()
}

fn contents(fd: &OwnedFd) -> Vec<u8> {
    let file = File::from(fd.try_clone().unwrap());
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn cannot_be_written(fd: &OwnedFd) {
    assert!(rustix::io::pwrite(fd.as_fd(), b"x", 0).is_err());
}

#[test]
fn what_is_held_equals_the_files() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("s");
    let snapshot = draft(&target).finish(subject(), None).unwrap();
    for hold in [Hold::Sealed, Hold::Files] {
        let held = registry(place.path(), hold).register(&target).unwrap();
        assert_eq!(
            (held.hash, &held.manifest),
            (snapshot.hash(), snapshot.manifest())
        );
        assert_eq!(held.files.memory.len(), 1);
        let working_set = held.files.working_set.as_ref().unwrap();
        for (name, fd) in [
            ("state", &held.files.state),
            ("memory", &held.files.memory[0]),
            ("working-set", working_set),
        ] {
            assert_eq!(contents(fd), fs::read(target.join(name)).unwrap(), "{name}");
            cannot_be_written(fd);
        }
        assert_eq!(held.disks[0].0, "blk0");
        assert_eq!(
            contents(&held.disks[0].1),
            fs::read(target.join("disks/blk0")).unwrap()
        );
    }
}

#[test]
fn sealed_memory_is_sealed_sparse_and_deaf_to_the_file() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("s");
    drop(draft(&target).finish(subject(), None).unwrap());
    let held = registry(place.path(), Hold::Sealed).register(&target).unwrap();
    let before = contents(&held.files.memory[0]);
    let seals = rustix::fs::fcntl_get_seals(&held.files.memory[0]).unwrap();
    for seal in [
        SealFlags::WRITE,
        SealFlags::GROW,
        SealFlags::SHRINK,
        SealFlags::SEAL,
    ] {
        assert!(seals.contains(seal), "{seals:?}");
    }
    let blocks = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_blocks;
    let path = target.join("memory");
    assert!(
        (blocks(&held.files.memory[0]) as u64) < CHUNK / 512,
        "holes stay holes"
    );
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(&[7; 4096], 0)
        .unwrap();
    fs::remove_dir_all(&target).unwrap();
    assert_eq!(contents(&held.files.memory[0]), before);
}

#[test]
fn damage_is_refused_however_it_is_held() {
    let place = tempfile::tempdir().unwrap();
    for hold in [Hold::Sealed, Hold::Files] {
        for name in ["state", "memory", "working-set", "disks/blk0"] {
            let target = place.path().join("s");
            drop(draft(&target).finish(subject(), None).unwrap());
            let path = target.join(name);
            let mut bytes = fs::read(&path).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::remove_file(&path).unwrap();
            fs::write(&path, &bytes).unwrap();
            let error = registry(place.path(), hold).register(&target).unwrap_err();
            assert!(error.to_string().contains(name), "{hold:?} {name}: {error}");
            fs::write(&path, &bytes[..last]).unwrap();
            let error = registry(place.path(), hold).register(&target).unwrap_err();
            assert!(error.to_string().contains(name), "{hold:?} {name}, cut: {error}");
            fs::remove_dir_all(&target).unwrap();
        }
    }
}

#[test]
fn a_delta_is_held_with_what_it_lies_on_and_with_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let (bottom, top) = (place.path().join("bottom"), place.path().join("top"));
    let under = draft(&bottom).finish(subject(), None).unwrap();
    let mut over = subject();
    over.base = Some(Base {
        manifest: under.hash(),
        place: "../bottom".into(),
    });
    let delta = draft(&top);
    delta.memory().write_all_at(b"written since", 8192).unwrap();
    drop(delta.finish(over, None).unwrap());
    for hold in [Hold::Sealed, Hold::Files] {
        let held = registry(place.path(), hold).register(&top).unwrap();
        assert_eq!(held.files.memory.len(), 2);
        assert_eq!(
            contents(&held.files.memory[0]),
            fs::read(bottom.join("memory")).unwrap()
        );
        assert_eq!(
            contents(&held.files.memory[1]),
            fs::read(top.join("memory")).unwrap()
        );
    }
    // Another snapshot in the base's place is refused, even a complete one.
    fs::remove_dir_all(&bottom).unwrap();
    let kind = |hold| Error::from(registry(place.path(), hold).register(&top).unwrap_err()).kind;
    assert_eq!(kind(Hold::Files), ErrorKind::SnapshotNotFound);
    let mut other = subject();
    other.command_line = None;
    drop(draft(&bottom).finish(other, None).unwrap());
    assert_eq!(kind(Hold::Sealed), ErrorKind::SnapshotIncompatible);
}

/// Makes a snapshot over another, with a layer of so many bytes over its disk.
fn layered(target: &Path, under: &SnapshotDir, bytes: u64) -> SnapshotDir {
    let mut draft = Draft::begin(target).unwrap();
    draft.add_layer("blk0").unwrap().set_len(bytes).unwrap();
    let base = Some(Base {
        manifest: under.hash(),
        place: under.path().to_owned(),
    });
    draft.finish(Subject { base, ..subject() }, None).unwrap()
}

#[test]
fn layered_disk_is_held_with_the_whole_one_below() {
    let place = tempfile::tempdir().unwrap();
    let [bottom, middle, top, other] =
        ["bottom", "middle", "top", "other"].map(|name| place.path().join(name));
    let under = draft(&bottom).finish(subject(), None).unwrap();
    let bytes = file_bytes(under.manifest().files.disks[0].contents.bytes);
    let over = layered(&middle, &under, bytes);
    assert_eq!(over.manifest().format, LAYERED_FORMAT);
    drop(layered(&top, &over, bytes));
    let whole = fs::read(bottom.join("disks/blk0")).unwrap();
    for hold in [Hold::Sealed, Hold::Files] {
        let registry = registry(place.path(), hold);
        let held = Arc::new(registry.register(&middle).unwrap());
        let again = registry.register_with(&top, &|hash| (hash == held.hash).then(|| held.clone()));
        for held in [&held, &Arc::new(again.unwrap())] {
            assert_eq!(contents(&held.disks[0].1).len() as u64, bytes);
            assert_eq!(held.disk_bases.len(), 1);
            assert_eq!(contents(&held.disk_bases[0].file), whole);
            cannot_be_written(&held.disk_bases[0].file);
        }
        let found = registry.whole_disk(&top, "blk0").unwrap().unwrap();
        assert_eq!(contents(&found.into()), whole);
        assert!(registry.whole_disk(&top, "blk1").unwrap().is_none());
    }
    drop(layered(&other, &under, bytes + 4096));
    let refused = registry(place.path(), Hold::Sealed).register(&other).unwrap_err();
    assert_eq!(Error::from(refused).kind, ErrorKind::SnapshotIncompatible);
}

#[test]
fn layer_without_a_snapshot_below_is_not_described() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = Draft::begin(&place.path().join("s")).unwrap();
    draft.add_layer("blk0").unwrap();
    let refused = draft.finish(subject(), None).unwrap_err();
    assert!(refused.to_string().contains("lies on none"), "{refused}");
}

#[test]
fn memory_of_a_base_that_is_held_is_shared() {
    let place = tempfile::tempdir().unwrap();
    let [bottom, top] = ["bottom", "top"].map(|name| place.path().join(name));
    let under = draft(&bottom).finish(subject(), None).unwrap();
    let over = Subject {
        base: Some(Base {
            manifest: under.hash(),
            place: bottom.clone(),
        }),
        ..subject()
    };
    drop(draft(&top).finish(over, None).unwrap());
    let registry = registry(place.path(), Hold::Sealed);
    let held = Arc::new(registry.register(&bottom).unwrap());
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    let alone = registry.register(&top).unwrap();
    let shared = registry
        .register_with(&top, &|hash| (hash == held.hash).then(|| held.clone()))
        .unwrap();
    assert_eq!((alone.files.memory.len(), shared.files.memory.len()), (2, 2));
    let [own, base] = [&alone, &shared].map(|registered| inode(&registered.files.memory[0]));
    assert!(base == inode(&held.files.memory[0]) && own != base);
    assert_eq!(
        contents(&shared.files.memory[1]),
        contents(&alone.files.memory[1])
    );
    assert_eq!(shared.held_bytes, alone.held_bytes, "it keeps what it shares");
}

#[test]
fn layers_that_go_round_in_a_circle_end() {
    let place = tempfile::tempdir().unwrap();
    let registry = registry(place.path(), Hold::Files);
    let mut base: Option<Base> = None;
    for number in 0..=MAX_LAYERS {
        let target = place.path().join(number.to_string());
        let mut subject = subject();
        subject.base = base.take();
        let made = draft(&target).finish(subject, None).unwrap();
        base = Some(Base {
            manifest: made.hash(),
            place: target.clone(),
        });
        let registered = registry.register(&target);
        assert_eq!(registered.is_ok(), number < MAX_LAYERS, "{number}");
    }
}
