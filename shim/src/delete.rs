//! The `delete` command: containerd runs it in a bundle whose shim is gone, to end and remove that shim's resources.

use std::io::Write;
use std::path::Path;

use rustix::mount::{UnmountFlags, unmount};
use thaw_protocol::shim::task::DeleteResponse;
use thaw_protocol::shim::{Message, MessageField, Timestamp};

use crate::address::Address;
use crate::arguments::Arguments;
use crate::error::{Error, Result, WithContext};
use crate::hooks::{self, State};
use crate::id::check_id;
use crate::machine::MachineRecord;
use crate::process::KILLED;
use crate::role::Role;
use crate::spec::{self, config::Spec};
use crate::thawd::{END_LIMIT, Thawd};
use crate::{info, warning};

/// Cleans up, and writes the container's exit status for containerd.
pub fn run(arguments: &Arguments) -> Result<()> {
    check_id(&arguments.id)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .with_context(|| "start the runtime".into())?;
    runtime.block_on(clean(arguments, &Thawd::from_env()));
    let answer = DeleteResponse {
        exit_status: KILLED,
        exited_at: MessageField::some(Timestamp::now()),
        pid: MachineRecord::read(&arguments.bundle).map_or(0, |note| note.vmm.unsigned_abs()),
        ..Default::default()
    };
    let bytes = answer
        .write_to_bytes()
        .map_err(|e| Error::Invalid(e.to_string()))?;
    let mut out = std::io::stdout().lock();
    out.write_all(&bytes)
        .and_then(|()| out.flush())
        .with_context(|| "answer containerd".into())
}

/// Removes the leftovers of a container. Failures are logged, because containerd does not retry.
pub async fn clean(arguments: &Arguments, thawd: &Thawd) {
    let bundle = &arguments.bundle;
    let spec = match spec::read_if_any(&bundle.join("config.json")) {
        Ok(spec) => spec.unwrap_or_default(),
        Err(e) => {
            info!("{e}");
            Spec::default()
        }
    };
    let role = Role::of_bundle(&arguments.id, &spec.annotations, bundle).unwrap_or(Role::Single);
    let address = Address::of(&arguments.address, &arguments.namespace, role.pod(&arguments.id));
    let note = MachineRecord::read(bundle);
    // If the shim still runs, only this container failed to start: the pod stays.
    if !address.is_served() {
        if let Some(note) = &note {
            end(thawd, &note.sandbox).await;
        }
        let _ = std::fs::remove_file(address.path());
    }
    unmount_rootfs(bundle);
    // Without a record the shim has removed the container and run its hooks, or there never was a machine.
    let Some(note) = note else { return };
    let state = State {
        oci_version: &spec.oci_version,
        id: &arguments.id,
        status: "stopped",
        pid: note.vmm,
        bundle,
        annotations: &spec.annotations,
    };
    hooks::run_each(&spec.hooks.poststop, state).await;
}

async fn end(thawd: &Thawd, sandbox: &str) {
    match tokio::time::timeout(END_LIMIT, thawd.end(sandbox)).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => warning!("microVM {sandbox} could not be ended; thawd will end it: {e}"),
        Err(_) => warning!("microVM {sandbox} was not ended within {} s", END_LIMIT.as_secs()),
    }
}

/// Unmounts everything at the bundle's root file system.
fn unmount_rootfs(bundle: &Path) {
    let rootfs = bundle.join("rootfs");
    while unmount(&rootfs, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
}
