//! Values of flags: the enumerations, each converted to a type that does not depend on the command line, and names.

use clap::ValueEnum;
use thaw_sandbox::container;
use thaw_sandbox::images;

/// `--network`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// A network of its own, with access to the outside through the host.
    #[default]
    Private,
}

impl From<NetworkMode> for thaw_sandbox::NetworkMode {
    fn from(mode: NetworkMode) -> Self {
        match mode {
            NetworkMode::None => Self::None,
            NetworkMode::Private => Self::Private,
        }
    }
}

/// `--root`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum RootServing {
    /// As files, over virtio-fs: the host's memory has what all clones read only once.
    #[default]
    Virtiofs,
    /// As a read-only disk with EROFS on it, which the guest mounts itself.
    Erofs,
}

impl From<RootServing> for container::RootServing {
    fn from(root: RootServing) -> Self {
        match root {
            RootServing::Virtiofs => Self::Virtiofs,
            RootServing::Erofs => Self::Erofs,
        }
    }
}

/// `--pull`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Pull {
    /// Only if it is not in the store.
    #[default]
    Missing,
    /// Each time; data that the store has is not transferred again.
    Always,
    /// Never.
    Never,
}

impl From<Pull> for images::Pull {
    fn from(pull: Pull) -> Self {
        match pull {
            Pull::Missing => Self::Missing,
            Pull::Always => Self::Always,
            Pull::Never => Self::Never,
        }
    }
}

/// Checks the name of a sandbox.
pub(super) fn parse_name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    match name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain) && name.len() <= 63
    {
        true => Ok(name.to_owned()),
        false => Err("letters, digits, and inside also _ . -; at most 63".into()),
    }
}
