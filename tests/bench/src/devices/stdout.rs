//! What a command in a container writes to its standard output, as `thaw exec` shows it.

use std::io::{self, Read};
use std::process::{Child, Stdio};
use std::time::Instant;

use thaw_e2e::home::Home;
use thaw_e2e::{image, run};

use super::transfer::{BYTES, CALL};

/// The row.
pub const STDOUT: &str = "standard output of a command: thaw";
const NAME: &str = "output";

/// A sandbox that runs.
pub struct Output {
    thawd: Child,
    home: Home,
}

impl Output {
    /// Starts a node with a sandbox. Whatever fails here panics: there is nothing to measure.
    pub fn start() -> Output {
        let home = Home::new();
        let output = Output {
            thawd: home.thawd(&[]),
            home,
        };
        let image = image("busybox");
        let options = ["run", "-d", "--network", "none", "--name", NAME];
        let arguments = [&options[..], &[&image, "sleep", "100000"]].concat();
        run(&mut output.home.thaw(&arguments)).ok();
        output
    }

    /// Megabits a second from the first byte of a command's output to its last.
    pub fn rate(&self) -> io::Result<f64> {
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
        let status = child.wait()?;
        match length == BYTES && status.success() {
            true => Ok(8.0 * (BYTES - first) as f64 / seconds / 1e6),
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
