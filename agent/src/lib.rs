//! The guest's agent: PID 1 of every Thaw microVM.
//!
//! It starts in a fixed order. [`init`] mounts what a Linux system needs, [`handshake`] gives this guest the
//! identity of one sandbox, and only then does [`rpc`] listen and can a user's process start. Before an
//! identity is acknowledged, nothing here reads `boot_id` or opens a TCP or UDP socket, and no secret or
//! identity is derived from a random number drawn before. The agent's own tables are ordered maps. The hash
//! keys that tokio and ttrpc draw once order only tables of file descriptors and stream numbers, which the host
//! alone fills. These keys, and this process's address space layout and stack canary, are the same in every
//! clone of a template (docs/agent-api.md).
//!
//! | module | contents |
//! |---|---|
//! | [`boot`] | the order above |
//! | [`init`] | the mounts and settings of a fresh system |
//! | [`listener`] | vsock in a guest, unix sockets in a test |
//! | [`handshake`], [`guest`], [`entropy`], [`clock`], [`identity`] | the guest's identity |
//! | [`generation`] | the file that changes at every thaw |
//! | [`names`] | what a container adds to `hosts` and `resolv.conf` |
//! | [`hotplug`] | CPUs and memory beyond those of the template |
//! | [`kernel_command_line`], [`kernel_limits`] | the kernel's command line; limits that depend on the memory size |
//! | [`quiesce`] | stops workloads for a freeze |
//! | [`warm`] | work done before a template is frozen, so that its clones need not do it |
//! | [`network`] | rtnetlink |
//! | [`resets`] | ends the connections that a clone has from the frozen sandbox |
//! | [`forward`] | connections of the host to this guest's `localhost` |
//! | [`storage`], [`mount_options`], [`disks`], [`ext4`], [`huge_pages`], [`read_ahead`] | mounts for containers |
//! | [`container`] | the OCI runtime: specification, namespaces, root, process |
//! | [`readiness`] | whether a container answers on its port |
//! | [`hook`] | commands and requests before a freeze and after a thaw |
//! | [`stdio`] | pipes and terminals of a process |
//! | [`reaper`] | exit statuses and orphans |
//! | [`oom`], [`stats`] | the kernel's reports about a container |
//! | [`sandbox`] | everything that exists in this guest |
//! | [`rpc`] | the agent API, wire-compatible with Kata's |
//! | [`log`], [`error`] | log lines; the agent's error |

pub mod boot;
pub mod clock;
pub mod container;
pub mod disks;
pub mod entropy;
pub mod error;
pub mod ext4;
pub mod forward;
pub mod generation;
pub mod guest;
pub mod handshake;
pub mod hook;
pub mod hotplug;
pub mod huge_pages;
pub mod identity;
pub mod init;
pub mod kernel_command_line;
pub mod kernel_limits;
pub mod listener;
pub mod log;
pub mod mount_options;
pub mod names;
pub mod network;
pub mod oom;
pub mod quiesce;
pub mod read_ahead;
pub mod readiness;
pub mod reaper;
pub mod resets;
pub mod rpc;
pub mod sandbox;
pub mod stats;
pub mod stdio;
pub mod storage;
pub mod warm;
