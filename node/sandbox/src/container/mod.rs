//! Turns an image's configuration and the caller's options into an OCI runtime specification, with the defaults of
//! `docker run`.
//!
//! The specification is the message that the agent accepts ([`thaw_protocol::agent::oci`]). The agent resolves users and groups inside the
//! root filesystem, from `User.Username`.

use std::path::Path;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::agent::{MessageField, annotations, layout, oci};
use thaw_protocol::api::{HealthCheck, Hooks, ReadinessProbe, Volume};

use crate::agent_client::ProcessId;
use crate::error::{Error, ErrorKind};
use names::Names;
use settings::Settings;
use thaw_records::RecordError;

mod defaults;
mod environment;
mod exec;
mod health;
mod hooks;
mod life;
pub mod names;
pub mod ready;
mod request;
mod seccomp;
pub mod seccomp_profile;
pub mod settings;
pub mod signals;
mod start;
mod storages;
mod volumes;

pub use environment::{parse_env_file, resolve as resolve_environment};
pub use exec::exec;
pub use health::{HealthOptions, health_check, shell};
pub use hooks::HookOptions;
pub(crate) use life::LIFE_FILE;
pub use life::{Life, LifeNote, LifeOptions, RestartDelay};
pub(crate) use ready::READINESS_FILE;
pub use request::requested;
pub use seccomp::{Seccomp, SecurityOption, parse_security_option};
pub(crate) use start::REQUEST_FILE;
pub use start::{can_start_again, create, start, start_again};
pub use storages::{IMAGE_DISK, IMAGE_DISK_SLOT, IMAGE_SLOT, RootServing, image_name, storages};
pub use volumes::{check_all as check_volumes, name as volume_name, parse as parse_volume};

/// The container options of `thaw run`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Replaces the image's entry point; the image's command is then not used. Empty: no entry point.
    pub entrypoint: Option<String>,
    /// Replaces the image's command.
    pub command: Vec<String>,
    /// `NAME=VALUE` entries, merged over the image's.
    pub env: Vec<String>,
    pub workdir: Option<String>,
    /// `USER[:GROUP]`, names or numbers.
    pub user: Option<String>,
    pub tty: bool,
    pub read_only: bool,
    pub seccomp: Seccomp,
    pub hostname: String,
    /// Rows and columns of the terminal.
    pub size: Option<(u16, u16)>,
    /// The volumes of its sandbox.
    pub volumes: Vec<Volume>,
    pub settings: Settings,
    /// Additions to its `/etc/hosts` and `/etc/resolv.conf`.
    pub names: Names,
    /// Start its program below a small init, which forwards signals and reaps orphans.
    pub init: bool,
    pub life: LifeOptions,
    pub health: Option<HealthCheck>,
    pub hooks: HookOptions,
    /// Kept for its clones; the caller that starts it makes the agent watch for it ([`ready::expect`]).
    pub readiness: Option<ReadinessProbe>,
}

/// The file in a sandbox's directory that holds a [`Running`].
pub const RUNNING_FILE: &str = "container.json";

/// Facts about a container that a process which did not start it needs: for `thaw exec`, and after a thaw.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    pub container_id: String,
    /// Whether its process has a terminal.
    pub tty: bool,
    pub env: Vec<String>,
    pub cwd: String,
    pub user: String,
    /// Groups of its processes besides those of the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// The capabilities of its processes. `None` in the record of an older release, which gave each container the default ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    /// `None` in the record of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<Life>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<HealthCheck>,
    #[serde(default, skip_serializing_if = "Hooks::is_none")]
    pub hooks: Hooks,
    /// Its program and its arguments. Empty in the record of an older release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// When it is ready. `None` if its creation did not say so, and in the record of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness: Option<ReadinessProbe>,
}

impl Running {
    /// The container's own process.
    pub fn process(&self) -> ProcessId {
        ProcessId {
            container: self.container_id.clone(),
            exec: self.container_id.clone(),
        }
    }

    /// How it is stopped, and when its program is started again.
    pub fn life(&self) -> Life {
        self.life.unwrap_or_default()
    }

