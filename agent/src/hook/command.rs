//! The command of a hook.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_sys::lock::Lock;
use tokio::time::{timeout, timeout_at};

use super::{Ended, Limit, MAX_OUTPUT, Outcome};
use crate::container::process::Process;
use crate::reaper::{ExitCode, Reaper};
use crate::stdio::{Output, Reader};
use crate::warning;

/// Most bytes of one read.
const PIECE: usize = 64 << 10;
/// How long output is read after the process has ended, and how long a killed process may take to end: another process may hold its
/// streams open.
const LINGERS: Duration = Duration::from_millis(500);

/// Waits for the end of a hook's process. At the deadline, kills its process group.
pub async fn finish(process: Process, reaper: &Arc<Reaper>, limit: Limit) -> Ended {
    process.stdio.close_stdin();
    let (process, tail) = (Arc::new(process), Arc::new(Mutex::new(Tail::default())));
    let mut reading = tokio::spawn(read(process.clone(), tail.clone()));
    let outcome = match timeout_at(limit.deadline, process.wait()).await {
        Ok(0) => Outcome::Succeeded,
        Ok(code) => Outcome::Failed(describe(code)),
        Err(_) => {
            if let Err(e) = process.kill_group(reaper) {
                warning!("a hook that took too long was not killed: {e}");
            }
            let _ = timeout(LINGERS, process.wait()).await;
            Outcome::TimedOut(format!("it did not end within {} ms, and was killed", limit.ms))
        }
    };
    let _ = timeout(LINGERS, &mut reading).await;
    reading.abort();
    process.stdio.close();
    let output = std::mem::take(&mut *tail.locked()).last();
    Ended { outcome, output }
}

fn describe(code: ExitCode) -> String {
    match code {
        129.. => format!("it was ended by signal {}", code - 128),
        code => format!("it exited with {code}"),
    }
}

async fn read(process: Arc<Process>, tail: Arc<Mutex<Tail>>) {
    let pump = async |output| {
        // Its own allocation is its identity.
        let reader: Reader = Arc::new(0_u8);
        while let Ok(data) = process.stdio.read(output, &reader, PIECE).await {
            tail.locked().push(&data);
        }
    };
    tokio::join!(pump(Output::Stdout), pump(Output::Stderr));
}

/// The last bytes of an output.
#[derive(Debug, Default)]
struct Tail(Vec<u8>);

impl Tail {
    fn push(&mut self, data: &[u8]) {
        let data = &data[data.len().saturating_sub(MAX_OUTPUT)..];
        self.0.extend_from_slice(data);
        let excess = self.0.len().saturating_sub(MAX_OUTPUT);
        self.0.drain(..excess);
    }

    fn last(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_keeps_the_last_bytes() {
        let mut tail = Tail::default();
        tail.push(b"first");
        tail.push(&[b'x'; MAX_OUTPUT - 1]);
        tail.push(b"y");
        assert!(tail.0.len() == MAX_OUTPUT && tail.0.starts_with(b"x") && tail.0.ends_with(b"xy"));
        tail.push(&[b'z'; 3 * MAX_OUTPUT]);
        assert_eq!(tail.last(), [b'z'; MAX_OUTPUT]);
    }

    #[test]
    fn exit_codes_are_told_from_signals() {
        assert_eq!(describe(3), "it exited with 3");
        assert_eq!(describe(128 + 9), "it was ended by signal 9");
    }
}
