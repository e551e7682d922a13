//! Unpacking a layer, verified twice: its stored form against the manifest's digest, its tar against the DiffID.
//!
//! Only if both match does the layer's directory get its name, and only then is the layer served.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use sha2::{Digest as _, Sha256};
use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::blob::{BlobError, BlobWriter, BootId};
use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;
use tokio_util::sync::CancellationToken;

use crate::compression::{self, Indexing};
use crate::error::{Error, is_full};
use crate::index::kept::{self, Kept};
use crate::index::{Content, Piece, Pieces};
use crate::layer::tree::LayerTree;
use crate::layer::{DataSink, LayerError, LayerLimits, Unpacked, unpack_indexed};
use crate::progress::{Event, Progress};
use crate::source::LayerSource;
use crate::span::SpanTable;

use super::record::write_synced;

pub const DATA: &str = "data";
pub const READY: &str = "ready";
pub const TREE: &str = "tree";
pub use crate::index::kept::INDEX;

const BUFFER: usize = 256 << 10;
/// Bytes received between two reports of progress.
const REPORT: u64 = 1 << 20;

/// The input of one unpacking.
pub struct Job {
    pub layer: LayerSource,
    pub body: Box<dyn Read + Send>,
    pub progress: Arc<dyn Progress>,
    pub cancelled: CancellationToken,
}

/// Unpacks into an empty directory and creates a layer's files: data, ready, tree; and index, if decompression of the stored form can start
/// in the middle.
pub fn unpack_into(job: Job, directory: &Path, boot: BootId) -> Result<(), Error> {
    let diff_id = job.layer.diff_id;
    let path = directory.join(DATA);
    let data = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path);
    let data = data.map_err(|error| Error::io(&path, error))?;
    let handle = data.try_clone().map_err(|error| Error::io(&path, error))?;
    let mut writer = BlobWriter::create(handle);
    reach(Failpoint::LayerDataMade);
    let (tree, index) = run_indexed(job, &mut writer, &path)?;
    let summary = writer
        .finish()
        .map_err(|error| Error::blob(diff_id, &path, error))?;
    reach(Failpoint::LayerDataWritten);

    let ready_path = directory.join(READY);
    let ready = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&ready_path);
    let ready = ready.map_err(|error| Error::io(&ready_path, error))?;
    BlobWriter::seal(&summary, ready, *diff_id.bytes(), boot)
        .and_then(|ready| ready.stamp(&data))
        .map_err(|error| Error::blob(diff_id, &ready_path, error))?;

    let path = directory.join(TREE);
    let bytes = tree
        .to_bytes()
        .map_err(|error| Error::malformed(format!("layer {diff_id}"), error))?;
    write_synced(&path, &bytes).map_err(|error| Error::io(&path, error))?;

    if let Some(index) = index {
        let path = directory.join(INDEX);
        write_synced(&path, &kept::encode(&index)).map_err(|error| Error::io(&path, error))?;
    }
    Ok(())
}

/// Streams a layer through decompression and unpacking into `sink`, and compares both digests. `path` is where the sink
/// writes, for messages.
pub fn run(job: Job, sink: &mut impl DataSink, path: &Path) -> Result<LayerTree, Error> {
    go(job, sink, path, false).map(|(tree, _)| tree)
}

/// Like [`run`], and also returns the index of the stored form; `None` if there are too few places at which decompression can start.
pub fn run_indexed(
    job: Job,
    sink: &mut impl DataSink,
    path: &Path,
) -> Result<(LayerTree, Option<Kept>), Error> {
    go(job, sink, path, true)
}

