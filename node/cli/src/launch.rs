//! Launches the sandbox of a command: through thawd if one runs, else in this process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use oci_spec::image::ImageConfiguration;
use thaw_daemon::api::client::Client;
use thaw_daemon::api::daemon::Keep;
use thaw_daemon::api::server::OwnerService;
use thaw_images::store::Image;
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, CreatedSandbox, ProcessIdentity, PublishedPort, ThawSandbox};
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::config::Config;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::image::record::Recording;
use thaw_sandbox::images::Images;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::slow::Slow;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::ended::Retention;
use thaw_sandbox::state::{RunDirectory, Terms, vsock_socket};
use thaw_sandbox::trace::Trace;
use thaw_sandbox::{NetworkSource, Node, Sandbox, SandboxSpec, Tenants, ThawSpec, Thawable, network};

use super::memory_mode::memory_mode;
use super::running::warn_of_hook;
use super::{CpuLimit, RunArguments, ps, template};
use crate::ui::Ui;

mod container_end;

/// The owner of the sandbox.
enum OwnedBy {
    ThisProcess {
        sandbox: Arc<Sandbox>,
        /// Serves its API to other commands.
        service: OwnerService,
    },
    Daemon(Client),
}

/// What is kept of a container beyond what this command passes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Keeping {
    #[default]
    Nothing,
    /// Its output, while its sandbox exists: `-d --rm`.
    Output,
    /// Its output and, after its end, its record and exit status too: `-d`.
    End,
}

/// How a sandbox is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    /// Nothing is kept of it.
    Remove,
    /// It is listed as failed if its machine ended by itself.
    Failed,
    /// It is listed as exited with this status, and its output is kept.
    Exited(i32),
}

/// A sandbox that this command launched.
pub(super) struct Launched {
    pub id: String,
    pub vsock: PathBuf,
    pub directory: PathBuf,
    /// The image's configuration, if it is known.
    pub config: Option<ImageConfiguration>,
    /// The host ports that are forwarded to it.
    pub published: Vec<PublishedPort>,
    pub keeping: Keeping,
    /// Whether its container has a restart policy.
    pub restarts: bool,
    run: PathBuf,
    owner: OwnedBy,
    recording: Option<PendingRecording>,
}

/// A recording that is finished after its sandbox is closed.
pub(super) struct PendingRecording {
    recording: Recording,
    images: Images,
    image: Image,
    file: Option<PathBuf>,
}

impl PendingRecording {
    /// Writes the recording after the sandbox is closed, and reports the result.
    pub(super) async fn finish(self, ui: &Ui) {
        match self.recording.finish(&self.images, &self.image, self.file).await {
            Ok(Some(recorded)) => ui.note("recorded", &recorded.to_string()),
            Ok(None) => ui.note("recorded", "nothing was recorded: the run read nothing"),
            // The run itself did not fail, so this is not an error of the command.
            Err(e) => ui.note("not-recorded", &format!("the recording is lost: {e}")),
        }
    }
}

/// If the launch failed, waits until its resources are released, because this process ends next.
async fn release_if_failed<T>(node: &Node, made: Result<T, Error>) -> Result<T, Error> {
    if made.is_err() {
        node.pools.unclaimed().await;
    }
    made
}

