//! The frames of a stream: a byte of flags, a length of four bytes (big endian), and so many bytes.
//!
//! Invariants of the [`Decoder`]: it holds at most one frame, whose length is at most its limit; it reserves no memory for bytes that have
//! not come.

/// Bytes before the data of a frame.
const HEADER: usize = 5;
/// The flag of a frame whose data is compressed.
const COMPRESSED: u8 = 1;
/// The flag of the last frame of a stream.
const LAST: u8 = 2;

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    pub is_compressed: bool,
    pub is_last: bool,
    pub data: Vec<u8>,
}

/// Why bytes are not a stream of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    #[error("a frame has the flags {0:#04x}; only 0x01 (compressed) and 0x02 (last) are known")]
    Flags(u8),
    #[error("a message has {length} bytes; the most is {most}")]
    TooLarge { length: usize, most: usize },
    #[error("the stream ends within a frame")]
    Truncated,
}

impl Envelope {
    /// The bytes of a frame that is not compressed. `None` if the data is too long for a length of four bytes.
    pub fn encode(is_last: bool, data: &[u8]) -> Option<Vec<u8>> {
        let length = u32::try_from(data.len()).ok()?;
        let mut bytes = Vec::with_capacity(HEADER + data.len());
        bytes.push(if is_last { LAST } else { 0 });
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(data);
        Some(bytes)
    }
}

/// Reads frames from bytes that come in any pieces.
#[derive(Debug)]
pub struct Decoder {
    most: usize,
    header: Vec<u8>,
    data: Vec<u8>,
}

impl Decoder {
    /// Reads frames of at most so many bytes of data.
    pub fn new(most: usize) -> Decoder {
        Decoder {
            most,
            header: Vec::new(),
            data: Vec::new(),
        }
    }

    /// Takes bytes off the front of `input` until a frame is complete. `None`: all were taken, and more are needed.
    ///
    /// # Errors
    /// The bytes are not a frame, or one that is too large.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Envelope>, EnvelopeError> {
        take(&mut self.header, HEADER, input);
        let Some(&[flags, length @ ..]) = self.header.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        if flags & !(COMPRESSED | LAST) != 0 {
            return Err(EnvelopeError::Flags(flags));
        }
        let (length, most) = (u32::from_be_bytes(length) as usize, self.most);
        if length > most {
            return Err(EnvelopeError::TooLarge { length, most });
        }
        take(&mut self.data, length, input);
        if self.data.len() < length {
            return Ok(None);
        }
        self.header.clear();
        Ok(Some(Envelope {
            is_compressed: flags & COMPRESSED != 0,
            is_last: flags & LAST != 0,
            data: std::mem::take(&mut self.data),
        }))
    }

    /// Checks that the stream ended after a whole frame.
    ///
    /// # Errors
    /// [`EnvelopeError::Truncated`]: it did not.
    pub fn finish(&self) -> Result<(), EnvelopeError> {
        match self.header.is_empty() {
            true => Ok(()),
            false => Err(EnvelopeError::Truncated),
        }
    }
}

/// Moves bytes of `input` to the end of `held`, until that has `wanted`.
fn take(held: &mut Vec<u8>, wanted: usize, input: &mut &[u8]) {
    let missing = wanted.saturating_sub(held.len()).min(input.len());
    let (now, later) = input.split_at(missing);
    held.extend_from_slice(now);
    *input = later;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(decoder: &mut Decoder, mut input: &[u8]) -> Result<Vec<Envelope>, EnvelopeError> {
        let mut read = Vec::new();
        while let Some(envelope) = decoder.next(&mut input)? {
            read.push(envelope);
        }
        assert!(input.is_empty());
        Ok(read)
    }

    #[test]
    fn frames_are_read_from_any_pieces() {
        let mut bytes = Envelope::encode(false, b"hello").unwrap();
        bytes.extend(Envelope::encode(false, b"").unwrap());
        bytes.extend(Envelope::encode(true, b"{}").unwrap());
        let whole = read_all(&mut Decoder::new(5), &bytes).unwrap();
        let texts: Vec<_> = whole.iter().map(|e| (&e.data[..], e.is_last)).collect();
        assert_eq!(texts, [(&b"hello"[..], false), (b"", false), (b"{}", true)]);
        for size in 1..bytes.len() {
            let mut decoder = Decoder::new(5);
            let pieces = bytes.chunks(size);
            let read: Vec<_> = pieces
                .flat_map(|piece| read_all(&mut decoder, piece).unwrap())
                .collect();
            assert_eq!(read, whole, "pieces of {size}");
            decoder.finish().unwrap();
        }
    }

    #[test]
    fn bytes_that_are_no_frames_are_errors() {
        let read = |bytes: &[u8]| read_all(&mut Decoder::new(4), bytes);
        assert_eq!(read(&[4, 0, 0, 0, 0]), Err(EnvelopeError::Flags(4)));
        let too_large = EnvelopeError::TooLarge { length: 5, most: 4 };
        assert_eq!(read(&[0, 0, 0, 0, 5]), Err(too_large));
        let mut decoder = Decoder::new(4);
        assert_eq!(read_all(&mut decoder, &[0, 0, 0, 0, 4, b'x']), Ok(Vec::new()));
        assert_eq!(decoder.finish(), Err(EnvelopeError::Truncated));
        // No memory is reserved for what was only announced.
        let mut decoder = Decoder::new(usize::MAX);
        assert_eq!(
            read_all(&mut decoder, &[0, 0xff, 0xff, 0xff, 0xff]),
            Ok(Vec::new())
        );
        assert!(decoder.data.capacity() < 64);
    }
}
