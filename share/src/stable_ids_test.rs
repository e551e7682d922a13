//! A process that dies and one that takes over, over a directory of the test.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use virtiofsd::filesystem::{Extensions, FsOptions};
use virtiofsd::fuse::InHeader;
use virtiofsd::passthrough::PassthroughFs;

use super::*;

type Served = StableIds<PassthroughFs>;

struct Host {
    directory: tempfile::TempDir,
    ledger: File,
}

fn ctx() -> Context {
    Context::from(InHeader::default())
}

impl Host {
    /// Files `a`, `d/b` and `d/c/e`.
    fn new() -> Host {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("d/c")).unwrap();
        for name in ["a", "d/b", "d/c/e"] {
            fs::write(directory.path().join(name), name).unwrap();
        }
        Host {
            directory,
            ledger: tempfile::tempfile().unwrap(),
        }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// The next process.
    fn process(&self) -> Served {
        let served = serve(self.directory.path(), Some(self.ledger.try_clone().unwrap()));
        served.init(FsOptions::empty()).unwrap();
        served
    }
}

fn serve(root: &Path, ledger: Option<File>) -> Served {
    let descriptors = File::open("/proc/self/fd").unwrap();
    let inner = crate::file_system(root.to_str().unwrap(), descriptors, 1024).unwrap();
    StableIds::new(inner, ledger).unwrap()
}

fn find(served: &Served, parent: u64, name: &str) -> io::Result<u64> {
    let name = CString::new(name).unwrap();
    served.lookup(ctx(), parent, &name).map(|entry| entry.inode)
}

fn ino(served: &Served, node: u64) -> io::Result<u64> {
    served.getattr(ctx(), node, None).map(|(attr, _)| attr.ino)
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

fn host_ino(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).unwrap().ino()
}

#[test]
fn node_ids_survive_a_takeover() {
    let host = Host::new();
    let first = host.process();
    let (a, d) = (find(&first, 1, "a").unwrap(), find(&first, 1, "d").unwrap());
    let c = find(&first, d, "c").unwrap();
    let e = find(&first, c, "e").unwrap();
    assert_eq!(find(&first, 1, "a").unwrap(), a, "known once");
    drop(first);
    let second = host.process();
    for (node, name) in [(a, "a"), (d, "d"), (c, "d/c"), (e, "d/c/e")] {
        assert_eq!(ino(&second, node).unwrap(), host_ino(&host.path(name)), "{name}");
    }
    assert_eq!(
        find(&second, 1, "a").unwrap(),
        a,
        "the guest sees no other id at a name"
    );
    assert_eq!(find(&second, c, "e").unwrap(), e);
    let new = find(&second, d, "b").unwrap();
    drop(second);
    let third = host.process();
    assert_eq!(ino(&third, new).unwrap(), host_ino(&host.path("d/b")));
    assert_eq!(ino(&third, e).unwrap(), host_ino(&host.path("d/c/e")));
}

#[test]
fn node_of_a_removed_or_replaced_file_is_stale() {
    let host = Host::new();
    let first = host.process();
    let (a, d) = (find(&first, 1, "a").unwrap(), find(&first, 1, "d").unwrap());
    let b = find(&first, d, "b").unwrap();
    drop(first);
    // Another file in its place has another inode number, because the old one is still in use.
    fs::hard_link(host.path("a"), host.path("kept")).unwrap();
    fs::remove_file(host.path("a")).unwrap();
    fs::write(host.path("a"), "other").unwrap();
    fs::remove_file(host.path("d/b")).unwrap();
    let second = host.process();
    assert_eq!(errno(ino(&second, a)), Some(libc::ESTALE));
    assert_eq!(errno(ino(&second, b)), Some(libc::ESTALE));
    assert_eq!(errno(find(&second, a, "x")), Some(libc::ESTALE));
    let now = find(&second, 1, "a").unwrap();
    assert!(now != a && now != b && now != d);
    // With a replaced directory, everything below it is stale.
    let e = find(&second, find(&second, d, "c").unwrap(), "e").unwrap();
    drop(second);
    fs::rename(host.path("d"), host.path("elsewhere")).unwrap();
    let third = host.process();
    assert_eq!(errno(ino(&third, e)), Some(libc::ESTALE));
    assert_eq!(errno(ino(&third, d)), Some(libc::ESTALE));
    assert!(ino(&third, now).is_ok());
}

#[test]
fn created_and_renamed_files_are_recovered() {
    let host = Host::new();
    let first = host.process();
    let d = find(&first, 1, "d").unwrap();
    let a = find(&first, 1, "a").unwrap();
    let new = first
        .mkdir(ctx(), d, c"new", 0o755, 0, Extensions::default())
        .unwrap()
        .inode;
    first.rename(ctx(), 1, c"a", new, c"renamed", 0).unwrap();
    first.rename(ctx(), 1, c"d", 1, c"dd", 0).unwrap();
    drop(first);
    let second = host.process();
    assert_eq!(ino(&second, a).unwrap(), host_ino(&host.path("dd/new/renamed")));
    assert_eq!(find(&second, new, "renamed").unwrap(), a);
    let b = find(&second, d, "b").unwrap();
    let exchange = libc::RENAME_EXCHANGE;
    second.rename(ctx(), d, c"b", new, c"renamed", exchange).unwrap();
    drop(second);
    let third = host.process();
    assert_eq!(ino(&third, b).unwrap(), host_ino(&host.path("dd/new/renamed")));
    assert_eq!(ino(&third, a).unwrap(), host_ino(&host.path("dd/b")));
}

