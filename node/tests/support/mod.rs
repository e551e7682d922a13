//! Support for tests of the whole binaries: a directory tree for each test, an image, a kernel of a few instructions, and counts of
//! everything that a sandbox may leave.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sha2::{Digest, Sha256};

/// `hlt` for ever.
pub const HALT: &[u8] = &[0xF4, 0xEB, 0xFD];
/// `ud2`, without an IDT: a triple fault.
pub const CRASH: &[u8] = &[0x0F, 0x0B];

/// A directory with its own run and data directories, an image and a kernel.
pub struct Place {
    pub root: tempfile::TempDir,
}

/// The leftovers of sandboxes, by kind.
#[derive(Debug, PartialEq, Eq)]
pub struct Leftovers {
    pub processes: Vec<String>,
    pub sandboxes: Vec<String>,
    pub cgroups: Vec<String>,
    pub mounts: usize,
    pub disks: Vec<String>,
}

impl Place {
    /// `None` if the tests cannot run here; the reason has been reported.
    pub fn new(code: &[u8]) -> Option<Place> {
        if !Path::new("/dev/kvm").exists() {
            thaw_test_skip::skip("no /dev/kvm");
            return None;
        }
        if !vmm().exists() {
            thaw_test_skip::skip(format!("{} is not built", vmm().display()));
            return None;
        }
        if !Path::new("/usr/sbin/mkfs.ext4").exists() && !Path::new("/sbin/mkfs.ext4").exists() {
            thaw_test_skip::skip("mkfs.ext4 is not installed");
            return None;
        }
        let place = Place {
            root: tempfile::tempdir().unwrap(),
        };
        fs::write(place.path("kernel"), pvh_kernel(code)).unwrap();
        fs::write(place.path("guest.erofs"), vec![0u8; 4096]).unwrap();
        fs::write(place.path("thawd.toml"), thaw_tiny_node::without_limits()).unwrap();
        make_image(&place.path("image"), "hello", b"hello\n");
        Some(place)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A command for `thaw` or `thawd` in this place.
    pub fn command(&self, binary: &str) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_thaw")).with_file_name(binary));
        command
            .env("THAW_DATA", self.path("data"))
            .env("THAW_RUN", self.path("run"))
            .env("THAW_KERNEL", self.path("kernel"))
            .env("THAW_GUEST_IMAGE", self.path("guest.erofs"))
            .env("THAW_VMM", vmm())
            .env("THAW_CONFIG", self.path("thawd.toml"))
            .env_remove("THAW_LOG");
        command
    }

    /// A `thaw run` of the image.
    pub fn run(&self) -> Command {
        let mut command = self.command("thaw");
        command.args(["run", "--cold", "--memory", "64m", &self.image()]);
        command
    }

    /// A thaw-vmm that counts its starts ([`Place::starts`]). The first start runs the shell command `first` before it becomes a VMM.
    pub fn counted_vmm(&self, first: &str) -> PathBuf {
        let (program, starts) = (self.path("counted-vmm"), self.path("starts"));
        let script = format!(
            "#!/bin/sh\n[ -e {0} ] || {{ echo >> {0}; {first}; exec {1}; }}\necho >> {0}\nexec {1}\n",
            starts.display(),
            vmm().display()
        );
        // By the shell's child: one that another test is just starting would have it open for writing.
        let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let mut shell = Command::new("/bin/sh");
        let written = shell.args(["-c", write]).arg(&program).arg(script).status();
        assert!(written.unwrap().success());
        program
    }

    /// How often [`Place::counted_vmm`] was started.
    pub fn starts(&self) -> usize {
        fs::read_to_string(self.path("starts")).unwrap_or_default().len()
    }

    pub fn image(&self) -> String {
        format!("oci:{}", self.path("image").display())
    }

    /// Everything of thaw's that exists now.
    pub fn leftovers(&self) -> Leftovers {
        let mark = self.root.path().display().to_string();
        let sandboxes = names(&self.path("run/sandboxes"));
        Leftovers {
            processes: processes(&mark),
            cgroups: cgroups(),
            mounts: fs::read_to_string("/proc/self/mountinfo")
                .unwrap()
                .lines()
                .filter(|l| l.contains(&mark))
                .count(),
            disks: names(&self.path("data/disks"))
                .into_iter()
                .filter(|n| !n.ends_with(".template"))
                .collect(),
            sandboxes,
        }
    }
}

