//! An EROFS image read as a whole: what makes a tree is written and read again as the same tree.

use thaw_imagefs::erofs::{BlobPlacement, Reader, read_tree, write};

const BLOB: u64 = 1 << 24;

pub fn run(image: &[u8]) {
    let Ok(reader) = Reader::new(image) else { return };
    let blobs = [BlobPlacement { address: 2 << 20, length: BLOB }];
    let Ok(tree) = read_tree(&reader, &blobs) else { return };
    let mut written = Vec::new();
    // Some trees that can be read are refused: names and targets the writer does not let pass.
    let Ok(summary) = write(&tree, &[BLOB], &mut written) else { return };
    let reader = Reader::new(&written[..]).expect("what was written is an image");
    let again = read_tree(&reader, &summary.blobs).expect("what was written is a tree");
    assert_eq!(again.inodes.len() as u64, summary.inodes);
}
