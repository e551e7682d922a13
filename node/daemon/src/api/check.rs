//! Validates requests before anything is created for them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Component, Path};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use thaw_network::Terms;
use thaw_protocol::api::{
    CPU_LIMIT_MILLIS, ChangeSandbox, ChangeSnapshot, CreateSandbox, DISK_MIB, Encoding, ExecProcess,
    ForkSandbox, FreezeSandbox, NetworkPolicy, OnTimeout, PublishedPort, PullImage, PullSnapshot,
    PushSnapshot, RateLimits, STOP_TIMEOUT_S, StartContainer, StopContainer, TerminalSize, ThawSandbox,
};
use thaw_protocol::control::{MEMORY_MIB, MemoryMode, VCPUS};
use thaw_sandbox::container::{Options, check_volumes, ready, requested};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::id;

use super::peer::Peer;
use super::problem::{ApiCode, Refusal};
use super::watch::selector::check_labels;

/// Longest image or path, characters.
const MAX_TEXT: usize = 1024;
/// Longest command in a sandbox's description, bytes: every watcher gets it with each change.
const MAX_COMMAND: usize = 32 << 10;
/// Longest name of a sandbox, characters.
const MAX_NAME: usize = 253;
/// Most input that a process with `keep` is started with, bytes: what a pipe holds, so that it is written at once.
const MAX_KEPT_INPUT: usize = 64 << 10;
/// The signals that Linux has.
const SIGNALS: RangeInclusive<u8> = 1..=64;
/// Characters of an invalid value that an error shows.
const SHOWN: usize = 64;
/// Most clones of one fork.
const MOST_CLONES: u8 = 32;

/// The creation of a sandbox from an image.
pub fn create(request: &CreateSandbox) -> Result<(), Refusal> {
    within("cpus", request.cpus, &VCPUS)?;
    let least = *MEMORY_MIB.start();
    if request.memory_mib < least {
        let what = format!(
            "memory_mib is {}, which is too small for a guest: the least is {least}",
            request.memory_mib
        );
        return Err(Error::new(ErrorKind::MemoryTooSmall, what).into());
    }
    within("memory_mib", request.memory_mib, &MEMORY_MIB)?;
    within("disk_mib", request.disk_mib, &DISK_MIB)?;
    if let Some(millis) = request.cpu_limit_millis {
        within("cpu_limit_millis", millis, &CPU_LIMIT_MILLIS)?;
    }
    plain("image", &request.image, MAX_TEXT)?;
    memory_mode(request.memory_mode)?;
    if let Some(file) = &request.record_to {
        absolute("record_to", file)?;
    }
    network(request.network_policy.as_ref(), &request.publish)?;
    check_volumes(&request.volumes).map_err(|why| invalid(format!("volumes: {why}")))?;
    rate_limits(&request.rate_limits)?;
    if let Some(asked) = &request.container {
        if !request.command.is_empty() {
            return Err(invalid(
                "command goes into container.command if there is a container",
            ));
        }
        container(asked).map_err(|refusal| refusal.within("container."))?;
    }
    let command = request
        .container
        .as_ref()
        .map_or(&request.command, |c| &c.command);
    if command.iter().map(String::len).sum::<usize>() > MAX_COMMAND {
        return Err(invalid(format!("command is at most {MAX_COMMAND} bytes")));
    }
    named(&request.name, &request.hostname)?;
    releasable(request)?;
    terms(&request.labels, request.timeout_s, request.idle_timeout_s)
}

/// A sandbox that its timeout pauses must be one whose memory can be released.
fn releasable(request: &CreateSandbox) -> Result<(), Refusal> {
    let kept = [
        ("volumes", !request.volumes.is_empty()),
        ("cold", request.cold),
        ("client", request.client.is_some()),
    ];
    match kept.into_iter().find(|(_, is_there)| *is_there) {
        Some((field, _)) if request.on_timeout == OnTimeout::Pause => Err(invalid(format!(
            "on_timeout is pause, and the memory of a sandbox with {field} cannot be released"
        ))),
        _ => Ok(()),
    }
}

