//! The benchmark harness: every benchmark fills one [`Report`], which writes `target/bench/NAME.json` (the summary),
//! `NAME.samples.json` (every sample, in the order taken), `NAME.svg` (the picture), and prints itself as a table.
//!
//! Ratios are between things measured in turn (A B A B …) within one process's lifetime: on a machine whose speed
//! drifts, only those mean anything.

pub mod alternatives;
pub mod boot;
pub mod clock;
pub mod create;
pub mod data;
pub mod devices;
pub mod headlines;
pub mod host;
pub mod image;
pub mod machine;
pub mod network;
pub mod provenance;
pub mod report;
pub mod service;
pub mod shim;
pub mod snapshot;
pub mod surroundings;
pub mod svg;
pub mod table;
pub mod tenants;
pub mod thaw;
pub mod vmm;

pub use report::{Report, Series};

/// One of two plans, by whether there is the argument `--quick`. Any other argument ends the program.
pub fn by_quick<T>(quick: T, whole: T) -> T {
    by_parts(quick, whole, &[]).0
}

/// The same, and those of `parts` that arguments name: all of them if none is named.
pub fn by_parts<T>(quick: T, whole: T, parts: &[&'static str]) -> (T, Vec<&'static str>) {
    let (mut plan, mut named) = (whole, Vec::new());
    let mut quick = Some(quick);
    for word in std::env::args().skip(1) {
        match parts.iter().find(|part| **part == word) {
            Some(part) => named.push(*part),
            None if word == "--quick" => plan = quick.take().unwrap_or(plan),
            None => {
                eprintln!("unknown argument {word:?}: there are --quick {}", parts.join(" "));
                std::process::exit(2)
            }
        }
    }
    match named.is_empty() {
        true => (plan, parts.to_vec()),
        false => (plan, named),
    }
}

/// Ends a benchmark's program: prints what was measured, or why nothing was.
pub fn conclude(name: &str, measured: Result<Report, String>) -> std::process::ExitCode {
    match measured {
        Ok(report) => {
            print!("{}", table::terminal(&report));
            std::process::ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("bench-{name}: {why}");
            std::process::ExitCode::FAILURE
        }
    }
}
