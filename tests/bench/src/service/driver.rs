//! The Python program that takes times, of E2B's SDK and of the standard library alike, so that the interpreter is part of both.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use super::{Addresses, DOMAIN, KEY};

/// The program, and the server that it has run in a sandbox, below the repository's root, where a benchmark starts.
const PROGRAM: &str = "tests/bench/service/driver.py";
const SERVER: &str = "tests/bench/service/guest.py";

/// The program; killed when dropped. It says on stderr why it ended.
#[derive(Debug)]
pub struct Driver {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Driver {
    /// Starts it. PYTHONPATH leads to the SDK.
    pub(super) fn start(addresses: Addresses) -> Result<Driver, String> {
        let url = format!("http://{}", addresses.e2b);
        let mut child = Command::new("python3")
            .arg(PROGRAM)
            .args([addresses.e2b, addresses.api].map(|address| address.to_string()))
            .args([DOMAIN, SERVER])
            .envs([
                ("E2B_API_URL", &*url),
                ("E2B_SANDBOX_URL", &*url),
                ("E2B_API_KEY", KEY),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("python3 {PROGRAM}: {e}"))?;
        let answers = child.stdout.take().map(BufReader::new);
        Ok(Driver {
            requests: child.stdin.take(),
            answers: answers.ok_or("python3 has no output")?,
            child,
        })
    }

    /// Has it do this. Returns its answer, which it gives only if all was as it must be. Blocks.
    ///
    /// # Errors
    /// It ended.
    pub fn ask(&mut self, request: &Value) -> Result<Value, String> {
        let failed = |e: &dyn std::fmt::Display| format!("{PROGRAM}, asked to {request}: {e}");
        let requests = self.requests.as_mut().ok_or_else(|| failed(&"it has ended"))?;
        writeln!(requests, "{request}").map_err(|e| failed(&e))?;
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|e| failed(&e))?;
        match line.is_empty() {
            true => Err(failed(&"it ended; what it wrote to stderr says why")),
            false => serde_json::from_str(&line).map_err(|e| failed(&e)),
        }
    }

    /// The milliseconds that this took.
    pub fn ms(&mut self, request: &Value) -> Result<f64, String> {
        let answer = self.ask(request)?;
        ms(&answer)
    }

    /// Ends it.
    pub fn end(mut self) -> Result<(), String> {
        drop(self.requests.take());
        let status = self.child.wait().map_err(|e| format!("{PROGRAM}: {e}"))?;
        match status.success() {
            true => Ok(()),
            false => Err(format!("{PROGRAM}: {status}")),
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The milliseconds in an answer.
pub fn ms(answer: &Value) -> Result<f64, String> {
    let ms = answer["ms"].as_f64().filter(|ms| *ms > 0.0);
    ms.ok_or_else(|| format!("{PROGRAM} took no time: {answer}"))
}
