//! Each rule of the image-spec's layer.md, on trees small enough to read.

use thaw_imagefs::tree::{PAGE, Timestamp};

use crate::layer::tree::{Extent, LayerEntry};

use super::*;

fn attributes(mode: u16) -> Attributes {
    Attributes {
        mode,
        mtime: Timestamp {
            seconds: 1,
            nanoseconds: 0,
        },
        ..Attributes::default()
    }
}

fn dir(path: &str) -> LayerEntry {
    LayerEntry {
        path: path.into(),
        change: Change::Directory(attributes(0o700)),
    }
}

fn file(path: &str, size: u64) -> LayerEntry {
    let extent = Extent {
        file_offset: 0,
        data_offset: 0,
        length: PAGE,
    };
    let leaf = Leaf::File {
        size,
        extents: vec![extent],
    };
    LayerEntry {
        path: path.into(),
        change: Change::Leaf(attributes(0o644), leaf),
    }
}

fn symlink(path: &str, target: &str) -> LayerEntry {
    let leaf = Leaf::Symlink {
        target: target.into(),
    };
    LayerEntry {
        path: path.into(),
        change: Change::Leaf(attributes(0o777), leaf),
    }
}

fn link(path: &str, target: &str) -> LayerEntry {
    LayerEntry {
        path: path.into(),
        change: Change::HardLink {
            target: target.into(),
        },
    }
}

fn whiteout(path: &str) -> LayerEntry {
    LayerEntry {
        path: path.into(),
        change: Change::Whiteout,
    }
}

fn opaque(path: &str) -> LayerEntry {
    LayerEntry {
        path: path.into(),
        change: Change::Opaque,
    }
}

fn merge<const N: usize>(layers: [Vec<LayerEntry>; N]) -> Result<Tree, MergeError> {
    flatten(&layers.map(|entries| LayerTree {
        entries,
        data_length: 0,
    }))
}

