//! Checks of other resources of the host: cgroups, namespaces, taps.

use std::fs::OpenOptions;

use thaw_pools::cgroup::Hierarchy;

use super::{Check, Host};

pub(super) fn checks(host: &Host) -> Vec<Check> {
    vec![
        cgroups(&Hierarchy::detect()),
        user_namespaces(host),
        landlock(host),
        tap(host),
        forwarding(host),
        translation(thaw_network::try_out()),
        fast_path(thaw_network::try_fast_path()),
        userfaultfd(host),
    ]
}

fn cgroups(hierarchy: &Hierarchy) -> Check {
    const NAME: &str = "cgroups";
    match hierarchy {
        Hierarchy::V2 {
            favordynmods: true, ..
        } => Check::ok(NAME, "v2 with favordynmods"),
        Hierarchy::V2 { root, .. } => Check::warn(
            NAME,
            "v2 without favordynmods",
            "moving a process between busy cgroups, and making a VM in one, takes up to 27 ms",
            format!("mount -o remount,favordynmods {}", root.display()),
        ),
        Hierarchy::V1 { .. } => Check::warn(
            NAME,
            "v1",
            "one directory per controller and sandbox; making a VM in a busy cgroup takes up to 27 ms",
            "boot with systemd.unified_cgroup_hierarchy=1 for v2",
        ),
        Hierarchy::None => Check::warn(
            NAME,
            "not mounted",
            "thawd refuses sandboxes, unless require_limits = false in [sandbox]; then they have no limits of their own",
            "mount -t cgroup2 none /sys/fs/cgroup",
        ),
    }
}

fn user_namespaces(host: &Host) -> Check {
    const NAME: &str = "user namespaces";
    const COST: &str =
        "without root there is no private network, and a VMM is jailed by filters alone, not by namespaces";
    if host.read("/proc/sys/user/max_user_namespaces").as_deref() == Some("0")
        || !host.exists("/proc/self/ns/user")
    {
        return Check::warn(
            NAME,
            "none allowed",
            COST,
            "sysctl user.max_user_namespaces=15000",
        );
    }
    for (file, forbidding) in [
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ] {
        if host.read(file).as_deref() == Some(forbidding) {
            let setting = file.trim_start_matches("/proc/sys/").replace('/', ".");
            let fix = format!("sysctl {setting}={}", if forbidding == "0" { "1" } else { "0" });
            return Check::warn(NAME, format!("only for root: {setting}={forbidding}"), COST, fix);
        }
    }
    Check::ok(NAME, "allowed")
}

fn landlock(host: &Host) -> Check {
    const NAME: &str = "Landlock";
    const COST: &str = "thawd refuses sandboxes, unless require_jail = false in [sandbox]; then a VMM's jail has one wall fewer";
    match host.read("/sys/kernel/security/lsm") {
        Some(modules) if modules.split(',').any(|module| module == "landlock") => Check::ok(NAME, "in use"),
        Some(modules) => Check::warn(
            NAME,
            format!("not among the security modules in use ({modules})"),
            COST,
            format!("boot with lsm=landlock,{modules} (Linux 5.13 and later, CONFIG_SECURITY_LANDLOCK)"),
        ),
        None => Check::warn(
            NAME,
            "cannot be told",
            COST,
            "mount -t securityfs none /sys/kernel/security",
        ),
    }
}

fn tap(host: &Host) -> Check {
    const NAME: &str = "/dev/net/tun";
    match OpenOptions::new().read(true).write(true).open(host.path(NAME)) {
        Ok(_) => Check::ok(NAME, "opens; vhost is not needed"),
        Err(e) => Check::missing(
            NAME,
            e.to_string(),
            "no --network private",
            "modprobe tun; chmod 666 /dev/net/tun",
        ),
    }
}

