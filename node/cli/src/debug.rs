//! `thaw debug bundle`: diagnostics of this node in one archive, to attach to a report.
//!
//! Invariants: what is not known to be harmless is left out ([`redact`]). No environment of a container, no argument of a command, no
//! token and no credential is read; a container's output is read only if the user asks. Each file and the whole archive are bounded.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use flate2::Compression;
use flate2::write::GzEncoder;
use thaw_doctor::{Host, examine};
use thaw_sandbox::config;
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;

mod redact;

/// Most bytes of one file, from its end.
const MOST_OF_FILE: u64 = 1 << 20;
/// Most bytes of all files, before compression.
const MOST_OF_ALL: u64 = 64 << 20;
/// Most sandboxes whose records and logs are taken.
const MOST_SANDBOXES: usize = 200;
/// How long thawd and each program may take.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub enum DebugCommand {
    /// Collect diagnostics of this node in one archive, without secrets
    Bundle(BundleArguments),
}

#[derive(Debug, Args)]
#[command(
    after_help = "It has the report of `thaw doctor`, the version, the configuration without its secrets, records and VMM logs of \
                        sandboxes, and thawd's metrics, health and journal. Look at it before you send it: MANIFEST.txt lists what it has.\n\nExample:\n  thaw debug bundle /tmp/node.tar.gz"
)]
pub struct BundleArguments {
    /// Where to write it; a file that exists is not replaced [default: thaw-debug-TIME.tar.gz]
    pub file: Option<PathBuf>,
    /// Include the last output of containers, which may hold secrets
    #[arg(long)]
    pub with_output: bool,
}

/// Writes the archive, and prints its name.
pub(super) fn debug(DebugCommand::Bundle(arguments): &DebugCommand) -> Result<u8, Error> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let path = match &arguments.file {
        Some(path) => path.clone(),
        None => format!("thaw-debug-{now}.tar.gz").into(),
    };
    let fail = |e: std::io::Error| Error::system(format!("cannot write {}", path.display()), &e);
    // Only its owner reads it.
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(fail)?;
    let mut bundle = Bundle::new(file, now);
    let written =
        collect(&mut bundle, &Paths::from_env(), arguments.with_output).and_then(|()| bundle.finish());
    if let Err(e) = written {
        let _ = std::fs::remove_file(&path);
        return Err(fail(e));
    }
    super::print(&path.display().to_string());
    Ok(0)
}

/// The archive being written.
struct Bundle<W: Write> {
    archive: tar::Builder<GzEncoder<W>>,
    manifest: String,
    now: u64,
    left: u64,
}

impl<W: Write> Bundle<W> {
    fn new(to: W, now: u64) -> Bundle<W> {
        Bundle {
            archive: tar::Builder::new(GzEncoder::new(to, Compression::default())),
            manifest: String::new(),
            now,
            left: MOST_OF_ALL,
        }
    }

    /// Adds a file, or notes why there is none.
    fn add(&mut self, name: &str, content: Result<Vec<u8>, String>) -> std::io::Result<()> {
        let content = content.and_then(|bytes| match bytes.len() as u64 <= self.left {
            true => Ok(bytes),
            false => Err("left out: the archive is full".into()),
        });
        match content {
            Ok(bytes) => {
                self.manifest += &format!("{name}: {} bytes\n", bytes.len());
                self.left -= bytes.len() as u64;
                self.append(name, &bytes)
            }
            Err(why) => {
                self.manifest += &format!("{name}: none: {}\n", why.replace('\n', " "));
                Ok(())
            }
        }
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.now);
        self.archive
            .append_data(&mut header, format!("thaw-debug/{name}"), bytes)
    }

    fn finish(mut self) -> std::io::Result<()> {
        let manifest = std::mem::take(&mut self.manifest);
        self.append("MANIFEST.txt", manifest.as_bytes())?;
        self.archive.into_inner()?.finish()?.flush()
    }
}

