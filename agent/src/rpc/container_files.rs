//! The service `thaw.Files`: files of a container.

use async_trait::async_trait;
use thaw_protocol::agent::files::*;
use thaw_protocol::agent::files_ttrpc::Files;
use ttrpc::r#async::TtrpcContext;

use super::{Answer, Api, blocking, status};
use crate::container::{files, inspect};

#[async_trait]
impl Files for Api {
    async fn read(&self, _: &TtrpcContext, r: ReadFileRequest) -> Answer<ReadFileResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let read = move || files::read(container.root()?, &r);
        blocking(read).await.map_err(status)
    }

    async fn write(&self, _: &TtrpcContext, r: WriteFileRequest) -> Answer<WriteFileResponse> {
        // A snapshot must not contain a half-renamed file.
        let activity = self.sandbox.activity().await;
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let write = move || {
            let _motion = activity;
            files::write(container.root()?, &r)
        };
        blocking(write).await.map_err(status)?;
        Ok(WriteFileResponse::default())
    }

    async fn stat(&self, _: &TtrpcContext, r: StatRequest) -> Answer<StatResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let stat = move || inspect::stat(container.root()?, &r);
        blocking(stat).await.map_err(status)
    }

    async fn pack(&self, _: &TtrpcContext, r: PackRequest) -> Answer<PackResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let transfers = self.sandbox.transfers.clone();
        let pack = move || transfers.pack(container.root()?, &r);
        blocking(pack).await.map_err(status)?;
        Ok(PackResponse::default())
    }

    async fn next_piece(&self, _: &TtrpcContext, r: NextPieceRequest) -> Answer<NextPieceResponse> {
        let data = match r.abandon {
            true => {
                self.sandbox.transfers.abandon(&r.transfer);
                Vec::new()
            }
            false => self
                .sandbox
                .transfers
                .next_piece(&r.transfer)
                .await
                .map_err(status)?,
        };
        Ok(NextPieceResponse {
            data,
            ..Default::default()
        })
    }

    async fn unpack(&self, _: &TtrpcContext, r: UnpackRequest) -> Answer<UnpackResponse> {
        if r.abandon {
            self.sandbox.transfers.abandon(&r.transfer);
            return Ok(UnpackResponse::default());
        }
        // What is made before a snapshot is in it.
        let _motion = self.sandbox.activity().await;
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let unpacked = self.sandbox.transfers.unpack(|| container.root(), r);
        unpacked.await.map_err(status)?;
        Ok(UnpackResponse::default())
    }
}
