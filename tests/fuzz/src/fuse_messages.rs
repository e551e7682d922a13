//! FUSE messages as a guest's driver queues them: any bytes, in any buffers, any room for an answer; and a window that they
//! map files into.

use std::cell::RefCell;
use std::sync::Arc;

use thaw_imagefs::erofs;
use thaw_imagefs::blob::{BlobFile, BootId, Digests, ReadyFile};
use thaw_imagefs::fs::{PlacedBlob, RootFs};
use thaw_imagefs::tree::{Attributes, BlobExtent, Inode, Kind, Tree};
use thaw_vmm::memory::GuestMemory;
use thaw_vmm::layout::Window;
use thaw_vmm::virtio::fs::dax::Dax;
use thaw_vmm::virtio::{HostWindow, Interrupt};
use thaw_vmm::virtio::fs::message::{Messenger, Verdict};
use thaw_vmm::virtio::queue::DeviceQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const MESSAGE: u64 = 0x10000;
const REPLY: u64 = 0x40000;

/// Bytes of the image's data, of which the last chunk is never ready.
const DATA: u64 = 5 << 19;

struct Guest {
    memory: GuestMemory,
    messenger: Messenger,
    dax: Dax,
}

/// A guest with an image in slot 1.
fn guest() -> Guest {
    let mut metadata = tempfile::tempfile().expect("a temporary file");
    let summary = erofs::write(&tree(), &[DATA], &mut metadata).expect("a sound tree");
    let images = Arc::new(RootFs::with_window());
    let blob = PlacedBlob {
        address: summary.blobs[0].address,
        length: DATA,
        digest: [1; 32],
        file: blob_file(),
    };
    images
        .add_image(1, "image", &metadata, vec![blob])
        .expect("a sound image");
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("memory");
    let messenger = Messenger::new(images, memory.clone(), Arc::default()).expect("scratch memory");
    let window = Window {
        start: 1 << 36,
        size: 8 << 20,
    };
    let dax = Dax::new(HostWindow::reserve(window).expect("address space"));
    Guest {
        memory,
        messenger,
        dax,
    }
}

/// Two files, a link and a directory.
fn tree() -> Tree {
    let mut tree = Tree::new(Attributes {
        mode: 0o755,
        ..Attributes::default()
    });
    for (name, kind) in [
        (
            &b"file"[..],
            Kind::File {
                size: 100_000,
                extents: vec![],
            },
        ),
        (
            b"large",
            Kind::File {
                size: DATA - 100,
                extents: vec![BlobExtent {
                    blob: 0,
                    file_offset: 0,
                    data_offset: 0,
                    length: DATA,
                }],
            },
        ),
        (
            b"link",
            Kind::Symlink {
                target: b"file".to_vec(),
            },
        ),
        (
            b"directory",
            Kind::Directory {
                entries: Default::default(),
            },
        ),
    ] {
        let index = tree.inodes.len() as u32;
        tree.inodes.push(Inode {
            attributes: Attributes::default(),
            kind,
        });
        if let Kind::Directory { entries } = &mut tree.inodes[0].kind {
            entries.insert(name.into(), index);
        }
    }
    tree
}

/// The data of both files, of which the last chunk is not ready.
fn blob_file() -> BlobFile {
    let data = tempfile::tempfile().expect("a temporary file");
    data.set_len(DATA).expect("room");
    let ready = tempfile::tempfile().expect("a temporary file");
    let digests = vec![[0; 32]; (DATA >> 17) as usize];
    let bits = ReadyFile::create(
        ready.try_clone().expect("a descriptor"),
        [1; 32],
        DATA,
        Digests::Sealed(&digests),
        false,
        BootId([1; 16]),
    )
    .expect("a ready file");
    for chunk in 1..bits.chunk_count() {
        bits.set_ready(chunk - 1);
    }
    BlobFile::open(data, ready).expect("a sound blob")
}

thread_local!(static GUEST: RefCell<Guest> = RefCell::new(guest()));

// Two bytes say how the message and the room for its answer are cut into buffers; the rest is the message.
pub fn run(input: &[u8]) {
    let [cut, room, message @ ..] = input else { return };
    let message = &message[..message.len().min(0x20000)];
    GUEST.with_borrow_mut(|Guest { memory, messenger, dax }| {
        let memory = &*memory;
        let split = usize::from(*cut).min(message.len());
        let header = u32::from(room >> 4) + 10;
        let body = u32::from(room & 15) * 300;
        let buffers = [
            (MESSAGE, split as u32, 0u16),
            (MESSAGE + split as u64, (message.len() - split) as u32, 0),
            (REPLY, header, 2),
            (REPLY + 4096, body, 2),
        ];
        memory
            .write_slice(message, GuestAddress(MESSAGE))
            .expect("it fits");
        for (index, (address, length, flags)) in buffers.into_iter().enumerate() {
            let next = if index + 1 < buffers.len() { 1 } else { 0 };
            let at = GuestAddress(index as u64 * 16);
            memory.write_obj(address, at).expect("it fits");
            memory.write_obj(length, GuestAddress(at.0 + 8)).expect("it fits");
            memory
                .write_obj(flags | next, GuestAddress(at.0 + 12))
                .expect("it fits");
            memory
                .write_obj(index as u16 + 1, GuestAddress(at.0 + 14))
                .expect("it fits");
        }
        memory
            .write_obj([0u16, 1, 0], GuestAddress(AVAILABLE))
            .expect("it fits");
        let mut queue = Queue::new(16).expect("a power of two");
        queue.set_desc_table_address(Some(0), Some(0));
        queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
        queue.set_used_ring_address(Some(USED as u32), Some(0));
        queue.set_ready(true);
        let eventfd = || EventFd::new(0).expect("an eventfd");
        let interrupt = Arc::new(Interrupt::new(eventfd()));
        let mut queue = DeviceQueue::new(0, queue, memory.clone(), interrupt, Arc::new(eventfd()));
        let chain = queue.pop().expect("a sound ring").expect("a chain");
        match messenger.handle(&chain, dax, None) {
            Verdict::Done(written) => assert!(written <= header + body),
            Verdict::Wait(missing) => assert!(!missing.is_empty()),
        }
    });
}
