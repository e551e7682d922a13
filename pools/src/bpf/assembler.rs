//! Programs of the kernel's instruction set (BPF), put together here: no compiler, no object files.
//!
//! Invariants: jumps lead forward, to a place that is named; so every program ends. The kernel verifies the rest.

/// Registers: `R0` is an answer, `R1` to `R5` are arguments, which a call destroys, `R6` to `R9` stay. Below where `R10` leads
/// are 512 bytes of stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Register {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
}

/// Bytes of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Size {
    Four = 0x00,
    Two = 0x08,
    One = 0x10,
    /// A pointer that is kept on the stack.
    Eight = 0x18,
}

/// When to jump: of the low 32 bits, without sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum When {
    Equal = 0x10,
    /// Any of these bits is set.
    Any = 0x40,
    NotEqual = 0x50,
    AtMost = 0xb0,
}

/// What is done with a register and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    Add = 0x00,
    And = 0x50,
    ShiftRight = 0x70,
    Xor = 0xa0,
}

/// Functions of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Helper {
    /// map, key: the address of its value, or 0.
    MapLookup = 1,
    /// packet, offset, old, new, flags.
    L4ChecksumReplace = 11,
    /// interface, flags.
    Redirect = 23,
    /// packet, offset, to, bytes.
    LoadBytes = 26,
    RedirectPeer = 155,
}

// Classes, sources and modes: include/uapi/linux/bpf{,_common}.h
const LD: u8 = 0x00;
const LDX: u8 = 0x01;
const ST: u8 = 0x02;
const STX: u8 = 0x03;
const ALU: u8 = 0x04;
const JMP: u8 = 0x05;
const JMP32: u8 = 0x06;
const ALU64: u8 = 0x07;
const DOUBLE: u8 = 0x18;
const MEM: u8 = 0x60;
const BY_REGISTER: u8 = 0x08;
const MOV: u8 = 0xb0;
const END_TO_BE: u8 = 0xd0 | 0x08;
const JA: u8 = 0x00;
const JGT: u8 = 0x20;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;
const MAP_FD: u8 = 1;

/// A program being written.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    written: Vec<Instruction>,
    /// Jumps whose place is yet to come.
    open: Vec<(usize, &'static str)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u8,
    to: u8,
    from: u8,
    offset: i16,
    number: i32,
}

impl Instruction {
    /// `struct bpf_insn`.
    fn word(self) -> u64 {
        let registers = match cfg!(target_endian = "little") {
            true => self.to | self.from << 4,
            false => self.from | self.to << 4,
        };
        let [a, b] = self.offset.to_ne_bytes();
        let [c, d, e, f] = self.number.to_ne_bytes();
        u64::from_ne_bytes([self.code, registers, a, b, c, d, e, f])
    }
}

impl Assembler {
    fn put(&mut self, code: u8, to: u8, from: u8, offset: i16, number: i32) {
        self.written.push(Instruction {
            code,
            to,
            from,
            offset,
            number,
        });
    }

    pub fn copy(&mut self, to: Register, from: Register) {
        self.put(ALU64 | MOV | BY_REGISTER, to as u8, from as u8, 0, 0);
    }

    /// Sets all of a register to 32 bits.
    pub fn set(&mut self, to: Register, number: u32) {
        self.put(ALU | MOV, to as u8, 0, 0, number as i32);
    }

    pub fn load(&mut self, size: Size, to: Register, from: Register, offset: i16) {
        self.put(LDX | MEM | size as u8, to as u8, from as u8, offset, 0);
    }

    pub fn store(&mut self, size: Size, to: Register, offset: i16, from: Register) {
        self.put(STX | MEM | size as u8, to as u8, from as u8, offset, 0);
    }

    pub fn store_number(&mut self, size: Size, to: Register, offset: i16, number: u32) {
        self.put(ST | MEM | size as u8, to as u8, 0, offset, number as i32);
    }

    pub fn operate(&mut self, operation: Operation, on: Register, number: i32) {
        self.put(ALU64 | operation as u8, on as u8, 0, 0, number);
    }

    pub fn add(&mut self, to: Register, from: Register) {
        self.put(
            ALU64 | Operation::Add as u8 | BY_REGISTER,
            to as u8,
            from as u8,
            0,
            0,
        );
    }

    /// From the byte order of the network, 32 bits.
    pub fn host_order(&mut self, on: Register) {
        self.put(ALU | END_TO_BE, on as u8, 0, 0, 32);
    }

    /// Has `R0` be the address of a map's entry, or 0 where it has none; the key, 32 bits of a register, is left in the uppermost
    /// word of the stack. `number` is the map's descriptor.
    pub fn look_up(&mut self, number: i32, key: Register) {
        self.store(Size::Four, Register::R10, -4, key);
        self.put(LD | DOUBLE, Register::R1 as u8, MAP_FD, 0, number);
        self.put(0, 0, 0, 0, 0);
        self.copy(Register::R2, Register::R10);
        self.operate(Operation::Add, Register::R2, -4);
        self.call(Helper::MapLookup);
    }

    /// Jumps where a register, 32 bits of it, compares so with a number.
    pub fn jump_when(&mut self, register: Register, when: When, number: u32, place: &'static str) {
        self.open.push((self.written.len(), place));
        self.put(JMP32 | when as u8, register as u8, 0, 0, number as i32);
    }

    /// The same with another register.
    pub fn jump_when_register(
        &mut self,
        register: Register,
        when: When,
        other: Register,
        place: &'static str,
    ) {
        self.open.push((self.written.len(), place));
        self.put(
            JMP32 | when as u8 | BY_REGISTER,
            register as u8,
            other as u8,
            0,
            0,
        );
    }

    /// Jumps where a pointer is none.
    pub fn jump_when_null(&mut self, register: Register, place: &'static str) {
        self.open.push((self.written.len(), place));
        self.put(JMP | When::Equal as u8, register as u8, 0, 0, 0);
    }

    /// Jumps where a register is above another.
    pub fn jump_when_above(&mut self, register: Register, other: Register, place: &'static str) {
        self.open.push((self.written.len(), place));
        self.put(JMP | JGT | BY_REGISTER, register as u8, other as u8, 0, 0);
    }

    pub fn jump(&mut self, place: &'static str) {
        self.open.push((self.written.len(), place));
        self.put(JMP | JA, 0, 0, 0, 0);
    }

    /// Jumps of that name that came before lead here.
    pub fn place(&mut self, name: &'static str) {
        let here = self.written.len();
        self.open.retain(|(at, place)| {
            if *place == name {
                // Programs here are of some hundred instructions.
                self.written[*at].offset = (here - at - 1) as i16;
            }
            *place != name
        });
    }

    pub fn call(&mut self, helper: Helper) {
        self.put(JMP | CALL, 0, 0, 0, helper as i32);
    }

    /// Ends the program; `R0` is its verdict.
    pub fn end(&mut self) {
        self.put(JMP | EXIT, 0, 0, 0, 0);
    }

    /// As the kernel takes it.
    pub fn finish(self) -> Vec<u64> {
        debug_assert!(self.open.is_empty(), "no place {:?}", self.open);
        self.written.into_iter().map(Instruction::word).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Linux's `samples/bpf` have them.
    #[test]
    #[cfg(target_endian = "little")]
    fn instructions_are_written_as_the_kernel_reads_them() {
        let mut a = Assembler::default();
        a.copy(Register::R6, Register::R1);
        a.load(Size::Four, Register::R0, Register::R6, 16);
        a.jump_when(Register::R0, When::Equal, 8, "end");
        a.set(Register::R0, 2);
        a.place("end");
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
}
