//! An assembler for BPF programs: it needs no compiler and no object files.
//!
//! Invariant: jumps lead forward, to a named place, so every program ends. The kernel verifies the rest.

/// Registers: `R0` holds results, `R1` to `R5` arguments, which a call overwrites; a call keeps `R6` to `R9`. Below the address in `R10`
/// are 512 bytes of stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Register {
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
pub enum Size {
    Four = 0x00,
    Two = 0x08,
    One = 0x10,
    /// A pointer stored on the stack.
    Eight = 0x18,
}

/// When to jump: compares the low 32 bits, unsigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum When {
    Equal = 0x10,
    /// Any of these bits is set.
    Any = 0x40,
    NotEqual = 0x50,
    AtMost = 0xb0,
}

/// An operation on a register and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    Add = 0x00,
    And = 0x50,
    ShiftRight = 0x70,
    Xor = 0xa0,
}

/// Functions of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Helper {
    /// map, key: the address of its value, or 0.
    MapLookup = 1,
    /// packet, offset, old, new, flags.
    L4ChecksumReplace = 11,
    /// interface, flags.
    Redirect = 23,
    /// packet, offset, to, bytes.
    LoadBytes = 26,
    /// map, data, bytes, flags.
    RingbufOutput = 130,
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
pub struct Assembler {
    written: Vec<Instruction>,
    /// Jumps whose target is not placed yet.
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

    /// Sets a register to a number, its upper 32 bits to zero.
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

    /// Converts 32 bits from network byte order.
    pub fn host_order(&mut self, on: Register) {
        self.put(ALU | END_TO_BE, on as u8, 0, 0, 32);
    }

    /// Sets a register to a map, by its descriptor.
    pub fn load_map(&mut self, to: Register, number: i32) {
        // Two instructions long.
        self.put(LD | DOUBLE, to as u8, MAP_FD, 0, number);
        self.put(0, 0, 0, 0, 0);
    }

    /// Sets `R0` to the address of a map's entry, or to 0 if there is none. The key is the low 32 bits of a register, and stays in the
    /// uppermost word of the stack. `number` is the map's descriptor.
    pub fn look_up(&mut self, number: i32, key: Register) {
        self.store(Size::Four, Register::R10, -4, key);
        self.load_map(Register::R1, number);
        self.copy(Register::R2, Register::R10);
        self.operate(Operation::Add, Register::R2, -4);
        self.call(Helper::MapLookup);
    }

    /// Jumps if a register compares so with a number.
    pub fn jump_when(&mut self, register: Register, when: When, number: u32, label: &'static str) {
        self.open.push((self.written.len(), label));
        self.put(JMP32 | when as u8, register as u8, 0, 0, number as i32);
    }

    /// The same with another register.
    pub fn jump_when_register(
        &mut self,
        register: Register,
        when: When,
        other: Register,
        label: &'static str,
    ) {
        self.open.push((self.written.len(), label));
        self.put(
            JMP32 | when as u8 | BY_REGISTER,
            register as u8,
            other as u8,
            0,
            0,
        );
    }

    /// Jumps if a pointer is null.
    pub fn jump_when_null(&mut self, register: Register, label: &'static str) {
        self.open.push((self.written.len(), label));
        self.put(JMP | When::Equal as u8, register as u8, 0, 0, 0);
    }

    /// Jumps if a register, compared with all 64 bits, is above another.
    pub fn jump_when_above(&mut self, register: Register, other: Register, label: &'static str) {
        self.open.push((self.written.len(), label));
        self.put(JMP | JGT | BY_REGISTER, register as u8, other as u8, 0, 0);
    }

    pub fn jump(&mut self, label: &'static str) {
        self.open.push((self.written.len(), label));
        self.put(JMP | JA, 0, 0, 0, 0);
    }

    /// Earlier jumps to this name lead here.
    pub fn label(&mut self, name: &'static str) {
        let here = self.written.len();
        self.open.retain(|(at, label)| {
            if *label == name {
                // Programs here are of some hundred instructions.
                self.written[*at].offset = (here - at - 1) as i16;
            }
            *label != name
        });
    }

    pub fn call(&mut self, helper: Helper) {
        self.put(JMP | CALL, 0, 0, 0, helper as i32);
    }

    /// Ends the program; `R0` is its verdict.
    pub fn end(&mut self) {
        self.put(JMP | EXIT, 0, 0, 0, 0);
    }

    /// The instructions, for [`super::load`].
    pub fn finish(self) -> Vec<u64> {
        debug_assert!(self.open.is_empty(), "no label {:?}", self.open);
        self.written.into_iter().map(Instruction::word).collect()
    }
}

#[cfg(test)]
#[path = "assembler_test.rs"]
mod tests;
