//! What is attached to a machine when it is parked: the host's ends of the devices that every sandbox of its pool has.
//!
//! So a claim makes, names and attaches none of it. Invariant: nothing of a user is in it, and no sandbox gets what another had: a slot, a
//! disk and a vsock are used once, whether the machine is claimed or not.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::net::SocketType;
use thaw_network::Networks;
use thaw_pools::disk::Disks;
use thaw_pools::vmm;
use thaw_protocol::api::DEFAULT_DISK_MIB;
use thaw_protocol::control::DeviceId;

use super::backends::{Backends, Devices, Ends};
use super::pools::{Claimed, made_size};
use super::{NetworkMode, NetworkSource, Pools, SandboxSpec, frozen_disk, machine, network};
use crate::error::Error;
use crate::images::Images;
use crate::misses::Given;
use crate::snapshot::Registered;
use crate::vm::Vm;

/// The choices in a request that decide what is attached. They are few, so that requests cannot ask for many kinds of parked machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fitting {
    pub disk: FittedDisk,
    /// Whether it has a private network of this node.
    pub private_network: bool,
}

/// The disk that is attached to a machine when it is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FittedDisk {
    /// One is attached when the machine is claimed.
    None,
    /// An empty one of the default size.
    Empty,
    /// One like the snapshot's.
    Frozen,
}

impl Fitting {
    pub(super) fn of(spec: &SandboxSpec) -> Fitting {
        Fitting {
            disk: match spec.disk_mib {
                DEFAULT_DISK_MIB => FittedDisk::Empty,
                _ => FittedDisk::None,
            },
            private_network: spec.network == NetworkSource::Ours(NetworkMode::Private),
        }
    }
}

/// What is attached, and what this process keeps of it.
#[derive(Debug)]
pub(super) struct Fitted {
    pub attached: AttachedEnds,
    pub given: Given,
    pub supply: Images,
    pub disk: Option<Claimed<Disks>>,
    pub network: Option<Claimed<Networks>>,
}

/// The ends of the attached devices.
#[derive(Debug)]
pub(super) struct AttachedEnds {
    pub ends: Ends,
    /// The devices that have a backend.
    pub devices: Vec<DeviceId>,
    /// If the cgroup has the limits of a sandbox with the default disk: that sandbox's memory, MiB.
    pub limited_to_mib: Option<u32>,
}

/// What is attached to a machine, taken apart. A machine that nothing is attached to has a supply only.
pub(super) struct FittedParts {
    pub supply: Images,
    pub attached: Option<AttachedEnds>,
    pub disk: Option<Claimed<Disks>>,
    pub network: Option<Claimed<Networks>>,
}

impl FittedParts {
    pub(super) fn of(fitted: Option<Fitted>, images: &Images) -> FittedParts {
        match fitted {
            Some(fitted) => FittedParts {
                supply: fitted.supply,
                attached: Some(fitted.attached),
                disk: fitted.disk,
                network: fitted.network,
            },
            None => FittedParts {
                supply: images.counting_alone(),
                attached: None,
                disk: None,
                network: None,
            },
        }
    }
}

impl Fitted {
    /// Takes the parts from their pools, or makes them, and attaches them to a machine that is parked with `origin` in it, and whose vsock
    /// will be at `vsock`. Blocks. Must be called within a tokio runtime.
    pub(super) fn make(
        pools: &Arc<Pools>,
        images: &Images,
        guest_image: &OwnedFd,
        (origin, fitting): (&Registered, Fitting),
        vsock: &Path,
        vm: &mut Vm,
    ) -> Result<Fitted, Error> {
        let disk = match fitting.disk {
            FittedDisk::Empty => {
                let claim = pools.disks.claim(&made_size(u64::from(DEFAULT_DISK_MIB) << 20))?;
                Some(Claimed::new(claim.resource, pools, |p| &p.disks))
            }
            FittedDisk::Frozen => Some(frozen_disk::thawed(origin, pools, vm.control_version())?),
            FittedDisk::None => None,
        };
        let network = match fitting.private_network {
            true => {
                let claim = pools.networks.claim(&()).map_err(network::failed)?;
                Some(Claimed::new(claim.resource, pools, |p| &p.networks))
            }
            false => None,
        };
        let vsock = vmm::listen(vsock, SocketType::STREAM)?;
        let (given, supply) = (Given::default(), images.counting_alone());
        let ends = Ends::make(supply.clone(), &given, false)?;
        let mut backends = Backends::default();
        backends.attach_own(&Devices {
            ends: &ends,
            vsock: &vsock,
            guest_image,
        });
        if let Some(disk) = &disk {
            backends.attach_disk(disk);
        }
        if let Some(slot) = &network {
            backends.attach_tap(&slot.tap, slot.config.mac);
        }
        let devices = backends.attach_to(vm).map_err(machine::failure)?;
        let attached = AttachedEnds {
            ends,
            devices,
            limited_to_mib: None,
        };
        Ok(Fitted {
            attached,
            given,
            supply,
            disk,
            network,
        })
    }
}
