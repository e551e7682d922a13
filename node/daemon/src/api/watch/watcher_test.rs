use thaw_protocol::api::{Sandbox, WatchEvent};

use super::super::Versions;
use super::*;
use crate::api::scope::Scope;

/// Changes a sandbox with this image. Returns the version.
fn change(cache: &Cache, image: &str) -> u64 {
    let sandbox = Sandbox {
        id: image.into(),
        image: image.into(),
        ..Sandbox::default()
    };
    cache.put(sandbox).resource_version
}

#[tokio::test]
async fn first_bookmark_since_a_time_follows_all_kept_changes() {
    let cache = Arc::new(Cache::new(Versions::of_clock()));
    let before = cache.version();
    for _ in 0..=2 * SKIPPED {
        change(&cache, "other");
    }
    let last = change(&cache, "wanted");
    let selector = Selector::parse(Scope::node(), "", "image=wanted").unwrap();
    let mut watcher = Watcher::start(cache, Some(before), selector).unwrap();
    watcher.mark_present();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let line = watcher.next().await.unwrap().unwrap();
        seen.push(serde_json::from_slice::<WatchEvent>(&line).unwrap());
    }
    let [WatchEvent::Added(added), WatchEvent::Bookmark(bookmark)] = seen.as_slice() else {
        panic!("{seen:?}")
    };
    assert_eq!((added.resource_version, bookmark.resource_version), (last, last));
}