/// The container of a creation.
fn container(asked: &StartContainer) -> Result<(), Refusal> {
    if !asked.command.is_empty() {
        command(&asked.command)?;
    }
    if asked.entrypoint.as_ref().is_some_and(|e| e.contains('\0')) {
        return Err(invalid("entrypoint is without NUL"));
    }
    if let Some(probe) = &asked.readiness {
        ready::check(probe).map_err(|e| invalid(format!("readiness: {e}")))?;
    }
    if let Some(check) = &asked.health_check {
        check.check().map_err(|e| invalid(format!("health_check.{e}")))?;
    }
    asked.hooks.check().map_err(|e| invalid(format!("hooks.{e}")))?;
    asked
        .restart
        .check()
        .map_err(|e| invalid(format!("restart.{e}")))?;
    let how = StopContainer {
        signal: asked.stop_signal,
        timeout_s: asked.stop_timeout_s,
    };
    stop(&how).map_err(|refusal| refusal.within("stop_"))?;
    process(&asked.env, asked.workdir.as_deref(), asked.user.as_deref())?;
    requested(asked).map(drop).map_err(invalid)
}

/// The thaw of a sandbox from a snapshot.
pub fn thaw(request: &ThawSandbox) -> Result<(), Refusal> {
    match (&request.directory, &request.snapshot) {
        (Some(directory), None) => absolute("directory", directory)?,
        (None, Some(reference)) if reference.contains('/') => {
            plain("snapshot", reference, MAX_TEXT)?;
            memory_mode_of_remote(request.memory_mode)?;
        }
        (None, Some(snapshot)) => plain("snapshot", snapshot, MAX_NAME)?,
        _ => return Err(no_snapshot()),
    }
    network(request.network_policy.as_ref(), &request.publish)?;
    memory_mode(request.memory_mode)?;
    rate_limits(&request.rate_limits)?;
    named(&request.name, &request.hostname)?;
    terms(&request.labels, request.timeout_s, request.idle_timeout_s)
}

/// A change of a sandbox.
pub fn change(change: &ChangeSandbox) -> Result<(), Refusal> {
    rate_limits(&change.rate_limits)?;
    timeout("timeout_s", change.timeout_s.flatten())?;
    timeout("idle_timeout_s", change.idle_timeout_s.flatten())
}

fn rate_limits(limits: &RateLimits) -> Result<(), Refusal> {
    limits.check().map_err(invalid)
}

/// A network policy and published ports.
pub fn network(policy: Option<&NetworkPolicy>, publish: &[PublishedPort]) -> Result<(), Refusal> {
    Terms::read(policy, publish).map(drop).map_err(invalid)
}

/// The freeze of a sandbox.
pub fn freeze(request: &FreezeSandbox) -> Result<(), Refusal> {
    if let Some(key) = &request.sign {
        absolute("sign", key)?;
    }
    let Some(directory) = &request.directory else {
        request.name.as_deref().map_or(Ok(()), snapshot_name)?;
        return terms(&request.labels, None, None);
    };
    match request.name.is_some() || !request.labels.is_empty() {
        true => Err(invalid(
            "name and labels are of stored snapshots, which have no directory",
        )),
        false => absolute("directory", directory),
    }
}

/// A change of a stored snapshot.
pub fn change_snapshot(change: &ChangeSnapshot) -> Result<(), Refusal> {
    if let Some(Some(name)) = &change.name {
        snapshot_name(name)?;
    }
    let labels = change.labels.iter().flatten().flatten();
    let labels = labels.map(|(label, value)| (label.clone(), value.clone().unwrap_or_default()));
    terms(&labels.collect(), None, None)
}

/// The push of a stored snapshot.
pub fn push_snapshot(request: &PushSnapshot) -> Result<(), Refusal> {
    plain("reference", &request.reference, MAX_TEXT)
}

/// The pull of a snapshot.
pub fn pull_snapshot(request: &PullSnapshot) -> Result<(), Refusal> {
    plain("reference", &request.reference, MAX_TEXT)?;
    request.name.as_deref().map_or(Ok(()), snapshot_name)?;
    terms(&request.labels, None, None)
}

/// A name of a stored snapshot. One that looks like an id could mean another, and one with a slash is a directory for `thaw thaw`.
fn snapshot_name(name: &str) -> Result<(), Refusal> {
    plain("name", name, MAX_NAME)?;
    match id::is_id(name) || name.contains('/') {
        true => Err(invalid(
            "name is neither 12 hexadecimal digits, which are ids, nor has it a slash",
        )),
        false => Ok(()),
    }
}

/// The error for a thaw without a snapshot, or with two.
pub fn no_snapshot() -> Refusal {
    invalid("a thaw is of either a directory or a snapshot")
}