fn collect<W: Write>(bundle: &mut Bundle<W>, paths: &Paths, with_output: bool) -> std::io::Result<()> {
    let version = serde_json::json!({"version": env!("CARGO_PKG_VERSION"), "collected": bundle.now});
    bundle.add("version.json", Ok(version.to_string().into_bytes()))?;
    let report = serde_json::to_vec_pretty(&examine(&Host::this(), paths)).map_err(|e| e.to_string());
    bundle.add("doctor.json", report)?;
    let file = std::env::var_os(config::VARIABLE).map_or_else(config::default_path, PathBuf::from);
    bundle.add("thawd.toml", tail(&file).and_then(|text| redact::config(&text)))?;
    for (name, path) in [("health.json", "/v1/health"), ("metrics.txt", "/metrics")] {
        bundle.add(name, ask(&paths.daemon_socket(), path))?;
    }
    bundle.add(
        "journal.txt",
        output_of(
            "journalctl",
            &["-u", "thawd", "-n", "5000", "-o", "short-iso", "--no-pager"],
        ),
    )?;
    for (name, path) in [
        ("host/kernel", "/proc/version"),
        ("host/meminfo", "/proc/meminfo"),
        ("host/pressure-memory", "/proc/pressure/memory"),
        ("host/cgroup", "/proc/self/cgroup"),
        ("host/cgroup-controllers", "/sys/fs/cgroup/cgroup.controllers"),
        ("host/cgroup-subtree", "/sys/fs/cgroup/cgroup.subtree_control"),
    ] {
        bundle.add(name, tail(Path::new(path)))?;
    }
    bundle.add(
        "host/mounts",
        tail(Path::new("/proc/self/mountinfo")).map(|text| redact::mounts(&text)),
    )?;
    sandboxes(bundle, &paths.run.join("sandboxes"), with_output)
}

/// Records and logs of sandboxes, by their ids.
fn sandboxes<W: Write>(bundle: &mut Bundle<W>, directory: &Path, with_output: bool) -> std::io::Result<()> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut ids: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    ids.sort_unstable_by(|a, b| b.cmp(a));
    for id in ids.iter().take(MOST_SANDBOXES) {
        let of = directory.join(id);
        let record = tail(&of.join("record.json")).and_then(|text| redact::record(&text));
        bundle.add(&format!("sandboxes/{id}/record.json"), record)?;
        let logs: &[&str] = if with_output {
            &["vmm.log", "share.log", "output"]
        } else {
            &["vmm.log", "share.log"]
        };
        for log in logs {
            bundle.add(&format!("sandboxes/{id}/{log}"), tail(&of.join(log)))?;
        }
    }
    Ok(())
}

/// The last bytes of a regular file. Links are not followed.
fn tail(path: &Path) -> Result<Vec<u8>, String> {
    let read = || {
        let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32;
        let mut file = File::options().read(true).custom_flags(flags).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(std::io::Error::other("not a file"));
        }
        file.seek(SeekFrom::Start(metadata.len().saturating_sub(MOST_OF_FILE)))?;
        let mut bytes = Vec::new();
        file.take(MOST_OF_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().map_err(|e: std::io::Error| e.to_string())
}

/// The body of thawd's answer.
fn ask(socket: &Path, path: &str) -> Result<Vec<u8>, String> {
    let get = || {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nhost: thawd\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        stream.take(MOST_OF_FILE).read_to_end(&mut answer)?;
        Ok(answer)
    };
    let answer = get().map_err(|e: std::io::Error| format!("thawd: {e}"))?;
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n");
    let (head, body) = answer.split_at(end.ok_or("thawd: no answer")? + 4);
    match head.split(|b| *b == b' ').nth(1) {
        Some(b"200") => Ok(body.to_vec()),
        _ => Err("thawd refused".into()),
    }
}

/// What a program prints, if it ends in time (timeout(1)).
fn output_of(program: &str, arguments: &[&str]) -> Result<Vec<u8>, String> {
    let mut command = Command::new("timeout");
    command
        .arg(PATIENCE.as_secs().to_string())
        .arg(program)
        .args(arguments);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| format!("{program}: {e}"))?;
    let mut bytes = Vec::new();
    let read = child
        .stdout
        .take()
        .map(|out| out.take(MOST_OF_FILE).read_to_end(&mut bytes));
    let status = child.wait().map_err(|e| e.to_string())?;
    match read {
        Some(Ok(_)) if !bytes.is_empty() => Ok(bytes),
        _ => Err(format!("{program}: {status}")),
    }
}

#[cfg(test)]
#[path = "debug/debug_test.rs"]
mod tests;
