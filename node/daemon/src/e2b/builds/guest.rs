//! The sandbox of a build: how commands run in it, and how files come into it.
//!
//! Invariants: a command that is not awaited any more is ended; of an archive at most two pieces are in memory.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use thaw_protocol::api::ExecProcess;
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::id::new_id;
use tokio::sync::mpsc;

use super::super::context::{Context, assignments};
use super::log::{BuildLog, Lines};
use crate::api::check;
use crate::api::daemon::Daemon;
use crate::api::file_stream::OpenUpload;
use crate::api::files::{PIECE, UploadKind};
use crate::api::kept::Processes;
use crate::api::machine::Machine;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Wanted;
use crate::api::session::{Said, Session};

/// Most bytes of a command's output that are used.
const MAX_ANSWER: usize = 64 << 10;
/// Most bytes of an archive, unpacked: a few bytes can be compressed from many.
const MAX_UNPACKED: u64 = 16 << 30;
/// Who runs the build's own scripts.
const ROOT: &str = "root";
/// The shells for commands. A login shell, as E2B's SDKs run commands in a sandbox.
const SHELLS: [&[&str]; 2] = [&["/bin/bash", "-l", "-c"], &["/bin/sh", "-l", "-c"]];

/// The sandbox of a build.
#[derive(Debug)]
pub struct Guest {
    daemon: Arc<Daemon>,
    id: String,
    shell: &'static [&'static str],
}

/// What a command starts with.
#[derive(Clone, Debug, Default)]
pub struct Surroundings<'a> {
    pub env: Vec<String>,
    pub workdir: Option<&'a str>,
    pub user: Option<&'a str>,
}

impl<'a> Surroundings<'a> {
    /// What the steps so far have set; `user` instead of theirs.
    pub fn of(context: &'a Context, user: Option<&'a str>) -> Surroundings<'a> {
        Surroundings {
            env: assignments(&context.env),
            workdir: context.workdir.as_deref(),
            user: user.or(context.user.as_deref()),
        }
    }

    /// Of a script of the build itself, with these variables beside those that the steps have set.
    pub fn of_script(context: &Context, variables: &[(&str, &str)], workdir: &'a str) -> Surroundings<'a> {
        let own = variables.iter().map(|(name, value)| format!("{name}={value}"));
        Surroundings {
            env: assignments(&context.env).into_iter().chain(own).collect(),
            workdir: Some(workdir),
            user: Some(ROOT),
        }
    }
}

/// Why a step of a build failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// What the client asked for did not work.
    #[error("{0}")]
    Failed(String),
    /// The node or the guest did not do its part.
    #[error("{0}")]
    Refused(Refusal),
}

impl From<Refusal> for StepError {
    fn from(refusal: Refusal) -> StepError {
        StepError::Refused(refusal)
    }
}

impl From<Error> for StepError {
    fn from(error: Error) -> StepError {
        StepError::Refused(error.into())
    }
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub code: i32,
    /// What it wrote to its standard output, from the beginning.
    pub answer: Vec<u8>,
}

impl Guest {
    /// The guest of a sandbox, whose shell is looked for.
    ///
    /// # Errors
    /// There is no shell, or the guest does not answer.
    pub async fn of(daemon: &Arc<Daemon>, id: &str) -> Result<Guest, Refusal> {
        let guest = |shell| Guest {
            daemon: daemon.clone(),
            id: id.to_owned(),
            shell,
        };
        for shell in SHELLS {
            let guest = guest(shell);
            match guest.run(":", Surroundings::default(), None).await {
                Ok(_) => return Ok(guest),
                Err(Refusal::Failure(e)) if e.kind == ErrorKind::NotFound => {}
                Err(refusal) => return Err(refusal),
            }
        }
        Err(Error::new(ErrorKind::NotFound, "the image has neither /bin/bash nor /bin/sh").into())
    }

    fn machine(&self) -> Result<Arc<dyn Machine>, Refusal> {
        self.daemon.running(&Wanted::on_node(&self.id))
    }

    fn options(&self, command: &str, with: Surroundings<'_>) -> Result<Options, Refusal> {
        let shell = self.shell.iter().map(|word| (*word).to_owned());
        let process = ExecProcess {
            command: shell.chain([command.to_owned()]).collect(),
            env: with.env,
            workdir: with.workdir.map(str::to_owned),
            user: with.user.map(str::to_owned),
            ..ExecProcess::default()
        };
        Ok(check::exec(&process)?.0)
    }

