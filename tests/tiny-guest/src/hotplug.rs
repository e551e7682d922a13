//! A guest that drives virtio-mem: it plugs, touches and unplugs what it is told, block by block of 2 MiB.
//!
//! It runs with paging in compatibility mode, so that the region's first GiB is at [`REGION`] of its 32-bit addresses; boot
//! memory and the device windows are where they are. An answer that is not the expected one resets the machine.

use crate::{Code, DATA, ENTRY, Guest};

/// Bytes of a block: thaw-vmm's.
pub const BLOCK: u32 = 2 << 20;
/// Blocks the guest can touch.
pub const BLOCKS: u32 = 512;
/// Where the guest has the region.
pub const REGION: u32 = 1 << 30;
/// Where the region is in guest memory: `layout::VIRTIO_MEM` of thaw-vmm.
const REGION_ADDRESS: u64 = 256 << 30;
/// The device's window: slot 10.
const WINDOW: u32 = 0xd000_a000;
/// Registers of a window (virtio 1.2 §4.2.2).
mod register {
    pub const DRIVER_FEATURES: u32 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u32 = 0x24;
    pub const QUEUE_NUM: u32 = 0x38;
    pub const QUEUE_READY: u32 = 0x44;
    pub const QUEUE_NOTIFY: u32 = 0x50;
    pub const STATUS: u32 = 0x70;
    pub const QUEUE_DESCRIPTORS: u32 = 0x80;
    pub const QUEUE_DRIVER: u32 = 0x90;
    pub const QUEUE_DEVICE: u32 = 0xa0;
    /// `requested_size` of `struct virtio_mem_config`.
    pub const REQUESTED: u32 = 0x100 + 48;
}

/// Tables and rings, from [`DATA`].
mod at {
    pub const LEVEL3: usize = 0x1000;
    pub const LOW: usize = 0x2000;
    pub const HOTPLUG: usize = 0x3000;
    pub const WINDOWS: usize = 0x4000;
    pub const DESCRIPTORS: usize = 0x5000;
    pub const AVAILABLE: usize = 0x5400;
    pub const USED: usize = 0x5800;
    pub const REQUESTS: usize = 0x6000;
    pub const ANSWERS: usize = 0x7000;
    pub const SEGMENTS: usize = 0x7400;
    pub const POINTER: usize = 0x7440;
    pub const END: usize = 0x8000;
}

/// Descriptors in the queue: two a request.
const QUEUE: u32 = 64;

/// What the guest does, put together step by step; at most 32 requests.
#[derive(Clone)]
pub struct Steps {
    code: Code,
    data: Vec<u8>,
    requests: u16,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps::new()
    }
}

impl Steps {
    /// Paging, and the driver up.
    pub fn new() -> Steps {
        let mut data = vec![0u8; at::END];
        let mut entry = |table: usize, index: usize, value: u64| {
            let place = table + index * 8;
            data[place..place + 8].copy_from_slice(&(value | 3).to_le_bytes());
        };
        let here = |table: usize| u64::from(DATA) + table as u64;
        const LARGE: u64 = 1 << 7;
        entry(0, 0, here(at::LEVEL3));
        for (index, table) in [(0, at::LOW), (1, at::HOTPLUG), (3, at::WINDOWS)] {
            entry(at::LEVEL3, index, here(table));
        }
        for index in 0..BLOCKS as usize {
            let offset = index as u64 * u64::from(BLOCK);
            entry(at::LOW, index, offset | LARGE);
            entry(at::HOTPLUG, index, (REGION_ADDRESS + offset) | LARGE);
            entry(at::WINDOWS, index, (3 << 30) | offset | LARGE);
        }
        // None, 64-bit code, data; and what the register of their table is loaded from.
        for (index, segment) in [(1, 0x00af_9b00_0000_ffff_u64), (2, 0x00cf_9300_0000_ffff)] {
            data[at::SEGMENTS + 8 * index..][..8].copy_from_slice(&segment.to_le_bytes());
        }
        data[at::POINTER..][..2].copy_from_slice(&23u16.to_le_bytes());
        data[at::POINTER + 2..][..4].copy_from_slice(&(here(at::SEGMENTS) as u32).to_le_bytes());
        let code = Code::default()
            // cr4.PAE; cr3
            .raw(&[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0, 0xb8])
            .raw(&DATA.to_le_bytes())
            .raw(&[0x0f, 0x22, 0xd8])
            // EFER.LME
            .raw(&[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x0d, 0, 1, 0, 0, 0x0f, 0x30])
            // cr0.PG
            .raw(&[0x0f, 0x20, 0xc0, 0x0d, 0, 0, 0, 0x80, 0x0f, 0x22, 0xc0]);
        let steps = Steps {
            code,
            data,
            requests: 0,
        };
        steps.driver_up()
    }

