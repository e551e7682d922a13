//! The access tokens and traffic tokens of sandboxes, and the signatures of URLs for uploads. Whoever has a sandbox's access token may run
//! processes and read files in it; whoever has its traffic token may connect to its ports, if they are private; whoever has a signed URL may
//! upload one archive.
//!
//! Invariants: a token is derived from a secret, of the node or of all nodes that answer as one, and the sandbox's id, and is stored nowhere;
//! it stays the same over restarts of thawd; the time of a check reveals nothing about the token.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use thaw_sandbox::error::Error;

/// The file with the secret, in the data directory.
const FILE: &str = "e2b-secret";
/// What tokens are derived for: other uses of the secret get other keys.
const PURPOSE: &str = "thaw 2026 e2b sandbox access token";
/// What traffic tokens are derived for.
const TRAFFIC_PURPOSE: &str = "thaw 2026 e2b sandbox traffic token";
/// What signatures of URLs for uploads are derived for.
const UPLOAD_PURPOSE: &str = "thaw 2026 e2b template upload";
const SECRET_BYTES: usize = 32;

/// Derives and checks tokens.
#[derive(Clone)]
pub struct AccessTokens {
    key: [u8; blake3::KEY_LEN],
    traffic_key: [u8; blake3::KEY_LEN],
    upload_key: [u8; blake3::KEY_LEN],
}

impl std::fmt::Debug for AccessTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccessTokens").finish_non_exhaustive()
    }
}

impl AccessTokens {
    /// With the secret in a data directory, which is made if there is none. Blocks.
    ///
    /// # Errors
    /// The secret cannot be read or written.
    pub fn open(data: &Path) -> Result<AccessTokens, Error> {
        let file = data.join(FILE);
        let secret = secret(&file);
        let secret = secret.map_err(|e| Error::system(format!("cannot use {}", file.display()), &e))?;
        Ok(AccessTokens::new(&secret))
    }

    /// With this secret.
    pub fn new(secret: &[u8]) -> AccessTokens {
        AccessTokens {
            key: blake3::derive_key(PURPOSE, secret),
            traffic_key: blake3::derive_key(TRAFFIC_PURPOSE, secret),
            upload_key: blake3::derive_key(UPLOAD_PURPOSE, secret),
        }
    }

    /// The token of the sandbox with this id: 64 hexadecimal digits.
    pub fn access_token(&self, id: &str) -> String {
        self.hash(id).to_hex().to_string()
    }

    /// Whether a text is the token of the sandbox with this id.
    pub fn check(&self, id: &str, given: &str) -> bool {
        is_hash(given, self.hash(id))
    }

    /// The traffic token of the sandbox with this id: 64 hexadecimal digits.
    pub fn traffic_token(&self, id: &str) -> String {
        self.traffic_hash(id).to_hex().to_string()
    }

    /// Whether a text is the traffic token of the sandbox with this id.
    pub fn check_traffic(&self, id: &str, given: &str) -> bool {
        is_hash(given, self.traffic_hash(id))
    }

    /// The signature of a URL that uploads what `what` describes: 64 hexadecimal digits.
    pub fn upload_signature(&self, what: &str) -> String {
        blake3::keyed_hash(&self.upload_key, what.as_bytes())
            .to_hex()
            .to_string()
    }

    /// Whether a text is that signature.
    pub fn check_upload(&self, what: &str, given: &str) -> bool {
        is_hash(given, blake3::keyed_hash(&self.upload_key, what.as_bytes()))
    }

    fn hash(&self, id: &str) -> blake3::Hash {
        blake3::keyed_hash(&self.key, id.as_bytes())
    }

    fn traffic_hash(&self, id: &str) -> blake3::Hash {
        blake3::keyed_hash(&self.traffic_key, id.as_bytes())
    }
}

/// Whether a text is a hash in hexadecimal.
pub fn is_hash(given: &str, hash: blake3::Hash) -> bool {
    // `blake3::Hash` compares in constant time.
    given.len() == 2 * blake3::OUT_LEN && blake3::Hash::from_hex(given).is_ok_and(|given| given == hash)
}

fn secret(file: &Path) -> io::Result<[u8; SECRET_BYTES]> {
    match read(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        read => return read,
    }
    let secret = thaw_sandbox::random::<SECRET_BYTES>()?;
    let new = file.with_extension("new");
    // Left by a thawd that was killed here.
    let _ = std::fs::remove_file(&new);
    let mut options = OpenOptions::new();
    let mut writing = options.write(true).create_new(true).mode(0o600).open(&new)?;
    writing.write_all(&secret)?;
    writing.sync_all()?;
    std::fs::rename(&new, file)?;
    Ok(secret)
}

fn read(file: &Path) -> io::Result<[u8; SECRET_BYTES]> {
    let mut secret = Vec::with_capacity(SECRET_BYTES);
    File::open(file)?
        .take(SECRET_BYTES as u64 + 1)
        .read_to_end(&mut secret)?;
    secret.try_into().map_err(|_| {
        let what = format!("it is not {SECRET_BYTES} bytes long: remove it, and all access tokens change");
        io::Error::new(io::ErrorKind::InvalidData, what)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn token_is_of_one_sandbox_and_one_secret() {
        let (one, other) = (AccessTokens::new(&[1; 32]), AccessTokens::new(&[2; 32]));
        let token = one.access_token("0123456789ab");
        assert!(token.len() == 64 && one.check("0123456789ab", &token));
        assert!(!one.check("0123456789ac", &token) && !other.check("0123456789ab", &token));
        for wrong in [
            "",
            "0",
            &token[1..],
            &format!("{token}0"),
            &"g".repeat(64),
            &"ä".repeat(32),
        ] {
            assert!(!one.check("0123456789ab", wrong), "{wrong}");
        }
        let traffic = one.traffic_token("0123456789ab");
        assert!(one.check_traffic("0123456789ab", &traffic) && traffic != token);
        assert!(!one.check_traffic("0123456789ab", &token) && !one.check("0123456789ab", &traffic));
        assert!(
            !one.check_traffic("0123456789ac", &traffic) && !other.check_traffic("0123456789ab", &traffic)
        );
        let signature = one.upload_signature("0123456789ab");
        assert!(one.check_upload("0123456789ab", &signature) && signature != token);
        assert!(!one.check_upload("x", &signature) && !other.check_upload("0123456789ab", &signature));
    }

    #[test]
    fn secret_stays_and_is_its_owners_alone() {
        let data = tempfile::tempdir().unwrap();
        let first = AccessTokens::open(data.path()).unwrap().access_token("x");
        assert_eq!(AccessTokens::open(data.path()).unwrap().access_token("x"), first);
        let file = data.path().join(FILE);
        assert_eq!(
            std::fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        std::fs::write(&file, "short").unwrap();
        let damaged = AccessTokens::open(data.path()).unwrap_err();
        assert!(damaged.to_string().contains("remove it"), "{damaged}");
    }
}
