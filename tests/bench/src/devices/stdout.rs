//! What a command in a container writes to its standard output, as `thaw exec` shows it.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::process::{Child, Stdio};
use std::time::Instant;

use serde_json::Value;
use thaw_e2e::home::Home;
use thaw_e2e::{image, run};

use super::transfer::{BYTES, CALL};
use crate::Report;
use crate::clock::{ran_ms, threads_ran_ms};

/// The row of its rate.
pub const STDOUT: &str = "standard output of a command: thaw";
/// Threads of thaw-vmm, and what their rows are called.
const THREADS: [(&str, &str); 2] = [("vcpu0", "the guest"), ("devices", "thaw-vmm's devices")];
const NAME: &str = "output";

/// A sandbox that runs.
pub struct Output {
    thawd: Child,
    vmm: i32,
    home: Home,
}

impl Output {
    /// Starts a node with a sandbox. Whatever fails here panics: there is nothing to measure.
    pub fn start() -> Output {
        let home = Home::new();
        let mut output = Output {
            thawd: home.thawd(&[]),
            vmm: 0,
            home,
        };
        let image = image("busybox");
        let options = ["run", "-d", "--network", "none", "--name", NAME];
        let arguments = [&options[..], &[&image, "sleep", "100000"]].concat();
        run(&mut output.home.thaw(&arguments)).ok();
        let shown = run(&mut output.home.thaw(&["inspect", "--format", "json", NAME])).ok();
        let shown: Value = serde_json::from_str(&shown).expect("inspect prints JSON");
        output.vmm = shown["vmm_pid"]
            .as_i64()
            .and_then(|pid| pid.try_into().ok())
            .expect("its machine runs");
        output
    }

    /// Adds the rate of a command's output, and what the command and its output took of the processor.
    pub fn measure(&self, report: &mut Report) -> Result<(), String> {
        let before = threads_ran_ms(self.vmm)?;
        let (rate, reader) = self.rate().map_err(|e| e.to_string())?;
        let after = threads_ran_ms(self.vmm)?;
        report.sample(STDOUT, "Mbit/s", rate);
        let of_thread = |(name, row)| {
            let ran = |at: &BTreeMap<String, f64>| at.get(name).copied().unwrap_or(0.0);
            (row, ran(&after) - ran(&before))
        };
        let parts = THREADS.into_iter().map(of_thread).chain([("thaw exec", reader)]);
        for (part, ms) in parts {
            report.sample(&format!("16 MiB of it, processor's time: {part}"), "ms", ms);
        }
        Ok(())
    }

    /// Megabits a second from the first byte of a command's output to its last, and for how long `thaw exec` ran, ms.
    fn rate(&self) -> io::Result<(f64, f64)> {
        // As large writes as on the connection this is compared with: busybox's head would write byte after byte into a small buffer.
        let zeros = format!(
            "exec dd if=/dev/zero bs={CALL} count={} 2>/dev/null",
            BYTES / CALL
        );
        let dd = ["exec", NAME, "sh", "-c", &zeros];
        let mut child = self.home.thaw(&dd).stderr(Stdio::inherit()).spawn()?;
        let mut output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut buffer = vec![0; 128 << 10];
        let first = output.read(&mut buffer)?;
        let began = Instant::now();
        let mut length = first;
        while length > 0 {
            match output.read(&mut buffer)? {
                0 => break,
                more => length += more,
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        let ran = ran_ms(child.id() as i32).map_err(io::Error::other)?;
        let status = child.wait()?;
        match length == BYTES && status.success() {
            true => Ok((8.0 * (BYTES - first) as f64 / seconds / 1e6, ran)),
            false => Err(io::Error::other(format!(
                "{length} of {BYTES} bytes came, and the command ended with {status}"
            ))),
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let _ = run(&mut self.home.thaw(&["rm", NAME]));
        let _ = self.thawd.kill();
        let _ = self.thawd.wait();
    }
}
