//! Layers as real tools write them, and malformed ones.

use std::process::{Command, Stdio};

use proptest::prelude::*;
use thaw_imagefs::tree::{PAGE, Xattr};

use super::testing::{END, header, padded, pax, read_back, seal};
use super::*;

fn unpack_bytes(tar: &[u8]) -> Result<(LayerTree, Vec<u8>), LayerError> {
    let mut data = Vec::new();
    unpack(tar, &mut data, &LayerLimits::default()).map(|tree| (tree, data))
}

fn only_entry(parts: &[&[u8]]) -> (LayerEntry, Vec<u8>) {
    let (mut tree, data) = unpack_bytes(&[&parts.concat()[..], &END].concat()).unwrap();
    assert_eq!(tree.entries.len(), 1);
    (tree.entries.remove(0), data)
}

fn refusal(parts: &[&[u8]]) -> LayerError {
    unpack_bytes(&[&parts.concat()[..], &END].concat()).unwrap_err()
}

#[test]
fn a_file_is_stored_on_a_page_of_its_own() {
    let tar = [
        &header("a", b'0', 3, "")[..],
        &padded(b"abc"),
        &header("b", b'0', 5000, ""),
        &padded(&[7; 5000]),
        &END,
    ]
    .concat();
    let (tree, data) = unpack_bytes(&tar).unwrap();
    assert_eq!(tree.data_length, 3 * PAGE);
    assert_eq!(data.len() as u64, tree.data_length);
    assert_eq!((&data[..4], &data[4096..9096]), (&b"abc\0"[..], &[7; 5000][..]));
    let Change::Leaf(attributes, Leaf::File { size, extents }) = &tree.entries[1].change else {
        panic!()
    };
    assert_eq!(
        (*size, attributes.mode, attributes.mtime.seconds),
        (5000, 0o644, 15)
    );
    assert_eq!(
        *extents,
        [crate::layer::tree::Extent {
            file_offset: 0,
            data_offset: PAGE,
            length: 2 * PAGE
        }]
    );
}

#[test]
fn pax_overrides_the_header() {
    let name = format!("dir/{}", "x".repeat(255));
    let records: &[(&str, &[u8])] = &[
        ("path", name.as_bytes()),
        ("uid", b"4000000000"),
        ("gid", b"70000"),
        ("mtime", b"1234567890.000000001"),
        ("SCHILY.xattr.user.b", b"first"),
        ("SCHILY.xattr.security.capability", b"\x01\0\0\x02"),
        ("SCHILY.xattr.user.b", b"with\n=\0bytes"),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.com.apple.provenance", b"x"),
        ("size", b"4"),
    ];
    let (entry, data) = only_entry(&[&pax(records), &header("short", b'0', 0, ""), &padded(b"data")]);
    assert_eq!(entry.path, name.as_bytes());
    assert_eq!(&data[..4], b"data");
    let Change::Leaf(attributes, _) = entry.change else {
        panic!()
    };
    assert_eq!((attributes.uid, attributes.gid), (4_000_000_000, 70_000));
    assert_eq!(
        attributes.mtime,
        Timestamp {
            seconds: 1_234_567_890,
            nanoseconds: 1
        }
    );
    let xattr = |name: &str, value: &[u8]| Xattr {
        name: name.into(),
        value: value.into(),
    };
    assert_eq!(
        attributes.xattrs,
        [
            xattr("security.capability", b"\x01\0\0\x02"),
            xattr("user.b", b"with\n=\0bytes")
        ]
    );
}

