//! `make bench-image`: starts of images in each form, file systems in a guest, deduplication; a report of each.
//!
//! `bench-image DIRECTORY [--rounds N] [--images NAME,…] [--guest-rounds N]`: DIRECTORY holds what `tests/bench/images`
//! made, mounted. Starts are added to those of this machine and commit that target/bench has.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use thaw_bench::image::guest::{self, Setting};
use thaw_bench::image::starts::{Form, Node, SUBJECTS, Subject, ratios};
use thaw_bench::image::{BYTES, GUEST, STARTS};
use thaw_bench::{Report, table};
use thaw_images::store::Store;

/// Where reports are left.
const RESULTS: &str = "target/bench";

fn main() -> ExitCode {
    match measure() {
        Ok(reports) => {
            for report in &reports {
                print!("{}", table::terminal(report));
            }
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("bench-image: {why}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    made: PathBuf,
    rounds: usize,
    guest_rounds: usize,
    images: Vec<String>,
}

impl Options {
    fn wants(&self, image: &str) -> bool {
        self.images.iter().any(|wanted| wanted == image)
    }
}

fn options() -> Result<Options, String> {
    let mut words = std::env::args().skip(1);
    let made = words.next().ok_or("usage: bench-image DIRECTORY [OPTIONS]")?;
    let mut options = Options {
        made: made.into(),
        rounds: 3,
        guest_rounds: 3,
        images: SUBJECTS.iter().map(|s| s.name.to_string()).collect(),
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} needs a value"))?;
        let number = || value.parse().map_err(|e| format!("{word} {value}: {e}"));
        match word.as_str() {
            "--rounds" => options.rounds = number()?,
            "--guest-rounds" => options.guest_rounds = number()?,
            "--images" => options.images = value.split(',').map(str::to_string).collect(),
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(options)
}

fn measure() -> Result<Vec<Report>, String> {
    let options = options()?;
    let variable = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .ok_or(format!("{name} is not set: run this through `make bench-image`"))
    };
    let (binaries, kernel) = (variable("THAW_BIN")?, variable("THAW_KERNEL")?);
    let place = variable("THAW_DATA")
        .ok()
        .and_then(|p| Some(p.parent()?.to_path_buf()));
    let directory = tempfile::tempdir_in(place.unwrap_or_else(std::env::temp_dir))
        .map_err(|e| format!("no temporary directory: {e}"))?;
    let upstream = Upstream::start(&options.made.join("registry"), directory.path())
        .map_err(|e| format!("docker-registry: {e}"))?;
    let node = Node::new(&binaries, directory.path(), &upstream.host).map_err(|e| format!("a node: {e}"))?;
    let mut reports = Vec::new();
    let mut done = |mut report: Report| -> Result<(), String> {
        // What was measured is kept, whatever comes after.
        report
            .write(Path::new(RESULTS))
            .map_err(|e| format!("cannot write {RESULTS}: {e}"))?;
        reports.push(report);
        Ok(())
    };
    if SUBJECTS.iter().any(|s| options.wants(s.name)) {
        let mut report = Report::resume(STARTS, Path::new(RESULTS))
            .map_err(|e| format!("cannot read what {RESULTS} has: {e}"))?;
        starts(&options, &node, &mut report)?;
        done(report)?;
    }
    let mut report = Report::new(BYTES);
    deduplication(&options.made, &mut report).map_err(|e| format!("deduplication: {e}"))?;
    done(report)?;
    if options.guest_rounds > 0 {
        let mut report = Report::new(GUEST);
        file_systems(&options, &node, &binaries, &kernel, directory.path(), &mut report)
            .map_err(|e| format!("file systems in a guest: {e}"))?;
        guest::ratios(&mut report)?;
        done(report)?;
    }
    Ok(reports)
}

fn starts(options: &Options, node: &Node, report: &mut Report) -> Result<(), String> {
    for subject in SUBJECTS.iter().filter(|s| options.wants(s.name)) {
        for number in 1..=options.rounds {
            for form in Form::ALL {
                round(node, subject, form, report)
                    .map_err(|e| format!("{}, {}, round {number}: {e}", subject.name, form.name()))?;
            }
        }
    }
    ratios(report)
}

/// One round. Where the lab's processor loses a guest (`tests/lab/README.md`) the round is run again, twice at most, and
/// that is said; what was sampled of it before stays.
fn round(node: &Node, subject: &Subject, form: Form, report: &mut Report) -> io::Result<()> {
    for _ in 0..2 {
        match node.round(subject, form, report) {
            Err(lost)
                if std::env::var_os("THAW_LAB").is_some() && lost.to_string().contains("triple fault") =>
            {
                eprintln!("bench-image: the lab's processor lost a guest, the round is run again: {lost}");
                if form == Form::Kept {
                    let reference = node.reference(subject.name, "latest");
                    node.thaw(&["image", "pull", "--full", &reference])?;
                }
            }
            result => return result,
        }
    }
    node.round(subject, form, report)
}

fn file_systems(
    options: &Options,
    node: &Node,
    binaries: &Path,
    kernel: &Path,
    directory: &Path,
    report: &mut Report,
) -> io::Result<()> {
    node.forget()?;
    node.thaw(&["image", "pull", "--full", &node.reference("tree", "latest")])?;
    let store = Store::open(&node.images()).map_err(io::Error::other)?;
    let images = store.images().map_err(io::Error::other)?;
    let image = images.first().ok_or(io::ErrorKind::NotFound)?;
    // Beside the store's files, on the same file system.
    let ext4 = directory.join("tree.ext4");
    std::fs::copy(options.made.join("tree.ext4"), &ext4)?;
    let program = binaries.join("bench-guest-files");
    let setting = Setting {
        kernel,
        program: &program,
        image,
        ext4: &ext4,
        directory,
    };
    guest::measure(&setting, options.guest_rounds, report)
}

/// What `tests/bench/images` counted.
fn deduplication(made: &Path, report: &mut Report) -> io::Result<()> {
    let counted: serde_json::Value = serde_json::from_slice(&std::fs::read(made.join("dedup.json"))?)?;
    let mut sample = |row: &str, key: &str| {
        let bytes = counted[key].as_f64().unwrap_or(0.0);
        report.sample(row, "MiB", bytes / f64::from(1 << 20));
    };
    let (layers, chunks) = ("five images stored: gzip layers", "five images stored: chunks");
    sample(layers, "layers");
    sample(chunks, "chunks");
    sample("one file changed, pushed: gzip layer", "change_layers");
    sample(
        "one file changed, pushed: chunks, with a dictionary",
        "change_chunks",
    );
    report
        .ratio("chunks_over_layers_stored", chunks, layers)
        .map_err(io::Error::other)
}

/// docker-registry, stopped when dropped.
struct Upstream {
    state: PathBuf,
    host: String,
}

impl Upstream {
    fn start(storage: &Path, directory: &Path) -> io::Result<Upstream> {
        let state = directory.join("registry");
        // Its own output would be kept open by the registry it leaves behind.
        let said = directory.join("registry.url");
        let started = Command::new("tests/images/registry")
            .arg("start")
            .env("THAW_REGISTRY_STATE", &state)
            .env("THAW_REGISTRY_STORAGE", storage)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&said)?)
            .status()?;
        let url = std::fs::read_to_string(said)?;
        match url.trim().split_once("://") {
            Some((_, host)) if started.success() => Ok(Upstream {
                state,
                host: host.into(),
            }),
            _ => Err(io::Error::other("it did not start")),
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = Command::new("tests/images/registry")
            .arg("stop")
            .env("THAW_REGISTRY_STATE", &self.state)
            .stdin(Stdio::null())
            .status();
    }
}
