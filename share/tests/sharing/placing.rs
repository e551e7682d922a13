//! Shares that are added and removed while the guest runs, mounted as thawd does and seen as by a guest.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use thaw_pools::process::ProcessRecord;
use thaw_pools::share::{AttachError, Source, attach, detach};

use thaw_protocol::share::Serve;

use crate::guest::{Guest, UNLINK, serve};

fn me() -> OwnedFd {
    ProcessRecord::myself().unwrap().open().unwrap()
}

fn source(kind: &str, source: &Path, options: &[String]) -> Source {
    Source::parse(kind, source.to_str().unwrap(), options).unwrap()
}

fn bind(path: &Path, options: &[&str]) -> Source {
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    source("bind", path, &options)
}

fn add(guest: &Guest, name: &str, source: &Source) -> Result<(), AttachError> {
    attach(guest.share().pidfd(), me().as_fd(), name, source)
}

fn mounts_of(guest: &Guest) -> String {
    fs::read_to_string(format!("/proc/{}/mountinfo", guest.share().record().pid)).unwrap()
}

/// Directories below `place`.
fn directories<const N: usize>(place: &Path, names: [&str; N]) -> [PathBuf; N] {
    names.map(|name| {
        let path = place.join(name);
        fs::create_dir(&path).unwrap();
        path
    })
}

#[test]
fn takeover_has_the_placed_shares() {
    let place = tempfile::tempdir().unwrap();
    let [data, conf] = directories(place.path(), ["data", "conf"]);
    fs::create_dir(data.join("sub")).unwrap();
    let mut guest = Guest::of_slots(8);
    add(&guest, "0", &bind(&data, &[])).unwrap();
    add(&guest, "1", &bind(&conf, &["ro"])).unwrap();
    let (root, _) = guest.lookup(1, "0").unwrap();
    let (sub, _) = guest.lookup(root, "sub").unwrap();
    let before = mounts_of(&guest);
    // The host no longer needs their names.
    fs::rename(&data, place.path().join("renamed")).unwrap();
    guest.replace(
        &Serve {
            slots: 8,
            ..serve(&[])
        },
        None,
    );
    assert_eq!(mounts_of(&guest).lines().count(), before.lines().count());
    assert_eq!(guest.lookup(1, "0").unwrap().0, root);
    guest.create(sub, "made").unwrap();
    assert!(place.path().join("renamed/sub/made").exists());
    let (read_only, _) = guest.lookup(1, "1").unwrap();
    assert_eq!(guest.create(read_only, "x").unwrap_err(), -libc::EROFS);
    // Shares can be added and removed as before.
    add(&guest, "2", &bind(&conf, &[])).unwrap();
    guest.lookup(1, "2").unwrap();
    detach(guest.share().pidfd(), "0").unwrap();
    assert_eq!(guest.lookup(1, "0").unwrap_err(), -libc::ENOENT);
    let (code, said) = guest.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("ERROR") && !said.contains("forbidden"), "{said}");
}

