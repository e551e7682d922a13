use std::collections::BTreeMap;

use proptest::prelude::*;
use thaw_protocol::api::WatchEvent;

use super::super::page::{Query, Token};
use super::super::ring::{LEAST, MOST};
use super::super::{Selector, Watcher};
use super::*;
use crate::api::scope::Scope;

fn cache() -> Arc<Cache> {
    Arc::new(Cache::new(Versions::of_clock()))
}

fn sandbox(id: usize, app: u8, paused: bool) -> Sandbox {
    Sandbox {
        id: format!("{id:04}"),
        name: id.is_multiple_of(2).then(|| format!("name-{id}")),
        state: if paused { "paused" } else { "running" }.into(),
        labels: match app {
            0 => BTreeMap::new(),
            app => [("app".into(), format!("a{app}")), ("all".into(), String::new())].into(),
        },
        ..Default::default()
    }
}

fn everything() -> Query {
    query("", "")
}

fn query(labels: &str, fields: &str) -> Query {
    Query {
        selector: Selector::parse(Scope::node(), labels, fields).unwrap(),
        limit: None,
        from: None,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(usize, u8, bool),
    Remove(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..12usize, 0..4u8, any::<bool>()).prop_map(|(id, app, paused)| Step::Put(id, app, paused)),
        1 => (0..12usize).prop_map(Step::Remove),
    ]
}

fn apply(cache: &Cache, step: &Step) {
    match step {
        Step::Put(id, app, paused) => drop(cache.put(sandbox(*id, *app, *paused))),
        Step::Remove(id) => drop(cache.remove(&format!("{id:04}"))),
    }
}

const SELECTORS: &[(&str, &str)] = &[
    ("", ""),
    ("app=a1", ""),
    ("app in (a1,a2)", "state=running"),
    ("app", "state!=paused"),
    ("app notin (a1)", ""),
    ("!app", ""),
    ("all,app!=a3", "name=name-2"),
];

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap()
}

async fn lines(watcher: &mut Watcher) -> Vec<Vec<u8>> {
    let lines = watcher.next().await.unwrap().unwrap();
    lines
        .split_inclusive(|b| *b == b'\n')
        .map(<[u8]>::to_vec)
        .collect()
}

/// The state of a caller that began with a list and followed the watch up to a version.
async fn replay(
    cache: &Arc<Cache>,
    from: super::super::Page,
    selector: &Selector,
    up_to: u64,
) -> Vec<Sandbox> {
    let mut have: BTreeMap<String, Sandbox> = BTreeMap::new();
    for item in &from.items {
        have.insert(item.id.clone(), Sandbox::clone(item));
    }
    let mut at = from.version;
    let mut watcher = Watcher::start(cache.clone(), Some(at), selector.clone()).unwrap();
    while at < up_to {
        for line in lines(&mut watcher).await {
            let event: WatchEvent = serde_json::from_slice(&line).unwrap();
            at = match event {
                WatchEvent::Added(s) => {
                    let version = s.resource_version;
                    assert!(have.insert(s.id.clone(), s).is_none(), "added twice");
                    version
                }
                WatchEvent::Modified(s) => {
                    let version = s.resource_version;
                    assert!(
                        have.insert(s.id.clone(), s).is_some(),
                        "modified what was not there"
                    );
                    version
                }
                WatchEvent::Deleted(s) => {
                    assert!(have.remove(&s.id).is_some(), "deleted what was not there");
                    s.resource_version
                }
                WatchEvent::Bookmark(b) => b.resource_version,
                WatchEvent::Error(e) => panic!("{e:?}"),
            };
        }
    }
    have.into_values().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_list_and_the_changes_after_it_are_the_next_list(
        before in proptest::collection::vec(step(), 0..40),
        after in proptest::collection::vec(step(), 0..80),
        which in 0..SELECTORS.len(),
    ) {
        let (cache, query) = (cache(), query(SELECTORS[which].0, SELECTORS[which].1));
        before.iter().for_each(|s| apply(&cache, s));
        let from = cache.list(&query).unwrap();
        after.iter().for_each(|s| apply(&cache, s));
        // Every watcher sees the last change, whatever its selector.
        let label = [1, 1, 1, 1, 2, 0, 1][which];
        cache.put(sandbox(2, label, false));
        let now = cache.list(&query).unwrap();
        let last = now.items.iter().map(|s| s.resource_version).max().unwrap_or(0);
        let replayed = runtime().block_on(replay(&cache, from, &query.selector, last));
        let listed: Vec<Sandbox> = now.items.iter().map(|s| Sandbox::clone(s)).collect();
        prop_assert_eq!(replayed, listed);
    }

    #[test]
    fn the_index_is_the_scan(steps in proptest::collection::vec(step(), 0..80), which in 0..SELECTORS.len()) {
        let (cache, query) = (cache(), query(SELECTORS[which].0, SELECTORS[which].1));
        steps.iter().for_each(|s| apply(&cache, s));
        let all = cache.list(&everything()).unwrap().items;
        let scanned: Vec<_> = all.into_iter().filter(|s| query.selector.wants(s)).collect();
        prop_assert_eq!(cache.list(&query).unwrap().items, scanned);
    }

    #[test]
    fn a_list_in_pieces_is_the_list_as_it_was(
        before in proptest::collection::vec(step(), 0..60),
        between in proptest::collection::vec(step(), 0..60),
        limit in 1..5usize,
        which in 0..SELECTORS.len(),
    ) {
        let (cache, mut query) = (cache(), query(SELECTORS[which].0, SELECTORS[which].1));
        before.iter().for_each(|s| apply(&cache, s));
        let whole = cache.list(&query).unwrap();
        query.limit = Some(limit);
        let (mut pieces, mut changes) = (Vec::new(), between.iter());
        loop {
            let page = cache.list(&query).unwrap();
            prop_assert_eq!(page.version, whole.version);
            prop_assert!(page.items.len() <= limit);
            pieces.extend(page.items);
            let Some(next) = page.next else { break };
            query.from = Token::decode(&next.encode());
            changes.by_ref().take(7).for_each(|s| apply(&cache, s));
        }
        prop_assert_eq!(pieces, whole.items);
    }

    #[test]
    fn no_continue_token_panics(text in ".{0,60}") {
        if let Some(token) = Token::decode(&text) {
            prop_assert_eq!(Token::decode(&token.encode()), Some(token));
        }
    }
}

