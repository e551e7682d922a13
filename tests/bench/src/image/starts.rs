//! Starts, from the spawn of `thaw` to the smoke command's line on its standard output.

use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use thaw_test_registry::proxy::{Link, Proxy};

use crate::Report;
use crate::clock::{monotonic_ns, us_since};

/// An image, and the command that shows that it works.
pub struct Subject {
    pub name: &'static str,
    script: &'static str,
    expected: &'static str,
}

/// All of them, the large one first.
pub const SUBJECTS: [Subject; 6] = [
    Subject {
        name: PADDED,
        script: PYTHON,
        expected: "python 3",
    },
    Subject {
        name: "python3",
        script: PYTHON,
        expected: "python 3",
    },
    Subject {
        name: "node",
        script: "node -e 'console.log(\"node \" + process.version)'",
        expected: "node v",
    },
    Subject {
        name: "java",
        script: "java -version 2>&1",
        expected: "openjdk version",
    },
    Subject {
        name: "nginx",
        script: "nginx -t 2>&1",
        expected: "syntax is ok",
    },
    Subject {
        name: "redis",
        script: "redis-server --version",
        expected: "Redis server v=",
    },
];
/// The image of 1 GiB.
pub const PADDED: &str = "padded";
const PYTHON: &str =
    "python3 -c 'import json, sys; print(json.loads(\"[\\\"python\\\"]\")[0], sys.version_info.major)'";

/// How an image comes to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    FullPull,
    Unindexed,
    Soci,
    Kept,
    Estargz,
    Converted,
}

impl Form {
    /// The order matters: what is kept was pulled in full before.
    pub const ALL: [Form; 6] = [
        Form::FullPull,
        Form::Kept,
        Form::Unindexed,
        Form::Soci,
        Form::Estargz,
        Form::Converted,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Form::FullPull => "full pull",
            Form::Unindexed => "unindexed",
            Form::Soci => "SOCI index",
            Form::Kept => "kept index",
            Form::Estargz => "eStargz",
            Form::Converted => "converted",
        }
    }

    fn tag(self) -> &'static str {
        match self {
            Form::FullPull | Form::Unindexed | Form::Kept => "latest",
            Form::Soci => "soci",
            Form::Estargz => "estargz",
            Form::Converted => "converted",
        }
    }

    /// Whether its starts fetch only what they read.
    pub fn is_lazy(self) -> bool {
        !matches!(self, Form::FullPull | Form::Unindexed)
    }
}

/// The name of a row of times.
pub fn row(image: &str, form: Form, how: &str) -> String {
    format!("{image}, {}: {how}", form.name())
}

/// The name of the row of bytes that belongs to a row of times.
pub fn fetched(row: &str) -> String {
    format!("{row}: fetched")
}

/// A node, and the registry it pulls from.
pub struct Node {
    thaw: PathBuf,
    data: PathBuf,
    run: PathBuf,
    proxy: Proxy,
}

impl Node {
    /// A node without images in `directory`, before the registry at `upstream` (`host:port`). Builds its template.
    pub fn new(binaries: &Path, directory: &Path, upstream: &str) -> io::Result<Node> {
        let node = Node {
            thaw: binaries.join("thaw"),
            data: directory.join("data"),
            run: directory.join("run"),
            proxy: Proxy::start(upstream, Link::SLOW)?,
        };
        node.thaw(&["template", "build"])?;
        Ok(node)
    }

    /// Where its images are stored.
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    /// The reference of an image as the node sees it.
    pub fn reference(&self, name: &str, tag: &str) -> String {
        format!("{}/{name}:{tag}", self.proxy.host())
    }

