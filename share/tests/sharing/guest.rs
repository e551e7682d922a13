//! The requests of a guest's kernel to thaw-share.

use std::fs::File;
use std::io::{IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use thaw_pools::share::{Lasting, Serving, mounts, start};
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::share::{ReplyHeader, RequestHeader, Serve, Share};

const LOOKUP: u32 = 1;
pub const READLINK: u32 = 5;
pub const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const UNLINK: u32 = 10;
const INIT: u32 = 26;
pub const MKDIR: u32 = 9;
const CREATE: u32 = 35;
pub const FORGET: u32 = 2;
pub const GETATTR: u32 = 3;
pub const OPENDIR: u32 = 27;
const INIT_EXT: u32 = 1 << 30;
const SUBMOUNTS: u32 = 1 << 27;
/// Cached data is dropped when the file's size or time has changed.
pub const AUTO_INVAL_DATA: u32 = 1 << 12;
/// The guest's kernel caches writes, and determines sizes and times.
pub const WRITEBACK_CACHE: u32 = 1 << 16;
/// Links are read once and cached.
pub const CACHE_SYMLINKS: u32 = 1 << 23;
/// The options that a guest's kernel offers.
const OFFERED: u32 = INIT_EXT | SUBMOUNTS | AUTO_INVAL_DATA | WRITEBACK_CACHE | CACHE_SYMLINKS;
pub fn serve(shares: &[(&str, bool)]) -> Serve {
    Serve {
        shares: shares
            .iter()
            .map(|(name, read_only)| Share {
                name: (*name).into(),
                read_only: *read_only,
            })
            .collect(),
        slots: 0,
        devices: false,
    }
}

pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_thaw-share"))
}

