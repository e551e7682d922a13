//! The values of Kata's settings, parsed as Kata parses them.

use std::ops::RangeInclusive;
use std::time::Duration;

use thaw_protocol::api::{RATE_BYTES, RATE_OPS, RateLimit};

/// Least memory of a microVM.
const MIN_MEMORY_MIB: u32 = 128;

/// A pod's settings. `None` leaves the choice to Thaw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// vCPUs before its containers' own are added. Fractions count until the sum is rounded up.
    pub vcpus: Option<f32>,
    pub max_vcpus: Option<u32>,
    /// Memory in MiB before its containers' own is added.
    pub memory_mib: Option<u32>,
    pub max_memory_mib: Option<u32>,
    /// Run containers without their seccomp profile.
    pub disable_guest_seccomp: Option<bool>,
    /// Limit for creating a container.
    pub create_timeout: Option<Duration>,
    /// The pod gets no network, whatever its network namespace has.
    pub no_network: bool,
    /// Rate limits of each disk, and of the network in each direction.
    pub disk_rate: RateLimit,
    pub net_out_rate: RateLimit,
    pub net_in_rate: RateLimit,
}

fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" | "t" | "T" | "TRUE" | "True" => Ok(true),
        "false" | "0" | "f" | "F" | "FALSE" | "False" => Ok(false),
        _ => Err("is neither true nor false".into()),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "is no number that fits".into())
}

/// `default_vcpus`: 0 or less means the host's number of CPUs, as in Kata.
pub(super) fn vcpus(settings: &mut Settings, text: &str) -> Result<(), String> {
    let vcpus: f32 = number(text)?;
    if !vcpus.is_finite() {
        return Err("is no number that fits".into());
    }
    let all = std::thread::available_parallelism().map_or(1, usize::from) as f32;
    settings.vcpus = Some(if vcpus > 0.0 { vcpus } else { all });
    Ok(())
}

/// `default_max_vcpus`: 0 means the maximum.
pub(super) fn max_vcpus(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.max_vcpus = Some(number(text)?).filter(|max| *max > 0);
    Ok(())
}

/// `default_memory`: 0 leaves the choice to Thaw.
pub(super) fn memory(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.memory_mib = match number(text)? {
        0 => None,
        small if small < MIN_MEMORY_MIB => {
            return Err(format!("is less than the {MIN_MEMORY_MIB} MiB a guest takes"));
        }
        mib => Some(mib),
    };
    Ok(())
}

/// `default_maxmemory`: 0 means the maximum.
pub(super) fn max_memory(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.max_memory_mib = Some(number(text)?).filter(|max| *max > 0);
    Ok(())
}

pub(super) fn disable_guest_seccomp(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.disable_guest_seccomp = Some(boolean(text)?);
    Ok(())
}

pub(super) fn create_timeout(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.create_timeout = match number(text)? {
        0 => None,
        seconds => Some(Duration::from_secs(seconds)),
    };
    Ok(())
}

/// A VMM in the host's network namespace is not available to pods.
pub(super) fn disable_new_netns(_: &mut Settings, text: &str) -> Result<(), String> {
    match boolean(text)? {
        false => Ok(()),
        true => Err("cannot be true: a VMM has no network of the host's".into()),
    }
}

/// All models except `none` have the same effect: the guest gets the interfaces of the namespace.
pub(super) fn internetworking_model(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.no_network = match text {
        "none" => true,
        "tcfilter" | "macvtap" | "l3forwarding" => false,
        _ => return Err("is none of tcfilter, macvtap, l3forwarding and none".into()),
    };
    Ok(())
}

/// Kata gives bandwidths in bits per second; 0 means no limit.
const BITS: u64 = 8;

/// Parses a rate in units that are `size` times smaller than ours; 0 means no limit.
fn rate(text: &str, size: u64, range: RangeInclusive<u64>) -> Result<Option<u64>, String> {
    let given: u64 = number(text)?;
    let value = given / size;
    match given == 0 || range.contains(&value) {
        true => Ok((given > 0).then_some(value)),
        false => Err(format!(
            "is not 0, nor {} to {}",
            range.start() * size,
            range.end() * size
        )),
    }
}

pub(super) fn disk_bandwidth(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.disk_rate.bytes_per_s = rate(text, BITS, RATE_BYTES)?;
    Ok(())
}

pub(super) fn disk_bandwidth_once(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.disk_rate.once_bytes = rate(text, BITS, RATE_BYTES)?;
    Ok(())
}

pub(super) fn disk_operations(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.disk_rate.ops_per_s = rate(text, 1, RATE_OPS)?;
    Ok(())
}

pub(super) fn disk_operations_once(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.disk_rate.once_ops = rate(text, 1, RATE_OPS)?;
    Ok(())
}

pub(super) fn received(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.net_in_rate.bytes_per_s = rate(text, BITS, RATE_BYTES)?;
    Ok(())
}

pub(super) fn sent(settings: &mut Settings, text: &str) -> Result<(), String> {
    settings.net_out_rate.bytes_per_s = rate(text, BITS, RATE_BYTES)?;
    Ok(())
}

/// Kata's setting limits both directions, like the three below.
pub(super) fn net_bandwidth(settings: &mut Settings, text: &str) -> Result<(), String> {
    received(settings, text)?;
    sent(settings, text)
}

pub(super) fn net_bandwidth_once(settings: &mut Settings, text: &str) -> Result<(), String> {
    let once = rate(text, BITS, RATE_BYTES)?;
    (settings.net_in_rate.once_bytes, settings.net_out_rate.once_bytes) = (once, once);
    Ok(())
}

pub(super) fn net_operations(settings: &mut Settings, text: &str) -> Result<(), String> {
    let rate = rate(text, 1, RATE_OPS)?;
    (settings.net_in_rate.ops_per_s, settings.net_out_rate.ops_per_s) = (rate, rate);
    Ok(())
}

pub(super) fn net_operations_once(settings: &mut Settings, text: &str) -> Result<(), String> {
    let once = rate(text, 1, RATE_OPS)?;
    (settings.net_in_rate.once_ops, settings.net_out_rate.once_ops) = (once, once);
    Ok(())
}
