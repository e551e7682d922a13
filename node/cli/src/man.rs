//! `thaw man DIR`: the manual pages, made from the help texts when a package is built.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use thaw_sandbox::error::Error;

use crate::Cli;

#[derive(Debug, Args)]
pub struct ManArguments {
    /// The directory to write the pages to, which must exist
    pub directory: PathBuf,
}

/// Writes `thaw.1`, and a page for each command: `thaw-run.1`, `thaw-image-pull.1`.
pub(super) fn write_pages(arguments: &ManArguments) -> Result<u8, Error> {
    let directory = &arguments.directory;
    clap_mangen::generate_to(Cli::command(), directory).map_err(|e| {
        Error::system(
            format!("cannot write manual pages to {}", directory.display()),
            &e,
        )
    })?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_visible_command_has_a_manual_page() {
        let directory = tempfile::tempdir().unwrap();
        let arguments = ManArguments {
            directory: directory.path().to_owned(),
        };
        write_pages(&arguments).unwrap();
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name));
        for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = format!("thaw-{}.1", command.get_name());
            assert!(page(&name).unwrap().contains(".SH SYNOPSIS"), "{name}");
        }
        assert!(page("thaw-image-pull.1").is_ok() && page("thaw-man.1").is_err());
    }
}
