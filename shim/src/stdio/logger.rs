//! A program that takes a container's output, started as containerd's runtimes do:
//! `binary:///PROGRAM?NAME=VALUE…`.
//!
//! It has stdout and stderr as descriptors 3 and 4, and closes descriptor 5, or writes to it, when it is
//! ready.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::fcntl_dupfd_cloexec;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::process::Command;

use super::StreamOwner;
use crate::error::{Error, Result, WithContext};

/// Limit for the program to become ready.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Number of its first descriptor.
const FIRST: i32 = 3;

/// The pipes it reads from.
pub struct Logger {
    pub stdout: Sender,
    pub stderr: Sender,
}

/// Starts the program of a URI, given without its scheme, and waits until it is ready.
pub async fn start(uri: &str, owner: &StreamOwner) -> Result<Logger> {
    start_within(READY_LIMIT, uri, owner).await
}

async fn start_within(limit: Duration, uri: &str, owner: &StreamOwner) -> Result<Logger> {
    let (program, arguments) = parse(uri)?;
    let make = || pipe_with(PipeFlags::CLOEXEC).with_context(|| "make a pipe".into());
    let ((their_out, stdout), (their_err, stderr), (ready, their_ready)) = (make()?, make()?, make()?);
    let spawned = spawn(&program, &arguments, owner, [their_out, their_err, their_ready]);
    let mut child = spawned.with_context(|| format!("start the logging program {program}"))?;
    let is_ready = is_ready(limit, ready, &program).await;
    if is_ready.is_err() {
        // It has ended already, or is killed here.
        let _ = child.start_kill();
    }
    // Reaps it when it ends, which it does at the end of its input.
    tokio::spawn(async move { child.wait().await });
    is_ready?;
    let sender = |fd: OwnedFd| -> io::Result<Sender> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Sender::from_owned_fd(fd)
    };
    Ok(Logger {
        stdout: sender(stdout).with_context(|| "write to a pipe".into())?,
        stderr: sender(stderr).with_context(|| "write to a pipe".into())?,
    })
}

/// Waits until the program signals through `ready`.
async fn is_ready(limit: Duration, ready: OwnedFd, program: &str) -> Result<()> {
    rustix::io::ioctl_fionbio(&ready, true).with_context(|| "watch a pipe".into())?;
    let mut ready = Receiver::from_owned_fd(ready).with_context(|| "watch a pipe".into())?;
    let mut byte = [0];
    match tokio::time::timeout(limit, ready.read(&mut byte)).await {
        Ok(heard) => heard
            .map(drop)
            .with_context(|| format!("wait for the logging program {program}")),
        Err(_) => Err(Error::State(format!(
            "the logging program {program} was not ready within {} s",
            limit.as_secs()
        ))),
    }
}

