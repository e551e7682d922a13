//! The images and templates of this node.

use std::sync::Arc;

use async_trait::async_trait;
use thaw_images::progress::Silent;
use thaw_images::pull::PullOptions;
use thaw_protocol::api::{Image, ImageDetail, PullImage, Template};
use thaw_sandbox::Tenants;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::images::{Pull, failure, shown};
use thaw_sandbox::template::command_line::command_line;

use super::Catalog;

#[async_trait]
impl Catalog for Tenants {
    async fn images(&self) -> Result<Vec<Image>, Error> {
        let images = self.shared().images.clone();
        blocking(move || {
            let all = images.list()?;
            let all = all.iter().map(|image| shown::image(&images, image));
            let all = all.collect::<Result<Vec<_>, _>>()?;
            Ok(all.into_iter().filter(|image| !image.for_snapshot).collect())
        })
        .await
    }

    async fn image(&self, wanted: String) -> Result<ImageDetail, Error> {
        let images = self.shared().images.clone();
        blocking(move || shown::detail(&images, &images.named(&wanted)?)).await
    }

    async fn pull(&self, request: PullImage) -> Result<Image, Error> {
        let images = self.shared().images.clone();
        let options = PullOptions {
            lazy: !request.full,
            ..images.pull_options(Pull::Always, request.plain_http)
        };
        let reference = request.image.parse().map_err(failure)?;
        let pulled = images.pull_with(&reference, &options, Arc::new(Silent)).await?;
        blocking(move || shown::image(&images, &pulled)).await
    }

    async fn remove_image(&self, wanted: String) -> Result<(), Error> {
        let images = self.shared().images.clone();
        blocking(move || images.remove(&wanted).map(drop)).await
    }

    async fn templates(&self) -> Result<Vec<Template>, Error> {
        let templates = self.shared().templates.clone();
        blocking(move || {
            let entries = templates.list(&command_line());
            Ok(entries.iter().map(thaw_sandbox::template::describe).collect())
        })
        .await
    }

    async fn remove_template(&self, wanted: String) -> Result<(), Error> {
        let node = self.shared().clone();
        blocking(move || {
            let (templates, users) = (&node.templates, node.base_users());
            templates.remove(&templates.find(&wanted)?, &|template| users.find(template))
        })
        .await
    }
}
