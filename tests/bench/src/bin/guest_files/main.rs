//! PID 1 of the guest that measures file systems: mounts each, walks and reads the tree on it, and says on the console
//! how long that took. Then it powers off.
//!
//! The same program does the same to every file system, with nothing between it and them: no container, no overlay.
//! "Cold" is after `drop_caches`: the guest knows nothing, while the host has everything in its page cache.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::mount::{MountFlags, UnmountFlags};
use thaw_bench::image::guest::{DISK_EROFS, DISK_EXT4, LARGE, RESULT, ROUNDS_WORD, SLOT, Subject, TAG};

/// Reads of each kind of random read.
const SMALL_READS: u64 = 400;
const LARGE_READS: u64 = 100;
/// Warm sequential reads of a round. One is short, and other work of the processor would decide it.
const WARM_READS: usize = 5;

const MOUNTED: &str = "/tmp/mounted";
const TREE: &str = "/tmp/tree";

fn main() {
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("guest-files: {panic}");
        power_off();
    }));
    prepare();
    let rounds = rounds();
    for round in 0..rounds {
        for subject in Subject::ALL {
            let Some(tree) = mount(subject) else {
                println!("{RESULT}{}|absent|0", subject.name());
                continue;
            };
            measure(subject, &tree, round == 0);
            rustix::mount::unmount(TREE, UnmountFlags::empty()).unwrap();
            rustix::mount::unmount(MOUNTED, UnmountFlags::empty()).unwrap();
        }
    }
    power_off();
}

fn prepare() {
    let nodev = |what: &str, at: &str| {
        rustix::mount::mount(what, at, what, MountFlags::empty(), None)
            .unwrap_or_else(|e| panic!("{at}: {e}"));
    };
    // The kernel may have mounted it already.
    let _ = rustix::mount::mount("devtmpfs", "/dev", "devtmpfs", MountFlags::empty(), None);
    nodev("proc", "/proc");
    nodev("tmpfs", "/tmp");
    fs::create_dir(MOUNTED).unwrap();
    fs::create_dir(TREE).unwrap();
}

/// From the kernel's command line.
fn rounds() -> usize {
    let words = fs::read_to_string("/proc/cmdline").unwrap();
    let word = words.split_whitespace().find_map(|w| w.strip_prefix(ROUNDS_WORD));
    word.and_then(|w| w.parse().ok()).unwrap_or(1)
}

/// Mounts it; where its tree is. None where this guest cannot.
fn mount(subject: Subject) -> Option<PathBuf> {
    let (source, kind, options) = match subject {
        Subject::VirtioFs => (TAG, "virtiofs", Some(c"dax=never")),
        Subject::VirtioFsDax => (TAG, "virtiofs", Some(c"dax=inode")),
        Subject::Erofs => (DISK_EROFS, "erofs", None),
        Subject::Ext4 => (DISK_EXT4, "ext4", Some(c"noload")),
    };
    let mounted = rustix::mount::mount(source, MOUNTED, kind, MountFlags::RDONLY, options);
    if let Err(e) = mounted {
        println!("guest-files: {} cannot be mounted: {e}", subject.name());
        return None;
    }
    let top = Path::new(MOUNTED);
    let tree = match subject {
        Subject::VirtioFs | Subject::VirtioFsDax => top.join(SLOT),
        Subject::Erofs | Subject::Ext4 => top.into(),
    };
    // As a container's overlay does: paths start at the image, not above it, where slots come and go and nothing is cached.
    rustix::mount::mount_bind(&tree, TREE).unwrap();
    Some(TREE.into())
}

fn measure(subject: Subject, tree: &Path, first: bool) {
    let large = tree.join(LARGE);
    let say = |what: &str, time: f64| println!("{RESULT}{}|{what}|{time:.3}", subject.name());
    let timed = |what: &str, action: &dyn Fn() -> u64| {
        let start = Instant::now();
        let done = action();
        say(what, start.elapsed().as_secs_f64() * 1e3);
        done
    };
    let found = |what: &str| timed(what, &|| walk(tree, &mut |_, _| ()));
    drop_caches();
    let entries = found("find, cold");
    assert_eq!(found("find, warm"), entries);
    drop_caches();
    let bytes = timed("tar, cold", &|| tar(tree));
    assert_eq!(timed("tar, warm", &|| tar(tree)), bytes);
    for (what, size, count) in [
        ("4 KiB", 4 << 10, SMALL_READS),
        ("128 KiB", 128 << 10, LARGE_READS),
    ] {
        drop_caches();
        let length = timed(&format!("sequential {what}, cold"), &|| sequential(&large, size));
        for _ in 0..WARM_READS {
            timed(&format!("sequential {what}, warm"), &|| sequential(&large, size));
        }
        drop_caches();
        timed(&format!("random {what}, cold"), &|| {
            random(&large, size, length, count)
        });
        sequential(&large, 128 << 10);
        timed(&format!("random {what}, warm"), &|| {
            random(&large, size, length, count)
        });
    }
    if first {
        println!(
            "guest-files: {}: {entries} entries, {bytes} bytes",
            subject.name()
        );
    }
}

fn drop_caches() {
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// Looks at every entry below `top`, as `find` with a test on size does; how many there are.
fn walk(top: &Path, visit: &mut dyn FnMut(&Path, &fs::Metadata)) -> u64 {
    let mut count = 0;
    for entry in fs::read_dir(top).unwrap_or_else(|e| panic!("{}: {e}", top.display())) {
        let entry = entry.unwrap();
        let path = entry.path();
        let status = fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        count += 1;
        visit(&path, &status);
        // Not its own: only the file system's maker puts it there.
        if status.is_dir() && entry.file_name() != "lost+found" {
            count += walk(&path, visit);
        }
        if entry.file_name() == "lost+found" {
            count -= 1;
        }
    }
    count
}

/// Reads every file and every link below `top`, as `tar` does, the large one left out; how many bytes.
fn tar(top: &Path) -> u64 {
    let mut bytes = 0;
    let mut buffer = vec![0; 128 << 10];
    walk(top, &mut |path, status| {
        if status.is_symlink() {
            fs::read_link(path).unwrap();
        }
        if status.is_file() && !path.ends_with(LARGE) {
            let mut file = File::open(path).unwrap();
            loop {
                match file.read(&mut buffer).unwrap() {
                    0 => break,
                    length => bytes += length as u64,
                }
            }
        }
    });
    bytes
}

fn sequential(path: &Path, size: usize) -> u64 {
    let mut file = File::open(path).unwrap();
    let mut buffer = vec![0; size];
    let mut bytes = 0;
    loop {
        match file.read(&mut buffer).unwrap() {
            0 => return bytes,
            length => bytes += length as u64,
        }
    }
}

fn random(path: &Path, size: usize, length: u64, count: u64) -> u64 {
    let file = File::open(path).unwrap();
    let mut buffer = vec![0; size];
    let mut state = 88_172_645_463_325_252u64;
    for _ in 0..count {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.read_exact_at(&mut buffer, state % (length / size as u64) * size as u64)
            .unwrap();
    }
    count
}

fn power_off() -> ! {
    let _ = std::io::stdout().flush();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    loop {
        std::thread::park();
    }
}
