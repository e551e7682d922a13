//! From a span's stored bytes to its stream bytes.

use std::io::Read;

use sha2::{Digest as _, Sha256};

use super::inflate::{Inflate, Stop, Until, Wrap};
use super::{Expansion, SpanDigest, SpanError, SpanTable, StreamPart, length};

/// Bytes of a gzip member after its deflate data: checksum and length.
const GZIP_TRAILER: usize = 8;

impl SpanTable {
    /// Checks that `stored` can be the stored bytes of span `index`: their length, and their digest. If the digest is one of the stream
    /// bytes, this expands them.
    ///
    /// # Errors
    /// [`SpanError`] if they are not.
    pub fn check(&self, index: usize, stored: &[u8]) -> Result<(), SpanError> {
        match &self.spans()[index].digest {
            SpanDigest::None | SpanDigest::StoredSha256(_) => self.check_stored(index, stored),
            SpanDigest::StreamSha256(_)
            | SpanDigest::StreamBlake3(_)
            | SpanDigest::StreamChunksBlake3(_)
            | SpanDigest::StreamPartsSha256(_) => self.expand(index, stored).map(drop),
        }
    }

    /// The stream bytes of span `index`, made from its stored bytes and verified.
    ///
    /// # Errors
    /// [`SpanError`] if they do not expand to exactly the span's length, or if their digest differs.
    pub fn expand(&self, index: usize, stored: &[u8]) -> Result<Vec<u8>, SpanError> {
        self.check_stored(index, stored)?;
        let span = &self.spans()[index];
        // At most MAX_SPAN, and touched only as far as bytes expand to it.
        let mut stream = vec![0; length(&span.stream) as usize];
        expand_into(&span.expansion, stored, &mut stream).map_err(|why| SpanError::Expansion {
            span: index,
            why: why.into(),
        })?;
        let is_same = match &span.digest {
            SpanDigest::None | SpanDigest::StoredSha256(_) => true,
            SpanDigest::StreamSha256(digest) => <[u8; 32]>::from(Sha256::digest(&stream)) == *digest,
            SpanDigest::StreamBlake3(digest) => blake3::hash(&stream) == *digest,
            SpanDigest::StreamChunksBlake3(chunks) => are_chunks(chunks, &stream),
            SpanDigest::StreamPartsSha256(parts) => has_parts(parts, &stream),
        };
        if is_same {
            Ok(stream)
        } else {
            Err(SpanError::Digest { span: index })
        }
    }

    fn check_stored(&self, index: usize, stored: &[u8]) -> Result<(), SpanError> {
        let span = &self.spans()[index];
        if stored.len() as u64 != length(&span.stored) {
            return Err(SpanError::Expansion {
                span: index,
                why: format!(
                    "{} bytes were read where it takes {}",
                    stored.len(),
                    length(&span.stored)
                ),
            });
        }
        match &span.digest {
            SpanDigest::StoredSha256(digest) if <[u8; 32]>::from(Sha256::digest(stored)) != *digest => {
                Err(SpanError::Digest { span: index })
            }
            _ => Ok(()),
        }
    }
}

const TOO_SHORT: &str = "it ends early";
const TOO_LONG: &str = "it yields more than the index says";

