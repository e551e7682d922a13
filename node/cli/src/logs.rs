//! `thaw logs`: the kept output of a container, from its sandbox's owner, or from the files of an ended sandbox.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use thaw_daemon::api::client::Logs;
use thaw_daemon::api::logs::{LogReader, Selection, parse_moment};
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::RunDirectory;
use tokio::sync::watch;

use super::running::Owner;
use crate::stdio::{Written, unwritten};

/// The remedy if there is neither a running sandbox nor a record of an ended one.
pub(super) const LISTED: &str =
    "`thaw ps -a` lists running and ended sandboxes; nothing is kept after `thaw rm` or with --rm";

#[derive(Debug, Args)]
#[command(after_help = "\
The last 1 to 2 MiB of the output are kept: of containers that `-d` or the API started, also after their end, until `thaw rm`.
What the container wrote to stdout is written to stdout, and its stderr to stderr.

Examples:
  thaw logs web
  thaw logs -f --tail 10 web
  thaw logs -t --since 10m web 2>errors")]
pub struct LogsArguments {
    /// Also show later output, until the container ends
    #[arg(short, long)]
    pub follow: bool,
    /// Show only this number of last lines, or `all`
    #[arg(short = 'n', long, value_name = "LINES", default_value = "all", value_parser = parse_tail)]
    pub tail: u64,
    /// Show only output since this time: RFC 3339, seconds since the epoch, or a duration before now such as 90s, 10m, 1h30m
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub since: Option<u64>,
    /// Put the time of arrival before each line, in UTC
    #[arg(short, long)]
    pub timestamps: bool,
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
}

fn parse_tail(text: &str) -> Result<u64, String> {
    match text {
        "all" => Ok(u64::MAX),
        number => number
            .parse()
            .map_err(|_| "a number of lines, or `all`".to_owned()),
    }
}

pub(super) fn parse_since(text: &str) -> Result<u64, String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    let moment = parse_moment(text).or_else(|| Some(now.saturating_sub(parse_duration(text)?)));
    moment.ok_or_else(|| "a time such as 2026-01-31T12:00:00Z, or a duration such as 10m".to_owned())
}

/// A sum of whole numbers with the units d, h, m and s, in nanoseconds.
fn parse_duration(text: &str) -> Option<u64> {
    let (mut total, mut rest) = (0u64, text);
    while !rest.is_empty() {
        let unit = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, after) = rest.split_at(unit);
        let seconds = match after.chars().next()? {
            'd' => 86_400,
            'h' => 3600,
            'm' => 60,
            's' => 1,
            _ => return None,
        };
        let part = number.parse::<u64>().ok()?.checked_mul(seconds * 1_000_000_000)?;
        total = total.checked_add(part)?;
        rest = &after[1..];
    }
    (!text.is_empty()).then_some(total)
}

pub(super) async fn logs(arguments: &LogsArguments) -> Result<u8, Error> {
    let selection = Selection {
        only: None,
        follow: arguments.follow,
        tail: (arguments.tail < u64::MAX).then_some(arguments.tail),
        since: arguments.since.unwrap_or(0),
        timestamps: arguments.timestamps,
    };
    let mut source = Source::find(&arguments.sandbox, &selection).await?;
    let mut written = Written::default();
    while let Some((output, data)) = source.next().await? {
        if let Err(e) = written.write(output, &data).await {
            return unwritten(&e);
        }
    }
    Ok(0)
}

/// Where the output comes from.
enum Source {
    /// The owner of a running sandbox.
    Owner(Logs),
    /// The files of an ended sandbox.
    Files(LogReader, VecDeque<(Output, Vec<u8>)>),
}

impl Source {
    async fn find(wanted: &str, selection: &Selection) -> Result<Source, Error> {
        let failure = match Owner::find(wanted) {
            Ok(owner) => match owner.client.logs(&owner.id, selection).await {
                Ok(logs) => return Ok(Source::Owner(logs)),
                Err(e) => e,
            },
            Err(e) => e,
        };
        // It may have ended just now.
        let has_no_owner = matches!(
            failure.kind,
            ErrorKind::SandboxNotFound | ErrorKind::DaemonUnreachable
        );
        match has_no_owner {
            true => Source::of_ended(wanted, selection, failure).await,
            false => Err(failure),
        }
    }

    async fn of_ended(wanted: &str, selection: &Selection, failure: Error) -> Result<Source, Error> {
        let run = RunDirectory::open(&Paths::from_env().run)?;
        let Some(ended) = run.find_ended(wanted)? else {
            return Err(match failure.kind {
                ErrorKind::SandboxNotFound => failure.remedy(LISTED),
                _ => failure,
            });
        };
        let id = ended.id;
        let unreadable = |e| Error::system(format!("cannot read the output of sandbox {id}"), &e);
        let journal = Journal::kept(&run.ended_output(&id)).map_err(unreadable)?;
        let journal = journal.ok_or_else(|| {
            let what = format!("sandbox {id}: its output was not kept, or was removed to limit its size");
            Error::new(ErrorKind::SandboxNotFound, what).remedy("`thaw ps -a` shows how it ended")
        })?;
        let (_, closing) = watch::channel(false);
        let reader = LogReader::open(Arc::new(journal), *selection, closing).await;
        Ok(Source::Files(reader.map_err(unreadable)?, VecDeque::new()))
    }

    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Result<Option<(Output, Vec<u8>)>, Error> {
        match self {
            Source::Owner(logs) => logs.next().await.transpose(),
            Source::Files(reader, read) => {
                if read.is_empty()
                    && let Some(pieces) = reader.next().await
                {
                    let broken = |e| Error::system("cannot read the output", &e);
                    read.extend(pieces.map_err(broken)?);
                }
                Ok(read.pop_front())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_sums_of_units() {
        for (text, seconds) in [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d1s", 172_801)] {
            assert_eq!(parse_duration(text), Some(seconds * 1_000_000_000), "{text}");
        }
        for wrong in ["", "5", "m", "5x", "1.5h", "-1s", "99999999999999d", "5µ"] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn since_is_a_moment_or_a_duration_before_now() {
        assert_eq!(parse_since("1970-01-01T00:00:01Z"), Ok(1_000_000_000));
        assert_eq!(parse_since("12.5"), Ok(12_500_000_000));
        let hour = parse_since("0s").unwrap() - parse_since("1h").unwrap();
        assert!(hour.abs_diff(3_600_000_000_000) < 60_000_000_000);
        assert!(parse_since("yesterday").is_err());
    }

    #[test]
    fn tail_is_a_number_or_all() {
        assert_eq!((parse_tail("3"), parse_tail("all")), (Ok(3), Ok(u64::MAX)));
        assert!(parse_tail("-1").is_err() && parse_tail("").is_err());
    }
}
