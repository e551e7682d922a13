use thaw_imagefs::erofs::write;
use thaw_imagefs::tree::{Attributes, Inode as TreeInode, Kind, Tree, Xattr};

use super::*;

fn attributes(mode: u16, uid: u32) -> Attributes {
    Attributes {
        mode,
        uid,
        gid: uid,
        ..Attributes::default()
    }
}

/// A tree of directories, empty files and links, each listed after its directory.
fn image(all: &[(&str, u16, Kind)]) -> Reader<Vec<u8>> {
    let mut tree = Tree::new(attributes(0o755, 0));
    for (path, mode, kind) in all {
        let number = tree.inodes.len() as u32;
        tree.inodes.push(TreeInode {
            attributes: attributes(*mode, 7),
            kind: kind.clone(),
        });
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let above = tree.lookup(above.as_bytes()).unwrap();
        let Kind::Directory { entries, .. } = &mut tree.inodes[above as usize].kind else {
            panic!("{path} is in no directory");
        };
        entries.insert(name.as_bytes().into(), number);
    }
    let mut bytes = Vec::new();
    write(&tree, &[], &mut bytes).unwrap();
    Reader::new(bytes).unwrap()
}

fn link(target: &str) -> Kind {
    Kind::Symlink {
        target: target.as_bytes().into(),
    }
}

fn directory() -> Kind {
    Kind::Directory {
        entries: BTreeMap::new(),
    }
}

fn empty() -> Kind {
    Kind::File {
        size: 0,
        extents: Vec::new(),
    }
}

fn found(reader: &Reader<Vec<u8>>, volumes: &[&str]) -> Vec<String> {
    let volumes: Vec<String> = volumes.iter().map(|path| (*path).to_owned()).collect();
    let nodes = walk(reader, &volumes, VOLUMES).unwrap();
    nodes
        .keys()
        .map(|path| String::from_utf8(path.clone()).unwrap())
        .collect()
}

#[test]
fn volume_is_copied_with_parents_and_links_within_the_image() {
    let reader = image(&[
        ("var", 0o755, directory()),
        ("var/lib", 0o711, directory()),
        ("var/lib/data", 0o2750, directory()),
        ("var/lib/data/program", 0o4755, empty()),
        ("var/lib/data/pipe", 0o600, Kind::Fifo),
        ("var/lib/data/out", 0o777, link("/etc/shadow")),
        ("var/lib/other", 0o755, directory()),
        ("data", 0o777, link("../../var/./lib//data")),
        ("loop", 0o777, link("/loop")),
    ]);
    let below = [
        "var",
        "var/lib",
        "var/lib/data",
        "var/lib/data/out",
        "var/lib/data/program",
    ];
    assert_eq!(found(&reader, &["/var/lib/data/"]), below);
    let outside = [
        "../../var/lib/other/../data",
        "/missing",
        "/var/lib/data/program/x",
    ];
    assert_eq!(found(&reader, &outside[..2]), {
        let mut all = below.to_vec();
        all.push("var/lib/other");
        all
    });
    assert_eq!(found(&reader, &outside[2..])[3], "var/lib/data/program");
    // CRI follows the link too.
    assert_eq!(found(&reader, &["data"])[0], "data");
    assert_eq!(found(&reader, &["data"])[1..], below);
    let nodes = walk(&reader, &["/var/lib/data".to_owned()], VOLUMES).unwrap();
    let of = |path: &str| nodes[path.as_bytes()].clone();
    assert_eq!(
        (
            of("var/lib/data").mode,
            of("var/lib/data").uid,
            of("var/lib").mode
        ),
        (0o2750, 7, 0o711)
    );
    assert_eq!(of("var/lib/data/program").mode, 0o4755);
    assert_eq!(
        of("var/lib/data/out").what,
        What::Link {
            target: b"/etc/shadow".to_vec()
        }
    );
    let error = walk(&reader, &["/loop".to_owned()], VOLUMES).unwrap_err();
    assert!(error.to_string().contains("links"), "{error}");
}

#[test]
fn more_than_the_bound_is_refused_by_the_volumes_name() {
    let large = Kind::File {
        size: 2 << 20,
        extents: Vec::new(),
    };
    let reader = image(&[
        ("v", 0o755, directory()),
        ("v/a", 0o644, large),
        ("v/b", 0o644, empty()),
    ]);
    let refused = |entries, bytes| {
        let bound = Bound {
            entries,
            bytes,
            ..VOLUMES
        };
        walk(&reader, &["/v".to_owned()], bound).map_err(|failure| failure.to_string())
    };
    assert_eq!(refused(3, 2 << 20).unwrap().len(), 3);
    for (entries, bytes, words) in [(2, 2 << 20, "2 entries"), (3, 1 << 20, "1 MiB")] {
        let said = refused(entries, bytes).unwrap_err();
        assert!(said.contains("with /v") && said.contains(words), "{said}");
    }
}

#[test]
fn all_of_an_image_is_had_with_its_links_and_capabilities() {
    let mut tree = Tree::new(attributes(0o755, 0));
    let xattr = |name: &[u8]| Xattr {
        name: name.to_vec(),
        value: b"v".to_vec(),
    };
    tree.inodes.push(TreeInode {
        attributes: Attributes {
            xattrs: [
                &b"security.capability"[..],
                b"security.selinux",
                b"trusted.overlay.opaque",
                b"user.a",
            ]
            .map(xattr)
            .into(),
            ..attributes(0o755, 7)
        },
        kind: empty(),
    });
    let Kind::Directory { entries, .. } = &mut tree.inodes[0].kind else {
        panic!();
    };
    entries.insert(b"one".as_slice().into(), 1);
    entries.insert(b"other".as_slice().into(), 1);
    let mut bytes = Vec::new();
    write(&tree, &[], &mut bytes).unwrap();
    let nodes = walk(&Reader::new(bytes).unwrap(), &["/".to_owned()], WHOLE).unwrap();
    let [one, other] = [&b"one"[..], b"other"].map(|path| &nodes[path]);
    assert_eq!((nodes.len(), one), (2, other));
    assert!(one.is_linked);
    // An image may not set attributes that mean something to the host or to an overlay.
    let names: Vec<&[u8]> = one.extended.iter().map(|(name, _)| &name[..]).collect();
    assert_eq!(names, [&b"security.capability"[..], b"user.a"]);
}
