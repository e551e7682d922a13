use super::*;
use crate::virtio::testing::eventfd;

fn begin(flight: &Arc<Flight>, head: u16, changes: bool) -> InFlight {
    flight.seat().unwrap().begin(head, changes)
}

fn heads(flight: &Flight) -> Vec<u16> {
    let completions = flight.completions().into_iter();
    completions.map(|completion| completion.head).collect()
}

#[test]
fn request_is_in_flight_until_its_answer_is_taken() {
    let flight = Arc::new(Flight::default());
    let request = begin(&flight, 7, false);
    assert!(flight.has(7) && !flight.has(8));
    assert!(flight.completions().is_empty());
    request.end(513);
    assert!(flight.has(7), "not answered yet");
    flight.drain();
    let answer = Completion {
        head: 7,
        written: 513,
    };
    assert_eq!(flight.completions(), [answer]);
    assert!(!flight.has(7) && flight.completions().is_empty());
}

#[test]
fn call_that_is_dropped_leaves_without_an_answer() {
    let flight = Arc::new(Flight::default());
    drop(begin(&flight, 1, true));
    flight.drain();
    assert!(!flight.has(1) && flight.completions().is_empty());
}

#[test]
fn flight_is_full_until_a_call_ends() {
    let flight = Arc::new(Flight::default());
    let mut requests: Vec<_> = (0..IN_FLIGHT as u16)
        .map(|head| {
            assert!(!flight.is_full());
            begin(&flight, head, false)
        })
        .collect();
    assert!(flight.is_full());
    requests.swap_remove(1).end(0);
    assert!(!flight.is_full());
    assert_eq!(heads(&flight), [1]);
}

#[test]
fn changes_that_ended_or_came_later_are_not_waited_for() {
    let flight = Arc::new(Flight::default());
    let (read, ended) = (begin(&flight, 0, false), begin(&flight, 1, true));
    let flush = begin(&flight, 2, false);
    let later = begin(&flight, 3, true);
    ended.end(1);
    flush.wait_for_changes();
    flush.end(1);
    assert_eq!(heads(&flight), [1, 2]);
    drop((read, later));
}

#[test]
fn another_disks_first_request_always_has_a_thread() {
    let shared = Arc::<SharedThreads>::default();
    let [busy, other, third] = [0; 3].map(|_| Arc::new(Flight::new(shared.clone())));
    let mut requests: Vec<_> = (0..IN_FLIGHT as u16)
        .map(|head| begin(&busy, head, false))
        .collect();
    assert!(busy.is_full() && busy.seat().is_none());
    let first = begin(&other, 0, false);
    assert!(other.is_full() && other.seat().is_none());
    assert!(!third.is_full());
    // One that another disk had is free for any.
    requests.pop();
    let second = begin(&other, 1, false);
    assert!(busy.is_full() && other.is_full());
    // The disk's own is free for this disk only.
    drop(first);
    assert!(busy.is_full() && !other.is_full());
    drop((second, begin(&third, 0, true)));
    assert!(!busy.is_full());
}

#[test]
fn seat_that_is_not_used_is_given_back() {
    let flight = Arc::new(Flight::default());
    for _ in 0..2 {
        let seats: Vec<_> = (0..IN_FLIGHT).map(|_| flight.seat().unwrap()).collect();
        assert!(flight.is_full());
        drop(seats);
        assert!(!flight.is_full());
    }
}

#[test]
fn disk_without_a_thread_is_kicked_when_one_is_given_back() {
    let shared = Arc::<SharedThreads>::default();
    let [busy, other] = [0; 2].map(|_| Arc::new(Flight::new(shared.clone())));
    let mut requests: Vec<_> = (0..IN_FLIGHT as u16)
        .map(|head| begin(&busy, head, false))
        .collect();
    let _sync = begin(&other, 0, false);
    let kicks = [0; 2].map(|_| Arc::new(eventfd()));
    // The end of one of its own is enough for a disk that has all of the shared threads.
    busy.kick_when_free(&kicks[0]);
    for _ in 0..2 {
        other.kick_when_free(&kicks[1]);
    }
    assert!(kicks.iter().all(|kick| kick.read().is_err()));
    requests.pop();
    assert_eq!((kicks[0].read().ok(), kicks[1].read().ok()), (None, Some(1)));
    requests.pop();
    assert!(kicks[1].read().is_err());
    // One is free now.
    shared.kick_when_free(&kicks[1]);
    assert_eq!(kicks[1].read().unwrap(), 1);
}
