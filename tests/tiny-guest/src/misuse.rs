//! A guest that resets every virtio device again and again, and each time sets it up wrongly: its first queue lies where
//! there is no memory.

use crate::{Code, Guest};

/// The first device's window, the distance to the next, and how many there are.
const WINDOWS: u32 = 0xd000_0000;
const WINDOW: u32 = 0x1000;
const DEVICES: u32 = 13;

/// At least `resets` resets in all; then it powers off.
pub fn misuse(resets: u32) -> Guest {
    let rounds = resets.div_ceil(DEVICES).max(1);
    // Registers of a window (virtio 1.2 §4.2.2), and what is written there.
    let writes: [(u32, u32); 9] = [
        // Reset; acknowledge and driver; VERSION_1; FEATURES_OK.
        (0x70, 0),
        (0x70, 3),
        (0x24, 1),
        (0x20, 1),
        (0x70, 11),
        // Descriptors of queue 0; ready; DRIVER_OK.
        (0x80, 0xffff_f000),
        (0x84, 0xff),
        (0x44, 1),
        (0x70, 15),
    ];
    // mov ecx, rounds
    let mut code = Code::default().raw(&[0xb9]).raw(&rounds.to_le_bytes());
    let outer = code.0.len();
    // 1: mov esi, WINDOWS
    code = code.raw(&[0xbe]).raw(&WINDOWS.to_le_bytes());
    let inner = code.0.len();
    for (register, value) in writes {
        // 2: mov dword [esi + register], value
        code = code
            .raw(&[0xc7, 0x86])
            .raw(&register.to_le_bytes())
            .raw(&value.to_le_bytes());
    }
    // add esi, WINDOW; cmp esi, end; jb 2b
    code = code
        .raw(&[0x81, 0xc6])
        .raw(&WINDOW.to_le_bytes())
        .raw(&[0x81, 0xfe])
        .raw(&(WINDOWS + DEVICES * WINDOW).to_le_bytes());
    let back = inner as i64 - (code.0.len() as i64 + 2);
    code = code.raw(&[0x72, (back as i8).to_le_bytes()[0]]);
    // dec ecx; jnz 1b
    code = code.raw(&[0x49]);
    let back = outer as i32 - (code.0.len() as i32 + 6);
    code = code.raw(&[0x0f, 0x85]).raw(&back.to_le_bytes());
    Guest {
        code: code.power_off().0,
        data: Vec::new(),
    }
}
