//! `thaw install` and `thaw uninstall`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::json;
use thaw_containerd::install::containerd::{NAME, RUNTIME};
use thaw_containerd::install::{self, Done, Options};
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;

use crate::ui::Ui;

/// Which program gets Thaw as a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Runtime {
    Containerd,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw install --runtime containerd\n  ctr --namespace k8s.io run --rm --runtime io.containerd.thaw.v2 --snapshotter thaw IMAGE NAME"
)]
pub struct InstallArguments {
    /// The program that runs containers on this host
    #[arg(long, value_enum)]
    pub runtime: Runtime,
    /// Its configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    pub config: PathBuf,
    /// Do not restart it: the changes take effect at its next restart
    #[arg(long)]
    pub no_restart: bool,
}

impl InstallArguments {
    fn options(&self) -> Options {
        let Runtime::Containerd = self.runtime;
        Options {
            config: self.config.clone(),
            restart: !self.no_restart,
        }
    }
}

/// `thaw install`. With `print`, it only shows what it would write.
pub(super) fn install(arguments: &InstallArguments, print: bool, ui: &Ui, json: bool) -> Result<u8, Error> {
    let (options, paths) = (arguments.options(), Paths::from_env());
    if print {
        super::print(install::block(&options, &paths)?.lines.trim_end());
        return Ok(0);
    }
    let done = install::install(&options, &paths)?;
    let config = options.config.display();
    report(&done, json, ui, "enabled and started", |ui| {
        match done.configured {
            true => ui.note(
                "configured",
                &format!("{config}: runtime {NAME} ({RUNTIME}) added"),
            ),
            false => ui.note("configured", &format!("{config} has the runtime already")),
        }
    });
    if done.lazy == Some(false) {
        ui.note(
            "not-lazy",
            &format!(
                "{config} settles how images are pulled: pods' images are pulled whole; for lazy pulls set \
                 disable_snapshot_annotations = false there and install again"
            ),
        );
    }
    Ok(0)
}

/// `thaw uninstall`.
pub(super) fn uninstall(arguments: &InstallArguments, ui: &Ui, json: bool) -> Result<u8, Error> {
    let options = arguments.options();
    let done = install::uninstall(&options, &Paths::from_env())?;
    let config = options.config.display();
    report(&done, json, ui, "stopped and disabled", |ui| {
        match done.configured {
            true => ui.note("configured", &format!("{config} is what it was")),
            false => ui.note("configured", &format!("{config} has nothing of Thaw's")),
        }
    });
    Ok(0)
}

fn report(done: &Done, json: bool, ui: &Ui, service: &str, configured: impl Fn(&Ui)) {
    if json {
        super::print(&json!(done).to_string());
        return;
    }
    if done.service {
        ui.note("service", &format!("thawd: {service}"));
    }
    configured(ui);
    if done.restarted {
        ui.note("restarted", "containerd: restarted");
    }
    for left in &done.left {
        ui.note("left", &format!("left to you: {left}"));
    }
}
