use super::*;

fn heads(flight: &Flight) -> Vec<u16> {
    let completions = flight.completions().into_iter();
    completions.map(|completion| completion.head).collect()
}

#[test]
fn request_is_in_flight_until_its_answer_is_taken() {
    let flight = Arc::new(Flight::default());
    let request = flight.begin(7, false);
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
    drop(flight.begin(1, true));
    flight.drain();
    assert!(!flight.has(1) && flight.completions().is_empty());
}

#[test]
fn flight_is_full_until_a_call_ends() {
    let flight = Arc::new(Flight::default());
    let mut requests: Vec<_> = (0..IN_FLIGHT as u16)
        .map(|head| {
            assert!(!flight.is_full());
            flight.begin(head, false)
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
    let (read, ended) = (flight.begin(0, false), flight.begin(1, true));
    let flush = flight.begin(2, false);
    let later = flight.begin(3, true);
    ended.end(1);
    flush.wait_for_changes();
    flush.end(1);
    assert_eq!(heads(&flight), [1, 2]);
    drop((read, later));
}
