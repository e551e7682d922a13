use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tar::{Builder, EntryType, Header};

use crate::{Error, Links, Root, Unpacking, pack, unpack};

const HOSTILE: Unpacking = Unpacking {
    keep_owner: false,
    trusted: false,
    only: None,
};

fn packed(path: &Path, name: &str) -> Vec<u8> {
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW;
    let top = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
    let mut out = Vec::new();
    pack(top, Path::new(name), &mut out).unwrap();
    out
}

fn put(archive: &[u8], into: &Path, how: &Unpacking) -> Result<(), Error> {
    let directory = OwnedFd::from(File::open(into).unwrap());
    let root = Root::new(directory.as_fd(), Links::Refused);
    unpack(root, Path::new(""), archive, how)
}

/// An archive of entries: name, type, target, contents.
fn archive(entries: &[(&str, EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, kind, target, contents) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o755);
        stamp(&mut header);
        header.set_size(contents.len() as u64);
        let fields = header.as_old_mut();
        fields.name[..name.len()].copy_from_slice(name.as_bytes());
        fields.linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        builder.append(&header, *contents).unwrap();
    }
    builder.into_inner().unwrap()
}

/// What every header has.
fn stamp(header: &mut Header) {
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1);
}

/// A directory to unpack into, with a secret beside it.
fn outer() -> (tempfile::TempDir, PathBuf) {
    let outer = tempfile::tempdir().unwrap();
    fs::write(outer.path().join("secret"), "secret").unwrap();
    let inner = outer.path().join("inner");
    fs::create_dir(&inner).unwrap();
    (outer, inner)
}

fn is_untouched(outer: &Path) -> bool {
    fs::read(outer.join("secret")).unwrap() == b"secret" && fs::read_dir(outer).unwrap().count() == 2
}

