//! A SOCI index manifest, and the annotation that names one.

use std::collections::BTreeMap;

use thaw_images::index::soci;

pub fn run(bytes: &[u8]) {
    if let Ok(index) = soci::Index::parse_unverified(bytes) {
        let length = index.len();
        assert_eq!(index.is_empty(), length == 0);
    }
    let value = String::from_utf8_lossy(bytes).into_owned();
    let _ = soci::bound_index(&BTreeMap::from([("com.amazon.soci.index-digest".to_owned(), value)]));
}
