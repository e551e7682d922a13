use std::fs::read_to_string;
use std::os::fd::AsFd;

use rustix::thread::UnshareFlags;

use super::*;

const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
const NO_IPV6: &str = "/proc/sys/net/ipv6/conf";

/// Runs a test in a thread with a network namespace of its own, if this host allows it.
fn alone(test: impl FnOnce() + Send) {
    thaw_test_skip::beside(|| match crate::jail::unshare(UnshareFlags::NEWNET) {
        Ok(()) => test(),
        Err(e) => thaw_test_skip::skip(format!("no network namespace: {e}")),
    });
}

#[test]
fn settings_are_of_the_calling_threads_namespace() {
    let outside = read_to_string(FORWARDING).unwrap();
    // More namespaces than one instance serves.
    for number in 0..USES + 3 {
        alone(|| {
            let value = ["0", "1"][number as usize % 2];
            set("ipv4/ip_forward", value).unwrap();
            assert_eq!(read_to_string(FORWARDING).unwrap().trim(), value);
        });
    }
    assert_eq!(read_to_string(FORWARDING).unwrap(), outside);
}

#[test]
fn ipv6_is_disabled_for_later_interfaces() {
    alone(|| {
        disable_ipv6(LATER).unwrap();
        let mut route = crate::netlink::Socket::route().unwrap();
        let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        crate::link::make_pair(&mut route, "here", "there", namespace.as_fd()).unwrap();
        let Ok(off) = read_to_string(format!("{NO_IPV6}/here/disable_ipv6")) else {
            return thaw_test_skip::skip("the kernel has no IPv6");
        };
        assert_eq!(off, "1\n");
    });
}

#[test]
fn missing_settings_are_told_apart() {
    alone(|| {
        let error = set("ipv4/no_such_setting", "1").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        disable_ipv6("no-such-link").unwrap();
    });
}

#[test]
fn an_instance_opens_no_more_files_than_it_may() {
    alone(|| {
        for _ in 0..3 * USES {
            set("ipv4/ip_forward", "1").unwrap();
            let used = CURRENT.locked().as_ref().map(|current| current.used);
            assert!(used.is_none_or(|used| used <= USES), "{used:?}");
        }
    });
}
