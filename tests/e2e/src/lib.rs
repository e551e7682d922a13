//! What the end-to-end tests share: the `thaw` command as a user runs it, OCI layouts good and bad, a registry that
//! answers as told, a terminal, and a count of everything a sandbox could leave behind.
//!
//! The tests run where Linux guests run at speed: natively, or inside the lab (`tests/lab`). `THAW_BIN` is the folder
//! of the binaries, `THAW_TEST_IMAGES` the OCI layout with the test images (`tests/images`).

// A test helper that cannot do its work must fail the test at once, where it happened.
#![allow(clippy::unwrap_used)]

pub mod api;
pub mod containerd;
pub mod cri;
pub mod entries;
pub mod forms;
pub mod home;
pub mod layout;
pub mod leftovers;
pub mod node;
pub mod outside;
pub mod page;
pub mod probe;
pub mod registry;
mod stuck;
pub mod survivor;
pub mod terminal;
pub mod upstream;
pub mod warmed;
pub mod websocket;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// How long one command may take before the test fails: emulated machines are slow, hung ones are for ever.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A binary of this project.
pub fn binary(name: &str) -> PathBuf {
    let folder = std::env::var_os("THAW_BIN")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/x86_64-unknown-linux-gnu/release")
        });
    folder.join(name)
}

/// One of the test images, as `thaw run` takes it.
pub fn image(tag: &str) -> String {
    let layout =
        std::env::var("THAW_TEST_IMAGES").expect("THAW_TEST_IMAGES names the OCI layout of the test images");
    format!("oci:{layout}:{tag}")
}

/// `thaw` with these arguments and nothing on its standard input.
pub fn thaw(args: &[&str]) -> Command {
    let mut command = Command::new(binary("thaw"));
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a command did.
#[derive(Debug)]
pub struct Outcome {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// The exit code; a death by signal fails the test.
    #[track_caller]
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| panic!("no exit code: {self:?}"))
    }

    /// Fails the test unless the command succeeded; gives its standard output.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "failed: {self:?}");
        self.stdout
    }
}

/// Runs to the end, output collected.
///
/// If the guest ended in a triple fault, that is printed even where the test does not look at it: in the lab it is a symptom
/// for which `tests/e2e/run` runs a test that failed once more (`tests/lab/symptoms`).
pub fn run(command: &mut Command) -> Outcome {
    let outcome = finish(command.spawn().unwrap(), "");
    if outcome.status.code() == Some(GUEST_ENDED) && outcome.stderr.contains("triple fault") {
        eprintln!("the guest ended in a triple fault: {outcome:?}");
    }
    outcome
}

/// What a VMM's log says when it ends because of a call that its filters forbid (docs/jail.md).
pub(crate) const FORBIDDEN_CALL: &str = "thaw-vmm: forbidden system call";

/// `thaw`'s exit code when the guest ended by itself (docs/exit-codes.md).
const GUEST_ENDED: i32 = 88;

/// Runs to the end with `input` on standard input.
pub fn run_with_input(command: &mut Command, input: &str) -> Outcome {
    finish(command.stdin(Stdio::piped()).spawn().unwrap(), input)
}

/// Feeds `input`, collects both outputs, waits; kills and fails after [`PATIENCE`], telling what everything waited for.
pub fn finish(mut child: Child, input: &str) -> Outcome {
    if let Some(mut stdin) = child.stdin.take() {
        let input = input.to_string();
        std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    }
    let stdout = child.stdout.take().map(collect);
    let stderr = child.stderr.take().map(collect);
    let pid = child.id() as i32;
    let (done, waiting) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(child.wait().unwrap()));
    let mut stuck = String::new();
    let ended = waiting.recv_timeout(PATIENCE);
    if ended.is_err() {
        stuck = stuck::report(pid);
        let _ = rustix::process::kill_process(pid_of(pid), rustix::process::Signal::KILL);
    }
    let text = |h: Option<std::thread::JoinHandle<String>>| h.map(|h| h.join().unwrap()).unwrap_or_default();
    let (stdout, stderr) = (text(stdout), text(stderr));
    // The VMM's log, shown with the failure: its filters lack a call it makes.
    assert!(!stderr.contains(FORBIDDEN_CALL), "{stderr}");
    let status = ended.unwrap_or_else(|_| {
        panic!("no end within {PATIENCE:?}: stdout {stdout:?}, stderr {stderr:?}\n{stuck}")
    });
    Outcome {
        status,
        stdout,
        stderr,
    }
}

fn collect(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A process id as rustix takes it.
pub fn pid_of(pid: i32) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(pid).expect("a process id is not zero")
}

/// Reads lines from a child's standard output until one contains `text`.
pub fn wait_for_line(child: &mut Child, text: &str) -> std::io::BufReader<std::process::ChildStdout> {
    use std::io::BufRead;
    let mut reader = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut seen = String::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap() == 0 {
            let mut error = String::new();
            let _ = child.stderr.take().unwrap().read_to_string(&mut error);
            panic!("output ended without {text:?}: {seen:?}, stderr {error:?}");
        }
        if line.contains(text) {
            return reader;
        }
        seen += &line;
    }
}
