//! The bare guest: what is frozen where a template needs no Linux, and proves that a clone runs.
//!
//! At boot it prints [`READY`]. Then it reads the VM generation ID until that is another than at boot, as it is after
//! every thaw; at once it prints a newline (the console writes whole lines, so this is the first byte seen), then the
//! new ID in hexadecimal ([`acknowledged`]), and halts for good. No device takes part but the console.

use crate::{Code, DATA, ENTRY, Guest};

/// Where the generation ID is: `layout::VMGENID_PAGE` of thaw-vmm.
pub const GENERATION_ID: u32 = 0xF_F000;
/// What it prints at boot.
pub const READY: &str = "bare\n";
/// All that it prints after a thaw, in bytes: newline, 32 digits, newline.
pub const ACKNOWLEDGEMENT: usize = 34;

const MIB: u32 = 1 << 20;

/// A bare guest that first writes a word to every page from 2 MiB up to `filled_mib`, so that its snapshot has that much
/// data; 0 for one of a few pages.
pub fn bare(filled_mib: u32) -> Guest {
    halted(hexadecimal(woken(filled_mib)).print("\n"))
}

/// As [`bare`], but it halts after the newline: for timing it, where a guest that goes on printing keeps whoever waits
/// for the first byte from the processor.
pub fn terse(filled_mib: u32) -> Guest {
    halted(woken(filled_mib))
}

/// As [`terse`], but then it reads a word of every page that it wrote, and prints another newline.
pub fn rereading(filled_mib: u32) -> Guest {
    // mov ebx, [edi]; the port and the newline are still there.
    halted(sweep(woken(filled_mib), [0x8b, 0x1f], filled_mib).raw(&[0xee]))
}

/// As [`bare`] with few pages, but all it prints after a thaw is the first byte of the new ID and a newline: for timing what
/// waits for its acknowledgement, since each byte it prints leaves the guest.
pub fn concise() -> Guest {
    halted(digits(changed(0)).print("\n"))
}

/// As [`bare`] with few pages, but it powers off a moment after its acknowledgement: 2^30 ticks of the time stamp counter.
pub fn brief() -> Guest {
    let code = hexadecimal(woken(0)).print("\n");
    // rdtsc; mov ebx, eax; 1: rdtsc; sub eax, ebx; test eax, 1 << 30; jz 1b
    let code = code
        .raw(&[0x0f, 0x31, 0x89, 0xc3])
        .raw(&[0x0f, 0x31, 0x29, 0xd8, 0xa9, 0, 0, 0, 0x40, 0x74, 0xf5]);
    halted(code.power_off())
}

/// As [`brief`], but what it does a moment after its acknowledgement, twice as long, is a triple fault.
pub fn crashed() -> Guest {
    // ud2, without an interrupt table.
    halted(later(&[0x0f, 0x0b]))
}

/// The same, but it says that it panics, and resets its machine, as Linux does.
pub fn panicked() -> Guest {
    let end = Code::default().print(PANIC).print("\n").out(0x64, 0xfe);
    halted(later(&end.0))
}

/// What [`panicked`] prints last.
pub const PANIC: &str = "Kernel panic - not syncing: told to";

/// The same, but it writes to each page it has from 2 MiB up to `filled_mib`.
pub fn hungry(filled_mib: u32) -> Guest {
    halted(later(&fill(Code::default(), filled_mib).0))
}

/// Acknowledges, and does the rest after 2^31 ticks of the time stamp counter.
fn later(rest: &[u8]) -> Code {
    let code = hexadecimal(woken(0)).print("\n");
    // rdtsc; mov ebx, eax; 1: rdtsc; sub eax, ebx; test eax, 1 << 31; jz 1b
    let code = code
        .raw(&[0x0f, 0x31, 0x89, 0xc3])
        .raw(&[0x0f, 0x31, 0x29, 0xd8, 0xa9, 0, 0, 0, 0x80, 0x74, 0xf5]);
    code.raw(rest)
}

