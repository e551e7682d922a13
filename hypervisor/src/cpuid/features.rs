//! The feature bits of CPUID by name, and how each matters to a machine that runs on several kinds of host.
//!
//! Sources: Intel SDM vol. 2A (CPUID), AMD APM vol. 3 appendix E, asm/kvm_para.h. Names are those of
//! /proc/cpuinfo. The levels are those of the System V psABI (x86-64, "Micro-Architecture Levels").

use kvm_bindings::kvm_cpuid_entry2;

/// The class of a feature bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Part of the first x86-64, or for kernels: paging, mitigations, paravirtualisation. Kept at every
    /// level.
    System,
    /// For programs, from this x86-64 level on.
    Level(u8),
    /// For programs and in no level, or it changes a kernel's memory layout.
    Beyond,
    /// Follows the guest's control registers or the topology, or KVM emulates it anywhere: independent of the
    /// host.
    Free,
}

use Class::{Beyond as B, Free as F, Level, System as S};
const V2: Class = Level(2);
const V3: Class = Level(3);
const V4: Class = Level(4);

/// The register of a word of feature bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Register {
    pub const ALL: [Register; 4] = [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx];
}

/// One register of one leaf, all of whose bits are features.
#[derive(Debug)]
pub struct Word {
    pub leaf: u32,
    pub index: u32,
    pub register: Register,
    /// The named bits.
    pub bits: &'static [(u8, &'static str, Class)],
    /// The class of the other bits.
    pub unnamed: Class,
}

impl Word {
    /// The word in `entries`, or 0 if the leaf is absent.
    pub fn read(&self, entries: &[kvm_cpuid_entry2]) -> u32 {
        entries
            .iter()
            .find(|e| self.is_in(e))
            .map_or(0, |e| match self.register {
                Register::Eax => e.eax,
                Register::Ebx => e.ebx,
                Register::Ecx => e.ecx,
                Register::Edx => e.edx,
            })
    }

    /// Keeps only the bits of `mask` in `entry`, if the word is in it.
    pub fn mask(&self, entry: &mut kvm_cpuid_entry2, mask: u32) {
        if self.is_in(entry) {
            *match self.register {
                Register::Eax => &mut entry.eax,
                Register::Ebx => &mut entry.ebx,
                Register::Ecx => &mut entry.ecx,
                Register::Edx => &mut entry.edx,
            } &= mask;
        }
    }

    fn is_in(&self, entry: &kvm_cpuid_entry2) -> bool {
        (entry.function, entry.index) == (self.leaf, self.index)
    }

    pub fn class(&self, bit: u8) -> Class {
        self.bits
            .iter()
            .find(|named| named.0 == bit)
            .map_or(self.unnamed, |named| named.2)
    }

    /// The bits whose class `wanted` accepts.
    pub fn bits_where(&self, wanted: impl Fn(Class) -> bool) -> u32 {
        (0..32)
            .filter(|&bit| wanted(self.class(bit)))
            .fold(0, |bits, bit| bits | 1 << bit)
    }

    /// The names of the bits set in `bits`.
    pub fn names(&self, bits: u32) -> impl Iterator<Item = String> + '_ {
        (0..32u8)
            .filter(move |bit| bits >> bit & 1 != 0)
            .map(|bit| self.name(bit))
    }

    fn name(&self, bit: u8) -> String {
        if let Some(named) = self.bits.iter().find(|named| named.0 == bit) {
            return named.1.to_string();
        }
        let register = format!("{:?}", self.register).to_lowercase();
        match self.leaf {
            ..0x100 => format!("CPUID {:x}.{} {register} bit {bit}", self.leaf, self.index),
            leaf => format!("CPUID {leaf:#x} {register} bit {bit}"),
        }
    }
}

const fn word(
    leaf: u32,
    index: u32,
    register: Register,
    unnamed: Class,
    bits: &'static [(u8, &'static str, Class)],
) -> Word {
    Word {
        leaf,
        index,
        register,
        bits,
        unnamed,
    }
}

