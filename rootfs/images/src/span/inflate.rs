//! zlib's inflate with the functions that `zran` needs and flate2 lacks: stopping between blocks, the window, leftover bits.
//!
//! This file contains all unsafe code for reading gzip. Invariant: `stream` was initialized by `inflateInit2_`, is on the heap and never
//! moved out of its box, and its pointers into the caller's slices are set before each call and not used after it.

use libz_rs_sys::{
    Z_BLOCK, Z_BUF_ERROR, Z_NO_FLUSH, Z_OK, Z_STREAM_END, inflate, inflateEnd, inflateGetDictionary,
    inflateInit2_, inflatePrime, inflateReset2, inflateSetDictionary, z_stream, zlibVersion,
};

use super::window::WINDOW;

/// The format around the deflate data, as zlib's `windowBits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Wrap {
    /// No header or trailer.
    Raw = -15,
    /// A gzip header and a trailer, whose checksum is compared.
    Gzip = 15 + 16,
}

/// The result of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes of the input consumed.
    pub read: usize,
    /// Bytes of the output written.
    pub written: usize,
    pub stop: Stop,
}

/// Where a call stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It wants more input or more room.
    Within,
    /// Before a block, whose first bits (0 to 7 of them) are in the byte before.
    BeforeBlock { bits: u8 },
    /// After the last block and its trailer, if the format has one.
    End,
}

/// Where to stop at the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// When input or output is used up, or the data ends.
    Full,
    /// Also before each block.
    Block,
}

/// An inflating stream.
pub struct Inflate {
    stream: Box<z_stream>,
}

// SAFETY: only this value owns the stream's state, which was allocated with the process's allocator; the pointers into callers' slices are
// not used between calls. No part of it depends on a thread.
unsafe impl Send for Inflate {}

impl Inflate {
    /// A stream at its start.
    ///
    /// # Errors
    /// When out of memory.
    pub fn new(wrap: Wrap) -> Result<Inflate, &'static str> {
        let mut stream = Box::new(z_stream::default());
        // SAFETY: the stream is valid and exclusive; the version and the size are the library's own.
        let result = unsafe {
            inflateInit2_(
                &raw mut *stream,
                wrap as i32,
                zlibVersion(),
                size_of::<z_stream>() as i32,
            )
        };
        if result == Z_OK {
            Ok(Inflate { stream })
        } else {
            Err("there is no memory for inflating")
        }
    }

    /// Back to the start, everything before forgotten.
    pub fn reset(&mut self, wrap: Wrap) {
        // SAFETY: the stream is initialized and exclusive. It cannot fail: the window bits are valid.
        unsafe { inflateReset2(&raw mut *self.stream, wrap as i32) };
    }

    /// Puts the `bits` highest bits of `byte` before the input. At the start of a raw stream only.
    pub fn prime(&mut self, bits: u8, byte: u8) {
        if (1..8).contains(&bits) {
            // SAFETY: the stream is initialized and exclusive.
            unsafe { inflatePrime(&raw mut *self.stream, bits.into(), i32::from(byte) >> (8 - bits)) };
        }
    }

    /// Sets the preceding output, at most 32 KiB. Only at the start of a raw stream.
    ///
    /// # Errors
    /// If it is longer, or the stream is at another position.
    pub fn set_dictionary(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        if bytes.len() > WINDOW {
            return Err("its window is larger than 32 KiB");
        }
        // SAFETY: the stream is initialized and exclusive, and the dictionary is a readable slice of the length given.
        match unsafe { inflateSetDictionary(&raw mut *self.stream, bytes.as_ptr(), bytes.len() as u32) } {
            Z_OK => Ok(()),
            _ => Err("its window does not fit"),
        }
    }

    /// The last bytes written, up to 32 KiB.
    pub fn dictionary(&self) -> Vec<u8> {
        let mut bytes = vec![0; WINDOW];
        let mut length = 0;
        // SAFETY: the stream is initialized; the buffer has the 32 KiB that are always enough, and the length is writable.
        unsafe { inflateGetDictionary(&raw const *self.stream, bytes.as_mut_ptr(), &raw mut length) };
        bytes.truncate(length as usize);
        bytes
    }

    /// Inflates `input` into `output`.
    ///
    /// # Errors
    /// The defect of the data.
    pub fn step(&mut self, input: &[u8], output: &mut [u8], until: Until) -> Result<Step, &'static str> {
        // More than 4 GiB is taken in several calls.
        let (available_in, available_out) = (clamp(input.len()), clamp(output.len()));
        self.stream.next_in = input.as_ptr();
        self.stream.avail_in = available_in;
        self.stream.next_out = output.as_mut_ptr();
        self.stream.avail_out = available_out;
        let flush = match until {
            Until::Full => Z_NO_FLUSH,
            Until::Block => Z_BLOCK,
        };
        // SAFETY: the stream is initialized and exclusive; input and output are slices of at least the lengths given and
        // outlive the call.
        let result = unsafe { inflate(&raw mut *self.stream, flush) };
        let state = self.stream.data_type;
        let stop = match result {
            Z_STREAM_END => Stop::End,
            // Bit 7: between blocks; bit 6: after the last; below: bits taken of the byte before.
            Z_OK if state & 0x80 != 0 && state & 0x40 == 0 && state & 0x3f < 8 => Stop::BeforeBlock {
                bits: (state & 7) as u8,
            },
            Z_OK | Z_BUF_ERROR => Stop::Within,
            _ => return Err(self.message()),
        };
        Ok(Step {
            read: (available_in - self.stream.avail_in) as usize,
            written: (available_out - self.stream.avail_out) as usize,
            stop,
        })
    }

    fn message(&self) -> &'static str {
        if self.stream.msg.is_null() {
            return "the deflate data is damaged";
        }
        // SAFETY: zlib's messages are string constants that end with NUL.
        let message = unsafe { std::ffi::CStr::from_ptr::<'static>(self.stream.msg) };
        message.to_str().unwrap_or("the deflate data is damaged")
    }
}

impl Drop for Inflate {
    fn drop(&mut self) {
        // SAFETY: the stream is initialized, exclusive, and not used again.
        unsafe { inflateEnd(&raw mut *self.stream) };
    }
}

fn clamp(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
