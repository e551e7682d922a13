//! Decompresses a stored layer once and records the places from which it can be read later.
//!
//! Each decoder accepts and refuses exactly what a plain decoder would: a truncated gzip member or zstd frame, or other bytes after it, are
//! an error; the data may end between two of them.

use std::io::{self, BufRead, Read};

use zstd::stream::raw::{DParameter, Decoder as ZstdStream, InBuffer, Operation, OutBuffer};

use crate::span::inflate::{Inflate, Stop, Until, Wrap};
use crate::span::{Expansion, Packer, SPAN, SpanTable};

use super::recorder::Recorder;
use super::{Compression, Whole, ZSTD_WINDOW_LOG, form};

/// A reader that decompresses a stored blob and indexes it.
pub struct Indexing<R> {
    stored: Whole<R>,
    decoder: Decoder,
    recorder: Recorder,
    /// Whether the last member or frame is complete and no other has begun.
    is_between: bool,
    /// Gzip members read to their end.
    members: u64,
}

enum Decoder {
    Plain,
    Gzip(Inflate, Packer),
    Zstd(Box<ZstdStream<'static>>),
}

impl<R: BufRead> Indexing<R> {
    /// Detects the form from the first bytes of `stored`.
    ///
    /// # Errors
    /// Those of the first read, or if there is no memory.
    pub fn new(stored: R) -> io::Result<Indexing<R>> {
        Indexing::every(SPAN, stored)
    }

    /// The same, with spans of at least `every` bytes of the stream.
    ///
    /// # Errors
    /// See [`Indexing::new`].
    pub fn every(every: u64, stored: R) -> io::Result<Indexing<R>> {
        let (form, stored) = form(stored)?;
        let mut recorder = Recorder::new(every);
        let decoder = match form {
            Compression::Plain => {
                recorder.begin(Expansion::Plain);
                Decoder::Plain
            }
            // The decoder finds where the first member's data begins.
            Compression::Gzip => {
                let inflate = Inflate::new(Wrap::Gzip).map_err(io::Error::other)?;
                Decoder::Gzip(inflate, Packer::default())
            }
            Compression::Zstd => {
                recorder.begin(Expansion::Zstd);
                let mut stream = ZstdStream::new()?;
                stream.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG))?;
                Decoder::Zstd(Box::new(stream))
            }
        };
        Ok(Indexing {
            stored,
            decoder,
            recorder,
            is_between: false,
            members: 0,
        })
    }

    /// Whether the blob is the stream.
    pub fn is_plain(&self) -> bool {
        matches!(self.decoder, Decoder::Plain)
    }

    /// The number of gzip members in the blob, which was read to its end; 0 if it has another form.
    pub fn gzip_members(&self) -> u64 {
        self.members
    }

    /// The spans of the blob, which was read to its end; `None` if there are too few places at which decompression can start, as in a zstd
    /// layer of one large frame.
    pub fn into_spans(self) -> Option<SpanTable> {
        self.recorder.finish()
    }
}

impl<R: BufRead> Read for Indexing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let input = self.stored.fill_buf()?;
            let is_end = input.is_empty();
            if is_end && (self.is_between || matches!(self.decoder, Decoder::Plain)) {
                return Ok(0);
            }
            let (read, written) = match &mut self.decoder {
                Decoder::Plain => plain(&mut self.recorder, input, buffer),
                Decoder::Gzip(inflate, packer) => {
                    let (read, written, is_end) = gzip(
                        (inflate, packer),
                        &mut self.recorder,
                        &mut self.is_between,
                        input,
                        buffer,
                    )?;
                    self.members += u64::from(is_end);
                    (read, written)
                }
                Decoder::Zstd(stream) => {
                    zstd(stream, &mut self.recorder, &mut self.is_between, input, buffer)?
                }
            };
            self.stored.consume(read);
            if written > 0 {
                return Ok(written);
            }
            if is_end && !self.is_between {
                let message = "the compressed stream ends early";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
            }
        }
    }
}

fn plain(recorder: &mut Recorder, input: &[u8], output: &mut [u8]) -> (usize, usize) {
    // Spans are cut at exact multiples.
    if recorder.is_due(recorder.every - 1) {
        recorder.begin(Expansion::Plain);
    }
    let length = recorder.until(recorder.every).min(input.len()).min(output.len());
    output[..length].copy_from_slice(&input[..length]);
    recorder.progress(&input[..length], length);
    (length, length)
}

/// Bytes read and written, and whether a member ended.
fn gzip(
    (inflate, packer): (&mut Inflate, &mut Packer),
    recorder: &mut Recorder,
    is_between: &mut bool,
    input: &[u8],
    output: &mut [u8],
) -> io::Result<(usize, usize, bool)> {
    // Stopping before every block costs several percent, so it does so only where a checkpoint is possible.
    let (length, until) = match recorder.until(recorder.every) {
        length @ 1.. if !recorder.is_due(recorder.every) => (length.min(output.len()), Until::Full),
        _ => (output.len(), Until::Block),
    };
    let step = inflate.step(input, &mut output[..length], until).map_err(|why| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the gzip stream is damaged: {why}"),
        )
    })?;
    if (step.read, step.written, step.stop) == (0, 0, Stop::Within) && !input.is_empty() {
        // This cannot happen, but must not become an endless loop.
        let message = "the gzip stream is damaged: nothing comes of it";
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    recorder.progress(&input[..step.read], step.written);
    *is_between = step.stop == Stop::End || (*is_between && step.read == 0);
    match step.stop {
        Stop::End => inflate.reset(Wrap::Gzip),
        // The same rule and form as SOCI's checkpoints, so that each can be converted to the other.
        Stop::BeforeBlock { bits } if recorder.is_due(recorder.every) => recorder.begin(Expansion::Deflate {
            bits,
            window: packer.pack(&inflate.dictionary()),
        }),
        _ => {}
    }
    Ok((step.read, step.written, step.stop == Stop::End))
}

fn zstd(
    stream: &mut ZstdStream<'static>,
    recorder: &mut Recorder,
    is_between: &mut bool,
    input: &[u8],
    output: &mut [u8],
) -> io::Result<(usize, usize)> {
    let mut source = InBuffer::around(input);
    let mut target = OutBuffer::around(output);
    // The decoder's estimate of its next input; 0 after a frame.
    let hint = stream.run(&mut source, &mut target)?;
    let (read, written) = (source.pos(), target.pos());
    recorder.progress(&input[..read], written);
    *is_between = hint == 0;
    if *is_between && recorder.is_due(recorder.every - 1) {
        recorder.begin(Expansion::Zstd);
    }
    Ok((read, written))
}

#[cfg(test)]
#[path = "indexing_test.rs"]
mod tests;
