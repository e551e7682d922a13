//! `thaw image ls`, `inspect` and `du`: what the store contains.

use serde_json::{Value, json};
use thaw_images::store::Image;
use thaw_protocol::api;
use thaw_sandbox::error::Error;
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::images::shown::{self, Presence};
use thaw_sandbox::images::{Images, failure};

use super::super::print;
use super::ImagesArguments;
use crate::table::Table;
use crate::ui::{Mode, Ui};

/// The name of an image; for one that was made for a snapshot, the name of the image it is a part of.
fn called(reference: &str, pinned: bool, layers: usize) -> String {
    match (pinned, layers) {
        (false, _) => reference.to_owned(),
        (true, 1) => format!("{reference} (its lowest layer, for a snapshot)"),
        (true, layers) => format!("{reference} (its lowest {layers} layers, for a snapshot)"),
    }
}

/// The fields of templates, with docker's names.
const FIELDS: [&str; 8] = [
    "Repository",
    "Tag",
    "ID",
    "Digest",
    "Size",
    "Present",
    "Form",
    "Image",
];

/// The images in the store, with `all` also those for containerd's snapshots; with `--quiet`, only digests.
pub(super) fn list(images: &Images, arguments: &ImagesArguments, ui: &Ui) -> Result<(), Error> {
    if let Some(format) = &arguments.format {
        format.check(&FIELDS)?;
    }
    let mut rows = Vec::new();
    for image in images.list()? {
        let image = shown::image(images, &image)?;
        if arguments.all || !image.for_snapshot {
            rows.push(image);
        }
    }
    match (&arguments.format, ui.mode()) {
        (Some(format), _) => {
            let fields: Vec<Value> = rows.iter().map(fields).collect();
            format.print(&fields, || table(&rows).print())?;
        }
        (None, Mode::Json) => print(&json!(rows).to_string()),
        (None, Mode::Quiet) => rows.iter().for_each(|image| print(&image.digest)),
        _ => table(&rows).print(),
    }
    Ok(())
}

fn presence(image: &api::Image) -> Presence {
    Presence {
        present: image.present_bytes,
        total: image.total_bytes,
    }
}

fn name(image: &api::Image) -> String {
    called(&image.reference, image.for_snapshot, image.layers as usize)
}

fn fields(image: &api::Image) -> Value {
    let (repository, tag) = split_tag(&image.reference);
    json!({
        "Repository": repository,
        "Tag": tag,
        "ID": short(&image.digest),
        "Digest": image.digest,
        "Size": HumanBytes(image.total_bytes).to_string(),
        "Present": presence(image).to_string(),
        "Form": image.form,
        "Image": name(image),
    })
}

/// A reference without its tag or digest, and the tag.
fn split_tag(reference: &str) -> (&str, &str) {
    let reference = reference.split_once('@').map_or(reference, |(name, _)| name);
    match reference.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (reference, ""),
    }
}

fn table(rows: &[api::Image]) -> Table {
    let mut table = Table::new(&["DIGEST", "FORM", "PRESENT", "IMAGE"]);
    for image in rows {
        let cells = [
            short(&image.digest),
            image.form.clone(),
            presence(image).to_string(),
            name(image),
        ];
        table.row(cells);
    }
    table
}

/// All that is known of an image.
pub(crate) fn described(images: &Images, image: &Image) -> Result<Value, Error> {
    let mut value = json!(shown::detail(images, image)?);
    if let Some(fields) = value.as_object_mut() {
        fields.remove("image_config");
        fields.insert("config".into(), json!(image.config));
    }
    Ok(value)
}

