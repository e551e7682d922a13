use super::*;

fn whole(number: usize) -> WholeId {
    WholeId::parse(&format!("{number:012x}00ff")).unwrap()
}

#[test]
fn round_asks_for_sandboxes_whose_callers_still_wait() {
    let searches = Searches::default();
    let begin = |number| searches.begin(&whole(number)).unwrap();
    let kept: Vec<_> = (0..MOST_IDS + 10).map(begin).collect();
    let same: Vec<_> = (0..10).map(begin).collect();
    drop(begin(MOST_IDS + 11));
    let (now, ids) = searches.take();
    assert_eq!((now.len(), ids.len()), (MOST_IDS + 10, MOST_IDS));
    let (now, ids) = searches.take();
    assert_eq!((now.len(), ids.len()), (10, 10));
    drop((kept, same));
    assert!(searches.take().0.is_empty());
}

#[test]
fn searches_that_wait_are_bounded() {
    let searches = Searches::default();
    let mut kept: Vec<_> = (0..MOST_WAITING)
        .map(|number| searches.begin(&whole(number)).unwrap())
        .collect();
    assert!(searches.begin(&whole(0)).is_none());
    kept.pop();
    assert!(searches.begin(&whole(0)).is_some(), "one caller has hung up");
}