fn go(
    job: Job,
    sink: &mut impl DataSink,
    path: &Path,
    is_indexed: bool,
) -> Result<(LayerTree, Option<Kept>), Error> {
    let Job {
        layer,
        body,
        progress,
        cancelled,
    } = job;
    let fault = Fault::default();
    let counters = Counters {
        layer: layer.diff_id,
        progress,
        unpacked: Arc::default(),
    };
    let mut stored = Stored {
        body,
        hasher: Sha256::new(),
        received: 0,
        limit: layer.size,
        reported: 0,
        fault: fault.clone(),
        counters: counters.clone(),
        cancelled,
    };
    let result = unpack_stream(&mut stored, sink, &counters, path, is_indexed);
    // Whatever went wrong, a damaged transfer explains it best.
    if let Some(error) = fault.take() {
        return Err(error);
    }
    let received = match result {
        Err(Failure::Sink(error)) => return Err(error),
        // That it is another layer explains better why the sink does not know it.
        _ => stored.check(&layer)?,
    };
    let Stream {
        unpacked,
        spans,
        diff_id,
    } = result.map_err(|failure| failure.explain(&layer))?;
    let diff_id = diff_id.unwrap_or(received.digest);
    if diff_id != layer.diff_id {
        let what = format!("the tar of {}", layer.name());
        return Err(Error::DigestMismatch {
            what,
            expected: layer.diff_id,
            got: diff_id,
        });
    }
    counters.progress.event(Event::Unpacked {
        layer: layer.diff_id,
        unpacked: counters.unpacked(),
    });
    let index = spans.and_then(|spans| index(unpacked.tree.data_length, unpacked.pieces, spans, &received));
    Ok((unpacked.tree, index))
}

/// A layer's digest and length, as received.
struct Received {
    digest: Digest,
    length: u64,
}

/// The index of the received layer. It comes from verified data, so a refusal is a bug of Thaw; the layer is then kept without an index.
fn index(data_length: u64, pieces: Vec<Piece>, spans: SpanTable, received: &Received) -> Option<Kept> {
    let content = Content::new(data_length, Pieces::Map(pieces), spans)
        .inspect_err(
            |error| tracing::warn!(layer = %received.digest, %error, "a layer is kept without its index"),
        )
        .ok()?;
    Some(Kept {
        stored: received.digest,
        stored_length: received.length,
        content,
    })
}

/// The uncompressed layer.
enum Decoder<'a> {
    Plain(Box<dyn Read + Send + 'a>),
    Indexing(Box<Indexing<BufReader<&'a mut Stored>>>),
}

impl Read for Decoder<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(decoder) => decoder.read(buffer),
            Self::Indexing(decoder) => decoder.read(buffer),
        }
    }
}

/// A layer's stream, read to its end.
struct Stream {
    unpacked: Unpacked,
    spans: Option<SpanTable>,
    /// `None` if the stored layer is the tar itself, which is hashed once.
    diff_id: Option<Digest>,
}

fn unpack_stream(
    stored: &mut Stored,
    sink: &mut impl DataSink,
    counters: &Counters,
    path: &Path,
    is_indexed: bool,
) -> Result<Stream, Failure> {
    let stored = BufReader::with_capacity(BUFFER, stored);
    let decoder = if is_indexed {
        Indexing::new(stored).map(|decoder| Decoder::Indexing(Box::new(decoder)))
    } else {
        compression::decoder(stored).map(Decoder::Plain)
    };
    let decoder = decoder.map_err(Failure::Stream)?;
    let is_stored = matches!(&decoder, Decoder::Indexing(decoder) if decoder.is_plain());
    let mut tar = Tar {
        decoder,
        hasher: (!is_stored).then(Sha256::new),
        counters: counters.clone(),
    };
    let mut sink = Watched { sink, failed: None };
    let unpacked = unpack_indexed(
        BufReader::with_capacity(BUFFER, &mut tar),
        &mut sink,
        &LayerLimits::default(),
    );
    if let Some(error) = sink.failed {
        let unknown = error.get_ref().is_some_and(|it| it.is::<BlobError>());
        let error = Error::io(path, error);
        return Err(if unknown {
            Failure::Unknown(error)
        } else {
            Failure::Sink(error)
        });
    }
    let unpacked = unpacked.map_err(Failure::Layer)?;
    io::copy(&mut tar, &mut io::sink()).map_err(Failure::Stream)?;
    Ok(Stream {
        unpacked,
        spans: match tar.decoder {
            Decoder::Indexing(decoder) => decoder.into_spans(),
            Decoder::Plain(_) => None,
        },
        diff_id: tar
            .hasher
            .map(|hasher| Digest::from(<[u8; 32]>::from(hasher.finalize()))),
    })
}

/// Where an unpacking broke.
enum Failure {
    /// The local file could not be written.
    Sink(Error),
    /// The sink knows other bytes of this layer.
    Unknown(Error),
    /// The compressed stream is invalid.
    Stream(io::Error),
    /// The tar makes no sense, or is refused.
    Layer(LayerError),
}

