//! Values of flags that are one of a few words, each for a type that knows nothing of command lines.

use clap::ValueEnum;
use thaw_sandbox::container;
use thaw_sandbox::images;
use thaw_sandbox::sandbox;

/// `--network`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// A network of its own, and through the host the world outside.
    #[default]
    Private,
}

impl From<NetworkMode> for sandbox::NetworkMode {
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
    /// As files, over virtio-fs: what clones read is once in the host's memory.
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
    /// Only when it is not in the store.
    #[default]
    Missing,
    /// Each time; what the store has is not transferred again.
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
