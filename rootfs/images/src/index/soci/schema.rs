//! The schema of a ztoc, version 0.9: the numbers of its FlatBuffer's fields and their values.

/// The document's name in messages.
pub const FORM: &str = "ztoc";
pub const VERSION: &[u8] = b"0.9";

/// Numbers of the fields, in the order of the schema.
pub mod field {
    pub mod ztoc {
        pub const VERSION: usize = 0;
        pub const BUILD_TOOL: usize = 1;
        pub const COMPRESSED_SIZE: usize = 2;
        pub const UNCOMPRESSED_SIZE: usize = 3;
        pub const TOC: usize = 4;
        pub const COMPRESSION: usize = 5;
    }
    pub mod toc {
        pub const FILES: usize = 0;
    }
    pub mod compression {
        pub const ALGORITHM: usize = 0;
        pub const MAX_SPAN_ID: usize = 1;
        pub const SPAN_DIGESTS: usize = 2;
        pub const CHECKPOINTS: usize = 3;
    }
    pub mod file {
        pub const NAME: usize = 0;
        pub const TYPE: usize = 1;
        pub const OFFSET: usize = 2;
        pub const SIZE: usize = 3;
        pub const LINK: usize = 4;
        pub const MODE: usize = 5;
        pub const UID: usize = 6;
        pub const GID: usize = 7;
        pub const USER: usize = 8;
        pub const GROUP: usize = 9;
        pub const MTIME: usize = 10;
        pub const MAJOR: usize = 11;
        pub const MINOR: usize = 12;
        pub const XATTRS: usize = 13;
    }
    pub mod xattr {
        pub const KEY: usize = 0;
        pub const VALUE: usize = 1;
    }
}

/// Compression algorithms; the first is a table's default.
pub const GZIP: u8 = 1;
pub const UNCOMPRESSED: u8 = 2;
