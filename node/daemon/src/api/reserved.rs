//! Fields that only an administrator may set: those that name files, processes or ports of the host, or change what all tenants share.
//!
//! Invariant: every body is checked before it is used ([`super::extract::Body`]). Each check names all fields of its type and of the types
//! in it, so that a new field does not compile without a decision here.

use std::str::FromStr;

use thaw_images::reference::ImageRef;
use thaw_protocol::api::{
    ChangeSandbox, ChangeSnapshot, ContainerSettings, CreateSandbox, ExecProcess, ForkSandbox, FreezeSandbox,
    MakeDirectory, MoveFile, NetworkPolicy, PauseSandbox, ProcessInput, ProcessSignal, PublishedPort,
    PullImage, PullSnapshot, PushSnapshot, SignalContainer, StartContainer, StopContainer, TenantLimits,
    ThawSandbox,
};

use super::grant::Role;
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};

/// A body that may have reserved fields.
pub trait Reserved {
    /// The first of its reserved fields that is set.
    fn reserved(&self) -> Option<&'static str>;
}

/// Fails if this caller may not set a field of the body.
///
/// # Errors
/// [`ApiCode::RoleTooLow`], with the field's name.
pub fn check(peer: &Peer, request: &impl Reserved) -> Result<(), Refusal> {
    match request.reserved() {
        Some(field) if !peer.role().suffices(Role::Admin) => {
            let what = format!(
                "{field} is for the role admin, and this caller's is {}",
                peer.role()
            );
            Err(Refusal::new(ApiCode::RoleTooLow, what))
        }
        _ => Ok(()),
    }
}

/// The first field that is set.
fn first<const N: usize>(fields: [(&'static str, bool); N]) -> Option<&'static str> {
    let mut fields = fields.into_iter();
    fields.find(|(_, is_there)| *is_there).map(|(field, _)| field)
}

/// Whether an image is a directory or a file of the host, or in a registry on the host's loopback. thawd uses such a registry without TLS,
/// so any program that answers there could redirect thawd to any other address. An invalid reference is refused later.
fn is_of_host(image: &str) -> bool {
    match ImageRef::from_str(image) {
        Ok(ImageRef::Registry(of)) => of.is_loopback(),
        Ok(ImageRef::Layout { .. } | ImageRef::Archive { .. }) => true,
        Err(_) => false,
    }
}

/// Whether the request chooses a port or an address of the host: a free port may be meant for another server, and not every address is for
/// tenants.
fn chooses_a_port(publish: &[PublishedPort]) -> bool {
    publish.iter().any(|port| {
        let PublishedPort {
            address,
            host,
            guest: _,
            protocol: _,
        } = port;
        *host != 0 || address.is_some()
    })
}

/// All fields of a container concern only the guest.
fn of_guest(container: &StartContainer) {
    let StartContainer {
        entrypoint: _,
        command: _,
        env: _,
        workdir: _,
        user: _,
        tty: _,
        read_only: _,
        seccomp: _,
        settings,
        on_exit: _,
        readiness: _,
        restart: _,
        stop_signal: _,
        stop_timeout_s: _,
        health_check: _,
        no_health_check: _,
        hooks: _,
        no_image_hooks: _,
    } = container;
    let ContainerSettings {
        tmpfs: _,
        anonymous_volumes: _,
        shm_bytes: _,
        ulimits: _,
        sysctls: _,
        cap_add: _,
        cap_drop: _,
        devices: _,
        privileged: _,
        no_new_privileges: _,
        seccomp_profile: _,
        init: _,
        extra_hosts: _,
        dns: _,
        dns_search: _,
        dns_options: _,
        group_add: _,
        domainname: _,
    } = settings;
}

impl Reserved for StopContainer {
    fn reserved(&self) -> Option<&'static str> {
        let StopContainer {
            signal: _,
            timeout_s: _,
        } = self;
        None
    }
}

impl Reserved for MakeDirectory {
    fn reserved(&self) -> Option<&'static str> {
        let MakeDirectory {
            path: _,
            mode: _,
            parents: _,
        } = self;
        None
    }
}

impl Reserved for ProcessInput {
    fn reserved(&self) -> Option<&'static str> {
        let ProcessInput {
            process: _,
            data: _,
            encoding: _,
            eof: _,
        } = self;
        None
    }
}

impl Reserved for ProcessSignal {
    fn reserved(&self) -> Option<&'static str> {
        let ProcessSignal {
            process: _,
            signal: _,
        } = self;
        None
    }
}

impl Reserved for MoveFile {
    fn reserved(&self) -> Option<&'static str> {
        let MoveFile {
            from: _,
            to: _,
            replace: _,
        } = self;
        None
    }
}

