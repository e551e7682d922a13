//! `-d`: runs the same command in a child process, which starts the container.
//!
//! The child, the keeper, has the same command line after `--keeper`. The sandbox's owner keeps the container's output. If that is thawd, the
//! keeper leaves the sandbox to it as soon as the container runs or is ready, and ends; without thawd it owns the sandbox until the
//! container has ended. The keeper has its own process group, so the terminal's signals do not reach it. Its only standard stream is a pipe
//! for progress, which this process reads until the container runs.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::Value;
use thaw_sandbox::error::{Error, ErrorKind};
use tokio::io::{AsyncBufReadExt, BufReader};

use super::print;
use crate::ui::Ui;

/// The event of the child after which the sandbox's id is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Its container's process runs.
    Started,
    /// Its container is ready.
    Ready,
}

impl Until {
    fn event(self) -> &'static str {
        match self {
            Until::Started => "started",
            Until::Ready => "ready",
        }
    }
}

/// Runs this process's own command line detached, and prints the sandbox's id.
pub(super) async fn detached_self(until: Until, ui: &Ui) -> Result<u8, Error> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let id = detached(&arguments, until, ui).await?;
    print_id(&id, ui);
    Ok(0)
}

/// Prints an id, as a line or as an object.
pub(super) fn print_id(id: &str, ui: &Ui) {
    print(&match ui.mode() {
        crate::ui::Mode::Json => serde_json::json!({"id": id}).to_string(),
        _ => id.to_owned(),
    });
}

/// Runs `thaw` with these arguments in a child process. Returns the sandbox's id at the event `until`.
pub(super) async fn detached(arguments: &[OsString], until: Until, ui: &Ui) -> Result<String, Error> {
    let fail = |e: std::io::Error| Error::system("cannot start a process for the sandbox", &e);
    let program = std::env::current_exe().map_err(fail)?;
    let mut command = Command::new(program);
    command
        .args(["--json", "--keeper"])
        .args(arguments)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = tokio::process::Command::from(command).spawn().map_err(fail)?;
    let lines = child.stderr.take().map(|pipe| BufReader::new(pipe).lines());
    let mut lines = lines.ok_or_else(|| fail(std::io::ErrorKind::BrokenPipe.into()))?;
    let mut last = String::new();
    while let Some(line) = lines.next_line().await.map_err(fail)? {
        let Ok(value) = serde_json::from_str::<Value>(&line) else {
            last = line;
            continue;
        };
        if let Some(failure) = failure(&value) {
            return Err(failure);
        }
        match (
            value["event"].as_str(),
            value["id"].as_str(),
            value["message"].as_str(),
        ) {
            (Some(event), Some(id), _) if event == until.event() => return Ok(id.to_owned()),
            (Some(event), _, Some(message)) => ui.note(event, message),
            _ => {}
        }
    }
    let what = format!("the process of the sandbox ended: {last}");
    Err(Error::new(ErrorKind::Runtime, what))
}

/// The error in a line of the child, if it has one.
fn failure(line: &Value) -> Option<Error> {
    let error = line.get("error")?;
    let slug = error["code"].as_str().unwrap_or_default();
    let kind = ErrorKind::ALL.iter().copied().find(|kind| kind.slug() == slug);
    let kind = kind.unwrap_or(ErrorKind::Runtime);
    let message = error["message"].as_str().unwrap_or_default();
    let mut failure = match message.rsplit_once("; ") {
        Some((what, remedy)) => Error::new(kind, what).remedy(remedy),
        None => Error::new(kind, message),
    };
    let context = error["context"].as_array().into_iter().flatten();
    failure.context = context.filter_map(|l| l.as_str().map(str::to_owned)).collect();
    Some(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keepers_error_is_ours() {
        let line = serde_json::json!({"error": {
            "code": "disk-full", "exit": 73, "message": "no room: /x; free space", "context": ["a"],
        }});
        let failure = failure(&line).unwrap();
        assert_eq!(failure.kind, ErrorKind::DiskFull);
        assert_eq!(
            (failure.to_string().as_str(), &failure.context[..]),
            ("no room: /x; free space", &["a".to_owned()][..])
        );
        assert!(super::failure(&serde_json::json!({"event": "started"})).is_none());
    }
}
