//! docs/from-docker.md beside clap's definitions.

use std::collections::BTreeSet;

use clap::CommandFactory;

use crate::Cli;

const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/from-docker.md"));

/// The cells of each row of the tables below headings that begin with `heading`, without the tables' own heads.
fn rows(heading: &str) -> Vec<Vec<&'static str>> {
    let sections = DOCUMENT.split("\n## ").filter(|s| s.starts_with(heading));
    let lines = sections.flat_map(str::lines).filter(|l| l.starts_with("| `"));
    let cells = lines.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect());
    cells.collect()
}

/// Checks a table's rows. Returns what the column of thaw names, without backquotes.
fn checked(heading: &str) -> Vec<&'static str> {
    let mut named = Vec::new();
    for row in rows(heading) {
        let [docker, thaw, verdict, note] = row[..] else {
            panic!("{heading}: not four cells: {row:?}");
        };
        match verdict {
            "same" => named.push(thaw.trim_matches('`')),
            "different" => {
                assert!(!note.is_empty(), "{docker}: how is it different?");
                named.push(thaw.trim_matches('`'));
            }
            "not there" => assert!(
                thaw == "–" && !note.is_empty(),
                "{docker}: why, and what instead?"
            ),
            other => panic!("{docker}: {other}"),
        }
    }
    named
}

fn only_in_thaw() -> Vec<&'static str> {
    rows("Only in Thaw")
        .iter()
        .map(|row| row[0].trim_matches('`'))
        .collect()
}

#[test]
fn from_docker_has_each_command_and_no_others() {
    let mut named = checked("Commands");
    named.extend(only_in_thaw().iter().filter(|name| name.starts_with("thaw ")));
    let named: BTreeSet<&str> = named.into_iter().collect();
    let mut cli = Cli::command();
    cli.build();
    for name in &named {
        let mut command = &cli;
        for word in name.split(' ').skip(1) {
            let inner = command.find_subcommand(word);
            command = inner.unwrap_or_else(|| panic!("docs/from-docker.md: there is no {name}"));
        }
    }
    let shown = cli
        .get_subcommands()
        .filter(|c| !c.is_hide_set() && c.get_name() != "help");
    for command in shown {
        let name = format!("thaw {}", command.get_name());
        assert!(
            named.contains(name.as_str()),
            "docs/from-docker.md has no row for {name}"
        );
    }
}

#[test]
fn from_docker_has_each_flag_of_run_and_no_others() {
    let mut named = checked("Flags of `docker run`");
    named.extend(only_in_thaw().iter().filter(|name| name.starts_with("--")));
    let named: BTreeSet<&str> = named.into_iter().collect();
    let mut cli = Cli::command();
    cli.build();
    let run = cli.find_subcommand("run").unwrap();
    let shown = run.get_arguments().filter(|flag| !flag.is_hide_set());
    let there: BTreeSet<String> = shown
        .filter_map(|f| Some(format!("--{}", f.get_long()?)))
        .collect();
    for flag in &named {
        assert!(there.contains(*flag), "docs/from-docker.md: run has no {flag}");
    }
    for flag in &there {
        assert!(
            named.contains(flag.as_str()),
            "docs/from-docker.md has no row for {flag}"
        );
    }
}