#[test]
fn every_type_is_known() {
    let mut device = header("dev", b'3', 99, "");
    device[329..337].copy_from_slice(b"0000001\0");
    device[337..345].copy_from_slice(b"0000005\0");
    seal(&mut device);
    let tar = [
        &header("./", b'5', 0, "")[..],
        &device,
        &header("fifo", b'6', 0, ""),
        &header("symlink", b'2', 0, "/else/../where"),
        &header("link", b'1', 4096, "./fifo"),
        &header("old-directory/", 0, 0, ""),
        &header("d/.wh.gone", b'0', 0, ""),
        &header("d/.wh..wh..opq", b'0', 0, ""),
        &header(".wh..wh.aufs", b'0', 3, ""),
        &padded(b"abc"),
        &pax(&[("comment", b"global headers are passed over")]),
        &header("last", b'7', 0, ""),
        &END,
    ]
    .concat();
    let (tree, _) = unpack_bytes(&tar).unwrap();
    let seen: Vec<(&str, String)> = tree
        .entries
        .iter()
        .map(|entry| {
            let what = match &entry.change {
                Change::Leaf(_, leaf) => format!("{leaf:?}"),
                Change::Directory(_) => "Directory".into(),
                other => format!("{other:?}"),
            };
            (std::str::from_utf8(&entry.path).unwrap(), what)
        })
        .collect();
    let target = |text: &[u8]| format!("{text:?}");
    assert_eq!(
        seen,
        [
            ("", "Directory".into()),
            ("dev", "CharDevice { major: 1, minor: 5 }".into()),
            ("fifo", "Fifo".into()),
            (
                "symlink",
                format!("Symlink {{ target: {} }}", target(b"/else/../where"))
            ),
            ("link", format!("HardLink {{ target: {} }}", target(b"fifo"))),
            ("old-directory", "Directory".into()),
            ("d/gone", "Whiteout".into()),
            ("d", "Opaque".into()),
            ("last", "File { size: 0, extents: [] }".to_string()),
        ]
    );
}

#[test]
fn what_leads_out_of_the_tree_is_refused() {
    for name in ["../x", "/etc/passwd", "a/../../b"] {
        let error = refusal(&[&header(name, b'0', 0, "")]);
        assert!(
            matches!(error, LayerError::UnsafePath { offset: 0, .. }),
            "{name}: {error}"
        );
        assert!(error.to_string().contains(name));
        let error = refusal(&[&header("ok", b'5', 0, ""), &header("l", b'1', 0, name)]);
        assert!(
            matches!(error, LayerError::UnsafeHardLink { offset: 512, .. }),
            "{name}: {error}"
        );
    }
    // A symbolic link may point anywhere: it is followed in the guest, or inside the tree.
    only_entry(&[&header("s", b'2', 0, "/../../etc")]);
}

#[test]
fn damage_is_told_from_truncation() {
    let mut block = header("a", b'0', 0, "");
    block[0] = b'b';
    assert!(matches!(
        refusal(&[&block]),
        LayerError::BadChecksum { offset: 0 }
    ));
    assert!(matches!(
        refusal(&[&header("v", b'V', 0, "")]),
        LayerError::UnsupportedType { .. }
    ));
    let mut size = header("a", b'0', 0, "");
    size[124..136].copy_from_slice(b"99999999999\0");
    seal(&mut size);
    assert!(matches!(refusal(&[&size]), LayerError::BadHeader { .. }));
    for (value, limit) in [("uid", "4294967296"), ("mtime", "soon"), ("size", "-1")] {
        let error = refusal(&[&pax(&[(value, limit.as_bytes())]), &header("a", b'0', 0, "")]);
        assert!(matches!(error, LayerError::BadHeader { .. }), "{value}: {error}");
    }
    let long = refusal(&[&pax(&[("path", &[b'x'; 256])]), &header("a", b'0', 0, "")]);
    assert!(matches!(long, LayerError::BadHeader { .. }));
}

#[test]
fn every_cut_but_one_between_entries_is_truncation() {
    let tar = [
        &pax(&[("uid", b"7")])[..],
        &header("a", b'0', 1000, ""),
        &padded(&[1; 1000]),
        &END,
    ]
    .concat();
    let whole = 512 * 5;
    for length in 0..whole {
        let result = unpack_bytes(&tar[..length]);
        match length {
            0 => assert!(result.is_ok_and(|(tree, _)| tree.entries.is_empty())),
            _ => assert!(
                matches!(result, Err(LayerError::TruncatedLayer { .. })),
                "cut at {length}: {result:?}"
            ),
        }
    }
    // Without its end marker, with half of it, and with padding after it.
    for end in [0, 512, 1024] {
        assert!(unpack_bytes(&tar[..whole + end]).is_ok());
    }
    assert!(unpack_bytes(&[&tar[..], &[0; 8192]].concat()).is_ok());
}

