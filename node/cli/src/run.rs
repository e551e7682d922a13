//! `thaw run`: launches a sandbox, runs a container in it, and exits with the container's status.

use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use thaw_protocol::api::{HealthCheck, ReadinessProbe, RestartPolicy};
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client::{self, AgentClient, ProcessId};
use thaw_sandbox::container::ready::{self, Unready};
use thaw_sandbox::container::{self, Options, RootServing, Running};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::trace::Trace;

use super::detach::Until;
use super::interrupt::interrupted;
use super::launch::{Close, Keeping, Launched};
use super::unknown_flag::check_image;
use super::{ProcessArguments, RunArguments, detach};
use crate::stdio::{AbortOnDrop, AttachOptions, Signals, Stdin, attach, terminal};
use crate::ui::Ui;

/// How long to wait for the agent's report of an OOM kill after the process has ended.
const OOM_REPORT_TIMEOUT: Duration = Duration::from_millis(500);
/// 128 + SIGKILL.
const KILLED: i32 = 137;

/// Runs a container. `is_keeper`: this is the process that `-d` starts.
pub(super) async fn run(arguments: &RunArguments, is_keeper: bool, ui: &Ui) -> Result<u8, Error> {
    let Some((image, command)) = arguments.image_and_command.split_first() else {
        return Err(Error::new(ErrorKind::Runtime, "no image"));
    };
    check_image(image)?;
    let probe = arguments.ready.probe()?;
    if arguments.detach && !is_keeper {
        return detach::detached_self(until(probe.as_ref()), ui).await;
    }
    if !is_keeper {
        check_tty(&arguments.process)?;
    }
    let env = environment(&arguments.process)?;
    let seccomp = arguments.container.seccomp()?;
    let life =
        (arguments.container.life).options(arguments.detach, arguments.rm, arguments.process.interactive)?;
    let cidfile = arguments.container.create_cidfile()?;
    let trace = Trace::asked(arguments.timings);
    // Until the container runs, a signal ends this process; dropping the future removes what was made so far.
    let mut sandbox = tokio::select! {
        sandbox = Launched::create(arguments, image, command, ui, &trace) => sandbox?,
        status = interrupted() => return Ok(status),
    };
    sandbox.keeping = keeping(is_keeper, arguments.rm);
    sandbox.restarts = life.restart != RestartPolicy::default();
    ui.fact(serde_json::json!({"event": "sandbox", "id": sandbox.id}));
    if let Some(mut file) = cidfile {
        let written = std::io::Write::write_all(&mut file, sandbox.id.as_bytes());
        written.map_err(|e| Error::system("cannot write --cidfile", &e))?;
    }
    sandbox.print_ports(&arguments.through.publish, ui);
    let Some(config) = sandbox.config.clone() else {
        sandbox.close(Close::Remove).await;
        return Err(Error::new(
            ErrorKind::ImageMalformed,
            "the image's configuration cannot be read",
        ));
    };
    let options = Options {
        entrypoint: arguments.entrypoint.clone(),
        command: command.to_vec(),
        env,
        workdir: arguments.process.workdir.clone(),
        user: arguments.process.user.clone(),
        tty: arguments.process.tty,
        read_only: arguments.read_only,
        seccomp,
        hostname: arguments.hostname.clone().unwrap_or_else(|| sandbox.id.clone()),
        size: terminal::size(),
        volumes: arguments.volumes()?,
        settings: arguments.container.settings(),
        names: arguments.names.names(),
        init: arguments.init,
        life,
        health: health_check(arguments, &sandbox)?,
        hooks: arguments.container.hooks.options(),
        readiness: probe.clone(),
    };
    let how = attach_options(&arguments.process, sandbox.keeping);
    let result = match Signals::new() {
        Ok(signals) => tokio::select! {
            // Once the container has started, it gets the signals.
            started = start(&sandbox, &config, &options, arguments.root.into(), probe.as_ref(), &trace) => match started {
                Ok(started) => started.attend(&sandbox, how, signals, probe.as_ref(), &trace, ui).await,
                Err(failure) => Err(failure),
            },
            // The agent would never answer: a VMM whose guest has ended keeps its sockets open until it is asked to exit.
            reason = sandbox.machine_end() => Err(Error::new(ErrorKind::GuestEnded, reason)),
            status = interrupted() => Ok(Some(End { status: status.into(), out_of_memory: false })),
        },
        Err(failure) => Err(failure),
    };
    conclude(sandbox, result, arguments.timings.then_some(&trace), ui).await
}

/// What `-d` waits for.
fn until(probe: Option<&ReadinessProbe>) -> Until {
    match probe {
        None => Until::Started,
        Some(_) => Until::Ready,
    }
}

/// What is kept of the container of `-d`.
pub(super) fn keeping(is_keeper: bool, rm: bool) -> Keeping {
    match (is_keeper, rm) {
        (false, _) => Keeping::Nothing,
        (true, true) => Keeping::Output,
        (true, false) => Keeping::End,
    }
}