pub(super) fn inspect(images: &Images, wanted: &str, json: bool) -> Result<(), Error> {
    let image = images.named(wanted)?;
    let detail = shown::detail(images, &image)?;
    if json {
        print(&described(images, &image)?.to_string());
        return Ok(());
    }
    let line = |name: &str, value: String| print(&format!("{name:<12} {value}"));
    line(
        "image",
        called(&detail.reference, detail.for_snapshot, detail.layers.len()),
    );
    let presence = Presence {
        present: detail.present_bytes,
        total: detail.total_bytes,
    };
    line("digest", detail.digest);
    line("form", detail.form);
    line("file data", presence.to_string());
    line("metadata", HumanBytes(detail.metadata_bytes).to_string());
    line(
        "in use",
        match detail.in_use {
            true => "by a sandbox".into(),
            false => "no".into(),
        },
    );
    line(
        "read ahead",
        match &detail.load_order {
            None => "nothing: no run was recorded (thaw run --record)".into(),
            Some(order) => format!(
                "{} in {} runs, {}",
                HumanBytes(order.bytes),
                order.runs,
                match order.source.as_str() {
                    "recorded" => "recorded here",
                    _ => "as the image says",
                }
            ),
        },
    );
    print("");
    let mut table = Table::new(&["LAYER", "FORM", "PRESENT", "STORED", "INDEX", "SPANS", "DISK"]);
    let bytes = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| HumanBytes(bytes).to_string());
    for layer in detail.layers {
        let presence = Presence {
            present: layer.present_bytes,
            total: layer.bytes,
        };
        table.row([
            short(&layer.key),
            layer.form,
            presence.to_string(),
            bytes(layer.stored_bytes),
            bytes(layer.index_bytes),
            layer.spans.map_or("-".into(), |spans| spans.to_string()),
            bytes(Some(layer.disk_bytes)),
        ]);
    }
    table.print();
    Ok(())
}

/// The first digits of a digest.
fn short(digest: &str) -> String {
    let hex = digest.split_once(':').map_or(digest, |(_, hex)| hex);
    hex.chars().take(12).collect()
}

pub(super) fn du(images: &Images, json: bool) -> Result<(), Error> {
    let usage = images.store.usage().map_err(failure)?;
    let limit = images.config.store.limit.map(|limit| limit.0);
    if json {
        let each: Vec<Value> = usage
            .images
            .iter()
            .map(|image| {
                json!({
                    "digest": image.digest.to_string(),
                    "reference": image.reference,
                    "for_snapshot": image.pinned,
                    "disk_bytes": image.stored,
                    "shared_bytes": image.shared,
                    "total_bytes": image.logical,
                    "in_use": image.leased,
                })
            })
            .collect();
        print(
            &json!({
                "images": each,
                "disk_bytes": usage.stored,
                "total_bytes": usage.logical,
                "limit_bytes": limit,
            })
            .to_string(),
        );
        return Ok(());
    }
    let mut table = Table::new(&["DISK", "SHARED", "FILE DATA", "IN USE", "IMAGE"]);
    for image in &usage.images {
        table.row([
            HumanBytes(image.stored).to_string(),
            HumanBytes(image.shared).to_string(),
            HumanBytes(image.logical).to_string(),
            if image.leased { "yes" } else { "no" }.into(),
            called(&image.reference, image.pinned, image.layers),
        ]);
    }
    table.print();
    let limit = limit.map_or(String::new(), |limit| format!(", limit {}", HumanBytes(limit)));
    print(&format!(
        "\nall, shared layers once: {} on the disk of {} of file data{limit}",
        HumanBytes(usage.stored),
        HumanBytes(usage.logical)
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_not_the_port_of_a_registry() {
        assert_eq!(split_tag("r:5000/a/b:1"), ("r:5000/a/b", "1"));
        assert_eq!(split_tag("r:5000/a"), ("r:5000/a", ""));
        assert_eq!(split_tag("r/a:1@sha256:ab"), ("r/a", "1"));
    }

    #[test]
    fn a_part_of_an_image_says_of_which() {
        assert_eq!(called("a:1", false, 2), "a:1");
        assert_eq!(called("a:1", true, 1), "a:1 (its lowest layer, for a snapshot)");
        assert_eq!(
            called("a:1", true, 2),
            "a:1 (its lowest 2 layers, for a snapshot)"
        );
    }
}
