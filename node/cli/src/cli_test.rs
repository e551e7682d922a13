use super::*;
use clap::CommandFactory;

fn parse_run(line: &[&str]) -> RunArguments {
    let all = ["thaw", "run"].iter().chain(line);
    match Cli::try_parse_from(all).unwrap().command {
        Command::Run(arguments) => *arguments,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn flags_after_the_image_are_the_commands() {
    let run = parse_run(&[
        "--rm", "-it", "-e", "A=1", "busybox", "ls", "-l", "-e", "--rm", "--help",
    ]);
    assert!(run.rm && run.process.interactive && run.process.tty);
    assert_eq!(run.process.env, ["A=1"]);
    assert_eq!(
        run.image_and_command,
        ["busybox", "ls", "-l", "-e", "--rm", "--help"]
    );
    let first = parse_run(&["busybox", "-e", "x"]);
    assert_eq!(first.image_and_command, ["busybox", "-e", "x"]);
    assert!(first.process.env.is_empty());
}

#[test]
fn defaults_are_as_documented() {
    let run = parse_run(&["x"]);
    assert_eq!((run.cpus, run.memory.mebibytes()), (1, 512));
    assert_eq!(
        (run.network, run.source.pull),
        (NetworkMode::Private, Pull::Missing)
    );
}

#[test]
fn what_cannot_be_is_wrong_usage() {
    for line in [
        &["thaw", "run"][..],
        &["thaw", "run", "--cpus", "17", "x"],
        &["thaw", "run", "--cpus", "0", "x"],
        &["thaw", "run", "--memory", "much", "x"],
        &["thaw", "run", "--network", "host", "x"],
        &["thaw", "run", "-p", "80", "x"],
        &["thaw", "run", "--egress", "allow=everywhere", "x"],
        &["thaw", "network", "x"],
        &["thaw", "run", "--name", "a/b", "x"],
        &["thaw", "exec", "x"],
        &["thaw", "image", "rm"],
        &["thaw", "nonsense"],
    ] {
        let error = Cli::try_parse_from(line).unwrap_err();
        assert!(error.use_stderr(), "{line:?}");
    }
}

#[test]
fn docker_users_guesses_work() {
    let run = parse_run(&[
        "-m",
        "1g",
        "-w",
        "/srv",
        "-u",
        "1:2",
        "-h",
        "box",
        "--entrypoint",
        "",
        "x",
    ]);
    assert_eq!(run.memory.mebibytes(), 1024);
    assert_eq!(
        (run.process.workdir.as_deref(), run.process.user.as_deref()),
        (Some("/srv"), Some("1:2"))
    );
    assert_eq!(
        (run.hostname.as_deref(), run.entrypoint.as_deref()),
        (Some("box"), Some(""))
    );
}

#[test]
fn a_recording_may_go_to_a_file_too() {
    let record = |flags: &[&str]| {
        let words = [&["thaw", "run"], flags, &["image"]].concat();
        match Cli::try_parse_from(words).unwrap().command {
            Command::Run(arguments) => arguments.record,
            _ => unreachable!(),
        }
    };
    assert_eq!(record(&[]), None);
    assert_eq!(record(&["--record"]), Some(None));
    assert_eq!(record(&["--record=x"]), Some(Some("x".into())));
}

#[test]
fn every_flag_has_help() {
    for command in Cli::command().get_subcommands() {
        for argument in command.get_arguments() {
            assert!(
                argument.get_help().is_some(),
                "{} {}",
                command.get_name(),
                argument.get_id()
            );
        }
    }
}

#[test]
fn every_command_has_an_example() {
    fn check(command: &clap::Command) {
        for inner in command.get_subcommands().filter(|c| !c.is_hide_set()) {
            let help = inner.get_after_help().or(inner.get_after_long_help());
            let has_one = help.is_some_and(|text| text.to_string().contains("Example"));
            let obvious = inner.has_subcommands() || matches!(inner.get_name(), "version" | "help");
            assert!(has_one || obvious, "{}", inner.get_name());
            check(inner);
        }
    }
    check(&Cli::command());
}

#[test]
fn the_document_is_the_help() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md");
    let document = document();
    if std::env::var_os("THAW_WRITE_DOCS").is_some() {
        std::fs::write(path, &document).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == document,
        "docs/cli.md is stale: run the tests with THAW_WRITE_DOCS=1"
    );
}

/// docs/cli.md: every command's help.
fn document() -> String {
    let mut text =
        String::from("# The command line\n\nMade from the help texts; a test keeps them the same.\n");
    let mut cli = Cli::command().term_width(100);
    cli.build();
    let mut add = |command: &mut clap::Command| {
        let help = command.clone().term_width(100).render_long_help().to_string();
        let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
        text.push_str(&format!(
            "\n## {}\n\n```text\n{}\n```\n",
            command.get_bin_name().unwrap_or("thaw"),
            lines.join("\n")
        ));
    };
    add(&mut cli);
    let shown = |c: &&mut clap::Command| c.get_name() != "help" && !c.is_hide_set();
    for command in cli.get_subcommands_mut().filter(shown) {
        add(command);
        for inner in command.get_subcommands_mut().filter(|c| c.get_name() != "help") {
            add(inner);
        }
    }
    text
}
