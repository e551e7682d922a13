//! `thaw timeout`: changes how long a running sandbox may run.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use thaw_protocol::api::{ChangeSandbox, OnTimeout};
use thaw_sandbox::error::Error;

use super::running::Owner;

/// A timeout in seconds, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(Option<u32>);

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  thaw timeout web 30m\n  thaw timeout web 12h --on-timeout pause\n  thaw timeout web --idle 10m --on-timeout pause\n  thaw timeout web none"
)]
pub struct TimeoutArguments {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// How long it may run from now on: a number with s, m, h or d; `none` for no timeout [default: as before]
    #[arg(value_name = "TIME", value_parser = parse_seconds, required_unless_present_any = ["on_timeout", "idle"])]
    pub timeout: Option<Seconds>,
    /// How long it may be idle; `none` for no such timeout [default: as before]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub idle: Option<Seconds>,
    /// What happens then: `delete`, or `pause` [default: as before]
    #[arg(long, value_name = "ACTION", value_parser = PossibleValuesParser::new(["delete", "pause"]).map(action), hide_possible_values = true)]
    pub on_timeout: Option<OnTimeout>,
}

/// `thaw timeout`.
pub(super) async fn change(arguments: &TimeoutArguments) -> Result<u8, Error> {
    let owner = Owner::find(&arguments.sandbox)?;
    let change = ChangeSandbox {
        timeout_s: arguments.timeout.map(|Seconds(seconds)| seconds),
        idle_timeout_s: arguments.idle.map(|Seconds(seconds)| seconds),
        on_timeout: arguments.on_timeout,
        ..ChangeSandbox::default()
    };
    owner.client.change(&owner.id, &change).await?;
    Ok(0)
}

fn action(name: String) -> OnTimeout {
    match name.as_str() {
        "pause" => OnTimeout::Pause,
        _ => OnTimeout::Delete,
    }
}

fn parse_seconds(text: &str) -> Result<Seconds, String> {
    if text == "none" {
        return Ok(Seconds(None));
    }
    let wrong = || "a time such as 90s, 30m, 12h or 7d, at least 1s, or none".to_owned();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds: u32 = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let digits = &text[..text.len() - 1];
    let number = digits.bytes().all(|b| b.is_ascii_digit()).then_some(digits);
    let number = number.and_then(|digits| digits.parse::<u32>().ok());
    let total = number.and_then(|number| number.checked_mul(seconds));
    total
        .filter(|total| *total > 0)
        .map(|total| Seconds(Some(total)))
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_numbers_with_a_unit_or_none() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800)] {
            assert_eq!(parse_seconds(text), Ok(Seconds(Some(seconds))), "{text}");
        }
        assert_eq!(parse_seconds("none"), Ok(Seconds(None)));
        for wrong in ["", "5", "s", "0s", "+5s", "-1s", "1.5h", "5µ", "99999d", "1m30s"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