    /// Runs a command to its end, without input. A caller that leaves ends it. Its output goes into the log, if there is one.
    ///
    /// # Errors
    /// It cannot be started, or the guest ends.
    pub async fn run(
        &self,
        command: &str,
        with: Surroundings<'_>,
        log: Option<&BuildLog>,
    ) -> Result<Ended, Refusal> {
        let process = self.machine()?.exec(self.options(command, with)?).await?;
        let mut session = Session::start(process, false, self.daemon.closing(), ());
        // Closes it.
        drop(session.input());
        let (mut lines, mut answer) = (log.map(Lines::into_log), Vec::new());
        loop {
            match session.next().await {
                Some(Said::Wrote(output, data)) => {
                    if let Some(lines) = &mut lines {
                        lines.push(output, &data);
                    }
                    if output == Output::Stdout {
                        let room = MAX_ANSWER - answer.len();
                        answer.extend(data.into_iter().take(room));
                    }
                }
                Some(Said::Ended(code)) => return Ok(Ended { code: code?, answer }),
                None => return Err(Refusal::new(ApiCode::Ending, "thawd ends")),
            }
        }
    }

    /// Starts a command that outlives the build, and returns its id: the guest keeps the end of its output.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn start(
        &self,
        command: &str,
        with: Surroundings<'_>,
    ) -> Result<(Arc<dyn Processes>, String), Refusal> {
        let machine = self.machine()?;
        let processes = machine.processes().await?;
        let process = machine.exec(self.options(command, with)?).await?;
        let id = process.id();
        process.close_stdin().await;
        processes.keep(&id).await?;
        Ok((processes, id))
    }

    /// Unpacks an archive, which may be compressed with gzip, into a new directory of the container, and returns the directory.
    ///
    /// # Errors
    /// The archive is damaged or too large, or the guest refuses it.
    pub async fn unpack(&self, archive: &Path) -> Result<String, StepError> {
        let id = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
        let directory = format!("/.copy-{id}");
        let files = self.machine()?.files().await?;
        files.make_directory(&directory, 0o700, false).await?;
        let kind = UploadKind::Archive { keep_owner: false };
        let mut upload = OpenUpload::begin(files, directory.clone(), kind)?;
        let (pieces, mut read) = mpsc::channel(2);
        let archive = archive.to_owned();
        // Ends when the receiver is dropped.
        let reading = tokio::task::spawn_blocking(move || read_archive(&archive, &pieces));
        while let Some(piece) = read.recv().await {
            upload.push(&piece).await?;
        }
        let done = reading.await.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
        done.map_err(|e| StepError::Failed(format!("the uploaded archive cannot be read: {e}")))?;
        upload.finish().await?;
        Ok(directory)
    }

    /// Removes a directory of the container.
    ///
    /// # Errors
    /// The guest refuses that.
    pub async fn remove(&self, directory: &str) -> Result<(), Refusal> {
        self.machine()?.files().await?.remove(directory, true).await
    }
}

/// Sends the bytes of an archive, uncompressed. Blocks.
fn read_archive(archive: &Path, pieces: &mpsc::Sender<Vec<u8>>) -> std::io::Result<()> {
    const GZIP: [u8; 2] = [0x1f, 0x8b];
    let mut file = BufReader::new(File::open(archive)?);
    let mut begin = Vec::new();
    file.by_ref().take(GZIP.len() as u64).read_to_end(&mut begin)?;
    file.rewind()?;
    let bytes: Box<dyn Read> = match begin == GZIP {
        true => Box::new(MultiGzDecoder::new(file)),
        false => Box::new(file),
    };
    let mut left = bytes.take(MAX_UNPACKED + 1);
    loop {
        let mut piece = Vec::new();
        left.by_ref().take(PIECE as u64).read_to_end(&mut piece)?;
        if left.limit() == 0 {
            let what = format!("it has more than {MAX_UNPACKED} bytes once it is decompressed");
            return Err(std::io::Error::other(what));
        }
        if piece.is_empty() || pieces.blocking_send(piece).is_err() {
            return Ok(());
        }
    }
}
