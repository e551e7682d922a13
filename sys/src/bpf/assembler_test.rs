use super::*;

/// Encodings from Linux's `samples/bpf`.
#[test]
#[cfg(target_endian = "little")]
fn instructions_are_written_as_the_kernel_reads_them() {
    let mut a = Assembler::default();
    a.copy(Register::R6, Register::R1);
    a.load(Size::Four, Register::R0, Register::R6, 16);
    a.jump_when(Register::R0, When::Equal, 8, "end");
    a.set(Register::R0, 2);
    a.label("end");
    a.end();
    let bytes: Vec<[u8; 8]> = a.finish().into_iter().map(u64::to_ne_bytes).collect();
    assert_eq!(
        bytes,
        [
            [0xbf, 0x16, 0, 0, 0, 0, 0, 0],
            [0x61, 0x60, 16, 0, 0, 0, 0, 0],
            [0x16, 0x00, 1, 0, 8, 0, 0, 0],
            [0xb4, 0x00, 0, 0, 2, 0, 0, 0],
            [0x95, 0, 0, 0, 0, 0, 0, 0],
        ]
    );
}
