//! Ways in which a crowd of VMMs ends at once, none of which a program can pace.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::thaw::clone::Clone;
use crate::thaw::storm;

/// What ends all VMMs of a crowd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// SIGKILL to each.
    Signal,
    /// `cgroup.kill` of a cgroup they are all in (cgroup v2, Linux 5.14).
    Cgroup,
    /// Their cgroup has no memory left. With cgroup v2 the kernel ends all of it at once (`memory.oom.group`), with v1 one
    /// after another, while another process goes on taking memory.
    OutOfMemory,
}

impl Way {
    pub const ALL: [Way; 3] = [Way::Signal, Way::Cgroup, Way::OutOfMemory];

    /// As it reads after a number: `1000 killed`.
    pub fn verb(self) -> &'static str {
        match self {
            Way::Signal => "killed",
            Way::Cgroup => "killed by cgroup.kill",
            Way::OutOfMemory => "killed for want of memory",
        }
    }
}

/// A cgroup that a crowd is born in; removed when dropped, once it is empty.
pub struct Crowd {
    way: Way,
    directory: Option<PathBuf>,
    /// Where this process was, to go back there.
    before: PathBuf,
}

/// The option by which this program is the process that takes memory: `--take CGROUP BYTES`.
pub const TAKE: &str = "--take";
/// How much that process takes at a time, in bytes.
const STEP: usize = 1 << 20;
/// What the cgroup may take beyond what its crowd has, in bytes.
const ROOM: u64 = 1 << 20;
/// How long a cgroup may take to become empty.
const PATIENCE: Duration = Duration::from_secs(60);

impl Crowd {
    /// Until it is [`Crowd::complete`], what this process starts is born in it.
    ///
    /// # Errors
    /// Names the directory that cannot be made, where the host lacks what this way needs.
    pub fn begin(way: Way) -> io::Result<Crowd> {
        let hierarchy = match way {
            Way::Signal => None,
            Way::Cgroup => Some(unified()),
            Way::OutOfMemory if is_unified_for_memory() => Some(unified()),
            Way::OutOfMemory => Some(PathBuf::from("/sys/fs/cgroup/memory")),
        };
        let Some(hierarchy) = hierarchy else {
            return Ok(Crowd {
                way,
                directory: None,
                before: PathBuf::new(),
            });
        };
        let before = own(&hierarchy)?;
        let directory = hierarchy.join(format!("thaw-bench-{}", std::process::id()));
        fs::create_dir_all(&directory).map_err(named(&directory))?;
        let crowd = Crowd {
            way,
            directory: Some(directory),
            before,
        };
        crowd.enter(crowd.directory.as_deref())?;
        Ok(crowd)
    }

    /// This process leaves it: what it starts from now on is not of the crowd.
    pub fn complete(&self) -> io::Result<()> {
        match &self.directory {
            Some(_) => self.enter(Some(&self.before)),
            None => Ok(()),
        }
    }

    fn enter(&self, directory: Option<&Path>) -> io::Result<()> {
        let Some(directory) = directory else { return Ok(()) };
        write(&directory.join("cgroup.procs"), &std::process::id().to_string())
    }

    /// Ends all of them, and does not wait for their ends where the kernel does not.
    pub fn kill(&self, clones: &[Clone]) -> io::Result<()> {
        match (self.way, &self.directory) {
            (Way::Cgroup, Some(directory)) => write(&directory.join("cgroup.kill"), "1"),
            (Way::OutOfMemory, Some(directory)) => exhaust(directory),
            _ => {
                storm::kill(clones);
                Ok(())
            }
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let Some(directory) = &self.directory else { return };
        let _ = self.complete();
        let start = Instant::now();
        // Busy while processes of it are being taken apart.
        while fs::remove_dir(directory).is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY))
            && start.elapsed() < PATIENCE
        {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Has the kernel end what is in this cgroup for want of memory.
fn exhaust(directory: &Path) -> io::Result<()> {
    if directory.join("memory.max").exists() {
        write(&directory.join("memory.oom.group"), "1")?;
        // The kernel reclaims, and ends the group, until this is so.
        return write(&directory.join("memory.max"), "0");
    }
    // Each of them goes before the process that takes memory.
    let members = directory.join("cgroup.procs");
    for pid in fs::read_to_string(&members).map_err(named(&members))?.lines() {
        write(&Path::new("/proc").join(pid).join("oom_score_adj"), "1000")?;
    }
    let used = directory.join("memory.usage_in_bytes");
    let text = fs::read_to_string(&used).map_err(named(&used))?;
    let used: u64 = text.trim().parse().map_err(io::Error::other)?;
    write(
        &directory.join("memory.limit_in_bytes"),
        &(used + ROOM).to_string(),
    )?;
    let status = Command::new(std::env::current_exe()?)
        .args([TAKE.as_ref(), directory.as_os_str(), used.to_string().as_ref()])
        .stdin(Stdio::null())
        .status()?;
    // What the kernel takes from the crowd may come back too late for this process: then it goes too, as the last of all.
    let was_last =
        || -> io::Result<bool> { Ok(status.signal() == Some(libc::SIGKILL) && is_empty_soon(&members)?) };
    match status.success() || was_last()? {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "the process that takes memory ended: {status}"
        ))),
    }
}

/// Whether the cgroup whose `cgroup.procs` this is becomes empty in time.
fn is_empty_soon(members: &Path) -> io::Result<bool> {
    let start = Instant::now();
    while !fs::read_to_string(members).map_err(named(members))?.is_empty() {
        if start.elapsed() > PATIENCE {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(true)
}

/// Takes so many bytes in that cgroup, or fewer if the kernel has ended all others there.
pub fn take(directory: &Path, bytes: usize) -> io::Result<()> {
    write(&directory.join("cgroup.procs"), &std::process::id().to_string())?;
    let mut taken = Vec::with_capacity(bytes / STEP + 1);
    while taken.len() * STEP < bytes && !others_ended(directory)? {
        taken.push(std::hint::black_box(vec![1u8; STEP]));
    }
    Ok(())
}

/// Whether the calling process is alone in the cgroup.
fn others_ended(directory: &Path) -> io::Result<bool> {
    let members = directory.join("cgroup.procs");
    Ok(fs::read_to_string(&members)
        .map_err(named(&members))?
        .lines()
        .count()
        <= 1)
}

/// Where cgroup v2 is mounted, also beside v1.
fn unified() -> PathBuf {
    let hybrid = PathBuf::from("/sys/fs/cgroup/unified");
    match hybrid.is_dir() {
        true => hybrid,
        false => PathBuf::from("/sys/fs/cgroup"),
    }
}

fn is_unified_for_memory() -> bool {
    let enabled = fs::read_to_string(unified().join("cgroup.subtree_control")).unwrap_or_default();
    enabled
        .split_whitespace()
        .any(|controller| controller == "memory")
}

/// The cgroup of this process below that hierarchy's mount (cgroups(7): `/proc/PID/cgroup`).
fn own(hierarchy: &Path) -> io::Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup")?;
    let controller = hierarchy
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let is_ours = |controllers: &str| match controllers {
        "" => hierarchy == unified(),
        some => some.split(',').any(|one| one == controller),
    };
    let place = text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        is_ours(controllers).then(|| hierarchy.join(path.trim_start_matches('/')))
    });
    place.ok_or_else(|| {
        io::Error::other(format!(
            "/proc/self/cgroup has nothing of {}",
            hierarchy.display()
        ))
    })
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text).map_err(named(path))
}

fn named(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    move |e| io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}
