//! Snapshots of what changed since another.

use super::support::Connection;
use super::*;

/// Where the guests below leave a page a generation: linear addresses from here.
pub(super) const STEPS: u32 = 2 * MIB as u32;

/// A guest that, each time its generation changes, checks every page it wrote before, writes one more, and prints a newline.
/// What it finds wrong resets it.
pub(super) fn stepping(prefix: Code) -> Code {
    let code = prefix
        // mov esi, GENERATION_ID; mov edi, STEPS; mov ebx, [esi]
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0xbf])
        .raw(&STEPS.to_le_bytes())
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY);
    let wait = code.0.len();
    let failure = Code::default().out(0x602, 1).0;
    // 1: cmp ebx, [esi]; je 1b; mov ebx, [esi]; mov ecx, STEPS
    code.raw(&[0x3b, 0x1e, 0x74, 0xfc, 0x8b, 0x1e, 0xb9])
        .raw(&STEPS.to_le_bytes())
        // 2: cmp ecx, edi; jae 3f
        .raw(&[0x39, 0xf9, 0x73, 12 + failure.len() as u8])
        // cmp [ecx], ecx; je +failure
        .raw(&[0x39, 0x09, 0x74, failure.len() as u8])
        .raw(&failure)
        // add ecx, 4096; jmp 2b
        .raw(&[
            0x81,
            0xc1,
            0,
            0x10,
            0,
            0,
            0xeb,
            (-(16 + failure.len() as i8)) as u8,
        ])
        // 3: mov [edi], edi; add edi, 4096
        .raw(&[0x89, 0x3f, 0x81, 0xc7, 0, 0x10, 0, 0])
        .print("\n")
        .repeat_from(wait)
}

/// Four-level paging in 32-bit compatibility mode: the first 2 MiB as they are, the second at guest-physical `high`.
fn paging(high: u64) -> (Code, Vec<u8>) {
    const LARGE_PAGE: u64 = 1 << 7;
    let mut tables = vec![0u8; 0x3000];
    let mut entry = |at: usize, value: u64| tables[at..at + 8].copy_from_slice(&(value | 3).to_le_bytes());
    entry(0, u64::from(DATA) + 0x1000);
    entry(0x1000, u64::from(DATA) + 0x2000);
    entry(0x2000, LARGE_PAGE);
    entry(0x2008, high | LARGE_PAGE);
    let code = Code::default()
        // cr4.PAE; cr3
        .raw(&[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0, 0xb8])
        .raw(&DATA.to_le_bytes())
        .raw(&[0x0f, 0x22, 0xd8])
        // EFER.LME
        .raw(&[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x0d, 0, 1, 0, 0, 0x0f, 0x30])
        // cr0.PG
        .raw(&[0x0f, 0x20, 0xc0, 0x0d, 0, 0, 0, 0x80, 0x0f, 0x22, 0xc0]);
    (code, tables)
}

/// Makes a delta of a paused clone of this snapshot. Returns it and its bytes of memory.
type MakeDelta = fn(&Snapshot, &Vmm, &mut Connection) -> (Snapshot, u64);

/// A delta of a clone of a full freeze, and then of a clone of each delta: every clone finds what all before it wrote. Returns how many layers
/// the last one has.
fn stacks(machine: MachineSpec, kernel: &File, make: MakeDelta) -> usize {
    let (vmm, mut control, _console) = paused_at(machine.clone(), kernel, STEPS_READY);
    let mut snapshot = Snapshot::full(&vmm, &mut control);
    for step in 0..3 {
        let (clone, mut control, mut console) = snapshot.thawed(machine.clone());
        assert_eq!(
            read_exactly(&mut console, 1),
            b"\n",
            "step {step}: {:?}",
            control.state()
        );
        control.request(Command::Pause, &[]).unwrap();
        let (delta, bytes) = make(&snapshot, &clone, &mut control);
        assert!(
            bytes > 0 && bytes < MIB,
            "step {step}: a delta of {bytes:#x} bytes"
        );
        // A full freeze of the same moment has the same memory.
        let full = Snapshot::full(&clone, &mut control);
        let (_vmm, _control, mut console) = full.thawed(machine.clone());
        assert_eq!(read_exactly(&mut console, 1), b"\n", "step {step}, in full");
        snapshot = delta;
    }
    let (_vmm, _control, mut console) = snapshot.thawed(machine);
    assert_eq!(read_exactly(&mut console, 1), b"\n");
    snapshot.layers.len()
}

#[test]
fn deltas_stack() {
    let kernel = stepping(Code::default()).kernel();
    assert_eq!(stacks(spec(1, 64), &kernel, Snapshot::delta), 4);
}

#[test]
fn deltas_over_the_lowest_layer_do_not_stack() {
    let kernel = stepping(Code::default()).kernel();
    let over_the_lowest: MakeDelta = |snapshot, vmm, control| snapshot.delta_over(1, vmm, control);
    assert_eq!(stacks(spec(1, 64), &kernel, over_the_lowest), 2);
}

#[test]
fn memory_above_the_hole_is_frozen_in_full_and_as_deltas() {
    let (code, data) = paging(4096 * MIB);
    let guest = Guest {
        code: stepping(code).0,
        data,
    };
    stacks(spec(1, 3074), &guest.kernel(), Snapshot::delta);
}

#[test]
fn a_delta_of_a_booted_machine_is_refused() {
    let (vmm, mut control, _console) = paused_at(spec(1, 64), &bare::bare(0).kernel(), READY);
    let refused = freeze(&vmm, &mut control, FreezeKind::Delta, &empty(), &empty()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Invalid);
    assert_eq!(control.state(), MachineState::Paused);
    Snapshot::full(&vmm, &mut control);
}
