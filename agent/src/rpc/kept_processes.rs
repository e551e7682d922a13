//! The service `thaw.Processes`: processes that outlive who started them.

use async_trait::async_trait;
use thaw_protocol::agent::processes::*;
use thaw_protocol::agent::processes_ttrpc::Processes;
use ttrpc::r#async::TtrpcContext;

use super::{Answer, Api, status};
use crate::container::journal::Next;
use crate::stdio::Output;

#[async_trait]
impl Processes for Api {
    async fn list(&self, _: &TtrpcContext, r: ListProcessesRequest) -> Answer<ListProcessesResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        Ok(ListProcessesResponse {
            processes: container.list(),
            ..Default::default()
        })
    }

    async fn keep(&self, _: &TtrpcContext, r: KeepProcessRequest) -> Answer<KeepProcessResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        container.keep(&r.exec_id).map_err(status)?;
        Ok(KeepProcessResponse::default())
    }

    async fn output(&self, _: &TtrpcContext, r: ProcessOutputRequest) -> Answer<ProcessOutputResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let next = container
            .kept_output(&r.exec_id, r.offset)
            .await
            .map_err(status)?;
        Ok(match next {
            Next::Wrote { offset, output, data } => ProcessOutputResponse {
                offset,
                data,
                is_stderr: output == Output::Stderr,
                ..Default::default()
            },
            Next::Ended(exit_code) => ProcessOutputResponse {
                offset: r.offset,
                exit_code,
                ..Default::default()
            },
        })
    }
}
