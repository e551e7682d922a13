//! A process's environment: the image's variables, then those `docker run` adds, then those of the flags.

use std::ffi::OsString;

use super::Options;
use crate::error::{Error, ErrorKind};

/// PATH for an image without one.
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Tells systemd, if it is the first process, that it runs in a container (systemd.io/CONTAINER_INTERFACE): it then waits for no
/// hardware.
const CONTAINER: &str = "container=thaw";

/// Merges the flags' variables over the environment of the image or container. A later value wins; each name appears once, at its first
/// position. The agent adds HOME, because it knows the user.
pub(super) fn merge(base: &[String], options: &Options) -> Vec<String> {
    let mut env: Vec<String> = Vec::new();
    let mut set = |entry: &str| {
        let name = entry.split('=').next().unwrap_or(entry);
        match env.iter_mut().find(|e| e.split('=').next() == Some(name)) {
            Some(there) => *there = entry.to_owned(),
            None => env.push(entry.to_owned()),
        }
    };
    set(DEFAULT_PATH);
    if !options.hostname.is_empty() {
        set(&format!("HOSTNAME={}", options.hostname));
    }
    if options.settings.privileged {
        set(CONTAINER);
    }
    if options.tty {
        set("TERM=xterm");
    }
    base.iter().chain(&options.env).for_each(|entry| set(entry));
    env
}

/// Resolves the values of `-e`: `NAME=VALUE`, or `NAME` for the caller's own value, which is left out if it is not set.
pub fn resolve(given: &[String], own: impl Fn(&str) -> Option<OsString>) -> Result<Vec<String>, Error> {
    let mut env = Vec::new();
    for entry in given {
        match entry.split_once('=') {
            Some(("", _)) => return Err(bad(entry)),
            Some(_) => env.push(entry.clone()),
            None if entry.is_empty() => return Err(bad(entry)),
            None => {
                if let Some(value) = own(entry) {
                    let value = value.into_string().map_err(|_| bad(entry))?;
                    env.push(format!("{entry}={value}"));
                }
            }
        }
    }
    Ok(env)
}

/// The entries of an `--env-file`: one per line, in the form of `-e`. Blank lines and lines that begin with `#` are skipped.
pub fn parse_env_file(text: &str) -> Vec<String> {
    text.lines()
        .map(|line| line.trim_start().trim_end_matches('\r'))
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

fn bad(entry: &str) -> Error {
    Error::new(ErrorKind::Runtime, format!("bad environment variable {entry:?}"))
        .remedy("write NAME=VALUE or NAME")
}

#[cfg(test)]
mod tests {
    use super::super::settings::Settings;
    use super::*;

    #[test]
    fn later_wins_and_each_name_appears_once() {
        let options = Options {
            env: vec!["B=2".into(), "A=flag".into()],
            hostname: "h".into(),
            tty: true,
            ..Default::default()
        };
        let env = merge(&["A=image".into(), "TERM=dumb".into()], &options);
        assert_eq!(env, [DEFAULT_PATH, "HOSTNAME=h", "TERM=dumb", "A=flag", "B=2"]);
        let privileged = Options {
            settings: Settings {
                privileged: true,
                ..Default::default()
            },
            ..Default::default()
        };
        assert_eq!(merge(&[], &privileged), [DEFAULT_PATH, "container=thaw"]);
        let own_path = merge(&["PATH=/mine".into()], &Options::default());
        assert_eq!(own_path, ["PATH=/mine"]);
    }

    #[test]
    fn a_bare_name_takes_the_callers_value() {
        let own = |name: &str| (name == "SET").then(|| OsString::from("v=1"));
        let given = ["SET".to_string(), "UNSET".into(), "X=".into()];
        assert_eq!(resolve(&given, own).unwrap(), ["SET=v=1", "X="]);
        assert!(resolve(&["=x".to_string()], own).is_err());
    }

    #[test]
    fn an_env_file_has_comments_and_blank_lines() {
        assert_eq!(parse_env_file("# c\n\nA=1 # kept\r\n  B\n"), ["A=1 # kept", "B"]);
    }
}