impl Launched {
    /// Creates the sandbox of `thaw run`.
    pub(super) async fn create(
        arguments: &RunArguments,
        image: &str,
        command: &[String],
        ui: &Ui,
        trace: &Trace,
    ) -> Result<Launched, Error> {
        let paths = Paths::from_env();
        let memory_mode = memory_mode(arguments.memory_mode)?;
        if let Some(client) = Client::connect(&paths.daemon_socket()) {
            let request = daemon_request(arguments, image, command, memory_mode)?;
            let before = trace.elapsed_ns();
            let created = client.create(&request).await?;
            return Launched::of_daemon(client, created, before, paths, trace);
        }
        let run = paths.run.clone();
        let node = Node::open(paths)?;
        let images = node.images.clone();
        let (recording, record) = match arguments.record {
            Some(_) => Recording::start().map(|(recording, fd)| (Some(recording), Some(fd)))?,
            None => (None, None),
        };
        let spec = SandboxSpec {
            image: Some(image.to_owned()),
            pull: arguments.source.pull.into(),
            plain_http: arguments.source.plain_http,
            vcpus: arguments.cpus,
            memory_mib: arguments.memory.mebibytes(),
            disk_mib: arguments.disk.mebibytes(),
            hostname: arguments.hostname.clone(),
            name: arguments.name.clone(),
            network: NetworkSource::Ours(arguments.network.into()),
            network_terms: network::read(arguments.through.policy()?.as_ref(), &arguments.through.publish)?,
            command: command.to_vec(),
            tethered: true,
            client: None,
            cold: arguments.cold,
            memory_mode,
            root: arguments.root.into(),
            record,
            prefetch: !arguments.no_prefetch,
            terms: Terms {
                labels: arguments.container.labels()?,
                rate_limits: Some(arguments.limits.limits()),
                ..Terms::default()
            },
            volumes: arguments.volumes()?,
            cpu_limit_millis: arguments.cpu_limit.map(CpuLimit::millis),
        };
        let sandbox = Sandbox::create(&node, spec, trace, ui.pull(), template::progress(ui)).await;
        let sandbox = release_if_failed(&node, sandbox).await?;
        let pending = recording.zip(sandbox.image());
        let file = arguments.record.clone().flatten();
        let mut launched = Launched::of_this_process(node, sandbox, run)?;
        launched.recording = pending.map(|(mut recording, image)| {
            recording.keep_journal(&images, &image);
            PendingRecording {
                recording,
                images,
                image,
                file,
            }
        });
        Ok(launched)
    }

    /// Thaws a sandbox from a snapshot.
    pub(super) async fn thaw(request: ThawSandbox, trace: &Trace) -> Result<Launched, Error> {
        let paths = Paths::from_env();
        if let Some(client) = Client::connect(&paths.daemon_socket()) {
            let request = ThawSandbox {
                client: myself(),
                ..request
            };
            let before = trace.elapsed_ns();
            let created = client.thaw(&request).await?;
            return Launched::of_daemon(client, created, before, paths, trace);
        }
        let run = paths.run.clone();
        let node = Node::open(paths)?;
        let (node, from, _thawing) = match &request.snapshot {
            Some(wanted) => {
                let (tenants, viewer) = (Tenants::open(node), Viewer::node());
                tenants.to_thaw(wanted, &viewer, request.memory_mode).await?
            }
            None => {
                let directory = request.directory.unwrap_or_default();
                (node, Thawable::Stored(directory), None)
            }
        };
        let (directory, remote) = from.into_parts();
        let spec = ThawSpec {
            directory,
            hostname: request.hostname,
            name: request.name,
            tethered: true,
            client: None,
            memory_mode: request.memory_mode,
            require_hook: request.require_hook,
            network_policy: request.network_policy,
            publish: request.publish,
            terms: Terms {
                rate_limits: Some(request.rate_limits),
                ..Terms::default()
            },
            network: None,
            remote,
            paused: None,
            is_pod: false,
        };
        let sandbox = release_if_failed(&node, Sandbox::thaw(&node, spec, trace).await).await?;
        Launched::of_this_process(node, sandbox, run)
    }

    fn of_daemon(
        client: Client,
        created: CreatedSandbox,
        before_ns: u64,
        paths: Paths,
        trace: &Trace,
    ) -> Result<Launched, Error> {
        // thawd logged this retry to its own log; the user of this command must see it too.
        for retry in created
            .account
            .reasons
            .iter()
            .filter(|r| r.code == Slow::MadeAgain.code())
        {
            tracing::warn!("{}", retry.text);
        }
        // The same of a hook.
        warn_of_hook(&created.sandbox);
        trace.add_all(created.account, before_ns);
        let vsock = PathBuf::from(&created.sandbox.vsock);
        let directory = vsock.parent().map(PathBuf::from).unwrap_or_default();
        let config = serde_json::from_str(&created.image_config).map_err(|e| {
            let what = format!("the image's configuration cannot be read: {e}");
            Error::new(ErrorKind::ImageMalformed, what)
        })?;
        Ok(Launched {
            id: created.sandbox.id,
            vsock,
            directory,
            config,
            published: created.sandbox.network.map(|n| n.published).unwrap_or_default(),
            keeping: Keeping::default(),
            restarts: false,
            run: paths.run,
            owner: OwnedBy::Daemon(client),
            recording: None,
        })
    }

