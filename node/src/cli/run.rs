//! `thaw run`: a sandbox, a container in it, and its end as ours.

use std::path::PathBuf;
use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::CreateContainerRequest;
use thaw_protocol::api::{CreateSandbox, ProcessIdentity};
use tokio::signal::unix::{SignalKind, signal};

use super::{ProcessArguments, RunArguments};
use crate::agent_client::{AgentClient, ProcessId};
use crate::api::client::Client;
use crate::container::{self, Options};
use crate::exit::{ExitCode, Failure};
use crate::paths::Paths;
use crate::sandbox::{Node, READY_LIMIT, Sandbox, SandboxSpec};
use crate::state::{RunDirectory, vsock_socket};
use crate::stdio::{Attendance, Signals, attend, terminal};
use crate::trace::{Stage, Trace};
use crate::ui::Ui;

/// The file in a sandbox's directory that tells `thaw exec` of its container.
pub(super) const CONTAINER: &str = "container.json";
/// How long the word that memory ran out may come after the process's end.
const OOM_LINGERS: Duration = Duration::from_millis(500);
/// 128 + SIGKILL.
const KILLED: i32 = 137;

pub(super) async fn run(arguments: &RunArguments, ui: &Ui) -> Result<u8, Failure> {
    let Some((image, command)) = arguments.image_and_command.split_first() else {
        return Err(Failure::new(ExitCode::Runtime, "no image"));
    };
    check_tty(&arguments.process)?;
    let env = environment(&arguments.process)?;
    let trace = Trace::new();
    // Until the container takes signals, they end us; what exists so far goes with the future that holds it.
    let home = tokio::select! {
        home = open(arguments, image, command, ui, &trace) => home?,
        status = interrupted() => return Ok(status),
    };
    ui.fact(serde_json::json!({"event": "sandbox", "id": home.id}));
    let options = Options {
        entrypoint: arguments.entrypoint.clone(),
        command: command.to_vec(),
        env,
        workdir: arguments.process.workdir.clone(),
        user: arguments.process.user.clone(),
        tty: arguments.process.tty,
        read_only: arguments.read_only,
        hostname: arguments.hostname.clone().unwrap_or_else(|| home.id.clone()),
        size: terminal::size(),
    };
    let how = Attendance {
        interactive: arguments.process.interactive,
        tty: arguments.process.tty,
    };
    let result = match Signals::new() {
        Ok(signals) => tokio::select! {
            // Once it is started, signals are the container's.
            started = start(&home, &options, &trace) => match started {
                Ok(started) => started.attended(&home, how, signals).await,
                Err(failure) => Err(failure),
            },
            status = interrupted() => Ok(End { status: status.into(), out_of_memory: false }),
        },
        Err(failure) => Err(failure),
    };
    let result = result.map_err(|failure| home.explain(failure));
    let (id, stages) = (home.id.clone(), trace.stages());
    home.close().await;
    let end = result?;
    terminal::restore();
    if arguments.timings {
        ui.timings(&stages);
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
struct End {
    status: i32,
    out_of_memory: bool,
}

/// A container whose process runs.
struct Started {
    agent: AgentClient,
    process: ProcessId,
    out_of_memory: tokio::task::JoinHandle<ttrpc::Result<String>>,
}

async fn start(home: &Home, options: &Options, trace: &Trace) -> Result<Started, Failure> {
    let id = home.id.clone();
    let spec = container::spec(&id, &home.config, options)?;
    let running = serde_json::to_vec(&container::running(&id, &spec))
        .map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))?;
    let agent = {
        let _stage = trace.stage("connect");
        AgentClient::connect(&home.vsock, READY_LIMIT).await?
    };
    {
        let _stage = trace.stage("container");
        let request = CreateContainerRequest {
            container_id: id.clone(),
            exec_id: id.clone(),
            storages: container::storages(&id),
            OCI: MessageField::some(spec),
            ..Default::default()
        };
        agent.create(&request).await?;
    }
    let watcher = agent.clone();
    let out_of_memory = tokio::spawn(async move { watcher.out_of_memory().await });
    {
        let _stage = trace.stage("start");
        agent.start(&id).await?;
    }
    let path = home.directory.join(CONTAINER);
    std::fs::write(&path, running)
        .map_err(|e| Failure::system(format!("cannot write {}", path.display()), &e))?;
    Ok(Started {
        agent,
        process: ProcessId {
            container: id.clone(),
            exec: id,
        },
        out_of_memory,
    })
}

impl Started {
    async fn attended(self, home: &Home, how: Attendance, signals: Signals) -> Result<End, Failure> {
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
}

/// Who keeps the sandbox.
enum Keeper {
    Ourselves(Box<Sandbox>),
    Daemon(Client),
}

/// A sandbox to put a container in.
struct Home {
    id: String,
    vsock: PathBuf,
    directory: PathBuf,
    run: PathBuf,
    config: ImageConfiguration,
    keeper: Keeper,
}

impl Home {
    /// Waits for the machine's end: why it ended. Of a daemon's sandbox we learn by losing the agent.
    async fn machine_end(&self) -> String {
        match &self.keeper {
            Keeper::Ourselves(sandbox) => sandbox.wait_end().await,
            Keeper::Daemon(_) => std::future::pending().await,
        }
    }

