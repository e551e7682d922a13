//! A directory with all that thawd needs to make sandboxes: of a tiny guest, or of the real one.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};
use tempfile::TempDir;
use thaw_pools::cgroup::{Cgroups, Hierarchy};
use thaw_pools::cgroup_limits::{CgroupLimits, Needs};
use thaw_pools::resource::Kind;
use thaw_test_registry::image::{Image, LAYER, Layout};
use thaw_tiny_guest::Guest;

/// The kernel's word that makes guests bare.
const BARE: &str = "thaw.test=bare";
/// The image's tag, and that of the same with its layer compressed.
const TAG: &str = "tiny";
const COMPRESSED: &str = "compressed";

/// What a configuration must say where this host cannot limit sandboxes, as a container whose cgroups are read-only: thawd would refuse
/// them all. Empty where it can, so that tests run with limits wherever there are any.
pub fn without_limits() -> &'static str {
    static TEXT: OnceLock<&'static str> = OnceLock::new();
    TEXT.get_or_init(|| match try_to_limit() {
        Ok(()) => "",
        Err(why) => {
            eprintln!("sandboxes of this test have no limits: {why}");
            "[sandbox]\nrequire_limits = false\n"
        }
    })
}

fn try_to_limit() -> Result<(), String> {
    let cgroup = Cgroups::new(Hierarchy::detect())
        .make(&())
        .map_err(|e| e.to_string())?;
    let needs = Needs {
        memory_mib: 64,
        ..Needs::default()
    };
    let limited = cgroup.limit(&CgroupLimits::of(needs));
    cgroup.destroy();
    limited.map_err(|e| e.to_string())
}

/// A node's place: gone when dropped.
#[derive(Debug)]
pub struct Place {
    root: TempDir,
    /// The run directory, in memory as a host's `/run` is; `run` in the root is a link to it.
    _run: TempDir,
    /// Where `thawd` and `thaw-vmm` are.
    binaries: PathBuf,
    guest: What,
}

/// Makes the run directory of the place in `root`: on `/dev/shm` if it exists, because `/run` is a tmpfs on a host of systemd.
fn run_in_memory(root: &Path) -> TempDir {
    let memory = Path::new("/dev/shm");
    let run = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir_in(root),
    };
    let run = run.unwrap();
    std::os::unix::fs::symlink(run.path(), root.join("run")).unwrap();
    run
}

/// What its sandboxes are made of.
#[derive(Debug)]
enum What {
    Tiny,
    Linux(Linux),
}

/// The real guest.
#[derive(Clone, Debug)]
pub struct Linux {
    pub kernel: PathBuf,
    pub guest_image: PathBuf,
    /// An image with `sleep`, as a creation names it.
    pub image: String,
}

