use super::*;

#[test]
fn what_is_written_is_read_back() {
    let inner = Attributes::default().be32(1, 7).text(2, "name");
    let attributes = Attributes::default().bytes(3, b"abcde").nest(4, inner);
    let message = Message::new(9, CREATE, &[1, 2, 3, 4], attributes);
    let mut bytes = Vec::new();
    message.write(5, ACKNOWLEDGE, &mut bytes);
    message.write(6, 0, &mut bytes);
    let answers: Vec<_> = Answers(&bytes).collect();
    assert_eq!(answers.len(), 2);
    assert_eq!((answers[0].kind, answers[0].sequence), (9, 5));
    assert_eq!(bytes[6..8], (REQUEST | CREATE | ACKNOWLEDGE).to_ne_bytes());
    let parsed = Parsed(&answers[1].payload[4..]);
    assert_eq!(parsed.get(3), Some(&b"abcde"[..]));
    let inner = parsed.nested(4).unwrap();
    assert_eq!(inner.array(1), Some(7u32.to_be_bytes()));
    assert_eq!(inner.get(2), Some(&b"name\0"[..]));
    assert_eq!(inner.array::<2>(1), None);
}

#[test]
fn kernel_refuses_nonsense_and_dumps_links() {
    let mut socket = Socket::route().unwrap();
    // RTM_DELLINK of a link that does not exist.
    let message = Message::new(17, 0, &[0; 16], Attributes::default());
    socket.request(&message).unwrap_err();
    let mut links = 0;
    let message = Message::new(18, 0, &[0; 16], Attributes::default());
    socket.dump(&message, |_, _| links += 1).unwrap();
    assert!(links > 0);
}

proptest::proptest! {
    #[test]
    fn reading_any_bytes_ends_and_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..192)) {
        let answers: Vec<_> = Answers(&bytes).inspect(|a| { a.error(); }).collect();
        assert!(answers.len() <= bytes.len());
        assert!(Parsed(&bytes).into_iter().count() <= bytes.len());
    }
}
