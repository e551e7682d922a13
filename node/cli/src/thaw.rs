//! `thaw thaw`: a sandbox of a snapshot, attended as `thaw run` attends its own. `thaw fork`: one frozen, many thawed.

use std::ffi::OsString;

use futures_util::future::join_all;
use thaw_protocol::api::{FreezeSandbox, RateLimits, ThawSandbox};
use thaw_sandbox::config::Config;
use thaw_sandbox::container::Running;
use thaw_sandbox::exit::Failure;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::{Hold, Registry, Scratch, Signatures};
use thaw_sandbox::trace::Trace;

use super::detach::Until;
use super::home::{Home, memory_mode};
use super::run::{Started, conclude, interrupted};
use super::running::{Owner, absolute};
use super::{ForkArguments, ThawArguments, detach};
use crate::stdio::{Attendance, Signals, Stdin};
use crate::ui::Ui;

pub(super) async fn thaw(arguments: &ThawArguments, ui: &Ui) -> Result<u8, Failure> {
    if arguments.detach {
        return detach::detached_self(Until::Started, ui).await;
    }
    let trace = Trace::new();
    let request = ThawSandbox {
        directory: absolute(&arguments.directory)?,
        hostname: arguments.hostname.clone(),
        name: arguments.name.clone(),
        client: None,
        memory_mode: memory_mode(arguments.memory_mode)?,
        publish: arguments.through.publish.clone(),
        network_policy: arguments.through.policy()?,
        rate_limits: arguments.limits.over(RateLimits::default()),
        labels: Default::default(),
        timeout_s: None,
    };
    let home = tokio::select! {
        home = Home::thaw(request, &trace) => home?,
        status = interrupted() => return Ok(status),
    };
    ui.fact(serde_json::json!({"event": "sandbox", "id": home.id}));
    home.tell_ports(&arguments.through.publish, ui);
    let result = attend(arguments, &home, &trace, ui).await;
    conclude(home, result, arguments.timings.then_some(&trace), ui).await
}

async fn attend(
    arguments: &ThawArguments,
    home: &Home,
    trace: &Trace,
    ui: &Ui,
) -> Result<super::run::End, Failure> {
    let running = Running::read(&home.directory)?;
    let signals = Signals::new()?;
    let started = Started::thawed(home, &running, trace).await?;
    ui.fact(serde_json::json!({"event": "started", "id": home.id}));
    let how = Attendance {
        stdin: match arguments.interactive {
            true => Stdin::Pass,
            false => Stdin::Leave,
        },
        tty: running.tty,
    };
    started.attended(home, how, signals).await
}

pub(super) async fn fork(arguments: &ForkArguments, ui: &Ui) -> Result<u8, Failure> {
    let owner = Owner::find(&arguments.sandbox)?;
    let data = Paths::from_env().data;
    let signatures = Signatures::of(&Config::from_env()?.snapshots);
    let registry = Registry::open(&data, Hold::Files, signatures)?;
    let scratch = Scratch::for_clones(&data, &registry, arguments.sign.is_some())?;
    let directory = scratch.snapshot();
    let request = FreezeSandbox {
        directory: directory.clone(),
        delta: false,
        stop: false,
        sign: arguments.sign.as_deref().map(absolute).transpose()?,
    };
    owner.client.freeze(&owner.id, &request).await?;
    let line: [OsString; 2] = ["thaw".into(), directory.into()];
    let clones = (0..arguments.count).map(|_| detach::detached(&line, Until::Started, ui));
    let mut failed = None;
    for clone in join_all(clones).await {
        match clone {
            Ok(id) => detach::say(&id, ui),
            Err(e) => failed = Some(e),
        }
    }
    // Who was thawed from it has all of it open.
    drop(scratch);
    failed.map_or(Ok(0), Err)
}