pub fn log() -> OwnedFd {
    rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

pub fn read_log(log: OwnedFd) -> String {
    let mut file = File::from(log);
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

/// A guest's kernel at the VMM's end of the relay.
pub struct Guest {
    pub relay: UnixStream,
    serving: Option<Serving>,
    log: OwnedFd,
    ledger: File,
    unique: u64,
    /// The accepted ones of [`OFFERED`].
    pub agreed: u32,
    /// The descriptor that came with the last reply.
    pub opened: Option<File>,
}

impl Guest {
    pub fn of(shares: &[(&str, bool)], paths: &[PathBuf]) -> Guest {
        Guest::started(&serve(shares), paths)
    }

    /// A guest without shares, with slots for later ones.
    pub fn of_slots(slots: u32) -> Guest {
        let serve = Serve { slots, ..serve(&[]) };
        Guest::started(&serve, &[])
    }

    fn started(serve: &Serve, paths: &[PathBuf]) -> Guest {
        let files: Vec<File> = paths.iter().map(|path| File::open(path).unwrap()).collect();
        let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        let (log, ledger) = (log(), tempfile::tempfile().unwrap());
        let lasting = Lasting {
            ledger: ledger.as_fd(),
            mounts: None,
        };
        let serving = start(program(), &log, serve, &files, Some(lasting));
        let serving = serving.unwrap_or_else(|e| panic!("{e}: {}", read_log(log.try_clone().unwrap())));
        let relay = UnixStream::from(serving.relay.try_clone().unwrap());
        let mut guest = Guest {
            relay,
            serving: Some(serving),
            log,
            ledger,
            unique: 0,
            agreed: 0,
            opened: None,
        };
        guest.begin();
        guest
    }

    fn begin(&mut self) {
        let mut init = Vec::new();
        for word in [7u32, 38, 1 << 20, OFFERED, 0] {
            init.extend(word.to_le_bytes());
        }
        init.extend([0; 44]);
        let (error, reply) = self.call(INIT, 0, &init, 4096);
        assert_eq!(error, 0);
        self.agreed = u32::from_le_bytes(reply[12..16].try_into().unwrap());
    }

    /// Kills the process and starts another, with the same mounts, or with new ones of these paths.
    pub fn replace(&mut self, serve: &Serve, paths: Option<&[PathBuf]>) {
        let Serving { mut process, .. } = self.serving.take().unwrap();
        let mounts = paths.is_none().then(|| mounts(&process).unwrap());
        process.kill();
        process.wait().unwrap();
        let files = paths.unwrap_or_default().iter();
        let files: Vec<File> = files.map(|path| File::open(path).unwrap()).collect();
        let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        let lasting = Lasting {
            ledger: self.ledger.as_fd(),
            mounts: mounts.as_ref().map(|mounts| mounts.as_fd()),
        };
        let serving = start(program(), &self.log, serve, &files, Some(lasting));
        let serving = serving.unwrap_or_else(|e| panic!("{e}: {}", read_log(self.log.try_clone().unwrap())));
        self.relay = UnixStream::from(serving.relay.try_clone().unwrap());
        self.serving = Some(serving);
        self.begin();
    }

    /// The process that serves it.
    pub fn share(&self) -> &VmmProcess {
        &self.serving.as_ref().unwrap().process
    }

    pub fn send(&mut self, opcode: u32, node: u64, body: &[u8], room: u32) -> u32 {
        self.unique += 1;
        let id = self.unique as u32;
        let mut message = Vec::new();
        message.extend((40 + body.len() as u32).to_le_bytes());
        message.extend(opcode.to_le_bytes());
        message.extend(self.unique.to_le_bytes());
        message.extend(node.to_le_bytes());
        message.extend([0; 16]);
        message.extend(body);
        let header = RequestHeader {
            id,
            length: message.len() as u32,
            room,
        };
        self.relay.write_all(&header.encode()).unwrap();
        self.relay.write_all(&message).unwrap();
        id
    }

    pub fn reply(&mut self) -> (u32, i32, Vec<u8>) {
        let mut header = [0; ReplyHeader::BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(&mut header)];
        let got = recvmsg(&self.relay, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
        let files = ancillary.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => files.collect(),
            _ => Vec::new(),
        });
        self.opened = files.map(File::from).next();
        self.relay.read_exact(&mut header[got.bytes..]).unwrap();
        let header = ReplyHeader::decode(&header).unwrap();
        let mut reply = vec![0; header.length as usize];
        self.relay.read_exact(&mut reply).unwrap();
        let error = i32::from_le_bytes(reply[4..8].try_into().unwrap());
        (header.id, error, reply[16..].to_vec())
    }

    pub fn call(&mut self, opcode: u32, node: u64, body: &[u8], room: u32) -> (i32, Vec<u8>) {
        let id = self.send(opcode, node, body, room);
        let (replied, error, body) = self.reply();
        assert_eq!(replied, id);
        (error, body)
    }

    pub fn lookup(&mut self, parent: u64, name: &str) -> Result<(u64, Vec<u8>), i32> {
        match self.call(LOOKUP, parent, format!("{name}\0").as_bytes(), 200) {
            (0, entry) => Ok((u64::from_le_bytes(entry[..8].try_into().unwrap()), entry)),
            (error, _) => Err(error),
        }
    }

    /// Creates a file. Returns its node and handle.
    pub fn create(&mut self, parent: u64, name: &str) -> Result<(u64, u64), i32> {
        let mut body = Vec::new();
        for word in [libc::O_RDWR as u32, 0o644, 0, 0] {
            body.extend(word.to_le_bytes());
        }
        body.extend(name.as_bytes());
        body.push(0);
        match self.call(CREATE, parent, &body, 400) {
            (0, made) => Ok((
                u64::from_le_bytes(made[..8].try_into().unwrap()),
                u64::from_le_bytes(made[128..136].try_into().unwrap()),
            )),
            (error, _) => Err(error),
        }
    }

    /// A body that begins with `fh`, `offset` and `size`, as those of READ and WRITE do.
    pub fn range(handle: u64, offset: u64, size: u32) -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(handle.to_le_bytes());
        body.extend(offset.to_le_bytes());
        body.extend(size.to_le_bytes());
        body.extend([0; 20]);
        body
    }

    /// Closes the relay. Returns the process's exit code and its log.
    pub fn end(mut self) -> (Option<i32>, String) {
        let Serving { mut process, relay } = self.serving.take().unwrap();
        drop((relay, self.relay));
        let patience = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let ended = poll(
            &mut [PollFd::from_borrowed_fd(process.pidfd(), PollFlags::IN)],
            Some(&patience),
        );
        assert_eq!(ended, Ok(1), "it outlives its VMM");
        let status = process.wait().unwrap();
        (status.and_then(|status| status.code()), read_log(self.log))
    }
}
