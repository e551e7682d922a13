//! Every message and each of its variants, compared with the bytes that earlier releases write: the files in
//! `golden/`.
//!
//! A line there never changes; a new variant adds one.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::num::NonZeroU64;

use serde::{Serialize, de::DeserializeOwned};

use crate::access::Access;
use crate::control::*;
use crate::device_limits::{Bucket, DeviceLimit, DeviceLimits};
use crate::encoding::{EncodingError, decode, encode};
use crate::handshake::*;
use crate::miss::{Filled, Miss};
use crate::share::{Serve, Share};
use crate::tags::Tagged;

/// The lines of a file: a name, then hexadecimal digits.
struct Golden(BTreeMap<&'static str, &'static str>);

impl Golden {
    fn read(file: &'static str) -> Golden {
        Golden(file.lines().map(|line| line.split_once(' ').unwrap()).collect())
    }

    /// The value encodes to its line, and the line decodes to the value.
    fn holds<T: Serialize + DeserializeOwned + PartialEq + Debug>(&mut self, name: &str, value: T) {
        let bytes = encode(&value).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let Some(line) = self.0.remove(name) else {
            panic!("its file lacks: {name} {hex}");
        };
        assert_eq!(hex, line, "{name}");
        assert_eq!(decode::<T>(&bytes).unwrap(), value, "{name}");
    }

    /// Every tag of an enum has a line. The lowest tag without a line is refused, also before bytes that
    /// would be valid.
    fn covers<T: Tagged + DeserializeOwned + Debug>(&self, name: &'static str) {
        let prefix = format!("{name}::");
        for (tag, variant) in T::TAGS {
            let hex = format!("{tag:02x}");
            let has = |(line, bytes): (&&str, &&str)| line.starts_with(&prefix) && bytes.starts_with(&hex);
            assert!(self.0.iter().any(has), "{name}::{variant} has no line");
        }
        let tag = (0..)
            .find(|tag| T::TAGS.iter().all(|(known, _)| known != tag))
            .unwrap();
        for after in [0, 64] {
            let bytes = [encode(&tag).unwrap(), vec![0; after]].concat();
            let unknown = EncodingError::UnknownTag {
                what: name,
                of: name,
                tag,
                at: 1,
            };
            assert_eq!(decode::<T>(&bytes).unwrap_err(), unknown);
        }
    }

    fn end(self) {
        assert_eq!(self.0, BTreeMap::new(), "lines that no value has");
    }
}

fn blob() -> BlobRange {
    BlobRange {
        address: 4096,
        length: 8192,
        digest: [7; 32],
    }
}

fn machine() -> MachineSpec {
    MachineSpec {
        vcpus: 2,
        memory_mib: 512,
        cpu: CpuBaseline::V3,
        tethered: true,
    }
}

fn times() -> StartTimes {
    StartTimes {
        process: 1,
        jailed: 2,
        created: 3,
        restored: 4,
        thawed: 5,
        entered: 300,
    }
}

#[test]
fn control_messages_keep_their_bytes() {
    let mut golden = Golden::read(include_str!("golden/control.txt"));
    golden.covers::<DeviceId>("DeviceId");
    golden.covers::<CpuBaseline>("CpuBaseline");
    golden.covers::<MemoryMode>("MemoryMode");
    golden.covers::<FreezeKind>("FreezeKind");
    golden.covers::<Backend>("Backend");
    golden.covers::<Command>("Command");
    golden.covers::<DeviceLimits>("DeviceLimits");
    golden.covers::<MachineState>("MachineState");
    golden.covers::<ExitReason>("ExitReason");
    golden.covers::<Response>("Response");
    golden.covers::<ErrorCode>("ErrorCode");
    golden.covers::<Event>("Event");
    golden.covers::<FromVmm>("FromVmm");
    for device in DeviceId::ALL {
        golden.holds(&format!("DeviceId::{device:?}"), device);
    }
    golden.holds("CpuBaseline::Host", CpuBaseline::Host);
    golden.holds("CpuBaseline::V2", CpuBaseline::V2);
    golden.holds("CpuBaseline::V3", CpuBaseline::V3);
    golden.holds("CpuBaseline::V4", CpuBaseline::V4);
    golden.holds("MemoryMode::Cow", MemoryMode::Cow);
    golden.holds("MemoryMode::Populate", MemoryMode::Populate);
    golden.holds("MemoryMode::Uffd", MemoryMode::Uffd);
    golden.holds("FreezeKind::Full", FreezeKind::Full);
    golden.holds("FreezeKind::Delta", FreezeKind::Delta);
    golden.holds("FreezeKind::DeltaOver", FreezeKind::DeltaOver { layers: 3 });
    backends(&mut golden);
    commands(&mut golden);
    answers(&mut golden);
    golden.end();
}