/// A process and its input.
pub fn exec(request: &ExecProcess) -> Result<(Options, Vec<u8>), Refusal> {
    command(&request.command)?;
    process(&request.env, request.workdir.as_deref(), request.user.as_deref())?;
    if let Some(given) = request.size {
        size(given)?;
    }
    let stdin = bytes(
        "stdin",
        request.stdin.as_deref().unwrap_or_default(),
        request.encoding,
    )?;
    if request.keep && request.stream {
        return Err(invalid(
            "a process with keep is not streamed: read processes/output",
        ));
    }
    if request.keep && stdin.len() > MAX_KEPT_INPUT {
        return Err(invalid(format!(
            "stdin of a process with keep has at most {MAX_KEPT_INPUT} bytes: send more to processes/input"
        )));
    }
    let options = Options {
        command: request.command.clone(),
        env: request.env.clone(),
        workdir: request.workdir.clone(),
        user: request.user.clone(),
        tty: request.tty,
        size: request.size.map(|s| (s.rows, s.columns)),
        ..Options::default()
    };
    Ok((options, stdin))
}

/// A file's path in a container.
pub fn file(path: &str) -> Result<(), Refusal> {
    let mut parts = Path::new(path).components();
    let good = parts.next() == Some(Component::RootDir)
        && parts.clone().next().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    match good && path.len() <= MAX_TEXT && !path.contains('\0') && !path.ends_with('/') {
        true => Ok(()),
        false => {
            let what =
                format!("path is an absolute path of a file, without '..', of at most {MAX_TEXT} bytes");
            Err(Refusal::new(ApiCode::BadParameter, what))
        }
    }
}

/// What a mode is.
pub const MODE: &str = "mode is octal, at most 7777";

/// Permission bits in octal.
pub fn mode(text: &str) -> Option<u32> {
    let mode = u32::from_str_radix(text, 8).ok()?;
    (mode <= 0o7777 && text.bytes().all(|b| b.is_ascii_digit())).then_some(mode)
}

/// A path in a body.
pub fn path_in_body(field: &str, path: &str) -> Result<(), Refusal> {
    file(path).map_err(|_| {
        invalid(format!(
            "{field} is an absolute path without '..', not /, of at most {MAX_TEXT} bytes"
        ))
    })
}

/// A path of a file or a directory in a container: `/` too, and one that ends with `/` or `/.`.
pub fn directory(path: &str) -> Result<(), Refusal> {
    let is_plain = !Path::new(path)
        .components()
        .any(|part| part == Component::ParentDir);
    match is_plain && path.starts_with('/') && path.len() <= MAX_TEXT && !path.contains('\0') {
        true => Ok(()),
        false => {
            let what = format!("path is an absolute path without '..', of at most {MAX_TEXT} bytes");
            Err(Refusal::new(ApiCode::BadParameter, what))
        }
    }
}

/// Bytes in a JSON string.
pub fn bytes(field: &str, text: &str, encoding: Encoding) -> Result<Vec<u8>, Refusal> {
    match encoding {
        Encoding::Utf8 => Ok(text.as_bytes().to_vec()),
        Encoding::Base64 => STANDARD
            .decode(text)
            .map_err(|e| invalid(format!("{field} is not base64: {e}"))),
    }
}

/// A terminal's size.
pub fn size(size: TerminalSize) -> Result<(), Refusal> {
    match size.rows > 0 && size.columns > 0 {
        true => Ok(()),
        false => Err(invalid(format!(
            "size is {} rows and {} columns; each may be 1 to {}",
            size.rows,
            size.columns,
            u16::MAX
        ))),
    }
}

/// A signal.
pub fn signal(number: u8) -> Result<(), Refusal> {
    within("signal", number, &SIGNALS)
}

/// How a container is stopped.
pub fn stop(how: &StopContainer) -> Result<(), Refusal> {
    if let Some(number) = how.signal {
        signal(number)?;
    }
    match how.timeout_s {
        Some(timeout) => within("timeout_s", timeout, &STOP_TIMEOUT_S),
        None => Ok(()),
    }
}

fn command(command: &[String]) -> Result<(), Refusal> {
    match command.first().is_some_and(|program| !program.is_empty())
        && !command.iter().any(|a| a.contains('\0'))
    {
        true => Ok(()),
        false => Err(invalid("command is a program and its arguments, without NUL")),
    }
}

/// An environment.
pub fn environment(env: &[String]) -> Result<(), Refusal> {
    let good = |e: &String| e.find('=').is_some_and(|at| at > 0) && !e.contains('\0');
    // By its position: its text may be a secret.
    match env.iter().position(|e| !good(e)) {
        Some(bad) => Err(invalid(format!("env[{bad}] is not NAME=VALUE without NUL"))),
        None => Ok(()),
    }
}