#[test]
fn a_sandbox_is_found_by_id_and_by_name_while_it_is_there() {
    let cache = cache();
    let put = cache.put(sandbox(2, 1, false));
    assert_eq!(cache.get("0002").unwrap(), put);
    assert_eq!(cache.find(&Wanted::on_node("name-2")).unwrap(), put);
    cache.update("0002", |_| {});
    assert_eq!(cache.get("0002").unwrap(), put, "nothing changed");
    cache.update("0002", |s| s.state = "paused".into());
    assert_eq!(
        cache.get("0002").unwrap().resource_version,
        put.resource_version + 1
    );
    cache.remove("0002");
    cache.remove("0002");
    assert!(cache.get("0002").is_none() && cache.find(&Wanted::on_node("name-2")).is_none());
    assert_eq!(
        cache.list(&everything()).unwrap().version,
        put.resource_version + 2
    );
}

#[test]
fn versions_that_left_the_ring_or_never_were_are_gone() {
    let cache = cache();
    let first = cache.put(sandbox(0, 1, false)).resource_version;
    let piece = Query {
        limit: Some(1),
        ..everything()
    };
    cache.put(sandbox(1, 1, false));
    let next = cache.list(&piece).unwrap().next;
    for i in 0..=MOST {
        cache.put(sandbox(2, 1, i % 2 == 0));
    }
    assert_eq!(cache.changes(first, 1).unwrap_err().asked, first);
    assert!(
        Watcher::start(
            cache.clone(),
            Some(first),
            Selector::parse(Scope::node(), "", "").unwrap()
        )
        .is_err()
    );
    let newest = cache.list(&piece).unwrap().version;
    assert!(
        Watcher::start(
            cache.clone(),
            Some(newest),
            Selector::parse(Scope::node(), "", "").unwrap()
        )
        .is_ok()
    );
    assert!(
        cache.changes(newest + 1, 1).is_err(),
        "a version nobody was given"
    );
    assert!(cache.list(&Query { from: next, ..piece }).is_err());
}

