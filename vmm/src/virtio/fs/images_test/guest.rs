//! A guest for tests: it sends FUSE messages to the device and reads its answers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{InHeader, Opcode, OutHeader, ReadIn};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_protocol::control::Backend;
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet;
use vm_memory::ByteValued;

use super::image::Image;
use crate::layout::Window;
use crate::virtio::VirtioDevice;
use crate::virtio::fs::{Fs, Images};
use crate::virtio::gate::Gate;
use crate::virtio::testing::{Buf, Rig, open_gate};
use crate::virtio::window::HostWindow;

pub const REQUESTS: usize = 1;

pub fn root() -> Fs<Images> {
    root_at(&open_gate())
}

pub fn root_at(gate: &Arc<Gate>) -> Fs<Images> {
    let window = Window {
        start: 1 << 36,
        size: 1 << 21,
    };
    Fs::root(HostWindow::reserve(window).unwrap(), gate.clone())
}

/// A message: header and body.
pub fn message(opcode: Opcode, unique: u64, nodeid: u64, body: &[u8]) -> Vec<u8> {
    let mut header = InHeader {
        opcode: opcode as u32,
        unique,
        nodeid,
        ..InHeader::default()
    };
    header.len = (size_of::<InHeader>() + body.len()) as u32;
    [header.as_slice(), body].concat()
}

pub fn read_body(offset: u64, size: u32) -> Vec<u8> {
    ReadIn {
        offset,
        size,
        ..ReadIn::default()
    }
    .as_slice()
    .to_vec()
}

/// A driver with an image in slot 1.
pub struct Guest {
    pub rig: Rig<Fs<Images>>,
    pub image: Image,
    pub unique: u64,
}

/// A request in progress.
pub struct Asked {
    pub unique: u64,
    pub head: u16,
    pub reply: [Buf; 2],
}

impl Guest {
    pub fn new() -> Guest {
        guest_at(&open_gate())
    }

    pub fn ask(&mut self, opcode: Opcode, nodeid: u64, body: &[u8], room: u32) -> Asked {
        self.unique += 1;
        let request = self.rig.readable(&message(opcode, self.unique, nodeid, body));
        let reply = [self.rig.writable(16), self.rig.writable(room)];
        let head = self.rig.submit(REQUESTS, &[request, reply[0], reply[1]]);
        self.rig.notify(REQUESTS);
        Asked {
            unique: self.unique,
            head,
            reply,
        }
    }

    /// Waits until some heads are used, and returns them.
    pub fn wait_used(&mut self) -> Vec<(u16, u32)> {
        self.rig.wait_used(REQUESTS)
    }

    /// Returns when the device has requested a reset. Interrupts for answers may come before.
    pub fn wait_failed(&mut self) {
        while !self.rig.interrupt.failed() {
            self.rig.wait();
        }
    }

    /// The error and body of an answered request.
    pub fn answer(&self, asked: &Asked, used: (u16, u32)) -> (i32, Vec<u8>) {
        assert_eq!(used.0, asked.head);
        let header = *OutHeader::from_slice(&self.rig.bytes(asked.reply[0])).unwrap();
        assert_eq!((header.unique, header.len), (asked.unique, used.1));
        let mut body = self.rig.bytes(asked.reply[1]);
        body.truncate(header.len as usize - 16);
        (header.error, body)
    }

    pub fn call(&mut self, opcode: Opcode, nodeid: u64, body: &[u8]) -> (i32, Vec<u8>) {
        let asked = self.ask(opcode, nodeid, body, 1 << 20);
        let used = self.wait_used();
        assert_eq!(used.len(), 1);
        self.answer(&asked, used[0])
    }

    /// Node id of a name.
    pub fn lookup(&mut self, parent: u64, name: &str) -> Result<u64, i32> {
        match self.call(Opcode::Lookup, parent, format!("{name}\0").as_bytes()) {
            (0, entry) => Ok(u64::from_le_bytes(entry[..8].try_into().unwrap())),
            (error, _) => Err(error),
        }
    }

    pub fn file(&mut self) -> u64 {
        let image = self.lookup(1, "one").unwrap();
        self.lookup(image, "file").unwrap()
    }

    pub fn misses(&mut self) -> OwnedFd {
        let (ours, theirs) = pair();
        self.rig.device.attach(Backend::Misses, vec![theirs]).unwrap();
        ours
    }
}

/// A socket pair on which a test waits only for a limited time.
pub fn pair() -> (OwnedFd, OwnedFd) {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let patience = Some(Duration::from_secs(20));
    rustix::net::sockopt::set_socket_timeout(&ours, rustix::net::sockopt::Timeout::Recv, patience).unwrap();
    (ours, theirs)
}

pub fn receive(socket: &OwnedFd) -> Miss {
    packet::receive::<Miss>(socket).unwrap().0
}

pub fn reply(socket: &OwnedFd, id: u64, result: Result<(), String>) {
    packet::send(socket, &Filled { id, result }, &[]).unwrap();
}

/// A guest whose device's thread uses `gate`.
pub fn guest_at(gate: &Arc<Gate>) -> Guest {
    let image = Image::new("one");
    let mut device = root_at(gate);
    device.add_image(1, image.spec.clone(), image.fds()).unwrap();
    Guest {
        rig: Rig::new(device, 0),
        image,
        unique: 0,
    }
}
