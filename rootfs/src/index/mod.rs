//! A layer index: all that is needed to show a layer's tree, and to read its files from spans of its stored form.
//!
//! Whoever makes one (a first unpacking, a SOCI index, an eStargz table of contents, a converted image's tables, a Nydus
//! bootstrap), the rest of Thaw sees the same three things: the tree, the pieces that say where in the stream each part of
//! the data file is, and the spans that say where in the stored blob each part of the stream is.
pub mod kept;
pub mod soci;