#[tokio::test]
async fn a_watcher_that_is_overtaken_is_told() {
    let cache = cache();
    let from = cache.put(sandbox(0, 1, false)).resource_version;
    let mut slow = Watcher::start(
        cache.clone(),
        Some(from),
        Selector::parse(Scope::node(), "", "").unwrap(),
    )
    .unwrap();
    for i in 0..=MOST {
        cache.put(sandbox(2, 1, i % 2 == 0));
    }
    assert_eq!(slow.next().await.unwrap_err().asked, from);
}

#[tokio::test]
async fn a_watcher_that_wants_nothing_of_it_is_told_how_far_it_is() {
    let cache = cache();
    let from = cache.put(sandbox(0, 1, false)).resource_version;
    let mut idle = Watcher::start(
        cache.clone(),
        Some(from),
        Selector::parse(Scope::node(), "app=none", "").unwrap(),
    )
    .unwrap();
    for i in 0..LEAST {
        cache.put(sandbox(2, 1, i % 2 == 0));
    }
    let lines = lines(&mut idle).await;
    let WatchEvent::Bookmark(bookmark) = serde_json::from_slice(&lines[0]).unwrap() else {
        panic!("{lines:?}")
    };
    assert_eq!(bookmark.resource_version, from + LEAST as u64 / 4);
}

#[tokio::test]
async fn a_watcher_of_kept_changes_is_told_that_it_has_all() {
    let cache = cache();
    let from = cache.put(sandbox(0, 1, false)).resource_version;
    cache.put(sandbox(2, 1, false));
    let all = Selector::parse(Scope::node(), "", "").unwrap();
    let mut watcher = Watcher::start(cache.clone(), Some(from), all).unwrap();
    watcher.mark_present();
    assert_eq!(lines(&mut watcher).await.len(), 1);
    let marked = lines(&mut watcher).await;
    let WatchEvent::Bookmark(bookmark) = serde_json::from_slice(&marked[0]).unwrap() else {
        panic!("{marked:?}")
    };
    assert_eq!(bookmark.resource_version, from + 1);
}

#[test]
fn a_thousand_watchers_of_many_changes_lose_nothing() {
    const WATCHERS: usize = 1000;
    const CHANGES: u64 = 1000;
    runtime().block_on(async {
        let cache = cache();
        let from = cache.put(sandbox(0, 1, false)).resource_version;
        let mut watching = tokio::task::JoinSet::new();
        for _ in 0..WATCHERS {
            let mut watcher = Watcher::start(
                cache.clone(),
                Some(from),
                Selector::parse(Scope::node(), "app=a1", "").unwrap(),
            )
            .unwrap();
            watching.spawn(async move {
                let mut seen = 0;
                while seen < CHANGES {
                    for line in lines(&mut watcher).await {
                        seen += 1;
                        let mark = format!("\"resource_version\":{}", from + seen);
                        let found = line.windows(mark.len()).any(|w| w == mark.as_bytes());
                        assert!(found, "change {seen} was lost");
                    }
                }
            });
        }
        let source = cache.clone();
        let changes = tokio::task::spawn(async move {
            for i in 0..CHANGES {
                source.put(sandbox(2, 1, i % 2 == 0));
                tokio::task::yield_now().await;
            }
        });
        changes.await.unwrap();
        let mut ended = 0;
        while let Some(watched) = watching.join_next().await {
            watched.unwrap();
            ended += 1;
        }
        assert_eq!(ended, WATCHERS);
    });
}

#[tokio::test]
async fn watches_end_with_thawd() {
    let cache = cache();
    let from = cache.put(sandbox(0, 1, false)).resource_version;
    let mut watcher = Watcher::start(
        cache.clone(),
        Some(from),
        Selector::parse(Scope::node(), "", "").unwrap(),
    )
    .unwrap();
    cache.close();
    assert_eq!(watcher.next().await.unwrap(), None);
}

fn of_tenant(id: &str, tenant: Option<&str>) -> Sandbox {
    Sandbox {
        id: id.into(),
        tenant: tenant.map(str::to_owned),
        name: Some("web".into()),
        state: "running".into(),
        ..Default::default()
    }
}

fn scope(tenant: &str) -> Scope {
    Scope::tenant(tenant.parse().unwrap())
}

