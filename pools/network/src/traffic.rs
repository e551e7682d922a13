//! Counts the traffic through a slot's tap, each way.
//!
//! It reads the device table of the slot's namespace, which takes no host-wide lock; rtnetlink would take RTNL. A thread enters the
//! namespace for each reading and then ends, so this is for occasional readings.

use std::os::fd::AsFd;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::tap::{self, Failure};
use crate::{NetworkSlot, TAP_NAME};

/// The device table of the calling thread's namespace (proc(5)).
const DEVICES: &str = "/proc/thread-self/net/dev";

/// Traffic since the slot was made, as the guest sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub received_bytes: u64,
    pub received_packets: u64,
    pub sent_bytes: u64,
    pub sent_packets: u64,
}

impl NetworkSlot {
    /// The traffic that its guest received and sent. `None` if we may not enter its namespace, as without root. Blocks.
    pub fn traffic(&self) -> Option<Traffic> {
        let look = || {
            let kind = Some(LinkNameSpaceType::Network);
            let entered = move_into_link_name_space(self.namespace.as_fd(), kind);
            Ok::<_, Failure>(entered.ok().and_then(|()| std::fs::read_to_string(DEVICES).ok()))
        };
        let devices = tap::on_a_thread(look).ok().flatten()?;
        parse(&devices)
    }
}

/// Parses the tap's line: eight numbers of the traffic that the host received from it, bytes and packets first, then eight of the traffic
/// that it sent.
fn parse(devices: &str) -> Option<Traffic> {
    let mut lines = devices.lines().filter_map(|line| line.split_once(':'));
    let (_, counts) = lines.find(|(name, _)| name.trim() == TAP_NAME)?;
    let counts: Option<Vec<u64>> = counts.split_whitespace().map(|n| n.parse().ok()).collect();
    match counts?.as_slice() {
        [
            sent_bytes,
            sent_packets,
            _,
            _,
            _,
            _,
            _,
            _,
            received_bytes,
            received_packets,
            ..,
        ] => Some(Traffic {
            received_bytes: *received_bytes,
            received_packets: *received_packets,
            sent_bytes: *sent_bytes,
            sent_packets: *sent_packets,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_read_from_the_line_of_the_tap() {
        let head = "Inter-|   Receive |  Transmit\n face |bytes packets errs|bytes packets errs\n";
        let lo = "    lo: 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9\n";
        let tap = " thaw0:  100 2 0 0 0 0 0 0 3000 4 0 0 0 0 0 0\n";
        let traffic = parse(&format!("{head}{lo}{tap}")).unwrap();
        assert_eq!((traffic.sent_bytes, traffic.sent_packets), (100, 2));
        assert_eq!((traffic.received_bytes, traffic.received_packets), (3000, 4));
        for none in ["", head, lo, " thaw0: 1 2 3\n", " thaw0: 1 2 3 4 5 6 7 8 9 x\n"] {
            assert_eq!(parse(none), None);
        }
    }
}
