//! The compression of a stored layer, detected by its first bytes: gzip (RFC 1952, several members allowed), zstd (RFC
//! 8878), or none.

mod indexing;
mod recorder;

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;

pub use indexing::Indexing;

use crate::span::ZSTD_WINDOW_LOG;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Skippable zstd frames, which seekable files may start with: 0x184D2A50 to 0x184D2A5F.
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

fn is_zstd(start: &[u8]) -> bool {
    start.starts_with(&ZSTD) || (start.len() >= 4 && start[0] & 0xf0 == 0x50 && start[1..4] == ZSTD_SKIPPABLE)
}

/// Whether these first bytes are neither gzip nor zstd.
pub(crate) fn is_plain(start: &[u8]) -> bool {
    !start.starts_with(&GZIP) && !is_zstd(start)
}

/// How bytes are stored.
enum Compression {
    Plain,
    Gzip,
    Zstd,
}

/// A reader of all bytes: first those that were read to detect the compression, then the rest.
type Whole<R> = io::Chain<io::Cursor<Vec<u8>>, R>;

/// The form of `stored`, and its bytes.
fn form<R: BufRead>(mut stored: R) -> io::Result<(Compression, Whole<R>)> {
    // A stream may arrive byte by byte.
    let mut start = Vec::with_capacity(ZSTD.len());
    stored.by_ref().take(ZSTD.len() as u64).read_to_end(&mut start)?;
    let form = if start.starts_with(&GZIP) {
        Compression::Gzip
    } else if is_zstd(&start) {
        Compression::Zstd
    } else {
        Compression::Plain
    };
    Ok((form, io::Cursor::new(start).chain(stored)))
}

/// The uncompressed bytes of `stored`.
///
/// # Errors
/// Those of the first read.
pub fn decoder<'a, R: BufRead + Send + 'a>(stored: R) -> io::Result<Box<dyn Read + Send + 'a>> {
    let (form, stored) = form(stored)?;
    Ok(match form {
        Compression::Plain => Box::new(stored),
        Compression::Gzip => Box::new(MultiGzDecoder::new(stored)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(stored)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Box::new(decoder)
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;

    use super::*;

    fn decode(stored: &[u8]) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        decoder(io::BufReader::new(stored))?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn every_form_gives_the_same_bytes() {
        let bytes: Vec<u8> = (0..200_000u32).flat_map(|i| (i / 7).to_le_bytes()).collect();
        let (head, tail) = bytes.split_at(12_345);
        assert_eq!(decode(&bytes).unwrap(), bytes);
        assert_eq!(decode(&gzip(&bytes)).unwrap(), bytes);
        assert_eq!(decode(&[gzip(head), gzip(tail)].concat()).unwrap(), bytes);
        let frame = |bytes| zstd::stream::encode_all(bytes, 3).unwrap();
        assert_eq!(decode(&[frame(head), frame(tail)].concat()).unwrap(), bytes);
        let skippable = [&[0x5d, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3][..], &frame(&bytes)].concat();
        assert_eq!(decode(&skippable).unwrap(), bytes);
        assert_eq!(decode(&[]).unwrap(), b"");
    }

    #[test]
    fn cut_streams_are_errors() {
        let bytes: Vec<u8> = (0..50_000u32).flat_map(u32::to_le_bytes).collect();
        let (gzip, zstd) = (gzip(&bytes), zstd::stream::encode_all(&bytes[..], 3).unwrap());
        for stored in [
            &gzip[..gzip.len() - 4],
            &gzip[..gzip.len() / 2],
            &zstd[..zstd.len() / 2],
        ] {
            assert!(decode(stored).is_err());
        }
    }
}
