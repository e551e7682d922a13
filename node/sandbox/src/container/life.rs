//! How a container's owner stops its program and starts it again.
//!
//! Invariant: the note of a container's life in its sandbox's directory is written before the step that it announces, so an owner that
//! takes over continues where the one before it ended.

use std::path::Path;
use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};
use thaw_protocol::api::{HealthStatus, RestartMode, RestartPolicy};

use super::signals::{TERMINATE, parse_signal};

/// Seconds between a stop signal and SIGKILL by default, as under docker.
const STOP_TIMEOUT_S: i32 = 10;
/// The file in a sandbox's directory that holds a [`LifeNote`].
pub(crate) const LIFE_FILE: &str = "life.json";
/// Delay before the first restart.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// Longest delay before a restart.
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// After a run of this length the next delay is the first again.
const LONG_RUN: Duration = Duration::from_secs(10);

/// What a caller chose of a container's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LifeOptions {
    pub restart: RestartPolicy,
    /// `None`: the image's, or SIGTERM.
    pub stop_signal: Option<u8>,
    pub stop_timeout_s: Option<i32>,
    /// Its stdin stays open.
    pub open_stdin: bool,
}

/// How a container is stopped, and when its program is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    #[serde(default)]
    pub restart: RestartPolicy,
    pub stop_signal: u8,
    /// Seconds from that signal to SIGKILL; -1: no SIGKILL.
    pub stop_timeout_s: i32,
    #[serde(default)]
    pub open_stdin: bool,
}

impl Default for Life {
    fn default() -> Life {
        Life {
            restart: RestartPolicy::default(),
            stop_signal: TERMINATE,
            stop_timeout_s: STOP_TIMEOUT_S,
            open_stdin: false,
        }
    }
}

impl Life {
    /// The life that a caller chose for a container of this image.
    pub fn of(image: &ImageConfiguration, options: &LifeOptions) -> Life {
        let named = image
            .config()
            .as_ref()
            .and_then(|config| config.stop_signal().clone());
        // As under docker, the image's own signal is used only if it is a known one.
        let of_image = named.and_then(|name| parse_signal(&name).ok());
        Life {
            restart: options.restart,
            stop_signal: options.stop_signal.or(of_image).unwrap_or(TERMINATE),
            stop_timeout_s: options.stop_timeout_s.unwrap_or(STOP_TIMEOUT_S),
            open_stdin: options.open_stdin,
        }
    }

    /// How long its process may take to end after its stop signal. `None`: for ever.
    pub fn stop_timeout(&self, asked_s: Option<i32>) -> Option<Duration> {
        let seconds = asked_s.unwrap_or(self.stop_timeout_s);
        u64::try_from(seconds).ok().map(Duration::from_secs)
    }

    /// Whether its program is started again after its process ended so, and had been started again this often before.
    pub fn restarts(&self, status: i32, restarts: u32) -> bool {
        match self.restart.mode {
            RestartMode::No => false,
            RestartMode::OnFailure => {
                status != 0 && self.restart.max_restarts.is_none_or(|most| restarts < most)
            }
            RestartMode::UnlessStopped | RestartMode::Always => true,
        }
    }
}

/// The delays of a container's restarts: each twice the one before, until the program runs for some time.
#[derive(Clone, Copy, Debug, Default)]
pub struct RestartDelay(Duration);

impl RestartDelay {
    /// The delay before the restart of a program that ran for this time.
    pub fn after(&mut self, ran: Duration) -> Duration {
        self.0 = match ran >= LONG_RUN || self.0.is_zero() {
            true => FIRST_DELAY,
            false => (self.0 * 2).min(LONGEST_DELAY),
        };
        self.0
    }
}

/// What a later owner, and `thaw ps`, need to know of a container's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LifeNote {
    /// How often its program was started again by its policy.
    #[serde(default)]
    pub restarts: u32,
    /// A user has stopped it: its policy no longer applies.
    #[serde(default)]
    pub stopped: bool,
    /// Its process has ended, with this status, and its program is to be started again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarting: Option<i32>,
    /// Whether it is healthy, if that is checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<HealthStatus>,
}

impl LifeNote {
    /// Reads the note in a sandbox's directory. An absent or unreadable one is that of a container that was just started.
    pub fn read(directory: &Path) -> LifeNote {
        thaw_records::read(&directory.join(LIFE_FILE)).unwrap_or_default()
    }

    /// Writes it to a sandbox's directory. A failure is logged: it matters only to a later owner.
    pub fn write(&self, directory: &Path) {
        let path = directory.join(LIFE_FILE);
        let new = path.with_extension("new");
        let write = || -> std::io::Result<()> {
            std::fs::write(&new, thaw_records::encode(self)?)?;
            std::fs::rename(&new, &path)
        };
        if let Err(e) = write() {
            tracing::warn!("cannot write {}: {e}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(mode: RestartMode, max_restarts: Option<u32>) -> Life {
        Life {
            restart: RestartPolicy { mode, max_restarts },
            ..Life::default()
        }
    }

    #[test]
    fn restart_policies_mean_what_they_mean_under_docker() {
        use RestartMode::{Always, No, OnFailure, UnlessStopped};
        assert!(!life(No, None).restarts(1, 0));
        assert!(life(Always, None).restarts(0, 1000) && life(UnlessStopped, None).restarts(0, 0));
        assert!(!life(OnFailure, None).restarts(0, 0) && life(OnFailure, None).restarts(137, 99));
        assert!(life(OnFailure, Some(2)).restarts(1, 1) && !life(OnFailure, Some(2)).restarts(1, 2));
    }

    #[test]
    fn restart_delay_doubles_to_a_minute_and_begins_again() {
        let (mut delay, short) = (RestartDelay::default(), Duration::from_secs(9));
        let delays: Vec<u128> = (0..12).map(|_| delay.after(short).as_millis()).collect();
        assert_eq!(delays[..4], [100, 200, 400, 800]);
        assert_eq!(delays[9..], [51_200, 60_000, 60_000]);
        assert_eq!(delay.after(LONG_RUN), FIRST_DELAY);
    }

    #[test]
    fn stop_signal_is_the_callers_then_the_images_then_sigterm() {
        let image = |signal: &str| {
            let text = format!(
                r#"{{"architecture":"amd64","os":"linux","config":{{"StopSignal":"{signal}"}},"rootfs":{{"type":"layers","diff_ids":[]}}}}"#
            );
            ImageConfiguration::from_reader(text.as_bytes()).unwrap()
        };
        let none = LifeOptions::default();
        assert_eq!(Life::of(&image("SIGQUIT"), &none).stop_signal, 3);
        assert_eq!(Life::of(&image("SIGNOPE"), &none).stop_signal, TERMINATE);
        let chosen = LifeOptions {
            stop_signal: Some(10),
            stop_timeout_s: Some(-1),
            ..none
        };
        let life = Life::of(&image("SIGQUIT"), &chosen);
        assert_eq!((life.stop_signal, life.stop_timeout(None)), (10, None));
        assert_eq!(life.stop_timeout(Some(3)), Some(Duration::from_secs(3)));
    }

    #[test]
    fn life_note_survives_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(LifeNote::read(directory.path()), LifeNote::default());
        let note = LifeNote {
            restarts: 3,
            restarting: Some(1),
            health: Some(HealthStatus::Healthy),
            stopped: false,
        };
        note.write(directory.path());
        assert_eq!(LifeNote::read(directory.path()), note);
    }
}