/// Fills `stream` exactly. The form bounds the additional memory: 32 KiB for deflate, and none for others, which refer back to the output
/// itself.
fn expand_into(expansion: &Expansion, stored: &[u8], stream: &mut [u8]) -> Result<(), &'static str> {
    let whole = |length: usize, expected: usize| {
        if length == expected {
            Ok(())
        } else {
            Err(TOO_SHORT)
        }
    };
    match expansion {
        Expansion::Plain if stored.len() == stream.len() => {
            stream.copy_from_slice(stored);
            Ok(())
        }
        Expansion::Plain => Err("it is not as long as what it yields"),
        Expansion::Deflate { bits, window } => {
            let mut inflate = Inflate::new(Wrap::Raw)?;
            let mut rest = stored;
            if *bits != 0 {
                let (first, after) = stored.split_first().ok_or(TOO_SHORT)?;
                inflate.prime(*bits, *first);
                rest = after;
            }
            let window = window.bytes()?;
            if !window.is_empty() {
                inflate.set_dictionary(&window)?;
            }
            gunzip(inflate, Wrap::Raw, rest, stream)
        }
        Expansion::Gzip => gunzip(Inflate::new(Wrap::Gzip)?, Wrap::Gzip, stored, stream),
        Expansion::Zstd => {
            let expected = stream.len();
            // The output holds all earlier bytes, so no window is allocated, whatever window a frame's header requests.
            match zstd::bulk::decompress_to_buffer(stored, stream) {
                Ok(length) => whole(length, expected),
                Err(_) => zstd_start(stored, stream),
            }
        }
        Expansion::Lz4 => {
            let expected = stream.len();
            let length = lz4_flex::block::decompress_into(stored, stream).map_err(|error| match error {
                lz4_flex::block::DecompressError::OutputTooSmall { .. } => TOO_LONG,
                _ => "its LZ4 block is damaged",
            })?;
            whole(length, expected)
        }
    }
}

/// The largest zstd window accepted: 128 MiB, which `zstd --ultra` writes and its decoder accepts by default.
pub(crate) const ZSTD_WINDOW_LOG: u32 = 27;

/// Fills `stream` from frames that yield more than that, or that only the streaming decoder accepts: it reads past an empty compressed
/// block. No more of the window is touched than `stream` takes, and a block.
fn zstd_start(stored: &[u8], stream: &mut [u8]) -> Result<(), &'static str> {
    let mut decoder =
        zstd::stream::read::Decoder::with_buffer(stored).map_err(|_| "there is no memory for it")?;
    decoder
        .window_log_max(ZSTD_WINDOW_LOG)
        .and_then(|()| decoder.read_exact(stream))
        .map_err(|_| "its zstd frames are damaged, or yield less than the index says")
}

/// Inflates until `stream` is full, on through gzip members.
fn gunzip(mut inflate: Inflate, wrap: Wrap, stored: &[u8], stream: &mut [u8]) -> Result<(), &'static str> {
    let (mut rest, mut filled) = (stored, 0);
    let mut wrap = wrap;
    while filled < stream.len() {
        let step = inflate.step(rest, &mut stream[filled..], Until::Full)?;
        rest = &rest[step.read..];
        filled += step.written;
        match step.stop {
            Stop::End => {
                if wrap == Wrap::Raw {
                    rest = rest.get(GZIP_TRAILER..).unwrap_or_default();
                    wrap = Wrap::Gzip;
                }
                inflate.reset(Wrap::Gzip);
            }
            _ if step.read == 0 && step.written == 0 => return Err(TOO_SHORT),
            _ => {}
        }
    }
    Ok(())
}

/// Whether `stream` has parts of these digests.
fn has_parts(parts: &[StreamPart], stream: &[u8]) -> bool {
    let mut rest = stream;
    for part in parts {
        let after = rest.get(part.skip as usize..).unwrap_or_default();
        let Some((bytes, after)) = after.split_at_checked(part.length as usize) else {
            return false;
        };
        if <[u8; 32]>::from(Sha256::digest(bytes)) != part.sha256 {
            return false;
        }
        rest = after;
    }
    rest.is_empty()
}

/// Whether `stream` is exactly chunks of these lengths and digests.
fn are_chunks(chunks: &[(u32, [u8; 32])], stream: &[u8]) -> bool {
    let mut rest = stream;
    for (length, digest) in chunks {
        let Some((chunk, after)) = rest.split_at_checked(*length as usize) else {
            return false;
        };
        if blake3::hash(chunk) != *digest {
            return false;
        }
        rest = after;
    }
    rest.is_empty()
}