fn forwarding(host: &Host) -> Check {
    const NAME: &str = "net.ipv4.ip_forward";
    const FIX: &str = "sysctl net.ipv4.ip_forward=1";
    match host.read("/proc/sys/net/ipv4/ip_forward").as_deref() {
        Some("0") => Check::warn(
            NAME,
            "0",
            "no sandbox reaches the world outside: the first with --network private sets it to 1, where [network] forwarding allows that",
            FIX,
        ),
        Some(set) => Check::ok(NAME, set),
        None => Check::warn(
            NAME,
            "unknown",
            "perhaps no sandbox reaches the world outside",
            FIX,
        ),
    }
}

fn translation(tried: Result<(), thaw_network::Error>) -> Check {
    const NAME: &str = "veth and nftables NAT";
    let denied = |e: &std::io::Error| e.kind() == std::io::ErrorKind::PermissionDenied;
    match tried {
        Ok(()) => Check::ok(NAME, "work"),
        Err(thaw_network::Error::System { source, .. }) if denied(&source) => Check::warn(
            NAME,
            "only for root",
            "a private network is the guest and its gateway, without the world outside",
            "run as root",
        ),
        Err(e) => Check::missing(
            NAME,
            e.to_string(),
            "no --network private",
            "load the modules named, or use a kernel with CONFIG_VETH, CONFIG_NF_TABLES, CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB_IPV4, CONFIG_NFT_REJECT",
        ),
    }
}

fn fast_path(tried: Result<(), thaw_network::Error>) -> Check {
    const NAME: &str = "eBPF redirection";
    match tried {
        Ok(()) => Check::ok(NAME, "works: packets of sandboxes without a policy go that way"),
        Err(e) => Check::warn(
            NAME,
            e.to_string(),
            "all packets of sandboxes go through nftables",
            "run as root, on Linux 5.10 or later with CONFIG_BPF_SYSCALL, CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF, CONFIG_NF_CT_NETLINK",
        ),
    }
}

fn userfaultfd(host: &Host) -> Check {
    const NAME: &str = "userfaultfd";
    if OpenOptions::new()
        .read(true)
        .write(true)
        .open(host.path("/dev/userfaultfd"))
        .is_ok()
    {
        return Check::ok(NAME, "/dev/userfaultfd opens");
    }
    Check::warn(
        NAME,
        "/dev/userfaultfd does not open",
        "a freeze or fork pauses the guest while its memory is written",
        "run as root, on Linux 6.4 or later with CONFIG_USERFAULTFD",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{State, tests::host_with};
    use super::*;

    #[test]
    fn a_forbidden_namespace_is_named_with_its_setting() {
        let (_r, host) = host_with(&[
            ("/proc/self/ns/user", ""),
            ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n"),
        ]);
        assert_eq!(
            user_namespaces(&host).fix,
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        );
    }

    #[test]
    fn what_leads_outside_is_told_from_what_does_not() {
        let with = |text: &str| {
            let (_r, host) = host_with(&[("/proc/sys/net/ipv4/ip_forward", text)]);
            forwarding(&host).state
        };
        assert_eq!((with("1\n"), with("0\n")), (State::Ok, State::Warn));
        let tried = |kind: std::io::ErrorKind| {
            let what = "write nftables rules";
            let source = kind.into();
            translation(Err(thaw_network::Error::System { what, source })).state
        };
        assert_eq!(translation(Ok(())).state, State::Ok);
        assert_eq!(fast_path(Ok(())).state, State::Ok);
        assert_eq!(tried(std::io::ErrorKind::PermissionDenied), State::Warn);
        assert_eq!(tried(std::io::ErrorKind::Unsupported), State::Missing);
    }

    #[test]
    fn favordynmods_is_what_makes_v2_good() {
        let v2 = |favordynmods| {
            cgroups(&Hierarchy::V2 {
                root: "/sys/fs/cgroup".into(),
                favordynmods,
            })
            .state
        };
        assert_eq!((v2(true), v2(false)), (State::Ok, State::Warn));
    }
}
