//! Mistyped flags before the image of `thaw run`.
//!
//! Words after the image may begin with `-`, so clap takes an unknown flag before it for the image. Clap itself finds unknown flags of all
//! other commands.

use clap::Args;
use thaw_sandbox::closest::closest;
use thaw_sandbox::error::{Error, ErrorKind};

use super::{Global, RunArguments};

/// Fails if the image begins as a flag does.
pub(super) fn check_image(image: &str) -> Result<(), Error> {
    if !image.starts_with('-') {
        return Ok(());
    }
    let flag = image.split('=').next().unwrap_or(image);
    let run = Global::augment_args(RunArguments::augment_args(clap::Command::new("run")));
    let shown = run.get_arguments().filter(|known| !known.is_hide_set());
    let known: Vec<String> = shown
        .filter_map(|known| Some(format!("--{}", known.get_long()?)))
        .collect();
    let closest = closest(flag, known.iter().map(String::as_str));
    let error = Error::new(
        ErrorKind::Runtime,
        format!("thaw run has no flag {flag}{closest}"),
    );
    Err(error.remedy("`thaw run --help` lists the flags; they come before the image"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::Cli;

    #[test]
    fn unknown_flag_of_run_names_the_closest() {
        check_image("busybox").unwrap();
        let error = check_image("--memroy=1g").unwrap_err().to_string();
        assert!(error.contains("--memroy; the closest is --memory"), "{error}");
        assert!(check_image("-Z").is_err());
    }

    /// A word with two of its letters exchanged.
    fn mistyped(word: &str) -> String {
        let mut letters: Vec<char> = word.chars().collect();
        letters.swap(2, 3);
        letters.into_iter().collect()
    }

    fn can_be_mistyped(word: &&str) -> bool {
        word.len() > 4 && word.as_bytes()[2] != word.as_bytes()[3]
    }

    /// Checks the flags of a command and of those below it. Returns the number of flags.
    fn check(command: &clap::Command, path: &[&str]) -> usize {
        let mut checked = 0;
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            let path = [path, &[inner.get_name()]].concat();
            let shown = inner.get_arguments().filter(|flag| !flag.is_hide_set());
            for flag in shown.filter_map(clap::Arg::get_long).filter(can_be_mistyped) {
                let wrong = format!("--{}", mistyped(flag));
                let error = match Cli::try_parse_from([&path[..], &[wrong.as_str(), "x"]].concat()) {
                    Ok(_) => check_image(&wrong).unwrap_err().to_string(),
                    Err(e) => e.to_string(),
                };
                assert!(error.contains(&format!("--{flag}")), "{path:?} {wrong}: {error}");
                checked += 1;
            }
            checked += check(inner, &path);
        }
        checked
    }

    #[test]
    fn every_command_suggests_the_closest_flag_and_command() {
        let mut cli = Cli::command();
        cli.build();
        assert!(check(&cli, &["thaw"]) > 100);
        let names = cli.get_subcommands().filter(|inner| !inner.is_hide_set());
        for name in names.map(clap::Command::get_name).filter(can_be_mistyped) {
            let error = Cli::try_parse_from(["thaw", mistyped(name).as_str()])
                .unwrap_err()
                .to_string();
            assert!(error.contains(&format!("'{name}'")), "{name}: {error}");
        }
    }
}
