//! Requests to a disk that is an image: any descriptors, any header, bytes that are there and bytes that are not.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_protocol::control::{Backend, BlobRange, DeviceId};
use thaw_imagefs::blob::{BootId, Digests, ReadyFile};
use thaw_vmm::memory::GuestMemory;
use thaw_vmm::virtio::blk::Blk;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::queue::DeviceQueue;
use thaw_vmm::virtio::{Activation, DeviceError, Interrupt, VirtioDevice};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const REQUEST: u64 = 0x3000;
const MEMORY: usize = 0x8_0000;
const DATA: u64 = 1 << 20;
const ENTRIES: usize = 16;

/// A metadata file, a blob of which every other chunk is ready, and a socket nobody answers on.
fn files() -> (Vec<OwnedFd>, OwnedFd) {
    let file = |length| {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(length).expect("room");
        file
    };
    let (metadata, data, ready) = (file(5000), file(DATA), file(0));
    let digests = [[0; 32]; (DATA >> 17) as usize];
    let again = ready.try_clone().expect("a descriptor");
    let bits =
        ReadyFile::create(again, [1; 32], DATA, Digests::Sealed(&digests), false, BootId([1; 16])).expect("a ready file");
    for chunk in (0..bits.chunk_count()).step_by(2) {
        bits.set_ready(chunk);
    }
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, kind, SocketFlags::NONBLOCK, None).expect("a socket pair");
    (
        vec![metadata.into(), data.into(), ready.into(), theirs],
        ours,
    )
}

/// Lets the disk answer everything that it can answer now.
fn serve(disk: &mut Blk) -> Result<(), DeviceError> {
    disk.queue_ready(0)?;
    while let Some(call) = disk.next_call()? {
        call.make();
    }
    Ok(())
}

// The first byte is the number of chains; then the descriptor table, then what the descriptors point to.
pub fn run(input: &[u8]) {
    let [chains, rest @ ..] = input else { return };
    let (table, request) = rest.split_at(rest.len().min(ENTRIES * 16));
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let request = &request[..request.len().min(0x1000)];
    memory.write_slice(table, GuestAddress(0)).expect("it fits");
    memory.write_slice(request, GuestAddress(REQUEST)).expect("it fits");
    let heads: Vec<u16> = (0..ENTRIES as u16).collect();
    let ring = [&[0, u16::from(chains % ENTRIES as u8)], &heads[..]].concat();
    for (at, word) in (AVAILABLE..).step_by(2).zip(ring) {
        memory.write_obj(word, GuestAddress(at)).expect("it fits");
    }
    let mut queue = Queue::new(ENTRIES as u16).expect("a power of two");
    queue.set_desc_table_address(Some(0), Some(0));
    queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
    queue.set_used_ring_address(Some(USED as u32), Some(0));
    queue.set_ready(true);
    let eventfd = || EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let queue = DeviceQueue::new(0, queue, memory.clone(), interrupt, Arc::new(eventfd()));
    let event_loop = EventLoop::new().expect("an epoll");
    let mut disk = Blk::new("blk3", event_loop.registrar(DeviceId::Blk3));
    let (fds, _node) = files();
    let blobs = vec![BlobRange {
        address: 8192,
        length: DATA,
        digest: [1; 32],
    }];
    disk.attach(Backend::Image { blobs }, fds).expect("a sound image");
    let activation = Activation {
        memory,
        features: 0,
        queues: vec![queue],
    };
    disk.activate(activation).expect("it does nothing yet");
    // A corrupt ring is an error, which the event loop resets the device for.
    if serve(&mut disk).is_err() {
        disk.reset();
    }
    let saved = disk.save();
    disk.check(&saved.state, saved.queues.as_deref())
        .expect("what it saves it would take");
}