    /// Reads it from this directory of a sandbox.
    ///
    /// # Errors
    /// [`ErrorKind::SandboxNotFound`] if the sandbox has no container yet.
    pub fn read(directory: &Path) -> Result<Running, Error> {
        let path = directory.join(RUNNING_FILE);
        thaw_records::read(&path).map_err(|e| match e {
            RecordError::Missing => {
                let id = directory.file_name().unwrap_or_default().display();
                let what = format!("sandbox {id} has no running container yet");
                Error::new(ErrorKind::SandboxNotFound, what)
            }
            other => Error::new(ErrorKind::Runtime, format!("{}: {other}", path.display())),
        })
    }

    /// Writes it to this directory of a sandbox, completely or not at all.
    pub fn write(&self, directory: &Path) -> Result<(), Error> {
        let (new, path) = (
            directory.join(RUNNING_FILE).with_extension("new"),
            directory.join(RUNNING_FILE),
        );
        let write = || -> std::io::Result<()> {
            std::fs::write(&new, thaw_records::encode(self)?)?;
            reach(Failpoint::ContainerBegun);
            std::fs::rename(&new, &path)?;
            reach(Failpoint::ContainerNoted);
            Ok(())
        };
        write().map_err(|e| Error::system(format!("cannot write {}", path.display()), &e))
    }
}

/// The container's OCI specification.
///
/// # Errors
/// [`ErrorKind::Runtime`] if neither the image nor the flags name a command.
pub fn spec(id: &str, image: &ImageConfiguration, options: &Options) -> Result<oci::Spec, Error> {
    let config = image.config().clone().unwrap_or_default();
    let args = command_line(
        config.entrypoint().clone().unwrap_or_default(),
        config.cmd().clone().unwrap_or_default(),
        options,
    )?;
    let env = environment::merge(config.env().as_deref().unwrap_or_default(), options);
    let cwd = options
        .workdir
        .clone()
        .or(config.working_dir().clone())
        .filter(|w| !w.is_empty());
    let user = options.user.clone().or(config.user().clone()).unwrap_or_default();
    let is_root = is_root(&user);
    let process = process(
        args,
        env,
        cwd.unwrap_or_else(|| "/".into()),
        user,
        options.tty,
        options.size,
    );
    let mut spec = oci::Spec {
        Version: "1.1.0".into(),
        Process: MessageField::some(process),
        Root: MessageField::some(oci::Root {
            Path: layout::root_path(id),
            Readonly: options.read_only,
            ..Default::default()
        }),
        Hostname: options.hostname.clone(),
        Mounts: defaults::mounts(),
        Linux: MessageField::some(defaults::linux(id)),
        ..Default::default()
    };
    options.settings.apply(&mut spec, is_root, &options.seccomp);
    // After a tmpfs that it may lie in.
    spec.Mounts.push(defaults::generation());
    let anonymous = &options.settings.anonymous_volumes;
    spec.Mounts
        .extend(settings::anonymous_volume::mounts(id, anonymous));
    // Last, so that a volume can lie in a tmpfs.
    spec.Mounts.extend(volumes::mounts(&options.volumes));
    options.names.annotate(&mut spec.Annotations);
    if options.init {
        spec.Annotations.insert(annotations::INIT.into(), "true".into());
    }
    Ok(spec)
}

/// The process for `thaw exec`: with the container's environment, directory and user, unless the flags set others.
pub fn exec_process(running: &Running, options: &Options) -> oci::Process {
    let env = environment::merge(&running.env, options);
    let cwd = options.workdir.clone().unwrap_or_else(|| running.cwd.clone());
    let user = options.user.clone().unwrap_or_else(|| running.user.clone());
    let is_root = is_root(&user);
    let mut process = process(options.command.clone(), env, cwd, user, options.tty, options.size);
    process.User.mut_or_insert_default().AdditionalGroups = running.groups.clone();
    if let Some(capabilities) = &running.capabilities {
        process.Capabilities = MessageField::some(defaults::capabilities(capabilities, is_root));
    }
    process
}

