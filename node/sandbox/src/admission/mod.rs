//! Admits machines and stored snapshots: counts what each tenant and the node have, and refuses what exceeds a limit.
//!
//! | module | contents |
//! |---|---|
//! | here | the limits, and what is refused |
//! | [`place`] | what a sandbox or a snapshot counts with, for as long as it exists |
//! | [`account`] | what one tenant has |
//! | [`set_limits`] | limits that the API has set, on disk |
//!
//! Invariants: what is counted is compared with the limits and added under one lock, so two requests never share the last place; it is
//! subtracted when the last holder of the [`Place`] drops it, also if the creation fails. Sandboxes from before a limit was set, adopted ones
//! and pods are counted and not refused. A refusal changes nothing.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use thaw_protocol::api::{NodeCapacity, Quantity, TenantLimits, TenantUse};
use thaw_sys::lock::Lock;

use crate::config::quotas::{CapacityConfig, QuotasConfig};
use crate::error::{Error, ErrorKind};
use crate::tenant::Tenant;
use account::Account;
use set_limits::SetLimits;

mod account;
mod capacity;
mod place;
mod set_limits;

pub use place::{Place, SnapshotPlace};

/// Bytes with which a snapshot counts at most: a registry may claim any size, and the sum must not overflow.
const LARGEST_SNAPSHOT: u64 = 1 << 50;

/// The size of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub vcpus: u8,
    pub memory_mib: u32,
}

impl Shape {
    fn amounts(self) -> TenantUse {
        TenantUse {
            running: 1,
            vcpus: self.vcpus.into(),
            memory_mib: self.memory_mib.into(),
            ..TenantUse::default()
        }
    }
}

/// The limits of a node and its tenants, and what they have. The default has no limits.
#[derive(Debug, Default)]
pub struct Admission {
    default: TenantLimits,
    configured: BTreeMap<Tenant, TenantLimits>,
    /// Limits of the node.
    capacity: TenantLimits,
    set: SetLimits,
    state: Mutex<State>,
    /// How many requests each limit has refused, tenants' limits and then the node's.
    refused: [[AtomicU64; Quantity::ALL.len()]; 2],
}

#[derive(Debug, Default)]
struct State {
    /// All machines.
    node: TenantUse,
    /// Those that have something.
    accounts: BTreeMap<Option<Tenant>, Account>,
}

/// The limits of a tenant, and where they come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub limits: TenantLimits,
    /// Whether the API has set them.
    pub is_set: bool,
}

impl Admission {
    /// Reads the configured limits, and those that the API has set for `data`.
    ///
    /// # Errors
    /// The host's memory or the limits that were set cannot be read.
    pub fn open(quotas: &QuotasConfig, capacity: &CapacityConfig, data: &Path) -> Result<Admission, Error> {
        let configured = quotas.tenants.iter();
        Ok(Admission {
            default: quotas.default.limits(),
            configured: configured
                .map(|(name, own)| (name.clone(), own.limits()))
                .collect(),
            capacity: capacity::of_host(capacity)?,
            set: SetLimits::open(data)?,
            ..Admission::default()
        })
    }

    /// An admission with these default limits, and this capacity of the node. Limits that are set are in memory only.
    pub fn with(default: TenantLimits, capacity: TenantLimits) -> Admission {
        Admission {
            default,
            capacity,
            ..Admission::default()
        }
    }

    /// Admits a new machine with a new disk.
    ///
    /// # Errors
    /// [`ErrorKind::TenantQuota`], [`ErrorKind::CreationRate`], [`ErrorKind::NodeCapacity`].
    pub fn create(
        self: &Arc<Admission>,
        tenant: Option<&Tenant>,
        shape: Shape,
        disk_bytes: u64,
    ) -> Result<Place, Error> {
        self.admit(tenant, &Place::amounts(shape, disk_bytes), true)?;
        Ok(Place::counted(self, tenant, shape, disk_bytes))
    }

    /// Counts a machine that is there, or a pod's. It is not refused.
    pub fn adopt(self: &Arc<Admission>, tenant: Option<&Tenant>, shape: Shape, disk_bytes: u64) -> Place {
        self.add(tenant, &Place::amounts(shape, disk_bytes));
        Place::counted(self, tenant, shape, disk_bytes)
    }

    /// Counts a paused sandbox that is there, whose memory is released.
    pub fn adopt_paused(self: &Arc<Admission>, tenant: Option<&Tenant>, disk_bytes: u64) -> Place {
        self.add(tenant, &Place::paused_amounts(disk_bytes));
        Place::counted_paused(self, tenant, disk_bytes)
    }