    /// As if it had never pulled anything.
    pub fn forget(&self) -> io::Result<()> {
        match std::fs::remove_dir_all(self.images()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Runs `thaw` to its end.
    pub fn thaw(&self, arguments: &[&str]) -> io::Result<()> {
        let output = self.command(arguments).output()?;
        match output.status.success() {
            true => Ok(()),
            false => Err(failed(arguments, &output.stderr)),
        }
    }

    /// All of one form: cold, warm, and where it can be, without and with reading ahead. Each is sampled.
    pub fn round(&self, subject: &Subject, form: Form, report: &mut Report) -> io::Result<()> {
        let reference = self.reference(subject.name, form.tag());
        let mut sample = |how: &str, before: &[&str], options: &[&str]| -> io::Result<()> {
            self.proxy.reset();
            let start = monotonic_ns();
            if !before.is_empty() {
                self.thaw(before)?;
            }
            let ms = self.start(subject, &reference, options, start)?;
            let row = row(subject.name, form, how);
            report.sample(&row, "ms", ms);
            let bytes = self.proxy.counts().down as f64;
            report.sample(&fetched(&row), "MiB", bytes / f64::from(1 << 20));
            eprintln!(
                "bench-image: {row}: {ms:.0} ms, {:.1} MiB",
                bytes / f64::from(1 << 20)
            );
            Ok(())
        };
        match form {
            // The store is full of it: what is measured is what is left to do when only the index was kept.
            Form::Kept => self.evict(&reference)?,
            _ => self.forget()?,
        }
        match form {
            Form::FullPull => sample("cold", &["image", "pull", "--full", &reference], &[])?,
            _ => sample("cold", &[], &[])?,
        }
        sample("warm", &[], &[])?;
        if form.is_lazy() {
            self.evict(&reference)?;
            sample("no prefetch", &[], &["--no-prefetch"])?;
            self.evict(&reference)?;
            self.start(subject, &reference, &["--record"], monotonic_ns())?;
            self.evict(&reference)?;
            sample("prefetched", &[], &[])?;
        }
        if form == Form::FullPull {
            // For the kept index, which comes next.
            self.thaw(&["image", "pull", "--full", &reference])?;
        }
        Ok(())
    }

    /// Leaves of an image what is not file data: tree and index.
    fn evict(&self, reference: &str) -> io::Result<()> {
        self.thaw(&["image", "prune", reference])
    }

    /// A start: milliseconds since `start` until the expected line.
    fn start(&self, subject: &Subject, reference: &str, options: &[&str], start: u64) -> io::Result<f64> {
        let mut arguments = vec!["run", "--rm", "--network", "none"];
        arguments.extend(options);
        arguments.extend([reference, "sh", "-c", subject.script]);
        let mut child = self.command(&arguments).spawn()?;
        let limit = limit(&child, format!("thaw {}", arguments.join(" ")));
        let mut errors = child.stderr.take();
        let mut said = None;
        for line in io::BufReader::new(
            child
                .stdout
                .take()
                .into_iter()
                .next()
                .ok_or(io::ErrorKind::BrokenPipe)?,
        )
        .lines()
        {
            if line?.contains(subject.expected) && said.is_none() {
                said = Some(us_since(start) / 1e3);
            }
        }
        let mut stderr = Vec::new();
        if let Some(errors) = &mut errors {
            errors.read_to_end(&mut stderr)?;
        }
        child.wait()?;
        drop(limit);
        said.ok_or_else(|| failed(&arguments, &stderr))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.thaw);
        command
            .args(arguments)
            .env("THAW_DATA", &self.data)
            .env("THAW_RUN", &self.run)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// How long a start may take. The lab's processor loses a guest now and then (tests/lab/README.md), which then never ends.
const LIMIT: Duration = Duration::from_secs(600);
/// The lab's exit code for a failure of its own: the same is measured in another.
const LAB_FAILED: i32 = 125;

/// Ends a process that takes longer, and this one. Dropped, it waits no more.
fn limit(child: &Child, what: String) -> mpsc::Sender<()> {
    let (done, waits) = mpsc::channel();
    let pid = Pid::from_child(child);
    std::thread::spawn(move || {
        if waits.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            eprintln!("bench-image: {what}: no end in {} s", LIMIT.as_secs());
            let _ = kill_process(pid, Signal::KILL);
            std::process::exit(LAB_FAILED);
        }
    });
    done
}

fn failed(arguments: &[&str], stderr: &[u8]) -> io::Error {
    let tail = String::from_utf8_lossy(stderr);
    let tail: Vec<_> = tail.lines().rev().take(5).collect();
    let tail: Vec<_> = tail.into_iter().rev().collect();
    io::Error::other(format!("thaw {}: {}", arguments.join(" "), tail.join("; ")))
}

/// The ratios of the image of 1 GiB. The first two are of the slowest and of the hungriest form that has an index.
///
/// # Errors
/// Names the samples that are missing.
pub fn ratios(report: &mut Report) -> Result<(), String> {
    let median = |report: &Report, row: &str| report.percentile((row, 50.0));
    let full = row(PADDED, Form::FullPull, "cold");
    if median(report, &full).is_err() {
        return Ok(());
    }
    let (full_ms, full_bytes) = (median(report, &full)?, median(report, &fetched(&full))?);
    let (mut slowest, mut hungriest) = (0f64, 0f64);
    for (form, name) in [
        (Form::Soci, "soci"),
        (Form::Kept, "kept"),
        (Form::Converted, "converted"),
        (Form::Estargz, "estargz"),
    ] {
        let cold = row(PADDED, form, "cold");
        let time = median(report, &cold)? / full_ms;
        report.ratios.insert(format!("{name}_over_full_1g"), time);
        if form != Form::Estargz {
            slowest = slowest.max(time);
            hungriest = hungriest.max(median(report, &fetched(&cold))? / full_bytes);
        }
    }
    report.ratios.insert("lazy_over_full_1g".into(), slowest);
    report.ratios.insert("bytes_share_1g".into(), hungriest);
    let unindexed = median(report, &row(PADDED, Form::Unindexed, "cold"))?;
    report
        .ratios
        .insert("unindexed_over_full_1g".into(), unindexed / full_ms);
    Ok(())
}
