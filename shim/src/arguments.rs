//! The command line that containerd runs a shim with: Go flags, with one or two dashes, values as the next
//! argument or after `=`.

use std::path::PathBuf;

use crate::error::{Error, Result};

/// The command to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a shim for the pod, if none runs, and print its address.
    Start,
    /// Clean up after a shim that is gone.
    Delete,
    /// Run the shim on the listening socket that is its standard input.
    Serve,
    Version,
    /// Print a description of this runtime, for containerd 2.
    Info,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arguments {
    pub action: Action,
    pub namespace: String,
    pub id: String,
    /// containerd's gRPC socket.
    pub address: String,
    pub bundle: PathBuf,
}

impl Arguments {
    /// Parses the arguments, without the program's name.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Arguments> {
        let mut read = Arguments {
            action: Action::Serve,
            namespace: String::new(),
            id: String::new(),
            address: String::new(),
            bundle: PathBuf::from("."),
        };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
                read.action = action(&word)?;
                continue;
            };
            let (name, given) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            let mut value = || {
                let missing = || Error::Invalid(format!("flag -{name} has no value"));
                given.clone().or_else(|| words.next()).ok_or_else(missing)
            };
            match name {
                "namespace" => read.namespace = value()?,
                "id" => read.id = value()?,
                "address" => read.address = value()?,
                "bundle" => read.bundle = value()?.into(),
                "publish-binary" | "socket" => drop(value()?),
                "debug" => {}
                "v" | "version" => read.action = Action::Version,
                "info" => read.action = Action::Info,
                other => return Err(Error::Invalid(format!("unknown flag -{other}"))),
            }
        }
        Ok(read)
    }
}

fn action(word: &str) -> Result<Action> {
    match word {
        "start" => Ok(Action::Start),
        "delete" => Ok(Action::Delete),
        "serve" => Ok(Action::Serve),
        other => Err(Error::Invalid(format!("unknown command {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments> {
        Arguments::parse(line.split(' ').map(str::to_owned))
    }

    #[test]
    fn containerds_flags_are_read_in_either_form() {
        let given =
            "-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id=abc -debug start";
        let read = parse(given).unwrap();
        assert_eq!((read.action, read.namespace.as_str()), (Action::Start, "k8s.io"));
        assert_eq!((read.id.as_str(), read.address.as_str()), ("abc", "/run/c.sock"));
        let read = parse("--id abc --bundle /b delete").unwrap();
        assert_eq!((read.action, read.bundle), (Action::Delete, "/b".into()));
        assert_eq!(parse("-v").unwrap().action, Action::Version);
        for bad in ["-id", "-x y", "stop"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
