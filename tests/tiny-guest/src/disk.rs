//! Guests with a driver of virtio-blk's first disk, for timing one beside another (virtio 1.2 §2.7, §4.2, §5.2).
//!
//! [`reader`] reads the first page of its disk again and again, times each read by its time stamp counter, writes the times to
//! the disk and powers off. [`flooder`] has [`AT_ONCE`] reads in its queue for ever, and sleeps until some are answered.

use crate::bare::{asleep, sleep};
use crate::{Code, DATA, Guest};

/// Where a reader's times are on its disk, bytes: 32 bits each, little-endian ticks.
pub const TIMES: u64 = 512 << 10;
/// Bytes of each read.
pub const READ: u32 = 4096;
/// Reads a flooder has in its queue.
pub const AT_ONCE: u8 = 64;

/// The window of `DeviceId::Blk0`, and its interrupt: `layout` of thaw-vmm.
const WINDOW: u32 = 0xD000_2000;
const GSI: u32 = 7;
/// Registers (§4.2.2).
const DRIVER_FEATURES: u32 = WINDOW + 0x20;
const DRIVER_FEATURES_SEL: u32 = WINDOW + 0x24;
const QUEUE_SEL: u32 = WINDOW + 0x30;
const QUEUE_NUM: u32 = WINDOW + 0x38;
const QUEUE_READY: u32 = WINDOW + 0x44;
const QUEUE_NOTIFY: u32 = WINDOW + 0x50;
const INTERRUPT_STATUS: u32 = WINDOW + 0x60;
const INTERRUPT_ACK: u32 = WINDOW + 0x64;
const STATUS: u32 = WINDOW + 0x70;
const QUEUE_DESC: u32 = WINDOW + 0x80;
const QUEUE_DRIVER: u32 = WINDOW + 0x90;
const QUEUE_DEVICE: u32 = WINDOW + 0xa0;

/// Entries of the queue.
const SIZE: u16 = 256;
/// Its parts; the tables of [`asleep`] come before them.
const DESCRIPTORS: u32 = DATA + 0x1000;
const AVAILABLE: u32 = DATA + 0x2000;
const USED: u32 = DATA + 0x3000;
/// Headers and status bytes of the requests.
const HEADERS: u32 = DATA + 0x4000;
const STATUSES: u32 = DATA + 0x5000;
/// Where data goes: beyond all that is loaded.
const BUFFERS: u32 = 4 << 20;
const SAMPLES: u32 = 8 << 20;

/// Times `reads` reads, at most 65,536 and a multiple of 128: as many fill a sector.
pub fn reader(reads: u32) -> Guest {
    assert!(reads.is_multiple_of(128) && reads <= 1 << 16);
    let mut data = Data(vec![0; (STATUSES - DATA) as usize]);
    data.request(0, (0, 0), (BUFFERS, READ));
    data.request(1, (1, TIMES / 512), (SAMPLES, 4 * reads));
    let code = driver(Code::default())
        // mov edi, SAMPLES; mov ebp, reads
        .raw(&[0xbf])
        .raw(&SAMPLES.to_le_bytes())
        .raw(&[0xbd])
        .raw(&reads.to_le_bytes());
    let start = code.0.len();
    // rdtsc; mov ebx, eax
    let code = submit_and_wait(code.raw(&[0x0f, 0x31, 0x89, 0xc3]));
    // rdtsc; sub eax, ebx; mov [edi], eax; add edi, 4; dec ebp; jnz start
    let code = code.raw(&[0x0f, 0x31, 0x29, 0xd8, 0x89, 0x07, 0x83, 0xc7, 0x04, 0x4d]);
    let back = start as i32 - (code.0.len() as i32 + 6);
    let code = code.raw(&[0x0f, 0x85]).raw(&back.to_le_bytes());
    // The write is next: mov word [its place], 3
    let place = AVAILABLE + 4 + 2 * (reads % u32::from(SIZE));
    let code = code
        .raw(&[0x66, 0xc7, 0x05])
        .raw(&place.to_le_bytes())
        .raw(&3u16.to_le_bytes());
    Guest {
        code: submit_and_wait(code).power_off().0,
        data: data.0,
    }
}

