//! The `start` command: containerd runs it for each container, and then talks to the shim at the address it
//! prints.
//!
//! The first container of a pod starts the shim; the others get its address. The shim receives the listening
//! socket as standard input, so clients can connect immediately.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::address::Address;
use crate::arguments::Arguments;
use crate::cgroup;
use crate::error::{Error, Result, WithContext};
use crate::id::check_id;
use crate::options;
use crate::role::Role;
use crate::spec;

/// Prints the address of the container's shim.
pub fn run(arguments: &Arguments) -> Result<()> {
    let address = start(arguments)?;
    address.write(&arguments.bundle)?;
    let mut out = std::io::stdout().lock();
    write!(out, "{}", address.text())
        .and_then(|()| out.flush())
        .with_context(|| "answer containerd".into())
}

fn start(arguments: &Arguments) -> Result<Address> {
    check_id(&arguments.id)?;
    // A pod created through the sandbox API has no specification.
    let spec = spec::read_if_any(&arguments.bundle.join("config.json"))?.unwrap_or_default();
    let role = Role::of_bundle(&arguments.id, &spec.annotations, &arguments.bundle)?;
    let address = Address::of(&arguments.address, &arguments.namespace, role.pod(&arguments.id));
    if address.is_served() {
        return Ok(address);
    }
    if let Role::Member { pod } = &role {
        return Err(Error::State(format!(
            "container {} is of pod {pod}, whose shim has exited",
            arguments.id
        )));
    }
    let options = options::from_stdin()?;
    if let Some(options) = &options {
        options::save(options, &arguments.bundle)?;
    }
    let cgroup = options.as_ref().and_then(cgroup::requested);
    let listener = listen(address.path())?;
    let mut child = spawn(arguments, listener)?;
    raise_oom_score(child.id());
    if let Some(path) = cgroup
        && let Err(e) = cgroup::join(Path::new(cgroup::ROOT), &path, child.id())
    {
        let _ = child.kill();
        return Err(e);
    }
    Ok(address)
}

/// Listens on the socket, and replaces one that a dead shim left.
fn listen(path: &Path) -> Result<UnixListener> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    let what = || format!("listen on {}", path.display());
    if let Some(directory) = path.parent() {
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(directory);
        made.with_context(|| format!("create {}", directory.display()))?;
    }
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).with_context(what)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).with_context(what)?;
    Ok(listener)
}

/// Starts the shim process, which outlives this command and containerd.
fn spawn(arguments: &Arguments, listener: UnixListener) -> Result<Child> {
    let program = std::env::current_exe().with_context(|| "find this program".into())?;
    Command::new(program)
        .args(["-namespace", &arguments.namespace, "-id", &arguments.id])
        .args(["-address", &arguments.address, "serve"])
        .current_dir(&arguments.bundle)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        // containerd reads the output of this command to its end.
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| "start the shim".into())
}

/// Lets the OOM killer choose the shim before containerd, as containerd's own shims do: its pod can be
/// cleaned up.
fn raise_oom_score(pid: u32) {
    let path = |pid: &str| format!("/proc/{pid}/oom_score_adj");
    let Some(parent) = rustix::process::getppid() else {
        return;
    };
    let read = std::fs::read_to_string(path(&parent.as_raw_nonzero().to_string()));
    if let Some(score) = read.ok().and_then(|text| text.trim().parse::<i32>().ok()) {
        // Not permitted everywhere, and only advice.
        let _ = std::fs::write(path(&pid.to_string()), (score + 1).min(1000).to_string());
    }
}
