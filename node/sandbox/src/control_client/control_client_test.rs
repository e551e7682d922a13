//! Fake VMMs: one that answers correctly, and ones that do not.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, socketpair};
use rustix::pipe::PipeFlags;
use thaw_protocol::control::{ANSWER_LIMIT, ErrorCode, Event, FromVmm, MachineState, StartTimes};

use super::reader::{EVENT_BURST, EVENTS_PER_SECOND, MAX_STRAYS};
use super::*;
use crate::error::ErrorKind;

const VMM: Vmm = Vmm(4711);

fn pair() -> (ControlClient, OwnedFd) {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    (ControlClient::new(ours, VMM).unwrap(), theirs)
}

fn status() -> Response {
    Response::Status {
        state: MachineState::Running,
        times: StartTimes::default(),
        faults: 0,
    }
}

fn send(vmm: &OwnedFd, message: &FromVmm) {
    packet::send(vmm, message, &[]).unwrap();
}

fn reply(vmm: &OwnedFd, id: u32, response: Response) {
    let result = Ok(response);
    send(vmm, &FromVmm::Reply { id, result });
}

/// The next request, and the descriptors beside it.
fn asked(vmm: &OwnedFd) -> (Request, Vec<OwnedFd>) {
    packet::receive::<Request>(vmm).unwrap()
}

/// Runs a fake VMM in a thread, because it blocks.
fn played<T: Send + 'static>(
    vmm: OwnedFd,
    play: impl FnOnce(&OwnedFd) -> T + Send + 'static,
) -> std::thread::JoinHandle<(OwnedFd, T)> {
    std::thread::spawn(move || {
        let result = play(&vmm);
        (vmm, result)
    })
}

/// Waits for the end of the connection, and returns the final state.
async fn ended(client: &ControlClient) -> Life {
    let mut life = client.life();
    let closed = tokio::time::timeout(Duration::from_secs(20), life.wait_for(|l| l.closed)).await;
    closed.expect("the connection ends").unwrap().clone()
}

#[tokio::test]
async fn replies_find_their_requests_in_any_order() {
    let (client, vmm) = pair();
    let vmm = played(vmm, |vmm| {
        let (first, fds) = asked(vmm);
        let (second, _) = asked(vmm);
        assert_eq!(fds.len(), 1);
        let refusal = ControlError {
            code: ErrorCode::NotPvh,
            message: "no note".into(),
        };
        reply(vmm, 999, Response::Done);
        reply(vmm, second.id, status());
        let (id, result) = (first.id, Err(refusal));
        send(vmm, &FromVmm::Reply { id, result });
    });
    let file = std::fs::File::open("/dev/null").unwrap();
    let fds = [file.as_fd()];
    let boot = client.call(Command::Boot { cmdline: "x".into() }, &fds);
    let status = client.call(Command::Status, &[]);
    let (boot, status) = tokio::join!(boot, status);
    assert_eq!(Error::from(boot.unwrap_err()).kind, ErrorKind::KernelNotPvh);
    assert!(matches!(
        status.unwrap(),
        Response::Status {
            state: MachineState::Running,
            ..
        }
    ));
    drop(vmm.join().unwrap());
}

#[tokio::test]
async fn events_hold_and_an_end_reaches_everyone_waiting() {
    let (client, vmm) = pair();
    let mut life = client.life();
    send(&vmm, &FromVmm::Event(Event::Doorbell { at: 7 }));
    life.wait_for(|l| l.doorbell == Some(7)).await.unwrap();
    let waiting = client.call(Command::Status, &[]);
    let end = async {
        send(&vmm, &FromVmm::Event(Event::Exited(ExitReason::Reset)));
        send(&vmm, &FromVmm::Event(Event::Exited(ExitReason::PowerOff)));
        life.wait_for(|l| l.exited.is_some()).await.unwrap();
        drop(vmm);
    };
    let (answer, ()) = tokio::join!(waiting, end);
    assert!(matches!(answer, Err(CallError::Closed { vmm: VMM })));
    let late = Life {
        doorbell: Some(7),
        exited: Some(ExitReason::Reset),
        closed: true,
        misconduct: None,
        memory_lost: None,
    };
    assert_eq!(ended(&client).await, late);
    let call = client.call(Command::Status, &[]).await;
    assert!(matches!(call, Err(CallError::Closed { .. })));
}

#[tokio::test]
async fn dropping_it_closes_the_connection_at_once() {
    let (client, vmm) = pair();
    drop(client);
    assert!(matches!(
        packet::receive::<Request>(&vmm),
        Err(PacketError::Closed)
    ));
}

