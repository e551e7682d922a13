//! Faults by name. Tests about time use a simulated clock and no network; tests about HTTP use loopback and no clock.

#[path = "faults_test.rs"]
mod faults;
#[path = "loopback_test.rs"]
mod loopback;
#[path = "order_test.rs"]
mod order;
#[path = "tokens_test.rs"]
mod tokens;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::progress::Silent;
use crate::ranges::{Check, Priority, Ranges, StoredBlob};
use crate::reference::ImageRef;
use crate::registry::{Client, Config, EndpointCounts, Mirror, MirrorKind};
use crate::source::{Credentials, SourceOptions};

use super::{FetchOptions, open};

/// Bytes in which no two places look alike.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i ^ (i >> 8).wrapping_mul(31)) as u8)
        .collect()
}

pub fn stored(bytes: &[u8]) -> StoredBlob {
    // SHA-256 without optimisation takes longer than all the rest.
    static KNOWN: Mutex<BTreeMap<[u8; 32], Digest>> = Mutex::new(BTreeMap::new());
    let key = *blake3::hash(bytes).as_bytes();
    let digest = *KNOWN
        .lock()
        .unwrap()
        .entry(key)
        .or_insert_with(|| Digest::of(bytes));
    StoredBlob {
        digest,
        size: bytes.len() as u64,
        urls: Vec::new(),
    }
}

/// Accepts only these bytes.
pub fn exactly(expected: &[u8]) -> Check {
    let expected = expected.to_vec();
    Arc::new(move |bytes| {
        if bytes == expected {
            Ok(())
        } else {
            Err("its digest is another".into())
        }
    })
}

/// Reads a range and expects the right bytes or an error.
pub async fn read(
    ranges: &dyn Ranges,
    blob: &[u8],
    range: Range<u64>,
    priority: Priority,
) -> Result<Bytes, Error> {
    let check = exactly(&blob[range.start as usize..range.end as usize]);
    ranges.read(&stored(blob), range, priority, check).await
}

pub fn mirror(url: &str, kind: MirrorKind) -> Mirror {
    Mirror {
        url: url.into(),
        kind,
        headers: Default::default(),
        credentials_in_clear: false,
    }
}

/// A configuration in which mirrors stand for every registry.
pub fn mirrored(mirrors: &[&str]) -> Config {
    let mirrors = mirrors
        .iter()
        .map(|url| mirror(url, MirrorKind::Registry))
        .collect();
    Config {
        mirrors: [("*".to_owned(), mirrors)].into(),
        ..Config::default()
    }
}

pub async fn reader(client: &Arc<Client>, reference: &str, credentials: Credentials) -> Arc<dyn Ranges> {
    let options = FetchOptions {
        source: SourceOptions {
            credentials,
            ..SourceOptions::default()
        },
        client: client.clone(),
    };
    let reference: ImageRef = reference.parse().unwrap();
    open(&reference, &options, Arc::new(Silent)).await.unwrap()
}

/// The counters of one endpoint.
pub fn counts(client: &Client, endpoint: &str) -> EndpointCounts {
    let all = client.stats().snapshot();
    all.into_iter()
        .find(|it| it.endpoint == endpoint)
        .unwrap_or_default()
}

/// A counter for handlers.
#[derive(Default)]
pub struct Calls(AtomicU64);

impl Calls {
    /// How many came before.
    pub fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    pub fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}
