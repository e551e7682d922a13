use super::compatible::is_description;
use super::features::{Class, Register, WORDS, Word};
use super::*;

fn entry(function: u32, index: u32, regs: [u32; 4]) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = regs;
    kvm_cpuid_entry2 {
        function,
        index,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}

/// A host with every known feature bit, AVX-512, protection keys and AMX.
fn everything() -> Vec<kvm_cpuid_entry2> {
    vec![
        entry(0, 0, [0xd, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
        entry(1, 0, [0x50654, 0, !0, !0]),
        entry(7, 0, [2, !0, !0, !0]),
        entry(7, 1, [!0, 0, 0, !0]),
        entry(7, 2, [0, 0, 0, !0]),
        entry(0xd, 0, [0x602e7, 2696, 11008, 0]),
        entry(0xd, 1, [0x1f, 2696, 0x1800, 0]),
        entry(0xd, 2, [256, 576, 0, 0]),
        entry(0xd, 5, [64, 1088, 0, 0]),
        entry(0xd, 6, [512, 1152, 0, 0]),
        entry(0xd, 7, [1024, 1664, 0, 0]),
        entry(0xd, 9, [8, 2688, 0, 0]),
        entry(0xd, 17, [64, 2752, 2, 0]),
        entry(0xd, 18, [8192, 2816, 6, 0]),
        entry(0x4000_0001, 0, [!0, 0, 0, 0]),
        entry(0x8000_0001, 0, [0, 0, !0, !0]),
        entry(0x8000_0007, 0, [0, 0, 0, !0]),
        entry(0x8000_0008, 0, [0x302e, !0, 0, 0]),
        entry(0x8000_0021, 0, [!0, 0, 0, 0]),
    ]
}

fn cpuid(entries: &[kvm_cpuid_entry2]) -> CpuId {
    CpuId::from_entries(entries).unwrap()
}

fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
    *cpuid
        .as_slice()
        .iter()
        .find(|e| (e.function, e.index) == (function, index))
        .unwrap()
}

const LEVELS: [(Baseline, u8); 3] = [(Baseline::V2, 2), (Baseline::V3, 3), (Baseline::V4, 4)];

#[test]
fn a_level_has_its_own_features_and_none_above() {
    for (baseline, level) in LEVELS {
        let limited = baseline.limit(&cpuid(&everything())).unwrap();
        for word in WORDS {
            let value = word.read(limited.as_slice());
            for bit in 0..32u8 {
                let expected = match word.class(bit) {
                    // Without XSAVE there are no extensions of it.
                    _ if word.leaf == 0xd && level == 2 => false,
                    Class::System | Class::Free => true,
                    Class::Level(l) => l <= level,
                    Class::Beyond => false,
                };
                // Sub-leaf 1 of XSAVE has only five bits in the host.
                let there = word.leaf != 0xd || bit < 5;
                assert_eq!(
                    value >> bit & 1 != 0,
                    expected && there,
                    "{baseline:?} {word:?} {bit}"
                );
            }
        }
    }
    let host = Baseline::Host.limit(&cpuid(&everything())).unwrap();
    assert_eq!(host.as_slice(), everything());
}

#[test]
fn the_levels_are_those_of_the_psabi() {
    let of = |level: u8| -> Vec<String> {
        let mut names: Vec<String> = WORDS
            .iter()
            .filter(|w| w.leaf != 0xd)
            .flat_map(|w| w.names(w.bits_where(|c| c == Class::Level(level))))
            .collect();
        names.sort();
        names
    };
    assert_eq!(
        of(2),
        ["cx16", "lahf_lm", "popcnt", "sse3", "sse4_1", "sse4_2", "ssse3"]
    );
    assert_eq!(
        of(3),
        [
            "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"
        ]
    );
    assert_eq!(of(4), ["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"]);
}

#[test]
fn xsave_describes_the_registers_that_are_left() {
    let host = cpuid(&everything());
    for (baseline, xcr0, size) in [(Baseline::V3, 0x7, 832), (Baseline::V4, 0xe7, 2688)] {
        let limited = baseline.limit(&host).unwrap();
        let all = leaf(&limited, 0xd, 0);
        assert_eq!((all.eax, all.ecx, all.edx), (xcr0, size, 0));
        assert_eq!((leaf(&limited, 0xd, 1).ecx, leaf(&limited, 0xd, 9).eax), (0, 0));
        assert_eq!(leaf(&limited, 0xd, 2).ebx, 576);
        assert_eq!(leaf(&limited, 0xd, 18).eax, 0, "AMX is beyond every level");
    }
    let limited = Baseline::V2.limit(&host).unwrap();
    assert_eq!(leaf(&limited, 0xd, 0).eax, 0);
    assert_eq!(leaf(&limited, 1, 0).ecx & 1 << 26, 0);
}

#[test]
fn a_host_below_the_level_is_refused_by_name() {
    let mut entries = everything();
    entries[2].ebx &= !(1 << 5);
    assert!(Baseline::V2.limit(&cpuid(&entries)).is_ok());
    for baseline in [Baseline::V3, Baseline::V4] {
        match baseline.limit(&cpuid(&entries)) {
            Err(Error::BelowBaseline { missing, .. }) => assert_eq!(missing, "avx2"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_limited_vcpu_may_move_to_any_host_of_its_level() {
    let richer = cpuid(&everything());
    for (baseline, _) in LEVELS {
        let limited = baseline.limit(&richer).unwrap();
        assert_eq!(missing(&limited, &richer), Vec::<String>::new());
        assert_eq!(missing(&limited, &limited), Vec::<String>::new());
    }
    let v2 = Baseline::V2.limit(&richer).unwrap();
    let v3 = Baseline::V3.limit(&richer).unwrap();
    assert!(missing(&v2, &v3).is_empty());
    assert!(missing(&v3, &v2).contains(&"avx2".to_string()));
}

#[test]
fn what_a_host_lacks_is_named() {
    let saved = cpuid(&everything());
    for (position, clear, expected) in [
        (1, [0, 0, 1 << 25, 0], "aes"),
        (1, [0, 0, 0, 1 << 26], "sse2"),
        (2, [0, 1 << 16, 0, 0], "avx512f"),
        (2, [0, 0, 1 << 30, 0], "CPUID 7.0 ecx bit 30"),
        (2, [0, 0, 0, 1 << 29], "arch_capabilities"),
        (3, [1 << 4, 0, 0, 0], "avx_vnni"),
        (6, [1 << 3, 0, 0, 0], "xsaves"),
        (14, [1 << 5, 0, 0, 0], "kvm_steal_time"),
        (15, [0, 0, 1 << 6, 0], "sse4a"),
        (15, [0, 0, 0, 1 << 26], "pdpe1gb"),
        (15, [0, 0, 1 << 31, 0], "CPUID 0x80000001 ecx bit 31"),
        (17, [0, 1, 0, 0], "clzero"),
        (17, [6, 0, 0, 0], "46 bits of physical address (this host: 40)"),
        (5, [1 << 9, 0, 0, 0], "XSAVE component 9"),
        (
            5,
            [0, 0, 0x2000, 0],
            "an XSAVE area of 11008 bytes (this host: 2816)",
        ),
        (
            10,
            [0, 0x400, 0, 0],
            "XSAVE component 7 of 1024 bytes at byte 1664 (this host: 1024 at 640)",
        ),
        (6, [0, 0, 0x800, 0], "supervisor XSAVE component 11"),
    ] {
        let mut host = everything();
        let [eax, ebx, ecx, edx] = clear.map(|bits: u32| !bits);
        let entry = &mut host[position];
        (entry.eax, entry.ebx) = (entry.eax & eax, entry.ebx & ebx);
        (entry.ecx, entry.edx) = (entry.ecx & ecx, entry.edx & edx);
        assert_eq!(missing(&saved, &cpuid(&host)), [expected]);
        assert_eq!(
            missing(&cpuid(&host), &saved)
                .iter()
                .filter(|m| !m.contains("at byte"))
                .count(),
            0,
            "more is no fault"
        );
    }
}

#[test]
fn required_features_are_those_a_host_could_lack() {
    let names = required(&cpuid(&everything()));
    for name in ["avx2", "aes", "sse4_2", "kvm_steal_time"] {
        assert!(names.iter().any(|it| it == name), "{name}");
    }
    assert!(!names.iter().any(|it| it == "hypervisor" || it == "cmp_legacy"));
    assert!(required(&cpuid(&[])).is_empty());
}

#[test]
fn another_vendor_is_named() {
    let mut host = everything();
    (host[0].ebx, host[0].edx, host[0].ecx) = (0x6874_7541, 0x6974_6e65, 0x444d_4163);
    assert_eq!(
        missing(&cpuid(&everything()), &cpuid(&host)),
        [r#"a processor of vendor "GenuineIntel" (this host: "AuthenticAMD")"#]
    );
}

#[test]
fn topology_and_what_the_guest_switches_do_not_count() {
    let mut host = everything();
    host[1].eax = 0x806f8;
    host[1].ecx &= !(1 << 3 | 1 << 24 | 1 << 27 | 1 << 31);
    host[1].edx &= !(1 << 9 | 1 << 28);
    host[2].ecx &= !(1 << 4);
    host[15].ecx &= !(1 << 1 | 1 << 22);
    assert_eq!(
        missing(&cpuid(&everything()), &cpuid(&host)),
        Vec::<String>::new()
    );
}

/// The CPUID of a vCPU on a host with leaves that [`everything`] lacks. These leaves must not be offered.
fn offered() -> Vec<kvm_cpuid_entry2> {
    let mut host = everything();
    // Every second bit, so that every word lacks some bits.
    for entry in host.iter_mut().filter(|e| e.function != 0 && e.function != 0xd) {
        (entry.ecx, entry.edx) = (entry.ecx & 0x5555_5555 | 1 << 5 | 1 << 2, entry.edx & 0x5555_5555);
    }
    host.extend([
        entry(0xa, 0, [0x0730_0804, 0, 0xf, 0x603]),
        entry(0x4000_0000, 0, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
        entry(0x8000_0022, 0, [7, 6, 0, 0]),
    ]);
    for_vcpu(&cpuid(&host), 0, 1).unwrap().as_slice().to_vec()
}

fn register_of(entry: &mut kvm_cpuid_entry2, register: Register) -> &mut u32 {
    match register {
        Register::Eax => &mut entry.eax,
        Register::Ebx => &mut entry.ebx,
        Register::Ecx => &mut entry.ecx,
        Register::Edx => &mut entry.edx,
    }
}

/// Whether a bit may differ: its word is descriptive, or the bit does not depend on the host.
fn may_differ(leaf: u32, index: u32, register: Register, bit: u8) -> bool {
    let same = |w: &&Word| (w.leaf, w.index, w.register) == (leaf, index, register);
    let plain = Word {
        leaf,
        index,
        register,
        bits: &[],
        unnamed: Class::System,
    };
    let word = WORDS.iter().find(same).unwrap_or(&plain);
    is_description(word) || word.class(bit) == Class::Free
}

#[test]
fn missing_every_forged_bit_is_refused() {
    let offered = offered();
    let here = cpuid(&offered);
    assert_eq!(missing(&here, &here), Vec::<String>::new());
    let mut forged_bits = 0;
    for position in 0..offered.len() {
        for (register, bit) in Register::ALL.iter().flat_map(|r| (0..32u8).map(move |b| (*r, b))) {
            let mut forged = offered.clone();
            let entry = &mut forged[position];
            let (leaf, index) = (entry.function, entry.index);
            let value = register_of(entry, register);
            if *value >> bit & 1 != 0 || may_differ(leaf, index, register, bit) {
                continue;
            }
            *value |= 1 << bit;
            forged_bits += 1;
            let told = missing(&cpuid(&forged), &here);
            assert_eq!(told.len(), 1, "{leaf:#x}.{index} {register:?} {bit}: {told:?}");
        }
    }
    assert!(forged_bits > 500, "{forged_bits}");
}

#[test]
fn missing_forged_xsave_component_is_refused() {
    let offered = offered();
    let here = cpuid(&offered);
    let position = offered
        .iter()
        .position(|e| (e.function, e.index) == (0xd, 0))
        .unwrap();
    for (at, register) in [
        (position, Register::Eax),
        (position, Register::Edx),
        (position + 1, Register::Ecx),
        (position + 1, Register::Edx),
    ] {
        for bit in 0..32 {
            let mut forged = offered.clone();
            let value = register_of(&mut forged[at], register);
            if *value >> bit & 1 == 0 {
                *value |= 1 << bit;
                assert_eq!(missing(&cpuid(&forged), &here).len(), 1, "{register:?} {bit}");
            }
        }
    }
}

#[test]
fn missing_what_the_machine_leaves_out_is_refused() {
    let offered = offered();
    let here = cpuid(&offered);
    for (leaf, register, bit, name) in [
        (1, Register::Ecx, 5, "vmx"),
        (1, Register::Ecx, 15, "pdcm"),
        (0x8000_0001, Register::Ecx, 2, "svm"),
        (0x8000_0001, Register::Ecx, 23, "perfctr_core"),
        (0x4000_0001, Register::Eax, 14, "kvm_async_pf_int"),
        (0xa, Register::Eax, 1, "CPUID a.0 eax bit 1"),
        (0x8000_0022, Register::Eax, 0, "CPUID 0x80000022 eax bit 0"),
    ] {
        let mut forged = offered.clone();
        let entry = forged.iter_mut().find(|e| e.function == leaf).unwrap();
        *register_of(entry, register) |= 1 << bit;
        assert_eq!(missing(&cpuid(&forged), &here), [name]);
    }
}

#[test]
fn missing_leaf_of_another_hypervisor_is_refused() {
    let offered = offered();
    let mut forged = offered.clone();
    forged.push(entry(0x4000_0003, 0, [1, 0, 0, 0]));
    assert_eq!(
        missing(&cpuid(&forged), &cpuid(&offered)),
        ["CPUID 0x40000003 eax bit 0"]
    );
}

#[test]
fn missing_entry_that_hides_another_is_refused() {
    let offered = offered();
    let here = cpuid(&offered);
    let mut twice = offered.clone();
    twice.push(offered[1]);
    assert_eq!(
        missing(&cpuid(&twice), &here),
        ["a second reading of CPUID 0x1.0"]
    );
    let mut indexed = offered.clone();
    indexed[2].flags ^= KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
    assert_eq!(
        missing(&cpuid(&indexed), &here),
        ["a second reading of CPUID 0x7.0"]
    );
}

proptest::proptest! {
    #[test]
    fn any_cpuid_is_compared_and_limited_without_panic(
        words in proptest::collection::vec((0u32..0x20, 0u32..64, proptest::array::uniform4(proptest::num::u32::ANY)), 0..64),
    ) {
        let any: Vec<_> = words.iter().map(|&(leaf, index, regs)| entry(leaf, index, regs)).collect();
        let any = cpuid(&any);
        let _ = missing(&any, &cpuid(&everything()));
        let _ = missing(&cpuid(&everything()), &any);
        for (baseline, _) in LEVELS {
            let _ = baseline.limit(&any);
        }
        let mut once = any.as_slice().to_vec();
        once.sort_by_key(|e| (e.function, e.index));
        once.dedup_by_key(|e| (e.function, e.index));
        proptest::prop_assert!(missing(&cpuid(&once), &cpuid(&once)).is_empty());
    }
}
