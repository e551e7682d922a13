//! Tiny test guests without an agent. They are booted, frozen and thawed as others are, but print on the console what other
//! guests report by doorbell and handshake.
//!
//! Such a guest prints [`READY`] at boot. After each thaw, once its generation ID has changed, it prints the ID in hexadecimal, or the first
//! byte of it.
//! Invariant: only a guest whose kernel command line contains [`BARE`], a word for tests, is treated so, and only with --test-templates.
//! All other guests do the handshake.

use super::create::Making;
use super::machine::{describe, explain};
use super::{READY_LIMIT, Resources};
use crate::error::{Error, ErrorKind};
use crate::template::command_line::{command_line, is_bare};

/// What a bare guest prints at boot.
const READY: &[u8] = b"bare";
/// Digits of a generation ID, and of its first byte.
const DIGITS: [usize; 2] = [32, 2];

/// Whether guests of this process are bare.
pub(super) fn expected() -> bool {
    is_bare(&command_line())
}

impl Making<'_> {
    /// Waits until a bare guest reports at boot that it is ready.
    pub(super) async fn bare_is_ready(&self) -> Result<(), Error> {
        wait_for_line(&self.resources, "it is ready", |line| line == READY).await
    }

    /// Waits until a thawed bare guest prints its new generation ID.
    pub(super) async fn bare_acknowledges(&self) -> Result<(), Error> {
        wait_for_line(&self.resources, "it is another now", is_generation).await
    }
}

fn is_generation(line: &[u8]) -> bool {
    DIGITS.contains(&line.len()) && line.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Waits for a line on the console. Fails if the machine ends first.
async fn wait_for_line(resources: &Resources, what: &str, wanted: fn(&[u8]) -> bool) -> Result<(), Error> {
    let lost = |why: String| {
        let what = format!("a bare guest did not say that {what}: {why}");
        Err(explain(
            Error::new(ErrorKind::GuestNotReady, what).lost(),
            resources,
        ))
    };
    let Some(console) = &resources.console else {
        return lost("it has no console".into());
    };
    let mut life = resources.control()?.life();
    let ended = life.clone();
    let told = async {
        tokio::select! {
            told = console.has_line(wanted) => told,
            _ = life.wait_for(|l| l.exited.is_some() || l.closed) => false,
        }
    };
    match tokio::time::timeout(READY_LIMIT, told).await {
        Ok(true) => Ok(()),
        Ok(false) => lost(
            ended
                .borrow()
                .exited
                .as_ref()
                .map_or("its machine ended".into(), describe),
        ),
        Err(_) => lost(format!("not within {} s", READY_LIMIT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_guest_acknowledges_by_all_digits_or_two() {
        assert!(is_generation(b"000102030405060708090a0b0c0d0eff"));
        assert!(is_generation(b"0f"));
        for other in [
            &b"bare"[..],
            b"",
            b"0",
            b"0g",
            b"000102030405060708090A0b0c0d0eff",
        ] {
            assert!(!is_generation(other));
        }
    }
}