/// Every word of feature bits that is compared and masked.
#[rustfmt::skip]
pub const WORDS: &[Word] = &[
    word(1, 0, Register::Ecx, B, &[
        (0, "sse3", V2), (1, "pclmulqdq", B), (2, "dtes64", S), (3, "monitor", F), (4, "ds_cpl", S), (5, "vmx", S),
        (6, "smx", S), (7, "est", S), (8, "tm2", S), (9, "ssse3", V2), (11, "sdbg", S), (12, "fma", V3),
        (13, "cx16", V2), (14, "xtpr", S), (15, "pdcm", S), (17, "pcid", S), (18, "dca", S), (19, "sse4_1", V2),
        (20, "sse4_2", V2), (21, "x2apic", S), (22, "movbe", V3), (23, "popcnt", V2), (24, "tsc_deadline_timer", F),
        (25, "aes", B), (26, "xsave", V3), (27, "osxsave", F), (28, "avx", V3), (29, "f16c", V3), (30, "rdrand", S),
        (31, "hypervisor", F),
    ]),
    word(1, 0, Register::Edx, S, &[
        (0, "fpu", S), (1, "vme", S), (2, "de", S), (3, "pse", S), (4, "tsc", S), (5, "msr", S), (6, "pae", S),
        (7, "mce", S), (8, "cx8", S), (9, "apic", F), (11, "sep", S), (12, "mtrr", S), (13, "pge", S), (14, "mca", S),
        (15, "cmov", S), (16, "pat", S), (17, "pse36", S), (19, "clflush", S), (21, "dts", S), (22, "acpi", S),
        (23, "mmx", S), (24, "fxsr", S), (25, "sse", S), (26, "sse2", S), (27, "ss", S), (28, "ht", F), (29, "tm", S),
        (31, "pbe", S),
    ]),
    word(7, 0, Register::Ebx, B, &[
        (0, "fsgsbase", S), (1, "tsc_adjust", S), (2, "sgx", S), (3, "bmi1", V3), (4, "hle", B), (5, "avx2", V3),
        (6, "fdp_excptn_only", S), (7, "smep", S), (8, "bmi2", V3), (9, "erms", B), (10, "invpcid", S), (11, "rtm", B),
        (12, "cqm", S), (13, "zero_fcs_fds", S), (14, "mpx", B), (15, "rdt_a", S), (16, "avx512f", V4),
        (17, "avx512dq", V4), (18, "rdseed", S), (19, "adx", B), (20, "smap", S), (21, "avx512ifma", B),
        (23, "clflushopt", B), (24, "clwb", B), (25, "intel_pt", S), (26, "avx512pf", B), (27, "avx512er", B),
        (28, "avx512cd", V4), (29, "sha_ni", B), (30, "avx512bw", V4), (31, "avx512vl", V4),
    ]),
    // Class Beyond although for kernels: protection keys have registers in the XSAVE area, la57 deepens page
    // tables.
    word(7, 0, Register::Ecx, B, &[
        (0, "prefetchwt1", B), (1, "avx512vbmi", B), (2, "umip", S), (3, "pku", B), (4, "ospke", F), (5, "waitpkg", B),
        (6, "avx512_vbmi2", B), (7, "shstk", B), (8, "gfni", B), (9, "vaes", B), (10, "vpclmulqdq", B),
        (11, "avx512_vnni", B), (12, "avx512_bitalg", B), (13, "tme", S), (14, "avx512_vpopcntdq", B), (16, "la57", B),
        (22, "rdpid", B), (24, "bus_lock_detect", S), (25, "cldemote", B), (27, "movdiri", B), (28, "movdir64b", B),
        (29, "enqcmd", B),
    ]),
    word(7, 0, Register::Edx, B, &[
        (2, "avx512_4vnniw", B), (3, "avx512_4fmaps", B), (4, "fsrm", B), (5, "uintr", B),
        (8, "avx512_vp2intersect", B), (9, "srbds_ctrl", S), (10, "md_clear", S), (11, "rtm_always_abort", S),
        (13, "tsx_force_abort", S), (14, "serialize", B), (15, "hybrid", S), (16, "tsxldtrk", B), (18, "pconfig", S),
        (19, "arch_lbr", B), (20, "ibt", B), (22, "amx_bf16", B), (23, "avx512_fp16", B), (24, "amx_tile", B),
        (25, "amx_int8", B), (26, "spec_ctrl", S), (27, "intel_stibp", S), (28, "flush_l1d", S),
        (29, "arch_capabilities", S), (30, "core_capabilities", S), (31, "ssbd", S),
    ]),
    word(7, 1, Register::Eax, B, &[
        (0, "sha512", B), (1, "sm3", B), (2, "sm4", B), (4, "avx_vnni", B), (5, "avx512_bf16", B), (6, "lass", S),
        (7, "cmpccxadd", B), (10, "fzrm", B), (11, "fsrs", B), (12, "fsrc", B), (17, "fred", S), (18, "lkgs", S),
        (19, "wrmsrns", S), (21, "amx_fp16", B), (22, "hreset", S), (23, "avx_ifma", B), (26, "lam", S),
    ]),
    word(7, 1, Register::Edx, B, &[
        (4, "avx_vnni_int8", B), (5, "avx_ne_convert", B), (8, "amx_complex", B), (10, "avx_vnni_int16", B),
        (14, "prefetchiti", B), (19, "avx10", B),
    ]),
    word(7, 2, Register::Edx, S, &[
        (0, "intel_psfd", S), (1, "ipred_ctrl", S), (2, "rrsba_ctrl", S), (3, "ddpd_u", S), (4, "bhi_ctrl", S),
        (5, "mcdt_no", S),
    ]),
    // XSAVES and its compacted areas came with AVX-512; a kernel that has seen it lays out its tasks for it.
    word(0xd, 1, Register::Eax, B, &[
        (0, "xsaveopt", V3), (1, "xsavec", V4), (2, "xgetbv1", V4), (3, "xsaves", V4), (4, "xfd", B),
    ]),
    word(0x8000_0001, 0, Register::Ecx, B, &[
        (0, "lahf_lm", V2), (1, "cmp_legacy", F), (2, "svm", S), (3, "extapic", S), (4, "cr8_legacy", S),
        (5, "abm", V3), (6, "sse4a", B), (7, "misalignsse", B), (8, "3dnowprefetch", B), (9, "osvw", S), (10, "ibs", S),
        (11, "xop", B), (12, "skinit", S), (13, "wdt", S), (15, "lwp", B), (16, "fma4", B), (17, "tce", S),
        (21, "tbm", B), (22, "topoext", F), (23, "perfctr_core", S), (24, "perfctr_nb", S), (26, "bpext", S),
        (28, "perfctr_llc", S), (29, "mwaitx", B),
    ]),
    word(0x8000_0001, 0, Register::Edx, S, &[
        (9, "apic", F), (11, "syscall", S), (19, "mp", F), (20, "nx", S), (22, "mmxext", B), (25, "fxsr_opt", B),
        (26, "pdpe1gb", S), (27, "rdtscp", S), (29, "lm", S), (30, "3dnowext", B), (31, "3dnow", B),
    ]),
    word(0x8000_0007, 0, Register::Edx, S, &[(8, "invariant_tsc", S)]),
    word(0x8000_0008, 0, Register::Ebx, S, &[
        (0, "clzero", B), (1, "irperf", S), (2, "xsaveerptr", S), (4, "rdpru", B), (9, "wbnoinvd", S), (12, "ibpb", S),
        (14, "ibrs", S), (15, "amd_stibp", S), (17, "stibp_always_on", S), (19, "ibrs_same_mode", S),
        (24, "amd_ssbd", S), (25, "virt_ssbd", S), (26, "amd_ssb_no", S), (27, "cppc", S), (28, "amd_psfd", S),
        (29, "btc_no", S), (30, "ibpb_ret", S),
    ]),
    word(0x8000_0021, 0, Register::Eax, S, &[
        (0, "no_nested_data_bp", S), (2, "lfence_rdtsc", S), (6, "null_sel_clr_base", S), (8, "autoibrs", S),
        (10, "amd_fsrs", B), (11, "amd_fsrc", B), (27, "sbpb", S), (28, "ibpb_brtype", S), (29, "srso_no", S),
        (30, "srso_user_kernel_no", S),
    ]),
    word(0x4000_0001, 0, Register::Eax, S, &[
        (0, "kvm_clocksource", S), (1, "kvm_nop_io_delay", S), (2, "kvm_mmu_op", S), (3, "kvm_clocksource2", S),
        (4, "kvm_async_pf", S), (5, "kvm_steal_time", S), (6, "kvm_pv_eoi", S), (7, "kvm_pv_unhalt", S),
        (9, "kvm_pv_tlb_flush", S), (10, "kvm_async_pf_vmexit", S), (11, "kvm_pv_send_ipi", S),
        (12, "kvm_poll_control", S), (13, "kvm_pv_sched_yield", S), (14, "kvm_async_pf_int", S),
        (15, "kvm_msi_ext_dest_id", S), (16, "kvm_hc_map_gpa_range", S), (17, "kvm_migration_control", S),
        (24, "kvm_clocksource_stable", S),
    ]),
];
