use super::*;
use clap::CommandFactory;

struct Two;

fn named(value: &str) -> Candidate {
    Candidate {
        value: value.to_owned(),
        help: String::new(),
    }
}

impl Names for Two {
    fn sandboxes(&self) -> Vec<Candidate> {
        vec![named("web"), named("worker")]
    }

    fn snapshots(&self) -> Vec<Candidate> {
        vec![named("web-ready"), named("0123456789ab")]
    }

    fn images(&self) -> Vec<Candidate> {
        vec![named("registry.example/app:1"), named("registry.example/web:2")]
    }
}

fn completion(line: &str) -> Completion {
    let mut cli = crate::Cli::command();
    cli.build();
    let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    complete(&cli, &words, &Two)
}

fn values_of(line: &str) -> Vec<String> {
    match completion(line) {
        Completion::Candidates(found) => found.into_iter().map(|c| c.value).collect(),
        Completion::Files => panic!("{line}: files"),
    }
}

#[test]
fn completion_of_a_command_lists_visible_ones() {
    let all = values_of("");
    assert!(all.contains(&"run".to_owned()), "{all:?}");
    assert!(!all.iter().any(|name| name.starts_with("__")), "{all:?}");
    assert_eq!(values_of("templ"), ["template"]);
    assert_eq!(values_of("image inde"), ["index"]);
}

#[test]
fn completion_of_flags_includes_global_ones() {
    assert_eq!(values_of("ps --js"), ["--json"]);
    assert_eq!(values_of("run --read-"), ["--read-only"]);
}

#[test]
fn completion_of_a_flags_values() {
    assert_eq!(values_of("run --network n"), ["none"]);
    assert_eq!(values_of("run --network=n"), ["--network=none"]);
    assert_eq!(values_of("completion z"), ["zsh"]);
    assert_eq!(completion("run --env-file "), Completion::Files);
    assert_eq!(completion("run -itv "), Completion::Files);
}

#[test]
fn completion_of_sandbox_names() {
    assert_eq!(values_of("exec w"), ["web", "worker"]);
    assert_eq!(values_of("exec -it -w /srv wo"), ["worker"]);
    assert_eq!(values_of("rm web wo"), ["worker"]);
    assert_eq!(completion("freeze web "), Completion::Files);
}

#[test]
fn completion_of_image_names() {
    assert_eq!(
        values_of("run -it registry.example/a"),
        ["registry.example/app:1"]
    );
    assert_eq!(
        values_of("image rm registry.example/w"),
        ["registry.example/web:2"]
    );
}

#[test]
fn words_after_the_image_are_the_containers() {
    assert!(values_of("run image --re").is_empty());
    assert!(values_of("exec web ls --js").is_empty());
}

#[test]
fn completion_of_nonsense_is_empty() {
    assert!(values_of("run --nonsense=x").is_empty());
    assert!(values_of("nonsense x").is_empty());
    assert!(values_of("version x").is_empty());
}

#[test]
fn snapshots_are_completed_and_directories_after_a_slash() {
    assert_eq!(values_of("snapshot rm we"), ["web-ready"]);
    assert_eq!(values_of("thaw 01"), ["0123456789ab"]);
    assert_eq!(completion("thaw ./we"), Completion::Files);
}
