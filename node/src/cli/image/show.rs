//! What there is: `thaw image ls`, `inspect`, `du`.

use indicatif::HumanBytes;
use serde_json::{Value, json};
use thaw_rootfs::blob::CHUNK_SIZE;
use thaw_rootfs::prefetch;
use thaw_rootfs::store::{Form, Inspection, LayerInspection};

use super::super::print;
use crate::exit::Failure;
use crate::images::{Images, failure, size};

/// How a form is called. Of a tar that was unpacked here, what matters is whether it has an index to be read by.
fn form_name(layer: &LayerInspection) -> &'static str {
    match layer.form {
        Form::Tar if layer.index_bytes.is_some() => "kept index",
        Form::Tar => "full",
        Form::Soci => "soci",
        Form::Estargz => "estargz",
        Form::Accelerated => "converted",
        Form::Nydus => "nydus",
    }
}

/// Bytes of a layer's file data that may be served now.
fn present(layer: &LayerInspection) -> u64 {
    match layer.ready_chunks == layer.chunks {
        true => layer.length,
        false => (layer.ready_chunks * CHUNK_SIZE).min(layer.length),
    }
}

/// What of an image's file data is there.
struct Presence {
    present: u64,
    total: u64,
}

impl Presence {
    fn of(inspection: &Inspection) -> Presence {
        let mut seen = std::collections::HashSet::new();
        let distinct = inspection.layers.iter().filter(|layer| seen.insert(layer.key));
        distinct.fold(Presence { present: 0, total: 0 }, |sum, layer| Presence {
            present: sum.present + present(layer),
            total: sum.total + layer.length,
        })
    }

    fn is_whole(&self) -> bool {
        self.present == self.total
    }
}

impl std::fmt::Display for Presence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.is_whole() {
            true => write!(f, "{}", HumanBytes(self.total)),
            false => write!(f, "{} of {}", HumanBytes(self.present), HumanBytes(self.total)),
        }
    }
}

/// The forms of an image's layers, each once: `full` when nothing is missing, however it was had.
fn forms(inspection: &Inspection) -> String {
    if Presence::of(inspection).is_whole() {
        return "full".into();
    }
    let mut names: Vec<&str> = Vec::new();
    for layer in inspection.layers.iter().filter(|layer| layer.length > 0) {
        // Whole layers are of no form that matters, beside others that are not.
        let name = form_name(layer);
        if present(layer) < layer.length && !names.contains(&name) {
            names.push(name);
        }
    }
    format!("lazy: {}", names.join(", "))
}

/// What an image is called: of one that was put together for a snapshot, what it is a part of.
fn called(reference: &str, pinned: bool, layers: usize) -> String {
    match (pinned, layers) {
        (false, _) => reference.to_owned(),
        (true, 1) => format!("{reference} (its lowest layer, for a snapshot)"),
        (true, layers) => format!("{reference} (its lowest {layers} layers, for a snapshot)"),
    }
}

/// The images in the store; those put together for snapshots, which nobody asked for, only with `all`.
pub(super) fn list(images: &Images, all: bool, json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for image in images.list()? {
        let inspection = images.store.inspect(&image.digest).map_err(failure)?;
        if all || !inspection.pinned {
            rows.push((inspection, image));
        }
    }
    if json {
        let all: Vec<Value> = rows
            .iter()
            .map(|(inspection, image)| {
                let presence = Presence::of(inspection);
                json!({
                    "digest": image.digest.to_string(),
                    "reference": image.reference,
                    "for_snapshot": inspection.pinned,
                    "bytes": size(image),
                    "layers": inspection.layers.len(),
                    "form": forms(inspection),
                    "present_bytes": presence.present,
                    "total_bytes": presence.total,
                    "in_use": inspection.leased,
                })
            })
            .collect();
        print(&json!(all).to_string());
        return Ok(());
    }
    let mut table = Table::new(&["DIGEST", "FORM", "PRESENT", "IMAGE"]);
    for (inspection, image) in &rows {
        table.row([
            image.digest.hex().chars().take(12).collect(),
            forms(inspection),
            Presence::of(inspection).to_string(),
            called(&image.reference, inspection.pinned, inspection.layers.len()),
        ]);
    }
    table.print();
    Ok(())
}

