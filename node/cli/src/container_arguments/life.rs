//! The flags of `thaw run` for the life of its container: how it is stopped, and when its program is started again.

use std::str::FromStr;

use clap::Args;
use thaw_protocol::api::{RestartMode, RestartPolicy};
use thaw_sandbox::container::LifeOptions;
use thaw_sandbox::container::signals::parse_signal;
use thaw_sandbox::error::{Error, ErrorKind};

/// The value of `--restart`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restart(pub RestartPolicy);

impl FromStr for Restart {
    type Err = String;

    fn from_str(text: &str) -> Result<Restart, String> {
        let (name, most) = match text.split_once(':') {
            Some((name, most)) => (name, Some(most)),
            None => (text, None),
        };
        let mode = match name {
            "no" => RestartMode::No,
            "on-failure" => RestartMode::OnFailure,
            "unless-stopped" => RestartMode::UnlessStopped,
            "always" => RestartMode::Always,
            _ => return Err("no, on-failure, on-failure:N, unless-stopped or always".into()),
        };
        let number = |text: &str| {
            text.parse::<u32>()
                .map_err(|_| "N in on-failure:N is a number".to_owned())
        };
        let policy = RestartPolicy {
            mode,
            // As under docker, 0 is no limit.
            max_restarts: most.map(number).transpose()?.filter(|most| *most > 0),
        };
        match most.is_some() && mode != RestartMode::OnFailure {
            true => Err("a number of restarts goes with on-failure only".into()),
            false => policy.check().map(|()| Restart(policy)),
        }
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Container options")]
pub struct LifeArguments {
    /// With --detach, start the program again when it ends: `no`, `on-failure[:N]` (at most N times), `unless-stopped` or `always`.
    /// After 100 ms, then twice the time, at most 60 s. `thaw stop` and `thaw kill` end it [default: no]
    #[arg(long, value_name = "POLICY")]
    pub restart: Option<Restart>,
    /// The signal by which `thaw stop` and `thaw restart` stop it [default: the image's, or TERM]
    #[arg(long, value_name = "SIGNAL", value_parser = parse_signal)]
    pub stop_signal: Option<u8>,
    /// Seconds from that signal to SIGKILL; -1: never [default: 10]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..=86_400))]
    pub stop_timeout: Option<i32>,
}

impl LifeArguments {
    /// The life that the flags choose.
    ///
    /// # Errors
    /// They name a restart policy for a container that this command attaches to, or that leaves nothing.
    pub(crate) fn options(&self, detach: bool, rm: bool, open_stdin: bool) -> Result<LifeOptions, Error> {
        let restart = self.restart.unwrap_or_default().0;
        if restart.mode != RestartMode::No && !detach {
            let what = "--restart: only a container of --detach is started again";
            return Err(Error::new(ErrorKind::Runtime, what).remedy("add -d, or leave out --restart"));
        }
        if restart.mode != RestartMode::No && rm {
            let what = "--restart and --rm exclude each other";
            return Err(Error::new(ErrorKind::Runtime, what).remedy("leave one of them out"));
        }
        Ok(LifeOptions {
            restart,
            stop_signal: self.stop_signal,
            stop_timeout_s: self.stop_timeout,
            open_stdin,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_policies_are_written_as_under_docker() {
        let parse = |text: &str| text.parse::<Restart>().map(|r| (r.0.mode, r.0.max_restarts));
        assert_eq!(parse("no"), Ok((RestartMode::No, None)));
        assert_eq!(parse("on-failure"), Ok((RestartMode::OnFailure, None)));
        assert_eq!(parse("on-failure:5"), Ok((RestartMode::OnFailure, Some(5))));
        assert_eq!(parse("on-failure:0"), Ok((RestartMode::OnFailure, None)));
        assert_eq!(parse("unless-stopped"), Ok((RestartMode::UnlessStopped, None)));
        for wrong in [
            "",
            "yes",
            "always:3",
            "no:1",
            "on-failure:",
            "on-failure:-1",
            "on-failure:x",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn restart_policy_needs_detach_and_excludes_rm() {
        let arguments = LifeArguments {
            restart: Some("always".parse().unwrap()),
            stop_signal: Some(2),
            stop_timeout: None,
        };
        assert!(arguments.options(false, false, false).is_err());
        assert!(arguments.options(true, true, false).is_err());
        let options = arguments.options(true, false, true).unwrap();
        assert_eq!((options.stop_signal, options.open_stdin), (Some(2), true));
    }
}
