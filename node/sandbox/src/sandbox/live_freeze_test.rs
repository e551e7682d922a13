use std::thread::JoinHandle;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_protocol::control::{ControlError, FromVmm, Request};
use thaw_protocol::packet;

use super::*;
use crate::control_client::Vmm;

/// A VMM that gives this answer to the first request. Returns the second one, if there is one.
fn vmm(socket: OwnedFd, result: Result<Response, ControlError>) -> JoinHandle<Option<Command>> {
    std::thread::spawn(move || {
        let (Request { id, .. }, _) = packet::receive::<Request>(&socket).unwrap();
        packet::send(&socket, &FromVmm::Reply { id, result }, &[]).unwrap();
        let next = packet::receive::<Request>(&socket).ok()?;
        Some(next.0.command)
    })
}

#[tokio::test]
async fn a_freeze_that_may_be_prepared_is_cancelled() {
    let refusal = |code| {
        Err(ControlError {
            code,
            message: "no".into(),
        })
    };
    for (answer, is_cancelled) in [
        (Ok(Response::Done), false),
        (refusal(ErrorCode::Unprotected), false),
        (refusal(ErrorCode::System), true),
        // Not an answer to this request.
        (Ok(Response::Frozen { memory_bytes: 0 }), true),
    ] {
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let control = ControlClient::new(ours, Vmm(1)).unwrap();
        let vmm = vmm(theirs, answer);
        let prepared = prepare(&control, FreezeKind::Full, &[]).await;
        assert_eq!(prepared.is_err(), is_cancelled);
        drop(control);
        assert_eq!(vmm.join().unwrap(), is_cancelled.then_some(Command::CancelFreeze));
    }
}