/// The health check of the flags and of the image. Only the owner of a kept container makes it.
fn health_check(arguments: &RunArguments, sandbox: &Launched) -> Result<Option<HealthCheck>, Error> {
    if sandbox.keeping == Keeping::Nothing {
        return Ok(None);
    }
    let image = sandbox.image_json();
    let check = container::health_check(image.as_deref(), &arguments.container.health.options());
    check.map_err(|why| Error::new(ErrorKind::Runtime, format!("--health-cmd: {why}")))
}

fn attach_options(process: &ProcessArguments, keeping: Keeping) -> AttachOptions {
    let passes = keeping == Keeping::Nothing;
    AttachOptions {
        stdin: match (process.interactive, passes) {
            (true, true) => Stdin::Pass,
            // Open, for `thaw attach`.
            (true, false) => Stdin::Leave,
            (false, _) => Stdin::Close,
        },
        tty: process.tty && passes,
        output: passes,
    }
}

/// Closes the sandbox, reports how its container ended, and returns the exit status. Does nothing if thawd goes on with it alone.
pub(super) async fn conclude(
    mut sandbox: Launched,
    result: Result<Option<End>, Error>,
    timings: Option<&Trace>,
    ui: &Ui,
) -> Result<u8, Error> {
    let result = match result {
        // thawd answered that it goes on alone, but that answer was lost.
        Err(failure) if failure.kind == ErrorKind::MemoryReleased => return Ok(0),
        Err(failure) => Err(sandbox.explain(failure).await),
        Ok(Some(end)) => Ok(end),
        Ok(None) => return Ok(0),
    };
    if let Some(trace) = timings {
        sandbox.note_read_ahead(trace);
    }
    let (id, account) = (sandbox.id.clone(), timings.map(Trace::account));
    let recording = sandbox.take_recording();
    let close = match (&result, sandbox.keeping) {
        (Err(_), _) => Close::Failed,
        (Ok(end), Keeping::End) => Close::Exited(end.status),
        (Ok(_), Keeping::Nothing | Keeping::Output) => Close::Remove,
    };
    sandbox.close(close).await;
    if let Some(recording) = recording {
        recording.finish(ui).await;
    }
    let end = result?;
    terminal::restore();
    if let Some(account) = account {
        ui.timings(&account);
    }
    if end.out_of_memory {
        ui.failure(&Error::new(
            ErrorKind::OutOfMemory,
            format!("container {id}: killed: out of memory"),
        ));
    }
    ui.fact(serde_json::json!({"event": "exit", "status": end.status, "out_of_memory": end.out_of_memory}));
    // The status of a process is one byte.
    Ok(end.status as u8)
}

/// How a container ended.
pub(super) struct End {
    pub status: i32,
    pub out_of_memory: bool,
}

/// A container whose process runs.
pub(super) struct Started {
    agent: AgentClient,
    process: ProcessId,
    out_of_memory: tokio::task::JoinHandle<ttrpc::Result<String>>,
}

async fn start(
    sandbox: &Launched,
    config: &ImageConfiguration,
    options: &Options,
    root: RootServing,
    probe: Option<&ReadinessProbe>,
    trace: &Trace,
) -> Result<Started, Error> {
    let agent = {
        let _stage = trace.stage("connect");
        agent_client::connect(&sandbox.vsock, READY_LIMIT).await?
    };
    let running = {
        let _stage = trace.stage("container");
        container::create(&agent, &sandbox.id, config, options, root, &sandbox.directory).await?
    };
    let out_of_memory = watch_memory(&agent);
    if let Some(probe) = probe {
        ready::expect(&agent, &running.container_id, probe).await?;
    }
    {
        let _stage = trace.stage("start");
        container::start(&agent, &running, &sandbox.directory).await?;
    }
    sandbox.keep_output().await?;
    sandbox.note_fetched(trace);
    Ok(Started {
        agent,
        process: running.process(),
        out_of_memory,
    })
}

fn watch_memory(agent: &AgentClient) -> tokio::task::JoinHandle<ttrpc::Result<String>> {
    let watcher = agent.clone();
    tokio::spawn(async move { watcher.out_of_memory().await })
}

impl Started {
    /// A container that was thawed with its sandbox.
    pub(super) async fn thawed(
        sandbox: &Launched,
        running: &Running,
        trace: &Trace,
    ) -> Result<Started, Error> {
        let _stage = trace.stage("connect");
        let agent = agent_client::connect(&sandbox.vsock, READY_LIMIT).await?;
        sandbox.keep_output().await?;
        Ok(Started {
            out_of_memory: watch_memory(&agent),
            agent,
            process: running.process(),
        })
    }

    /// Reports that it runs, and attaches to it until its process ends. Returns `None` as soon as thawd goes on with it alone.
    pub(super) async fn attend(
        self,
        sandbox: &Launched,
        how: AttachOptions,
        signals: Signals,
        probe: Option<&ReadinessProbe>,
        trace: &Trace,
        ui: &Ui,
    ) -> Result<Option<End>, Error> {
        // Before it is reported, after which a user may pause it.
        let left = probe.is_none() && leave(sandbox, &self.agent, &self.process, how.stdin).await;
        ui.fact(serde_json::json!({"event": "started", "id": sandbox.id}));
        match probe {
            None if left => Ok(None),
            None => self.attach(sandbox, how, signals).await.map(Some),
            Some(probe) => {
                self.attach_until_ready(sandbox, how, signals, probe, trace, ui)
                    .await
            }
        }
    }