#[test]
fn limits_hold_before_memory_is_taken() {
    let limits = LayerLimits {
        entries: 2,
        header_bytes: 1000,
        tree_bytes: 100,
        data_bytes: 8192,
    };
    let with = |tar: &[&[u8]]| unpack(&[&tar.concat()[..], &END].concat()[..], &mut Vec::new(), &limits);
    let refused = |tar: &[&[u8]]| assert!(matches!(with(tar), Err(LayerError::LimitExceeded { .. })));
    let directory = header("d", b'5', 0, "");
    assert!(with(&[&directory, &directory]).is_ok());
    refused(&[&directory, &directory, &directory]);
    // The header announces terabytes and nothing follows.
    let mut huge = header("pax", b'x', 0, "");
    huge[124..136].copy_from_slice(b"77777777777\0");
    seal(&mut huge);
    refused(&[&huge]);
    huge[156] = b'L';
    seal(&mut huge);
    refused(&[&huge]);
    refused(&[
        &header("s", b'2', 0, &"x".repeat(60)),
        &header("t", b'2', 0, &"x".repeat(60)),
    ]);
    refused(&[&header("f", b'0', 9000, ""), &padded(&[1; 9000])]);
}

fn file_of(tar: &[u8]) -> (Vec<u8>, LayerEntry) {
    let (mut tree, data) = unpack_bytes(tar).unwrap();
    let entry = tree.entries.remove(0);
    let Change::Leaf(_, Leaf::File { size, extents }) = &entry.change else {
        panic!("{entry:?}")
    };
    let file = read_back(extents, &data, *size);
    (file, entry)
}

/// GNU tar packs `name` from a directory, as a layer with the given options.
fn gnu_tar(directory: &std::path::Path, options: &[&str]) -> Vec<u8> {
    let output = Command::new("tar")
        .arg("-C")
        .arg(directory)
        .args(options)
        .args(["-cf", "-", "."])
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success());
    output.stdout
}

#[test]
fn sparse_files_of_gnu_tar_in_all_four_forms() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sparse");
    let mut expected = vec![0u8; 3 << 20];
    let file = std::fs::File::create(&path).unwrap();
    // More fragments than a header and one extension block hold.
    for index in 0..40usize {
        let offset = index * 70_000;
        expected[offset..offset + 100].fill(index as u8 + 1);
        std::os::unix::fs::FileExt::write_all_at(&file, &[index as u8 + 1; 100], offset as u64).unwrap();
    }
    file.set_len(expected.len() as u64).unwrap();
    drop(file);
    for options in [
        &["--format=gnu", "--sparse"][..],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=pax", "--sparse", "--sparse-version=1.0"],
        &["--format=gnu"],
    ] {
        let output = Command::new("tar")
            .arg("-C")
            .arg(directory.path())
            .args(options)
            .args(["-cf", "-", "sparse"])
            .output()
            .unwrap();
        assert!(
            options.len() == 1 || output.stdout.len() < 1 << 20,
            "tar saw no holes"
        );
        let (file, entry) = file_of(&output.stdout);
        assert_eq!(entry.path, b"sparse", "{options:?}");
        assert!(file == expected, "{options:?}");
    }
}