pub(super) fn inspect(images: &Images, wanted: &str, json: bool) -> Result<(), Failure> {
    let image = images.named(wanted)?;
    let inspection = images.store.inspect(&image.digest).map_err(failure)?;
    let presence = Presence::of(&inspection);
    let order = prefetch::find(&image);
    if json {
        let layers: Vec<Value> = inspection
            .layers
            .iter()
            .map(|layer| {
                json!({
                    "key": layer.key.to_string(),
                    "form": form_name(layer),
                    "stored_digest": layer.stored_digest.map(|digest| digest.to_string()),
                    "stored_bytes": layer.stored_size,
                    "bytes": layer.length,
                    "present_bytes": present(layer),
                    "chunks": layer.chunks,
                    "ready_chunks": layer.ready_chunks,
                    "index_bytes": layer.index_bytes,
                    "spans": layer.spans,
                    "disk_bytes": layer.disk,
                })
            })
            .collect();
        let order = order.map(|(order, whose)| {
            json!({"source": whose, "runs": order.runs.len(), "bytes": order.bytes(), "dropped": order.dropped})
        });
        print(
            &json!({
                "digest": image.digest.to_string(),
                "reference": image.reference,
                "for_snapshot": inspection.pinned,
                "form": forms(&inspection),
                "in_use": inspection.leased,
                "metadata_bytes": inspection.metadata,
                "present_bytes": presence.present,
                "total_bytes": presence.total,
                "layers": layers,
                "load_order": order,
                "config": image.config,
            })
            .to_string(),
        );
        return Ok(());
    }
    let line = |name: &str, value: String| print(&format!("{name:<12} {value}"));
    line(
        "image",
        called(&image.reference, inspection.pinned, inspection.layers.len()),
    );
    line("digest", image.digest.to_string());
    line("form", forms(&inspection));
    line("file data", presence.to_string());
    line("metadata", HumanBytes(inspection.metadata).to_string());
    line(
        "in use",
        match inspection.leased {
            true => "by a sandbox".into(),
            false => "no".into(),
        },
    );
    line(
        "read ahead",
        match &order {
            None => "nothing: no run was recorded (thaw run --record)".into(),
            Some((order, whose)) => format!(
                "{} in {} runs, {}",
                HumanBytes(order.bytes()),
                order.runs.len(),
                match whose {
                    prefetch::Provenance::Recorded => "recorded here",
                    prefetch::Provenance::Shipped => "as the image says",
                }
            ),
        },
    );
    print("");
    let mut table = Table::new(&["LAYER", "FORM", "PRESENT", "STORED", "INDEX", "SPANS", "DISK"]);
    let bytes = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| HumanBytes(bytes).to_string());
    for layer in &inspection.layers {
        let presence = Presence {
            present: present(layer),
            total: layer.length,
        };
        table.row([
            layer.key.hex().chars().take(12).collect(),
            form_name(layer).into(),
            presence.to_string(),
            bytes(layer.stored_size),
            bytes(layer.index_bytes),
            layer.spans.map_or("-".into(), |spans| spans.to_string()),
            bytes(Some(layer.disk)),
        ]);
    }
    table.print();
    Ok(())
}

pub(super) fn du(images: &Images, json: bool) -> Result<(), Failure> {
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

/// Columns as wide as they must be; the last as wide as it is.
struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    fn new(head: &[&str]) -> Table {
        Table {
            rows: vec![head.iter().map(|it| (*it).to_owned()).collect()],
        }
    }

    fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }

    fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            cells.join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }

    fn print(&self) {
        self.lines().iter().for_each(|line| print(line));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_rootfs::digest::Digest;

    fn layer(form: Form, name: &[u8], chunks: u64, ready: u64, index: Option<u64>) -> LayerInspection {
        LayerInspection {
            key: Digest::of(name),
            form,
            stored_digest: None,
            stored_size: None,
            length: chunks * CHUNK_SIZE,
            chunks,
            ready_chunks: ready,
            index_bytes: index,
            spans: None,
            disk: 0,
        }
    }

    fn inspection(layers: Vec<LayerInspection>) -> Inspection {
        Inspection {
            digest: Digest::of(b"image"),
            reference: "x".into(),
            metadata: 0,
            leased: false,
            pinned: false,
            layers,
        }
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

    #[test]
    fn a_form_is_told_only_of_what_is_not_whole() {
        let whole = inspection(vec![layer(Form::Soci, b"a", 8, 8, Some(1))]);
        assert_eq!(forms(&whole), "full");
        assert_eq!(Presence::of(&whole).to_string(), "1.00 MiB");
        let twice = layer(Form::Soci, b"b", 16, 1, Some(1));
        let partly = inspection(vec![
            layer(Form::Tar, b"a", 8, 8, Some(1)),
            twice.clone(),
            twice,
            layer(Form::Tar, b"c", 8, 0, Some(1)),
        ]);
        assert_eq!(forms(&partly), "lazy: soci, kept index");
        assert_eq!(Presence::of(&partly).to_string(), "1.12 MiB of 4.00 MiB");
    }

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_text() {
        let mut table = Table::new(&["A", "B"]);
        table.row(["long one".into(), "x".into()]);
        table.row(["s".into(), String::new()]);
        assert_eq!(table.lines(), ["A         B", "long one  x", "s"]);
    }
}