/// Every path, and `=SIZE` after a file's.
fn paths(tree: &Tree) -> Vec<String> {
    let mut found = Vec::new();
    let mut pending = vec![(String::new(), Tree::ROOT)];
    while let Some((path, index)) = pending.pop() {
        for (name, child) in tree.entries(index).into_iter().flatten() {
            let path = format!("{path}{}", String::from_utf8_lossy(name));
            match &tree.inode(*child).kind {
                Kind::File { size, .. } => found.push(format!("{path}={size}")),
                Kind::Directory { .. } => {
                    found.push(format!("{path}/"));
                    pending.push((format!("{path}/"), *child));
                }
                _ => found.push(path),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn upper_files_replace_lower_ones_and_missing_parents_are_made() {
    let tree = merge([vec![file("a/b/c", 1), file("x", 1)], vec![file("a/b/c", 2)]]).unwrap();
    assert_eq!(paths(&tree), ["a/", "a/b/", "a/b/c=2", "x=1"]);
    let made = tree.inode(tree.lookup(b"a/b").unwrap());
    assert_eq!(made.attributes, Attributes::implied_directory());
    let Kind::File { extents, .. } = &tree.inode(tree.lookup(b"a/b/c").unwrap()).kind else {
        panic!()
    };
    assert_eq!(extents[0].blob, 1);
}

#[test]
fn a_directory_keeps_what_it_holds_and_takes_new_attributes() {
    let tree = merge([vec![file("a/b", 1)], vec![dir("a")]]).unwrap();
    assert_eq!(paths(&tree), ["a/", "a/b=1"]);
    assert_eq!(tree.inode(tree.lookup(b"a").unwrap()).attributes.mode, 0o700);
}

#[test]
fn types_change() {
    let tree = merge([
        vec![file("a/b", 1), file("c", 1)],
        vec![file("a", 2), dir("c"), file("c/d", 3)],
    ])
    .unwrap();
    assert_eq!(paths(&tree), ["a=2", "c/", "c/d=3"]);
}

#[test]
fn a_whiteout_hides_lower_layers_only() {
    let lower = vec![file("a/b", 1), file("a/c", 1), file("d/e", 1)];
    let tree = merge([lower.clone(), vec![whiteout("a/b"), whiteout("d")]]).unwrap();
    assert_eq!(paths(&tree), ["a/", "a/c=1"]);
    // Whether the same layer's own file stands before the whiteout or after it.
    for entries in [
        vec![file("a/b", 2), whiteout("a/b")],
        vec![whiteout("a/b"), file("a/b", 2)],
    ] {
        assert_eq!(
            paths(&merge([lower.clone(), entries]).unwrap()),
            ["a/", "a/b=2", "a/c=1", "d/", "d/e=1"]
        );
    }
    for entries in [
        vec![dir("d"), file("d/f", 2), whiteout("d")],
        vec![whiteout("d"), dir("d"), file("d/f", 2)],
    ] {
        assert_eq!(
            paths(&merge([lower.clone(), entries]).unwrap()),
            ["a/", "a/b=1", "a/c=1", "d/", "d/f=2"]
        );
    }
    // Without any layer.
    assert_eq!(
        merge([lower.clone(), vec![whiteout("q/r"), whiteout("q")]]).unwrap(),
        merge([lower]).unwrap()
    );
}

#[test]
fn an_opaque_directory_hides_lower_layers_only() {
    let lower = vec![file("a/b/c", 1), file("a/d", 1), file("e", 1)];
    for entries in [
        vec![dir("a"), opaque("a"), file("a/n", 2)],
        vec![dir("a"), file("a/n", 2), opaque("a")],
    ] {
        assert_eq!(
            paths(&merge([lower.clone(), entries]).unwrap()),
            ["a/", "a/n=2", "e=1"]
        );
    }
    // A directory below that both layers have keeps only the upper layer's part.
    let tree = merge([lower.clone(), vec![file("a/b/n", 2), opaque("a")]]).unwrap();
    assert_eq!(paths(&tree), ["a/", "a/b/", "a/b/n=2", "e=1"]);
    assert_eq!(
        paths(&merge([lower, vec![opaque("")]]).unwrap()),
        Vec::<String>::new()
    );
}

#[test]
fn opaque_directory_over_a_link_does_not_follow_it() {
    let lower = vec![dir("run"), file("run/kept", 1), symlink("var/run", "/run")];
    let tree = merge([
        lower,
        vec![dir("var/run"), opaque("var/run"), file("var/run/n", 2)],
    ])
    .unwrap();
    assert_eq!(
        paths(&tree),
        ["run/", "run/kept=1", "var/", "var/run/", "var/run/n=2"]
    );
}

#[test]
fn links_in_the_directory_part_are_followed_inside_the_tree() {
    let lower = vec![
        dir("usr/lib"),
        symlink("lib", "usr/lib"),
        symlink("up", "../../../usr"),
        symlink("abs", "/usr"),
    ];
    let upper = vec![
        file("lib/a", 1),
        file("up/b", 2),
        file("abs/lib/c", 3),
        link("d", "lib/a"),
    ];
    let tree = merge([lower, upper]).unwrap();
    assert_eq!(
        paths(&tree),
        [
            "abs",
            "d=1",
            "lib",
            "up",
            "usr/",
            "usr/b=2",
            "usr/lib/",
            "usr/lib/a=1",
            "usr/lib/c=3"
        ]
    );
    let looped = merge([vec![symlink("a", "b"), symlink("b", "a"), file("a/x", 1)]]);
    assert!(matches!(looped, Err(MergeError::SymlinkLoop { .. })));
    let through_file = merge([vec![file("f", 1), file("f/x", 1)]]);
    assert!(matches!(through_file, Err(MergeError::NotADirectory { .. })));
}

#[test]
fn hard_links_share_an_inode_across_layers() {
    let tree = merge([vec![file("a", 1)], vec![link("b/c", "a"), whiteout("a")]]).unwrap();
    assert_eq!(paths(&tree), ["b/", "b/c=1"]);
    let tree = merge([
        vec![file("a", 1), link("b", "a"), link("a", "a")],
        vec![file("a", 2)],
    ])
    .unwrap();
    assert_eq!(paths(&tree), ["a=2", "b=1"]);
    let tree = merge([vec![file("a", 1)], vec![link("b", "a")]]).unwrap();
    assert_eq!(tree.lookup(b"a"), tree.lookup(b"b"));
    assert!(matches!(
        merge([vec![link("b", "a")]]),
        Err(MergeError::MissingLinkTarget { .. })
    ));
    assert!(matches!(
        merge([vec![dir("a"), link("b", "a")]]),
        Err(MergeError::LinkToDirectory { .. })
    ));
}

#[test]
fn the_root_takes_the_attributes_a_layer_gives_it() {
    let tree = merge([vec![dir("")]]).unwrap();
    assert_eq!(tree.inode(Tree::ROOT).attributes, attributes(0o700));
}