/// The facts of this specification that a later `thaw exec` needs.
pub fn running(id: &str, spec: &oci::Spec) -> Running {
    Running {
        container_id: id.into(),
        tty: spec.Process.Terminal,
        env: spec.Process.Env.clone(),
        cwd: spec.Process.Cwd.clone(),
        user: spec.Process.User.Username.clone(),
        groups: spec.Process.User.AdditionalGroups.clone(),
        capabilities: Some(spec.Process.Capabilities.Bounding.clone()),
        life: None,
        health: None,
        hooks: Hooks::default(),
        args: spec.Process.Args.clone(),
        readiness: None,
    }
}

fn process(
    args: Vec<String>,
    env: Vec<String>,
    cwd: String,
    user: String,
    tty: bool,
    size: Option<(u16, u16)>,
) -> oci::Process {
    let is_root = is_root(&user);
    oci::Process {
        Terminal: tty,
        ConsoleSize: match size {
            Some((rows, columns)) if tty => MessageField::some(oci::Box {
                Height: rows.into(),
                Width: columns.into(),
                ..Default::default()
            }),
            _ => MessageField::none(),
        },
        User: MessageField::some(oci::User {
            Username: user,
            ..Default::default()
        }),
        Args: args,
        Env: env,
        Cwd: cwd,
        Capabilities: MessageField::some(defaults::capabilities(&defaults::default_capabilities(), is_root)),
        Rlimits: defaults::rlimits(),
        ..Default::default()
    }
}

/// As in `docker run`, the entry point flag also drops the image's command, whose arguments were meant for another program.
fn command_line(entrypoint: Vec<String>, cmd: Vec<String>, options: &Options) -> Result<Vec<String>, Error> {
    let (mut args, cmd) = match &options.entrypoint {
        Some(program) if program.is_empty() => (Vec::new(), Vec::new()),
        Some(program) => (vec![program.clone()], Vec::new()),
        None => (entrypoint, cmd),
    };
    args.extend(if options.command.is_empty() {
        cmd
    } else {
        options.command.clone()
    });
    match args.first() {
        Some(program) if !program.is_empty() => Ok(args),
        _ => Err(Error::new(ErrorKind::Runtime, "no command: the image names none")
            .remedy("give one after the image, or with --entrypoint")),
    }
}

