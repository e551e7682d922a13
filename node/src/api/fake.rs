//! A maker without machines, for tests: it counts what lives.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_protocol::api::{Account, CreateSandbox, FreezeSandbox, FrozenSandbox, ThawSandbox};
use tokio::sync::{mpsc, watch};

use super::daemon::Daemon;
use super::maker::{Condition, Machine, Made, Maker};
use super::files::{Files, PIECE, Piece, Upload};
use super::problem::{ApiCode, Refusal};
use super::process::Process;
use super::watch::Versions;
use crate::agent_client::Output;
use crate::container::Options;
use crate::exit::{ExitCode, Failure};
use crate::journal::Journal;
use crate::sandbox::{Terms, Timeout};
use crate::state::Record;

/// What a fake maker has done.
#[derive(Debug, Default)]
pub struct Counts {
    pub living: AtomicUsize,
    pub made: AtomicUsize,
    /// What was done to processes, by those that lasted.
    pub heard: watch::Sender<Vec<String>>,
}

impl Counts {
    fn hear(&self, what: impl Into<String>) {
        self.heard.send_modify(|heard| heard.push(what.into()));
    }
}

/// Makes machines that are none, as soon as it may.
#[derive(Debug)]
pub struct Fake {
    pub counts: Arc<Counts>,
    /// How many are being made.
    pub making: watch::Sender<usize>,
    /// Whether a making may end.
    pub open: watch::Sender<bool>,
    /// What all containers ended with.
    pub exit: watch::Sender<Option<i32>>,
    /// Those of all containers.
    pub files: Arc<FakeFiles>,
}

impl Fake {
    /// A daemon of it.
    pub fn daemon(open: bool) -> (Arc<Fake>, Arc<Daemon>) {
        let fake = Arc::new(Fake {
            counts: Arc::default(),
            making: watch::Sender::new(0),
            open: watch::Sender::new(open),
            exit: watch::Sender::new(None),
            files: Arc::default(),
        });
        let daemon = Daemon::new(Some(fake.clone()), Versions::of_clock());
        (fake, daemon)
    }

    pub fn living(&self) -> usize {
        self.counts.living.load(Ordering::SeqCst)
    }

    pub fn made(&self) -> usize {
        self.counts.made.load(Ordering::SeqCst)
    }
}

struct Making<'a>(&'a Fake);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.making.send_modify(|making| *making -= 1);
    }
}

#[async_trait]
impl Maker for Fake {
    async fn create(&self, request: CreateSandbox) -> Result<Made, Refusal> {
        self.making.send_modify(|making| *making += 1);
        let _making = Making(self);
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        if request.image == "missing" {
            return Err(Failure::new(ExitCode::ImageNotFound, "no image: missing").into());
        }
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let terms = Terms {
            labels: request.labels,
            timeout: request.timeout_s.map(Timeout::after),
        };
        let mut machine = FakeMachine::new(number, request.name, terms, self.counts.clone());
        if request.container.is_some() {
            let directory = tempfile::tempdir().unwrap();
            let journal = Arc::new(Journal::open(directory.path()).unwrap());
            machine.output = Some((journal, directory));
            machine.exit = self.exit.subscribe();
        }
        machine.files = self.files.clone();
        Ok(Made {
            machine: Arc::new(machine),
            image_config: "null".into(),
            account: Account::default(),
        })
    }

    async fn thaw(&self, _: ThawSandbox) -> Result<Made, Refusal> {
        Err(Failure::new(ExitCode::SnapshotNotFound, "no snapshot").into())
    }
}

/// A machine that is none.
#[derive(Debug)]
pub struct FakeMachine {
    record: Record,
    counts: Arc<Counts>,
    paused: AtomicBool,
    ended: watch::Sender<bool>,
    released: AtomicBool,
    files: Arc<FakeFiles>,
    /// Of its container, where it has one.
    output: Option<(Arc<Journal>, tempfile::TempDir)>,
    exit: watch::Receiver<Option<i32>>,
}

