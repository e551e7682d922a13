//! An image with `thaw-probe` and a file whose every byte is known.

use std::path::Path;

use crate::layout::{Layout, tar_of};

/// The file in the image.
pub const FILE: &str = "/known";
/// Where `survive` also writes its lines, on the container's writable layer.
pub const TICKS: &str = "/ticks";
/// Bytes of [`FILE`].
const LENGTH: usize = 4 << 20;

/// Byte `index` of [`FILE`].
pub fn pattern(index: usize) -> u8 {
    (index.wrapping_mul(2_654_435_761) >> 13) as u8
}

/// Writes the image's layout into `folder`; `program` is the probe's path. Gives the reference.
pub fn image(folder: &Path, program: &str) -> String {
    let program = std::fs::read(program).unwrap();
    let known: Vec<u8> = (0..LENGTH).map(pattern).collect();
    let layer = tar_of(&[("probe", &program), (&FILE[1..], &known)]);
    Layout::new(layer).write(folder)
}