#[test]
fn placed_shares_come_and_go_and_are_nowhere_else() {
    let place = tempfile::tempdir().unwrap();
    let [data, conf] = directories(place.path(), ["data", "conf"]);
    fs::write(data.join("given"), b"x").unwrap();
    fs::write(conf.join("file"), b"one").unwrap();
    symlink(&data, place.path().join("link")).unwrap();
    let before = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut guest = Guest::of_slots(8);
    let bare = mounts_of(&guest);
    assert_eq!(guest.lookup(1, "0").unwrap_err(), -libc::ENOENT);

    // Through a link, as the kernel follows it.
    add(&guest, "0", &bind(&place.path().join("link"), &[])).unwrap();
    add(&guest, "1", &bind(&data, &["ro"])).unwrap();
    add(&guest, "2", &bind(&conf.join("file"), &["rbind"])).unwrap();
    let (node, entry) = guest.lookup(1, "0").unwrap();
    assert_eq!(entry[124..128], 1u32.to_le_bytes(), "a mount of its own");
    guest.create(node, "made").unwrap();
    assert!(data.join("made").exists());
    let (read_only, _) = guest.lookup(1, "1").unwrap();
    guest.lookup(read_only, "made").unwrap();
    assert_eq!(guest.create(read_only, "x").unwrap_err(), -libc::EROFS);
    guest.lookup(1, "2").unwrap();
    for line in mounts_of(&guest).lines().filter(|line| !bare.contains(*line)) {
        assert!(line.contains("nosuid,nodev,noexec"), "{line}");
    }
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), before);

    for name in ["0", "1", "2", "0", "never"] {
        detach(guest.share().pidfd(), name).unwrap();
    }
    for name in ["0", "1", "2"] {
        assert_eq!(guest.lookup(1, name).unwrap_err(), -libc::ENOENT);
    }
    assert_eq!(mounts_of(&guest), bare);
    // The root is still read-only.
    assert_eq!(guest.create(1, "x").unwrap_err(), -libc::EROFS);
    let (code, said) = guest.end();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn overlay_writes_to_its_upper_directory() {
    let place = tempfile::tempdir().unwrap();
    let [low, lower, upper, work] = directories(place.path(), ["low", "low:er", "upper", "work"]);
    for (file, text) in [
        (low.join("a"), "hidden"),
        (low.join("b"), "b"),
        (lower.join("a"), "a"),
    ] {
        fs::write(file, text).unwrap();
    }
    let escaped = lower.display().to_string().replace(':', "\\:");
    let options = [
        "index=off".to_owned(),
        format!("lowerdir={escaped}:{}", low.display()),
        format!("upperdir={}", upper.display()),
        format!("workdir={}", work.display()),
    ];
    let mut guest = Guest::of_slots(8);
    let overlay = source("overlay", Path::new("overlay"), &options);
    if let Err(e) = add(&guest, "root", &overlay) {
        // The temporary directory may be on an overlay, which cannot be the upper layer of another.
        thaw_test_skip::skip(e);
        return;
    }
    let (root, _) = guest.lookup(1, "root").unwrap();
    guest.lookup(root, "b").unwrap();
    guest.create(root, "new").unwrap();
    assert!(upper.join("new").is_file());
    assert_eq!(guest.call(UNLINK, root, b"b\0", 200).0, 0);
    assert_eq!(guest.lookup(root, "b").unwrap_err(), -libc::ENOENT);
    let whiteout = fs::metadata(upper.join("b")).unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    assert!(low.join("b").exists());

    // Lower layers alone cannot be written, however many there are.
    let layers: Vec<String> = (0..120)
        .map(|n| {
            let layer = place.path().join(format!("layer-{n}"));
            fs::create_dir(&layer).unwrap();
            fs::write(layer.join(format!("of-{n}")), b"").unwrap();
            layer.display().to_string()
        })
        .collect();
    let many = source(
        "overlay",
        Path::new("overlay"),
        &[format!("lowerdir={}", layers.join(":"))],
    );
    add(&guest, "many", &many).unwrap();
    let (root, _) = guest.lookup(1, "many").unwrap();
    guest.lookup(root, "of-0").unwrap();
    guest.lookup(root, "of-119").unwrap();
    assert_eq!(guest.create(root, "x").unwrap_err(), -libc::EROFS);
    assert_eq!(guest.end().0, Some(0));
}