/// As [`bare`] with few pages, but after its acknowledgement it computes for ever, with interrupts off.
pub fn spinning() -> Guest {
    // cli; 1: jmp 1b
    let code = hexadecimal(woken(0)).print("\n").raw(&[0xfa, 0xeb, 0xfe]);
    Guest {
        code: code.0,
        data: Vec::new(),
    }
}

/// As [`bare`] with few pages, but it acknowledges every thaw, not the first alone. In between it sleeps: the interrupt that
/// tells of a new generation ID wakes it.
pub fn lasting() -> Guest {
    lasting_filled(0)
}

/// As [`lasting`], but it first fills its memory as [`bare`] does.
pub fn lasting_filled(filled_mib: u32) -> Guest {
    lasting_and(filled_mib, Code::default())
}

/// As [`lasting_filled`], but after each acknowledgement it reads every page that it filled. Where one is not as it was filled, it is a
/// triple fault.
pub fn checking(filled_mib: u32) -> Guest {
    // mov edi, 2 MiB; 1: cmp [edi], edi; jne 2f; add edi, 4096; cmp edi, end; jb 1b; jmp 3f; 2: ud2; 3:
    let check = Code::default()
        .raw(&[0xbf])
        .raw(&(2 * MIB).to_le_bytes())
        .raw(&[0x39, 0x3f, 0x75, 0x10, 0x81, 0xc7])
        .raw(&4096u32.to_le_bytes())
        .raw(&[0x81, 0xff])
        .raw(&(filled_mib * MIB).to_le_bytes())
        .raw(&[0x72, (-18i8).to_le_bytes()[0], 0xeb, 0x02, 0x0f, 0x0b]);
    lasting_and(filled_mib, check)
}

/// As [`lasting_filled`], and does this after each acknowledgement.
fn lasting_and(filled_mib: u32, then: Code) -> Guest {
    let (setup, data) = asleep(GENERATION_GSI);
    let setup = fill(setup, filled_mib);
    // mov esi, GENERATION_ID; mov ebx, [esi]; mov ecx, [esi+4]
    let code = setup
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x1e, 0x8b, 0x4e, 0x04]);
    let start = code.0.len();
    let code = code.print(READY);
    // Where the interrupt goes on: nothing of what it interrupts is needed.
    let awake = code.0.len();
    let code = code
        // 1: cli; cmp ebx, [esi]; jne 2f; cmp ecx, [esi+4]; jne 2f; sti; hlt; jmp 1b; 2: out dx, al
        .raw(&[0xfa, 0x3b, 0x1e, 0x75, 0x09, 0x3b, 0x4e, 0x04, 0x75, 0x04])
        .raw(&[0xfb, 0xf4, 0xeb, (-14i8).to_le_bytes()[0]])
        .raw(&[0xee])
        // mov ebx, [esi]; mov ecx, [esi+4]; push ebx; push ecx: kept before the ID is printed, so that a thaw of what is frozen
        // meanwhile is acknowledged too.
        .raw(&[0x8b, 0x1e, 0x8b, 0x4e, 0x04, 0x53, 0x51]);
    let code = interrupt_to(code, awake);
    Guest {
        // pop ecx; pop ebx; mov esi, GENERATION_ID
        code: hexadecimal(code)
            .print("\n")
            .raw(&then.0)
            .raw(&[0x59, 0x5b, 0xbe])
            .raw(&GENERATION_ID.to_le_bytes())
            .repeat_from(start)
            .0,
        data,
    }
}

/// The interrupt of a new generation ID: `layout::GED_GSI` of thaw-vmm.
const GENERATION_GSI: u32 = 19;
/// The vector it gets here.
const VECTOR: u8 = 0x20;
/// Where the handler's code ends.
const HANDLER_END: usize = 2 + 20;
/// Registers of the interrupt controllers, where PCs have them.
const IOAPIC: u32 = 0xFEC0_0000;
const LAPIC: u32 = 0xFEE0_0000;
/// Within [`crate::DATA`]: segments, the interrupt table, and what the two registers are loaded from.
const SEGMENTS: u32 = DATA;
const GATES: u32 = DATA + 0x100;
const POINTERS: u32 = DATA + 0x300;

