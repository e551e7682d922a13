//! What vCPUs are after a thaw: all of them, in time, with the registers they had.

use super::refusals::{refuse, sealed};
use super::*;

/// The boot vCPU waits for a generation if `late`, wakes the others, which count themselves and wait for the next one;
/// when all have counted, it says [`STEPS_READY`]. At the next generation the others count themselves again and halt; when
/// all have, it prints a newline.
fn companions(vcpus: u8, late: bool) -> Guest {
    const TRAMPOLINE: u32 = 0x8000;
    const COUNT: u32 = 0x9000;
    // 16-bit: mov ax, 0xf000; mov ds, ax; mov bx, [0xf000]; lock inc byte es:[COUNT]; 1: cmp bx, [0xf000]; je 1b;
    // lock inc byte es:[COUNT]; cli; 2: hlt; jmp 2b
    let trampoline = [
        &[0xb8, 0x00, 0xf0, 0x8e, 0xd8, 0x8b, 0x1e, 0x00, 0xf0][..],
        &[0x26, 0xf0, 0xfe, 0x06, 0x00, 0x90],
        &[0x3b, 0x1e, 0x00, 0xf0, 0x74, 0xfa],
        &[0x26, 0xf0, 0xfe, 0x06, 0x00, 0x90],
        &[0xfa, 0xf4, 0xeb, 0xfd],
    ]
    .concat();
    let count_to = |code: Code, count: u8| {
        // 1: cmp byte [COUNT], count; jne 1b
        code.raw(&[0x80, 0x3d])
            .raw(&COUNT.to_le_bytes())
            .raw(&[count, 0x75, 0xf7])
    };
    // mov ebp, GENERATION_ID; mov ebx, [ebp]
    let code = Code::default()
        .raw(&[0xbd])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x5d, 0x00]);
    // 1: cmp ebx, [ebp]; je 1b; mov ebx, [ebp]
    let wait = [0x3b, 0x5d, 0x00, 0x74, 0xfb, 0x8b, 0x5d, 0x00];
    let code = match late {
        true => code.print(STEPS_READY).raw(&wait),
        false => code,
    };
    // mov esi, DATA; mov edi, TRAMPOLINE; mov ecx, length; cld; rep movsb
    let code = code
        .raw(&[0xbe])
        .raw(&DATA.to_le_bytes())
        .raw(&[0xbf])
        .raw(&TRAMPOLINE.to_le_bytes())
        .raw(&[0xb9])
        .raw(&(trampoline.len() as u32).to_le_bytes())
        .raw(&[0xfc, 0xf3, 0xa4])
        // The local APIC's interrupt command: INIT, then SIPI, to all but self.
        .store(0xfee0_0300, 0x000c_4500)
        .store(0xfee0_0300, 0x000c_4600 | TRAMPOLINE >> 12);
    let code = count_to(code, vcpus - 1);
    let code = match late {
        true => code.print("\n"),
        false => count_to(code.print(STEPS_READY).raw(&wait), 2 * (vcpus - 1)).print("\n"),
    };
    let end = code.0.len();
    Guest {
        code: code.repeat_from(end).0,
        data: trampoline,
    }
}

#[test]
fn every_vcpu_continues_and_idle_ones_can_be_woken() {
    for (vcpus, late) in [(2, false), (4, false), (2, true), (4, true), (16, true)] {
        let machine = spec(vcpus, 64);
        let kernel = companions(vcpus, late).kernel();
        let (vmm, mut control, _console) = paused_at(machine.clone(), &kernel, STEPS_READY);
        let snapshot = Snapshot::full(&vmm, &mut control);
        for _ in 0..3 {
            let (_vmm, _control, mut console) = snapshot.thawed(machine.clone());
            assert_eq!(
                read_exactly(&mut console, 1),
                b"\n",
                "{vcpus} vCPUs, late: {late}"
            );
        }
    }
}

/// Prints its TSC; then reads it until the generation changes, and prints what lay between the last two readings. Each
/// time sixteen hexadecimal digits.
fn clockwatching() -> Code {
    let digit = [0x04, 0x30, 0x3c, 0x3a, 0x72, 0x02, 0x04, 0x27];
    // For each half: mov ecx, 8; 1: rol HALF, 4; mov eax, HALF; and al, 15; DIGIT; mov dx, 0x3f8; out dx, al
    let half = |code: Code, rol: [u8; 3], mov: [u8; 2]| {
        let body = [
            &rol[..],
            &mov,
            &[0x24, 0x0f],
            &digit,
            &[0x66, 0xba, 0xf8, 0x03, 0xee, 0x49],
        ]
        .concat();
        code.raw(&[0xb9, 8, 0, 0, 0])
            .raw(&body)
            .raw(&[0x75, (-(body.len() as i8 + 2)) as u8])
    };
    // mov edi, eax; mov ebp, edx; then EBP, EDI
    let print = |code: Code| {
        let code = half(code.raw(&[0x89, 0xc7, 0x89, 0xd5]), [0xc1, 0xc5, 4], [0x89, 0xe8]);
        half(code, [0xc1, 0xc7, 4], [0x89, 0xf8]).print("\n")
    };
    // rdtsc
    let code = print(Code::default().raw(&[0x0f, 0x31]))
        // mov esi, GENERATION_ID; mov ebx, [esi]
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY)
        // rdtsc; 1: mov edi, eax; mov ebp, edx; rdtsc; cmp ebx, [esi]; je 1b; sub eax, edi; sbb edx, ebp
        .raw(&[
            0x0f, 0x31, 0x89, 0xc7, 0x89, 0xd5, 0x0f, 0x31, 0x3b, 0x1e, 0x74, 0xf6,
        ])
        .raw(&[0x29, 0xf8, 0x19, 0xea]);
    let code = print(code);
    let end = code.0.len();
    code.repeat_from(end)
}

