//! Shell completion: `thaw completion SHELL` prints a script that runs `thaw __complete` at each press of Tab.
//!
//! The candidates come from the same definitions as the help, so a new command or flag is completed without further work.

use clap::{Args, CommandFactory, ValueEnum};
use thaw_images::store::Store;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::SnapshotStore;
use thaw_sandbox::state::RunDirectory;

use crate::Cli;
use candidates::{Candidate, Completion, Names, complete};

mod candidates;

#[derive(Debug, Args)]
#[command(after_help = "\
Completes commands, flags, their values, and the names of sandboxes, images and stored snapshots.

Examples:
  source <(thaw completion bash)      # in ~/.bashrc
  source <(thaw completion zsh)       # in ~/.zshrc, after compinit
  thaw completion fish | source       # in ~/.config/fish/config.fish

`make install` and the Debian package install these files.")]
pub struct CompletionArguments {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Prints the script of a shell.
pub(super) fn print_script(arguments: &CompletionArguments) -> u8 {
    let script = match arguments.shell {
        Shell::Bash => include_str!("thaw.bash"),
        Shell::Zsh => include_str!("thaw.zsh"),
        Shell::Fish => include_str!("thaw.fish"),
    };
    super::print(script.trim_end());
    0
}

/// Prints the candidates for the last of `words`, one a line, each with a tab and its help. Prints `:files` if the shell
/// should complete file names. Names that cannot be listed, as without the rights, are left out.
pub(super) fn print_candidates(words: &[String]) -> u8 {
    let mut cli = Cli::command();
    cli.build();
    match complete(&cli, words, &Installed) {
        Completion::Files => super::print(":files"),
        Completion::Candidates(candidates) => candidates.iter().for_each(|candidate| {
            super::print(&format!("{}\t{}", candidate.value, candidate.help));
        }),
    }
    0
}

/// The sandboxes, images and stored snapshots of this host.
struct Installed;

impl Names for Installed {
    fn sandboxes(&self) -> Vec<Candidate> {
        let run = Paths::from_env().run;
        if !run.exists() {
            return Vec::new();
        }
        let Ok(directory) = RunDirectory::open(&run) else {
            return Vec::new();
        };
        let running = directory.running().into_iter().map(|r| (r.id, r.name, r.image));
        let ended = directory.ended().into_iter().map(|s| (s.id, s.name, s.image));
        running
            .chain(ended)
            .map(|(id, name, image)| Candidate {
                value: name.unwrap_or(id),
                help: image,
            })
            .collect()
    }

    fn snapshots(&self) -> Vec<Candidate> {
        let stored = SnapshotStore::objects(&Paths::from_env().data).into_iter();
        let mine = stored.filter(|object| object.tenant.is_none());
        mine.map(|object| Candidate {
            value: object.name.unwrap_or(object.id),
            help: format!("of sandbox {}", object.sandbox),
        })
        .collect()
    }

    fn images(&self) -> Vec<Candidate> {
        let store = Paths::from_env().images();
        // Opening a store creates it.
        if !store.exists() {
            return Vec::new();
        }
        let images = Store::open(&store).and_then(|store| store.images());
        let images = images.unwrap_or_default().into_iter();
        let candidates = images.map(|image| Candidate {
            help: image.digest.to_string().chars().take(19).collect(),
            value: image.reference,
        });
        candidates.collect()
    }
}
