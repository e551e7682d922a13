//! The service `thaw.Mounts`: mounts in a container that runs.

use async_trait::async_trait;
use thaw_protocol::agent::mounts::{AddMountsRequest, AddMountsResponse};
use thaw_protocol::agent::mounts_ttrpc::Mounts;
use ttrpc::r#async::TtrpcContext;

use super::{Answer, Api, blocking, status, volumes};
use crate::error::Result;

#[async_trait]
impl Mounts for Api {
    async fn add(&self, _: &TtrpcContext, r: AddMountsRequest) -> Answer<AddMountsResponse> {
        // A snapshot is taken before or after it.
        let activity = self.sandbox.activity().await;
        let sandbox = self.sandbox.clone();
        let add = move || {
            let _motion = activity;
            let storages = r
                .storages
                .iter()
                .map(volumes::storage)
                .collect::<Result<Vec<_>>>()?;
            let container = sandbox.container(&r.container_id)?;
            container.add_mounts(&storages, &r.mounts, &sandbox.storages)
        };
        blocking(add).await.map_err(status)?;
        Ok(AddMountsResponse::default())
    }
}
