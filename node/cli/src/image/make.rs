//! `thaw image index` and `convert`: other forms of images.

use serde_json::json;
use thaw_images::convert::{Facts, Options};
use thaw_sandbox::error::Error;
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::image::convert::{self, Wanted};
use thaw_sandbox::image::index;
use thaw_sandbox::images::Images;

use super::super::print;
use super::{ConvertArguments, IndexArguments};
use crate::ui::Ui;

pub(super) async fn index(
    images: &Images,
    arguments: &IndexArguments,
    ui: &Ui,
    json: bool,
) -> Result<(), Error> {
    let made = index::index(
        images,
        &arguments.image,
        arguments.destination.as_deref(),
        index::Cut {
            least: arguments.min_layer_size.0,
            span: arguments.span_size.0,
        },
        arguments.plain_http,
        ui.pull(),
    )
    .await?;
    if json {
        print(&json!(made).to_string());
        return Ok(());
    }
    for layer in &made.layers {
        let (name, size) = (layer.layer, HumanBytes(layer.size));
        ui.note(
            "layer",
            &match (layer.ztoc, &layer.why_not) {
                (Some(bytes), _) => format!("{name}: {size}, index of {}", HumanBytes(bytes)),
                (None, why) => format!("{name}: {size}, no index: {}", why.as_deref().unwrap_or_default()),
            },
        );
    }
    let sent = HumanBytes(made.pushed_bytes);
    ui.note("pushed", &format!("{}: {sent} sent", made.reference));
    print(&made.digest.to_string());
    Ok(())
}

pub(super) async fn convert(
    images: &Images,
    arguments: &ConvertArguments,
    ui: &Ui,
    json: bool,
) -> Result<(), Error> {
    let wanted = Wanted {
        from: &arguments.source,
        to: &arguments.destination,
        dictionaries: &arguments.dictionary,
        trace: arguments.trace.as_deref(),
        options: Options {
            chunking: arguments.chunking()?,
            level: arguments.level,
        },
        plain_http: arguments.plain_http,
    };
    let made = convert::convert(images, wanted, ui.pull()).await?;
    if json {
        print(&json!(made).to_string());
        return Ok(());
    }
    for line in account(&made.facts) {
        ui.note("account", &line);
    }
    let pushed = &made.pushed;
    ui.note(
        "pushed",
        &format!(
            "{}: {} sent; {} blobs, {} there already, {} taken over",
            made.reference,
            HumanBytes(pushed.bytes),
            pushed.sent,
            pushed.present,
            pushed.mounted
        ),
    );
    print(&made.digest.to_string());
    Ok(())
}

/// The result of deduplication.
fn account(facts: &Facts) -> Vec<String> {
    let bytes = HumanBytes;
    let mut lines = vec![
        format!(
            "{} files, {} in {} chunks ({})",
            facts.files,
            bytes(facts.logical_bytes),
            facts.chunks,
            facts.chunking
        ),
        format!(
            "{} distinct in {} chunks; {} are zeros",
            bytes(facts.unique_bytes),
            facts.unique_chunks,
            bytes(facts.zero_bytes)
        ),
    ];
    if facts.reused_chunks > 0 {
        lines.push(format!(
            "{} in {} chunks are the dictionaries'",
            bytes(facts.reused_bytes),
            facts.reused_chunks
        ));
    }
    lines.push(format!(
        "{} in {} chunks are new: {} stored, {} of metadata, {} of tables",
        bytes(facts.new_bytes),
        facts.new_chunks,
        bytes(facts.stored_bytes),
        bytes(facts.stored_metadata_bytes),
        bytes(facts.table_bytes)
    ));
    if facts.load_order_bytes > 0 {
        lines.push(format!(
            "what a recorded run read comes first; {} of it is not in this image",
            bytes(facts.unmatched_load_order_bytes)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_tells_of_a_dictionary_only_where_there_is_one() {
        let facts = Facts {
            chunking: "fixed:262144".into(),
            files: 3,
            chunks: 4,
            logical_bytes: 1 << 20,
            ..Facts::default()
        };
        let lines = account(&facts);
        assert_eq!(lines[0], "3 files, 1.00 MiB in 4 chunks (fixed:262144)");
        assert_eq!(lines.len(), 3);
        let reused = Facts {
            reused_chunks: 1,
            load_order_bytes: 9,
            ..facts
        };
        assert_eq!(account(&reused).len(), 5);
    }
}