    /// Attaches to the container until its process ends.
    async fn attach(self, sandbox: &Launched, how: AttachOptions, signals: Signals) -> Result<End, Error> {
        let attached = async {
            match sandbox.keeping {
                Keeping::Nothing => attach(&self.agent, &self.process, how, signals).await,
                Keeping::Output | Keeping::End => self.follow(sandbox, how, signals).await,
            }
        };
        let status = tokio::select! {
            status = attached => status?,
            reason = sandbox.machine_end() => return Err(Error::new(ErrorKind::GuestEnded, reason)),
        };
        // The agent queues the event before it reports the exit, so it arrives soon if there is one.
        let event = async { tokio::time::timeout(OOM_REPORT_TIMEOUT, self.out_of_memory).await };
        let out_of_memory =
            status == KILLED && matches!(event.await, Ok(Ok(Ok(whose))) if whose == self.process.container);
        Ok(End {
            status,
            out_of_memory,
        })
    }

    /// Waits for the end of a container whose owner keeps its output and may start its program again.
    async fn follow(&self, sandbox: &Launched, how: AttachOptions, signals: Signals) -> Result<i32, Error> {
        close_input(&self.agent, &self.process, how.stdin).await;
        let forwarding = signals.forward(self.agent.clone(), self.process.clone());
        let _forwarding = AbortOnDrop(tokio::spawn(forwarding));
        sandbox.container_end(&self.agent, &self.process).await
    }

    /// Attaches to a container with a readiness probe, and reports when it is ready.
    async fn attach_until_ready(
        self,
        sandbox: &Launched,
        how: AttachOptions,
        signals: Signals,
        probe: &ReadinessProbe,
        trace: &Trace,
        ui: &Ui,
    ) -> Result<Option<End>, Error> {
        let (agent, process) = (self.agent.clone(), self.process.clone());
        let mut attached = std::pin::pin!(self.attach(sandbox, how, signals));
        let waited = {
            let _stage = trace.stage("ready");
            tokio::select! {
                waited = ready::wait(&agent, &process.container, probe) => waited?,
                // Its output is passed on meanwhile.
                end = &mut attached => return not_ready(end?, probe).map(Some),
            }
        };
        match waited {
            Ok(()) => {
                let left = leave(sandbox, &agent, &process, how.stdin).await;
                ui.fact(serde_json::json!({"event": "ready", "id": sandbox.id}));
                match left {
                    true => Ok(None),
                    false => attached.await.map(Some),
                }
            }
            Err(Unready::Exited(_)) => not_ready(attached.await?, probe).map(Some),
            Err(late) => Err(late.failure(probe)),
        }
    }
}

/// Leaves a detached container to thawd. Returns false if this process stays with it.
async fn leave(sandbox: &Launched, agent: &AgentClient, process: &ProcessId, stdin: Stdin) -> bool {
    let left = sandbox.leave().await;
    if left {
        close_input(agent, process, stdin).await;
    }
    left
}

/// Closes the input of a detached container, unless that is for `thaw attach`.
async fn close_input(agent: &AgentClient, process: &ProcessId, stdin: Stdin) {
    if stdin == Stdin::Close
        && let Err(e) = agent.close_stdin(process).await
    {
        tracing::debug!("cannot end its input: {e}");
    }
}

/// The error of a container that ended before it was ready. If memory ran out, the end itself is returned, because it says more.
fn not_ready(end: End, probe: &ReadinessProbe) -> Result<End, Error> {
    match end.out_of_memory {
        true => Ok(end),
        false => Err(Unready::Exited(end.status).failure(probe)),
    }
}

/// Fails if a terminal is requested but stdin is none: it could not be made raw, and has no size.
pub(super) fn check_tty(process: &ProcessArguments) -> Result<(), Error> {
    if process.tty && process.interactive && !terminal::stdin_is_terminal() {
        return Err(Error::new(ErrorKind::Runtime, "-it: stdin is not a terminal").remedy("leave out -t"));
    }
    Ok(())
}

/// The environment that the flags set.
pub(super) fn environment(process: &ProcessArguments) -> Result<Vec<String>, Error> {
    let mut given = Vec::new();
    for path in &process.env_file {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|e| Error::system(format!("cannot read {}", path.display()), &e))?;
        given.extend(container::parse_env_file(&text));
    }
    given.extend(process.env.iter().cloned());
    container::resolve_environment(&given, |name| std::env::var_os(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn env_files_come_before_flags() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "A=file\n# no\nB=file\n").unwrap();
        let process = ProcessArguments {
            interactive: false,
            tty: false,
            env: vec!["A=flag".into()],
            env_file: vec![file.path().into()],
            workdir: None,
            user: None,
        };
        assert_eq!(environment(&process).unwrap(), ["A=file", "B=file", "A=flag"]);
    }
}
