//! `thaw events`: what happens to the sandboxes of this node's thawd, as it happens. It is the API's watch; each line of the output is one
//! of its changes that is an event.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::{Map, Value, json};
use thaw_daemon::api::client::{Changes, Client};
use thaw_images::index::rfc3339;
use thaw_protocol::api::{Sandbox, SandboxEvent, WatchEvent};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;

use super::Global;
use super::format::Format;
use super::interrupt::interrupted;
use super::logs::parse_since;
use crate::stdio::unwritten;
use crate::table::printable;

mod filter;

use filter::Filter;

/// How long an event may take to arrive after it happened.
const LAST: Duration = Duration::from_millis(300);

#[derive(Debug, Args)]
#[command(after_help = "\
Events: create, start, oom, die, kill, stop, restart, pause, unpause, health_status, destroy. thawd keeps those of the last minute, and at least
the last 256 changes. It sees start, oom and die of containers that `-d` or the API started.
Filters: event=ACTION, container=ID, NAME or the beginning of an id, image=IMAGE, label=KEY[=VALUE], type=container. Values of the
same key are alternatives.
Fields of templates: .Type .Action .Status .ID .From .Time .TimeNano .Actor.ID .Actor.Attributes

Examples:
  thaw events --filter event=die --filter event=start
  thaw events --since 1m --until 0s --format '{{.Action}} {{.Actor.Attributes.name}}'")]
pub struct EventsArguments {
    /// Begin with kept events since this time: RFC 3339, seconds since the epoch, or a duration before now such as 90s, 10m
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub since: Option<u64>,
    /// End at this time, written in the same way
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub until: Option<u64>,
    /// Show only events to which this applies; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub filter: Vec<Filter>,
    /// `json`: an object per line; or a Go template with {{.Field}} and {{json .Field}}
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
}

/// The fields of templates.
const FIELDS: [&str; 8] = [
    "Type", "Action", "Status", "ID", "From", "Time", "TimeNano", "Actor",
];

/// An event as it is shown.
struct Shown<'a> {
    event: SandboxEvent,
    sandbox: &'a Sandbox,
}

pub(super) async fn events(arguments: &EventsArguments, global: &Global) -> Result<u8, Error> {
    let json = match global.json {
        true => Some(Format::Json),
        false => None,
    };
    let format = arguments.format.as_ref().or(json.as_ref());
    if let Some(format) = format {
        format.check(&FIELDS)?;
        format.check_stream()?;
    }
    let client = Client::connect(&Paths::from_env().daemon_socket()).ok_or_else(no_thawd)?;
    let changes = client.changes(arguments.since).await?;
    tokio::select! {
        ended = follow(changes, arguments, format) => ended,
        // As under docker, it ends with the signal's status.
        status = interrupted() => Ok(status),
    }
}

async fn follow(
    mut changes: Changes,
    arguments: &EventsArguments,
    format: Option<&Format>,
) -> Result<u8, Error> {
    // However long thawd takes to send what it kept: it says when that was all.
    let mut is_present = arguments.since.is_none();
    loop {
        let change = match arguments.until {
            Some(until) if is_present => match tokio::time::timeout(left(until), changes.next()).await {
                Ok(change) => change,
                Err(_) => return Ok(0),
            },
            _ => changes.next().await,
        };
        let Some(change) = change.transpose()? else {
            return Ok(0);
        };
        is_present |= matches!(change, WatchEvent::Bookmark(_));
        let Some(shown) = Shown::of(&change)? else {
            continue;
        };
        if arguments.until.is_some_and(|until| shown.event.at_ns > until) {
            return Ok(0);
        }
        let is_kept = arguments.since.is_none_or(|since| shown.event.at_ns >= since);
        if is_kept
            && filter::admit(&arguments.filter, shown.event.action.name(), shown.sandbox)
            && let Err(e) = shown.print(format)?
        {
            return unwritten(&e);
        }
    }
}

/// The time until a moment, and long enough to receive what happens until then.
fn left(until: u64) -> Duration {
    let until = UNIX_EPOCH + Duration::from_nanos(until);
    let left = until.duration_since(SystemTime::now());
    left.unwrap_or_default() + LAST
}

fn no_thawd() -> Error {
    let socket = Paths::from_env().daemon_socket();
    let what = format!("no thawd answers at {}", socket.display());
    Error::new(ErrorKind::DaemonUnreachable, what).remedy("events are thawd's: start it")
}

