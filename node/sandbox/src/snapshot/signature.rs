//! Ed25519 over the manifest's bytes, in `manifest.sig`: 64 bytes, as `openssl pkeyutl -sign -rawin` writes them.
//!
//! Keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them. Invariants: if any key is
//! trusted, a manifest without a signature by a trusted key is refused, unless the configuration allows unsigned ones. A key
//! that cannot be read is an error; it is not skipped.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use super::error::SnapshotError;
use crate::config::SnapshotsConfig;

/// The directory of trusted keys, under the data directory.
pub const KEYS: &str = "keys";
/// Size of a signature, bytes.
pub const SIGNATURE: usize = 64;
/// The prefix of the 32 bytes of a key in a SubjectPublicKeyInfo (RFC 8410, section 4).
const PUBLIC_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

/// A private key.
pub struct SigningKey {
    pair: Ed25519KeyPair,
    place: PathBuf,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.place.display())
    }
}

impl SigningKey {
    /// Reads a `PRIVATE KEY` PEM file (PKCS#8, RFC 5958).
    pub fn load(path: &Path) -> Result<SigningKey, SnapshotError> {
        let der = read_pem(path, "PRIVATE KEY")?;
        let bad = |_| SnapshotError::Key {
            place: path.to_owned(),
            reason: "the private key in it is of another kind",
        };
        Ok(SigningKey {
            pair: Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).map_err(bad)?,
            place: path.to_owned(),
        })
    }

    /// Signs a manifest's bytes.
    pub fn sign(&self, manifest: &[u8]) -> [u8; SIGNATURE] {
        let mut bytes = [0; SIGNATURE];
        bytes.copy_from_slice(self.pair.sign(manifest).as_ref());
        bytes
    }

    /// The path of its file.
    pub fn place(&self) -> &Path {
        &self.place
    }
}

/// Whether a snapshot must be signed by a trusted key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signatures {
    /// Required if there is a trusted key.
    #[default]
    AsKeysSay,
    /// Required. Without a trusted key, no snapshot is used.
    Required,
    /// Unsigned snapshots are used too. A signature must be valid if there is a trusted key.
    Optional,
}

impl Signatures {
    /// The configured setting.
    pub fn of(config: &SnapshotsConfig) -> Signatures {
        match config.require_signature {
            None => Signatures::AsKeysSay,
            Some(true) => Signatures::Required,
            Some(false) => Signatures::Optional,
        }
    }
}

/// The keys whose snapshots are trusted.
#[derive(Clone, Debug, Default)]
pub struct TrustedKeys {
    keys: Vec<[u8; 32]>,
    signatures: Signatures,
}

impl TrustedKeys {
    /// The `PUBLIC KEY` PEM files `*.pub` in `directory`; none if there is no such directory.
    pub fn load(directory: &Path, signatures: Signatures) -> Result<TrustedKeys, SnapshotError> {
        let none = TrustedKeys {
            keys: Vec::new(),
            signatures,
        };
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(none),
            Err(e) => return Err(SnapshotError::io("read", directory)(e)),
        };
        let mut keys = Vec::new();
        for entry in entries {
            let path = entry.map_err(SnapshotError::io("read", directory))?.path();
            if path.extension().is_some_and(|e| e == "pub") {
                keys.push(public_key(&path)?);
            }
        }
        Ok(TrustedKeys { keys, ..none })
    }

    /// Whether unsigned snapshots are refused.
    pub fn required(&self) -> bool {
        match self.signatures {
            Signatures::AsKeysSay => !self.keys.is_empty(),
            Signatures::Required => true,
            Signatures::Optional => false,
        }
    }

    /// How many keys there are.
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    /// Whether snapshots signed by this key are accepted.
    pub fn accepts(&self, key: &SigningKey) -> bool {
        let unchecked = self.keys.is_empty() && !self.required();
        unchecked || self.keys.iter().any(|k| k == key.pair.public_key().as_ref())
    }

    /// Checks a manifest's signature. The error is a reason.
    pub fn check(&self, manifest: &[u8], signature: Option<&[u8]>) -> Result<(), &'static str> {
        let signature = match signature {
            _ if self.keys.is_empty() && self.required() => {
                return Err(
                    "require_signature is true in [snapshots], and there is no key in THAW_DATA/keys",
                );
            }
            _ if self.keys.is_empty() => return Ok(()),
            None if self.required() => return Err("it is not signed, and signatures are required here"),
            None => return Ok(()),
            Some(signature) => signature,
        };
        let good = |key: &[u8; 32]| {
            UnparsedPublicKey::new(&ED25519, key)
                .verify(manifest, signature)
                .is_ok()
        };
        match self.keys.iter().any(good) {
            true => Ok(()),
            false => Err("manifest.sig is not a signature of manifest.json by any key trusted here"),
        }
    }
}

fn public_key(path: &Path) -> Result<[u8; 32], SnapshotError> {
    let der = read_pem(path, "PUBLIC KEY")?;
    der.strip_prefix(&PUBLIC_PREFIX)
        .and_then(|key| <[u8; 32]>::try_from(key).ok())
        .ok_or_else(|| SnapshotError::Key {
            place: path.to_owned(),
            reason: "the public key in it is of another kind",
        })
}

