//! What a creation needs of its host: it fails on a host that lacks one of these.

use thaw_pools::vmm::Jail;

use crate::config::SandboxConfig;

/// Host features without which a creation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Required {
    /// Limits of its cgroup.
    pub limits: bool,
    /// Namespaces and Landlock.
    pub jail: bool,
}

impl Required {
    /// The configured requirements; `unless_said` where the configuration sets none.
    pub fn of(config: &SandboxConfig, unless_said: bool) -> Required {
        Required {
            limits: config.require_limits.unwrap_or(unless_said),
            jail: config.require_jail.unwrap_or(unless_said),
        }
    }

    pub fn jail(self) -> Jail {
        match self.jail {
            true => Jail::Whole,
            false => Jail::AsHostAllows,
        }
    }
}
