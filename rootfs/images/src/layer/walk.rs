//! Walking over a tar stream's entries without keeping their content, to make a table of contents.

use std::io::{self, Read};

use super::header::{Header, TypeFlag};
use super::pax::Pax;
use super::stream::{BLOCK, TarStream};
use super::{DataSink, LayerError, LayerLimits, Unpacker, stored_size};

/// One entry, its extension headers applied.
pub struct Walked<'a> {
    /// Offset in the stream at which its content begins, or would begin if it is empty.
    pub content: u64,
    /// Bytes of content.
    pub size: u64,
    pub name: &'a [u8],
    pub link: &'a [u8],
    pub header: &'a Header,
    pub pax: &'a Pax,
    /// The header as it is in the stream.
    pub block: &'a [u8; BLOCK],
}

impl Walked<'_> {
    pub fn is_sparse(&self) -> bool {
        self.header.type_flag == TypeFlag::GnuSparse || !matches!(self.pax.sparse(), Ok(None))
    }
}

/// Discards all data.
struct Nowhere;

impl DataSink for Nowhere {
    fn append(&mut self, _: &[u8]) -> io::Result<()> {
        Err(io::Error::other("entries are passed over, not unpacked"))
    }
}

/// Passes each entry of a tar stream to `visit` and reads the stream to its end. Returns the offset after the end marker.
pub fn walk<E: From<LayerError>>(
    tar: impl Read,
    limits: &LayerLimits,
    mut visit: impl FnMut(&Walked<'_>) -> Result<(), E>,
) -> Result<u64, E> {
    let mut walker = Unpacker {
        stream: TarStream::new(tar),
        data: &mut Nowhere,
        limits,
        data_length: 0,
        tree_bytes: 0,
        entries: Vec::new(),
        pieces: Vec::new(),
    };
    let mut count = 0;
    while let Some(entry) = walker.describe()? {
        if count >= limits.entries {
            return Err(LayerError::limit(entry.offset, "entries", limits.entries).into());
        }
        count += 1;
        let has_content = entry.header.type_flag.has_content();
        visit(&Walked {
            content: walker.stream.offset(),
            size: if has_content { stored_size(&entry)? } else { 0 },
            name: &entry.name,
            link: &entry.link,
            header: &entry.header,
            pax: &entry.pax,
            block: &entry.block,
        })?;
        walker.skip_content(&entry)?;
    }
    let end = walker.stream.offset();
    walker.stream.drain(limits.data_bytes)?;
    Ok(end)
}