    /// The recording of its run, to be finished after it is closed.
    pub(super) fn take_recording(&mut self) -> Option<PendingRecording> {
        self.recording.take()
    }

    /// Adds to `trace` the bytes fetched until now, if this process fetches them. thawd's answer contained this already.
    pub(super) fn note_fetched(&self, trace: &Trace) {
        if let OwnedBy::ThisProcess { sandbox, .. } = &self.owner {
            sandbox.note_fetched(trace, "the container ran");
        }
    }

    /// The same for the image's read-ahead.
    pub(super) fn note_read_ahead(&self, trace: &Trace) {
        if let OwnedBy::ThisProcess { sandbox, .. } = &self.owner {
            sandbox.note_read_ahead(trace);
        }
    }

    fn of_this_process(node: Node, sandbox: Sandbox, run: PathBuf) -> Result<Launched, Error> {
        let sandbox = Arc::new(sandbox);
        let directory = sandbox.directory();
        Ok(Launched {
            id: sandbox.record().id.clone(),
            vsock: vsock_socket(&directory),
            directory,
            config: sandbox.config.clone(),
            published: sandbox
                .record()
                .network
                .as_ref()
                .map(|n| n.published.clone())
                .unwrap_or_default(),
            keeping: Keeping::default(),
            restarts: false,
            run,
            recording: None,
            owner: OwnedBy::ThisProcess {
                service: OwnerService::start(node, sandbox.clone())?,
                sandbox,
            },
        })
    }

    /// Prints the published ports, if the kernel chose the host port of one.
    pub(super) fn print_ports(&self, asked: &[PublishedPort], ui: &Ui) {
        if asked.iter().any(|port| port.host == 0) && !self.published.is_empty() {
            ui.note("published", &format!("published {}", ps::ports(&self.published)));
        }
    }

    /// Waits until the machine ends, and returns why it ended. The end of thawd's sandboxes shows as a lost connection to the agent.
    pub(super) async fn machine_end(&self) -> String {
        match &self.owner {
            OwnedBy::ThisProcess { sandbox, .. } => sandbox.wait_end().await,
            OwnedBy::Daemon(_) => std::future::pending().await,
        }
    }

    /// Adds to a failure what the sandbox knows about its cause.
    pub(super) async fn explain(&self, failure: Error) -> Error {
        match (&self.owner, failure.kind) {
            (OwnedBy::ThisProcess { sandbox, .. }, ErrorKind::GuestEnded | ErrorKind::AgentFailed) => {
                sandbox.explain(failure).await
            }
            _ => failure,
        }
    }

    /// Has the sandbox's owner keep what is to be kept of its container, which has started.
    pub(super) async fn keep_output(&self) -> Result<(), Error> {
        match (&self.owner, self.keeping) {
            (_, Keeping::Nothing) => Ok(()),
            (OwnedBy::ThisProcess { service, .. }, _) => service.monitor(),
            (OwnedBy::Daemon(client), _) => client.monitor(&self.id).await,
        }
    }

