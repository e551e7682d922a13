//! The secret that all nodes share, and what is derived from it: the proof that a request comes from a node, and the access tokens of
//! sandboxes, which are the same on every node.

use std::path::Path;

use axum::http::HeaderValue;
use thaw_sandbox::error::Error;

use crate::api::grant::{read_file, unusable};
use crate::e2b::token::{AccessTokens, is_hash};

/// What errors call the file's contents.
const WHAT: &str = "key of [e2b.cluster]";
/// The context from which the key that seals copies of paused sandboxes is derived.
const SEAL_PURPOSE: &str = "thaw 2026 e2b paused sandbox";
/// What the proof of each step is derived for.
const FIRST_PURPOSE: &str = "thaw 2026 e2b node";
const LAST_PURPOSE: &str = "thaw 2026 e2b node, last step";
/// Shortest secret, bytes: a shorter one could be guessed.
const SHORTEST: usize = 32;

/// A step of a request from node to node. There are no others, so a request that nodes pass on ends, whatever their lists say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// From the node that got it of a caller.
    First,
    /// To the node that has the sandbox, from one that looked for it.
    Last,
}

/// See the module.
pub struct Proof {
    first: Mark,
    last: Mark,
    seal: [u8; blake3::KEY_LEN],
}

/// The proof of one step.
struct Mark {
    hash: blake3::Hash,
    value: HeaderValue,
}

impl Mark {
    fn derive(purpose: &str, secret: &str) -> Result<Mark, String> {
        let hash = blake3::Hash::from(blake3::derive_key(purpose, secret.as_bytes()));
        let value = HeaderValue::try_from(hash.to_hex().as_str());
        let mut value = value.map_err(|e| e.to_string())?;
        value.set_sensitive(true);
        Ok(Mark { hash, value })
    }
}

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proof").finish_non_exhaustive()
    }
}

impl Proof {
    /// The value of the header that proves it.
    pub fn mark(&self, step: Step) -> &HeaderValue {
        match step {
            Step::First => &self.first.value,
            Step::Last => &self.last.value,
        }
    }

    /// The key that seals copies of paused sandboxes.
    pub fn seal(&self) -> [u8; blake3::KEY_LEN] {
        self.seal
    }

    /// The step that a value proves. The comparison takes constant time.
    pub fn step(&self, given: &HeaderValue) -> Option<Step> {
        let given = given.to_str().ok()?;
        let (first, last) = (is_hash(given, self.first.hash), is_hash(given, self.last.hash));
        match (first, last) {
            (true, _) => Some(Step::First),
            (_, true) => Some(Step::Last),
            _ => None,
        }
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
    let mark = |purpose| Mark::derive(purpose, secret).map_err(|why| unusable(file, WHAT, &why));
    let proof = Proof {
        first: mark(FIRST_PURPOSE)?,
        last: mark(LAST_PURPOSE)?,
        seal: blake3::derive_key(SEAL_PURPOSE, secret.as_bytes()),
    };
    Ok((proof, AccessTokens::new(secret.as_bytes())))
}
