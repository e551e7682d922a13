//! Where a command's sandbox is kept: by thawd where one serves, else in this process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use oci_spec::image::ImageConfiguration;
use thaw_daemon::api::client::Client;
use thaw_daemon::api::server::OwnerService;
use thaw_images::store::Image;
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, CreatedSandbox, ProcessIdentity, PublishedPort, ThawSandbox};
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::config::Config;
use thaw_sandbox::exit::{ExitCode, Failure};
use thaw_sandbox::image::record::Recording;
use thaw_sandbox::images::Images;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::sandbox::{NetworkSource, Node, Sandbox, SandboxSpec, ThawSpec, network};
use thaw_sandbox::slow::Slow;
use thaw_sandbox::state::failed::Retention;
use thaw_sandbox::state::{RunDirectory, Terms, vsock_socket};
use thaw_sandbox::trace::Trace;

use super::{CpuLimit, RunArguments, ps, template};
use crate::ui::Ui;

/// Who keeps the sandbox.
enum Keeper {
    Ourselves {
        sandbox: Arc<Sandbox>,
        /// Serves it to other commands.
        service: OwnerService,
    },
    Daemon(Client),
}

/// A sandbox, and who keeps it.
pub(super) struct Home {
    pub id: String,
    pub vsock: PathBuf,
    pub directory: PathBuf,
    /// The image's, where it is known.
    pub config: Option<ImageConfiguration>,
    /// Ports of the host that lead to it.
    pub published: Vec<PublishedPort>,
    run: PathBuf,
    keeper: Keeper,
    recording: Option<Pending>,
}

/// A recording that ends with its sandbox.
pub(super) struct Pending {
    recording: Recording,
    images: Images,
    image: Image,
    file: Option<PathBuf>,
}

impl Pending {
    /// Writes it, once the sandbox is gone, and says so.
    pub(super) async fn finish(self, ui: &Ui) {
        match self.recording.finish(&self.images, &self.image, self.file).await {
            Ok(Some(recorded)) => ui.note("recorded", &recorded.to_string()),
            Ok(None) => ui.note("recorded", "nothing was recorded: the run read nothing"),
            // The run is over, and what it came to is told; this is not it.
            Err(e) => ui.note("not-recorded", &format!("the recording is lost: {e}")),
        }
    }
}

/// A failure is told when nothing of it is left, for this process ends then.
async fn or_nothing<T>(node: &Node, made: Result<T, Failure>) -> Result<T, Failure> {
    if made.is_err() {
        node.pools.unclaimed().await;
    }
    made
}

