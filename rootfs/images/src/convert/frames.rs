//! Writing a blob: chunks are grouped in frames, frames are compressed in parallel and written in order.

use std::io::{self, Write};
use std::num::NonZero;

use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;

use crate::error::Error;

use super::chunks::{Distinct, Place, SourceBlob};
use crate::accelerated::table::{Chunk, Frame, Table};
use crate::accelerated::wire::{PAGE, ZSTD, compress};

/// Bytes of data up to which a frame is filled, unless one chunk is longer. Larger frames compress small files better; smaller frames make
/// a read fetch less.
pub const FRAME_TARGET: u64 = 256 << 10;

/// Frames in flight per thread.
const AHEAD: usize = 4;

/// Writes the chunks in the order of `groups`; no frame spans two groups. Returns the table. `told` is called with the bytes of data done
/// and the total.
pub fn write(
    groups: &[Vec<u32>],
    distinct: &[Distinct],
    sources: &[SourceBlob],
    level: i32,
    out: &mut impl Write,
    told: &dyn Fn(u64, u64),
) -> Result<Table, Error> {
    let total = groups
        .iter()
        .flatten()
        .map(|index| distinct[*index as usize].length)
        .sum();
    let frames: Vec<&[u32]> = groups.iter().flat_map(|group| split(group, distinct)).collect();
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut hasher = Sha256::new();
    let mut table = Table {
        blob: Digest::from([0; 32]),
        stored_length: 0,
        data_length: 0,
        frames: Vec::with_capacity(frames.len()),
        chunks: Vec::new(),
    };
    for batch in frames.chunks(threads * AHEAD) {
        for (members, (stored, bytes)) in batch.iter().zip(make(batch, distinct, sources, level, threads)?) {
            hasher.update(&bytes);
            out.write_all(&bytes)
                .map_err(|error| Error::io("the converted blob".as_ref(), error))?;
            table.stored_length += bytes.len() as u64;
            table.frames.push(Frame {
                stored: stored & !ZSTD,
                is_zstd: stored & ZSTD != 0,
                chunks: members.len() as u32,
            });
            for index in *members {
                let chunk = &distinct[*index as usize];
                table.data_length += chunk.length;
                table.chunks.push(Chunk {
                    pages: (chunk.length / PAGE) as u32,
                    digest: chunk.digest,
                });
            }
        }
        told(table.data_length, total);
    }
    table.blob = Digest::from(<[u8; 32]>::from(hasher.finalize()));
    Ok(table)
}

/// Cuts a run of chunks into frames.
fn split<'a>(mut group: &'a [u32], distinct: &'a [Distinct]) -> impl Iterator<Item = &'a [u32]> {
    std::iter::from_fn(move || {
        let mut filled = 0;
        let fits = |index: &&u32| {
            filled += distinct[**index as usize].length;
            filled <= FRAME_TARGET
        };
        let count = group.iter().take_while(fits).count().max(1).min(group.len());
        let (frame, rest) = group.split_at(count);
        group = rest;
        (!frame.is_empty()).then_some(frame)
    })
}

/// The stored form of each frame.
fn make(
    frames: &[&[u32]],
    distinct: &[Distinct],
    sources: &[SourceBlob],
    level: i32,
    threads: usize,
) -> Result<Vec<(u32, Vec<u8>)>, Error> {
    let share = frames.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = frames
            .chunks(share)
            .map(|frames| {
                scope.spawn(move || -> Result<Vec<_>, Error> {
                    frames
                        .iter()
                        .map(|frame| {
                            compress(gather(frame, distinct, sources)?, level)
                                .map_err(|error| Error::io("the compressor".as_ref(), error))
                        })
                        .collect()
                })
            })
            .collect();
        let mut made = Vec::with_capacity(frames.len());
        for worker in workers {
            match worker.join() {
                Ok(frames) => made.extend(frames?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(made)
    })
}

/// A frame's data, compared with the earlier hashes, because the files must not have changed meanwhile.
fn gather(frame: &[u32], distinct: &[Distinct], sources: &[SourceBlob]) -> Result<Vec<u8>, Error> {
    let mut data = Vec::new();
    for index in frame {
        let chunk = &distinct[*index as usize];
        let Place::Source { blob, offset } = chunk.place else {
            continue;
        };
        let start = data.len();
        data.resize(start + chunk.length as usize, 0);
        let source = &sources[blob as usize];
        source.read(&mut data[start..], offset)?;
        if blake3::hash(&data[start..]) != chunk.digest {
            let changed = io::Error::other("it changed while it was converted");
            return Err(Error::io(
                format!("the data file of layer {}", source.id).as_ref(),
                changed,
            ));
        }
    }
    Ok(data)
}