#[tokio::test]
async fn garbage_ends_the_connection_by_name() {
    let reply = thaw_protocol::encoding::encode(&FromVmm::Reply {
        id: 1,
        result: Ok(status()),
    });
    let reply = reply.unwrap();
    let cut = &reply[..reply.len() - 1];
    let long = [&reply[..], &[0]].concat();
    let unknown = [77, 0, 0];
    for garbage in [&[0xff; 300][..], cut, &long, &unknown] {
        let (client, vmm) = pair();
        let garbage = garbage.to_vec();
        let vmm = played(vmm, move |vmm| {
            asked(vmm);
            rustix::net::send(vmm, &garbage, SendFlags::NOSIGNAL).unwrap();
            // The VMM finds its connection closed.
            packet::receive::<Request>(vmm).map(drop).unwrap_err()
        });
        let error = client.call(Command::Status, &[]).await.unwrap_err();
        assert!(
            matches!(
                &error,
                CallError::Broken {
                    vmm: VMM,
                    misconduct: Misconduct::Malformed(_)
                }
            ),
            "{error}"
        );
        let (_, end) = vmm.join().unwrap();
        assert!(matches!(end, PacketError::Closed), "{end}");
        let life = ended(&client).await;
        assert!(
            life.closed_because().contains("broke the control protocol"),
            "{life:?}"
        );
        let failure = Error::from(error);
        assert_eq!(failure.kind, ErrorKind::VmmFailed);
        assert!(failure.what.contains("thaw-vmm (pid 4711)"), "{}", failure.what);
    }
}

#[tokio::test]
async fn answers_to_nothing_are_dropped_until_they_are_too_many() {
    let (client, vmm) = pair();
    let vmm = played(vmm, |vmm| {
        let (request, _) = asked(vmm);
        for stray in 0..MAX_STRAYS {
            reply(vmm, 1000 + stray, Response::Done);
        }
        reply(vmm, request.id, status());
        let (_, _) = asked(vmm);
        // Until a request is refused.
        loop {
            let (id, result) = (7, Ok(Response::Done));
            if packet::send(vmm, &FromVmm::Reply { id, result }, &[]).is_err() {
                return;
            }
        }
    });
    assert!(client.call(Command::Status, &[]).await.is_ok());
    let error = client.call(Command::Status, &[]).await.unwrap_err();
    let strays = Misconduct::Strays(MAX_STRAYS + 1);
    assert!(
        matches!(&error, CallError::Broken { misconduct, .. } if *misconduct == strays),
        "{error}"
    );
    vmm.join().unwrap();
}

#[tokio::test]
async fn an_answer_to_another_question_is_refused() {
    let (client, vmm) = pair();
    let vmm = played(vmm, |vmm| {
        let (request, _) = asked(vmm);
        reply(vmm, request.id, Response::Frozen { memory_bytes: 1 });
        let (request, _) = asked(vmm);
        reply(vmm, request.id, Response::Done);
    });
    let error = client.call(Command::Status, &[]).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "thaw-vmm (pid 4711) answered Status with Frozen"
    );
    assert!(client.call(Command::Pause, &[]).await.is_ok());
    vmm.join().unwrap();
}

#[tokio::test]
async fn a_wrong_id_answers_nobody_and_the_request_ends_in_time() {
    let (client, vmm) = pair();
    let vmm = played(vmm, |vmm| {
        let (request, _) = asked(vmm);
        reply(vmm, request.id + 1, status());
    });
    let pending = client.request(Command::Status, &[]).await.unwrap();
    // The VMM has answered, as it does.
    let (vmm, ()) = tokio::task::spawn_blocking(|| vmm.join().unwrap()).await.unwrap();
    tokio::time::pause();
    let began = Instant::now();
    let error = pending.answer().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "thaw-vmm (pid 4711) has not answered Status within 60 s"
    );
    assert!(began.elapsed() >= ANSWER_LIMIT - Duration::from_secs(1) && began.elapsed() < ANSWER_LIMIT * 2);
    assert!(Error::from(error).machine_lost);
    drop(vmm);
}

#[tokio::test]
async fn a_late_answer_is_no_stray() {
    let (client, vmm) = pair();
    for _ in 0..2 * MAX_STRAYS {
        // The caller has given up.
        drop(client.request(Command::Status, &[]).await.unwrap());
        let (request, _) = asked(&vmm);
        reply(&vmm, request.id, status());
    }
    let vmm = played(vmm, |vmm| {
        let (request, _) = asked(vmm);
        reply(vmm, request.id, status());
    });
    assert!(client.call(Command::Status, &[]).await.is_ok());
    assert!(!client.life().borrow().closed);
    vmm.join().unwrap();
}

#[tokio::test]
async fn a_vmm_that_reads_nothing_is_given_up_in_time() {
    let (client, vmm) = pair();
    tokio::time::pause();
    let mut owed = 0;
    // Until its socket is full.
    let error = loop {
        match client
            .request(
                Command::Boot {
                    cmdline: "x".repeat(4096),
                },
                &[],
            )
            .await
        {
            Ok(pending) => drop(pending),
            Err(e) => break e,
        }
        owed += 1;
        assert!(owed <= MAX_PENDING);
    };
    assert!(
        matches!(error, CallError::Silent { asked: "Boot", .. }),
        "{error}"
    );
    drop(vmm);
}

