//! Stored layer trees compared with the bytes that earlier releases write: `golden/tree.txt`, a line for a tree of one change. A line there
//! never changes; a new variant adds one.

use std::collections::BTreeMap;

use thaw_imagefs::tree::{Timestamp, Xattr};
use thaw_protocol::tags::Tagged;

use super::*;

fn attributes() -> Attributes {
    Attributes {
        mode: 0o4755,
        uid: 1000,
        gid: 0,
        mtime: Timestamp {
            seconds: -1,
            nanoseconds: 999_999_999,
        },
        xattrs: vec![Xattr {
            name: b"user.a".into(),
            value: vec![0, 255],
        }],
    }
}

#[test]
fn layer_trees_keep_their_bytes() {
    let extents = vec![Extent {
        file_offset: 0,
        data_offset: 1 << 20,
        length: 4096,
    }];
    let leaf = |leaf| Change::Leaf(attributes(), leaf);
    let target = b"usr/bin".to_vec();
    let (major, minor) = (1, 300);
    let changes = [
        ("Directory", Change::Directory(attributes())),
        ("Leaf::File", leaf(Leaf::File { size: 5, extents })),
        (
            "Leaf::Symlink",
            leaf(Leaf::Symlink {
                target: target.clone(),
            }),
        ),
        ("Leaf::CharDevice", leaf(Leaf::CharDevice { major, minor })),
        ("Leaf::BlockDevice", leaf(Leaf::BlockDevice { major, minor })),
        ("Leaf::Fifo", leaf(Leaf::Fifo)),
        ("Leaf::Socket", leaf(Leaf::Socket)),
        ("HardLink", Change::HardLink { target }),
        ("Whiteout", Change::Whiteout),
        ("Opaque", Change::Opaque),
    ];
    let mut lines: BTreeMap<&str, &str> = include_str!("golden/tree.txt")
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let leaf = |change: &Change| match change {
        Change::Leaf(_, leaf) => Some(leaf.tag()),
        _ => None,
    };
    for (tag, variant) in Change::TAGS {
        assert!(
            changes.iter().any(|(_, change)| change.tag() == *tag),
            "{variant} is missing"
        );
    }
    for (tag, variant) in Leaf::TAGS {
        assert!(
            changes.iter().any(|(_, change)| leaf(change) == Some(*tag)),
            "{variant} is missing"
        );
    }
    for (name, change) in changes {
        let tree = LayerTree {
            entries: vec![LayerEntry {
                path: b"bin".into(),
                change,
            }],
            data_length: 8192,
        };
        let bytes = tree.to_bytes().unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(Some(hex.as_str()), lines.remove(name), "{name}");
        assert_eq!(LayerTree::from_bytes(&bytes).unwrap(), tree);
    }
    assert_eq!(lines, BTreeMap::new(), "lines that no tree has");
}
