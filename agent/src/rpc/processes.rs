//! A container's processes and their streams.

use std::sync::Arc;

use thaw_protocol::agent::agent::*;

use super::blocking;
use crate::error::Result;
use crate::reaper::ExitCode;
use crate::sandbox::Sandbox;
use crate::stdio::{Output, Reader};

pub async fn exec(sandbox: &Arc<Sandbox>, request: ExecProcessRequest) -> Result<()> {
    let activity = sandbox.activity().await;
    let container = sandbox.container(&request.container_id)?;
    let reaper = sandbox.reaper.clone();
    blocking(move || {
        let _motion = activity;
        container.exec(&request, &reaper)
    })
    .await
}

/// Without an exec id, the signal is sent to every process of the container.
pub fn signal(sandbox: &Sandbox, r: &SignalProcessRequest) -> Result<()> {
    let container = sandbox.container(&r.container_id)?;
    if r.exec_id.is_empty() {
        return container.signal_all(r.signal);
    }
    container.process(&r.exec_id)?.signal(r.signal)
}

/// An OOM event of the process is queued before its exit code is reported.
pub async fn wait(sandbox: &Sandbox, r: &WaitProcessRequest) -> Result<ExitCode> {
    let container = sandbox.container(&r.container_id)?;
    let code = container.process(&r.exec_id)?.wait().await;
    if code == 128 + libc::SIGKILL {
        container.check_for_oom(&sandbox.ooms);
    }
    container.reported(&r.exec_id);
    Ok(code)
}

pub async fn write_stdin(sandbox: &Sandbox, r: &WriteStreamRequest) -> Result<u32> {
    sandbox
        .container(&r.container_id)?
        .process(&r.exec_id)?
        .stdio
        .write(&r.data)
        .await?;
    Ok(r.data.len() as u32)
}

pub async fn read(
    sandbox: &Sandbox,
    r: &ReadStreamRequest,
    output: Output,
    reader: &Reader,
) -> Result<Vec<u8>> {
    let process = sandbox.container(&r.container_id)?.process(&r.exec_id)?;
    process.stdio.read(output, reader, r.len as usize).await
}

pub fn close_stdin(sandbox: &Sandbox, r: &CloseStdinRequest) -> Result<()> {
    sandbox
        .container(&r.container_id)?
        .process(&r.exec_id)?
        .stdio
        .close_stdin();
    Ok(())
}

pub fn resize(sandbox: &Sandbox, r: &TtyWinResizeRequest) -> Result<()> {
    let clamp = |n: u32| n.min(u32::from(u16::MAX)) as u16;
    sandbox
        .container(&r.container_id)?
        .process(&r.exec_id)?
        .stdio
        .resize(clamp(r.row), clamp(r.column))
}
