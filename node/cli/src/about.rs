//! `thaw version` and `thaw info`: the client, thawd, the host, and what the node holds.

use std::path::Path;

use clap::Args;
use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_protocol::api::Health;
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::RunDirectory;

use super::format::Format;
use super::{Global, image, print, top};

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw version --format '{{.Client.Version}} {{.Server.Version}}'")]
pub struct VersionArguments {
    /// `json`, or a Go template with {{.Field}}, {{.Field.Field}} and {{json .Field}}
    #[arg(short, long, value_name = "FORMAT")]
    pub format: Option<Format>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "`thaw doctor` checks the host.\n\nExample:\n  thaw info --format '{{.Running}} of {{.Images}}'"
)]
pub struct InfoArguments {
    /// `json`, or a Go template with {{.Field}}, {{.Field.Field}} and {{json .Field}}
    #[arg(short, long, value_name = "FORMAT")]
    pub format: Option<Format>,
}

pub(super) async fn version(arguments: &VersionArguments, global: &Global) -> Result<u8, Error> {
    let client = env!("CARGO_PKG_VERSION");
    let server = health(&Paths::from_env()).await;
    let (kernel, kvm) = (kernel(), has_kvm());
    let value = json!({
        "version": client,
        "client": {"version": client, "os": std::env::consts::OS, "arch": std::env::consts::ARCH},
        "server": server,
        "kernel": kernel,
        "kvm": kvm,
    });
    show(arguments.format.as_ref(), global, &value, || {
        print(&format!("thaw {client}"));
        print(&match &server {
            Some(health) => format!("thawd {}, process {}", health.version, health.pid),
            None => "thawd: does not run".into(),
        });
        print(&format!("Linux {kernel}"));
        print(match kvm {
            true => "KVM: /dev/kvm can be opened",
            false => "KVM: /dev/kvm cannot be opened; see `thaw doctor`",
        });
    })
}

pub(super) async fn info(arguments: &InfoArguments, global: &Global) -> Result<u8, Error> {
    let paths = Paths::from_env();
    let run = RunDirectory::open(&paths.run)?;
    let images = image::open()?;
    let (running, ended, images) = (run.running().len(), run.ended().len(), images.list()?.len());
    let pools = top::look().await?.pools;
    let server = health(&paths).await;
    let (kernel, kvm) = (kernel(), has_kvm());
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = rustix::system::sysinfo();
    let memory = memory.totalram as u64 * u64::from(memory.mem_unit);
    let value = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "server": server,
        "running": running,
        "ended": ended,
        "images": images,
        "pools": pools,
        "data": paths.data,
        "run": paths.run,
        "kernel": kernel,
        "kvm": kvm,
        "cpus": cpus,
        "memory_bytes": memory,
    });
    show(arguments.format.as_ref(), global, &value, || {
        let line = |name: &str, value: String| print(&format!("{name:<9} {value}"));
        line("thaw", env!("CARGO_PKG_VERSION").into());
        line(
            "thawd",
            match &server {
                Some(health) if health.draining => format!("{}, draining", health.version),
                Some(health) => health.version.clone(),
                None => "does not run: each `thaw run` owns its sandbox".into(),
            },
        );
        line("sandboxes", format!("{running} running, {ended} ended"));
        line("images", images.to_string());
        for pool in &pools {
            line(
                "pool",
                format!("{} {} of {} ready", pool.pool, pool.ready, pool.high),
            );
        }
        line("data", paths.data.display().to_string());
        line("run", paths.run.display().to_string());
        line("kernel", kernel.clone());
        line("KVM", if kvm { "yes" } else { "no; see `thaw doctor`" }.into());
        line("CPUs", cpus.to_string());
        line(
            "memory",
            thaw_sandbox::human_bytes::HumanBytes(memory).to_string(),
        );
    })
}

fn show(format: Option<&Format>, global: &Global, value: &Value, text: impl FnOnce()) -> Result<u8, Error> {
    match format {
        Some(format) => format.print(std::slice::from_ref(value), text)?,
        None if global.json => print(&value.to_string()),
        None => text(),
    }
    Ok(0)
}

/// What thawd says of itself, if one runs.
async fn health(paths: &Paths) -> Option<Health> {
    Client::connect(&paths.daemon_socket())?.health().await.ok()
}

fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Whether this process may use KVM.
fn has_kvm() -> bool {
    let kvm = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new("/dev/kvm"));
    kvm.is_ok()
}
