use std::io::Write;
use std::thread;

use thaw_protocol::share::MESSAGE;

use super::*;

/// A message of this length, whose bytes are `id`, with its header.
fn framed(id: u32, length: u32) -> Vec<u8> {
    let header = RequestHeader { id, length, room: 0 };
    let mut bytes = header.encode().to_vec();
    bytes.resize(bytes.len() + length as usize, id as u8);
    bytes
}

fn pair() -> (UnixStream, Input) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ours, Input::new(theirs))
}

#[test]
fn nothing_is_taken_before_something_has_come() {
    let (_vmm, mut input) = pair();
    assert!(input.take(&mut MessageBuffer::new().unwrap()).unwrap().is_none());
    assert!(!input.may_have_more());
}

#[test]
fn messages_that_come_together_are_taken_one_by_one() {
    let (mut vmm, mut input) = pair();
    let mut buffer = MessageBuffer::new().unwrap();
    let both = [framed(1, 100), framed(2, 4096)].concat();
    vmm.write_all(&both).unwrap();
    assert_eq!(input.take(&mut buffer).unwrap().unwrap().id, 1);
    assert!(input.may_have_more());
    assert_eq!(input.take(&mut buffer).unwrap().unwrap().id, 2);
    // Something may have come since the first was received.
    assert!(input.may_have_more());
    assert!(input.take(&mut buffer).unwrap().is_none());
}

#[test]
fn message_that_is_received_alone_is_the_last() {
    let (mut vmm, mut input) = pair();
    let mut buffer = MessageBuffer::new().unwrap();
    vmm.write_all(&framed(1, 100)).unwrap();
    assert!(input.take(&mut buffer).unwrap().is_some());
    assert!(!input.may_have_more());
    input.ends();
    assert!(input.may_have_more(), "its end");
}

#[test]
fn message_in_parts_is_waited_for() {
    let (mut vmm, mut input) = pair();
    let bytes = framed(3, *MESSAGE.end());
    // Within the header, within what is received at once, and behind it.
    let parts: Vec<Vec<u8>> = [0..5, 5..1000, 1000..3 * AHEAD, 3 * AHEAD..bytes.len()]
        .map(|part| bytes[part].to_vec())
        .into();
    vmm.write_all(&parts[0]).unwrap();
    let sending = thread::spawn(move || {
        for part in &parts[1..] {
            vmm.write_all(part).unwrap();
        }
        vmm
    });
    let mut buffer = MessageBuffer::new().unwrap();
    let header = input.take(&mut buffer).unwrap().unwrap();
    assert_eq!((header.id, header.length), (3, *MESSAGE.end()));
    assert!(buffer.message(header.length).iter().all(|byte| *byte == 3));
    drop(sending.join().unwrap());
    assert!(matches!(input.take(&mut buffer), Err(End::Closed)));
}

proptest::proptest! {
    #[test]
    fn every_message_is_taken_once_and_in_order(
        lengths in proptest::collection::vec(*MESSAGE.start()..20_000, 1..20),
        cuts in proptest::collection::vec(1_usize..9_000, 1..40),
    ) {
        let (mut vmm, mut input) = pair();
        let all: Vec<u8> = (0..).zip(&lengths).flat_map(|(id, length)| framed(id, *length)).collect();
        let sending = thread::spawn(move || {
            let mut rest = &all[..];
            for cut in cuts.iter().cycle() {
                let (part, behind) = rest.split_at((*cut).min(rest.len()));
                vmm.write_all(part).unwrap();
                rest = behind;
                if rest.is_empty() {
                    return vmm;
                }
            }
            vmm
        });
        let mut buffer = MessageBuffer::new().unwrap();
        for (id, length) in (0..).zip(&lengths) {
            let header = loop {
                if let Some(header) = input.take(&mut buffer).unwrap() {
                    break header;
                }
                thread::yield_now();
            };
            assert_eq!((header.id, header.length), (id, *length));
            assert!(buffer.message(header.length).iter().all(|byte| *byte == id as u8));
        }
        drop(sending.join().unwrap());
        assert!(matches!(input.take(&mut buffer), Err(End::Closed)));
    }
}
