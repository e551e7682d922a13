use super::*;

#[test]
fn pauses_double_up_to_the_longest() {
    let pauses = [1, 2, 3, 9, 10, 33, u32::MAX].map(|n| Backoff::default().pause(n).as_millis());
    assert_eq!(pauses, [100, 200, 400, 25_600, 30_000, 30_000, 30_000]);
}
