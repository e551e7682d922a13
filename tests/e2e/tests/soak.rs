//! Many thaws of a real guest, one after the other and all at once, a container in each: none fails, nothing is left.
//!
//! `THAW_SOAK_SUCCESSIVE` and `THAW_SOAK_PARALLEL` say how many; `make soak` asks for 1,000 and 100.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use thaw_e2e::leftovers::Leftovers;
use thaw_e2e::{image, run, thaw};

const SUCCESSIVE: usize = 50;
const PARALLEL: usize = 10;
/// Of the successive ones, how many are on their way at a time: as a node's clients would overlap.
const OVERLAP: usize = 2;

fn wanted(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |n| n.parse().unwrap())
}

/// One sandbox: what it says is its own, and it says all of it. The failure, if it failed.
fn one(number: usize) -> Option<String> {
    let word = format!("sandbox-{number}");
    let script =
        format!("echo {word} >/tmp/word && cat /tmp/word && test $(cat /proc/sys/kernel/hostname) = {word}");
    let outcome = run(&mut thaw(&[
        "run",
        "--rm",
        "--hostname",
        &word,
        &image("busybox"),
        "sh",
        "-c",
        &script,
    ]));
    let right = outcome.status.success() && outcome.stdout == format!("{word}\n");
    (!right).then(|| format!("{word}: {outcome:?}"))
}

/// Runs `count` sandboxes, `at_once` at a time; gives every failure.
fn many(count: usize, at_once: usize) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < count) {
                    failures.lock().unwrap().extend(one(number));
                    if (number + 1) % 100 == 0 {
                        eprintln!("soak: {} of {count} started", number + 1);
                    }
                }
            });
        }
    });
    failures.into_inner().unwrap()
}

#[test]
#[ignore = "long: run with --all yes"]
fn many_thaws_in_a_row_and_at_once_fail_never_and_leave_nothing() {
    // The first builds the template, which stays.
    assert_eq!(one(0), None);
    let before = Leftovers::now();
    let (successive, parallel) = (
        wanted("THAW_SOAK_SUCCESSIVE", SUCCESSIVE),
        wanted("THAW_SOAK_PARALLEL", PARALLEL),
    );
    let failures = many(successive, OVERLAP);
    assert!(
        failures.is_empty(),
        "{} of {successive} in a row failed: {failures:#?}",
        failures.len()
    );
    let failures = many(parallel, parallel);
    assert!(
        failures.is_empty(),
        "{} of {parallel} at once failed: {failures:#?}",
        failures.len()
    );
    assert_eq!(Leftovers::now().changes(&before), Vec::<String>::new());
    println!("{successive} in a row and {parallel} at once: no failure, nothing left");
}