impl Place {
    /// One with this guest. None, having said why, where it cannot run.
    pub fn new(binaries: &Path, guest: &Guest) -> Option<Place> {
        let mkfs = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"];
        let lacks = [
            (!Path::new("/dev/kvm").exists(), "there is no /dev/kvm"),
            (!binaries.join("thaw-vmm").exists(), "thaw-vmm is not built"),
            (
                !mkfs.iter().any(|m| Path::new(m).exists()),
                "mkfs.ext4 is not installed",
            ),
        ];
        if let Some((_, what)) = lacks.iter().find(|(lacking, _)| *lacking) {
            thaw_test_skip::skip(what);
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        let place = Place {
            _run: run_in_memory(root.path()),
            root,
            binaries: binaries.to_owned(),
            guest: What::Tiny,
        };
        fs::write(place.path("kernel"), guest.image()).unwrap();
        fs::write(place.path("guest.erofs"), vec![0u8; 4096]).unwrap();
        make_image(&place.path("image"), "hello", b"hello\n");
        place.configure("");
        Some(place)
    }

    /// One of Linux guests, made in `directory`.
    pub fn of_linux(directory: &Path, binaries: &Path, linux: Linux) -> Place {
        let root = tempfile::tempdir_in(directory).unwrap();
        let place = Place {
            _run: run_in_memory(root.path()),
            root,
            binaries: binaries.to_owned(),
            guest: What::Linux(linux),
        };
        place.configure("");
        place
    }

    /// From now on its programs are those in this directory: another release's.
    pub fn use_binaries(&mut self, binaries: &Path) {
        self.binaries = binaries.to_owned();
    }

    /// Its directory.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Writes `thawd.toml`, with what [`without_limits`] adds.
    pub fn configure(&self, text: &str) {
        self.configure_as_is(&format!("{text}\n{}", without_limits()));
    }

    /// Writes `thawd.toml`, and no more.
    pub fn configure_as_is(&self, text: &str) {
        fs::write(self.path("thawd.toml"), text).unwrap();
    }

    /// Makes each pool hold so many, from its low mark to its high one, and a pool of shells for one shape; `parked` as
    /// many machines of one template.
    pub fn fill_pools_to(&self, each: RangeInclusive<usize>, parked: RangeInclusive<usize>) {
        let some = |marks: &RangeInclusive<usize>| usize::from(*marks.end() > 0);
        let (shapes, templates) = (some(&each), some(&parked));
        let marks =
            |marks: RangeInclusive<usize>| format!("{{ low = {}, high = {} }}", marks.start(), marks.end());
        let (each, parked) = (marks(each), marks(parked));
        self.configure(&format!(
            "[pools]\ndisks = {each}\nnetworks = {each}\ncgroups = {each}\n[pools.shells]\nshapes = {shapes}\neach = {each}\n\
             [pools.parked]\ntemplates = {templates}\neach = {parked}\n"
        ));
    }

    /// thawd's socket.
    pub fn socket(&self) -> PathBuf {
        self.path("run/thawd.sock")
    }

    /// The image, as a creation names it.
    pub fn image(&self) -> String {
        Layout::at(&self.path("image")).reference(TAG)
    }

    /// The same, its layer compressed: that can be indexed.
    pub fn compressed_image(&self) -> String {
        Layout::at(&self.path("image")).reference(COMPRESSED)
    }

    /// A creation's body: with a process, where the guest can have one.
    pub fn request(&self) -> Value {
        match &self.guest {
            What::Tiny => json!({
                "image": self.image(), "cpus": 1, "memory_mib": 128, "prefetch": false, "labels": {"app": "tiny"},
            }),
            What::Linux(linux) => json!({
                "image": linux.image, "cpus": 1, "memory_mib": 128,
                "container": {"command": ["sleep", "1000000"]},
            }),
        }
    }

    /// thawd over this place, not started.
    pub fn thawd(&self) -> Command {
        let mut command = self.command("thawd");
        if matches!(self.guest, What::Tiny) {
            command.arg("--test-templates");
        }
        command
    }

    /// A program over this place, not started.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        command
            .env("THAW_DATA", self.path("data"))
            .env("THAW_RUN", self.path("run"))
            .env("THAW_CONFIG", self.path("thawd.toml"))
            .env("THAW_VMM", self.binaries.join("thaw-vmm"))
            .env_remove("THAW_LOG");
        match &self.guest {
            What::Tiny => command
                .env("THAW_KERNEL", self.path("kernel"))
                .env("THAW_KERNEL_ARGS", BARE)
                .env("THAW_GUEST_IMAGE", self.path("guest.erofs")),
            What::Linux(linux) => command
                .env("THAW_KERNEL", &linux.kernel)
                .env("THAW_GUEST_IMAGE", &linux.guest_image),
        };
        command
    }

    /// How many machines wait to be claimed.
    pub fn spares(&self) -> usize {
        // One that has its record only is not a machine yet: its log comes with the process.
        let spares = fs::read_dir(self.path("run/spares")).into_iter().flatten();
        let made = |spare: &fs::DirEntry| {
            let text = fs::read(spare.path().join("record.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&text).unwrap_or_default();
            record["vmm"].is_object()
        };
        spares.flatten().filter(made).count()
    }
}

/// An image of one file, in an OCI layout: how it is named.
pub fn make_image(directory: &Path, name: &str, content: &[u8]) -> String {
    let layout = Layout::at(directory);
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_mtime(1);
    tar.append_data(&mut header, name, content).unwrap();
    let tar = tar.into_inner().unwrap();
    let layer = layout.layer(&tar, &tar, LAYER, Value::Null);
    let compressed = layout.gzip_layer(&tar);
    let like = Image {
        config: json!({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["/hello"]}}),
        layers: Vec::new(),
    };
    layout.write(TAG, &like, &[layer]);
    layout.write(COMPRESSED, &like, &[compressed]);
    layout.reference(TAG)
}