impl Home {
    /// Makes the sandbox `thaw run` asks for.
    pub(super) async fn create(
        arguments: &RunArguments,
        image: &str,
        command: &[String],
        ui: &Ui,
        trace: &Trace,
    ) -> Result<Home, Failure> {
        let paths = Paths::from_env();
        let memory_mode = memory_mode(arguments.memory_mode)?;
        if let Some(client) = Client::connect(&paths.daemon_socket()) {
            let request = daemon_request(arguments, image, command, memory_mode)?;
            let before = trace.elapsed_ns();
            let created = client.create(&request).await?;
            return Home::of_daemon(client, created, before, paths, trace);
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
                rate_limits: Some(arguments.limits.limits()),
                ..Terms::default()
            },
            volumes: arguments.volumes()?,
            cpu_limit_millis: arguments.cpu_limit.map(CpuLimit::millis),
        };
        let sandbox = Sandbox::create(&node, spec, trace, ui.pull(), template::progress(ui)).await;
        let sandbox = or_nothing(&node, sandbox).await?;
        let pending = recording.zip(sandbox.image());
        let file = arguments.record.clone().flatten();
        let mut home = Home::of_ours(node, sandbox, run)?;
        home.recording = pending.map(|(mut recording, image)| {
            recording.keep_journal(&images, &image);
            Pending {
                recording,
                images,
                image,
                file,
            }
        });
        Ok(home)
    }

    /// Makes a sandbox of a snapshot.
    pub(super) async fn thaw(request: ThawSandbox, trace: &Trace) -> Result<Home, Failure> {
        let paths = Paths::from_env();
        if let Some(client) = Client::connect(&paths.daemon_socket()) {
            let request = ThawSandbox {
                client: myself(),
                ..request
            };
            let before = trace.elapsed_ns();
            let created = client.thaw(&request).await?;
            return Home::of_daemon(client, created, before, paths, trace);
        }
        let run = paths.run.clone();
        let node = Node::open(paths)?;
        let spec = ThawSpec {
            directory: request.directory,
            hostname: request.hostname,
            name: request.name,
            tethered: true,
            client: None,
            memory_mode: request.memory_mode,
            network_policy: request.network_policy,
            publish: request.publish,
            terms: Terms {
                rate_limits: Some(request.rate_limits),
                ..Terms::default()
            },
        };
        let sandbox = or_nothing(&node, Sandbox::thaw(&node, spec, trace).await).await?;
        Home::of_ours(node, sandbox, run)
    }

    fn of_daemon(
        client: Client,
        created: CreatedSandbox,
        before_ns: u64,
        paths: Paths,
        trace: &Trace,
    ) -> Result<Home, Failure> {
        // Its log is thawd's: what is never silent is said here too.
        for again in created
            .account
            .reasons
            .iter()
            .filter(|r| r.code == Slow::MadeAgain.code())
        {
            tracing::warn!("{}", again.text);
        }
        trace.add_all(created.account, before_ns);
        let vsock = PathBuf::from(&created.sandbox.vsock);
        let directory = vsock.parent().map(PathBuf::from).unwrap_or_default();
        let config = serde_json::from_str(&created.image_config).map_err(|e| {
            let what = format!("the image's configuration cannot be read: {e}");
            Failure::new(ExitCode::ImageMalformed, what)
        })?;
        Ok(Home {
            id: created.sandbox.id,
            vsock,
            directory,
            config,
            published: created.sandbox.network.map(|n| n.published).unwrap_or_default(),
            run: paths.run,
            keeper: Keeper::Daemon(client),
            recording: None,
        })
    }

    /// The recording of its run: to be finished once it is closed.
    pub(super) fn take_recording(&mut self) -> Option<Pending> {
        self.recording.take()
    }

    /// Notes what was fetched until now, where this process fetches; thawd has said what it had when it answered.
    pub(super) fn note_fetched(&self, trace: &Trace) {
        if let Keeper::Ourselves { sandbox, .. } = &self.keeper {
            sandbox.note_fetched(trace, "the container ran");
        }
    }

    /// The same of what is read ahead.
    pub(super) fn note_read_ahead(&self, trace: &Trace) {
        if let Keeper::Ourselves { sandbox, .. } = &self.keeper {
            sandbox.note_read_ahead(trace);
        }
    }

    fn of_ours(node: Node, sandbox: Sandbox, run: PathBuf) -> Result<Home, Failure> {
        let sandbox = Arc::new(sandbox);
        let directory = sandbox.directory();
        Ok(Home {
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
            run,
            recording: None,
            keeper: Keeper::Ourselves {
                service: OwnerService::start(node, sandbox.clone())?,
                sandbox,
            },
        })
    }

    /// Says which ports of the host lead to it, where the kernel chose one of those that were asked for.
    pub(super) fn tell_ports(&self, asked: &[PublishedPort], ui: &Ui) {
        if asked.iter().any(|port| port.host == 0) && !self.published.is_empty() {
            ui.note("published", &format!("published {}", ps::ports(&self.published)));
        }
    }

    /// Waits for the machine's end: why it ended. Of a daemon's sandbox we learn by losing the agent.
    pub(super) async fn machine_end(&self) -> String {
        match &self.keeper {
            Keeper::Ourselves { sandbox, .. } => sandbox.wait_end().await,
            Keeper::Daemon(_) => std::future::pending().await,
        }
    }

    /// A failure with what the sandbox says of it.
    pub(super) async fn explain(&self, failure: Failure) -> Failure {
        match (&self.keeper, failure.code) {
            (Keeper::Ourselves { sandbox, .. }, ExitCode::GuestEnded | ExitCode::AgentFailed) => {
                sandbox.explain(failure).await
            }
            _ => failure,
        }
    }

    /// Ends the sandbox and removes all it has. Where `may_have_failed`, one that ended unasked is listed as failed.
    pub(super) async fn close(self, may_have_failed: bool) {
        match self.keeper {
            Keeper::Ourselves { sandbox, service, .. } => {
                if may_have_failed && sandbox.ended().is_some() {
                    note_failed(&self.run, &sandbox).await;
                }
                // First the machine: then nobody waits for an answer of its any more.
                sandbox.kill();
                service.stop().await;
                sandbox.destroy().await;
            }
            Keeper::Daemon(client) => {
                let deleted = match may_have_failed {
                    true => client.delete_unless_failed(&self.id).await,
                    false => client.delete(&self.id).await,
                };
                let Err(e) = deleted else { return };
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

/// Lists a sandbox of ours, which has ended, as failed.
async fn note_failed(run: &Path, sandbox: &Sandbox) {
    let failed = sandbox.record().failed(None, sandbox.failure().await);
    let noted = RunDirectory::open(run).and_then(|run| {
        run.note_failed(&failed)?;
        run.expire_failed(Retention::of(&Config::from_env()?.sandbox));
        Ok(())
    });
    if let Err(e) = noted {
        tracing::warn!("{e}");
    }
}

/// The variable that says how guests get their memory, where no flag does.
const MEMORY_MODE: &str = "THAW_MEMORY_MODE";

/// By flag, else by the environment.
pub(super) fn memory_mode(flag: Option<MemoryMode>) -> Result<MemoryMode, Failure> {
    match (flag, std::env::var(MEMORY_MODE)) {
        (Some(mode), _) => Ok(mode),
        (None, Ok(text)) if !text.is_empty() => parse_memory_mode(&text)
            .map_err(|e| Failure::new(ExitCode::Runtime, format!("{MEMORY_MODE}={text}: {e}"))),
        (None, _) => Ok(MemoryMode::default()),
    }
}

/// A memory mode by its name.
pub(super) fn parse_memory_mode(text: &str) -> Result<MemoryMode, String> {
    match text {
        "cow" => Ok(MemoryMode::Cow),
        "populate" => Ok(MemoryMode::Populate),
        "uffd" => Ok(MemoryMode::Uffd),
        _ => Err("one of cow, populate, uffd".into()),
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
) -> Result<CreateSandbox, Failure> {
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
        labels: Default::default(),
        timeout_s: None,
        volumes: arguments.volumes()?,
        cpu_limit_millis: arguments.cpu_limit.map(CpuLimit::millis),
        rate_limits: arguments.limits.limits(),
    })
}

/// The file a recording is also written to, by its absolute path.
fn record_to(flag: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    flag.map(|path| {
        std::path::absolute(path).map_err(|e| Failure::system("cannot tell where --record is", &e))
    })
    .transpose()
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
