//! Resource limits of a process, named as in setrlimit(2).

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::error::{Error, Result, WithContext};

/// One limit; `u64::MAX` means none.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub resource: Resource,
    pub soft: u64,
    pub hard: u64,
}

/// The resource with this name.
pub fn resource(name: &str) -> Result<Resource> {
    Ok(match name {
        "RLIMIT_CPU" => Resource::Cpu,
        "RLIMIT_FSIZE" => Resource::Fsize,
        "RLIMIT_DATA" => Resource::Data,
        "RLIMIT_STACK" => Resource::Stack,
        "RLIMIT_CORE" => Resource::Core,
        "RLIMIT_RSS" => Resource::Rss,
        "RLIMIT_NPROC" => Resource::Nproc,
        "RLIMIT_NOFILE" => Resource::Nofile,
        "RLIMIT_MEMLOCK" => Resource::Memlock,
        "RLIMIT_AS" => Resource::As,
        "RLIMIT_LOCKS" => Resource::Locks,
        "RLIMIT_SIGPENDING" => Resource::Sigpending,
        "RLIMIT_MSGQUEUE" => Resource::Msgqueue,
        "RLIMIT_NICE" => Resource::Nice,
        "RLIMIT_RTPRIO" => Resource::Rtprio,
        "RLIMIT_RTTIME" => Resource::Rttime,
        _ => return Err(Error::Invalid(format!("{name:?} is not a resource limit"))),
    })
}

/// Sets the limits for this process.
pub fn apply(limits: &[Limit]) -> Result<()> {
    for l in limits {
        let bound = |n: u64| if n == u64::MAX { None } else { Some(n) };
        setrlimit(
            l.resource,
            Rlimit {
                current: bound(l.soft),
                maximum: bound(l.hard),
            },
        )
        .with_context(|| format!("set the limit {:?} to {}", l.resource, l.soft))?;
    }
    Ok(())
}
