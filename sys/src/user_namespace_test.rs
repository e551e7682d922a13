use std::fs::read_link;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::*;

/// ioctl_ns(2): the user namespace that owns a namespace.
const NS_GET_USERNS: libc::c_ulong = 0xb701;

fn name(namespace: &OwnedFd) -> PathBuf {
    read_link(format!("/proc/self/fd/{}", namespace.as_raw_fd())).unwrap()
}

#[test]
fn network_namespaces_are_its_own_and_this_thread_stays_outside() {
    let own = ["user", "net"].map(|kind| read_link(format!("/proc/thread-self/ns/{kind}")).unwrap());
    let user = match UserNamespace::make() {
        Ok(user) => user,
        Err(e) => return thaw_test_skip::skip(format!("no user namespace: {e}")),
    };
    let networks = [0, 1].map(|_| user.new_network().unwrap());
    assert_ne!(name(&networks[0]), name(&networks[1]));
    for network in &networks {
        assert_ne!(name(network), own[1]);
        // SAFETY: the request takes no argument.
        let owner = unsafe { libc::ioctl(network.as_raw_fd(), NS_GET_USERNS) };
        assert_ne!(owner, -1);
        // SAFETY: the kernel has just created it for us.
        let owner = unsafe { OwnedFd::from_raw_fd(owner) };
        assert_eq!(name(&owner), name(&user.0));
    }
    let now = ["user", "net"].map(|kind| read_link(format!("/proc/thread-self/ns/{kind}")).unwrap());
    assert_eq!(now, own);
}

#[test]
fn a_privileged_thread_enters_its_network_and_may_configure_it() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root no thread may enter it");
    }
    let network = UserNamespace::make().unwrap().new_network().unwrap();
    thaw_test_skip::beside(|| {
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        crate::sysctl::set("ipv4/ip_forward", "1").unwrap();
        let mut route = crate::netlink::Socket::route().unwrap();
        let loopback = crate::link::index(&mut route, "lo").unwrap();
        crate::link::set_up(&mut route, loopback).unwrap();
    });
}

#[test]
fn one_descriptor_of_a_network_is_left() {
    let Ok(user) = UserNamespace::make() else {
        return thaw_test_skip::skip("no user namespace");
    };
    let network = user.new_network().unwrap();
    // Names are unique, so no other test has one of it open.
    let made = name(&network);
    let opened = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let of_it = opened.filter(|entry| read_link(entry.path()).is_ok_and(|name| name == made));
    assert_eq!(of_it.count(), 1);
}
