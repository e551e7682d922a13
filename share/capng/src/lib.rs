//! The part of the `capng` crate that virtiofsd uses, without libcap-ng.
//!
//! The published crate links that C library dynamically, which a static binary cannot do and which a build host
//! need not have. This crate offers the same functions over capget(2) and capset(2). As there, [`update`]
//! collects changes and [`apply`] makes them, for the calling thread only. Nothing that was read is cached: the
//! kernel is asked whether a capability is present, so a thread that has changed its user gets the present
//! answer.

use std::cell::RefCell;
use std::fmt;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// A capability's number (linux/capability.h).
pub type Capability = u32;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The kernel refused the changes.
    ApplyCapabilities,
    /// There is no capability of this name.
    GetCapabilityId(String),
    /// The thread's capabilities cannot be read.
    GetProcessCapabilities,
    /// There is no capability of this number.
    UpdateCapability(Capability),
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::ApplyCapabilities => f.write_str("the kernel refused to change capabilities"),
            Error::GetCapabilityId(name) => write!(f, "there is no capability {name}"),
            Error::GetProcessCapabilities => f.write_str("capabilities cannot be read"),
            Error::UpdateCapability(number) => write!(f, "there is no capability {number}"),
        }
    }
}

pub type Result<T> = std::result::Result<T, Error>;

bitflags::bitflags! {
    /// The sets that a change applies to.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Type: u32 {
        const EFFECTIVE = 1;
        const PERMITTED = 2;
        const INHERITABLE = 4;
    }
}

bitflags::bitflags! {
    /// The sets that [`clear`] and [`apply`] act on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Set: u32 {
        const CAPS = 16;
        const BOUNDS = 32;
        const BOTH = Self::CAPS.bits() | Self::BOUNDS.bits();
    }
}

/// Whether a capability is removed or added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    DROP,
    ADD,
}

/// One change.
#[derive(Clone, Copy, Debug)]
pub struct CUpdate {
    pub action: Action,
    pub cap_type: Type,
    pub capability: Capability,
}

thread_local! {
    /// The sets that [`apply`] will set.
    static CHANGED: RefCell<Option<CapabilitySets>> = const { RefCell::new(None) };
}

fn current() -> Result<CapabilitySets> {
    capabilities(None).map_err(|_| Error::GetProcessCapabilities)
}

/// Starts from empty sets.
pub fn clear(_: Set) {
    let none = CapabilitySet::empty();
    CHANGED.set(Some(CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    }));
}

/// Starts from the thread's sets.
pub fn get_caps_process() -> Result<()> {
    CHANGED.set(Some(current()?));
    Ok(())
}

/// Whether the thread has a capability in all these sets.
pub fn have_capability(which: Type, capability: Capability) -> bool {
    let (Some(bit), Ok(sets)) = (bit(capability), current()) else {
        return false;
    };
    [
        (Type::EFFECTIVE, sets.effective),
        (Type::PERMITTED, sets.permitted),
        (Type::INHERITABLE, sets.inheritable),
    ]
    .into_iter()
    .filter(|(kind, _)| which.contains(*kind))
    .all(|(_, set)| set.contains(bit))
}

/// Collects changes to the sets of [`clear`] or [`get_caps_process`], or else to the thread's.
pub fn update(updates: Vec<CUpdate>) -> Result<()> {
    let mut sets = match CHANGED.take() {
        Some(sets) => sets,
        None => current()?,
    };
    for CUpdate {
        action,
        cap_type,
        capability,
    } in updates
    {
        let bit = bit(capability).ok_or(Error::UpdateCapability(capability))?;
        for (kind, set) in [
            (Type::EFFECTIVE, &mut sets.effective),
            (Type::PERMITTED, &mut sets.permitted),
            (Type::INHERITABLE, &mut sets.inheritable),
        ] {
            if cap_type.contains(kind) {
                set.set(bit, action == Action::ADD);
            }
        }
    }
    CHANGED.set(Some(sets));
    Ok(())
}

/// Makes the collected changes, if there are any. The bounding set is never changed.
pub fn apply(set: Set) -> Result<()> {
    match CHANGED.take() {
        Some(sets) if set.contains(Set::CAPS) => {
            set_capabilities(None, sets).map_err(|_| Error::ApplyCapabilities)
        }
        _ => Ok(()),
    }
}

/// The number of the capability with this name, without `CAP_`.
pub fn name_to_capability(name: &str) -> Result<Capability> {
    CapabilitySet::from_name(name)
        .map(|set| set.bits().trailing_zeros())
        .ok_or_else(|| Error::GetCapabilityId(name.to_owned()))
}

fn bit(capability: Capability) -> Option<CapabilitySet> {
    let bit = CapabilitySet::from_bits_retain(1u64.checked_shl(capability)?);
    // A name from the kernel's headers.
    bit.iter_names().next().map(|_| bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_kernels_numbers() {
        for (name, number) in [("CHOWN", 0), ("DAC_OVERRIDE", 1), ("FSETID", 4), ("MKNOD", 27)] {
            assert_eq!(name_to_capability(name), Ok(number));
        }
        assert!(name_to_capability("CAP_CHOWN").is_err() && name_to_capability("").is_err());
    }

    #[test]
    fn a_capability_goes_and_comes_back_for_one_thread() {
        let fsetid = name_to_capability("FSETID").unwrap();
        if !have_capability(Type::EFFECTIVE | Type::PERMITTED, fsetid) {
            // There is no such capability to remove.
            return;
        }
        let change = move |action| {
            update(vec![CUpdate {
                action,
                cap_type: Type::EFFECTIVE,
                capability: fsetid,
            }])
            .unwrap();
            apply(Set::CAPS).unwrap();
            have_capability(Type::EFFECTIVE, fsetid)
        };
        assert!(!change(Action::DROP));
        let elsewhere = std::thread::spawn(move || change(Action::ADD)).join().unwrap();
        assert!(elsewhere);
        assert!(!have_capability(Type::EFFECTIVE, fsetid));
        assert!(change(Action::ADD));
    }

    #[test]
    fn nothing_collected_changes_nothing() {
        let before = current().unwrap();
        apply(Set::BOTH).unwrap();
        assert_eq!(current().unwrap().effective, before.effective);
        let no_such = CUpdate {
            action: Action::ADD,
            cap_type: Type::EFFECTIVE,
            capability: 63,
        };
        assert_eq!(update(vec![no_such]), Err(Error::UpdateCapability(63)));
    }
}