#[test]
fn tree_is_the_same_after_packing_and_unpacking() {
    let from = tempfile::tempdir().unwrap();
    let at = |name: &str| from.path().join(name);
    fs::create_dir_all(at("d/empty")).unwrap();
    fs::write(at("d/file"), "contents").unwrap();
    fs::write(at("d/none"), "").unwrap();
    fs::set_permissions(at("d/file"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(at("d/file"), at("d/again")).unwrap();
    symlink("../../outside", at("d/link")).unwrap();
    symlink("x".repeat(300), at("d/far")).unwrap();
    let odd = std::ffi::OsString::from_vec(b"odd\xff\nname".to_vec());
    fs::write(from.path().join("d").join(&odd), "odd").unwrap();
    let long = format!("d/{}", "n".repeat(200));
    fs::write(at(&long), "long").unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("d/fifo"), rustix::fs::Mode::RUSR).unwrap();
    let sparse = File::create(at("d/sparse")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (64 << 20) - 3).unwrap();
    fs::set_permissions(at("d/empty"), fs::Permissions::from_mode(0o500)).unwrap();

    let stream = packed(&at("d"), "new");
    assert!(stream.len() < 1 << 20, "holes are left out: {}", stream.len());
    let (_outer, inner) = outer();
    put(&stream, &inner, &HOSTILE).unwrap();
    let new = inner.join("new");
    assert_eq!(fs::read(new.join("file")).unwrap(), b"contents");
    let file = fs::metadata(new.join("file")).unwrap();
    assert_eq!(
        (file.mode() & 0o7777, file.mtime()),
        (0o640, fs::metadata(at("d/file")).unwrap().mtime())
    );
    assert_eq!(file.ino(), fs::metadata(new.join("again")).unwrap().ino());
    assert_eq!(
        fs::read_link(new.join("link")).unwrap(),
        Path::new("../../outside")
    );
    assert_eq!(
        fs::read_link(new.join("far")).unwrap(),
        Path::new(&"x".repeat(300))
    );
    assert_eq!(fs::read(new.join(&odd)).unwrap(), b"odd");
    assert_eq!(fs::read(inner.join(long.replace("d/", "new/"))).unwrap(), b"long");
    assert_eq!(fs::metadata(new.join("empty")).unwrap().mode() & 0o7777, 0o500);
    let sparse = fs::metadata(new.join("sparse")).unwrap();
    assert_eq!(sparse.len(), 64 << 20);
    assert!(sparse.blocks() * 512 < 1 << 20, "{}", sparse.blocks());
    assert!(fs::read(new.join("sparse")).unwrap().ends_with(b"\0end"));
    assert_eq!(
        fs::read_dir(&new).unwrap().count(),
        fs::read_dir(at("d")).unwrap().count()
    );
}

#[test]
fn links_and_names_do_not_lead_out() {
    use EntryType as T;
    for (what, entries) in [
        ("..", vec![("../secret", T::Regular, "", &b"x"[..])]),
        ("inner ..", vec![("a/../../secret", T::Regular, "", b"x")]),
        (
            "link",
            vec![("a", T::Symlink, "..", b""), ("a/secret", T::Regular, "", b"x")],
        ),
        (
            "absolute link",
            vec![
                ("a", T::Symlink, "/tmp", b""),
                ("a/thaw-escaped", T::Regular, "", b"x"),
            ],
        ),
        (
            "link within",
            vec![
                ("d", T::Directory, "", b""),
                ("a", T::Symlink, "d", b""),
                ("a/x", T::Regular, "", b"x"),
            ],
        ),
        (
            "link as a directory",
            vec![("a", T::Symlink, "..", b""), ("a", T::Directory, "", b"")],
        ),
        ("hard link", vec![("a", T::Link, "../secret", b"")]),
        (
            "hard link through a link",
            vec![("l", T::Symlink, "..", b""), ("a", T::Link, "l/secret", b"")],
        ),
        ("device", vec![("a", T::Char, "", b"")]),
        ("block device", vec![("a", T::Block, "", b"")]),
        ("unknown", vec![("a", T::new(b'V'), "", b"")]),
        ("file as the top", vec![(".", T::Regular, "", b"x")]),
    ] {
        let (outer, inner) = outer();
        let refused = put(&archive(&entries), &inner, &HOSTILE);
        assert!(refused.is_err(), "{what}");
        assert!(is_untouched(outer.path()), "{what}");
        assert!(!Path::new("/tmp/thaw-escaped").exists(), "{what}");
    }
    // A file through a link is replaced, not followed; an absolute name stays below.
    let (outer, inner) = outer();
    let entries = archive(&[
        ("a", T::Symlink, "../secret", b""),
        ("a", T::Regular, "", b"new"),
        ("/etc/b", T::Regular, "", b"b"),
    ]);
    put(&entries, &inner, &HOSTILE).unwrap();
    assert_eq!(fs::read(inner.join("a")).unwrap(), b"new");
    assert_eq!(fs::read(inner.join("etc/b")).unwrap(), b"b");
    assert!(is_untouched(outer.path()));
}

#[test]
fn links_of_a_container_are_followed_within_its_root() {
    let (outer, inner) = outer();
    fs::create_dir(inner.join("run")).unwrap();
    symlink("/run", inner.join("var")).unwrap();
    symlink("../../..", inner.join("up")).unwrap();
    let directory = OwnedFd::from(File::open(&inner).unwrap());
    let root = Root::new(directory.as_fd(), Links::WithinRoot);
    let entries = archive(&[
        ("var/pid", EntryType::Regular, "", b"1"),
        ("up/secret", EntryType::Regular, "", b"x"),
    ]);
    unpack(root, Path::new("/"), &entries[..], &HOSTILE).unwrap();
    assert_eq!(fs::read(inner.join("run/pid")).unwrap(), b"1");
    assert_eq!(fs::read(inner.join("secret")).unwrap(), b"x");
    assert!(is_untouched(outer.path()));
}

#[test]
fn files_and_directories_do_not_replace_each_other() {
    let (_outer, inner) = outer();
    fs::create_dir(inner.join("d")).unwrap();
    fs::write(inner.join("f"), "old").unwrap();
    let file_over = archive(&[("d", EntryType::Regular, "", b"x")]);
    let error = put(&file_over, &inner, &HOSTILE).unwrap_err().to_string();
    assert!(error.contains("d is a directory"), "{error}");
    let directory_over = archive(&[("f", EntryType::Directory, "", b"")]);
    let error = put(&directory_over, &inner, &HOSTILE).unwrap_err().to_string();
    assert!(error.contains("f is a file or a link"), "{error}");
    assert_eq!(fs::read(inner.join("f")).unwrap(), b"old");
}

#[test]
fn only_the_expected_name_is_accepted() {
    let how = Unpacking {
        only: Some("hosts".into()),
        ..HOSTILE
    };
    for (name, good) in [
        ("hosts", true),
        (".bashrc", false),
        ("./hosts/x", true),
        ("hosts2", false),
        (".", false),
    ] {
        let (_outer, inner) = outer();
        let kind = EntryType::Directory;
        let unpacked = put(&archive(&[(name, kind, "", b"")]), &inner, &how);
        assert_eq!(unpacked.is_ok(), good, "{name}");
    }
    let (_outer, inner) = outer();
    fs::write(inner.join("mine"), "mine").unwrap();
    let stolen = archive(&[("hosts", EntryType::Link, "mine", b"")]);
    assert!(put(&stolen, &inner, &how).is_err());
}

#[test]
fn special_bits_come_only_from_a_trusted_archive() {
    let (_outer, inner) = outer();
    let mut builder = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_mode(0o6755);
    stamp(&mut header);
    header.set_size(0);
    builder.append_data(&mut header, "f", &b""[..]).unwrap();
    let stream = builder.into_inner().unwrap();
    for (trusted, mode) in [(false, 0o755), (true, 0o6755)] {
        let how = Unpacking { trusted, ..HOSTILE };
        put(&stream, &inner, &how).unwrap();
        assert_eq!(fs::metadata(inner.join("f")).unwrap().mode() & 0o7777, mode);
    }
}

#[test]
fn archive_that_breaks_off_or_claims_too_much_is_refused() {
    let whole = archive(&[("a", EntryType::Regular, "", &[1; 5000])]);
    let (_outer, inner) = outer();
    for cut in [100, 700, 3000] {
        assert!(put(&whole[..cut], &inner, &HOSTILE).is_err(), "{cut}");
        assert!(!inner.join("a").exists());
    }
    // A long name of 2 MiB is not held.
    let name = vec![b'x'; 2 << 20];
    let long = archive(&[
        ("././@LongLink", EntryType::GNULongName, "", &name),
        ("a", EntryType::Regular, "", b""),
    ]);
    let error = put(&long, &inner, &HOSTILE).unwrap_err().to_string();
    assert!(error.contains("headers"), "{error}");
    // A file that no file system holds is not read to its end.
    let mut header = Header::new_gnu();
    header.set_size(1 << 62);
    header.as_old_mut().name[0] = b'a';
    header.set_mode(0o644);
    stamp(&mut header);
    header.set_cksum();
    assert!(put(header.as_bytes(), &inner, &HOSTILE).is_err());
    assert!(!inner.join("a").exists());
}

#[test]
fn too_deep_a_tree_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut at = dir.path().to_owned();
    for _ in 0..260 {
        at.push("d");
    }
    fs::create_dir_all(&at).unwrap();
    let top = OwnedFd::from(File::open(dir.path()).unwrap());
    let error = pack(top, Path::new("top"), &mut Vec::new())
        .unwrap_err()
        .to_string();
    assert!(error.contains("deep"), "{error}");
}

