//! The service `thaw.Files`: files of a container.

use std::os::fd::OwnedFd;

use async_trait::async_trait;
use thaw_protocol::agent::files::*;
use thaw_protocol::agent::files_ttrpc::Files;
use ttrpc::r#async::TtrpcContext;

use super::{Answer, Api, blocking, status};
use crate::container::{change, files, inspect};
use crate::error::Result;

impl Api {
    /// Changes something in a container's root. A snapshot is taken before or after it.
    async fn change(
        &self,
        container: &str,
        work: impl FnOnce(OwnedFd) -> Result<()> + Send + 'static,
    ) -> Answer<()> {
        let activity = self.sandbox.activity().await;
        let container = self.sandbox.container(container).map_err(status)?;
        let change = move || {
            let _motion = activity;
            work(container.root()?)
        };
        blocking(change).await.map_err(status)
    }
}

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

    async fn list(&self, _: &TtrpcContext, r: ListRequest) -> Answer<ListResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let list = move || inspect::list(container.root()?, &r);
        blocking(list).await.map_err(status)
    }

    async fn make_directory(
        &self,
        _: &TtrpcContext,
        r: MakeDirectoryRequest,
    ) -> Answer<MakeDirectoryResponse> {
        let id = r.container_id.clone();
        self.change(&id, move |root| change::make_directory(root, &r))
            .await?;
        Ok(MakeDirectoryResponse::default())
    }

    async fn rename(&self, _: &TtrpcContext, r: MoveRequest) -> Answer<MoveResponse> {
        let id = r.container_id.clone();
        self.change(&id, move |root| change::move_file(root, &r)).await?;
        Ok(MoveResponse::default())
    }

    async fn remove(&self, _: &TtrpcContext, r: RemoveRequest) -> Answer<RemoveResponse> {
        let id = r.container_id.clone();
        self.change(&id, move |root| change::remove(root, &r)).await?;
        Ok(RemoveResponse::default())
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

    async fn watch(&self, _: &TtrpcContext, r: WatchRequest) -> Answer<WatchResponse> {
        let container = self.sandbox.container(&r.container_id).map_err(status)?;
        let watches = self.sandbox.watches.clone();
        let begin = move || {
            let init = container.init.clone();
            let end = async move {
                init.wait().await;
            };
            watches.begin(container.root()?, &r, end)
        };
        blocking(begin).await.map_err(status)?;
        Ok(WatchResponse::default())
    }

    async fn next_events(&self, _: &TtrpcContext, r: NextEventsRequest) -> Answer<NextEventsResponse> {
        if r.abandon {
            self.sandbox.watches.abandon(&r.watch);
            return Ok(NextEventsResponse::default());
        }
        self.sandbox.watches.next_events(&r.watch).await.map_err(status)
    }
}