impl Shown<'_> {
    /// The event of a change, if it is one.
    ///
    /// # Errors
    /// The change is the watch's failure.
    fn of(change: &WatchEvent) -> Result<Option<Shown<'_>>, Error> {
        let sandbox = match change {
            WatchEvent::Added(sandbox) | WatchEvent::Modified(sandbox) | WatchEvent::Deleted(sandbox) => {
                sandbox
            }
            WatchEvent::Bookmark(_) => return Ok(None),
            WatchEvent::Error(problem) => {
                let error = Error::new(ErrorKind::Runtime, problem.detail.clone());
                return Err(error.remedy("begin again: this command was too slow for the events"));
            }
        };
        Ok(sandbox.event.map(|event| Shown { event, sandbox }))
    }

    /// Writes it as a line. The inner error is that of the write.
    fn print(&self, format: Option<&Format>) -> Result<io::Result<()>, Error> {
        let line = match format {
            Some(format) => format.line(&self.fields())?,
            None => self.line(),
        };
        let mut stdout = io::stdout().lock();
        Ok(writeln!(stdout, "{line}").and_then(|()| stdout.flush()))
    }

    fn attributes(&self) -> Map<String, Value> {
        let labels = self.sandbox.labels.iter();
        let mut attributes: Map<String, Value> =
            labels.map(|(key, value)| (key.clone(), json!(value))).collect();
        attributes.insert("image".into(), json!(self.sandbox.image));
        attributes.insert("name".into(), json!(self.sandbox.name));
        if let Some(status) = self.event.exit_code {
            attributes.insert("exitCode".into(), json!(status.to_string()));
        }
        if let Some(signal) = self.event.signal {
            attributes.insert("signal".into(), json!(signal.to_string()));
        }
        if let Some(health) = self.event.health {
            attributes.insert("health".into(), json!(health.name()));
        }
        attributes
    }

    /// As docker writes it.
    fn line(&self) -> String {
        let attributes = self.attributes();
        let texts = attributes.iter().filter_map(|(key, value)| {
            let text = value.as_str()?;
            Some(format!("{key}={}", printable(text)))
        });
        let texts: Vec<String> = texts.collect();
        let (time, id) = (rfc3339::format_nanoseconds(self.event.at_ns), &self.sandbox.id);
        format!(
            "{time} container {} {id} ({})",
            self.event.action.name(),
            texts.join(", ")
        )
    }

    /// The fields of templates, with docker's names.
    fn fields(&self) -> Value {
        json!({
            "Type": "container",
            "Action": self.event.action.name(),
            "Status": self.event.action.name(),
            "ID": self.sandbox.id,
            "From": self.sandbox.image,
            "Time": self.event.at_ns / 1_000_000_000,
            "TimeNano": self.event.at_ns,
            "Actor": {"ID": self.sandbox.id, "Attributes": self.attributes()},
        })
    }
}

#[cfg(test)]
mod tests {
    use thaw_protocol::api::SandboxAction;

    use super::*;

    fn sandbox(event: Option<SandboxEvent>) -> Sandbox {
        Sandbox {
            id: "a1".into(),
            name: Some("web".into()),
            image: "app:1".into(),
            labels: [("tier".into(), "front".into())].into(),
            event,
            ..Sandbox::default()
        }
    }

    #[test]
    fn event_is_a_line_as_docker_writes_it() {
        let died = SandboxEvent {
            action: SandboxAction::Die,
            at_ns: 1_000_000_002,
            exit_code: Some(3),
            signal: None,
            health: None,
        };
        let change = WatchEvent::Modified(sandbox(Some(died)));
        let shown = Shown::of(&change).unwrap().unwrap();
        assert_eq!(
            shown.line(),
            "1970-01-01T00:00:01.000000002Z container die a1 (exitCode=3, image=app:1, name=web, tier=front)"
        );
        let fields = shown.fields();
        assert_eq!(fields["Actor"]["Attributes"]["name"], "web");
        let names = fields.as_object().unwrap().keys();
        assert!(
            names.clone().count() == FIELDS.len() && names.into_iter().all(|n| FIELDS.contains(&n.as_str()))
        );
    }

    #[test]
    fn changes_without_an_event_are_not_shown() {
        assert!(Shown::of(&WatchEvent::Modified(sandbox(None))).unwrap().is_none());
        let gone = SandboxEvent::now(SandboxAction::Destroy);
        let deleted = WatchEvent::Deleted(sandbox(Some(gone)));
        assert_eq!(Shown::of(&deleted).unwrap().unwrap().event, gone);
    }
}
