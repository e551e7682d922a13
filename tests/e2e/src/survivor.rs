//! A sandbox in which `thaw-probe survive` runs, attended: every line it prints, as it comes.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};

use serde_json::Value;

use crate::{PATIENCE, run, thaw};

/// The attended command and what its workload has said.
pub struct Survivor {
    /// The sandbox's.
    pub name: String,
    child: Child,
    lines: Receiver<String>,
    seen: Vec<Value>,
}

impl Survivor {
    /// Starts `command`, which makes the sandbox `name` and attends it (`thaw run`, `thaw thaw`).
    pub fn start(name: &str, command: &mut Command) -> Survivor {
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (said, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if said.send(line).is_err() {
                    break;
                }
            }
        });
        Survivor {
            name: name.to_owned(),
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// The next line; whatever is wrong in the guest fails the test here.
    pub fn next_line(&mut self) -> &Value {
        let Ok(line) = self.lines.recv_timeout(PATIENCE) else {
            self.ended()
        };
        let tick: Value =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("the workload broke: {line}"));
        if let Some(before) = self.seen.last() {
            assert_eq!(
                number(&tick, "tick"),
                number(before, "tick") + 1,
                "a line was lost or told twice: {before} {tick}"
            );
        }
        self.seen.push(tick);
        self.seen.last().unwrap()
    }

    /// Reads until `count` more lines have come.
    pub fn go_on(&mut self, count: usize) {
        for _ in 0..count {
            self.next_line();
        }
    }

    /// Reads until the line of this tick has come.
    pub fn reach(&mut self, tick: u64) {
        while self.seen.last().is_none_or(|last| number(last, "tick") < tick) {
            self.next_line();
        }
    }

    /// Reads what is on its way, until nothing has come for `quiet`. Lines come ten a second while the guest runs, so
    /// one that is running is never quiet for long, and this fails when it has said too much.
    pub fn drain(&mut self, quiet: std::time::Duration) {
        for _ in 0..200 {
            match self.lines.recv_timeout(quiet) {
                Ok(line) => self.seen.push(
                    serde_json::from_str(&line).unwrap_or_else(|_| panic!("the workload broke: {line}")),
                ),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => return,
                Err(_) => self.ended(),
            }
        }
        panic!("it goes on and on");
    }

    /// Every line so far.
    pub fn seen(&self) -> &[Value] {
        &self.seen
    }

    /// The last tick told.
    pub fn tick(&self) -> u64 {
        number(self.seen.last().expect("nothing was said yet"), "tick")
    }

    /// The line of a tick.
    pub fn at(&self, tick: u64) -> Option<&Value> {
        self.seen.iter().find(|line| number(line, "tick") == tick)
    }

    /// Removes the sandbox and waits until the attending command has ended.
    pub fn remove(mut self) {
        run(&mut thaw(&["rm", &self.name])).ok();
        self.wait();
    }

    /// Waits until the attending command has ended.
    pub fn wait(&mut self) {
        // Its pipe is read to the end first, so that it never waits for us.
        let mut error = String::new();
        let _ = self.child.stderr.take().unwrap().read_to_string(&mut error);
        let status = self.child.wait().unwrap();
        assert!(status.code().is_some(), "{status:?}, {error:?}");
    }

    fn ended(&mut self) -> ! {
        let _ = self.child.kill();
        let mut error = String::new();
        let _ = self.child.stderr.take().unwrap().read_to_string(&mut error);
        let status = self.child.wait();
        panic!(
            "no more lines after {:?}: {status:?}, stderr {error:?}",
            self.seen.last()
        );
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        // A failed test leaves no sandbox: it ends with who attends it. What that said may be why the test failed.
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(mut stderr) = self.child.stderr.take().filter(|_| std::thread::panicking()) {
            let mut error = String::new();
            let _ = stderr.read_to_string(&mut error);
            eprintln!("sandbox {}: {ended:?}, stderr: {error}", self.name);
        }
    }
}

/// A number of a line.
pub fn number(line: &Value, name: &str) -> u64 {
    line[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {line}"))
}