    /// Ends the sandbox and removes everything it has, except what `close` keeps.
    pub(super) async fn close(self, close: Close) {
        match self.owner {
            OwnedBy::ThisProcess { sandbox, service, .. } => {
                let ended = match close {
                    Close::Failed if sandbox.ended().is_some() => {
                        Some(sandbox.record().failed(None, sandbox.failure().await))
                    }
                    Close::Exited(status) => {
                        service.output_kept().await;
                        Some(sandbox.record().exited(status))
                    }
                    Close::Failed | Close::Remove => None,
                };
                if let Some(ended) = ended {
                    note_ended(&self.run, &ended);
                }
                // Ends the machine first, so that no request waits for its reply.
                sandbox.kill();
                service.stop().await;
                sandbox.destroy().await;
            }
            OwnedBy::Daemon(client) => {
                let keep = Keep {
                    failed: close != Close::Remove,
                    exited: matches!(close, Close::Exited(_)),
                };
                let Err(e) = client.delete_keeping(&self.id, keep).await else {
                    return;
                };
                // If thawd has ended, the sandbox has no owner, and this process may end it.
                let cgroups = Hierarchy::detect();
                let end = |run: RunDirectory| match close {
                    Close::Remove => run.end(&self.id, &cgroups),
                    Close::Failed => run.end_unless_failed(&self.id, &cgroups),
                    Close::Exited(status) => run.end_exited(&self.id, status, &cgroups),
                };
                let ended = RunDirectory::open(&self.run).is_ok_and(end);
                if !ended && e.kind != ErrorKind::SandboxNotFound {
                    tracing::warn!("{e}");
                }
            }
        }
    }
}

/// Lists a sandbox of this process as ended.
fn note_ended(run: &Path, ended: &thaw_protocol::api::Sandbox) {
    let noted = RunDirectory::open(run).and_then(|run| {
        run.note_ended(ended)?;
        run.expire_ended(Retention::of(&Config::from_env()?.sandbox));
        Ok(())
    });
    if let Err(e) = noted {
        tracing::warn!("{e}");
    }
}

fn myself() -> Option<ProcessIdentity> {
    ProcessRecord::myself().map(|r| ProcessIdentity {
        pid: r.pid,
        start_time: r.start_time,
    })
}

fn daemon_request(
    arguments: &RunArguments,
    image: &str,
    command: &[String],
    memory_mode: MemoryMode,
) -> Result<CreateSandbox, Error> {
    let name = |value: &dyn erased::Name| value.name();
    Ok(CreateSandbox {
        image: absolute(image)?,
        pull: name(&arguments.source.pull),
        plain_http: arguments.source.plain_http,
        cpus: arguments.cpus,
        memory_mib: arguments.memory.mebibytes(),
        disk_mib: arguments.disk.mebibytes(),
        hostname: arguments.hostname.clone(),
        name: arguments.name.clone(),
        network: name(&arguments.network),
        publish: arguments.through.publish.clone(),
        network_policy: arguments.through.policy()?,
        command: command.to_vec(),
        container: None,
        client: myself(),
        cold: arguments.cold,
        memory_mode,
        record: arguments.record.is_some(),
        record_to: record_to(arguments.record.as_ref().and_then(Option::as_deref))?,
        prefetch: !arguments.no_prefetch,
        root: name(&arguments.root),
        labels: arguments.container.labels()?,
        timeout_s: None,
        idle_timeout_s: None,
        on_timeout: Default::default(),
        volumes: arguments.volumes()?,
        cpu_limit_millis: arguments.cpu_limit.map(CpuLimit::millis),
        rate_limits: arguments.limits.limits(),
        timings: arguments.timings,
    })
}

/// The absolute path of the file that a recording is also written to.
fn record_to(flag: Option<&Path>) -> Result<Option<PathBuf>, Error> {
    flag.map(|path| std::path::absolute(path).map_err(|e| Error::system("cannot tell where --record is", &e)))
        .transpose()
}

/// The names of flags' values, whatever their types.
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

/// A local image by its absolute path, because thawd's current directory is another.
fn absolute(image: &str) -> Result<String, Error> {
    for kind in ["oci:", "docker-archive:"] {
        if let Some(path) = image.strip_prefix(kind) {
            let here = std::env::current_dir()
                .map_err(|e| Error::system("cannot tell the current directory", &e))?;
            return Ok(format!("{kind}{}", here.join(path).display()));
        }
    }
    Ok(image.to_owned())
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
}
