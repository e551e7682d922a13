//! What `docker save` writes, or somebody else: an archive is opened, resolved, and each of its layers read.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use thaw_images::progress::Silent;
use thaw_images::reference::ImageRef;
use thaw_images::source::{Fallback, Platform, SourceOptions, open, resolve};

use crate::runtime::block_on;

/// A few kilobytes can be a thousand times as many.
const MOST: u64 = 8 << 20;

/// The bytes are a tar, or one that is compressed.
pub fn run(input: &[u8]) {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(input).expect("room");
    block_on(read(file.path()));
}

async fn read(file: &Path) {
    let reference = ImageRef::Archive {
        file: file.to_owned(),
        tag: None,
    };
    let Ok(source) = open(&reference, &SourceOptions::default(), Arc::new(Silent)).await else {
        return;
    };
    let Ok(image) = resolve(&*source, &Platform::linux_amd64()).await else {
        return;
    };
    assert_eq!(image.layers.len(), image.config.rootfs().diff_ids().len());
    for layer in &image.layers {
        let Ok(body) = Fallback::new(&*source, layer).open().await else {
            continue;
        };
        let _ = body.reader.take(MOST).read_to_end(&mut Vec::new());
    }
}
