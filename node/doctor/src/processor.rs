//! Checks of the processor: shared cores (SMT), open vulnerabilities, and the features that KVM offers.
//!
//! docs/production-hosts.md explains why each matters. The words are the kernel's (Documentation/admin-guide/hw-vuln).

use std::collections::BTreeSet;

use super::{Check, Host};

/// The directory with a file for each known vulnerability, which has the kernel's mitigation.
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";
/// The file about microcode (Linux 6.16 and later).
const OLD_MICROCODE: &str = "old_microcode";
const MOUNT: &str = "mount -t sysfs none /sys";

pub(super) fn checks(host: &Host) -> Vec<Check> {
    vec![smt(host), mitigations(host), microcode(host), nested_guests(host)]
}

fn smt(host: &Host) -> Check {
    const NAME: &str = "SMT";
    match host.read("/sys/devices/system/cpu/smt/active").as_deref() {
        Some("0") => Check::ok(NAME, "off: one guest at a time runs on a core"),
        Some(_) => Check::warn(
            NAME,
            "on",
            "two sandboxes may run on one core at a time, and learn of each other by what the core shares",
            "boot with nosmt, or: echo off > /sys/devices/system/cpu/smt/control",
        ),
        None => Check::warn(
            NAME,
            "unknown",
            "perhaps two sandboxes run on one core at a time",
            MOUNT,
        ),
    }
}

fn mitigations(host: &Host) -> Check {
    const NAME: &str = "CPU mitigations";
    let Some(flaws) = host.names(VULNERABILITIES) else {
        return Check::warn(
            NAME,
            "unknown",
            "perhaps a guest can read what is not its own",
            MOUNT,
        );
    };
    let open: Vec<String> = flaws
        .iter()
        .filter(|flaw| *flaw != OLD_MICROCODE)
        .filter_map(|flaw| {
            let parts = open_parts(&host.read(&format!("{VULNERABILITIES}/{flaw}"))?);
            (!parts.is_empty()).then(|| format!("{flaw}: {}", parts.join("; ")))
        })
        .collect();
    if open.is_empty() {
        let known = format!("none of the {} flaws the kernel knows of is open", flaws.len());
        return Check::ok(NAME, known);
    }
    Check::warn(
        NAME,
        open.join(", "),
        "a guest may read memory of this host or of other guests, or stop the host",
        "boot without mitigations=off; update the kernel and the microcode (docs/production-hosts.md)",
    )
}

/// The parts of a mitigation's text that mean an open vulnerability. Open siblings of a core belong to the check of SMT.
fn open_parts(told: &str) -> Vec<String> {
    told.split(';')
        .map(|part| {
            part.replace(", SMT vulnerable", "")
                .replace("SMT vulnerable", "")
                .trim()
                .to_owned()
        })
        .filter(|part| part.starts_with("Unknown") || part.to_ascii_lowercase().contains("vulnerable"))
        .collect()
}

fn microcode(host: &Host) -> Check {
    const NAME: &str = "CPU microcode";
    const COST: &str = "flaws of the processor that newer microcode mends are open";
    const FIX: &str = "install intel-microcode or amd64-microcode, update the firmware, and boot anew";
    if host.cpu_has("hypervisor") {
        return Check::ok(NAME, "that of the machine below this one, whose owner updates it");
    }
    let told = |flaw: &str| {
        host.read(&format!("{VULNERABILITIES}/{flaw}"))
            .unwrap_or_default()
    };
    let without: Vec<String> = host
        .names(VULNERABILITIES)
        .unwrap_or_default()
        .into_iter()
        .filter(|flaw| told(flaw).to_ascii_lowercase().contains("no microcode"))
        .collect();
    let revisions = revisions(host);
    let found = revisions.iter().cloned().collect::<Vec<_>>().join(", ");
    if told(OLD_MICROCODE).starts_with("Vulnerable") {
        return Check::warn(
            NAME,
            format!("{found}: older than the kernel knows of"),
            COST,
            FIX,
        );
    }
    if !without.is_empty() {
        return Check::warn(
            NAME,
            format!("{found}: none for {}", without.join(", ")),
            COST,
            FIX,
        );
    }
    match revisions.len() {
        0 => Check::warn(NAME, "unknown", COST, "mount -t proc none /proc"),
        1 => Check::ok(NAME, format!("{found}, on every CPU")),
        _ => Check::warn(
            NAME,
            format!("CPUs have different ones: {found}"),
            "a flaw that is mended on one CPU is open on another",
            FIX,
        ),
    }
}

/// The microcode revisions of the CPUs.
fn revisions(host: &Host) -> BTreeSet<String> {
    host.read("/proc/cpuinfo")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| {
            Some(
                line.strip_prefix("microcode")?
                    .split_once(':')?
                    .1
                    .trim()
                    .to_owned(),
            )
        })
        .collect()
}

