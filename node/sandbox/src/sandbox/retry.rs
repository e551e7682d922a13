//! Retries once if a machine is lost before it is ready.
//!
//! No program of the user runs before the acknowledgement, so a retry repeats nothing. Only death and silence ([`Error::machine_lost`]) are
//! retried: a refusal would be repeated. Each retry is logged and reported.

use std::time::Duration;

use super::Resources;
use super::machine::describe;
use crate::error::Error;

/// How long to wait for a silent machine's end: the VMM reports the reason, then ends.
const END_LINGERS: Duration = Duration::from_secs(1);

/// Runs `make`. If the machine is lost, reports it to `told` and runs `make` once more. Returns the second error, if any.
pub(super) async fn retry_once<T, F: Future<Output = Result<T, Error>>>(
    told: impl Fn(&str),
    make: impl Fn() -> F,
) -> Result<T, Error> {
    match make().await {
        Err(first) if first.machine_lost => {
            let text = format!("the first machine died before it was ready: {}", first.what);
            tracing::warn!("{text}");
            for line in &first.context {
                tracing::warn!("  | {line}");
            }
            told(&text);
            make().await.map_err(Error::for_good)
        }
        other => other,
    }
}

/// Adds to an error why the machine ended, if it has.
pub(super) async fn with_end_reason(failure: Error, resources: &Resources) -> Error {
    let Some(control) = resources.control.as_ref().filter(|_| failure.machine_lost) else {
        return failure;
    };
    let mut life = control.life();
    let ended = life.wait_for(|l| l.exited.is_some() || l.closed);
    let Ok(Ok(ended)) = tokio::time::timeout(END_LINGERS, ended).await else {
        return failure;
    };
    let why = match &ended.exited {
        Some(reason) => describe(reason),
        None => ended.closed_because(),
    };
    let what = format!("{why} ({})", failure.what);
    Error { what, ..failure }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use std::cell::{Cell, RefCell};

    fn lost(what: &str) -> Error {
        Error::new(ErrorKind::GuestNotReady, what).lost()
    }

    /// Runs `make` with each outcome in turn. Returns the result, the number of attempts, and the reports.
    async fn outcome(outcomes: [Result<u8, Error>; 2]) -> (Result<u8, Error>, usize, Vec<String>) {
        let (left, tried, told) = (
            RefCell::new(Vec::from(outcomes)),
            Cell::new(0),
            RefCell::new(vec![]),
        );
        let made = retry_once(
            |text| told.borrow_mut().push(text.to_owned()),
            || {
                tried.set(tried.get() + 1);
                std::future::ready(left.borrow_mut().remove(0))
            },
        )
        .await;
        (made, tried.get(), told.into_inner())
    }

    #[tokio::test]
    async fn a_lost_machine_is_made_again_once_and_a_refusal_stands() {
        let (made, tried, told) = outcome([Ok(1), Ok(2)]).await;
        assert_eq!((made.unwrap(), tried, told.len()), (1, 1, 0));

        let (made, tried, told) = outcome([Err(lost("it fell over")), Ok(2)]).await;
        assert_eq!((made.unwrap(), tried), (2, 2));
        assert_eq!(told, ["the first machine died before it was ready: it fell over"]);

        let (made, tried, _) = outcome([Err(lost("first")), Err(lost("second"))]).await;
        let second = made.unwrap_err();
        assert_eq!((second.what.as_str(), tried), ("second", 2));
        assert!(!second.machine_lost, "nobody outside tries a third time");

        let refused = Error::new(ErrorKind::SnapshotDamaged, "damaged");
        let (made, tried, told) = outcome([Err(refused), Ok(2)]).await;
        assert_eq!(
            (made.unwrap_err().what.as_str(), tried, told.len()),
            ("damaged", 1, 0)
        );
    }
}