#[test]
fn files_of_the_kernel_are_refused_by_name() {
    let top = OwnedFd::from(File::open("/proc/version").unwrap());
    let error = pack(top, Path::new("version"), &mut Vec::new())
        .unwrap_err()
        .to_string();
    assert!(error.contains("kernel"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_archive_reaches_out(entries in prop::collection::vec(("[a./]{1,8}", 0_u8..8, "[a./]{0,8}"), 0..6)) {
        let (outer, inner) = outer();
        let entries: Vec<_> = entries
            .iter()
            .map(|(name, kind, target)| (name.as_str(), EntryType::new(b'0' + kind), target.as_str(), &b""[..]))
            .collect();
        for links in [Links::Refused, Links::WithinRoot] {
            let directory = OwnedFd::from(File::open(&inner).unwrap());
            let root = Root::new(directory.as_fd(), links);
            let _ = unpack(root, Path::new(""), &archive(&entries)[..], &HOSTILE);
        }
        prop_assert!(is_untouched(outer.path()));
        prop_assert!(!outer.path().as_os_str().as_bytes().is_empty());
    }

    #[test]
    fn no_bytes_panic(bytes: Vec<u8>) {
        let (outer, inner) = outer();
        let _ = put(&bytes, &inner, &HOSTILE);
        prop_assert!(is_untouched(outer.path()));
    }
}
