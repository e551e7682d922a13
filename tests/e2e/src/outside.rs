//! What stands for the world outside: a network namespace beside the host's. The host has an address in its network.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The host's address.
pub const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The address outside.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
/// The host's address that stands for a cloud's metadata service.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const NAMESPACE: &str = "thaw-e2e-outside";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The world outside. Dropped, it is gone.
pub struct World {
    _alone: MutexGuard<'static, ()>,
}

impl World {
    /// Makes it, once no other test of this program has one.
    pub fn new() -> World {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        remove();
        for line in [
            format!("netns add {NAMESPACE}"),
            format!("link add thaw-e2e-wan type veth peer name lan netns {NAMESPACE}"),
            format!("addr add {HOST}/24 dev thaw-e2e-wan"),
            format!("addr add {METADATA}/32 dev thaw-e2e-wan"),
            "link set thaw-e2e-wan up".into(),
            format!("-n {NAMESPACE} addr add {OUTSIDE}/24 dev lan"),
            format!("-n {NAMESPACE} link set lan up"),
            format!("-n {NAMESPACE} link set lo up"),
        ] {
            assert!(ip(&line), "ip {line}");
        }
        World { _alone: alone }
    }

    /// Does something outside. Sockets that it makes stay there.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                let namespace = std::fs::File::open(format!("/run/netns/{NAMESPACE}")).unwrap();
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind).unwrap();
                work()
            });
            there.join().unwrap()
        })
    }
}

impl Default for World {
    fn default() -> Self {
        World::new()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        remove();
    }
}

fn remove() {
    ip("link del thaw-e2e-wan");
    ip(&format!("netns del {NAMESPACE}"));
}

fn ip(line: &str) -> bool {
    let done = Command::new("ip").args(line.split(' ')).output();
    done.unwrap().status.success()
}