#[test]
fn sparse_maps_that_lie_are_refused() {
    let sparse = |map: &str, size: &str, stored: u64| {
        let records: &[(&str, &[u8])] = &[
            ("GNU.sparse.size", size.as_bytes()),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.map", map.as_bytes()),
        ];
        let content = padded(&vec![1; stored as usize]);
        unpack_bytes(&[&pax(records)[..], &header("f", b'0', stored, ""), &content, &END].concat())
    };
    assert!(sparse("0,10,100,10", "200", 20).is_ok());
    for (map, size, stored) in [
        ("0,10,5,10", "200", 20),
        ("100,10,0,10", "200", 20),
        ("0,10,100,10", "105", 20),
        ("0,10,100,10", "200", 21),
        ("0,10,100", "200", 10),
        ("18446744073709551615,10", "200", 10),
        ("0,10,x,10", "200", 20),
        ("0,10", "18446744073709551615", 10),
    ] {
        let result = sparse(map, size, stored);
        assert!(
            matches!(
                result,
                Err(LayerError::BadHeader { .. } | LayerError::LimitExceeded { .. })
            ),
            "{map}"
        );
    }
}

#[test]
fn gnu_tar_long_names_owners_and_times() {
    let directory = tempfile::tempdir().unwrap();
    let long = "n".repeat(200);
    std::fs::create_dir(directory.path().join(&long)).unwrap();
    std::fs::write(directory.path().join(&long).join("file"), b"x").unwrap();
    std::os::unix::fs::symlink("t".repeat(300), directory.path().join("s")).unwrap();
    for options in [
        &["--format=gnu", "--owner=:3000000000"][..],
        &["--format=pax", "--owner=:3000000000"],
    ] {
        let (tree, _) = unpack_bytes(&gnu_tar(directory.path(), options)).unwrap();
        let find = |path: &str| {
            &tree
                .entries
                .iter()
                .find(|entry| entry.path == path.as_bytes())
                .unwrap()
                .change
        };
        let Change::Leaf(attributes, _) = find(&format!("{long}/file")) else {
            panic!()
        };
        assert_eq!(attributes.uid, 3_000_000_000);
        let Change::Leaf(_, Leaf::Symlink { target }) = find("s") else {
            panic!()
        };
        assert_eq!(*target, "t".repeat(300).as_bytes());
    }
}

#[test]
fn a_stored_tree_comes_back() {
    let (tree, _) = unpack_bytes(&[&header("a", b'0', 3, "")[..], &padded(b"abc"), &END].concat()).unwrap();
    let bytes = tree.to_bytes().unwrap();
    assert_eq!(LayerTree::from_bytes(&bytes).unwrap(), tree);
    assert!(LayerTree::from_bytes(&bytes[..bytes.len() - 1]).is_err());
    assert!(LayerTree::from_bytes(b"thawlt\0\x02").is_err());
}

proptest! {
    /// Arbitrary bytes give a result without a panic, and a tree has only clean paths.
    #[test]
    fn damaged_archives_never_panic(flips in prop::collection::vec((0usize..4096, any::<u8>()), 1..8), reseal in any::<bool>()) {
        let mut tar = [
            &pax(&[("path", b"some/name"), ("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"),
                   ("GNU.sparse.realsize", b"100000")])[..],
            &header("a", b'0', 1024, ""), &padded(b"1\n5000\n512\n"), &[3; 512],
            &header("b", b'S', 0, ""), &END,
        ].concat();
        for (place, value) in flips {
            let place = place % tar.len();
            tar[place] = value;
        }
        if reseal {
            for block in [0, 2, 5] {
                if let Some(bytes) = tar.get_mut(block * 512..(block + 1) * 512) {
                    let mut sealed: [u8; 512] = (&*bytes).try_into().unwrap();
                    seal(&mut sealed);
                    bytes.copy_from_slice(&sealed);
                }
            }
        }
        let mut data = Vec::new();
        let limits = LayerLimits { data_bytes: 1 << 24, ..LayerLimits::default() };
        if let Ok(tree) = unpack(&tar[..], &mut data, &limits) {
            prop_assert_eq!(tree.data_length, data.len() as u64);
            for entry in &tree.entries {
                let is_clean = entry.path.split(|byte| *byte == b'/').all(|part| {
                    !part.is_empty() && part != b"." && part != b".." && part.len() <= 255
                });
                prop_assert!(entry.path.is_empty() || is_clean);
            }
        }
    }
}
