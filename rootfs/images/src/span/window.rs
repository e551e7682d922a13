//! The window of a checkpoint: the output before it, which the following data may refer back to.

use std::sync::Arc;

/// How far back deflate can refer.
pub const WINDOW: usize = 32 << 10;

/// Windows are numerous and seldom used: this level takes about fifty microseconds per window and reduces it to two fifths.
const LEVEL: i32 = 1;

/// Up to 32 KiB of output before a checkpoint, kept compressed in memory.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Window(Arc<[u8]>);

impl Window {
    /// The last bytes of `bytes`, at most 32 KiB. Earlier ones cannot be referred to.
    pub fn new(bytes: &[u8]) -> Window {
        Packer::default().pack(bytes)
    }

    /// A window that was compressed before; whether it really was shows in [`Window::bytes`].
    pub(crate) fn from_compressed(compressed: &[u8]) -> Window {
        Window(compressed.into())
    }

    /// One zstd frame; empty for an empty window.
    pub(crate) fn compressed(&self) -> &[u8] {
        &self.0
    }

    /// The window, uncompressed: empty at the start of deflate data, 32 KiB anywhere behind its first 32 KiB.
    ///
    /// # Errors
    /// When it is damaged or larger than 32 KiB.
    pub fn bytes(&self) -> Result<Vec<u8>, &'static str> {
        if self.0.is_empty() {
            return Ok(Vec::new());
        }
        zstd::bulk::decompress(&self.0, WINDOW).map_err(|_| "its window is damaged")
    }
}

/// Creates many windows with one compressor.
#[derive(Default)]
pub(crate) struct Packer(Option<zstd::bulk::Compressor<'static>>);

impl Packer {
    /// See [`Window::new`].
    pub(crate) fn pack(&mut self, bytes: &[u8]) -> Window {
        let bytes = &bytes[bytes.len().saturating_sub(WINDOW)..];
        if bytes.is_empty() {
            return Window::default();
        }
        if self.0.is_none() {
            self.0 = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        // Only a lack of memory could make this fail, which would affect everything else too. The replacement is not a valid zstd frame.
        let compressed = self.0.as_mut().and_then(|packer| packer.compress(bytes).ok());
        Window(compressed.unwrap_or_else(|| vec![0]).into())
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Window({} bytes compressed)", self.0.len())
    }
}