    /// Whether so many machines of this shape would be admitted now. Disks are not compared.
    ///
    /// # Errors
    /// Those of [`Admission::create`].
    pub fn check(&self, tenant: Option<&Tenant>, shape: Shape, count: u8) -> Result<(), Error> {
        let one = shape.amounts();
        let all = combined(&one, &one, |amount, _| amount.saturating_mul(count.into()));
        let limits = self.limits(tenant).limits;
        let mut state = self.state();
        self.fits_node(&state.node, &all)?;
        let mut nothing = Account::default();
        let account = state.accounts.get_mut(&tenant.cloned()).unwrap_or(&mut nothing);
        self.fits(tenant, &limits, &account.used, &all)?;
        self.has_rate(tenant, &limits, account, count.into())
    }

    /// Admits a snapshot of at most this many bytes, before it is written. `stored` reads the bytes of the tenant's stored snapshots; it
    /// may block.
    ///
    /// # Errors
    /// [`ErrorKind::TenantQuota`].
    pub fn snapshot(
        self: &Arc<Admission>,
        tenant: Option<&Tenant>,
        bytes: u64,
        stored: impl FnOnce() -> u64,
    ) -> Result<SnapshotPlace, Error> {
        let amounts = snapshot_amounts(bytes);
        let limits = self.limits(tenant).limits;
        // It counts before the stored ones are read, and until it is stored itself. So of two at once, each finds the other.
        let before = self.add(tenant, &amounts);
        let place = SnapshotPlace::counted(self, tenant, amounts);
        if limits.snapshot_bytes.is_none() {
            return Ok(place);
        }
        let used = TenantUse {
            snapshot_bytes: before.snapshot_bytes.saturating_add(stored()),
            ..TenantUse::default()
        };
        self.fits(tenant, &limits, &used, &amounts).map(|()| place)
    }

    /// Counts a snapshot that a running sandbox needs. It is not refused.
    pub fn adopt_snapshot(self: &Arc<Admission>, tenant: Option<&Tenant>, bytes: u64) -> SnapshotPlace {
        let amounts = snapshot_amounts(bytes);
        self.add(tenant, &amounts);
        SnapshotPlace::counted(self, tenant, amounts)
    }

    /// The limits in force of a tenant. Sandboxes without a tenant have none.
    pub fn limits(&self, tenant: Option<&Tenant>) -> Limits {
        let Some(tenant) = tenant else {
            return Limits::default();
        };
        if let Some(limits) = self.set.get(tenant) {
            return Limits { limits, is_set: true };
        }
        Limits {
            limits: *self.configured.get(tenant).unwrap_or(&self.default),
            is_set: false,
        }
    }

    /// Sets the limits of a tenant, or returns to the configured ones. Blocks.
    ///
    /// # Errors
    /// They cannot be written. Then the former ones stay.
    pub fn set_limits(&self, tenant: &Tenant, limits: Option<TenantLimits>) -> Result<(), Error> {
        self.set.change(tenant, limits)
    }

    /// What a tenant has, without its stored snapshots.
    pub fn used(&self, tenant: Option<&Tenant>) -> TenantUse {
        let mut state = self.state();
        let Some(account) = state.accounts.get_mut(&tenant.cloned()) else {
            return TenantUse::default();
        };
        account.usage(Instant::now())
    }

    /// The tenants with limits of their own, and those that have something.
    pub fn tenants(&self) -> Vec<Tenant> {
        let mut all = self.set.tenants();
        all.extend(self.configured.keys().cloned());
        all.extend(self.state().accounts.keys().flatten().cloned());
        all.into_iter().collect()
    }

    /// What the node's machines may have, and what they have.
    pub fn node(&self) -> NodeCapacity {
        let used = self.state().node;
        NodeCapacity {
            vcpus: self.capacity.of(Quantity::Vcpus),
            used_vcpus: used.vcpus,
            memory_mib: self.capacity.of(Quantity::MemoryMib),
            used_memory_mib: used.memory_mib,
        }
    }

    /// How many requests each limit of a tenant, or, if `of_node`, of the node has refused.
    pub fn refused(&self, of_node: bool) -> [(Quantity, u64); Quantity::ALL.len()] {
        let counts = &self.refused[usize::from(of_node)];
        Quantity::ALL.map(|quantity| (quantity, counts[quantity as usize].load(Ordering::Relaxed)))
    }

    /// Counts these amounts if they fit. `is_creation`: it also counts as a creation.
    fn admit(&self, tenant: Option<&Tenant>, amounts: &TenantUse, is_creation: bool) -> Result<(), Error> {
        let limits = self.limits(tenant).limits;
        let mut state = self.state();
        let state = &mut *state;
        let account = state.accounts.entry(tenant.cloned()).or_default();
        let admitted = self
            .fits(tenant, &limits, &account.used, amounts)
            .and_then(|()| self.fits_node(&state.node, amounts))
            .and_then(|()| match is_creation {
                true => self.has_rate(tenant, &limits, account, 1),
                false => Ok(()),
            });
        if admitted.is_ok() {
            account.used = plus(&account.used, amounts);
            state.node = plus(&state.node, amounts);
            if is_creation && limits.creations_per_minute.is_some() {
                account.note_creation(Instant::now());
            }
        } else if account.is_empty(Instant::now()) {
            state.accounts.remove(&tenant.cloned());
        }
        admitted
    }