fn spawn(
    program: &str,
    arguments: &[String],
    owner: &StreamOwner,
    fds: [OwnedFd; 3],
) -> io::Result<tokio::process::Child> {
    // Duplicate above the target numbers, so that no dup2 below overwrites another source.
    let mut high = Vec::with_capacity(fds.len());
    for fd in &fds {
        high.push(fcntl_dupfd_cloexec(fd, FIRST + fds.len() as i32)?);
    }
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("CONTAINER_ID", &owner.container)
        .env("CONTAINER_NAMESPACE", &owner.namespace)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    // SAFETY: between fork and exec only dup2 is called, which is async-signal-safe, on descriptors the closure owns.
    unsafe {
        command.pre_exec(move || {
            use std::os::fd::AsRawFd;
            for (place, fd) in (FIRST..).zip(&high) {
                // SAFETY: dup2 of an open descriptor; whatever is at `place` is this child's copy, which exec would close.
                if libc::dup2(fd.as_raw_fd(), place) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command.spawn()
}

/// The program and its arguments: each name of the query, followed by its value if there is one.
fn parse(uri: &str) -> Result<(String, Vec<String>)> {
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let program = decode(path);
    if !program.starts_with('/') || program.contains('\0') {
        return Err(Error::Invalid(format!(
            "binary://{uri} does not name a program by its absolute path"
        )));
    }
    let mut arguments = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        arguments.push(decode(name));
        if !value.is_empty() {
            arguments.push(decode(value));
        }
    }
    match arguments.iter().any(|argument| argument.contains('\0')) {
        true => Err(Error::Invalid(format!("binary://{uri} contains a NUL byte"))),
        false => Ok((program, arguments)),
    }
}

/// Decodes `%XX` and `+` (RFC 3986, application/x-www-form-urlencoded).
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let hex = text
            .get(at + 1..at + 3)
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (byte, hex) {
            (b'%', Some(value)) => {
                decoded.push(value);
                at += 3;
                continue;
            }
            (b'+', _) => decoded.push(b' '),
            _ => decoded.push(*byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[test]
    fn log_uri_names_a_program_and_its_arguments() {
        let (program, arguments) = parse("/bin/log%20it?id=a%2Fb&flag&x=1+2").unwrap();
        assert_eq!(program, "/bin/log it");
        assert_eq!(arguments, ["id", "a/b", "flag", "x", "1 2"]);
        assert!(parse("log?x=1").is_err());
        assert!(parse("/bin/log?x=%00").is_err());
        assert_eq!(decode("100%"), "100%");
        assert_eq!(decode("%é"), "%é");
    }

    /// A shell script in a directory, as the shell's child writes it: no other test's child can hold it open for writing.
    fn program(directory: &std::path::Path, text: &str) -> String {
        let path = directory.join("log").display().to_string();
        let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let mut shell = std::process::Command::new("/bin/sh");
        let written = shell.args(["-c", write, &path, text]).status();
        assert!(written.unwrap().success());
        path
    }

    fn owner() -> StreamOwner {
        StreamOwner {
            namespace: "ns".into(),
            container: "c".into(),
        }
    }

    #[tokio::test]
    async fn log_program_that_is_never_ready_is_ended() {
        let directory = tempfile::tempdir().unwrap();
        let pid = directory.path().join("pid");
        let uri = program(
            directory.path(),
            &format!("#!/bin/sh\necho $$ > {}\nexec /bin/sleep 1000\n", pid.display()),
        );
        let (limit, owner) = (Duration::from_secs(600), owner());
        let refused = start_within(limit, &uri, &owner);
        // The limit passes once it runs.
        let passes = async {
            while !std::fs::read_to_string(&pid).is_ok_and(|pid| pid.ends_with('\n')) {
                tokio::task::yield_now().await;
            }
            tokio::time::pause();
            tokio::time::advance(limit).await;
            tokio::time::resume();
        };
        let (refused, ()) = tokio::join!(refused, passes);
        assert!(matches!(refused, Err(Error::State(_))));
        let pid = std::fs::read_to_string(pid).unwrap();
        let process = std::path::PathBuf::from(format!("/proc/{}", pid.trim()));
        while process.exists() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn log_program_gets_both_outputs_once_it_is_ready() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        let text = format!(
            "#!/bin/sh\necho $CONTAINER_NAMESPACE $CONTAINER_ID $1 $2 > {0}\nexec 5>&-\n/bin/cat <&3 >> {0}\n/bin/cat <&4 >> {0}\necho end >> {0}\n",
            out.display()
        );
        let (script, owner) = (program(directory.path(), &text), owner());
        let uri = format!("{script}?k=v");
        let mut logger = start(&uri, &owner).await.unwrap();
        assert!(std::fs::read_to_string(&out).unwrap().starts_with("ns c k v"));
        logger.stdout.write_all(b"one\n").await.unwrap();
        logger.stderr.write_all(b"two\n").await.unwrap();
        drop(logger);
        while !std::fs::read_to_string(&out).unwrap().ends_with("end\n") {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            std::fs::read_to_string(&out).unwrap(),
            "ns c k v\none\ntwo\nend\n"
        );
        assert!(start("/nowhere/log", &owner).await.is_err());
    }
}