#[tokio::test]
async fn a_vmm_that_owes_too_many_answers_is_not_asked_more() {
    let (client, vmm) = pair();
    let vmm = played(vmm, |vmm| {
        for _ in 0..MAX_PENDING {
            asked(vmm);
        }
    });
    for _ in 0..MAX_PENDING {
        drop(client.request(Command::Status, &[]).await.unwrap());
    }
    let error = client.call(Command::Status, &[]).await.unwrap_err();
    assert!(
        matches!(error, CallError::Busy { asked: "Status", .. }),
        "{error}"
    );
    vmm.join().unwrap();
}

#[tokio::test]
async fn a_flood_of_events_is_read_at_a_bounded_rate() {
    let began = Instant::now();
    let (client, vmm) = pair();
    let mut life = client.life();
    let flood = played(vmm, |vmm| {
        for at in 1u64.. {
            let rings = FromVmm::Event(Event::Doorbell { at });
            if packet::send(vmm, &rings, &[]).is_err() {
                return;
            }
        }
    });
    // The burst is read, and the newest is seen.
    life.wait_for(|l| l.doorbell >= Some(EVENT_BURST.into()))
        .await
        .unwrap();
    let first = life.borrow().doorbell;
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Since the beginning: what is not read while a thread waits for a processor may be read later.
    let (read, took) = (life.borrow().doorbell.unwrap(), began.elapsed());
    let most = f64::from(EVENT_BURST) + f64::from(EVENTS_PER_SECOND) * took.as_secs_f64() + 2.0;
    assert!(read as f64 <= most, "{read} events in {took:?}");
    life.wait_for(|l| l.doorbell > first).await.unwrap();
    // Dropping does not wait for the events that are left.
    drop(client);
    flood.join().unwrap();
}

/// Whether no writing end of this pipe is left. Waits: a process that another test is starting may hold a copy of one for a moment.
fn is_closed(pipe: &OwnedFd) -> bool {
    let mut ends = [PollFd::new(pipe, PollFlags::IN)];
    let limit = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    let ended = rustix::io::retry_on_intr(|| rustix::event::poll(&mut ends, Some(&limit)));
    ended == Ok(1) && matches!(rustix::io::read(pipe, &mut [0; 1]), Ok(0))
}

#[tokio::test]
async fn descriptors_nobody_asked_for_are_closed() {
    let (client, vmm) = pair();
    let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    let vmm = played(vmm, move |vmm| {
        let fds = [theirs.as_fd()];
        packet::send(vmm, &FromVmm::Event(Event::Doorbell { at: 1 }), &fds).unwrap();
        let stray = FromVmm::Reply {
            id: 999,
            result: Ok(Response::Restored {
                regions: vec![],
                populated_pages: 0,
                populate_ns: 0,
            }),
        };
        packet::send(vmm, &stray, &fds).unwrap();
        let (request, _) = asked(vmm);
        let (id, result) = (request.id, Ok(status()));
        packet::send(vmm, &FromVmm::Reply { id, result }, &fds).unwrap();
    });
    let (_, descriptors) = client.call_for_descriptors(Command::Status, &[]).await.unwrap();
    assert!(descriptors.is_empty());
    let (vmm, ()) = vmm.join().unwrap();
    assert!(is_closed(&ours));

    // More descriptors than any message has: the kernel closes them, and the connection ends.
    let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    let many: Vec<_> = (0..packet::MAX_FDS).map(|_| theirs.as_fd()).collect();
    packet::send(&vmm, &FromVmm::Event(Event::Doorbell { at: 2 }), &many).unwrap();
    drop(theirs);
    let life = ended(&client).await;
    assert_eq!(life.misconduct, Some(Misconduct::Oversize));
    assert_eq!(life.doorbell, Some(1));
    assert!(is_closed(&ours));
}

#[tokio::test]
async fn the_descriptor_of_a_restore_is_handed_over() {
    let (client, vmm) = pair();
    let vmm = played(vmm, |vmm| {
        let (request, _) = asked(vmm);
        let file = std::fs::File::open("/dev/null").unwrap();
        let result = Ok(Response::Restored {
            regions: vec![],
            populated_pages: 0,
            populate_ns: 0,
        });
        let id = request.id;
        packet::send(vmm, &FromVmm::Reply { id, result }, &[file.as_fd()]).unwrap();
    });
    let restore = Command::Restore {
        layers: 0,
        working_set: false,
        mode: thaw_protocol::control::MemoryMode::Uffd,
    };
    let (_, descriptors) = client.call_for_descriptors(restore, &[]).await.unwrap();
    assert_eq!(descriptors.len(), 1);
    vmm.join().unwrap();
}