/// Code after which the interrupt of `gsi` wakes a halted processor and does nothing else, and the tables for that, as
/// [`Guest::data`]. It goes on where [`sleep`] says.
pub(crate) fn asleep(gsi: u32) -> (Code, Vec<u8>) {
    // At the entry: jmp over the handler, which is at ENTRY + 2: mov dword [EOI], 0; mov esp, 0x80000; jmp, where to is put
    // in once it is known.
    let handler = Code::default().store(LAPIC + 0xb0, 0);
    let handler = handler.raw(&[0xbc, 0, 0, 8, 0]).raw(&[0xe9, 0, 0, 0, 0]);
    let code = Code::default()
        .raw(&[0xeb, handler.0.len() as u8])
        .raw(&handler.0);
    assert_eq!(code.0.len(), HANDLER_END);
    // lgdt; lidt; mov esp, 0x80000
    let code = code
        .raw(&[0x0f, 0x01, 0x15])
        .raw(&POINTERS.to_le_bytes())
        .raw(&[0x0f, 0x01, 0x1d])
        .raw(&(POINTERS + 8).to_le_bytes())
        .raw(&[0xbc, 0, 0, 8, 0]);
    // jmp 8:next, so that an interrupt returns to a segment that is there.
    let next = ENTRY + code.0.len() as u32 + 7;
    let code = code.raw(&[0xea]).raw(&next.to_le_bytes()).raw(&[8, 0]);
    // The spurious vector, with the bit that enables; LINT0 masked: KVM's PIC has the first pins too, and has no vectors. The
    // pin's entry: to processor 0, edge, this vector.
    let pin = 0x10 + 2 * gsi;
    let code = code
        .store(LAPIC + 0xf0, 0x1ff)
        .store(LAPIC + 0x350, 1 << 16)
        .store(IOAPIC, pin + 1)
        .store(IOAPIC + 0x10, 0)
        .store(IOAPIC, pin)
        .store(IOAPIC + 0x10, VECTOR.into());

    let mut data = vec![0u8; (POINTERS - DATA) as usize + 16];
    let mut put = |address: u32, bytes: &[u8]| {
        let at = (address - DATA) as usize;
        data[at..at + bytes.len()].copy_from_slice(bytes);
    };
    // None, code, data: flat.
    put(SEGMENTS + 8, &0x00cf_9b00_0000_ffffu64.to_le_bytes());
    put(SEGMENTS + 16, &0x00cf_9300_0000_ffffu64.to_le_bytes());
    let [a, b, c, d] = (ENTRY + 2).to_le_bytes();
    put(GATES + 8 * u32::from(VECTOR), &[a, b, 8, 0, 0, 0x8e, c, d]);
    let pointer = |limit: u16, address: u32| [&limit.to_le_bytes()[..], &address.to_le_bytes()].concat();
    put(POINTERS, &pointer(23, SEGMENTS));
    put(POINTERS + 8, &pointer(8 * (u16::from(VECTOR) + 1) - 1, GATES));
    (code, data)
}

/// Sleeps until the interrupt of [`asleep`] comes, and goes on at `awake` with interrupts off.
pub(crate) fn sleep(code: Code, awake: usize) -> Code {
    // sti; hlt
    interrupt_to(code.raw(&[0xfb, 0xf4]).repeat_from(awake), awake)
}

/// Has the handler go on at `awake`.
fn interrupt_to(mut code: Code, awake: usize) -> Code {
    let distance = awake as i32 - HANDLER_END as i32;
    code.0[HANDLER_END - 4..HANDLER_END].copy_from_slice(&distance.to_le_bytes());
    code
}

/// The guest up to its first byte after a thaw.
fn woken(filled_mib: u32) -> Code {
    // out dx, al: port and newline are still there from READY, so that nothing but this stands before the first byte.
    changed(filled_mib).raw(&[0xee])
}

