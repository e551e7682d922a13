//! The tar stream of a hostile guest, unpacked by `thaw cp`: whatever it contains, nothing beside the destination changes.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;

use thaw_archive::{Links, Root, Unpacking, unpack};

/// The bytes are the stream.
pub fn run(input: &[u8]) {
    let outer = tempfile::tempdir().expect("a temporary directory");
    let (secret, inner) = (outer.path().join("secret"), outer.path().join("inner"));
    fs::write(&secret, "secret").expect("room");
    fs::create_dir(&inner).expect("room");
    let directory = File::open(&inner).expect("it was just made");
    for (links, only) in [(Links::Refused, Some("a".into())), (Links::WithinRoot, None)] {
        let how = Unpacking {
            keep_owner: false,
            trusted: false,
            only,
        };
        let root = Root::new(directory.as_fd(), links);
        // A file of zeros may claim to be as large as the file system allows.
        let _ = unpack(root, Path::new(""), input, &how);
    }
    assert_eq!(fs::read(&secret).expect("it stays"), b"secret");
    assert_eq!(fs::read_dir(outer.path()).expect("it stays").count(), 2);
}
