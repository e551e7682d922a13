//! A converted image's metadata document, whose digests hostile hands made too.

use thaw_images::accelerated::decode_metadata;

pub fn run(document: &[u8]) {
    let Ok((metadata, blobs)) = decode_metadata("fuzz", document) else { return };
    assert!(metadata.len() % 4096 == 0 && blobs.len() <= 256);
    let ordered = blobs.windows(2).all(|pair| pair[0].address + pair[0].length <= pair[1].address);
    assert!(ordered);
}