#[test]
fn handles_of_a_process_that_died_answer_eio() {
    let host = Host::new();
    let first = host.process();
    let (a, d) = (find(&first, 1, "a").unwrap(), find(&first, 1, "d").unwrap());
    let handle = first
        .open(ctx(), a, false, libc::O_RDWR as u32)
        .unwrap()
        .0
        .unwrap();
    let directory = first.opendir(ctx(), d, 0).unwrap().0.unwrap();
    first.fsync(ctx(), a, false, handle).unwrap();
    drop(first);
    let second = host.process();
    // The next process uses the same handle numbers for its own.
    let own = second
        .open(ctx(), a, false, libc::O_RDWR as u32)
        .unwrap()
        .0
        .unwrap();
    assert_ne!(own, handle);
    second.fsync(ctx(), a, false, own).unwrap();
    assert_eq!(errno(second.fsync(ctx(), a, false, handle)), Some(libc::EIO));
    assert_eq!(errno(second.flush(ctx(), a, handle, 0)), Some(libc::EIO));
    assert_eq!(
        errno(second.fallocate(ctx(), a, handle, 0, 0, 10)),
        Some(libc::EIO)
    );
    assert_eq!(errno(second.lseek(ctx(), a, handle, 0, 0)), Some(libc::EIO));
    assert_eq!(
        errno(second.readdir(ctx(), d, directory, 4096, 0).map(drop)),
        Some(libc::EIO)
    );
    let copied = second.copyfilerange(ctx(), a, own, 0, a, handle, 0, 1, 0);
    assert_eq!(errno(copied), Some(libc::EIO));
    // Closing them succeeds, and they still have attributes.
    second.release(ctx(), a, 0, handle, false, false, None).unwrap();
    second.releasedir(ctx(), d, 0, directory).unwrap();
    assert!(second.getattr(ctx(), a, Some(handle)).is_ok());
    second.release(ctx(), a, 0, own, false, false, None).unwrap();
}

#[test]
fn forgotten_nodes_are_not_recovered() {
    let host = Host::new();
    let first = host.process();
    let a = find(&first, 1, "a").unwrap();
    find(&first, 1, "a").unwrap();
    let d = find(&first, 1, "d").unwrap();
    first.forget(ctx(), a, 1);
    assert!(ino(&first, a).is_ok(), "it was told twice");
    first.batch_forget(ctx(), vec![(a, 1)]);
    assert_eq!(errno(ino(&first, a)), Some(libc::ESTALE));
    drop(first);
    let second = host.process();
    assert_eq!(errno(ino(&second, a)), Some(libc::ESTALE));
    // The guest also counts lookups in the first process, and forgets all at once.
    find(&second, 1, "d").unwrap();
    second.forget(ctx(), d, 7);
    assert_eq!(errno(ino(&second, d)), Some(libc::ESTALE));
    let again = find(&second, 1, "d").unwrap();
    assert!(again != d && ino(&second, again).is_ok());
}

#[test]
fn guest_init_clears_its_nodes() {
    let host = Host::new();
    let served = host.process();
    let a = find(&served, 1, "a").unwrap();
    served.init(FsOptions::empty()).unwrap();
    assert_eq!(errno(ino(&served, a)), Some(libc::ESTALE));
    let again = find(&served, 1, "a").unwrap();
    assert_ne!(again, a, "an id never means anything else");
    drop(served);
    let next = host.process();
    assert_eq!(errno(ino(&next, a)), Some(libc::ESTALE));
    assert!(ino(&next, again).is_ok());
}

#[test]
fn stable_ids_work_without_a_ledger() {
    let host = Host::new();
    let served = serve(host.directory.path(), None);
    served.init(FsOptions::empty()).unwrap();
    let d = find(&served, 1, "d").unwrap();
    let b = find(&served, d, "b").unwrap();
    assert_eq!(ino(&served, b).unwrap(), host_ino(&host.path("d/b")));
    assert_eq!(errno(find(&served, d, "none")), Some(libc::ENOENT));
}

#[test]
fn ledger_with_circular_parents_is_read() {
    let host = Host::new();
    {
        let (mut ledger, _) = Ledger::open(host.ledger.try_clone().unwrap()).unwrap();
        let place = |parent, name: &str| Place::new(parent, &CString::new(name).unwrap(), 1, libc::S_IFDIR);
        ledger.put(10, &place(11, "x"), None);
        ledger.put(11, &place(10, "y"), None);
        ledger.put(12, &place(12, "z"), None);
        ledger.put(13, &place(1, "d"), None);
    }
    let served = host.process();
    for node in 10..14 {
        assert_eq!(errno(ino(&served, node)), Some(libc::ESTALE));
    }
    assert!(find(&served, 1, "d").is_ok());
}