fn is_root(user: &str) -> bool {
    matches!(user.split(':').next(), Some("" | "root" | "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(json: &str) -> ImageConfiguration {
        let text = format!(
            r#"{{"architecture":"amd64","os":"linux","config":{json},"rootfs":{{"type":"layers","diff_ids":[]}}}}"#
        );
        ImageConfiguration::from_reader(text.as_bytes()).unwrap()
    }

    fn args(json: &str, options: Options) -> Result<Vec<String>, Error> {
        spec("c", &image(json), &options).map(|s| s.Process.Args.clone())
    }

    #[test]
    fn entry_point_and_command_combine_as_under_docker() {
        let both = r#"{"Entrypoint":["/entry","-x"],"Cmd":["serve"]}"#;
        assert_eq!(args(both, Options::default()).unwrap(), ["/entry", "-x", "serve"]);
        let command = Options {
            command: vec!["ls".into(), "-l".into()],
            ..Default::default()
        };
        assert_eq!(args(both, command.clone()).unwrap(), ["/entry", "-x", "ls", "-l"]);
        let entrypoint = Options {
            entrypoint: Some("/bin/sh".into()),
            ..Default::default()
        };
        assert_eq!(
            args(both, entrypoint.clone()).unwrap(),
            ["/bin/sh"],
            "the image's command is dropped"
        );
        let all = Options {
            entrypoint: Some("/bin/sh".into()),
            ..command
        };
        assert_eq!(args(both, all).unwrap(), ["/bin/sh", "ls", "-l"]);
        let error = args("{}", Options::default()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Runtime);
        let cleared = Options {
            entrypoint: Some(String::new()),
            ..Default::default()
        };
        assert!(args(both, cleared).is_err());
    }

    #[test]
    fn flags_win_over_the_image() {
        let config = image(r#"{"Cmd":["x"],"User":"www","WorkingDir":"/srv","Env":["PATH=/p","A=image"]}"#);
        let plain = spec("c", &config, &Options::default()).unwrap();
        assert_eq!(
            (plain.Process.Cwd.as_str(), plain.Process.User.Username.as_str()),
            ("/srv", "www")
        );
        assert!(
            plain.Process.Capabilities.Effective.is_empty(),
            "only root starts with capabilities"
        );
        assert!(!plain.Process.Capabilities.Bounding.is_empty());
        let options = Options {
            user: Some("0:5".into()),
            workdir: Some("/w".into()),
            env: vec!["A=flag".into()],
            ..Default::default()
        };
        let flagged = spec("c", &config, &options).unwrap();
        assert_eq!(
            (
                flagged.Process.Cwd.as_str(),
                flagged.Process.User.Username.as_str()
            ),
            ("/w", "0:5")
        );
        assert!(
            flagged
                .Process
                .Capabilities
                .Effective
                .contains(&"CAP_CHOWN".to_string())
        );
        assert!(flagged.Process.Env.contains(&"A=flag".to_string()));
        assert!(!flagged.Process.Env.contains(&"A=image".to_string()));
    }

    #[test]
    fn an_exec_takes_what_the_container_has() {
        let config = image(r#"{"Cmd":["x"],"User":"www","WorkingDir":"/srv","Env":["PATH=/p"]}"#);
        let spec = spec("c", &config, &Options::default()).unwrap();
        let process = exec_process(
            &running("c", &spec),
            &Options {
                command: vec!["id".into()],
                env: vec!["B=1".into()],
                ..Default::default()
            },
        );
        assert_eq!(
            (process.Cwd.as_str(), process.User.Username.as_str()),
            ("/srv", "www")
        );
        assert!(process.Env.contains(&"PATH=/p".to_string()) && process.Env.contains(&"B=1".to_string()));
        assert_eq!(process.Args, ["id"]);
    }

    #[test]
    fn a_container_has_its_own_namespaces_but_the_guests_network() {
        let spec = spec("c", &image(r#"{"Cmd":["x"]}"#), &Options::default()).unwrap();
        let kinds: Vec<_> = spec.Linux.Namespaces.iter().map(|n| n.Type.as_str()).collect();
        assert!(kinds.contains(&"pid") && kinds.contains(&"mount"));
        assert!(!kinds.contains(&"network"));
        assert!(spec.Linux.MaskedPaths.contains(&"/proc/kcore".to_string()));
        assert!(
            spec.Mounts
                .iter()
                .any(|m| m.destination == "/sys/fs/cgroup" && m.type_ == "cgroup2")
        );
    }

    #[test]
    fn generation_is_read_only_and_within_a_tmpfs() {
        let options = Options {
            settings: Settings {
                tmpfs: vec!["/run".parse().unwrap()],
                ..Settings::default()
            },
            ..Options::default()
        };
        let spec = spec("c", &image(r#"{"Cmd":["x"]}"#), &options).unwrap();
        let at = |path: &str| spec.Mounts.iter().position(|m| m.destination == path).unwrap();
        let generation = at("/run/thaw/generation");
        assert!(generation > at("/run"));
        assert!(spec.Mounts[generation].options.contains(&"ro".to_owned()));
    }

    #[test]
    fn containers_are_confined_unless_they_ask_not_to_be() {
        let config = image(r#"{"Cmd":["x"]}"#);
        let plain = spec("c", &config, &Options::default()).unwrap();
        assert!(plain.Linux.Seccomp.is_some());
        let unconfined = Options {
            seccomp: Seccomp::Unconfined,
            ..Options::default()
        };
        assert!(spec("c", &config, &unconfined).unwrap().Linux.Seccomp.is_none());
    }

    #[test]
    fn init_is_an_annotation_of_the_specification() {
        let config = image(r#"{"Cmd":["x"]}"#);
        let options = Options {
            init: true,
            ..Options::default()
        };
        assert_eq!(
            spec("c", &config, &options).unwrap().Annotations[annotations::INIT],
            "true"
        );
        let plain = spec("c", &config, &Options::default()).unwrap();
        assert!(plain.Annotations.is_empty());
    }

    #[test]
    fn note_of_a_container_of_the_previous_release_is_read() {
        let running: Running = thaw_record_fixtures::check("container.json");
        assert_eq!((running.user.as_str(), running.tty), ("33:33", true));
        assert_eq!(running.readiness, None);
    }
}
