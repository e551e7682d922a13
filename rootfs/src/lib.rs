//! Images: sources, layers, EROFS metadata, the blob cache and the read-only filesystem.