/// The guest until the generation ID is another than at boot.
fn changed(filled_mib: u32) -> Code {
    let code = fill(Code::default(), filled_mib)
        // mov esi, GENERATION_ID
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        // mov ebx, [esi]; mov ecx, [esi+4]: before anything is printed, since a freeze may follow at once.
        .raw(&[0x8b, 0x1e, 0x8b, 0x4e, 0x04])
        .print(READY);
    // 1: cmp ebx, [esi]; jne 2f; cmp ecx, [esi+4]; je 1b; 2: eight bytes of sixteen differ in any two IDs that exist.
    code.raw(&[0x3b, 0x1e, 0x75, 0x05])
        .raw(&[0x3b, 0x4e, 0x04, 0x74, (-9i8).to_le_bytes()[0]])
}

fn halted(code: Code) -> Guest {
    Guest {
        code: code.raw(&[0xfa, 0xf4, 0xeb, 0xfd]).0, // cli; 1: hlt; jmp 1b
        data: Vec::new(),
    }
}

/// Writes each page's address to it.
fn fill(code: Code, filled_mib: u32) -> Code {
    // mov [edi], edi
    sweep(code, [0x89, 0x3f], filled_mib)
}

/// Does `access`, whose address is in EDI, to every page from 2 MiB up to `end_mib`.
fn sweep(code: Code, access: [u8; 2], end_mib: u32) -> Code {
    if end_mib <= 2 {
        return code;
    }
    // mov edi, 2 MiB; 1: ACCESS; add edi, 4096; cmp edi, end; jb 1b
    code.raw(&[0xbf])
        .raw(&(2 * MIB).to_le_bytes())
        .raw(&access)
        .raw(&[0x81, 0xc7])
        .raw(&4096u32.to_le_bytes())
        .raw(&[0x81, 0xff])
        .raw(&(end_mib * MIB).to_le_bytes())
        .raw(&[0x72, (-16i8).to_le_bytes()[0]])
}

/// Prints the 16 bytes at ESI in hexadecimal, to the port in DX.
fn hexadecimal(code: Code) -> Code {
    // mov ecx, 16
    let code = code.raw(&[0xb9, 16, 0, 0, 0]);
    let start = code.0.len();
    // inc esi; dec ecx; jnz
    let code = digits(code).raw(&[0x46, 0x49]);
    let back = start as i64 - (code.0.len() as i64 + 2);
    code.raw(&[0x75, (back as i8).to_le_bytes()[0]])
}

/// Prints the byte at ESI in hexadecimal, to the port in DX.
fn digits(code: Code) -> Code {
    // add al, '0'; cmp al, '9' + 1; jb +2; add al, 'a' - '9' - 1; out dx, al
    let digit = [0x04, 0x30, 0x3c, 0x3a, 0x72, 0x02, 0x04, 0x27, 0xee];
    // mov al, [esi]; shr al, 4; DIGIT; mov al, [esi]; and al, 15; DIGIT
    code.raw(&[0x8a, 0x06, 0xc0, 0xe8, 0x04])
        .raw(&digit)
        .raw(&[0x8a, 0x06, 0x24, 0x0f])
        .raw(&digit)
}

/// The generation ID a clone printed; none when `printed` is not all of it.
pub fn acknowledged(printed: &[u8]) -> Option<[u8; 16]> {
    let digits = printed.strip_prefix(b"\n")?.strip_suffix(b"\n")?;
    let mut id = [0; 16];
    if digits.len() != 2 * id.len() {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acknowledgement_is_sixteen_bytes_between_newlines() {
        let line = b"\n000102030405060708090a0b0c0d0eff\n";
        assert_eq!(line.len(), ACKNOWLEDGEMENT);
        let id = acknowledged(line).expect("it is whole");
        assert_eq!((id[1], id[15]), (1, 255));
        for cut in [
            &line[1..],
            &line[..33],
            b"\n00\n",
            b"\nzz0102030405060708090a0b0c0d0eff\n",
        ] {
            assert_eq!(acknowledged(cut), None);
        }
    }
}
