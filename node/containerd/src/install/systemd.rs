//! Starts and stops systemd units for an installation. Without systemd it does nothing, and reports that.

use std::path::Path;
use std::process::{Command, Stdio};

use thaw_sandbox::error::{Error, ErrorKind};

/// Whether systemd runs this host: sd_booted(3).
pub fn runs() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Whether a unit exists and is in this state: `active` or `enabled`.
pub fn is(state: &str, unit: &str) -> bool {
    let asked = Command::new("systemctl")
        .args([&format!("is-{state}"), "--quiet", unit])
        .stdin(Stdio::null())
        .status();
    asked.is_ok_and(|status| status.success())
}

/// Whether a unit is installed.
pub fn has(unit: &str) -> bool {
    let asked = Command::new("systemctl")
        .args(["cat", unit])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    asked.is_ok_and(|status| status.success())
}

/// Runs `systemctl` with these arguments.
///
/// # Errors
/// It fails: the error has its last line of output.
pub fn control(words: &[&str]) -> Result<(), Error> {
    let line = format!("systemctl {}", words.join(" "));
    let output = Command::new("systemctl")
        .args(words)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::system(format!("cannot run {line}"), &e))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said
        .lines()
        .rfind(|l| !l.trim().is_empty())
        .unwrap_or("it does not say why");
    Err(Error::new(ErrorKind::ServiceFailed, format!("{line}: {last}"))
        .remedy("see journalctl -e, then run the command again"))
}
