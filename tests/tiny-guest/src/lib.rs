//! Tiny guests: a PVH ELF around a few instructions, which are entered in 32-bit protected mode at 1 MiB.
//!
//! For tests and benchmarks: what cannot be put together panics.

pub mod bare;
pub mod disk;
pub mod hotplug;
pub mod misuse;

use std::fs::File;
use std::io::Write;

/// Where the code is loaded and entered.
pub const ENTRY: u32 = 0x10_0000;
/// Where [`Guest::data`] is loaded.
pub const DATA: u32 = 0x10_1000;

/// Instructions put together one by one.
#[derive(Clone, Default)]
pub struct Code(pub Vec<u8>);

impl Code {
    /// Machine code as it is.
    pub fn raw(mut self, bytes: &[u8]) -> Code {
        self.0.extend_from_slice(bytes);
        self
    }

    /// `out` of one byte.
    pub fn out(self, port: u16, value: u8) -> Code {
        let [low, high] = port.to_le_bytes();
        self.raw(&[0x66, 0xba, low, high, 0xb0, value, 0xee])
    }

    /// Each byte of `text` to the console's data register.
    pub fn print(self, text: &str) -> Code {
        text.bytes().fold(self, |code, byte| code.out(0x3f8, byte))
    }

    /// ACPI S5.
    pub fn power_off(self) -> Code {
        self.out(0x600, 5 << 2 | 1 << 5)
    }

    /// `mov dword [address], value`
    pub fn store(self, address: u32, value: u32) -> Code {
        self.raw(&[0xc7, 0x05])
            .raw(&address.to_le_bytes())
            .raw(&value.to_le_bytes())
    }

    /// Resets the machine unless the word at `address` is `value`.
    pub fn expect(self, address: u32, value: u32) -> Code {
        let failure = Code::default().out(0x602, 1);
        let skip = failure.0.len() as u8;
        self.raw(&[0xa1])
            .raw(&address.to_le_bytes())
            .raw(&[0x3d])
            .raw(&value.to_le_bytes())
            .raw(&[0x74, skip])
            .raw(&failure.0)
    }

    /// Again from `start`, for ever.
    pub fn repeat_from(self, start: usize) -> Code {
        let distance = start as i32 - (self.0.len() as i32 + 5);
        self.raw(&[0xe9]).raw(&distance.to_le_bytes())
    }

    /// A kernel file of this code alone.
    pub fn kernel(self) -> File {
        Guest {
            code: self.0,
            data: Vec::new(),
        }
        .kernel()
    }
}

/// Code, and data at [`DATA`].
pub struct Guest {
    pub code: Vec<u8>,
    pub data: Vec<u8>,
}

impl Guest {
    /// A kernel file of it.
    pub fn kernel(&self) -> File {
        memfd(&self.image())
    }

    /// What is in such a file.
    pub fn image(&self) -> Vec<u8> {
        let size = DATA as usize - ENTRY as usize + self.data.len();
        self.elf(size as u64, true)
    }

    /// The ELF: header, a loaded segment of `memory_size`, and with `note`, the PVH note.
    pub fn elf(&self, memory_size: u64, note: bool) -> Vec<u8> {
        let mut segment = self.code.clone();
        assert!(segment.len() <= (DATA - ENTRY) as usize);
        if !self.data.is_empty() {
            segment.resize((DATA - ENTRY) as usize, 0);
            segment.extend_from_slice(&self.data);
        }
        let headers = if note { 2u16 } else { 1 };
        let note_at = 64 + 56 * u64::from(headers);
        let pvh_note = pvh_note();
        let segment_at = note_at + pvh_note.len() as u64;

        let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for half in [2u16, 62] {
            elf.extend(half.to_le_bytes());
        }
        elf.extend(1u32.to_le_bytes());
        for word in [u64::from(ENTRY), 64, 0] {
            elf.extend(word.to_le_bytes());
        }
        elf.extend(0u32.to_le_bytes());
        for half in [64u16, 56, headers, 0, 0, 0] {
            elf.extend(half.to_le_bytes());
        }
        program_header(
            &mut elf,
            1,
            segment_at,
            ENTRY.into(),
            segment.len() as u64,
            memory_size,
        );
        if note {
            program_header(
                &mut elf,
                4,
                note_at,
                0,
                pvh_note.len() as u64,
                pvh_note.len() as u64,
            );
        }
        elf.extend(pvh_note);
        elf.extend(segment);
        elf
    }
}

fn program_header(elf: &mut Vec<u8>, kind: u32, offset: u64, address: u64, in_file: u64, in_memory: u64) {
    elf.extend(kind.to_le_bytes());
    elf.extend(7u32.to_le_bytes());
    for word in [offset, address, address, in_file, in_memory, 4096] {
        elf.extend(word.to_le_bytes());
    }
}

/// XEN_ELFNOTE_PHYS32_ENTRY.
fn pvh_note() -> Vec<u8> {
    let mut note = Vec::new();
    for word in [4u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(ENTRY.to_le_bytes());
    note
}

/// A file of `bytes` in memory.
pub fn memfd(bytes: &[u8]) -> File {
    let fd = rustix::fs::memfd_create("kernel", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd_create");
    let mut file = File::from(fd);
    file.write_all(bytes).expect("room for a memfd");
    file
}
