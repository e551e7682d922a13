use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use virtiofsd::filesystem::{Context, FileSystem, FsOptions, ROOT_ID};
use virtiofsd::fuse::InHeader;
use virtiofsd::passthrough::PassthroughFs;

use super::*;
use crate::stable_ids::StableIds;

const READ_WRITE: u32 = libc::O_RDWR as u32;

fn ctx() -> Context {
    Context::from(InHeader::default())
}

fn serve(root: &Path) -> StableIds<PassthroughFs> {
    let descriptors = File::open("/proc/self/fd").unwrap();
    let inner = crate::file_system(root.to_str().unwrap(), descriptors, 1024).unwrap();
    let served = StableIds::new(inner, None).unwrap();
    served.init(FsOptions::empty()).unwrap();
    served
}

/// What goes to the VMM when the guest opens a file of the root.
fn opened(served: &StableIds<PassthroughFs>, name: &std::ffi::CStr, flags: u32) -> Option<File> {
    let node = served.lookup(ctx(), ROOT_ID, name).unwrap().inode;
    served.open(ctx(), node, false, flags).unwrap();
    let file = take();
    assert!(take().is_none(), "it goes once");
    file
}

#[test]
fn regular_files_go_to_the_vmm() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, "content").unwrap();
    let served = serve(directory.path());
    let file = opened(&served, c"file", READ_WRITE).unwrap();
    assert_eq!(file.metadata().unwrap().ino(), fs::metadata(&path).unwrap().ino());
    let (entry, handle, _) = served
        .create(
            ctx(),
            ROOT_ID,
            c"new",
            0o600,
            false,
            READ_WRITE,
            0,
            Default::default(),
        )
        .unwrap();
    assert!(take().unwrap().metadata().unwrap().is_file());
    assert!(entry.inode > ROOT_ID && handle.is_some());
}

#[test]
fn files_whose_calls_may_take_long_stay() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "").unwrap();
    let served = serve(directory.path());
    for flag in [libc::O_SYNC, libc::O_DSYNC, libc::O_DIRECT] {
        assert!(opened(&served, c"file", READ_WRITE | flag as u32).is_none());
    }
    served.opendir(ctx(), ROOT_ID, 0).unwrap();
    assert!(take().is_none(), "a directory");
    let not_local = serve(Path::new("/proc"));
    assert!(opened(&not_local, c"version", 0).is_none());
}