fn backends(golden: &mut Golden) {
    golden.holds("Backend::Disk", Backend::Disk { read_only: true });
    let (mac, prepared) = ([2, 0, 0, 0, 0, 9], true);
    golden.holds("Backend::Tap", Backend::Tap { mac, prepared });
    golden.holds("Backend::Vsock", Backend::Vsock);
    golden.holds("Backend::Pmem", Backend::Pmem);
    golden.holds("Backend::Console", Backend::Console);
    golden.holds("Backend::Misses", Backend::Misses);
    golden.holds("Backend::Accesses", Backend::Accesses);
    golden.holds("Backend::Image", Backend::Image { blobs: vec![blob()] });
    golden.holds("Backend::Share", Backend::Share);
    golden.holds("Backend::LayeredDisk", Backend::LayeredDisk);
}

fn commands(golden: &mut Golden) {
    let mut holds = |name: &str, command: Command| {
        golden.holds(&format!("Command::{name}"), command);
    };
    let (version, machine) = (4, machine());
    holds("Create", Command::Create { version, machine });
    holds(
        "Restore",
        Command::Restore {
            layers: 2,
            working_set: true,
            mode: MemoryMode::Uffd,
        },
    );
    holds(
        "Thaw",
        Command::Thaw {
            memory_mib: 1024,
            empty: vec![DeviceId::Net, DeviceId::Console],
        },
    );
    let kind = FreezeKind::Delta;
    holds("Freeze", Command::Freeze { kind });
    holds("PrepareFreeze", Command::PrepareFreeze { kind });
    holds("BeginFreeze", Command::BeginFreeze);
    holds("FinishFreeze", Command::FinishFreeze);
    holds("CancelFreeze", Command::CancelFreeze);
    holds("WorkingSet", Command::WorkingSet);
    holds("Resize", Command::Resize { memory_mib: 768 });
    holds(
        "Attach",
        Command::Attach {
            device: DeviceId::Blk0,
            backend: Backend::Disk { read_only: false },
        },
    );
    holds(
        "AddImage",
        Command::AddImage {
            slot: 300,
            image: ImageSpec {
                name: "alpine".into(),
                blobs: vec![blob()],
            },
        },
    );
    holds("RemoveImage", Command::RemoveImage { slot: 1 });
    let cmdline = "console=ttyS0".into();
    holds("Boot", Command::Boot { cmdline });
    holds("Pause", Command::Pause);
    holds("Resume", Command::Resume);
    holds("Status", Command::Status);
    holds("Shutdown", Command::Shutdown);
    let device = DeviceId::Blk3;
    holds("Detach", Command::Detach { device });
    let bucket = Bucket {
        per_second: NonZeroU64::new(1000).unwrap(),
        burst: NonZeroU64::new(1).unwrap(),
        once: 300,
    };
    let one = DeviceLimit {
        bytes: Some(bucket),
        operations: None,
    };
    let limits = DeviceLimits::Disk(one);
    let device = DeviceId::Blk0;
    holds("Limit", Command::Limit { device, limits });
    holds("Hello", Command::Hello { version: 5 });
    golden.holds("DeviceLimits::Disk", limits);
    let (send, receive) = (one, DeviceLimit::default());
    golden.holds("DeviceLimits::Network", DeviceLimits::Network { send, receive });
    golden.holds(
        "Request",
        Request {
            id: 200,
            command: Command::Status,
        },
    );
}

