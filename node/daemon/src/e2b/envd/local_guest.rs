//! A guest for tests: its processes are real ones of this host, its files are below a temporary directory.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use thaw_protocol::agent::processes::ProcessInfo;
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::{Error, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStdin, Command};
use tokio::sync::watch;

use super::local_files::LocalFiles;
use crate::api::fake::Guest;
use crate::api::files::Files;
use crate::api::kept::{Processes, Said};
use crate::api::problem::{ApiCode, Refusal};
use crate::api::process::Process;

type Pipe = tokio::sync::Mutex<Box<dyn AsyncRead + Send + Unpin>>;

/// Pieces of output; true: of its standard error.
type KeptOutput = Vec<(bool, Vec<u8>)>;

/// A process of this host.
pub struct LocalProcess {
    id: String,
    pid: u32,
    command: Vec<String>,
    stdin: tokio::sync::Mutex<Option<ChildStdin>>,
    outputs: [Pipe; 2],
    ended: watch::Receiver<Option<i32>>,
    /// Its kept output, once that is kept.
    kept: watch::Sender<Option<KeptOutput>>,
}

impl std::fmt::Debug for LocalProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalProcess {}", self.pid)
    }
}

/// The processes and files.
#[derive(Debug)]
pub struct LocalGuest {
    root: tempfile::TempDir,
    processes: Arc<LocalProcesses>,
}

#[derive(Debug, Default)]
pub struct LocalProcesses {
    by_id: Mutex<BTreeMap<String, Arc<LocalProcess>>>,
    /// The sizes that terminals were given.
    pub sizes: Mutex<Vec<(u16, u16)>>,
    /// Whether the guest keeps no more output.
    pub is_full: std::sync::atomic::AtomicBool,
}

impl Default for LocalGuest {
    fn default() -> LocalGuest {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        std::fs::create_dir_all(root.path().join("root")).unwrap();
        let passwd = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n";
        std::fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        std::fs::write(root.path().join("etc/group"), "root:x:0:\n").unwrap();
        LocalGuest {
            root,
            processes: Arc::default(),
        }
    }
}

impl LocalGuest {
    pub fn root(&self) -> &std::path::Path {
        self.root.path()
    }

    pub fn local_processes(&self) -> &LocalProcesses {
        &self.processes
    }
}

/// A command on a terminal, which `script` makes.
fn on_terminal(command: &[String]) -> Command {
    let quoted = command
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    let mut script = Command::new("script");
    script.args(["-qfec", &quoted.collect::<Vec<_>>().join(" "), "/dev/null"]);
    script
}

#[async_trait]
impl Guest for LocalGuest {
    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Error> {
        let mut command = match options.tty {
            true => on_terminal(&options.command),
            false => {
                let mut command = Command::new(&options.command[0]);
                command.args(&options.command[1..]);
                command
            }
        };
        let workdir = options.workdir.as_deref().unwrap_or("/");
        let below = self.root().join(workdir.trim_start_matches('/'));
        // What a command has made is in the host's directories.
        let workdir = if below.is_dir() { below } else { workdir.into() };
        command.current_dir(workdir).kill_on_drop(true);
        command.envs(options.env.iter().filter_map(|entry| entry.split_once('=')));
        if let Some(user) = &options.user {
            command.env("LOCAL_USER", user);
        }
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let not_found = |e| {
            Error::new(
                ErrorKind::NotFound,
                format!("exec: {:?}: {e}", options.command[0]),
            )
        };
        let mut child = command.spawn().map_err(not_found)?;
        let pid = child.id().unwrap();
        let (ends, ended) = watch::channel(None);
        let process = Arc::new(LocalProcess {
            id: format!("exec{pid}"),
            pid,
            command: options.command,
            stdin: child.stdin.take().into(),
            outputs: [
                tokio::sync::Mutex::new(Box::new(child.stdout.take().unwrap())),
                tokio::sync::Mutex::new(Box::new(child.stderr.take().unwrap())),
            ],
            ended,
            kept: watch::Sender::new(None),
        });
        tokio::spawn(async move {
            let status = child.wait().await.unwrap();
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
            ends.send_replace(Some(code));
        });
        let mut by_id = self.processes.by_id.lock().unwrap();
        by_id.insert(process.id.clone(), process.clone());
        Ok(process)
    }

    fn processes(&self) -> Arc<dyn Processes> {
        self.processes.clone()
    }

    fn files(&self) -> Arc<dyn Files> {
        Arc::new(LocalFiles::below(self.root()))
    }
}

impl LocalProcess {
    async fn read_pipe(&self, output: Output) -> Option<Vec<u8>> {
        let mut pipe = self.outputs[output as usize].lock().await;
        let mut data = vec![0; 64 << 10];
        let read = pipe.read(&mut data).await.unwrap_or(0);
        data.truncate(read);
        (read > 0).then_some(data)
    }