    /// Acknowledge, driver; features VERSION_1 and UNPLUGGED_INACCESSIBLE; FEATURES_OK; the queue; DRIVER_OK.
    fn driver_up(mut self) -> Steps {
        let rings = [
            (register::QUEUE_DESCRIPTORS, at::DESCRIPTORS),
            (register::QUEUE_DRIVER, at::AVAILABLE),
            (register::QUEUE_DEVICE, at::USED),
        ];
        let mut writes = vec![
            (register::STATUS, 0),
            (register::STATUS, 1),
            (register::STATUS, 3),
            (register::DRIVER_FEATURES_SELECT, 0),
            (register::DRIVER_FEATURES, 1 << 1),
            (register::DRIVER_FEATURES_SELECT, 1),
            (register::DRIVER_FEATURES, 1),
            (register::STATUS, 11),
            (register::QUEUE_NUM, QUEUE),
        ];
        writes.extend(rings.map(|(register, ring)| (register, DATA + ring as u32)));
        writes.extend([(register::QUEUE_READY, 1), (register::STATUS, 15)]);
        for (register, value) in writes {
            self.code = self.code.store(WINDOW + register, value);
        }
        self
    }

    /// Waits until the device asks for `blocks`.
    pub fn wait_for(mut self, blocks: u32) -> Steps {
        // 1: mov eax, [register]; cmp eax, bytes; jne 1b
        self.code = self
            .code
            .raw(&[0xa1])
            .raw(&(WINDOW + register::REQUESTED).to_le_bytes())
            .raw(&[0x3d])
            .raw(&(blocks * BLOCK).to_le_bytes())
            .raw(&[0x75, 0xf4]);
        self
    }

    pub fn plug(self, first: u32, blocks: u16) -> Steps {
        self.ask(0, first, blocks, None)
    }

    pub fn unplug(self, first: u32, blocks: u16) -> Steps {
        self.ask(1, first, blocks, None)
    }

    pub fn unplug_all(self) -> Steps {
        self.ask(2, 0, 0, None)
    }

    /// Asks what state a block is in, and has the device write the answer to the block `answer`.
    pub fn answered_at(self, answer: u32) -> Steps {
        self.ask(3, 0, 1, Some(REGION_ADDRESS + u64::from(answer * BLOCK)))
    }

    fn ask(mut self, kind: u16, first: u32, blocks: u16, answer: Option<u64>) -> Steps {
        let number = usize::from(self.requests);
        let (request, response) = (at::REQUESTS + 32 * number, at::ANSWERS + 16 * number);
        let address = REGION_ADDRESS + u64::from(first) * u64::from(BLOCK);
        self.put(request, &kind.to_le_bytes());
        self.put(request + 8, &address.to_le_bytes());
        self.put(request + 16, &blocks.to_le_bytes());
        // What the device must overwrite.
        self.put(response, &[0xff; 16]);
        let in_guest = |offset: usize| u64::from(DATA) + offset as u64;
        let head = 2 * self.requests;
        // NEXT, then WRITE.
        self.describe(head, in_guest(request), 24, 1, head + 1);
        self.describe(head + 1, answer.unwrap_or(in_guest(response)), 10, 2, 0);
        self.put(at::AVAILABLE + 4 + 2 * number, &head.to_le_bytes());
        self.requests += 1;
        let used = DATA + at::USED as u32 + 2;
        self.code = self
            .code
            .store(DATA + at::AVAILABLE as u32, u32::from(self.requests) << 16)
            .store(WINDOW + register::QUEUE_NOTIFY, 0)
            // 1: cmp word [used index], requests; jne 1b
            .raw(&[0x66, 0x81, 0x3d])
            .raw(&used.to_le_bytes())
            .raw(&self.requests.to_le_bytes())
            .raw(&[0x75, 0xf5]);
        if answer.is_none() {
            // Acknowledged, and the padding after that.
            self.code = self.code.expect(DATA + response as u32, 0);
        }
        self
    }