fn answers(golden: &mut Golden) {
    golden.holds("MachineState::Shell", MachineState::NoMachine);
    golden.holds("MachineState::Created", MachineState::Created);
    golden.holds("MachineState::Parked", MachineState::Parked);
    golden.holds("MachineState::Running", MachineState::Running);
    golden.holds("MachineState::Paused", MachineState::Paused);
    golden.holds("MachineState::Exited", MachineState::Exited(ExitReason::Reset));
    golden.holds("ExitReason::PowerOff", ExitReason::PowerOff);
    golden.holds("ExitReason::Reset", ExitReason::Reset);
    golden.holds("ExitReason::Fault", ExitReason::Fault("MMIO".into()));
    golden.holds("Response::Done", Response::Done);
    golden.holds(
        "Response::Status",
        Response::Status {
            state: MachineState::Running,
            times: times(),
            faults: 6,
        },
    );
    golden.holds(
        "Response::Restored",
        Response::Restored {
            regions: vec![MappedRegion {
                host_address: 1 << 40,
                size: 1 << 29,
                guest_address: 0,
            }],
            populated_pages: 1,
            populate_ns: 2,
        },
    );
    golden.holds("Response::Frozen", Response::Frozen { memory_bytes: 4096 });
    golden.holds(
        "Response::Hello",
        Response::Hello {
            version: 5,
            release: "0.1.0".into(),
        },
    );
    for (name, code) in [
        ("WrongState", ErrorCode::WrongState),
        ("Invalid", ErrorCode::Invalid),
        ("Kvm", ErrorCode::Kvm),
        ("NotPvh", ErrorCode::NotPvh),
        ("MemoryTooSmall", ErrorCode::MemoryTooSmall),
        ("Snapshot", ErrorCode::Snapshot),
        ("Incompatible", ErrorCode::Incompatible),
        ("Unswapped", ErrorCode::Unswapped),
        ("Shared", ErrorCode::Shared),
        ("System", ErrorCode::System),
        ("Version", ErrorCode::Version),
        ("Unprotected", ErrorCode::Unprotected),
    ] {
        golden.holds(&format!("ErrorCode::{name}"), code);
    }
    golden.holds("Event::Doorbell", Event::Doorbell { at: 1000 });
    golden.holds("Event::Exited", Event::Exited(ExitReason::PowerOff));
    golden.holds(
        "FromVmm::Reply",
        FromVmm::Reply {
            id: 7,
            result: Ok(Response::Done),
        },
    );
    let refusal = ControlError {
        code: ErrorCode::Invalid,
        message: "no".into(),
    };
    let result = Err(refusal);
    golden.holds("FromVmm::Reply(Err)", FromVmm::Reply { id: 8, result });
    golden.holds("FromVmm::Event", FromVmm::Event(Event::Doorbell { at: 1 }));
}

#[test]
fn misses_accesses_and_shares_keep_their_bytes() {
    let mut golden = Golden::read(include_str!("golden/sockets.txt"));
    let (blob, offset, length) = ([3; 32], 1 << 20, 65536);
    golden.holds(
        "Miss",
        Miss {
            id: 1,
            blob,
            offset,
            length,
        },
    );
    golden.holds(
        "Filled",
        Filled {
            id: 1,
            result: Ok(()),
        },
    );
    let result = Err("gone".into());
    golden.holds("Filled(Err)", Filled { id: 2, result });
    golden.holds(
        "Access",
        Access {
            blob,
            offset,
            length,
            dropped: 5,
        },
    );
    golden.holds(
        "Serve",
        Serve {
            shares: vec![Share {
                name: "0".into(),
                read_only: true,
            }],
            slots: 8,
            devices: true,
        },
    );
    golden.end();
}

#[test]
fn handshake_frames_keep_their_bytes() {
    let mut golden = Golden::read(include_str!("golden/handshake.txt"));
    golden.covers::<Greeting>("Greeting");
    golden.covers::<FromAgent>("FromAgent");
    let identity = Identity {
        version: 3,
        nonce: [7; 16],
        entropy: vec![9; 32],
        hostname: "h".into(),
        machine_id: [1; 16],
        network: Some(Network {
            name: "eth0".into(),
            mac: [2; 6],
            mtu: 1500,
            arp: true,
            addresses: vec![Address {
                ip: "10.0.0.2".parse().unwrap(),
                prefix: 30,
                on_link: true,
            }],
            routes: vec![Route {
                to: "::".parse().unwrap(),
                prefix: 0,
                gateway: Some("fd00::1".parse().unwrap()),
                source: None,
                scope: 0,
                gateway_on_link: false,
            }],
            neighbours: vec![Neighbour {
                ip: "10.0.0.1".parse().unwrap(),
                mac: [4; 6],
            }],
            nameservers: vec!["10.0.0.1".parse().unwrap()],
        }),
        cpus: 2,
        memory_mib: 512,
        rehearsal: false,
    };
    golden.holds("Greeting::Become", Greeting::Become(Box::new(identity)));
    golden.holds("Greeting::Quiesce", Greeting::Quiesce);
    golden.holds("Greeting::Continue", Greeting::Continue);
    let failure = Some("a process in D".to_owned());
    golden.holds("Quiesced", Quiesced { version: 3, failure });
    golden.holds("FromAgent::WhatTime", FromAgent::WhatTime);
    let acknowledgement = Acknowledgement {
        version: 3,
        nonce: [7; 16],
        failure: None,
        agent_started: 1,
        agent_ready: 2,
        received: 3,
        applied: 4,
        time_round_trip_ns: 5,
        wall_clock_ns: 1 << 60,
        test_hooks: true,
    };
    let acknowledged = FromAgent::Acknowledged(Box::new(acknowledgement));
    golden.holds("FromAgent::Acknowledged", acknowledged);
    let wall_clock_ns = 1 << 60;
    golden.holds("Time", Time { wall_clock_ns });
    golden.end();
}