/// Reads as much as it is let.
pub fn flooder() -> Guest {
    let (code, tables) = asleep(GSI);
    let mut data = Data(tables);
    data.0.resize((STATUSES - DATA) as usize, 0);
    for request in 0..u16::from(AT_ONCE) {
        let buffer = BUFFERS + u32::from(request) * READ;
        data.request(request, (0, 0), (buffer, READ));
    }
    for place in 0..u16::from(AT_ONCE) {
        data.put(AVAILABLE + 4 + 2 * u32::from(place), &(3 * place).to_le_bytes());
    }
    // xor ebp, ebp: how many answers were seen.
    let code = driver(code).raw(&[0x31, 0xed]);
    let awake = code.0.len();
    // mov eax, [INTERRUPT_STATUS]; mov [INTERRUPT_ACK], eax
    let code = code
        .raw(&[0xa1])
        .raw(&INTERRUPT_STATUS.to_le_bytes())
        .raw(&[0xa3])
        .raw(&INTERRUPT_ACK.to_le_bytes())
        // Requests are answered in any order, so the next place gets the one that was answered. 1: cmp bp, [used index]; je 2f
        .raw(&[0x66, 0x3b, 0x2d])
        .raw(&(USED + 2).to_le_bytes())
        .raw(&[0x74, 30])
        // movzx eax, bp; movzx ebx, al; mov ecx, [ebx * 8 + used ring]
        .raw(&[0x0f, 0xb7, 0xc5, 0x0f, 0xb6, 0xd8, 0x8b, 0x0c, 0xdd])
        .raw(&(USED + 4).to_le_bytes())
        // add al, AT_ONCE; movzx eax, al; mov [eax * 2 + available ring], cx
        .raw(&[0x04, AT_ONCE, 0x0f, 0xb6, 0xc0, 0x66, 0x89, 0x0c, 0x45])
        .raw(&(AVAILABLE + 4).to_le_bytes())
        // inc bp; jmp 1b
        .raw(&[0x66, 0x45, 0xeb, (-39i8).to_le_bytes()[0]])
        // 2: lea eax, [ebp + AT_ONCE]; mov [available index], ax
        .raw(&[0x8d, 0x45, AT_ONCE, 0x66, 0xa3])
        .raw(&(AVAILABLE + 2).to_le_bytes())
        .store(QUEUE_NOTIFY, 0);
    Guest {
        code: sleep(code, awake).0,
        data: data.0,
    }
}

/// A guest that sleeps for good.
pub fn idler() -> Guest {
    Guest {
        code: Code::default().raw(&[0xfa, 0xf4, 0xeb, 0xfd]).0, // cli; 1: hlt; jmp 1b
        data: Vec::new(),
    }
}

/// Brings the device up (§3.1.1), with no feature but VERSION_1.
fn driver(code: Code) -> Code {
    let halves =
        |code: Code, register: u32, address: u32| code.store(register, address).store(register + 4, 0);
    let code = code
        .store(STATUS, 0)
        .store(STATUS, 1 | 2)
        .store(DRIVER_FEATURES_SEL, 1)
        .store(DRIVER_FEATURES, 1)
        .store(STATUS, 1 | 2 | 8)
        .store(QUEUE_SEL, 0)
        .store(QUEUE_NUM, SIZE.into());
    let code = halves(code, QUEUE_DESC, DESCRIPTORS);
    let code = halves(code, QUEUE_DRIVER, AVAILABLE);
    halves(code, QUEUE_DEVICE, USED)
        .store(QUEUE_READY, 1)
        .store(STATUS, 1 | 2 | 8 | 4)
}

/// Makes the next place of the ring available, and spins until all is used.
fn submit_and_wait(code: Code) -> Code {
    // inc word [available index]
    let code = code
        .raw(&[0x66, 0xff, 0x05])
        .raw(&(AVAILABLE + 2).to_le_bytes())
        .store(QUEUE_NOTIFY, 0);
    // 1: pause; mov ax, [available index]; cmp ax, [used index]; jne 1b
    code.raw(&[0xf3, 0x90, 0x66, 0xa1])
        .raw(&(AVAILABLE + 2).to_le_bytes())
        .raw(&[0x66, 0x3b, 0x05])
        .raw(&(USED + 2).to_le_bytes())
        .raw(&[0x75, (-17i8).to_le_bytes()[0]])
}

/// What is at [`DATA`].
struct Data(Vec<u8>);

impl Data {
    fn put(&mut self, address: u32, bytes: &[u8]) {
        let at = (address - DATA) as usize;
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A request in three descriptors from `3 * number`: what is asked and of which sector, and its data.
    fn request(&mut self, number: u16, (kind, sector): (u32, u64), (buffer, length): (u32, u32)) {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let header = HEADERS + 16 * u32::from(number);
        self.put(header, &kind.to_le_bytes());
        self.put(header + 8, &sector.to_le_bytes());
        // The device writes what is read.
        let data = if kind == 0 { WRITE } else { 0 };
        let descriptors = [
            (header, 16, NEXT),
            (buffer, length, NEXT | data),
            (STATUSES + u32::from(number), 1, WRITE),
        ];
        for (index, (address, length, flags)) in (3 * number..).zip(descriptors) {
            let at = DESCRIPTORS + 16 * u32::from(index);
            self.put(at, &u64::from(address).to_le_bytes());
            self.put(at + 8, &length.to_le_bytes());
            self.put(at + 12, &flags.to_le_bytes());
            self.put(at + 14, &(index + 1).to_le_bytes());
        }
    }
}
