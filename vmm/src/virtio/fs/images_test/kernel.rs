//! The device under this host's own FUSE client: the kernel's requests from `/dev/fuse` go through the rings, and a mounted image is
//! compared with the same image mounted as EROFS.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use thaw_images::layer::{FileSink, LayerLimits, unpack};
use thaw_images::merge::flatten;

use super::*;
use thaw_imagefs::erofs;

/// A source tree with every kind of file that matters, made by a shell and packed by tar.
const SOURCE: &str = "
    umask 022
    mkdir -p a/b/c empty many; echo hello > a/file; ln a/file a/b/hard; ln -s ../file a/b/soft
    mknod a/null c 1 3; mkfifo a/fifo; chmod 4755 a/file; chmod 1777 empty
    truncate -s 3000000 a/sparse; printf x | dd of=a/sparse bs=1 seek=1500000 conv=notrunc status=none
    touch -d '2001-02-03 04:05:06.123456789' a/b
    seq 1 300000 > a/numbers; for i in $(seq 1 2000); do : > many/a-rather-long-name-$i; done
    cp /bin/true a/true; echo secret > a/acl; chmod 640 a/acl";

/// `user:1000:r--` on a file of mode 0640 (`posix_acl_xattr`, version 2).
const ACL: &[u8] = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\xe8\x03\0\0\x04\0\x04\0\xff\xff\xff\xff\x10\0\x04\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";

struct Made {
    spec: ImageSpec,
    files: Vec<File>,
    /// The same image with its data in one file.
    whole: tempfile::NamedTempFile,
}

fn make() -> Made {
    let source = tempfile::tempdir().unwrap();
    assert!(
        Command::new("sh")
            .args(["-ec", SOURCE])
            .current_dir(source.path())
            .status()
            .unwrap()
            .success()
    );
    let tar = Command::new("tar")
        .arg("-C")
        .arg(source.path())
        .args(["--format=pax", "--sparse", "-cf", "-", "."])
        .output()
        .unwrap();
    assert!(tar.status.success());
    let mut sink = FileSink::new(tempfile::tempfile().unwrap());
    let layer = unpack(&tar.stdout[..], &mut sink, &LayerLimits::default()).unwrap();
    let data = sink.finish().unwrap();
    let length = layer.data_length;
    let mut tree = flatten(&[layer]).unwrap();
    let acl = tree.lookup(b"a/acl").unwrap();
    let xattr = |name: &str, value: &[u8]| thaw_imagefs::tree::Xattr {
        name: name.into(),
        value: value.into(),
    };
    tree.inodes[acl as usize].attributes.xattrs = vec![
        xattr("security.note", b"kept"),
        xattr("system.posix_acl_access", ACL),
        xattr("user.note", b"seen"),
    ];

    let mut metadata = tempfile::tempfile().unwrap();
    let summary = erofs::write(&tree, &[length], &mut metadata).unwrap();
    let whole = tempfile::NamedTempFile::new().unwrap();
    let mut reader = data.try_clone().unwrap();
    std::io::Seek::rewind(&mut reader).unwrap();
    erofs::write_with_data(&tree, &mut [(length, &mut reader)], whole.as_file()).unwrap();

    let (ready, _) = sealed_ready_file(length, true);
    let blob = BlobRange {
        address: summary.blobs[0].address,
        length,
        digest: DIGEST,
    };
    let spec = ImageSpec {
        name: "image".into(),
        blobs: vec![blob],
    };
    Made {
        spec,
        files: vec![metadata, data, ready],
        whole,
    }
}

impl Made {
    fn fds(&self) -> Vec<OwnedFd> {
        self.files
            .iter()
            .map(|file| file.try_clone().unwrap().into())
            .collect()
    }
}

type Counts = Arc<Mutex<BTreeMap<u32, u64>>>;

/// Carries messages from the kernel to the device and back until the file system is unmounted.
fn bridge(mut fuse: File, rig: Arc<Mutex<Rig<Fs<Images>>>>, counts: Counts) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut message = vec![0; (1 << 20) + 8192];
        let (request, header, body) = {
            let mut rig = rig.lock().unwrap();
            let request = rig.readable(&vec![0; 128 << 10]);
            (request, rig.writable(16), rig.writable(1 << 20))
        };
        loop {
            let length = match fuse.read(&mut message) {
                Ok(length) => length,
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
                Err(error) => panic!("/dev/fuse: {error}"),
            };
            let opcode = u32::from_le_bytes(message[4..8].try_into().unwrap());
            *counts.lock().unwrap().entry(opcode).or_default() += 1;
            let mut rig = rig.lock().unwrap();
            rig.rewrite(request, &message[..length]);
            let request = Buf {
                length: length as u32,
                ..request
            };
            rig.submit(REQUESTS, &[request, header, body]);
            rig.notify(REQUESTS);
            let used = loop {
                match rig.used(REQUESTS).first() {
                    Some(used) => break used.1 as usize,
                    None => rig.wait(),
                }
            };
            if used > 0 {
                let reply = [
                    rig.bytes(header),
                    rig.bytes(Buf {
                        length: used as u32 - 16,
                        ..body
                    }),
                ]
                .concat();
                // ENOENT: the requesting process is gone.
                let _ = fuse.write(&reply);
            }
        }
    })
}

struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        unmount(self.0, UnmountFlags::DETACH).unwrap();
    }
}

fn listing(directory: &Path) -> String {
    let script = "find . -printf '%P %y %m %U %G %n %s %T@ %l\\n' | LC_ALL=C sort; \
        find . -type f -exec sha256sum {} + | LC_ALL=C sort -k 2; stat -c '%n %t:%T' a/null";
    let output = Command::new("sh")
        .args(["-ec", script])
        .current_dir(directory)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn xattr(path: &Path, name: &str) -> Vec<u8> {
    let mut value = vec![0; 1024];
    let length = rustix::fs::getxattr(path, name, &mut value[..]).unwrap();
    value.truncate(length);
    value
}

fn may_read_as(uid: u32, path: &Path) -> bool {
    let uid = uid.to_string();
    let arguments = ["--reuid", &uid, "--regid", &uid, "--clear-groups", "cat"];
    Command::new("setpriv")
        .args(arguments)
        .arg(path)
        .output()
        .unwrap()
        .status
        .success()
}

/// Checks that the image has the same files as the same image mounted as EROFS.
fn compare_with_kernel(image: &Path, made: &Made) {
    let erofs = tempfile::tempdir().unwrap();
    let arguments = ["-t", "erofs", "-o", "loop,ro"];
    let loop_mount = Command::new("mount")
        .args(arguments)
        .arg(made.whole.path())
        .arg(erofs.path())
        .output();
    assert!(loop_mount.unwrap().status.success());
    {
        let _mounted = Mounted(erofs.path());
        let (ours, kernels) = (listing(image), listing(erofs.path()));
        assert!(ours.lines().count() > 4000);
        for (ours, kernels) in ours.lines().zip(kernels.lines()) {
            assert_eq!(ours, kernels);
        }
        assert_eq!(ours.len(), kernels.len());
    }
}

/// Checks that requests made up to `before` were hardly repeated up to `after`, and that nothing was opened by message.
fn check_messages(before: &BTreeMap<u32, u64>, after: &BTreeMap<u32, u64>) {
    let asked =
        |counts: &BTreeMap<u32, u64>, opcode: Opcode| counts.get(&(opcode as u32)).copied().unwrap_or(0);
    for opcode in [Opcode::Read, Opcode::Readlink, Opcode::Opendir, Opcode::Open] {
        let (first, second) = (
            asked(before, opcode),
            asked(after, opcode) - asked(before, opcode),
        );
        assert!(second <= first / 4, "{opcode:?}: {first}, then {second}");
    }
    assert!(asked(after, Opcode::Open) <= 1 && asked(after, Opcode::Opendir) <= 1);
    assert_eq!(
        asked(after, Opcode::Release) + asked(after, Opcode::Releasedir),
        0
    );
    assert!(asked(after, Opcode::Readdirplus) > 0);
}

#[test]
fn the_kernel_sees_through_the_device_what_it_sees_in_the_image() {
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let Ok(fuse) = fuse.inspect_err(|error| thaw_test_skip::skip(format!("/dev/fuse: {error}"))) else {
        return;
    };
    if !rustix::process::geteuid().is_root() {
        thaw_test_skip::skip("mounting needs root");
        return;
    }
    let made = make();
    let rig = Arc::new(Mutex::new(Rig::new(root(), 0)));
    let counts = Counts::default();
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        fuse.as_raw_fd()
    );
    let options = std::ffi::CString::new(options).unwrap();
    let flags = MountFlags::RDONLY | MountFlags::NODEV;
    mount("thaw", place.path(), "fuse", flags, options.as_c_str()).unwrap();
    let carrier = bridge(fuse, rig.clone(), counts.clone());
    {
        let _mounted = Mounted(place.path());
        let image = place.path().join("image");
        // Nothing about the root is cached: neither that a name is absent nor a listing.
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        assert!(!image.exists());
        rig.lock()
            .unwrap()
            .device
            .add_image(1, made.spec.clone(), made.fds())
            .unwrap();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
        assert!(image.is_dir());

        compare_with_kernel(&image, &made);
        let acl = image.join("a/acl");
        assert_eq!(xattr(&acl, "system.posix_acl_access"), ACL);
        assert_eq!(
            (xattr(&acl, "user.note"), xattr(&acl, "security.note")),
            (b"seen".to_vec(), b"kept".to_vec())
        );
        // The kernel applies the ACL: its user may read, another may not.
        assert!(may_read_as(1000, &acl));
        assert!(!may_read_as(1001, &acl));
        assert!(Command::new(image.join("a/true")).status().unwrap().success());
        assert_eq!(rustix::fs::statvfs(&image).unwrap().f_namemax, 255);

        // Data seen once is not requested again, except pages that a busy host reclaimed. Nothing is opened by message.
        let before = counts.lock().unwrap().clone();
        listing(&image);
        let after = counts.lock().unwrap().clone();
        check_messages(&before, &after);

        rig.lock().unwrap().device.remove_image(1).unwrap();
        assert!(!image.exists());
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }
    carrier.join().unwrap();
}