impl FakeMachine {
    pub fn new(number: usize, name: Option<String>, terms: Terms, counts: Arc<Counts>) -> FakeMachine {
        counts.living.fetch_add(1, Ordering::SeqCst);
        let record = serde_json::json!({
            "id": format!("{number:012x}"), "name": name, "image": "fake", "image_digest": null, "command": [],
            "created": 1, "owner": null, "client": null, "vmm": null, "tethered": false, "ready": true, "vcpus": 1,
            "memory_mib": 128, "terms": terms,
        });
        FakeMachine {
            record: serde_json::from_value(record).unwrap(),
            counts,
            paused: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            released: AtomicBool::new(false),
            files: Arc::default(),
            output: None,
            exit: watch::Sender::new(None).subscribe(),
        }
    }
}

impl Drop for FakeMachine {
    fn drop(&mut self) {
        if !self.released.load(Ordering::SeqCst) {
            self.counts.living.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[async_trait]
impl Machine for FakeMachine {
    fn record(&self) -> &Record {
        &self.record
    }

    fn vsock(&self) -> PathBuf {
        "/fake".into()
    }

    async fn condition(&self) -> Condition {
        match (*self.ended.borrow(), self.paused.load(Ordering::SeqCst)) {
            (true, _) => Condition::Ended("it was killed".into()),
            (false, true) => Condition::Paused,
            (false, false) => Condition::Running,
        }
    }

    fn end(&self) -> BoxFuture<'static, String> {
        let mut ended = self.ended.subscribe();
        Box::pin(async move {
            let _ = ended.wait_for(|ended| *ended).await;
            "it was killed".into()
        })
    }

    async fn pause(&self) -> Result<(), Failure> {
        self.paused.store(true, Ordering::SeqCst);
        Ok(())
    }

    async fn resume(&self) -> Result<(), Failure> {
        self.paused.store(false, Ordering::SeqCst);
        Ok(())
    }

    async fn freeze(&self, _: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        Ok(FrozenSandbox {
            memory_bytes: 1,
            paused_ns: 2,
        })
    }

    fn journal(&self) -> Option<Arc<Journal>> {
        self.output.as_ref().map(|(journal, _)| journal.clone())
    }

    fn exit(&self) -> BoxFuture<'static, i32> {
        let mut exit = self.exit.clone();
        Box::pin(async move {
            let status = exit.wait_for(Option::is_some).await.map(|status| *status);
            match status {
                Ok(Some(status)) => status,
                _ => std::future::pending().await,
            }
        })
    }

    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Failure> {
        match options.command[0].as_str() {
            "missing" => Err(Failure::new(ExitCode::NotFound, "exec: \"missing\": not found")),
            program => Ok(Arc::new(FakeProcess::start(program, self.counts.clone()))),
        }
    }

    async fn files(&self) -> Result<Arc<dyn Files>, Failure> {
        Ok(self.files.clone())
    }

    fn kill(&self) {
        self.ended.send_replace(true);
    }

    async fn destroy(self: Arc<Self>) {}

    fn release(self: Arc<Self>) -> bool {
        self.released.store(true, Ordering::SeqCst);
        Arc::into_inner(self).is_some()
    }
}

/// A process that is none. By its program: `cat` writes what it reads and ends with its input; `yes` writes for ever;
/// `stubborn` does nothing, and ends by SIGKILL alone; `bytes` writes what is no text and ends with 3; `much` writes more than
/// an answer holds.
#[derive(Debug)]
pub struct FakeProcess {
    endless: bool,
    stubborn: bool,
    counts: Arc<Counts>,
    /// Its own end of stdout, until it ends.
    writes: Mutex<Option<mpsc::Sender<Vec<u8>>>>,
    stdout: tokio::sync::Mutex<mpsc::Receiver<Vec<u8>>>,
    stderr: Mutex<Option<Vec<u8>>>,
    ended: watch::Sender<Option<i32>>,
}

impl FakeProcess {
    pub fn start(program: &str, counts: Arc<Counts>) -> FakeProcess {
        let (writes, stdout) = mpsc::channel(64);
        let process = FakeProcess {
            endless: program == "yes",
            stubborn: program == "stubborn",
            counts,
            writes: Mutex::new(Some(writes.clone())),
            stdout: stdout.into(),
            stderr: Mutex::default(),
            ended: watch::Sender::new(None),
        };
        match program {
            "bytes" => {
                writes.try_send(vec![0xff, 0]).unwrap();
                *process.stderr.lock().unwrap() = Some(b"err".to_vec());
                process.end(3);
            }
            "much" => {
                for _ in 0..40 {
                    writes.try_send("é".repeat(5001).into()).unwrap();
                }
                process.end(0);
            }
            _ => {}
        }
        process
    }

