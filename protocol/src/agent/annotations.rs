//! Annotations of a container's specification that the agent reads: settings that the specification has no field for.

/// `true`: the container's first process is the agent's small init, which starts the program.
pub const INIT: &str = "run.thaw.init";
/// `NAME ADDRESS` pairs for `/etc/hosts`, one per line.
pub const HOSTS: &str = "run.thaw.hosts";
/// Addresses of the name servers that replace the guest's own, separated by spaces.
pub const DNS: &str = "run.thaw.dns";
/// Domains in which names are looked up, separated by spaces.
pub const DNS_SEARCH: &str = "run.thaw.dns-search";
/// Options of the resolver (resolv.conf(5)), separated by spaces.
pub const DNS_OPTIONS: &str = "run.thaw.dns-options";
