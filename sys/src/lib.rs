//! Kernel interfaces that Thaw's programs use directly, each written once.
//!
//! | module | interface |
//! |---|---|
//! | [`netlink`] | sockets, messages and attributes of netlink(7) |
//! | [`link`], [`survey`] | rtnetlink(7): changes to, and dumps of, interfaces, addresses, routes and neighbours |
//! | [`tc`] | rtnetlink(7): queueing disciplines and filters of tc(8) |
//! | [`nft`] | nftables transactions (nfnetlink) |
//! | [`conntrack`] | tracked connections (ctnetlink) |
//! | [`connections`] | TCP connections of a network namespace (sock_diag(7)) |
//! | [`bpf`] | bpf(2): maps, programs and an assembler for them |
//! | [`jail`] | namespaces, root, limits and capabilities that a process gives up |
//! | [`namespaces`] | sets of empty namespaces, which such processes enter |
//! | [`user_namespace`] | a user namespace that owns network namespaces |
//! | [`vfork`] | children that share our memory until they execute a program or end |
//! | [`mount`] | mount_setattr(2) |
//! | [`sysctl`] | settings of network namespaces, below `/proc/sys/net` |
//! | [`child`] | command line and inherited socket of a process that serves one guest |
//! | [`allocator`] | glibc's allocator: its heaps, and what it keeps |
//! | [`descriptors`] | the table of descriptors |
//! | [`backoff`] | pauses between attempts |
//! | [`lock`] | locks that ignore the poison of a panicked thread |
//! | [`prefix`] | IPv4 networks in CIDR notation, as rules use them |
//!
//! Netlink is hand-written: `netlink-packet-route` and `rtnetlink` cover routes but neither nftables, connection tracking nor the actions
//! of filters, so the attributes would still be encoded here. `rtnetlink` also needs an async runtime, which the guest's agent cannot use
//! where it forks. BPF programs are assembled here because they are a few dozen instructions each: object files would need a C compiler to
//! build and a loader (`aya`) to run.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod allocator;
pub mod backoff;
pub mod bpf;
pub mod child;
pub mod connections;
pub mod conntrack;
pub mod descriptors;
pub mod jail;
pub mod link;
pub mod lock;
pub mod mount;
pub mod namespaces;
pub mod netlink;
pub mod nft;
pub mod prefix;
pub mod survey;
pub mod sysctl;
pub mod tc;
pub mod user_namespace;
pub mod vfork;