    async fn send(&self, data: &[u8]) -> std::io::Result<()> {
        match &mut *self.stdin.lock().await {
            Some(stdin) => stdin.write_all(data).await,
            None => Err(std::io::Error::other("stdin is closed")),
        }
    }

    fn kill(&self, number: u8) {
        let pid = rustix::process::Pid::from_raw(self.pid as i32).unwrap();
        let signal = rustix::process::Signal::from_named_raw(number.into()).unwrap();
        let _ = rustix::process::kill_process(pid, signal);
    }

    async fn end(&self) -> i32 {
        let mut ended = self.ended.clone();
        let code = *ended.wait_for(Option::is_some).await.unwrap();
        code.unwrap()
    }
}

#[async_trait]
impl Process for LocalProcess {
    fn id(&self) -> String {
        self.id.clone()
    }

    async fn read(&self, output: Output) -> Option<Vec<u8>> {
        let mut kept = self.kept.subscribe();
        tokio::select! {
            // The guest reads it from then on.
            _ = kept.wait_for(Option::is_some) => None,
            data = self.read_pipe(output) => data,
        }
    }

    async fn write(&self, data: Vec<u8>) -> Result<(), Error> {
        self.send(&data).await.map_err(|e| Error::system("write", &e))
    }

    async fn close_stdin(&self) {
        self.stdin.lock().await.take();
    }

    async fn resize(&self, _: u16, _: u16) {}

    async fn signal(&self, number: u8) {
        self.kill(number);
    }

    async fn wait(&self) -> Result<i32, Error> {
        Ok(self.end().await)
    }
}

impl LocalProcesses {
    fn find(&self, id: &str) -> Result<Arc<LocalProcess>, Refusal> {
        let found = self.by_id.lock().unwrap().get(id).cloned();
        found.ok_or_else(|| Refusal::new(ApiCode::NoProcess, id))
    }
}

#[async_trait]
impl Processes for LocalProcesses {
    async fn list(&self) -> Result<Vec<ProcessInfo>, Refusal> {
        let by_id = self.by_id.lock().unwrap();
        let info = |process: &Arc<LocalProcess>| ProcessInfo {
            exec_id: process.id.clone(),
            command: process.command.clone(),
            pid: process.pid as i32,
            kept: process.kept.borrow().is_some(),
            ended: process.ended.borrow().is_some(),
            ..Default::default()
        };
        Ok(by_id.values().map(info).collect())
    }

    async fn keep(&self, id: &str) -> Result<(), Refusal> {
        let process = self.find(id)?;
        if self.is_full.load(std::sync::atomic::Ordering::SeqCst) || process.kept.borrow().is_some() {
            return Err(Refusal::new(ApiCode::ProcessRefused, "not kept"));
        }
        process.kept.send_replace(Some(Vec::new()));
        for output in [Output::Stdout, Output::Stderr] {
            let process = process.clone();
            tokio::spawn(async move {
                while let Some(data) = process.read_pipe(output).await {
                    process
                        .kept
                        .send_modify(|kept| kept.as_mut().unwrap().push((output == Output::Stderr, data)));
                }
            });
        }
        Ok(())
    }

    async fn output(&self, id: &str, offset: u64) -> Result<Said, Refusal> {
        let process = self.find(id)?;
        let mut kept = process.kept.subscribe();
        if kept.borrow().is_none() {
            return Err(Refusal::new(ApiCode::ProcessRefused, "not kept"));
        }
        let find = |pieces: &[(bool, Vec<u8>)]| {
            let mut at = 0;
            for (is_stderr, data) in pieces {
                if at >= offset {
                    let (offset, data) = (at, data.clone());
                    return Some(Said::Wrote {
                        offset,
                        is_stderr: *is_stderr,
                        data,
                    });
                }
                at += data.len() as u64;
            }
            None
        };
        loop {
            if let Some(said) = find(kept.borrow_and_update().as_ref().unwrap()) {
                return Ok(said);
            }
            tokio::select! {
                biased;
                _ = kept.changed() => {}
                code = async {
                    let code = process.end().await;
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    code
                } => return Ok(Said::Ended(code)),
            }
        }
    }

    async fn write(&self, id: &str, data: &[u8]) -> Result<(), Refusal> {
        let written = self.find(id)?.send(data).await;
        written.map_err(|e| Refusal::new(ApiCode::ProcessRefused, e))
    }

    async fn close_stdin(&self, id: &str) -> Result<(), Refusal> {
        self.find(id)?.close_stdin().await;
        Ok(())
    }

    async fn signal(&self, id: &str, number: u8) -> Result<(), Refusal> {
        self.find(id)?.kill(number);
        Ok(())
    }

    async fn resize(&self, id: &str, rows: u16, columns: u16) -> Result<(), Refusal> {
        self.find(id)?;
        self.sizes.lock().unwrap().push((rows, columns));
        Ok(())
    }
}
