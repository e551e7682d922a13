//! Many claims at once: every clone's first byte, timed from one start.

use std::io::{self, Read};
use std::os::fd::AsFd;

use rustix::event::{Timespec, epoll};

use super::clone::{Clone, Template};
use crate::clock::{monotonic_ns, us_since};

/// Clones being made at a time.
const BATCH: usize = 16;

/// How long all of them may be silent.
const PATIENCE: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

/// `count` parked clones, which only wait for their thaw.
pub fn park(template: &Template, count: usize) -> io::Result<Vec<Clone>> {
    let mut clones = Vec::with_capacity(count);
    while clones.len() < count {
        let made = clones.len();
        for _ in 0..BATCH.min(count - made) {
            clones.push(template.asked_to_park()?);
        }
        for clone in &mut clones[made..] {
            clone.vmm.settle()?;
        }
    }
    Ok(clones)
}

/// Thaws all of `clones` and gives the microseconds from the start to the first byte of each, in order of arrival.
///
/// # Errors
/// When any of them fails.
pub fn thaw(clones: &mut [Clone]) -> io::Result<Vec<f64>> {
    let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for (index, clone) in clones.iter().enumerate() {
        let data = epoll::EventData::new_u64(index as u64);
        // Edge-triggered: the rest of what a guest writes is read afterwards.
        let interest = epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ET;
        epoll::add(&ready, &clone.console, data, interest)?;
    }
    let count = clones.len();
    let consoles: Vec<_> = clones
        .iter()
        .map(|clone| clone.console.try_clone())
        .collect::<io::Result<_>>()?;
    let start = monotonic_ns();
    let taken = std::thread::scope(|scope| {
        let collector = scope.spawn(move || collect(ready, consoles, count, start));
        let sent = clones.iter_mut().try_for_each(Clone::thaw);
        let taken = collector
            .join()
            .map_err(|_| io::Error::other("the collecting thread panicked"))?;
        sent.and(taken)
    })?;
    for clone in clones {
        clone.vmm.settle()?;
    }
    Ok(taken)
}

/// Reads the first byte of each of `consoles` as it comes.
fn collect(
    ready: impl AsFd,
    mut consoles: Vec<std::os::unix::net::UnixStream>,
    count: usize,
    start: u64,
) -> io::Result<Vec<f64>> {
    let mut taken = Vec::with_capacity(count);
    let mut seen = vec![false; count];
    let mut events = Vec::with_capacity(count);
    while taken.len() < count {
        events.clear();
        rustix::io::retry_on_intr(|| {
            epoll::wait(
                &ready,
                rustix::buffer::spare_capacity(&mut events),
                Some(&PATIENCE),
            )
        })?;
        if events.is_empty() {
            return Err(io::Error::other(format!(
                "{} of {count} clones write nothing",
                count - taken.len()
            )));
        }
        for event in &events {
            let index = event.data.u64() as usize;
            if std::mem::replace(&mut seen[index], true) {
                continue;
            }
            let mut byte = [0u8; 1];
            if consoles[index].read(&mut byte)? != 1 {
                return Err(io::Error::other(format!(
                    "clone {index} of {count} ended before its guest wrote"
                )));
            }
            taken.push(us_since(start));
        }
    }
    Ok(taken)
}

/// Ends all of them; their ends overlap.
pub fn end(clones: Vec<Clone>) {
    kill(&clones);
}

/// Kills all of them and does not wait for their ends.
pub fn kill(clones: &[Clone]) {
    for clone in clones {
        clone.vmm.kill();
    }
}