    /// Counts these amounts. Returns what the tenant had before.
    fn add(&self, tenant: Option<&Tenant>, amounts: &TenantUse) -> TenantUse {
        let mut state = self.state();
        state.node = plus(&state.node, amounts);
        let account = state.accounts.entry(tenant.cloned()).or_default();
        let before = account.used;
        account.used = plus(&before, amounts);
        before
    }

    /// Stops counting these amounts.
    fn subtract(&self, tenant: Option<&Tenant>, amounts: &TenantUse) {
        let mut state = self.state();
        state.node = minus(&state.node, amounts);
        let tenant = tenant.cloned();
        if let Some(account) = state.accounts.get_mut(&tenant) {
            account.used = minus(&account.used, amounts);
            if account.is_empty(Instant::now()) {
                state.accounts.remove(&tenant);
            }
        }
    }

    fn fits(
        &self,
        tenant: Option<&Tenant>,
        limits: &TenantLimits,
        used: &TenantUse,
        asked: &TenantUse,
    ) -> Result<(), Error> {
        let Some((quantity, what)) = exceeded(limits, used, asked) else {
            return Ok(());
        };
        self.count_refusal(false, quantity);
        let what = format!("the quota of {} has no room: {what}", named(tenant));
        Err(Error::new(ErrorKind::TenantQuota, what))
    }

    fn fits_node(&self, used: &TenantUse, asked: &TenantUse) -> Result<(), Error> {
        let Some((quantity, what)) = exceeded(&self.capacity, used, asked) else {
            return Ok(());
        };
        self.count_refusal(true, quantity);
        let what = format!("the capacity of this node has no room: {what}");
        Err(Error::new(ErrorKind::NodeCapacity, what))
    }

    fn has_rate(
        &self,
        tenant: Option<&Tenant>,
        limits: &TenantLimits,
        account: &mut Account,
        count: usize,
    ) -> Result<(), Error> {
        let Some(limit) = limits.creations_per_minute else {
            return Ok(());
        };
        let now = Instant::now();
        let Some(wait) = account.wait(limit as usize, count, now) else {
            return Ok(());
        };
        let quantity = Quantity::CreationsPerMinute;
        self.count_refusal(false, quantity);
        let used = account.creations(now) as u64;
        let what = format!(
            "the quota of {} has no room: {}; it has room in {wait} s",
            named(tenant),
            shortage(quantity, limit.into(), used, count as u64)
        );
        Err(Error::new(ErrorKind::CreationRate, what).retry_after(wait))
    }

    fn count_refusal(&self, of_node: bool, quantity: Quantity) {
        self.refused[usize::from(of_node)][quantity as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

fn snapshot_amounts(bytes: u64) -> TenantUse {
    TenantUse {
        snapshot_bytes: bytes.min(LARGEST_SNAPSHOT),
        ..TenantUse::default()
    }
}

/// Both amounts, quantity by quantity. Creations are counted by the account alone.
fn combined(one: &TenantUse, other: &TenantUse, with: impl Fn(u64, u64) -> u64) -> TenantUse {
    TenantUse {
        running: with(one.running, other.running),
        paused: with(one.paused, other.paused),
        vcpus: with(one.vcpus, other.vcpus),
        memory_mib: with(one.memory_mib, other.memory_mib),
        disk_mib: with(one.disk_mib, other.disk_mib),
        snapshot_bytes: with(one.snapshot_bytes, other.snapshot_bytes),
        creations_per_minute: 0,
    }
}

fn plus(one: &TenantUse, more: &TenantUse) -> TenantUse {
    combined(one, more, u64::saturating_add)
}

fn minus(one: &TenantUse, less: &TenantUse) -> TenantUse {
    combined(one, less, u64::saturating_sub)
}

fn named(tenant: Option<&Tenant>) -> String {
    match tenant {
        Some(tenant) => format!("tenant {tenant}"),
        None => "this node".into(),
    }
}

/// The first limit that would be exceeded, and a text with the numbers.
fn exceeded(limits: &TenantLimits, used: &TenantUse, asked: &TenantUse) -> Option<(Quantity, String)> {
    Quantity::ALL.into_iter().find_map(|quantity| {
        let (used, asked) = (used.of(quantity), asked.of(quantity));
        let limit = limits.of(quantity)?;
        let is_over = asked > 0 && used.saturating_add(asked) > limit;
        is_over.then(|| (quantity, shortage(quantity, limit, used, asked)))
    })
}

fn shortage(quantity: Quantity, limit: u64, used: u64, asked: u64) -> String {
    let free = limit.saturating_sub(used);
    format!("{quantity} is {limit}: {used} used, {free} free, {asked} asked for")
}

#[cfg(test)]
#[path = "admission_test.rs"]
mod tests;
