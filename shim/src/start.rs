//! The `start` command: containerd runs it for each container, and talks to whom it names from then on.
//!
//! The first container of a pod gets a shim; the others are told of it. The shim is started listening: it has its socket as
//! standard input, so nobody can connect too early.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::address::Address;
use crate::arguments::Arguments;
use crate::cgroup;
use crate::error::{Error, For, Result};
use crate::grouping::Role;
use crate::options;
use crate::service::check_id;
use crate::spec;

/// Says where the container's shim listens.
pub fn run(arguments: &Arguments) -> Result<()> {
    let address = start(arguments)?;
    address.write(&arguments.bundle)?;
    let mut out = std::io::stdout().lock();
    write!(out, "{}", address.text())
        .and_then(|()| out.flush())
        .for_(|| "answer containerd".into())
}

fn start(arguments: &Arguments) -> Result<Address> {
    check_id(&arguments.id)?;
    // A pod that is made by the sandbox API has no specification.
    let spec = spec::read_if_any(&arguments.bundle.join("config.json"))?.unwrap_or_default();
    let role = Role::of_bundle(&arguments.id, &spec.annotations, &arguments.bundle)?;
    let address = Address::of(&arguments.address, &arguments.namespace, role.pod(&arguments.id));
    if address.is_served() {
        return Ok(address);
    }
    if let Role::Member { pod } = &role {
        return Err(Error::State(format!(
            "container {} is of pod {pod}, whose shim does not run any more",
            arguments.id
        )));
    }
    let told = options::told()?;
    if let Some(told) = &told {
        options::keep(told, &arguments.bundle)?;
    }
    let cgroup = told.as_ref().and_then(cgroup::wanted);
    let listener = listen(address.path())?;
    let mut child = spawn(arguments, listener)?;
    spare_containerd(child.id());
    if let Some(path) = cgroup
        && let Err(e) = cgroup::join(Path::new(cgroup::ROOT), &path, child.id())
    {
        let _ = child.kill();
        return Err(e);
    }
    Ok(address)
}

/// A socket a dead shim left is replaced.
fn listen(path: &Path) -> Result<UnixListener> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    let what = || format!("listen on {}", path.display());
    if let Some(directory) = path.parent() {
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(directory);
        made.for_(|| format!("create {}", directory.display()))?;
    }
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).for_(what)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).for_(what)?;
    Ok(listener)
}

/// The shim itself, which outlives us and containerd.
fn spawn(arguments: &Arguments, listener: UnixListener) -> Result<Child> {
    let program = std::env::current_exe().for_(|| "find this program".into())?;
    Command::new(program)
        .args(["-namespace", &arguments.namespace, "-id", &arguments.id])
        .args(["-address", &arguments.address, "serve"])
        .current_dir(&arguments.bundle)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        // containerd reads ours to the end.
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .for_(|| "start the shim".into())
}

/// Under want of memory the shim goes before containerd, as containerd's own do: it can be cleaned up after.
fn spare_containerd(pid: u32) {
    let path = |pid: &str| format!("/proc/{pid}/oom_score_adj");
    let Some(parent) = rustix::process::getppid() else {
        return;
    };
    let read = std::fs::read_to_string(path(&parent.as_raw_nonzero().to_string()));
    if let Some(score) = read.ok().and_then(|text| text.trim().parse::<i32>().ok()) {
        // Not allowed everywhere, and no more than advice.
        let _ = std::fs::write(path(&pid.to_string()), (score + 1).min(1000).to_string());
    }
}