#[test]
fn name_is_found_within_its_tenant() {
    let cache = cache();
    for (id, tenant) in [("1", None), ("2", Some("acme")), ("3", Some("other"))] {
        cache.put(of_tenant(id, tenant));
    }
    let find = |scope: Scope, text: &str| {
        let wanted = Wanted {
            scope,
            text: text.into(),
        };
        cache.find(&wanted).map(|found| found.id.clone())
    };
    assert_eq!(find(scope("acme"), "web").as_deref(), Some("2"));
    assert_eq!(find(scope("other"), "web").as_deref(), Some("3"));
    assert_eq!(find(scope("third"), "web"), None);
    assert_eq!(find(Scope::node(), "web").as_deref(), Some("1"));
    for id in ["1", "2", "3"] {
        assert_eq!(find(Scope::node(), id).as_deref(), Some(id));
        let is_mine = id == "2";
        assert_eq!(find(scope("acme"), id).is_some(), is_mine, "{id}");
    }
    cache.remove("1");
    assert_eq!(find(Scope::node(), "web"), None, "another tenant's is not meant");
    cache.remove("2");
    assert_eq!(find(scope("acme"), "web"), None);
}

/// A name that equals another tenant's id leads to one's own sandbox.
#[test]
fn name_like_an_id_of_another_tenant_is_ones_own() {
    let cache = cache();
    cache.put(of_tenant("1", Some("other")));
    cache.put(Sandbox {
        name: Some("1".into()),
        ..of_tenant("2", Some("acme"))
    });
    let wanted = |scope| Wanted {
        scope,
        text: "1".into(),
    };
    assert_eq!(cache.find(&wanted(scope("acme"))).unwrap().id, "2");
    assert_eq!(cache.find(&wanted(scope("other"))).unwrap().id, "1");
}

#[test]
fn ended_sandbox_lends_its_name_within_its_tenant_alone() {
    let cache = cache();
    cache.put(Sandbox {
        state: "exited".into(),
        ended: Some(1),
        ..of_tenant("1", Some("acme"))
    });
    cache.put(of_tenant("2", Some("other")));
    let of_acme = Wanted {
        scope: scope("acme"),
        text: "web".into(),
    };
    assert_eq!(cache.find(&of_acme).unwrap().id, "1");
    cache.put(of_tenant("3", Some("acme")));
    assert_eq!(cache.find(&of_acme).unwrap().id, "3");
    cache.remove("3");
    assert_eq!(cache.find(&of_acme).unwrap().id, "1");
}

proptest! {
    /// Lists, with or without pages, and watches of a tenant contain only its own sandboxes, whatever happens to others.
    #[test]
    fn tenant_sees_its_own_sandboxes_alone(changes in proptest::collection::vec((0..12usize, 0..3usize, any::<bool>()), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let cache = cache();
        let selector = || Selector::parse(scope("t1"), "", "").unwrap();
        let mut watcher = Watcher::start(cache.clone(), None, selector()).unwrap();
        let mut mine = BTreeMap::new();
        for (number, tenant, removes) in changes {
            // The tenant of a sandbox never changes.
            let (id, tenant) = (format!("{number}-{tenant}"), ["", "t1", "t2"][tenant]);
            let tenant = (!tenant.is_empty()).then_some(tenant);
            if removes {
                cache.remove(&id);
                mine.remove(&id);
            } else {
                let put = cache.put(of_tenant(&id, tenant));
                if tenant == Some("t1") {
                    mine.insert(id, put);
                }
            }
        }
        let mut listed = Vec::new();
        let mut piece = Query { selector: selector(), limit: Some(2), from: None };
        loop {
            let page = cache.list(&piece).unwrap();
            listed.extend(page.items);
            match page.next {
                Some(next) => piece.from = Some(next),
                None => break,
            }
        }
        prop_assert_eq!(listed, mine.values().cloned().collect::<Vec<_>>());
        // The tenant's own marker is the last event of the watch.
        cache.put(of_tenant("last", Some("t1")));
        let mut told = Vec::new();
        while told.last() != Some(&"last".to_owned()) {
            let lines = runtime.block_on(watcher.next()).unwrap().unwrap();
            for line in lines.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
                match serde_json::from_slice::<WatchEvent>(line).unwrap() {
                    WatchEvent::Added(s) | WatchEvent::Modified(s) | WatchEvent::Deleted(s) => {
                        prop_assert_eq!(s.tenant.as_deref(), Some("t1"));
                        told.push(s.id);
                    }
                    WatchEvent::Bookmark(_) => {}
                    WatchEvent::Error(e) => prop_assert!(false, "{e:?}"),
                }
            }
        }
    }
}
