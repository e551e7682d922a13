//! From a span's stored bytes to its stream bytes.

use sha2::{Digest as _, Sha256};

use super::{Expansion, SpanDigest, SpanError, SpanTable, length};

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

impl SpanTable {
    /// Whether `stored` can be the stored bytes of span `index`: their length, and their digest where it is one of the
    /// stored bytes; where it is one of the stream bytes, they are expanded to see.
    ///
    /// # Errors
    /// [`SpanError`] when they are not.
    pub fn check(&self, index: usize, stored: &[u8]) -> Result<(), SpanError> {
        match &self.spans()[index].digest {
            SpanDigest::None | SpanDigest::StoredSha256(_) => self.check_stored(index, stored),
            SpanDigest::StreamSha256(_) | SpanDigest::StreamBlake3(_) | SpanDigest::StreamChunksBlake3(_) => {
                self.expand(index, stored).map(drop)
            }
        }
    }

    /// The stream bytes of span `index`, made from its stored bytes and verified.
    ///
    /// # Errors
    /// [`SpanError`] when they do not expand to exactly the span's length, or have another digest.
    pub fn expand(&self, index: usize, stored: &[u8]) -> Result<Vec<u8>, SpanError> {
        self.check_stored(index, stored)?;
        let span = &self.spans()[index];
        let most = length(&span.stream) as usize;
        let fail = |why: &str| SpanError::Expansion {
            span: index,
            why: why.into(),
        };
        let stream = match &span.expansion {
            Expansion::Plain => stored.to_vec(),
            _ => return Err(fail("it is of a kind that is not read yet")),
        };
        if stream.len() != most {
            return Err(fail("it yields another length than the index says"));
        }
        let is_same = match &span.digest {
            SpanDigest::None | SpanDigest::StoredSha256(_) => true,
            SpanDigest::StreamSha256(digest) => <[u8; 32]>::from(Sha256::digest(&stream)) == *digest,
            SpanDigest::StreamBlake3(digest) => blake3::hash(&stream) == *digest,
            SpanDigest::StreamChunksBlake3(chunks) => are_chunks(chunks, &stream),
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
