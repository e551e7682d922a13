//! Fake VMMs of other releases: an old one without the greeting, a newer one, and ones without a common version.

use std::os::fd::OwnedFd;

use rustix::net::{SocketFlags, SocketType, accept_with};
use thaw_protocol::control::{
    Command, ControlError, CpuBaseline, DeviceId, ErrorCode, FromVmm, MachineSpec, MachineState, Request,
    Response, StartTimes,
};
use thaw_protocol::device_limits::{DeviceLimit, DeviceLimits};
use thaw_protocol::packet;
use thaw_protocol::versions::CONTROL;

use super::*;
use crate::error::ErrorKind;

const VMM: Vmm = Vmm(4711);

/// A VMM at a path, which answers each request with the next of `answers` and records the requests.
struct Played {
    directory: tempfile::TempDir,
    asked: std::thread::JoinHandle<Vec<Command>>,
}

impl Played {
    fn new(answers: Vec<Result<Response, ControlError>>) -> Played {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = thaw_pools::vmm::listen(&path, SocketType::SEQPACKET).unwrap();
        let asked = std::thread::spawn(move || {
            let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
            answers
                .into_iter()
                .map(|answer| answered(&socket, answer))
                .collect()
        });
        Played { directory, asked }
    }

    async fn adopt(&self, recorded: u32) -> Result<ControlClient, Error> {
        ControlClient::adopt(&self.directory.path().join("control.sock"), VMM, recorded).await
    }
}

fn answered(socket: &OwnedFd, result: Result<Response, ControlError>) -> Command {
    let (Request { id, command }, _) = packet::receive(socket).unwrap();
    packet::send(socket, &FromVmm::Reply { id, result }, &[]).unwrap();
    command
}

fn status() -> Response {
    Response::Status {
        state: MachineState::Running,
        times: StartTimes::default(),
        faults: 0,
    }
}

fn hello(version: u32) -> Result<Response, ControlError> {
    let release = "0.2.0".into();
    Ok(Response::Hello { version, release })
}

fn refusal(code: ErrorCode) -> Result<Response, ControlError> {
    let message = "it is of another release".into();
    Err(ControlError { code, message })
}

fn greeting() -> Command {
    let version = CONTROL.current;
    Command::Hello { version }
}

#[tokio::test]
async fn vmm_of_version_4_is_not_asked_what_it_lacks() {
    let vmm = Played::new(vec![Ok(status())]);
    let client = vmm.adopt(4).await.unwrap();
    assert_eq!(client.version(), 4);
    let limit = Command::Limit {
        device: DeviceId::Blk0,
        limits: DeviceLimits::Disk(DeviceLimit::default()),
    };
    let error = client.call(limit, &[]).await.unwrap_err();
    let text = "thaw-vmm (pid 4711) speaks version 4 of the control protocol, which has no Limit";
    assert_eq!(error.to_string(), text);
    assert_eq!(Error::from(error).kind, ErrorKind::VmmTooOld);
    client.call(Command::Status, &[]).await.unwrap();
    assert_eq!(vmm.asked.join().unwrap(), [Command::Status]);
}

#[tokio::test]
async fn a_later_vmm_is_greeted_before_anything_else() {
    for recorded in [5, 9] {
        let vmm = Played::new(vec![hello(5), Ok(status())]);
        let client = vmm.adopt(recorded).await.unwrap();
        assert_eq!(client.version(), 5);
        client.call(Command::Status, &[]).await.unwrap();
        assert_eq!(vmm.asked.join().unwrap(), [greeting(), Command::Status]);
    }
}

#[tokio::test]
async fn a_vmm_that_does_not_agree_is_told_why_by_name() {
    let cases = [
        (hello(9), "control version 9"),
        (hello(3), "control version 3"),
        (refusal(ErrorCode::Version), "another release"),
        (Ok(Response::Done), "answered Hello with Done"),
    ];
    for (answer, why) in cases {
        let vmm = Played::new(vec![answer]);
        let failure = vmm.adopt(5).await.unwrap_err();
        assert_eq!(failure.kind, ErrorKind::VmmFailed);
        assert!(failure.what.contains(why), "{failure}");
        assert_eq!(vmm.asked.join().unwrap(), [greeting()]);
    }
    // The record alone is reason enough to refuse, so no VMM is asked.
    let nowhere = std::path::Path::new("/nowhere");
    let failure = ControlClient::adopt(nowhere, VMM, 3).await.unwrap_err();
    assert!(
        failure.what.contains("thaw-vmm (pid 4711): control version 3"),
        "{failure}"
    );
}

#[tokio::test]
async fn a_machine_is_made_with_the_newest_version_its_vmm_takes() {
    let machine = MachineSpec {
        vcpus: 1,
        memory_mib: 64,
        cpu: CpuBaseline::Host,
        tethered: false,
    };
    let kvm: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let versions = |asked: Vec<Command>| -> Vec<u32> {
        asked
            .into_iter()
            .map(|command| match command {
                Command::Create { version, .. } => version,
                other => panic!("{other:?}"),
            })
            .collect()
    };
    for (answers, asked, made) in [
        (vec![Ok(Response::Done)], vec![7], Some(7)),
        (
            vec![refusal(ErrorCode::Invalid), Ok(Response::Done)],
            vec![7, 6],
            Some(6),
        ),
        (
            [(); 3].map(|()| refusal(ErrorCode::Invalid)).into(),
            vec![7, 6, 5],
            None,
        ),
        (vec![refusal(ErrorCode::Kvm)], vec![7], None),
    ] {
        let vmm = Played::new(answers);
        let path = vmm.directory.path().join("control.sock");
        let socket = thaw_pools::vmm::connect(&path, SocketType::SEQPACKET).unwrap();
        let mut client = ControlClient::new(socket, VMM).unwrap();
        let created = client.create(machine.clone(), kvm.as_fd()).await;
        assert_eq!(created.is_ok().then(|| client.version()), made);
        assert_eq!(versions(vmm.asked.join().unwrap()), asked);
    }
}
