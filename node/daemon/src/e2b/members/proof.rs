//! The secret that all nodes share, and what is derived from it: the proof that a request comes from a node, and the access tokens of
//! sandboxes, which are the same on every node.

use std::path::Path;

use axum::http::HeaderValue;
use thaw_sandbox::error::Error;

use crate::api::grant::{read_file, unusable};
use crate::e2b::token::{AccessTokens, is_hash};

/// What errors call the file's contents.
const WHAT: &str = "key of [e2b.cluster]";
/// What the key that seals copies of paused sandboxes is derived for.
const SEAL_PURPOSE: &str = "thaw 2026 e2b paused sandbox";
/// What the proof is derived for.
const PURPOSE: &str = "thaw 2026 e2b node";
/// Shortest secret, bytes: a shorter one could be guessed.
const SHORTEST: usize = 32;

/// See the module.
pub struct Proof {
    hash: blake3::Hash,
    mark: HeaderValue,
    seal: [u8; blake3::KEY_LEN],
}

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proof").finish_non_exhaustive()
    }
}

impl Proof {
    /// The value of the header that proves it.
    pub fn mark(&self) -> &HeaderValue {
        &self.mark
    }

    /// The key that seals copies of paused sandboxes.
    pub fn seal(&self) -> [u8; blake3::KEY_LEN] {
        self.seal
    }

    /// Whether a value proves it. The time of the comparison reveals nothing of the proof.
    pub fn is(&self, given: &HeaderValue) -> bool {
        given.to_str().is_ok_and(|given| is_hash(given, self.hash))
    }
}

/// Reads the file with the secret. Blocks.
///
/// # Errors
/// `config-invalid`: the file cannot be read, others can read it, or the secret is too short.
pub fn read(file: &Path) -> Result<(Proof, AccessTokens), Error> {
    let text = read_file(file, WHAT, 0o077)?;
    let secret = text.trim();
    if secret.len() < SHORTEST {
        let why = format!("it has fewer than {SHORTEST} characters: make it with `openssl rand -hex 32`");
        return Err(unusable(file, WHAT, &why));
    }
    let hash = blake3::Hash::from(blake3::derive_key(PURPOSE, secret.as_bytes()));
    let mark = HeaderValue::try_from(hash.to_hex().as_str());
    let mut mark = mark.map_err(|e| unusable(file, WHAT, &e.to_string()))?;
    mark.set_sensitive(true);
    let seal = blake3::derive_key(SEAL_PURPOSE, secret.as_bytes());
    Ok((Proof { hash, mark, seal }, AccessTokens::new(secret.as_bytes())))
}
