//! zstd layers as several frames, so that they have seek points.

/// As one frame for every `each` bytes of the tar.
pub fn zstd(tar: &[u8], each: usize) -> Vec<u8> {
    let frames = tar.chunks(each).map(|part| zstd::encode_all(part, 3).unwrap());
    frames.collect::<Vec<_>>().concat()
}
