//! The checkpoints of a ztoc: a blob with its own format inside the FlatBuffer, little-endian throughout.
//!
//! For gzip: `i32` count, `i64` span size, then per checkpoint `i64` stored offset, `i64` stream offset, `u8` bits and a window of 32 KiB.
//! The first version omitted the first checkpoint and assumed that a gzip header has 10 bytes. For plain tar: a FlatBuffer inside the
//! FlatBuffer, with a version, the span size and the size.
//!
//! A span's digest covers the stored bytes from the one that holds the checkpoint's bits, if it has any, else from its
//! first whole byte, up to the next checkpoint's first whole byte; the last span's, up to the end of the blob. That is
//! [`Span::stored`], and neighbours share a byte.

use flatbuffers::FlatBufferBuilder;

use crate::index::error::IndexError;
use crate::span::{Expansion, Span, SpanDigest, SpanTable, WINDOW, Window};

use super::flat::{Table, slot};
use super::schema::FORM;

const HEADER: usize = 4 + 8;
const CHECKPOINT: usize = 8 + 8 + 1 + WINDOW;
/// Size of a gzip header without a name, which the first version assumes.
const SHORT_GZIP_HEADER: u64 = 10;
const TAR_VERSION: i32 = 2;

/// Numbers of the fields of a plain tar's checkpoints, in the order of their schema.
mod tar {
    pub const VERSION: usize = 0;
    pub const SPAN_SIZE: usize = 1;
    pub const SIZE: usize = 2;
}

fn malformed(why: &str) -> IndexError {
    IndexError::malformed(FORM, why)
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], IndexError> {
    bytes
        .get(at..at + N)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| malformed("its checkpoints are truncated"))
}

/// An `i64` that must not be negative.
fn offset(bytes: &[u8], at: usize) -> Result<u64, IndexError> {
    u64::try_from(i64::from_le_bytes(number(bytes, at)?)).map_err(|_| malformed("an offset is negative"))
}

/// The spans of a gzip layer. `digests` has one per span.
pub fn read_gzip(
    blob: &[u8],
    digests: &[SpanDigest],
    stored_length: u64,
    stream_length: u64,
) -> Result<Vec<Span>, IndexError> {
    let count = usize::try_from(i32::from_le_bytes(number(blob, 0)?)).unwrap_or(0);
    if count == 0 || count != digests.len() {
        return Err(malformed("it has not one digest for each checkpoint"));
    }
    let body = blob.get(HEADER..).unwrap_or_default();
    // The count was compared with the available bytes, so the product cannot overflow where it matters.
    let is_first_version = match body.len().checked_div(CHECKPOINT) {
        Some(have) if !body.len().is_multiple_of(CHECKPOINT) || have > count => None,
        Some(have) if have == count => Some(false),
        Some(have) if have + 1 == count => Some(true),
        _ => None,
    }
    .ok_or_else(|| malformed("its checkpoints are not as many as it says"))?;
    let mut points = Vec::new();
    if is_first_version {
        points.push((SHORT_GZIP_HEADER, 0, 0, &[][..]));
    }
    for point in body.chunks_exact(CHECKPOINT) {
        points.push((offset(point, 0)?, offset(point, 8)?, point[16], &point[17..]));
    }
    let mut spans = Vec::with_capacity(count);
    for (index, (&(input, output, bits, window), digest)) in points.iter().zip(digests).enumerate() {
        let (next_input, next_output) = points
            .get(index + 1)
            .map_or((stored_length, stream_length), |next| (next.0, next.1));
        // The tool stops counting the stream at the archive's end marker, and checkpoints may follow.
        let stream = output..next_output.min(stream_length);
        if next_output < output && index + 1 < points.len() {
            return Err(malformed("its checkpoints are out of order"));
        }
        if stream.start >= stream.end {
            continue;
        }
        if bits > 7 || (bits > 0 && input == 0) || input > next_input {
            return Err(malformed("a checkpoint is not within the layer"));
        }
        // In the first 32 KiB of the stream the window is shorter, and its bytes are at the window's end.
        let known = usize::try_from(output).map_or(WINDOW, |output| output.min(WINDOW));
        let window = Window::new(&window[window.len().saturating_sub(known)..]);
        spans.push(Span::deflate(
            input,
            bits,
            window,
            next_input,
            stream,
            digest.clone(),
        ));
    }
    Ok(spans)
}

