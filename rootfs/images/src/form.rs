//! The form of a layer: the kind of document from which its tree and the location of its data were read. Form, document and stored blob
//! give a layer its key in the store.
//!
//! Invariant: a layer's key names the documents that its tree and data were verified against. An attacker who chooses a document that
//! describes a layer (an index, a table of contents) can thus change only data under that document's key, never data that another image
//! shares.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;

/// The kind of document from which a layer's tree and the location of its data were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Its tar, unpacked whole and compared with its DiffID.
    Tar,
    /// A SOCI index to which the image is bound.
    Soci,
    /// The table of contents of an eStargz layer.
    Estargz,
    /// A converted image's tables.
    Accelerated,
    /// A Nydus image's bootstrap.
    Nydus,
}

impl Form {
    /// How it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tar => "tar",
            Self::Soci => "soci",
            Self::Estargz => "estargz",
            Self::Accelerated => "accelerated",
            Self::Nydus => "nydus",
        }
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The key of a layer whose tree comes from `document` and whose bytes from the stored blob `stored`.
pub fn layer_key(form: Form, stored: &Digest, document: &Digest) -> Digest {
    let mut hasher = Sha256::new();
    hasher.update(b"thaw layer key v1\0");
    hasher.update(form.name());
    hasher.update(b"\0");
    hasher.update(stored.bytes());
    hasher.update(document.bytes());
    Digest::from(<[u8; 32]>::from(hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_in_each_part() {
        let (one, two) = (Digest::of(b"1"), Digest::of(b"2"));
        let keys = [
            layer_key(Form::Soci, &one, &two),
            layer_key(Form::Estargz, &one, &two),
            layer_key(Form::Soci, &two, &one),
            layer_key(Form::Soci, &one, &one),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key) && *key != one && *key != two);
        }
        assert_eq!(keys[0], layer_key(Form::Soci, &one, &two));
    }
}