impl Reserved for CreateSandbox {
    fn reserved(&self) -> Option<&'static str> {
        let CreateSandbox {
            image,
            plain_http,
            publish,
            client,
            record,
            record_to,
            volumes,
            pull: _,
            cpus: _,
            memory_mib: _,
            disk_mib: _,
            hostname: _,
            name: _,
            network: _,
            network_policy: _,
            command: _,
            container,
            cold: _,
            memory_mode: _,
            prefetch: _,
            root: _,
            labels: _,
            timeout_s: _,
            idle_timeout_s: _,
            on_timeout: _,
            cpu_limit_millis: _,
            rate_limits: _,
            timings: _,
        } = self;
        if let Some(container) = container {
            of_guest(container);
        }
        first([
            ("record_to", record_to.is_some()),
            ("volumes", !volumes.is_empty()),
            ("an image of the host", is_of_host(image)),
            // An image without TLS can be changed in transit, and all tenants share the store.
            ("plain_http", *plain_http),
            ("a chosen port or address of the host", chooses_a_port(publish)),
            ("client", client.is_some()),
            // The recording is read ahead for the starts of every tenant.
            ("record", *record),
        ])
    }
}

impl Reserved for ThawSandbox {
    fn reserved(&self) -> Option<&'static str> {
        let ThawSandbox {
            directory,
            client,
            publish,
            snapshot,
            hostname: _,
            name: _,
            memory_mode: _,
            network_policy: _,
            rate_limits: _,
            labels: _,
            timeout_s: _,
            idle_timeout_s: _,
            on_timeout: _,
            require_hook: _,
            timings: _,
        } = self;
        first([
            ("directory", directory.is_some()),
            (
                "a reference of the host",
                snapshot
                    .as_deref()
                    .is_some_and(|it| it.contains('/') && is_of_host(it)),
            ),
            ("client", client.is_some()),
            ("a chosen port or address of the host", chooses_a_port(publish)),
        ])
    }
}

impl Reserved for FreezeSandbox {
    fn reserved(&self) -> Option<&'static str> {
        let FreezeSandbox {
            directory,
            sign,
            name: _,
            labels: _,
            delta: _,
            stop: _,
            require_hook: _,
        } = self;
        first([("directory", directory.is_some()), ("sign", sign.is_some())])
    }
}

impl Reserved for ChangeSnapshot {
    fn reserved(&self) -> Option<&'static str> {
        let ChangeSnapshot { name: _, labels: _ } = self;
        None
    }
}

impl Reserved for PushSnapshot {
    fn reserved(&self) -> Option<&'static str> {
        let PushSnapshot {
            reference,
            plain_http,
        } = self;
        first([
            ("a reference of the host", is_of_host(reference)),
            // Guest memory has secrets.
            ("plain_http", *plain_http),
        ])
    }
}

impl Reserved for PullSnapshot {
    fn reserved(&self) -> Option<&'static str> {
        let PullSnapshot {
            reference,
            plain_http,
            name: _,
            labels: _,
        } = self;
        first([
            ("a reference of the host", is_of_host(reference)),
            // Without TLS it can be changed in transit, and so can images, which all tenants share.
            ("plain_http", *plain_http),
        ])
    }
}

impl Reserved for ForkSandbox {
    fn reserved(&self) -> Option<&'static str> {
        let ForkSandbox {
            sign,
            require_hook: _,
            count: _,
            memory_mode: _,
            labels: _,
            timeout_s: _,
            idle_timeout_s: _,
            on_timeout: _,
        } = self;
        first([("sign", sign.is_some())])
    }
}

impl Reserved for PullImage {
    fn reserved(&self) -> Option<&'static str> {
        let PullImage {
            image,
            plain_http,
            full: _,
        } = self;
        first([
            ("an image of the host", is_of_host(image)),
            ("plain_http", *plain_http),
        ])
    }
}

impl Reserved for ChangeSandbox {
    fn reserved(&self) -> Option<&'static str> {
        let ChangeSandbox {
            rate_limits: _,
            timeout_s: _,
            idle_timeout_s: _,
            on_timeout: _,
            on_exit: _,
        } = self;
        None
    }
}

impl Reserved for PauseSandbox {
    fn reserved(&self) -> Option<&'static str> {
        let PauseSandbox { memory: _ } = self;
        None
    }
}

impl Reserved for TenantLimits {
    fn reserved(&self) -> Option<&'static str> {
        // Only an administrator may send it.
        let TenantLimits {
            running: _,
            paused: _,
            vcpus: _,
            memory_mib: _,
            disk_mib: _,
            snapshot_bytes: _,
            creations_per_minute: _,
        } = self;
        None
    }
}

impl Reserved for SignalContainer {
    fn reserved(&self) -> Option<&'static str> {
        let SignalContainer { signal: _ } = self;
        None
    }
}

impl Reserved for NetworkPolicy {
    fn reserved(&self) -> Option<&'static str> {
        let NetworkPolicy {
            egress: _,
            default: _,
            domains: _,
        } = self;
        None
    }
}

impl Reserved for ExecProcess {
    fn reserved(&self) -> Option<&'static str> {
        let ExecProcess {
            command: _,
            env: _,
            workdir: _,
            user: _,
            tty: _,
            size: _,
            stdin: _,
            encoding: _,
            stream: _,
            keep: _,
        } = self;
        None
    }
}