/// What all kinds of processes have.
fn process(env: &[String], workdir: Option<&str>, user: Option<&str>) -> Result<(), Refusal> {
    environment(env)?;
    if let Some(directory) = workdir {
        absolute("workdir", Path::new(directory))?;
    }
    match user {
        Some(user) => plain("user", user, MAX_NAME),
        None => Ok(()),
    }
}

/// A fork.
pub fn fork(request: &ForkSandbox) -> Result<(), Refusal> {
    within("count", request.count, &(1..=MOST_CLONES))?;
    memory_mode(request.memory_mode)?;
    if let Some(key) = &request.sign {
        absolute("sign", key)?;
    }
    terms(&request.labels, request.timeout_s, request.idle_timeout_s)
}

/// The pull of an image.
pub fn pull(request: &PullImage) -> Result<(), Refusal> {
    plain("image", &request.image, MAX_TEXT)
}

fn invalid(what: impl Display) -> Refusal {
    Refusal::new(ApiCode::Invalid, what)
}

fn terms(
    labels: &BTreeMap<String, String>,
    timeout_s: Option<u32>,
    idle_timeout_s: Option<u32>,
) -> Result<(), Refusal> {
    check_labels(labels).map_err(|why| invalid(format!("labels: {why}")))?;
    timeout("timeout_s", timeout_s)?;
    timeout("idle_timeout_s", idle_timeout_s)
}

fn timeout(field: &str, seconds: Option<u32>) -> Result<(), Refusal> {
    match seconds {
        Some(seconds) => within(field, seconds, &(1..=u32::MAX)),
        None => Ok(()),
    }
}

/// A number within its range.
pub(super) fn within<N: PartialOrd + Display>(
    field: &str,
    value: N,
    range: &RangeInclusive<N>,
) -> Result<(), Refusal> {
    match range.contains(&value) {
        true => Ok(()),
        false => Err(invalid(format!(
            "{field} is {value}; it may be {} to {}",
            range.start(),
            range.end()
        ))),
    }
}

/// A name in the caller's tenant. It must not look like an id: an administrator could then mean either sandbox, and a caller could find
/// out which ids exist.
pub fn name(name: &Option<String>, peer: &Peer) -> Result<(), Refusal> {
    match name {
        Some(name) if peer.tenant().is_some() && id::is_id(name) => {
            Err(invalid("name is not 12 hexadecimal digits: those are ids"))
        }
        _ => Ok(()),
    }
}

fn named(name: &Option<String>, hostname: &Option<String>) -> Result<(), Refusal> {
    for (field, text) in [("name", name), ("hostname", hostname)] {
        if let Some(text) = text {
            plain(field, text, MAX_NAME)?;
        }
    }
    Ok(())
}

fn plain(field: &str, text: &str, most: usize) -> Result<(), Refusal> {
    let length = text.chars().count();
    if text.chars().any(char::is_control) {
        return Err(invalid(format!(
            "{field} has a control character, which it may not"
        )));
    }
    match (1..=most).contains(&length) {
        true => Ok(()),
        false => Err(invalid(format!(
            "{field} has {length} characters; it may have 1 to {most}"
        ))),
    }
}

fn absolute(field: &str, path: &Path) -> Result<(), Refusal> {
    let text = path.to_string_lossy();
    match path.is_absolute() && !text.contains('\0') && text.chars().count() <= MAX_TEXT {
        true => Ok(()),
        false => {
            let beginning: String = text.chars().take(SHOWN).collect();
            Err(invalid(format!(
                "{field} is {beginning:?}, not an absolute path of at most {MAX_TEXT} characters without NUL"
            )))
        }
    }
}

/// The memory of a snapshot in a registry comes while the sandbox runs.
fn memory_mode_of_remote(mode: MemoryMode) -> Result<(), Refusal> {
    match mode {
        MemoryMode::Populate => Err(invalid(
            "memory_mode is populate; it may be cow with a snapshot in a registry, whose memory comes while the sandbox runs: pull it first",
        )),
        MemoryMode::Cow | MemoryMode::Uffd => Ok(()),
    }
}

/// Sandboxes outlive thawd, and then no process would serve their page faults.
fn memory_mode(mode: MemoryMode) -> Result<(), Refusal> {
    match mode {
        MemoryMode::Uffd => Err(invalid("memory_mode is uffd; it may be cow or populate")),
        MemoryMode::Cow | MemoryMode::Populate => Ok(()),
    }
}
