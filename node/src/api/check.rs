//! What a request may ask for, before anything is made for it.

use std::collections::BTreeMap;
use std::path::Path;

use thaw_pools::network::Terms;
use thaw_protocol::api::{CreateSandbox, DISK_MIB, FreezeSandbox, NetworkPolicy, PublishedPort, ThawSandbox};
use thaw_protocol::control::{MEMORY_MIB, MemoryMode, VCPUS};

use super::problem::{ApiCode, Refusal};
use super::watch::selector::check_labels;
use crate::exit::{ExitCode, Failure};

/// Longest image or path, characters.
const MAX_TEXT: usize = 1024;
/// Longest name of a sandbox, characters.
const MAX_NAME: usize = 253;

/// A sandbox to make of an image.
pub fn create(request: &CreateSandbox) -> Result<(), Refusal> {
    if !VCPUS.contains(&request.cpus) {
        return Err(invalid(format!("cpus is {} to {}", VCPUS.start(), VCPUS.end())));
    }
    let (least, most) = (*MEMORY_MIB.start(), *MEMORY_MIB.end());
    if request.memory_mib < least {
        let what = format!(
            "{} MiB of memory is too small for a guest: the least is {least}",
            request.memory_mib
        );
        return Err(Failure::new(ExitCode::MemoryTooSmall, what).into());
    }
    if request.memory_mib > most {
        return Err(invalid(format!("memory_mib is at most {most}")));
    }
    if !DISK_MIB.contains(&request.disk_mib) {
        return Err(invalid(format!(
            "disk_mib is {} to {}",
            DISK_MIB.start(),
            DISK_MIB.end()
        )));
    }
    plain("image", &request.image, MAX_TEXT)?;
    memory_mode(request.memory_mode)?;
    if let Some(file) = &request.record_to {
        absolute("record_to", file)?;
    }
    network(request.network_policy.as_ref(), &request.publish)?;
    named(&request.name, &request.hostname)?;
    terms(&request.labels, request.timeout_s)
}

/// A sandbox to make of a snapshot.
pub fn thaw(request: &ThawSandbox) -> Result<(), Refusal> {
    absolute("directory", &request.directory)?;
    network(request.network_policy.as_ref(), &request.publish)?;
    memory_mode(request.memory_mode)?;
    named(&request.name, &request.hostname)?;
    terms(&request.labels, request.timeout_s)
}

/// A network policy, and ports to be published.
pub fn network(policy: Option<&NetworkPolicy>, publish: &[PublishedPort]) -> Result<(), Refusal> {
    Terms::read(policy, publish).map(drop).map_err(invalid)
}

/// A sandbox to freeze.
pub fn freeze(request: &FreezeSandbox) -> Result<(), Refusal> {
    absolute("directory", &request.directory)?;
    match &request.sign {
        Some(key) => absolute("sign", key),
        None => Ok(()),
    }
}

fn invalid(what: impl std::fmt::Display) -> Refusal {
    Refusal::new(ApiCode::Invalid, what)
}

fn terms(labels: &BTreeMap<String, String>, timeout_s: Option<u32>) -> Result<(), Refusal> {
    check_labels(labels).map_err(invalid)?;
    match timeout_s {
        Some(0) => Err(invalid("timeout_s is at least 1")),
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
    match (1..=most).contains(&length) && !text.chars().any(char::is_control) {
        true => Ok(()),
        false => Err(invalid(format!(
            "{field} is 1 to {most} characters, no control characters"
        ))),
    }
}

fn absolute(field: &str, path: &Path) -> Result<(), Refusal> {
    let text = path.to_string_lossy();
    match path.is_absolute() && !text.contains('\0') && text.chars().count() <= MAX_TEXT {
        true => Ok(()),
        false => Err(invalid(format!(
            "{field} is an absolute path of at most {MAX_TEXT} characters"
        ))),
    }
}

/// Its sandboxes outlive thawd: nobody would serve their pages then.
fn memory_mode(mode: MemoryMode) -> Result<(), Refusal> {
    match mode {
        MemoryMode::Uffd => Err(invalid("memory_mode is cow or populate")),
        MemoryMode::Cow | MemoryMode::Populate => Ok(()),
    }
}
