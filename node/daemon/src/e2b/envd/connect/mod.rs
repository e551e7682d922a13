//! The Connect protocol over HTTP: unary calls, and streams in either direction.
//!
//! Specification: <https://connectrpc.com/docs/protocol>. Answers are never compressed; requests may be, with gzip.
//!
//! | module | noun |
//! |---|---|
//! | [`codec`] | messages as JSON or protobuf |
//! | [`headers`] | what the headers of a request say |
//! | [`incoming`] | the messages of a request |
//! | [`outgoing`] | the messages of an answer |

pub mod codec;
pub mod headers;
pub mod incoming;
pub mod outgoing;

/// Most bytes of one message, compressed or not.
pub const MAX_MESSAGE: usize = 2 << 20;