impl Leftovers {
    pub fn none() -> Leftovers {
        Leftovers {
            processes: vec![],
            sandboxes: vec![],
            cgroups: vec![],
            mounts: 0,
            disks: vec![],
        }
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The one line of a failed command that begins with `thaw: `; fails if there is not exactly one.
pub fn one_line(output: &Output) -> String {
    let stderr = text(&output.stderr);
    let lines: Vec<_> = stderr.lines().filter(|l| l.starts_with("thaw: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    lines[0].to_owned()
}

fn vmm() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_thaw")).with_file_name("thaw-vmm")
}

fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// VMMs whose log is in this place: their jail hides everything else about them.
pub fn processes(mark: &str) -> Vec<String> {
    let mut found = Vec::new();
    for pid in names(Path::new("/proc"))
        .into_iter()
        .filter(|n| n.bytes().all(|b| b.is_ascii_digit()))
    {
        let log = fs::read_link(format!("/proc/{pid}/fd/2")).unwrap_or_default();
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let dead = fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z "));
        if name.starts_with("thaw-vmm") && log.display().to_string().starts_with(mark) && !dead {
            found.push(pid);
        }
    }
    found
}

/// The cgroups of all places. Only the pools' own may exist beside those of the running test.
fn cgroups() -> Vec<String> {
    thaw_pools::cgroup::Hierarchy::detect()
        .names()
        .into_iter()
        .filter(|id| !id.starts_with("test-"))
        .collect()
}

/// An OCI layout of one layer with one file.
pub fn make_image(directory: &Path, name: &str, content: &[u8]) {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_mtime(1);
    tar.append_data(&mut header, name, content).unwrap();
    let layer = tar.into_inner().unwrap();
    let put = |bytes: &[u8]| {
        let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        fs::write(blobs.join(&hex), bytes).unwrap();
        (format!("sha256:{hex}"), bytes.len())
    };
    let (layer_digest, layer_size) = put(&layer);
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": [format!("/{name}")]},
        "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
    });
    let (config_digest, config_size) = put(config.to_string().as_bytes());
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config_size},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer_digest, "size": layer_size}],
    });
    let (manifest_digest, manifest_size) = put(manifest.to_string().as_bytes());
    let index = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest_digest, "size": manifest_size,
            "platform": {"os": "linux", "architecture": "amd64"},
        }],
    });
    fs::write(directory.join("index.json"), index.to_string()).unwrap();
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// An ELF file that a VMM enters by PVH: a note with the entry, and 32-bit code at 1 MiB.
fn pvh_kernel(code: &[u8]) -> Vec<u8> {
    const ENTRY: u64 = 0x10_0000;
    const HEADERS: u64 = 64 + 2 * 56;
    let mut note = Vec::new();
    for word in [4u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend((ENTRY as u32).to_le_bytes());
    let code_at = HEADERS + note.len() as u64;

    let mut elf = Vec::new();
    elf.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    elf.extend(2u16.to_le_bytes());
    elf.extend(62u16.to_le_bytes());
    elf.extend(1u32.to_le_bytes());
    for word in [ENTRY, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let mut segment = |kind: u32, offset: u64, address: u64, size: u64, align: u64| {
        elf.extend(kind.to_le_bytes());
        elf.extend(5u32.to_le_bytes());
        for word in [offset, address, address, size, size, align] {
            elf.extend(word.to_le_bytes());
        }
    };
    segment(1, code_at, ENTRY, code.len() as u64, 1);
    segment(4, HEADERS, 0, note.len() as u64, 4);
    elf.extend(note);
    elf.extend(code);
    elf
}

/// Whether a process with this pid lives.
pub fn lives(pid: i32) -> bool {
    thaw_pools::process::ProcessRecord::of(pid).is_some()
}

/// Waits until `so` holds. Tests wait in no other way for actions of other processes.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !so() {
        assert!(began.elapsed().as_secs() < 30, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// The records in the run directory, by id.
pub fn records(place: &Place) -> BTreeMap<String, serde_json::Value> {
    records_in(&place.path("run/sandboxes"))
}

/// The records in a directory of sandboxes or of spares, by id.
pub fn records_in(all: &Path) -> BTreeMap<String, serde_json::Value> {
    names(all)
        .into_iter()
        .filter_map(|id| {
            let text = fs::read(all.join(&id).join("record.json")).ok()?;
            Some((id, serde_json::from_slice(&text).ok()?))
        })
        .collect()
}