    fn describe(&mut self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let place = at::DESCRIPTORS + 16 * usize::from(index);
        self.put(place, &address.to_le_bytes());
        self.put(place + 8, &length.to_le_bytes());
        self.put(place + 12, &flags.to_le_bytes());
        self.put(place + 14, &next.to_le_bytes());
    }

    fn put(&mut self, place: usize, bytes: &[u8]) {
        self.data[place..place + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes its address to every page of these blocks.
    pub fn write(self, first: u32, blocks: u32) -> Steps {
        self.fill(REGION + first * BLOCK, REGION + (first + blocks) * BLOCK)
    }

    /// Writes to every page of boot memory from 2 MiB up to `mib`.
    pub fn write_boot_memory(self, mib: u32) -> Steps {
        self.fill(BLOCK, mib << 20)
    }

    fn fill(self, start: u32, end: u32) -> Steps {
        // mov [edi], edi
        self.each_page(start, end, &[0x89, 0x3f])
    }

    /// Checks that every page of these blocks has its address.
    pub fn check(self, first: u32, blocks: u32) -> Steps {
        // cmp [edi], edi
        self.each(first, blocks, &[0x39, 0x3f])
    }

    /// Checks that every page of these blocks begins with zeros.
    pub fn check_zero(self, first: u32, blocks: u32) -> Steps {
        // cmp dword [edi], 0
        self.each(first, blocks, &[0x83, 0x3f, 0])
    }

    fn each(self, first: u32, blocks: u32, compare: &[u8]) -> Steps {
        let failure = Code::default().out(0x602, 1).0;
        let body = [compare, &[0x74, failure.len() as u8], &failure].concat();
        self.each_page(REGION + first * BLOCK, REGION + (first + blocks) * BLOCK, &body)
    }

    /// `body` for every page from `start` to `end`, whose address is in EDI.
    fn each_page(mut self, start: u32, end: u32, body: &[u8]) -> Steps {
        let back = body.len() as i8 + 6 + 6 + 2;
        // mov edi, start; 1: BODY; add edi, 4096; cmp edi, end; jb 1b
        self.code = self
            .code
            .raw(&[0xbf])
            .raw(&start.to_le_bytes())
            .raw(body)
            .raw(&[0x81, 0xc7, 0, 0x10, 0, 0, 0x81, 0xff])
            .raw(&end.to_le_bytes())
            .raw(&[0x72, (-back).to_le_bytes()[0]]);
        self
    }

    /// From here on in 64-bit mode, where a processor that KVM lets run by itself takes its own page faults. Only
    /// [`Self::write`], [`Self::check`], [`Self::check_zero`] and [`Self::print`] may follow: what they are made of means the
    /// same there.
    pub fn long_mode(mut self) -> Steps {
        // lgdt [POINTER]
        let code = self
            .code
            .raw(&[0x0f, 0x01, 0x15])
            .raw(&(DATA + at::POINTER as u32).to_le_bytes());
        // jmp 8:next
        let next = ENTRY + code.0.len() as u32 + 7;
        self.code = code.raw(&[0xea]).raw(&next.to_le_bytes()).raw(&[8, 0]);
        self
    }

    pub fn print(mut self, text: &str) -> Steps {
        self.code = self.code.print(text);
        self
    }

    /// The guest, which powers off at the end.
    pub fn guest(self) -> Guest {
        Guest {
            code: self.code.power_off().0,
            data: self.data,
        }
    }
}
