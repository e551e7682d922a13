//! A layer's tar stream. What unpacks is merged with itself and written: that must not panic either, and a reader must
//! find what was written.

use thaw_imagefs::erofs::{self, Reader};
use thaw_images::layer::{LayerLimits, unpack};
use thaw_images::merge::flatten;

pub fn run(tar: &[u8]) {
    let limits = LayerLimits {
        entries: 1000,
        header_bytes: 1 << 16,
        tree_bytes: 1 << 20,
        data_bytes: 1 << 22,
    };
    let mut data = Vec::new();
    let Ok(layer) = unpack(tar, &mut data, &limits) else {
        return;
    };
    assert_eq!(layer.data_length, data.len() as u64);
    let lengths = [layer.data_length; 2];
    let Ok(tree) = flatten(&[layer.clone(), layer]) else {
        return;
    };
    let mut image = Vec::new();
    if erofs::write(&tree, &lengths, &mut image).is_ok() {
        let reader = Reader::new(&image[..]).expect("an image that was written is one");
        reader.inode(reader.superblock().root).expect("it has a root");
    }
}
