//! The file system's methods, called as the server calls them.

use std::ffi::{CStr, CString};
use std::io;
use std::time::Duration;

use fuse_backend_rs::api::filesystem::{Context, FileSystem, FsOptions, GetxattrReply, ListxattrReply};

use super::testing::*;
use super::*;
use crate::blob::CHUNK_SIZE;
use crate::tree::PAGE;

fn name(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn lookup(fs: &RootFs, parent: u64, text: &str) -> io::Result<fuse_backend_rs::api::filesystem::Entry> {
    fs.lookup(&Context::new(), parent, &name(text))
}

fn read(fs: &RootFs, node: u64, offset: u64, size: u32) -> io::Result<Vec<u8>> {
    let mut sink = Sink {
        bytes: vec![],
        room: 1 << 20,
    };
    let read = fs.read(&Context::new(), node, 0, &mut sink, size, offset, None, 0)?;
    assert_eq!(read, sink.bytes.len());
    Ok(sink.bytes)
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Names, inode numbers and cookies of a directory, read `step` entries at a time.
fn list(fs: &RootFs, node: u64, step: usize) -> Vec<(String, u64, u64)> {
    let mut listed: Vec<(String, u64, u64)> = Vec::new();
    loop {
        let from = listed.last().map_or(0, |(_, _, cookie)| *cookie);
        let mut taken = 0;
        fs.readdir(&Context::new(), node, 0, 4096, from, &mut |entry| {
            if taken == step {
                return Ok(0);
            }
            taken += 1;
            listed.push((
                String::from_utf8(entry.name.to_vec()).unwrap(),
                entry.ino,
                entry.offset,
            ));
            Ok(1)
        })
        .unwrap();
        if taken < step {
            return listed;
        }
    }
}

#[test]
fn the_root_is_never_cached_and_an_image_always() {
    let fs = RootFs::new();
    assert_eq!(errno(lookup(&fs, ROOT_NODE, "one")), Some(libc::ENOENT));
    let (before, timeout) = fs.getattr(&Context::new(), ROOT_NODE, None).unwrap();
    assert_eq!(timeout, Duration::ZERO);
    image(0).show(&fs, 1, "one").unwrap();
    let (after, _) = fs.getattr(&Context::new(), ROOT_NODE, None).unwrap();
    assert_ne!(
        before.st_mtime_nsec, after.st_mtime_nsec,
        "a kept listing would not be dropped"
    );

    let top = lookup(&fs, ROOT_NODE, "one").unwrap();
    assert_eq!(top.inode >> 48, 1);
    assert_eq!(top.entry_timeout, Duration::ZERO);
    assert!(top.attr_timeout > Duration::from_secs(1 << 31));
    let file = lookup(&fs, top.inode, "file").unwrap();
    assert!(file.entry_timeout > Duration::from_secs(1 << 31) && file.attr_timeout == file.entry_timeout);
    let absent = lookup(&fs, top.inode, "absent").unwrap();
    assert_eq!((absent.inode, absent.entry_timeout), (0, file.entry_timeout));
    assert_eq!(errno(lookup(&fs, file.inode, "x")), Some(libc::ENOTDIR));
    // File handles are opened through these names.
    assert_eq!(lookup(&fs, file.inode, ".").unwrap().inode, file.inode);
    assert_eq!(lookup(&fs, top.inode, "..").unwrap().inode, ROOT_NODE);
    let directory = lookup(&fs, top.inode, "directory").unwrap();
    assert_eq!(lookup(&fs, directory.inode, "..").unwrap().inode, top.inode);
}

#[test]
fn attributes_are_the_images() {
    let fs = RootFs::new();
    image(0).show(&fs, 3, "one").unwrap();
    let top = lookup(&fs, ROOT_NODE, "one").unwrap().inode;
    let file = lookup(&fs, top, "file").unwrap();
    assert_eq!(
        (file.attr.st_mode, file.attr.st_uid, file.attr.st_gid),
        (libc::S_IFREG | 0o640, 100_000, 7)
    );
    assert_eq!(
        (file.attr.st_size as u64, file.attr.st_nlink),
        (3 * CHUNK_SIZE - 1, 1)
    );
    assert_eq!((file.attr.st_mtime, file.attr.st_mtime_nsec), (5, 6));
    let null = lookup(&fs, top, "null").unwrap();
    assert_eq!(null.attr.st_rdev, libc::makedev(1, 3));
    let link = lookup(&fs, top, "link").unwrap();
    assert_eq!(fs.readlink(&Context::new(), link.inode).unwrap(), b"../target");
    assert_eq!(
        errno(fs.readlink(&Context::new(), file.inode)),
        Some(libc::EINVAL)
    );
    let statistics = fs.statfs(&Context::new(), top).unwrap();
    assert_eq!(
        (statistics.f_files, statistics.f_bsize, statistics.f_namemax),
        (5, PAGE, 255)
    );
}

#[test]
fn listings_go_on_from_any_entry() {
    let fs = RootFs::new();
    for slot in [1, 7, 300] {
        image(500).show(&fs, slot, &format!("image-{slot}")).unwrap();
    }
    let all = list(&fs, ROOT_NODE, 100);
    let names: Vec<_> = all.iter().map(|(name, _, _)| &name[..]).collect();
    assert_eq!(names, [".", "..", "image-1", "image-7", "image-300"]);
    assert_eq!(list(&fs, ROOT_NODE, 1), all);
    let top = lookup(&fs, ROOT_NODE, "image-7").unwrap().inode;
    let all = list(&fs, top, 10_000);
    assert_eq!(all.len(), 506);
    for step in [1, 7, 505] {
        assert_eq!(list(&fs, top, step), all);
    }
    for (text, number, _) in all.iter().filter(|(text, _, _)| !text.starts_with('.')) {
        assert_eq!(lookup(&fs, top, text).unwrap().attr.st_ino, *number);
    }
    // With attributes; `.` and `..` are left out.
    let mut with_entries = 0;
    fs.readdirplus(&Context::new(), top, 0, 4096, 0, &mut |listed, entry| {
        assert_eq!(entry.inode == 0, listed.name.starts_with(b"."));
        if entry.inode != 0 {
            with_entries += 1;
            assert_eq!(entry.attr.st_ino, listed.ino);
            assert_eq!(
                entry.inode,
                lookup(&fs, top, std::str::from_utf8(listed.name).unwrap())
                    .unwrap()
                    .inode
            );
        }
        Ok(1)
    })
    .unwrap();
    assert_eq!(with_entries, 504);
}

#[test]
fn nothing_is_read_before_it_is_ready() {
    let fs = RootFs::new();
    let shown = image(0);
    shown.show(&fs, 1, "one").unwrap();
    let top = lookup(&fs, ROOT_NODE, "one").unwrap().inode;
    let node = lookup(&fs, top, "file").unwrap().inode;
    let range = |offset| MissingRange {
        blob: DIGEST,
        offset,
        length: CHUNK_SIZE,
    };
    assert_eq!(fs.missing(node, 0, 1 << 20), [range(0), range(CHUNK_SIZE)]);
    assert_eq!(fs.missing(node, CHUNK_SIZE - 1, 2), [range(0)]);
    assert_eq!(fs.missing(node, CHUNK_SIZE, CHUNK_SIZE as u32), []);
    assert_eq!(fs.missing(node, 3 * CHUNK_SIZE, 10), []);
    assert_eq!(fs.missing(top, 0, 10), []);
    assert_eq!(fs.missing(7 << 48, 0, 10), []);
    assert_eq!(errno(read(&fs, node, 0, 10)), Some(libc::EIO));
    assert_eq!(read(&fs, node, CHUNK_SIZE, 10).unwrap(), [0; 10]);
    shown.bits.set_ready(1);
    assert_eq!(fs.missing(node, 0, 1 << 20), [range(0)]);
    let expected: Vec<u8> = (CHUNK_SIZE..CHUNK_SIZE + 100).map(pattern).collect();
    assert_eq!(read(&fs, node, 2 * CHUNK_SIZE, 100).unwrap(), expected);
    shown.bits.set_ready(0);
    assert_eq!(fs.missing(node, 0, 1 << 20), []);
    let whole = read(&fs, node, 0, 1 << 20).unwrap();
    assert_eq!(whole.len() as u64, 3 * CHUNK_SIZE - 1);
    assert!(
        whole[..CHUNK_SIZE as usize]
            .iter()
            .zip(0..)
            .all(|(byte, at)| *byte == pattern(at))
    );
    assert!(read(&fs, node, u64::MAX, 10).unwrap().is_empty());
    assert_eq!(errno(read(&fs, top, 0, 10)), Some(libc::EINVAL));
    // Only as much as there is room for.
    let mut sink = Sink {
        bytes: vec![],
        room: 10,
    };
    assert_eq!(
        fs.read(&Context::new(), node, 0, &mut sink, 4096, 0, None, 0)
            .unwrap(),
        10
    );
    // A cache file that was truncated while in use.
    shown.data.set_len(10).unwrap();
    assert_eq!(errno(read(&fs, node, 0, 4096)), Some(libc::EIO));
}

#[test]
fn holes_are_sought() {
    let fs = RootFs::new();
    image(0).show(&fs, 1, "one").unwrap();
    let top = lookup(&fs, ROOT_NODE, "one").unwrap().inode;
    let node = lookup(&fs, top, "file").unwrap().inode;
    let seek = |offset, whence: i32| fs.lseek(&Context::new(), node, 0, offset, whence as u32);
    assert_eq!(seek(5, libc::SEEK_DATA).unwrap(), 5);
    assert_eq!(seek(5, libc::SEEK_HOLE).unwrap(), CHUNK_SIZE);
    assert_eq!(seek(CHUNK_SIZE + 1, libc::SEEK_DATA).unwrap(), 2 * CHUNK_SIZE);
    assert_eq!(seek(2 * CHUNK_SIZE, libc::SEEK_HOLE).unwrap(), 3 * CHUNK_SIZE - 1);
    assert_eq!(
        errno(seek(3 * CHUNK_SIZE - 1, libc::SEEK_DATA)),
        Some(libc::ENXIO)
    );
    assert_eq!(errno(seek(0, libc::SEEK_CUR)), Some(libc::EINVAL));
}

#[test]
fn xattrs_tell_their_size_first() {
    let fs = RootFs::new();
    image(0).show(&fs, 1, "one").unwrap();
    let top = lookup(&fs, ROOT_NODE, "one").unwrap().inode;
    let node = lookup(&fs, top, "file").unwrap().inode;
    let get = |text: &CStr, size| fs.getxattr(&Context::new(), node, text, size);
    assert!(matches!(get(c"user.note", 0), Ok(GetxattrReply::Count(4))));
    assert_eq!(errno(get(c"user.note", 3)), Some(libc::ERANGE));
    assert!(matches!(get(c"user.note", 4), Ok(GetxattrReply::Value(value)) if value == b"text"));
    assert!(matches!(get(c"security.x", 10), Ok(GetxattrReply::Value(value)) if value.is_empty()));
    for absent in [c"user.not", c"user.note2", c"note", c""] {
        assert_eq!(errno(get(absent, 0)), Some(libc::ENODATA));
    }
    let all = b"security.x\0user.note\0";
    let names = |size| fs.listxattr(&Context::new(), node, size);
    assert!(matches!(names(0), Ok(ListxattrReply::Count(count)) if count as usize == all.len()));
    assert_eq!(errno(names(20)), Some(libc::ERANGE));
    assert!(matches!(names(21), Ok(ListxattrReply::Names(names)) if names == all));
    assert_eq!(
        errno(fs.getxattr(&Context::new(), ROOT_NODE, c"user.note", 0)),
        Some(libc::ENODATA)
    );
}

#[test]
fn node_of_removed_image_is_stale_until_it_returns() {
    let fs = RootFs::new();
    let shown = image(0);
    shown.show(&fs, 1, "one").unwrap();
    let top = lookup(&fs, ROOT_NODE, "one").unwrap();
    fs.remove_image(1).unwrap();
    assert_eq!(
        errno(fs.getattr(&Context::new(), top.inode, None)),
        Some(libc::ESTALE)
    );
    assert_eq!(errno(read(&fs, top.inode, 0, 1)), Some(libc::ESTALE));
    assert!(matches!(fs.remove_image(1), Err(ImageError::SlotEmpty(1))));
    // Another image in the slot is recognised as another, and the same one as the same.
    image(1).show(&fs, 1, "one").unwrap();
    assert_ne!(lookup(&fs, ROOT_NODE, "one").unwrap().generation, top.generation);
    fs.remove_image(1).unwrap();
    shown.show(&fs, 1, "one").unwrap();
    assert_eq!(lookup(&fs, ROOT_NODE, "one").unwrap().generation, top.generation);
}

#[test]
fn images_that_cannot_be_shown_are_refused() {
    let fs = RootFs::new();
    let shown = image(0);
    for text in ["", ".", "..", "a/b", "a\0b", &"n".repeat(256)] {
        assert!(matches!(shown.show(&fs, 1, text), Err(ImageError::BadName(_))));
    }
    assert!(matches!(shown.show(&fs, 0, "one"), Err(ImageError::SlotZero)));
    shown.show(&fs, 1, "one").unwrap();
    assert!(matches!(shown.show(&fs, 1, "two"), Err(ImageError::SlotTaken(1))));
    assert!(matches!(shown.show(&fs, 2, "one"), Err(ImageError::NameTaken(_))));
    assert!(matches!(
        fs.add_image(2, "two", &shown.data, vec![]),
        Err(ImageError::Metadata(_))
    ));
    assert!(matches!(
        fs.add_image(2, "two", &tempfile::tempfile().unwrap(), vec![]),
        Err(ImageError::Map(_))
    ));
    let with = |change: &dyn Fn(&mut PlacedBlob)| {
        let mut blob = shown.blob();
        change(&mut blob);
        fs.add_image(2, "two", &shown.metadata, vec![blob])
    };
    assert!(matches!(
        with(&|blob| blob.address = 0),
        Err(ImageError::Blob { .. })
    ));
    assert!(matches!(
        with(&|blob| blob.address += 1),
        Err(ImageError::Blob { .. })
    ));
    assert!(matches!(
        with(&|blob| blob.address = u64::MAX - 4095),
        Err(ImageError::Blob { .. })
    ));
    assert!(matches!(
        with(&|blob| blob.length += PAGE),
        Err(ImageError::Blob { .. })
    ));
    assert!(matches!(
        with(&|blob| blob.digest[0] ^= 1),
        Err(ImageError::Blob { .. })
    ));
    // Without its blob an image shows its tree, and reading its files fails.
    fs.add_image(2, "two", &shown.metadata, vec![]).unwrap();
    let top = lookup(&fs, ROOT_NODE, "two").unwrap().inode;
    let node = lookup(&fs, top, "file").unwrap().inode;
    assert_eq!(errno(read(&fs, node, 0, 10)), Some(libc::EUCLEAN));
}

#[test]
fn a_client_that_needs_open_files_is_refused() {
    let fs = RootFs::new();
    assert_eq!(errno(fs.init(FsOptions::ASYNC_READ)), Some(libc::EPROTO));
    let wanted = fs.init(FsOptions::all()).unwrap();
    assert!(wanted.contains(FsOptions::POSIX_ACL | FsOptions::DO_READDIRPLUS | FsOptions::MAX_PAGES));
    assert!(
        !wanted.intersects(FsOptions::WRITEBACK_CACHE | FsOptions::PERFILE_DAX | FsOptions::MAP_ALIGNMENT)
    );
    assert_eq!(
        errno(fs.open(&Context::new(), 1, libc::O_RDONLY as u32, 0)),
        Some(libc::ENOSYS)
    );
    assert_eq!(
        errno(fs.open(&Context::new(), 1, libc::O_RDWR as u32, 0)),
        Some(libc::EROFS)
    );
    assert_eq!(errno(fs.opendir(&Context::new(), 1, 0)), Some(libc::ENOSYS));
}