fn tsc() -> u64 {
    // SAFETY: rdtsc has no preconditions on x86-64.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[test]
fn a_machine_that_was_parked_sees_no_jump_in_time() {
    let number = |console: &mut File| {
        let line = String::from_utf8(read_exactly(console, 17)).unwrap();
        u64::from_str_radix(line.trim_end(), 16).unwrap()
    };
    let before_boot = tsc();
    let (vmm, mut control, mut console) = started(spec(1, 64), &clockwatching().kernel());
    let booted = number(&mut console);
    read_exactly(&mut console, STEPS_READY.len());
    control.request(Command::Pause, &[]).unwrap();
    let snapshot = Snapshot::full(&vmm, &mut control);
    let after_freeze = tsc();
    let (_vmm, mut control, mut console) = snapshot.parked(spec(1, 64));
    // Long beside what it is awake; were it not, the test would only be less strict.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let before_thaw = tsc();
    thaw(&mut control).unwrap();
    let gap = number(&mut console);
    // Its last time before the freeze may be from long before the pause, on a busy host.
    let ran = (after_freeze - before_boot) + (tsc() - before_thaw);
    assert!(gap > 0);
    if booted >= before_boot {
        thaw_test_skip::skip("this host's KVM shows guests the host's own TSC");
        return;
    }
    // Guest time ran between the boot and the freeze, and after the thaw only.
    assert!(
        gap <= ran,
        "the guest saw {gap} cycles pass; it was awake for {ran}"
    );
}

/// Says which x86-64 level's registers it is told of: a digit, 3 with AVX2 (CPUID leaf 7, EBX bit 5), else 2; at boot
/// and when its generation changes.
fn avx2_teller() -> Code {
    // mov eax, 7; xor ecx, ecx; cpuid; shr ebx, 5; and bl, 1; add bl, '2'; mov al, bl; mov dx, 0x3f8; out dx, al
    let tell = |code: Code| {
        code.raw(&[0xb8, 7, 0, 0, 0, 0x31, 0xc9, 0x0f, 0xa2, 0xc1, 0xeb, 5])
            .raw(&[
                0x80, 0xe3, 1, 0x80, 0xc3, b'2', 0x88, 0xd8, 0x66, 0xba, 0xf8, 0x03, 0xee,
            ])
            .print("\n")
    };
    let code = tell(Code::default())
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        // mov ebx, [esi]; 1: cmp ebx, [esi]; je 1b
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY)
        .raw(&[0x3b, 0x1e, 0x74, 0xfc]);
    let code = tell(code);
    let end = code.0.len();
    code.repeat_from(end)
}

/// Whether a machine of the least baseline can be had here; one that cannot is refused by name.
fn has_v2() -> bool {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    let low = MachineSpec {
        cpu: CpuBaseline::V2,
        ..spec(1, 64)
    };
    match control.create(low) {
        Ok(_) => true,
        Err(refused) => {
            assert_eq!(refused.code, ErrorCode::Incompatible, "{refused}");
            assert!(refused.message.contains("x86-64-v2"), "{refused}");
            assert_eq!(control.state(), MachineState::NoMachine);
            control.create(spec(1, 64)).unwrap();
            false
        }
    }
}

#[test]
fn machine_keeps_its_lower_baseline_on_every_host() {
    let low = MachineSpec {
        cpu: CpuBaseline::V2,
        ..spec(1, 64)
    };
    if !has_v2() {
        thaw_test_skip::skip("this host's KVM offers less than x86-64-v2");
        return;
    }
    let ready = format!("2\n{STEPS_READY}");
    let (vmm, mut control, _console) = paused_at(low, &avx2_teller().kernel(), &ready);
    let snapshot = Snapshot::full(&vmm, &mut control);
    let (_vmm, _control, mut console) = snapshot.thawed(spec(1, 64));
    assert_eq!(read_exactly(&mut console, 2), b"2\n");
}

#[test]
fn a_host_that_lacks_a_feature_refuses_and_names_it() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let mut bytes = snapshot.state_bytes();
    // struct kvm_cpuid_entry2 of leaf 7: function 7, index 0, KVM_CPUID_FLAG_SIGNIFCANT_INDEX; then EAX, EBX.
    let leaf7 = [7u8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let at = bytes
        .windows(leaf7.len())
        .position(|window| window == leaf7)
        .unwrap();
    // AVX512PF, ER and 4VNNIW's like: of a processor that is no longer made.
    bytes[at + 16..at + 20].copy_from_slice(&u32::MAX.to_le_bytes());
    refuse(
        spec(1, 64),
        &snapshot.with_state(&sealed(bytes)),
        ErrorCode::Incompatible,
        "avx512er",
    );
}
