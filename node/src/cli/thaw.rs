//! `thaw thaw`: a sandbox of a snapshot, attended as `thaw run` attends its own. `thaw fork`: one frozen, many thawed.

use std::ffi::OsString;

use thaw_protocol::api::{FreezeSandbox, ThawSandbox};

use super::home::{Home, memory_mode};
use super::run::{Started, conclude, interrupted};
use super::running::{Owner, absolute};
use super::{ForkArguments, ThawArguments, detach};
use crate::container::{RUNNING_FILE, Running};
use crate::exit::{ExitCode, Failure};
use crate::paths::Paths;
use crate::snapshot::{Hold, Registry, Scratch};
use crate::stdio::{Attendance, Signals, Stdin};
use crate::trace::Trace;
use crate::ui::Ui;

pub(super) async fn thaw(arguments: &ThawArguments, ui: &Ui) -> Result<u8, Failure> {
    if arguments.detach {
        return detach::detached_self(ui).await;
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
        labels: Default::default(),
        timeout_s: None,
    };
    let home = tokio::select! {
        home = Home::thaw(request, &trace) => home?,
        status = interrupted() => return Ok(status),
    };
    ui.fact(serde_json::json!({"event": "sandbox", "id": home.id}));
    let result = attend(arguments, &home, &trace, ui).await;
    conclude(home, result, arguments.timings.then_some(&trace), ui).await
}

async fn attend(
    arguments: &ThawArguments,
    home: &Home,
    trace: &Trace,
    ui: &Ui,
) -> Result<super::run::End, Failure> {
    let path = home.directory.join(RUNNING_FILE);
    let running: Running = std::fs::read(&path)
        .and_then(|text| Ok(serde_json::from_slice(&text)?))
        .map_err(|e| Failure::system(format!("cannot read {}", path.display()), &e))?;
    let signals = Signals::new()?;
    let started = Started::thawed(home, &running.container_id, trace).await?;
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
    let registry = Registry::open(&data, Hold::Files)?;
    if registry.trusted().any() && arguments.sign.is_none() {
        let what = "only signed snapshots are thawed here, and clones are thawed from one";
        return Err(
            Failure::new(ExitCode::SnapshotSignature, what).remedy("name a key trusted here: --sign KEY")
        );
    }
    let scratch = Scratch::make(&data, registry.stamps().clone())?;
    let directory = scratch.snapshot();
    let request = FreezeSandbox {
        directory: directory.clone(),
        delta: false,
        stop: false,
        sign: arguments.sign.as_deref().map(absolute).transpose()?,
    };
    owner.client.freeze(&owner.id, &request).await?;
    let line: [OsString; 2] = ["thaw".into(), directory.into()];
    let clones = (0..arguments.count).map(|_| detach::detached(&line, ui));
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

/// All at once, each with its outcome, in order.
async fn join_all<T>(
    work: impl Iterator<Item = impl Future<Output = Result<T, Failure>>>,
) -> Vec<Result<T, Failure>> {
    let mut running: Vec<_> = work.map(Box::pin).collect();
    let mut done: Vec<Option<Result<T, Failure>>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (work, done) in running.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(outcome) = work.as_mut().poll(context)
            {
                *done = Some(outcome);
            }
        }
        match done.iter().all(Option::is_some) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    let missing = || Err(Failure::new(ExitCode::Runtime, "a clone was not waited for"));
    done.into_iter()
        .map(|outcome| outcome.unwrap_or_else(missing))
        .collect()
}
