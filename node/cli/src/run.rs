//! `thaw run`: a sandbox, a container in it, and its end as ours.

use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use thaw_protocol::api::ReadinessProbe;
use thaw_sandbox::agent_client::{AgentClient, ProcessId};
use thaw_sandbox::container::ready::{self, Unready};
use thaw_sandbox::container::{self, Options, RootServing, Running};
use thaw_sandbox::exit::{ExitCode, Failure};
use thaw_sandbox::sandbox::READY_LIMIT;
use thaw_sandbox::trace::Trace;
use tokio::signal::unix::{SignalKind, signal};

use super::detach::Until;
use super::home::Home;
use super::{ProcessArguments, RunArguments, detach};
use crate::stdio::{Attendance, Signals, Stdin, attend, terminal};
use crate::ui::Ui;

/// How long the word that memory ran out may come after the process's end.
const OOM_LINGERS: Duration = Duration::from_millis(500);
/// 128 + SIGKILL.
const KILLED: i32 = 137;

pub(super) async fn run(arguments: &RunArguments, ui: &Ui) -> Result<u8, Failure> {
    let Some((image, command)) = arguments.image_and_command.split_first() else {
        return Err(Failure::new(ExitCode::Runtime, "no image"));
    };
    let probe = arguments.ready.probe()?;
    if arguments.detach {
        if arguments.process.interactive {
            return Err(Failure::new(ExitCode::Runtime, "-d and -i exclude each other"));
        }
        let until = match probe {
            None => Until::Started,
            Some(_) => Until::Ready,
        };
        return detach::detached_self(until, ui).await;
    }
    check_tty(&arguments.process)?;
    let env = environment(&arguments.process)?;
    let trace = Trace::new();
    // Until the container takes signals, they end us; what exists so far goes with the future that holds it.
    let home = tokio::select! {
        home = Home::create(arguments, image, command, ui, &trace) => home?,
        status = interrupted() => return Ok(status),
    };
    ui.fact(serde_json::json!({"event": "sandbox", "id": home.id}));
    home.tell_ports(&arguments.through.publish, ui);
    let Some(config) = home.config.clone() else {
        home.close(false).await;
        return Err(Failure::new(
            ExitCode::ImageMalformed,
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
        seccomp: arguments.security_opt.last().copied().unwrap_or_default(),
        hostname: arguments.hostname.clone().unwrap_or_else(|| home.id.clone()),
        size: terminal::size(),
        volumes: arguments.volumes()?,
    };
    let how = Attendance {
        stdin: match arguments.process.interactive {
            true => Stdin::Pass,
            false => Stdin::Close,
        },
        tty: arguments.process.tty,
    };
    let result = match Signals::new() {
        Ok(signals) => tokio::select! {
            // Once it is started, signals are the container's.
            started = start(&home, &config, &options, arguments.root.into(), probe.as_ref(), &trace) => match started {
                Ok(started) => {
                    ui.fact(serde_json::json!({"event": "started", "id": home.id}));
                    match &probe {
                        None => started.attended(&home, how, signals).await,
                        Some(probe) => started.attended_ready(&home, how, signals, probe, &trace, ui).await,
                    }
                }
                Err(failure) => Err(failure),
            },
            // The agent's answer would never come: the VMM and its sockets stay until they are told to go.
            reason = home.machine_end() => Err(Failure::new(ExitCode::GuestEnded, reason)),
            status = interrupted() => Ok(End { status: status.into(), out_of_memory: false }),
        },
        Err(failure) => Err(failure),
    };
    conclude(home, result, arguments.timings.then_some(&trace), ui).await
}

/// Removes the sandbox and says how its container ended: the exit status.
pub(super) async fn conclude(
    mut home: Home,
    result: Result<End, Failure>,
    timings: Option<&Trace>,
    ui: &Ui,
) -> Result<u8, Failure> {
    let result = match result {
        Err(failure) => Err(home.explain(failure).await),
        Ok(end) => Ok(end),
    };
    if let Some(trace) = timings {
        home.note_read_ahead(trace);
    }
    let (id, account) = (home.id.clone(), timings.map(Trace::account));
    let recording = home.take_recording();
    home.close(result.is_err()).await;
    if let Some(recording) = recording {
        recording.finish(ui).await;
    }
    let end = result?;
    terminal::restore();
    if let Some(account) = account {
        ui.timings(&account);
    }
    if end.out_of_memory {
        ui.failure(&Failure::new(
            ExitCode::OutOfMemory,
            format!("container {id}: killed: out of memory"),
        ));
    }
    ui.fact(serde_json::json!({"event": "exit", "status": end.status, "out_of_memory": end.out_of_memory}));
    // A status is a byte to whoever waits for us.
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
    home: &Home,
    config: &ImageConfiguration,
    options: &Options,
    root: RootServing,
    probe: Option<&ReadinessProbe>,
    trace: &Trace,
) -> Result<Started, Failure> {
    let agent = {
        let _stage = trace.stage("connect");
        AgentClient::connect(&home.vsock, READY_LIMIT).await?
    };
    let running = {
        let _stage = trace.stage("container");
        container::create(&agent, &home.id, config, options, root).await?
    };
    let out_of_memory = watch_memory(&agent);
    if let Some(probe) = probe {
        ready::expect(&agent, &running.container_id, probe).await?;
    }
    {
        let _stage = trace.stage("start");
        container::start(&agent, &running, &home.directory).await?;
    }
    home.note_fetched(trace);
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
    pub(super) async fn thawed(home: &Home, running: &Running, trace: &Trace) -> Result<Started, Failure> {
        let _stage = trace.stage("connect");
        let agent = AgentClient::connect(&home.vsock, READY_LIMIT).await?;
        Ok(Started {
            out_of_memory: watch_memory(&agent),
            agent,
            process: running.process(),
        })
    }

    /// Attends it to its end.
    pub(super) async fn attended(
        self,
        home: &Home,
        how: Attendance,
        signals: Signals,
    ) -> Result<End, Failure> {
        let status = tokio::select! {
            status = attend(&self.agent, &self.process, how, signals) => status?,
            reason = home.machine_end() => return Err(Failure::new(ExitCode::GuestEnded, reason)),
        };
        // The agent queues the event before it tells the exit, so it is on its way if there is one.
        let event = async { tokio::time::timeout(OOM_LINGERS, self.out_of_memory).await };
        let out_of_memory =
            status == KILLED && matches!(event.await, Ok(Ok(Ok(whose))) if whose == self.process.container);
        Ok(End {
            status,
            out_of_memory,
        })
    }

    /// The same; it is to become ready before, and that is said.
    async fn attended_ready(
        self,
        home: &Home,
        how: Attendance,
        signals: Signals,
        probe: &ReadinessProbe,
        trace: &Trace,
        ui: &Ui,
    ) -> Result<End, Failure> {
        let (agent, container) = (self.agent.clone(), self.process.container.clone());
        let mut attended = std::pin::pin!(self.attended(home, how, signals));
        let waited = {
            let _stage = trace.stage("ready");
            tokio::select! {
                waited = ready::wait(&agent, &container, probe) => waited?,
                // Its output is passed on meanwhile, and to its end.
                end = &mut attended => return not_ready(end?, probe),
            }
        };
        match waited {
            Ok(()) => {
                ui.fact(serde_json::json!({"event": "ready", "id": home.id}));
                attended.await
            }
            Err(Unready::Exited(_)) => not_ready(attended.await?, probe),
            Err(late) => Err(late.failure(probe)),
        }
    }
}

/// It ended before it was ready; that memory ran out says more.
fn not_ready(end: End, probe: &ReadinessProbe) -> Result<End, Failure> {
    match end.out_of_memory {
        true => Ok(end),
        false => Err(Unready::Exited(end.status).failure(probe)),
    }
}

/// A terminal that is not one cannot be raw, nor have a size.
pub(super) fn check_tty(process: &ProcessArguments) -> Result<(), Failure> {
    if process.tty && process.interactive && !terminal::stdin_is_terminal() {
        return Err(Failure::new(ExitCode::Runtime, "-it: stdin is not a terminal").remedy("leave out -t"));
    }
    Ok(())
}

/// The environment the flags make.
pub(super) fn environment(process: &ProcessArguments) -> Result<Vec<String>, Failure> {
    let mut given = Vec::new();
    for path in &process.env_file {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|e| Failure::system(format!("cannot read {}", path.display()), &e))?;
        given.extend(container::parse_env_file(&text));
    }
    given.extend(process.env.iter().cloned());
    container::resolve_environment(&given, |name| std::env::var_os(name))
}

/// Waits for a signal that ends us: the exit status it makes. From this call on, not from when it is first polled, no such
/// signal ends us by itself: what is being made beside it is removed.
pub(super) fn interrupted() -> impl Future<Output = u8> {
    let mut waiting = Vec::new();
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        if let Ok(mut caught) = signal(SignalKind::from_raw(number)) {
            waiting.push(Box::pin(async move {
                match caught.recv().await {
                    Some(()) => 128 + number as u8,
                    None => std::future::pending().await,
                }
            }));
        }
    }
    std::future::poll_fn(move |context| {
        let ended = waiting.iter_mut().find_map(|w| match w.as_mut().poll(context) {
            std::task::Poll::Ready(status) => Some(status),
            std::task::Poll::Pending => None,
        });
        ended.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
    })
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
