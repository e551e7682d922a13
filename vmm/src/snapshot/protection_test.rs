use std::os::fd::AsFd;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;
use crate::snapshot::testing::{boot, memory, userfaultfd};

/// Its wake-up is gone: the thread read it while it served an earlier protection.
#[test]
fn a_protection_released_before_it_is_served_holds_nobody_up() {
    let Some(device) = userfaultfd() else {
        return;
    };
    let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
    let wake = Arc::new(wake);
    let protection = Protection::new(device.as_fd(), &memory(), &boot(), wake.clone()).unwrap();
    protection.end();
    protection.release();
    rustix::io::read(&wake, &mut [0u8; 8]).unwrap();
    let (served, ended) = channel();
    std::thread::spawn(move || {
        protection.serve();
        served.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(30)).unwrap();
}
