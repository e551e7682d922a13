use proptest::prelude::*;
use zerocopy::FromZeros;

use super::*;

/// The parts of a formally valid state: zeros, one MSR (the TSC), a TSC frequency.
fn parts() -> Vec<(VcpuPart, Vec<u8>)> {
    let lengths = [40, 4, 4, 144, 312, 4096, 392, 128, 1024, 16, 64];
    let mut parts: Vec<_> = VcpuPart::ALL
        .into_iter()
        .zip(lengths)
        .map(|(part, length)| (part, vec![0; length]))
        .collect();
    parts[1].1[0] = 1;
    parts[9].1[0] = 0x10;
    parts
}

fn read(parts: &[(VcpuPart, Vec<u8>)]) -> Result<VcpuState, StateError> {
    let borrowed: Vec<_> = parts
        .iter()
        .map(|(part, bytes)| (*part, bytes.as_slice()))
        .collect();
    VcpuState::from_parts(&borrowed)
}

fn chips() -> [Vec<u8>; 3] {
    [0u8, 1, 2].map(|id| {
        let mut chip = vec![0; 520];
        chip[0] = id;
        chip
    })
}

#[test]
fn part_numbers_never_change() {
    assert_eq!(
        VcpuPart::ALL.map(|part| part as u16),
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    );
    assert_eq!(InterruptPart::ALL.map(|part| part as u16), [1, 2, 3]);
    for number in 0..=u16::MAX {
        assert_eq!(VcpuPart::try_from(number).is_ok(), (1..=11).contains(&number));
        assert_eq!(InterruptPart::try_from(number).is_ok(), (1..=3).contains(&number));
    }
}

#[test]
fn parts_may_come_in_any_order_and_go_out_in_one() {
    let mut any = parts();
    any[3].1.fill(7);
    let expected = any.clone();
    any.reverse();
    assert_eq!(read(&any).unwrap().parts(), expected);
}

#[test]
fn each_part_must_be_there_once() {
    for position in 0..11 {
        let mut some = parts();
        let (part, bytes) = some.remove(position);
        assert_eq!(read(&some).err(), Some(StateError::Missing(format!("{part:?}"))));
        some.extend([(part, bytes.clone()), (part, bytes)]);
        assert_eq!(
            read(&some).err(),
            Some(StateError::Duplicate(format!("{part:?}")))
        );
    }
}

#[test]
fn each_part_must_have_its_length() {
    for position in 0..11 {
        for change in [-1i32, 1] {
            let mut some = parts();
            let length = some[position].1.len() as i32 + change;
            some[position].1.resize(length as usize, 0);
            let name = format!("{:?}", some[position].0);
            match read(&some) {
                Err(StateError::Length { part, actual, .. }) => {
                    assert_eq!((part, actual), (name, length as usize));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }
    for (position, too_long) in [(0, 257 * 40), (5, 65540), (9, 4097 * 16)] {
        let mut some = parts();
        some[position].1.resize(too_long, 0);
        assert!(matches!(read(&some), Err(StateError::Length { .. })));
    }
}

#[test]
fn a_state_has_a_time() {
    let mut without = parts();
    without[9].1[0] = 0x11;
    assert!(matches!(read(&without), Err(StateError::Content { .. })));
    let mut still = parts();
    still[1].1.fill(0);
    assert!(matches!(read(&still), Err(StateError::Content { .. })));
}

#[test]
fn interrupt_controllers_are_told_apart() {
    let chips = chips();
    let right: Vec<_> = InterruptPart::ALL
        .into_iter()
        .zip(chips.iter().map(Vec::as_slice))
        .collect();
    let state = InterruptState::from_parts(&right).unwrap();
    for ((part, bytes), (expected, chip)) in state.parts().iter().zip(&right) {
        assert_eq!((part, bytes.as_slice()), (expected, *chip));
    }
    let swapped = [(right[0].0, right[1].1), (right[1].0, right[0].1), right[2]];
    assert!(matches!(
        InterruptState::from_parts(&swapped),
        Err(StateError::Content { .. })
    ));
    assert!(matches!(
        InterruptState::from_parts(&right[1..]),
        Err(StateError::Missing(_))
    ));
    let short = [right[0], right[1], (right[2].0, &right[2].1[1..])];
    assert!(matches!(
        InterruptState::from_parts(&short),
        Err(StateError::Length { .. })
    ));
}

#[test]
fn a_clock_is_eight_bytes() {
    let clock = ClockState {
        nanoseconds: 0x0102_0304_0506_0708,
    };
    assert_eq!(clock.to_bytes(), [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(ClockState::from_bytes(&clock.to_bytes()), Ok(clock));
    for length in [0, 7, 9] {
        assert!(ClockState::from_bytes(&vec![0; length]).is_err());
    }
}

#[test]
fn structures_have_the_lengths_that_are_documented() {
    use kvm_bindings::*;
    assert_eq!(
        [
            size_of::<kvm_cpuid_entry2>(),
            size_of::<kvm_mp_state>(),
            size_of::<kvm_regs>(),
            size_of::<kvm_sregs>(),
            size_of::<kvm_xcrs>(),
            size_of::<kvm_debugregs>(),
            size_of::<kvm_lapic_state>(),
            size_of::<kvm_msr_entry>(),
            size_of::<kvm_vcpu_events>(),
            size_of::<kvm_irqchip>(),
        ],
        [40, 4, 144, 312, 392, 128, 1024, 16, 64, 520]
    );
    assert_eq!(to_bytes(&kvm_regs::new_zeroed()).len(), 144);
}

proptest! {
    #[test]
    fn any_bytes_are_a_state_or_an_error(
        any in proptest::collection::vec((0u16..14, proptest::collection::vec(proptest::num::u8::ANY, 0..600)), 0..14),
    ) {
        let vcpu: Vec<_> = any.iter()
            .filter_map(|(n, b)| Some((VcpuPart::try_from(*n).ok()?, b.as_slice()))).collect();
        let _ = VcpuState::from_parts(&vcpu);
        let chips: Vec<_> = any.iter()
            .filter_map(|(n, b)| Some((InterruptPart::try_from(*n).ok()?, b.as_slice()))).collect();
        let _ = InterruptState::from_parts(&chips);
        for (_, bytes) in &any {
            let _ = ClockState::from_bytes(bytes);
        }
    }

    /// Parts of valid lengths decode and encode to the same bytes.
    #[test]
    fn contents_survive_the_round_trip(seed in proptest::collection::vec(proptest::num::u8::ANY, 97), msrs in 1usize..300, cpuids in 0usize..257) {
        let mut any = parts();
        any[0].1.resize(cpuids * 40, 0);
        any[9].1.resize(msrs * 16, 0);
        for (i, byte) in any.iter_mut().flat_map(|(_, bytes)| bytes).enumerate() {
            *byte = seed[i % seed.len()];
        }
        any[1].1[0] |= 1;
        any[9].1[..4].copy_from_slice(&[0x10, 0, 0, 0]);
        prop_assert_eq!(read(&any).unwrap().parts(), any);
    }
}
