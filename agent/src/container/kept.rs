//! The processes that ExecProcess started in a container, and those of them that outlive who started them.

use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::agent::processes::ProcessInfo;
use thaw_sys::lock::Lock;

use super::Container;
use super::journal::{Journal, Next, PIECE};
use super::process::Process;
use crate::error::{Error, Result};
use crate::stdio::{Output, Reader};

/// Most processes in a list, so that an answer stays small.
const MAX_LISTED: usize = 200;
/// Most bytes of a command in a list.
const MAX_COMMAND: usize = 1 << 10;
/// Most kept processes, ended ones included: each can hold the output of a journal.
const MAX_KEPT: usize = 32;

/// How long output is read after the process's end: another process may hold its streams open.
const LINGERS: Duration = Duration::from_secs(2);

impl Container {
    /// Its processes, by exec id.
    pub fn list(&self) -> Vec<ProcessInfo> {
        let execs = self.execs.locked();
        let there = execs
            .by_id
            .iter()
            .filter_map(|(id, process)| Some((id, process.as_ref()?)));
        there
            .take(MAX_LISTED)
            .map(|(id, process)| info(id, process))
            .collect()
    }

    /// Records the output of a process from here on. Must be called within the runtime.
    pub fn keep(self: &Arc<Self>, exec_id: &str) -> Result<()> {
        let process = self.exec_named(exec_id)?;
        self.make_room_for_kept()?;
        let journal = Arc::new(Journal::default());
        if process.journal.set(journal.clone()).is_err() {
            return Err(Error::State(format!("process {exec_id:?} is kept already")));
        }
        // Its own allocation is its identity.
        let reader: Reader = Arc::new(0_u8);
        // At once, not when the task below runs: a read that the host sent before may only now begin.
        process.stdio.read_last_by(&reader);
        let (container, id) = (Arc::downgrade(self), exec_id.to_owned());
        record(process, reader, journal, move || {
            // From now on it is one of the ended, of which only the last are remembered.
            if let Some(container) = container.upgrade() {
                container.reported(&id);
            }
        });
        Ok(())
    }

    /// The next output of a kept process.
    pub async fn kept_output(&self, exec_id: &str, offset: u64) -> Result<Next> {
        let process = self.exec_named(exec_id)?;
        let journal = process.journal.get().cloned();
        let not_kept = || Error::State(format!("the output of process {exec_id:?} is not kept"));
        journal.ok_or_else(not_kept)?.read(offset).await
    }

    /// A process that ExecProcess started.
    fn exec_named(&self, exec_id: &str) -> Result<Arc<Process>> {
        let named = self.execs.locked().by_id.get(exec_id).cloned().flatten();
        named.ok_or_else(|| Error::NoFile(format!("there is no process {exec_id:?}")))
    }

    /// Forgets the kept process that ended first, if there are too many.
    fn make_room_for_kept(&self) -> Result<()> {
        let mut execs = self.execs.locked();
        let is_kept =
            |process: &Option<Arc<Process>>| process.as_ref().is_some_and(|p| p.journal.get().is_some());
        if execs.by_id.values().filter(|process| is_kept(process)).count() < MAX_KEPT {
            return Ok(());
        }
        let ended = execs
            .reported
            .iter()
            .position(|id| execs.by_id.get(id).is_some_and(is_kept));
        let Some(ended) = ended else {
            return Err(Error::State(format!(
                "{MAX_KEPT} processes are kept already, and all run"
            )));
        };
        let id = execs.reported.remove(ended);
        execs.by_id.remove(&id);
        Ok(())
    }
}

fn info(id: &str, process: &Process) -> ProcessInfo {
    let exit_code = process.exit_code();
    let mut left = MAX_COMMAND;
    let command = process.command.iter().map_while(|argument| {
        left = left.checked_sub(argument.len() + 1)?;
        Some(argument.clone())
    });
    ProcessInfo {
        exec_id: id.into(),
        command: command.collect(),
        pid: exit_code.map_or_else(|| inner_pid(process.child.pid), |_| 0),
        kept: process.journal.get().is_some(),
        ended: exit_code.is_some(),
        exit_code: exit_code.unwrap_or(0),
        ..Default::default()
    }
}

/// A process's PID in its own PID namespace.
fn inner_pid(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let inner = line.and_then(|pids| pids.split_whitespace().last()?.parse().ok());
    inner.unwrap_or(0)
}

/// Reads the output of a process until it has ended. Must be called within the runtime.
fn record(
    process: Arc<Process>,
    reader: Reader,
    journal: Arc<Journal>,
    at_end: impl FnOnce() + Send + 'static,
) {
    tokio::spawn(async move {
        let ending = async {
            let code = process.wait().await;
            tokio::time::sleep(LINGERS).await;
            code
        };
        let outputs = async {
            tokio::join!(
                pump(&process, &reader, &journal, Output::Stdout),
                pump(&process, &reader, &journal, Output::Stderr)
            );
            process.wait().await
        };
        let code = tokio::select! {
            code = outputs => code,
            code = ending => code,
        };
        journal.finish(code);
        at_end();
    });
}

async fn pump(process: &Process, reader: &Reader, journal: &Journal, output: Output) {
    while let Ok(data) = process.stdio.read(output, reader, PIECE).await {
        journal.push(output, data);
    }
}