    fn end(&self, code: i32) {
        self.writes.lock().unwrap().take();
        self.ended.send_replace(Some(code));
    }
}

#[async_trait]
impl Process for FakeProcess {
    async fn read(&self, output: Output) -> Option<Vec<u8>> {
        if output == Output::Stderr {
            return self.stderr.lock().unwrap().take();
        }
        if self.endless && self.ended.borrow().is_none() {
            tokio::task::yield_now().await;
            return Some(vec![b'y'; 64 << 10]);
        }
        self.stdout.lock().await.recv().await
    }

    async fn write(&self, data: Vec<u8>) -> Result<(), Failure> {
        let writes = self.writes.lock().unwrap().clone();
        match writes {
            Some(writes) if !self.stubborn => drop(writes.send(data).await),
            _ => std::future::pending().await,
        }
        Ok(())
    }

    async fn close_stdin(&self) {
        if !self.stubborn && !self.endless {
            self.end(0);
        }
    }

    async fn resize(&self, rows: u16, columns: u16) {
        self.counts.hear(format!("size {rows} {columns}"));
    }

    async fn signal(&self, number: u8) {
        self.counts.hear(format!("signal {number}"));
        if !self.stubborn || i32::from(number) == libc::SIGKILL {
            self.end(128 + i32::from(number));
        }
    }

    async fn wait(&self) -> Result<i32, Failure> {
        let mut ended = self.ended.subscribe();
        let code = *ended.wait_for(Option::is_some).await.unwrap();
        Ok(code.unwrap())
    }
}

/// Files that are none, and what is being written.
#[derive(Debug, Default)]
pub struct FakeFiles {
    whole: Mutex<BTreeMap<String, Vec<u8>>>,
    parts: watch::Sender<BTreeMap<String, Vec<u8>>>,
}

#[async_trait]
impl Files for FakeFiles {
    async fn read(&self, path: &str, offset: u64, identity: u64) -> Result<Piece, Refusal> {
        assert_eq!(identity, if offset == 0 { 0 } else { 7 });
        let whole = self.whole.lock().unwrap();
        let file = whole.get(path).ok_or_else(|| Refusal::new(ApiCode::NoFile, path))?;
        let from = file.len().min(offset as usize);
        Ok(Piece {
            data: file[from..file.len().min(from + PIECE)].to_vec(),
            // As files in /proc do.
            size: if path.starts_with("/proc") { 0 } else { file.len() as u64 },
            mode: 0o640,
            identity: 7,
        })
    }

    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal> {
        if upload.path.starts_with("/full") && offset > 0 {
            return Err(Refusal::new(ApiCode::NoRoom, "no room"));
        }
        let mut file = Vec::new();
        self.parts.send_modify(|parts| {
            file = parts.remove(&upload.name).unwrap_or_default();
            assert_eq!(file.len() as u64, offset);
            file.extend(data);
            if !last {
                parts.insert(upload.name.clone(), std::mem::take(&mut file));
            }
        });
        if last {
            self.whole.lock().unwrap().insert(upload.path.clone(), file);
        }
        Ok(())
    }

    async fn abandon(&self, upload: &Upload) {
        self.parts.send_modify(|parts| drop(parts.remove(&upload.name)));
    }
}

impl FakeFiles {
    /// How many files are being written.
    pub fn uploads(&self) -> watch::Receiver<BTreeMap<String, Vec<u8>>> {
        self.parts.subscribe()
    }
}

/// A request for one.
pub fn request(image: &str) -> CreateSandbox {
    serde_json::from_value(serde_json::json!({"image": image, "cpus": 1, "memory_mib": 128})).unwrap()
}