fn nested_guests(host: &Host) -> Check {
    const NAME: &str = "nested virtualisation";
    let on = ["kvm_intel", "kvm_amd"].into_iter().find(|module| {
        let parameter = host.read(&format!("/sys/module/{module}/parameters/nested"));
        matches!(parameter.as_deref(), Some("Y" | "1"))
    });
    let Some(module) = on else {
        return Check::ok(NAME, "off");
    };
    Check::warn(
        NAME,
        format!("{module}.nested is on"),
        "no guest of Thaw has it; a VMM that a guest has taken over can turn it on, and attack that part of KVM",
        format!("put \"options {module} nested=0\" into /etc/modprobe.d/kvm.conf, and load {module} anew"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::{State, tests::host_with};
    use super::*;

    /// The result of a check on a host whose kernel reports these vulnerabilities.
    fn with_flaws(flaws: &[(&str, &str)], check: fn(&Host) -> Check) -> Check {
        let files: Vec<(String, &str)> = flaws
            .iter()
            .map(|(flaw, told)| (format!("{VULNERABILITIES}/{flaw}"), *told))
            .chain([(
                "/proc/cpuinfo".to_owned(),
                "processor\t: 0\nmicrocode\t: 0xa201213\nflags\t\t: svm\n",
            )])
            .collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        check(&host_with(&files).1)
    }

    #[test]
    fn smt_is_on_off_or_unknown() {
        let with = |files: &[(&str, &str)]| smt(&host_with(files).1);
        let active = "/sys/devices/system/cpu/smt/active";
        assert_eq!(with(&[(active, "0\n")]).state, State::Ok);
        let on = with(&[(active, "1\n")]);
        assert_eq!(on.state, State::Warn);
        assert!(on.fix.contains("nosmt"));
        assert_eq!(with(&[]).found, "unknown");
    }

    #[test]
    fn mitigations_open_flaws_are_named() {
        let open = with_flaws(
            &[
                ("meltdown", "Mitigation: PTI\n"),
                ("spec_store_bypass", "Vulnerable\n"),
                (
                    "spectre_v2",
                    "Mitigation: Enhanced / Automatic IBRS; IBPB: conditional; BHI: Vulnerable\n",
                ),
            ],
            mitigations,
        );
        assert_eq!(open.state, State::Warn);
        assert_eq!(
            open.found,
            "spec_store_bypass: Vulnerable, spectre_v2: BHI: Vulnerable"
        );
    }

    #[test]
    fn mitigations_siblings_and_old_microcode_are_other_checks() {
        let sound = [
            ("itlb_multihit", "KVM: Mitigation: Split huge pages\n"),
            (
                "l1tf",
                "Mitigation: PTE Inversion; VMX: conditional cache flushes, SMT vulnerable\n",
            ),
            ("mds", "Mitigation: Clear CPU buffers; SMT vulnerable\n"),
            ("old_microcode", "Vulnerable\n"),
            ("srbds", "Not affected\n"),
        ];
        let sound = with_flaws(&sound, mitigations);
        assert_eq!(sound.state, State::Ok, "{sound:?}");
    }

    #[test]
    fn mitigations_of_kvm_count_and_so_does_what_nobody_knows() {
        let open = |told: &str| with_flaws(&[("flaw", told)], mitigations).state;
        for told in [
            "KVM: Vulnerable\n",
            "Processor vulnerable\n",
            "Mitigation: PTE Inversion; VMX: vulnerable, SMT vulnerable\n",
            "Unknown: Dependent on hypervisor status\n",
            "Vulnerable: Clear CPU buffers attempted, no microcode; SMT Host state unknown\n",
        ] {
            assert_eq!(open(told), State::Warn, "{told}");
        }
        assert_eq!(
            open("Mitigation: Clear CPU buffers; SMT Host state unknown\n"),
            State::Ok
        );
    }

    #[test]
    fn microcode_that_is_old_or_lacks_a_mitigation_is_told() {
        let of = |flaw: &str, told: &str| with_flaws(&[(flaw, told)], microcode);
        let sound = of("mds", "Mitigation: Clear CPU buffers\n");
        assert_eq!(
            (sound.state, sound.found.as_str()),
            (State::Ok, "0xa201213, on every CPU")
        );
        assert!(of(OLD_MICROCODE, "Vulnerable\n").found.contains("older"));
        assert_eq!(of(OLD_MICROCODE, "Not affected\n").state, State::Ok);
        assert!(
            of("srbds", "Vulnerable: No microcode\n")
                .found
                .ends_with("none for srbds")
        );
    }

    #[test]
    fn microcode_differs_between_cpus_or_is_the_hypervisors() {
        let with = |cpuinfo: &str| microcode(&host_with(&[("/proc/cpuinfo", cpuinfo)]).1);
        let two = with("microcode\t: 0x1\n\nmicrocode\t: 0x2\n");
        assert_eq!(two.state, State::Warn);
        assert!(two.found.ends_with("0x1, 0x2"), "{}", two.found);
        assert_eq!(with("flags : fpu\n").state, State::Warn);
        let guest = with("microcode\t: 0x1\nflags : fpu hypervisor\n\nmicrocode\t: 0x2\n");
        assert_eq!(guest.state, State::Ok);
    }

    #[test]
    fn nested_guests_of_either_vendor_are_told() {
        let with = |module: &str, value: &str| {
            let path = format!("/sys/module/{module}/parameters/nested");
            nested_guests(&host_with(&[(path.as_str(), value)]).1)
        };
        for (module, value) in [("kvm_intel", "Y\n"), ("kvm_amd", "1\n")] {
            let on = with(module, value);
            assert_eq!(on.state, State::Warn);
            assert!(on.fix.contains(&format!("options {module} nested=0")));
        }
        assert_eq!(with("kvm_intel", "N\n").state, State::Ok);
        assert_eq!(with("kvm_amd", "0\n").state, State::Ok);
    }
}
