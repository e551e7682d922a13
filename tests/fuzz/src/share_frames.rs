//! What a thaw-share that was taken over sends its VMM, beside a hostile guest: any bytes, while requests with room for their replies wait, and
//! a file for each of them, which the requests then read and write.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use thaw_protocol::share::{ReplyHeader, RequestHeader};
use thaw_vmm::memory::GuestMemory;
use thaw_vmm::virtio::Interrupt;
use thaw_vmm::virtio::queue::DeviceQueue;
use thaw_vmm::virtio::fs::share::open_files::OpenFiles;
use thaw_vmm::virtio::fs::share::relay::{Relay, Reply, Step};
use thaw_vmm::virtio::fs::share::request::Request;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const MESSAGE: u64 = 0x10000;
const REPLY: u64 = 0x20000;
/// Requests that wait; each has room for its number of kilobytes.
const WAITING: u16 = 4;
/// Bytes of each message: a READ or WRITE with a little data.
const LENGTH: u32 = 96;

pub fn run(input: &[u8]) {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("memory");
    let mut queue = Queue::new(16).expect("a power of two");
    queue.set_desc_table_address(Some(0), Some(0));
    queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
    queue.set_used_ring_address(Some(USED as u32), Some(0));
    queue.set_ready(true);
    for number in 0..WAITING {
        let (message, reply) = (number * 2, number * 2 + 1);
        let room = (u32::from(number) + 1) << 10;
        let descriptors = [
            (message, MESSAGE + u64::from(number) * u64::from(LENGTH), LENGTH, 1u16, reply),
            (reply, REPLY + u64::from(number) * 8192, room, 2, 0),
        ];
        for (index, address, length, flags, next) in descriptors {
            let at = u64::from(index) * 16;
            memory.write_obj(address, GuestAddress(at)).expect("it fits");
            memory.write_obj(length, GuestAddress(at + 8)).expect("it fits");
            memory.write_obj(flags, GuestAddress(at + 12)).expect("it fits");
            memory.write_obj(next, GuestAddress(at + 14)).expect("it fits");
        }
        let place = GuestAddress(AVAILABLE + 4 + 2 * u64::from(number));
        memory.write_obj(message, place).expect("it fits");
    }
    memory
        .write_obj(WAITING, GuestAddress(AVAILABLE + 2))
        .expect("it fits");
    let eventfd = || EventFd::new(0).expect("an eventfd");
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let mut queue = DeviceQueue::new(0, queue, memory.clone(), interrupt, Arc::new(eventfd()));
    let (mut far, near) = UnixStream::pair().expect("sockets");
    near.set_nonblocking(true).expect("a socket");
    let mut relay = Relay::new(near.into());
    while let Some(chain) = queue.pop().expect("a sound ring") {
        let room = chain.writable_len() as u32;
        relay.begin(Request {
            queue: 0,
            chain,
            length: LENGTH,
            room,
        });
        assert!(matches!(relay.send(Some(&memory)), Ok(Step::Done(None))));
    }
    // Of the messages' headers only what is not in the frames is the guest's: a guest that changes both is another input.
    for (at, byte) in input.iter().take(usize::from(WAITING) * LENGTH as usize).enumerate() {
        memory
            .write_obj(*byte, GuestAddress(MESSAGE + at as u64))
            .expect("it fits");
    }
    far.set_nonblocking(true).expect("a socket");
    // As much as a socket holds, and then the end.
    let _ = far.write(input);
    drop(far);
    let mut answered = Vec::new();
    while let Ok(Step::Done(reply)) = relay.receive(Some(&memory)) {
        let Reply { request, length, .. } = reply.expect("no driver was reset");
        assert!(length <= request.room);
        answered.push((request, length));
    }
    let unanswered = relay.close();
    assert_eq!(answered.len() + unanswered.len(), usize::from(WAITING), "each once");
    let mut files = OpenFiles::default();
    for (request, length) in &answered {
        let file = rustix::fs::memfd_create("opened", rustix::fs::MemfdFlags::CLOEXEC);
        files.add(request, *length, &memory, file.expect("a file"));
    }
    for request in answered.iter().map(|(request, _)| request).chain(&unanswered) {
        let asked = request.header(&memory);
        let read = files.read(&asked, request, &memory);
        assert!(read.is_none_or(|length| length <= request.room));
        let _ = files.write(&asked, request, &memory);
        files.see(&asked, request, &memory);
    }
    if let Some(header) = input.first_chunk() {
        let _ = ReplyHeader::decode(header);
    }
    if let Some(header) = input.first_chunk() {
        let _ = RequestHeader::decode(header);
    }
}