/// The spans of a plain tar layer.
pub fn read_tar(blob: &[u8], digests: &[SpanDigest], stored_length: u64) -> Result<Vec<Span>, IndexError> {
    let table = Table::root(blob)?;
    let natural =
        |id| u64::try_from(table.i64(id)?).map_err(|_| malformed("a length of its layer is negative"));
    let (span_size, size) = (natural(tar::SPAN_SIZE)?, natural(tar::SIZE)?);
    if span_size == 0 || size != stored_length || size.div_ceil(span_size) != digests.len() as u64 {
        return Err(malformed("it has not one digest for each span"));
    }
    let span = |(start, digest): (u64, &SpanDigest)| {
        let range = start..start.saturating_add(span_size).min(size);
        Span {
            stored: range.clone(),
            stream: range,
            digest: digest.clone(),
            expansion: Expansion::Plain,
        }
    };
    let starts = (0..).map(|index: u64| index.saturating_mul(span_size));
    Ok(starts.zip(digests).map(span).collect())
}

/// The part of a ztoc that describes a stored layer's spans.
pub struct Written {
    pub is_gzip: bool,
    pub blob: Vec<u8>,
    pub digests: Vec<[u8; 32]>,
}

/// Writes the checkpoints of `spans`, which cover a whole stored layer.
pub fn write(spans: &SpanTable, span_size: u64, stored_length: u64) -> Result<Written, IndexError> {
    let unfit = |what: &str| IndexError::unsupported(FORM, format!("a layer {what}"));
    let all = spans.spans();
    let digests = all
        .iter()
        .map(|span| match span.digest {
            SpanDigest::StoredSha256(digest) => Ok(digest),
            _ => Err(unfit("whose spans have no SHA-256 digests")),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let last = all.last().ok_or_else(|| unfit("without any spans"))?;
    let is_gapless = all[0].stream.start == 0
        && all
            .windows(2)
            .all(|pair| pair[0].stream.end == pair[1].stream.start);
    if last.stored.end != stored_length || !is_gapless {
        return Err(unfit("whose spans do not hold all of it"));
    }
    let signed = |value: u64| i64::try_from(value).map_err(|_| unfit("of more than 2^63 bytes"));
    if all.iter().all(|span| span.expansion == Expansion::Plain) {
        // The format has no offsets, so every span must be at the multiple of the span size that its index gives.
        let is_even = all.iter().zip(0u64..).all(|(span, index)| {
            span.stored == span.stream
                && span.stream.start == index * span_size
                && span.stream.end == (span.stream.start + span_size).min(stored_length)
        });
        if !is_even {
            return Err(unfit("whose spans are not all of one size"));
        }
        let (span_size, size) = (signed(span_size)?, signed(stored_length)?);
        let mut buffer = FlatBufferBuilder::new();
        let table = buffer.start_table();
        buffer.push_slot(slot(tar::VERSION), TAR_VERSION, 0);
        buffer.push_slot(slot(tar::SPAN_SIZE), span_size, 0);
        buffer.push_slot(slot(tar::SIZE), size, 0);
        let table = buffer.end_table(table);
        buffer.finish_minimal(table);
        return Ok(Written {
            is_gzip: false,
            blob: buffer.finished_data().to_vec(),
            digests,
        });
    }
    let count = i32::try_from(all.len()).map_err(|_| unfit("of more than 2^31 spans"))?;
    let mut blob = Vec::with_capacity(HEADER + all.len() * CHECKPOINT);
    blob.extend(count.to_le_bytes());
    blob.extend(signed(span_size)?.to_le_bytes());
    for (index, span) in all.iter().enumerate() {
        let point = span
            .checkpoint()
            .ok_or_else(|| unfit("that is not one gzip member"))?;
        let next = all.get(index + 1).and_then(Span::checkpoint);
        if next.is_some_and(|next| next.input != span.stored.end) {
            return Err(unfit("whose spans do not touch"));
        }
        blob.extend(signed(point.input)?.to_le_bytes());
        blob.extend(signed(point.output)?.to_le_bytes());
        blob.push(point.bits);
        let window = point
            .window
            .bytes()
            .map_err(|why| IndexError::malformed(FORM, why))?;
        blob.resize(blob.len() + WINDOW.saturating_sub(window.len()), 0);
        blob.extend(&window);
    }
    Ok(Written {
        is_gzip: true,
        blob,
        digests,
    })
}
