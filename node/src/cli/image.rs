//! `thaw image`.

use indicatif::HumanBytes;
use serde_json::json;

use super::ImageCommand;
use crate::exit::Failure;
use crate::images::{Images, Pull, size};
use crate::paths::Paths;
use crate::ui::Ui;

pub(super) async fn image(command: &ImageCommand, ui: &Ui, json: bool) -> Result<u8, Failure> {
    let images = Images::open(&Paths::from_env().images())?;
    match command {
        ImageCommand::Pull { image, plain_http } => {
            let pulled = tokio::select! {
                pulled = images.pull(image, Pull::Always, *plain_http, ui.pull()) => pulled?,
                status = super::run::interrupted() => return Ok(status),
            };
            super::print(&match json {
                true => json!({"image": image, "digest": pulled.digest.to_string(), "bytes": size(&pulled)})
                    .to_string(),
                false => pulled.digest.to_string(),
            });
        }
        ImageCommand::Ls => list(&images, json)?,
        ImageCommand::Rm { images: wanted } => {
            for name in wanted {
                let digest = images.remove(name)?;
                super::print(&match json {
                    true => json!({"removed": digest}).to_string(),
                    false => digest,
                });
            }
        }
    }
    Ok(0)
}

fn list(images: &Images, json: bool) -> Result<(), Failure> {
    let stored = images.list()?;
    if json {
        let all: Vec<_> = stored
            .iter()
            .map(|image| {
                json!({
                    "digest": image.digest.to_string(),
                    "reference": image.reference,
                    "bytes": size(image),
                    "layers": image.blobs.len(),
                })
            })
            .collect();
        super::print(&json!(all).to_string());
        return Ok(());
    }
    super::print(&format!("{:<12}  {:>11}  IMAGE", "DIGEST", "SIZE"));
    for image in &stored {
        let short: String = image.digest.hex().chars().take(12).collect();
        super::print(&format!(
            "{short}  {:>11}  {}",
            HumanBytes(size(image)).to_string(),
            image.reference
        ));
    }
    Ok(())
}
