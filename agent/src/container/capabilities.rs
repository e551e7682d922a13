//! Capabilities of a process (capabilities(7)).

use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities,
};
use thaw_protocol::agent::capabilities::NAMES;
use thaw_protocol::agent::oci;

use crate::error::{Result, WithContext};
use crate::warning;

/// The five sets, with one bit per capability. A capability that the specification does not list is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    pub bounding: u64,
    pub effective: u64,
    pub inheritable: u64,
    pub permitted: u64,
    pub ambient: u64,
}

impl Capabilities {
    /// Reads the specification. A name this agent does not know is logged and ignored, as runc does.
    pub fn new(given: Option<&oci::LinuxCapabilities>) -> Self {
        given.map_or_else(Self::default, |c| Capabilities {
            bounding: mask(&c.Bounding),
            effective: mask(&c.Effective),
            inheritable: mask(&c.Inheritable),
            permitted: mask(&c.Permitted),
            ambient: mask(&c.Ambient),
        })
    }
}

fn mask(names: &[String]) -> u64 {
    names.iter().fold(0, |set, name| {
        match NAMES.iter().position(|n| name.strip_prefix("CAP_") == Some(n)) {
            Some(bit) => set | 1 << bit,
            None => {
                warning!("capability {name:?} is unknown and left out");
                set
            }
        }
    })
}

fn each() -> impl Iterator<Item = CapabilitySet> {
    // The kernel may have fewer or more capabilities than the table above.
    let last: u32 = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap")
        .ok()
        .and_then(|s| s.trim().parse().ok())
        .unwrap_or(40);
    (0..=last.min(63)).map(|bit| CapabilitySet::from_bits_retain(1 << bit))
}

/// Reduces the bounding set. Must be called before the user changes.
pub fn cut_bounding(c: &Capabilities) -> Result<()> {
    for cap in each().filter(|cap| c.bounding & cap.bits() == 0) {
        remove_capability_from_bounding_set(cap)
            .with_context(|| format!("drop {cap:?} from the bounding set"))?;
    }
    Ok(())
}

/// Sets the other sets. Must be called after the user has changed with capabilities kept.
pub fn apply(c: &Capabilities) -> Result<()> {
    let set = CapabilitySet::from_bits_retain;
    set_capabilities(
        None,
        CapabilitySets {
            effective: set(c.effective & c.permitted),
            permitted: set(c.permitted),
            inheritable: set(c.inheritable),
        },
    )
    .with_context(|| "set capabilities".into())?;
    clear_ambient_capability_set().with_context(|| "clear the ambient set".into())?;
    for cap in each().filter(|cap| c.ambient & c.permitted & c.inheritable & cap.bits() != 0) {
        configure_capability_in_ambient_set(cap, true)
            .with_context(|| format!("raise {cap:?} in the ambient set"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_numbers() {
        assert_eq!(
            mask(&["CAP_CHOWN".into(), "CAP_NET_BIND_SERVICE".into()]),
            1 | 1 << 10
        );
        assert_eq!(mask(&["CAP_SYS_ADMIN".into()]), CapabilitySet::SYS_ADMIN.bits());
        assert_eq!(
            mask(&["CAP_CHECKPOINT_RESTORE".into()]),
            CapabilitySet::CHECKPOINT_RESTORE.bits()
        );
        assert_eq!(mask(&["CAP_NONE_SUCH".into(), "CHOWN".into()]), 0);
    }
}