impl Failure {
    fn explain(self, layer: &LayerSource) -> Error {
        match self {
            Self::Sink(error) | Self::Unknown(error) => error,
            Self::Stream(error) => Error::malformed(layer.name(), error),
            Self::Layer(source) => Error::layer(layer.diff_id, source),
        }
    }
}

/// The first typed error of a stream, which would otherwise lose its type in the chain of readers.
#[derive(Clone, Default)]
struct Fault(Arc<Mutex<Option<Error>>>);

impl Fault {
    fn set(&self, error: Error) {
        self.0.locked().get_or_insert(error);
    }

    fn take(&self) -> Option<Error> {
        self.0.locked().take()
    }
}

#[derive(Clone)]
struct Counters {
    layer: Digest,
    progress: Arc<dyn Progress>,
    unpacked: Arc<AtomicU64>,
}

impl Counters {
    fn unpacked(&self) -> u64 {
        self.unpacked.load(Ordering::Relaxed)
    }
}

/// The layer as stored, hashed and counted.
struct Stored {
    body: Box<dyn Read + Send>,
    hasher: Sha256,
    received: u64,
    limit: Option<u64>,
    reported: u64,
    fault: Fault,
    counters: Counters,
    cancelled: CancellationToken,
}

impl Stored {
    fn fail(&self, error: Error) -> io::Error {
        self.fault.set(error);
        io::Error::other("the layer's source failed")
    }

    /// Reads the bytes that decompression left over, then compares length and digest.
    fn check(mut self, layer: &LayerSource) -> Result<Received, Error> {
        let drained = io::copy(&mut self, &mut io::sink());
        if let Some(error) = self.fault.take() {
            return Err(error);
        }
        drained.map_err(|error| Error::malformed(layer.name(), error))?;
        if let Some(expected) = layer.size.filter(|size| self.received < *size) {
            return Err(Error::TruncatedLayer {
                what: layer.name(),
                expected,
                got: self.received,
            });
        }
        let got = Digest::from(<[u8; 32]>::from(self.hasher.finalize()));
        match layer.digest {
            Some(expected) if expected != got => Err(Error::DigestMismatch {
                what: "the layer".into(),
                expected,
                got,
            }),
            _ => Ok(Received {
                digest: got,
                length: self.received,
            }),
        }
    }
}

impl Read for Stored {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.is_cancelled() {
            return Err(self.fail(Error::Cancelled));
        }
        let length = self
            .body
            .read(buffer)
            .map_err(|error| match error.downcast::<Error>() {
                Ok(error) => self.fail(error),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => error,
                Err(error) => self.fail(Error::io(Path::new("the layer's source"), error)),
            })?;
        self.hasher.update(&buffer[..length]);
        self.received += length as u64;
        if self.limit.is_some_and(|limit| self.received > limit) {
            let problem = "it is longer than its descriptor says";
            return Err(self.fail(Error::malformed(
                format!("layer {}", self.counters.layer),
                problem,
            )));
        }
        if self.received - self.reported >= REPORT || (length == 0 && self.received > self.reported) {
            self.reported = self.received;
            self.counters.progress.event(Event::Advanced {
                layer: self.counters.layer,
                received: self.received,
                unpacked: self.counters.unpacked(),
            });
        }
        Ok(length)
    }
}

/// The uncompressed tar, hashed and counted.
struct Tar<'a> {
    decoder: Decoder<'a>,
    hasher: Option<Sha256>,
    counters: Counters,
}

impl Read for Tar<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.decoder.read(buffer)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&buffer[..length]);
        }
        self.counters.unpacked.fetch_add(length as u64, Ordering::Relaxed);
        Ok(length)
    }
}

/// Remembers that it was the sink that failed, and how.
struct Watched<'a, S> {
    sink: &'a mut S,
    failed: Option<io::Error>,
}

impl<S> Watched<'_, S> {
    fn note(&mut self, result: io::Result<()>) -> io::Result<()> {
        result.map_err(|error| {
            let told = io::Error::from(if is_full(&error) {
                error.kind()
            } else {
                io::ErrorKind::Other
            });
            self.failed.get_or_insert(error);
            told
        })
    }
}

impl<S: DataSink> DataSink for Watched<'_, S> {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let result = self.sink.append(bytes);
        self.note(result)
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        let result = self.sink.skip(length);
        self.note(result)
    }
}
