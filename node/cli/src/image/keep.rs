//! `thaw image prune`, `verify` and `rm`: the contents of the store.

use std::collections::BTreeMap;

use serde_json::json;
use thaw_imagefs::digest::Digest;
use thaw_images::store::{Image, Pruned};
use thaw_sandbox::config::Size;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::images::{Images, failure};

use super::super::print;
use crate::ui::Ui;

pub(super) fn prune(
    images: &Images,
    wanted: &[String],
    all: bool,
    until: Option<Size>,
    json: bool,
) -> Result<(), Error> {
    let mut pruned = Pruned::default();
    if wanted.is_empty() {
        pruned = match until {
            Some(limit) => images.store.collect_to(limit.0),
            None => images.store.prune(!all),
        }
        .map_err(failure)?;
    }
    for name in wanted {
        let image = images.named(name)?;
        let one = images.store.evict(&image.digest).map_err(failure)?;
        pruned.layers += one.layers;
        pruned.bytes += one.bytes;
    }
    print(&match json {
        true => json!({"images": pruned.images, "layers": pruned.layers, "bytes": pruned.bytes}).to_string(),
        false => format!(
            "{} given back: {} layers emptied, {} images removed",
            HumanBytes(pruned.bytes),
            pruned.layers,
            pruned.images
        ),
    });
    Ok(())
}

pub(super) fn remove(images: &Images, wanted: &[String], json: bool) -> Result<(), Error> {
    for name in wanted {
        let digest = images.remove(name)?;
        print(&match json {
            true => json!({"removed": digest}).to_string(),
            false => digest,
        });
    }
    Ok(())
}

pub(super) async fn verify(
    images: &Images,
    wanted: &[String],
    repair: bool,
    ui: &Ui,
    json: bool,
) -> Result<(), Error> {
    let all: Vec<Image> = match wanted {
        [] => images.list()?,
        wanted => wanted
            .iter()
            .map(|name| images.named(name))
            .collect::<Result<_, _>>()?,
    };
    let mut unsound = Vec::new();
    for image in &all {
        let (store, digest) = (images.store.clone(), image.digest);
        let report = tokio::task::spawn_blocking(move || store.verify(&digest)).await;
        let report = report
            .map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?
            .map_err(failure)?;
        let mut repaired = false;
        if repair && !report.is_sound() {
            mend(images, &report.bad, &report.damaged).await?;
            repaired = true;
        }
        let bad: Vec<String> = report
            .bad
            .iter()
            .map(|(layer, chunk)| format!("{layer} chunk {chunk}"))
            .collect();
        let damaged: Vec<String> = report.damaged.iter().map(Digest::to_string).collect();
        print(&match json {
            true => json!({
                "digest": image.digest.to_string(),
                "reference": image.reference,
                "checked_chunks": report.checked,
                "bad_chunks": bad,
                "damaged_layers": damaged,
                "cleared_chunks": report.cleared,
                "repaired": repaired,
            })
            .to_string(),
            false => {
                let found = match (report.is_sound(), repaired) {
                    (true, _) => "sound".to_owned(),
                    (false, true) => format!("{} chunks were bad: repaired", bad.len()),
                    (false, false) => format!(
                        "damaged: {} chunks bad, {} layers cut short; {} chunks are fetched again when they are read",
                        bad.len(),
                        damaged.len(),
                        report.cleared
                    ),
                };
                format!("{}: {} chunks compared, {found}", image.reference, report.checked)
            }
        });
        for line in bad.iter().chain(&damaged) {
            ui.note("damaged", line);
        }
        if !report.is_sound() && !repaired {
            unsound.push(image.reference.clone());
        }
    }
    match unsound.is_empty() {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::ImageDamaged,
            format!("file data in the store is damaged: {}", unsound.join(", ")),
        )),
    }
}

/// Fetches damaged chunks again; for a layer with other damage, all its chunks.
async fn mend(images: &Images, bad: &[(Digest, u64)], damaged: &[Digest]) -> Result<(), Error> {
    let mut layers: BTreeMap<Digest, Vec<u64>> = BTreeMap::new();
    for (layer, chunk) in bad {
        layers.entry(*layer).or_default().push(*chunk);
    }
    for (layer, chunks) in &layers {
        images.filler().refetch(layer, chunks).await.map_err(failure)?;
    }
    for layer in damaged.iter().filter(|layer| !layers.contains_key(*layer)) {
        images.fill(layer, 0, u64::MAX).await.map_err(failure)?;
    }
    Ok(())
}
