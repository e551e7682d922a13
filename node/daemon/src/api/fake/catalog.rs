//! A fake catalog: its images are a list in memory.

use async_trait::async_trait;
use thaw_protocol::api::{Image, ImageDetail, PullImage, Template};
use thaw_sandbox::error::{Error, ErrorKind};

use super::Fake;
use crate::api::factory::Catalog;

#[async_trait]
impl Catalog for Fake {
    async fn images(&self) -> Result<Vec<Image>, Error> {
        Ok(self.images.lock().unwrap().clone())
    }

    async fn image(&self, wanted: String) -> Result<ImageDetail, Error> {
        let images = self.images.lock().unwrap();
        let image = images
            .iter()
            .find(|i| i.reference == wanted)
            .ok_or_else(not_stored)?;
        let detail = serde_json::json!({
            "digest": image.digest, "reference": image.reference, "for_snapshot": false, "form": "full",
            "in_use": false, "metadata_bytes": 1, "present_bytes": 2, "total_bytes": 2, "layers": [],
            "load_order": null, "image_config": "null",
        });
        Ok(serde_json::from_value(detail).unwrap())
    }

    async fn pull(&self, request: PullImage) -> Result<Image, Error> {
        if request.image == "missing" {
            return Err(Error::new(ErrorKind::ImageNotFound, "no image: missing"));
        }
        let image = Image {
            digest: "sha256:0".into(),
            reference: request.image,
            for_snapshot: false,
            bytes: 3,
            layers: 1,
            form: "full".into(),
            present_bytes: 2,
            total_bytes: 2,
            in_use: false,
        };
        self.images.lock().unwrap().push(image.clone());
        Ok(image)
    }

    async fn remove_image(&self, wanted: String) -> Result<(), Error> {
        let mut images = self.images.lock().unwrap();
        let before = images.len();
        images.retain(|image| image.reference != wanted);
        if images.len() == before {
            Err(not_stored())
        } else {
            Ok(())
        }
    }

    async fn templates(&self) -> Result<Vec<Template>, Error> {
        Ok(Vec::new())
    }

    async fn remove_template(&self, _: String) -> Result<(), Error> {
        Err(Error::new(ErrorKind::SnapshotNotFound, "no template"))
    }
}

pub(super) fn not_stored() -> Error {
    Error::new(ErrorKind::ImageNotStored, "no such image")
}