/// The contents of the first PEM block (RFC 7468) with this label.
fn read_pem(path: &Path, label: &str) -> Result<Vec<u8>, SnapshotError> {
    let text = fs::read_to_string(path).map_err(SnapshotError::io("read the key", path))?;
    let (begin, end) = (
        format!("-----BEGIN {label}-----"),
        format!("-----END {label}-----"),
    );
    let body = text
        .split_once(&begin)
        .and_then(|(_, rest)| rest.split_once(&end))
        .map(|(body, _)| body.split_whitespace().collect::<String>());
    body.and_then(|body| STANDARD.decode(body).ok())
        .ok_or_else(|| SnapshotError::Key {
            place: path.to_owned(),
            reason: "it is not a PEM file with such a key",
        })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ring::rand::SystemRandom;

    /// Writes a new key pair as PEM files `name` and `name.pub`.
    pub fn key_pair(directory: &Path, name: &str) -> PathBuf {
        let der = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(der.as_ref()).unwrap();
        let public = [&PUBLIC_PREFIX[..], pair.public_key().as_ref()].concat();
        let pem = |label, der: &[u8]| {
            format!(
                "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
                STANDARD.encode(der)
            )
        };
        let path = directory.join(name);
        fs::write(&path, pem("PRIVATE KEY", der.as_ref())).unwrap();
        fs::write(path.with_extension("pub"), pem("PUBLIC KEY", &public)).unwrap();
        path
    }

    #[test]
    fn a_signature_holds_for_its_key_and_its_bytes_alone() {
        let (mine, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = SigningKey::load(&key_pair(mine.path(), "k")).unwrap();
        key_pair(theirs.path(), "k");
        let (trusted, others) = (
            TrustedKeys::load(mine.path(), Signatures::AsKeysSay).unwrap(),
            TrustedKeys::load(theirs.path(), Signatures::AsKeysSay).unwrap(),
        );
        let signature = key.sign(b"manifest");
        assert_eq!(trusted.check(b"manifest", Some(&signature)), Ok(()));
        assert!(trusted.accepts(&key) && !others.accepts(&key));
        assert!(trusted.check(b"Manifest", Some(&signature)).is_err());
        assert!(others.check(b"manifest", Some(&signature)).is_err());
        assert!(trusted.check(b"manifest", None).is_err());
        for cut in [0, 1, 63] {
            assert!(trusted.check(b"manifest", Some(&signature[..cut])).is_err());
        }
        for bit in 0..SIGNATURE * 8 {
            let mut flipped = signature;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(trusted.check(b"manifest", Some(&flipped)).is_err(), "bit {bit}");
        }
        let none = TrustedKeys::load(Path::new("/nowhere"), Signatures::AsKeysSay).unwrap();
        assert!(!none.required() && none.check(b"anything", None).is_ok());
    }

    #[test]
    fn signatures_are_required_as_configured() {
        let (keys, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = SigningKey::load(&key_pair(keys.path(), "k")).unwrap();
        let signature = key.sign(b"m");
        let bad = [0; SIGNATURE];
        let missing = empty.path().join("missing");
        // Key directory, setting, and whether snapshots without, with a valid, and with an invalid signature are accepted.
        for (place, signatures, taken) in [
            (missing.as_path(), Signatures::AsKeysSay, [true, true, true]),
            (missing.as_path(), Signatures::Required, [false, false, false]),
            (empty.path(), Signatures::Required, [false, false, false]),
            (missing.as_path(), Signatures::Optional, [true, true, true]),
            (keys.path(), Signatures::AsKeysSay, [false, true, false]),
            (keys.path(), Signatures::Required, [false, true, false]),
            (keys.path(), Signatures::Optional, [true, true, false]),
        ] {
            let trusted = TrustedKeys::load(place, signatures).unwrap();
            let shown = [None, Some(&signature[..]), Some(&bad[..])];
            let found = shown.map(|signature| trusted.check(b"m", signature).is_ok());
            assert_eq!(found, taken, "{} {signatures:?}", place.display());
            assert_eq!(trusted.required(), !taken[0]);
            assert_eq!(trusted.accepts(&key), taken[1]);
        }
        let none = TrustedKeys::load(&missing, Signatures::Required).unwrap();
        assert!(none.check(b"m", None).unwrap_err().contains("THAW_DATA/keys"));
    }

    #[test]
    fn openssls_keys_are_read() {
        // RFC 8032, section 7.1, test 1: the seed in a PKCS#8 of version 1 without public key, as openssl writes it.
        let directory = tempfile::tempdir().unwrap();
        let seed = "MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g";
        let public = "MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";
        let key = directory.path().join("k");
        fs::write(
            &key,
            format!("-----BEGIN PRIVATE KEY-----\n{seed}\n-----END PRIVATE KEY-----\n"),
        )
        .unwrap();
        fs::write(
            key.with_extension("pub"),
            format!("-----BEGIN PUBLIC KEY-----\n{public}\n-----END PUBLIC KEY-----\n"),
        )
        .unwrap();
        let signature = SigningKey::load(&key).unwrap().sign(b"");
        assert_eq!(signature[..4], [0xe5, 0x56, 0x43, 0x00]);
        let trusted = TrustedKeys::load(directory.path(), Signatures::AsKeysSay).unwrap();
        assert_eq!(trusted.check(b"", Some(&signature)), Ok(()));
    }

    #[test]
    fn what_is_no_key_is_an_error_not_one_key_fewer() {
        let directory = tempfile::tempdir().unwrap();
        let bad = directory.path().join("bad.pub");
        for text in [
            "",
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
            "-----BEGIN PUBLIC KEY-----\n",
        ] {
            fs::write(&bad, text).unwrap();
            let error = TrustedKeys::load(directory.path(), Signatures::AsKeysSay).unwrap_err();
            assert!(error.to_string().contains("bad.pub"), "{error}");
            assert!(SigningKey::load(&bad).is_err());
        }
    }
}