#[test]
fn unshareable_device_is_refused_by_name() {
    let place = tempfile::tempdir().unwrap();
    let [data] = directories(place.path(), ["data"]);
    let socket = place.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let guest = Guest::of_slots(3);
    let bare = mounts_of(&guest);
    let missing = place.path().join("missing");
    let error = add(&guest, "0", &bind(&missing, &[])).unwrap_err().to_string();
    assert!(
        error.contains(missing.to_str().unwrap()) && error.contains("No such file"),
        "{error}"
    );
    let error = add(&guest, "0", &bind(&socket, &[])).unwrap_err().to_string();
    assert!(error.contains("it is a socket"), "{error}");
    let layers = [format!("lowerdir={}:{}", data.display(), missing.display())];
    let overlay = source("overlay", Path::new("overlay"), &layers);
    let error = add(&guest, "0", &overlay).unwrap_err().to_string();
    assert!(error.contains(missing.to_str().unwrap()), "{error}");
    for bad in ["..", "a/b", ""] {
        let refused = add(&guest, bad, &bind(&data, &[]));
        assert!(matches!(refused, Err(AttachError::Name(_))), "{bad}");
    }
    assert_eq!(mounts_of(&guest), bare);
    add(&guest, "0", &bind(&data, &[])).unwrap();
    assert!(matches!(
        add(&guest, "0", &bind(&data, &[])),
        Err(AttachError::Name(_))
    ));
    // The number is limited, whoever asks.
    let placed = (1..100).take_while(|n| match add(&guest, &n.to_string(), &bind(&data, &[])) {
        Ok(()) => true,
        Err(AttachError::Full) => false,
        Err(e) => panic!("{e}"),
    });
    let placed = placed.count();
    assert!((2..40).contains(&placed), "{placed}");
    detach(guest.share().pidfd(), "0").unwrap();
    add(&guest, "again", &bind(&data, &[])).unwrap();
    let pidfd = guest.share().pidfd().try_clone_to_owned().unwrap();
    assert_eq!(guest.end().0, Some(0));
    let late = place_late(&pidfd, &data);
    assert!(matches!(late, Err(AttachError::Ended)), "{late:?}");
    detach(pidfd.as_fd(), "0").unwrap();
}

fn place_late(share: &OwnedFd, path: &Path) -> Result<(), AttachError> {
    attach(share.as_fd(), me().as_fd(), "late", &bind(path, &[]))
}

/// A process with its own mount namespace whose mounts propagate. It mounts on request.
struct Host {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Host {
    fn new(data: &Path) -> Host {
        let script = format!(
            "mount --make-rprivate / && mount --bind {d} {d} && mount --make-shared {d} && echo ready && read go \
             && mount -t tmpfs none {d}/sub && echo x > {d}/sub/late && echo mounted && read end",
            d = data.display()
        );
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut host = Host { child, lines };
        host.hear("ready");
        host
    }

    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn mount(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        self.hear("mounted");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn share_uses_callers_paths_and_its_later_mounts_if_asked() {
    let directory = tempfile::tempdir().unwrap();
    let [data] = directories(directory.path(), ["data"]);
    fs::create_dir(data.join("sub")).unwrap();
    let mut host = Host::new(&data);
    let whose = ProcessRecord::of(host.child.id() as i32).unwrap().open().unwrap();
    let mut guest = Guest::of_slots(4);
    for (name, options) in [("alone", &["rprivate"]), ("follows", &["rslave"])] {
        attach(guest.share().pidfd(), whose.as_fd(), name, &bind(&data, options)).unwrap();
    }
    host.mount();
    let mut late = |name: &str| {
        let (node, _) = guest.lookup(1, name).unwrap();
        let (sub, _) = guest.lookup(node, "sub").unwrap();
        guest.lookup(sub, "late").map(drop)
    };
    assert_eq!(late("follows"), Ok(()));
    assert_eq!(late("alone"), Err(-libc::ENOENT));
    // Both apply to what is mounted now: "ro" affects only the mount, "rro" everything below it too.
    for (name, below) in [("ro", Ok(())), ("rro", Err(-libc::EROFS))] {
        attach(guest.share().pidfd(), whose.as_fd(), name, &bind(&data, &[name])).unwrap();
        let (node, _) = guest.lookup(1, name).unwrap();
        assert_eq!(guest.create(node, "x").map(drop), Err(-libc::EROFS), "{name}");
        let (sub, _) = guest.lookup(node, "sub").unwrap();
        guest.lookup(sub, "late").unwrap();
        assert_eq!(guest.create(sub, name).map(drop), below, "{name}");
    }
    assert_eq!(guest.end().0, Some(0));
}