    fn explain(&self, failure: Failure) -> Failure {
        match (&self.keeper, failure.code) {
            (Keeper::Ourselves(sandbox), ExitCode::GuestEnded | ExitCode::AgentFailed) => {
                let what = sandbox.ended().unwrap_or_else(|| failure.what.clone());
                Failure {
                    what,
                    context: sandbox.console_tail(),
                    ..failure
                }
            }
            _ => failure,
        }
    }

    async fn close(self) {
        match self.keeper {
            Keeper::Ourselves(sandbox) => sandbox.destroy().await,
            Keeper::Daemon(client) => {
                let Err(e) = client.delete(&self.id).await else {
                    return;
                };
                // No thawd any more: then nobody owns the sandbox, and we may end it.
                let ended =
                    RunDirectory::open(&self.run).is_ok_and(|run| run.end(&self.id, &Hierarchy::detect()));
                if !ended && e.code != ExitCode::SandboxNotFound {
                    tracing::warn!("{e}");
                }
            }
        }
    }
}

/// Makes the sandbox: by thawd where one serves, else in this process.
async fn open(
    arguments: &RunArguments,
    image: &str,
    command: &[String],
    ui: &Ui,
    trace: &Trace,
) -> Result<Home, Failure> {
    let paths = Paths::from_env();
    let lost = || {
        Failure::new(
            ExitCode::ImageMalformed,
            "the image's configuration cannot be read",
        )
    };
    if let Some(client) = Client::connect(&paths.daemon_socket()) {
        let request = daemon_request(arguments, image, command)?;
        let before = trace.elapsed_ns();
        let created = client.create(&request).await?;
        let stages = created.stages.into_iter();
        let stages = stages.map(|s| Stage {
            name: s.name,
            start_ns: s.start_ns,
            duration_ns: s.duration_ns,
        });
        trace.add_all(stages.collect(), before);
        let vsock = PathBuf::from(&created.sandbox.vsock);
        let directory = vsock.parent().map(PathBuf::from).unwrap_or_default();
        let config = ImageConfiguration::from_reader(created.image_config.as_bytes()).map_err(|_| lost())?;
        return Ok(Home {
            id: created.sandbox.id,
            vsock,
            directory,
            run: paths.run,
            config,
            keeper: Keeper::Daemon(client),
        });
    }
    let run = paths.run.clone();
    let node = Node::open(paths)?;
    let spec = SandboxSpec {
        image: image.to_owned(),
        pull: arguments.source.pull,
        plain_http: arguments.source.plain_http,
        vcpus: arguments.cpus,
        memory_mib: arguments.memory.mebibytes(),
        hostname: arguments.hostname.clone(),
        name: arguments.name.clone(),
        network: arguments.network,
        command: command.to_vec(),
        tethered: true,
        client: None,
    };
    let sandbox = Sandbox::create(&node, spec, trace, ui.pull()).await?;
    let directory = sandbox.directory();
    Ok(Home {
        id: sandbox.record().id.clone(),
        vsock: vsock_socket(&directory),
        directory,
        run,
        config: sandbox.config.clone().ok_or_else(lost)?,
        keeper: Keeper::Ourselves(Box::new(sandbox)),
    })
}

fn daemon_request(
    arguments: &RunArguments,
    image: &str,
    command: &[String],
) -> Result<CreateSandbox, Failure> {
    let name = |value: &dyn erased::Name| value.name();
    Ok(CreateSandbox {
        image: absolute(image)?,
        pull: name(&arguments.source.pull),
        plain_http: arguments.source.plain_http,
        cpus: arguments.cpus,
        memory_mib: arguments.memory.mebibytes(),
        hostname: arguments.hostname.clone(),
        name: arguments.name.clone(),
        network: name(&arguments.network),
        command: command.to_vec(),
        client: ProcessRecord::myself().map(|r| ProcessIdentity {
            pid: r.pid,
            start_time: r.start_time,
        }),
    })
}

/// The names flags have for values, without a type for each.
mod erased {
    pub(super) trait Name {
        fn name(&self) -> String;
    }

    impl<T: clap::ValueEnum> Name for T {
        fn name(&self) -> String {
            self.to_possible_value()
                .map(|v| v.get_name().to_owned())
                .unwrap_or_default()
        }
    }
}

/// A local image by its absolute path: thawd has a directory of its own.
fn absolute(image: &str) -> Result<String, Failure> {
    for kind in ["oci:", "docker-archive:"] {
        if let Some(path) = image.strip_prefix(kind) {
            let here = std::env::current_dir()
                .map_err(|e| Failure::system("cannot tell the current directory", &e))?;
            return Ok(format!("{kind}{}", here.join(path).display()));
        }
    }
    Ok(image.to_owned())
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

/// Waits for a signal that ends us: the exit status it makes.
pub(super) async fn interrupted() -> u8 {
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
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_images_are_named_absolutely_for_the_daemon() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            absolute("oci:dir:tag").unwrap(),
            format!("oci:{}/dir:tag", here.display())
        );
        assert_eq!(
            absolute("docker-archive:/a.tar").unwrap(),
            "docker-archive:/a.tar"
        );
        assert_eq!(absolute("busybox").unwrap(), "busybox");
    }

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
