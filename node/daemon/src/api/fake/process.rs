//! Fake processes: they need no guest.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::error::Error;
use tokio::sync::{mpsc, watch};

use super::Counts;
use crate::api::kept::{Processes, Said};
use crate::api::problem::Refusal;
use crate::api::process::Process;
use thaw_protocol::agent::processes::ProcessInfo;

/// A process whose program's name controls it. `cat` writes its input and ends with it; `yes` writes for ever; `stubborn` does nothing, and
/// ends only by SIGKILL; `bytes` writes invalid UTF-8 and ends with 3; `much` writes more than an answer holds.
#[derive(Debug)]
pub struct FakeProcess {
    endless: bool,
    stubborn: bool,
    counts: Arc<Counts>,
    /// Its end of stdout, until it ends.
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
    fn id(&self) -> String {
        "x".into()
    }

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

    async fn write(&self, data: Vec<u8>) -> Result<(), Error> {
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

    async fn wait(&self) -> Result<i32, Error> {
        let mut ended = self.ended.subscribe();
        let code = *ended.wait_for(Option::is_some).await.unwrap();
        Ok(code.unwrap())
    }
}

/// One kept process, `x`, which wrote two pieces with a gap between them, and ended.
#[derive(Debug)]
pub struct FakeProcesses;

#[async_trait]
impl Processes for FakeProcesses {
    async fn list(&self) -> Result<Vec<ProcessInfo>, Refusal> {
        let info = |id: &str, kept, ended| ProcessInfo {
            exec_id: id.into(),
            command: vec!["sleep".into()],
            pid: 7,
            kept,
            ended,
            exit_code: 3,
            ..Default::default()
        };
        Ok(vec![info("x", true, true), info("y", false, false)])
    }

    async fn keep(&self, _: &str) -> Result<(), Refusal> {
        Ok(())
    }

    async fn output(&self, _: &str, offset: u64) -> Result<Said, Refusal> {
        Ok(match offset {
            0..5 => Said::Wrote {
                offset,
                is_stderr: false,
                data: b"hello"[offset as usize..].to_vec(),
            },
            5..12 => Said::Wrote {
                offset: 10,
                is_stderr: true,
                data: vec![0xff, 0],
            },
            _ => Said::Ended(3),
        })
    }

    async fn write(&self, _: &str, _: &[u8]) -> Result<(), Refusal> {
        Ok(())
    }

    async fn close_stdin(&self, _: &str) -> Result<(), Refusal> {
        Ok(())
    }

    async fn signal(&self, _: &str, _: u8) -> Result<(), Refusal> {
        Ok(())
    }

    async fn resize(&self, _: &str, _: u16, _: u16) -> Result<(), Refusal> {
        Ok(())
    }
}
