//! What may stand at a place of the command line, from clap's definitions and the names on this host.

use clap::{Arg, Command, ValueHint};

/// One word that the shell may put in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub value: String,
    pub help: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Completion {
    Candidates(Vec<Candidate>),
    /// The shell completes file names.
    Files,
}

/// Names that change while the program runs.
pub(super) trait Names {
    fn sandboxes(&self) -> Vec<Candidate>;
    fn images(&self) -> Vec<Candidate>;
    fn snapshots(&self) -> Vec<Candidate>;
}

/// The place that the words before the last one lead to.
struct Place<'a> {
    command: &'a Command,
    /// A flag that the next word is the value of.
    flag: Option<&'a Arg>,
    /// How many positional arguments came before.
    positionals: usize,
    /// No flags of thaw follow: after `--`, and after the image of `thaw run`.
    no_flags: bool,
}

/// What the last of `words` may become. `cli` is built (`Command::build`); the words do not include its name.
pub(super) fn complete(cli: &Command, words: &[String], names: &dyn Names) -> Completion {
    let (typed, before) = match words.split_last() {
        Some((typed, before)) => (typed.as_str(), before),
        None => ("", words),
    };
    let place = find_place(cli, before);
    if let Some(flag) = place.flag {
        return values(flag, typed, "", names);
    }
    if !place.no_flags && typed.starts_with('-') {
        let Some((name, value)) = typed.split_once('=') else {
            return Completion::Candidates(starting_with(flags(place.command), typed));
        };
        return match long_flag(place.command, name) {
            Some(flag) => values(flag, value, &format!("{name}="), names),
            None => Completion::Candidates(Vec::new()),
        };
    }
    if place.command.has_subcommands() && place.positionals == 0 {
        return Completion::Candidates(starting_with(subcommands(place.command), typed));
    }
    match positional(&place) {
        Some(argument) => values(argument, typed, "", names),
        None => Completion::Candidates(Vec::new()),
    }
}

fn find_place<'a>(cli: &'a Command, before: &[String]) -> Place<'a> {
    let mut place = Place {
        command: cli,
        flag: None,
        positionals: 0,
        no_flags: false,
    };
    for word in before {
        if place.flag.take().is_some() {
            continue;
        }
        if !place.no_flags && word == "--" {
            place.no_flags = true;
        } else if !place.no_flags && word.starts_with('-') && word.len() > 1 {
            place.flag = wants_value(place.command, word);
        } else if let (0, Some(inner)) = (place.positionals, place.command.find_subcommand(word)) {
            place.command = inner;
        } else {
            place.no_flags |= positional(&place).is_some_and(Arg::is_trailing_var_arg_set);
            place.positionals += 1;
        }
    }
    place
}

/// The flag among those that `word` gives whose value is the next word.
fn wants_value<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let separate = |flag: &&Arg| flag.get_action().takes_values() && !flag.is_require_equals_set();
    if word.starts_with("--") {
        return long_flag(command, word).filter(separate);
    }
    let letters: Vec<char> = word.chars().skip(1).collect();
    let first = letters.iter().enumerate().find_map(|(at, letter)| {
        let flag = command.get_arguments().find(|a| a.get_short() == Some(*letter))?;
        separate(&flag).then_some((at, flag))
    });
    // In `-n5` the value follows at once.
    first
        .filter(|(at, _)| at + 1 == letters.len())
        .map(|(_, flag)| flag)
}

fn long_flag<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.strip_prefix("--")?;
    command.get_arguments().find(|flag| {
        let aliases = flag.get_all_aliases().unwrap_or_default();
        flag.get_long() == Some(name) || aliases.contains(&name)
    })
}

/// The positional argument at this place; the last one if it takes several values.
fn positional<'a>(place: &Place<'a>) -> Option<&'a Arg> {
    let all: Vec<&Arg> = place.command.get_positionals().collect();
    let several = |argument: &&&Arg| {
        let values = argument.get_num_args().is_some_and(|n| n.max_values() > 1);
        values || matches!(argument.get_action(), clap::ArgAction::Append)
    };
    let last = all.last().filter(several);
    all.get(place.positionals).or(last).copied()
}

/// Values of `argument` that begin with `typed`, each after `prefix`.
fn values(argument: &Arg, typed: &str, prefix: &str, names: &dyn Names) -> Completion {
    let label = value_label(argument);
    let found = if !argument.get_possible_values().is_empty() {
        let possible = argument.get_possible_values().into_iter();
        let shown = possible.filter(|value| !value.is_hide_set());
        let candidates = shown.map(|value| candidate(value.get_name(), value.get_help()));
        candidates.collect()
    } else if label.contains("SANDBOX") {
        names.sandboxes()
    } else if matches!(label.as_str(), "SRC" | "DST") && !typed.contains(['/', '.']) {
        let inside = names.sandboxes().into_iter().map(|sandbox| Candidate {
            value: format!("{}:", sandbox.value),
            ..sandbox
        });
        inside.collect()
    } else if label.contains("SNAPSHOT") && !typed.contains(['/', '.']) {
        names.snapshots()
    } else if label.contains("IMAGE") {
        names.images()
    } else if takes_path(argument, &label) {
        return Completion::Files;
    } else {
        Vec::new()
    };
    let found = starting_with(found, typed).into_iter();
    let whole = found.map(|candidate| Candidate {
        value: format!("{prefix}{}", candidate.value),
        ..candidate
    });
    Completion::Candidates(whole.collect())
}

/// What the help calls the value, or the argument's name.
fn value_label(argument: &Arg) -> String {
    let named = argument.get_value_names().and_then(|names| names.first());
    let label = named.map_or(argument.get_id().as_str(), |name| name.as_str());
    label.to_uppercase()
}

fn takes_path(argument: &Arg, label: &str) -> bool {
    let hinted = matches!(
        argument.get_value_hint(),
        ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath
    );
    hinted
        || ["FILE", "DIR", "PATH", "SNAPSHOT", "HOST:GUEST", "SRC", "DST"]
            .iter()
            .any(|path| label.starts_with(path))
}

fn flags(command: &Command) -> Vec<Candidate> {
    let shown = command.get_arguments().filter(|flag| !flag.is_hide_set());
    let long = shown.filter_map(|flag| {
        let name = format!("--{}", flag.get_long()?);
        Some(candidate(&name, flag.get_help()))
    });
    long.collect()
}

fn subcommands(command: &Command) -> Vec<Candidate> {
    let shown = command.get_subcommands().filter(|inner| !inner.is_hide_set());
    shown
        .map(|inner| candidate(inner.get_name(), inner.get_about()))
        .collect()
}

fn candidate(value: &str, help: Option<&clap::builder::StyledStr>) -> Candidate {
    let help = help.map(ToString::to_string).unwrap_or_default();
    Candidate {
        value: value.to_owned(),
        help: help.lines().next().unwrap_or_default().replace('\t', " "),
    }
}

fn starting_with(mut candidates: Vec<Candidate>, typed: &str) -> Vec<Candidate> {
    candidates.retain(|candidate| candidate.value.starts_with(typed));
    candidates
}

#[cfg(test)]
#[path = "candidates_test.rs"]
mod tests;
