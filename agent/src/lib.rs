//! The guest's agent: PID 1 of every Thaw microVM.
//!
//! The order is the promise (DESIGN §4.5): [`init`] mounts what a Linux system needs, [`handshake`] makes this guest
//! one sandbox and no other, and only then does [`rpc`] listen and may a user's process start. Until an identity is
//! acknowledged nothing here reads `boot_id` or opens a TCP or UDP socket, and nothing that a secret or an identity depends
//! on is derived from a random number drawn before: our own tables are ordered maps; the hash keys that tokio and ttrpc draw
//! once order tables of file descriptors and stream numbers, which only the host fills. They, and this process's address
//! space layout and stack canary, are the same in every clone of a template (docs/agent-api.md).
//!
//! | module | knows |
//! |---|---|
//! | [`boot`] | the order above |
//! | [`init`] | the mounts and settings of a fresh system |
//! | [`listener`] | vsock in a guest, unix sockets in a test |
//! | [`handshake`], [`guest`], [`entropy`], [`clock`], [`identity`] | who this guest is |
//! | [`hotplug`] | CPUs and memory beyond those of the template |
//! | [`kernel_limits`] | what the kernel allows for the memory there is |
//! | [`quiesce`] | workloads stopped for a freeze |
//! | [`warm`] | what is done ahead, so that templates have it |
//! | [`network`] | rtnetlink |
//! | [`forward`] | the host's connections to this guest's `localhost` |
//! | [`storage`] | what is mounted for containers, and drivers |
//! | [`container`] | the OCI runtime: specification, namespaces, root, process |
//! | [`readiness`] | whether a container answers on its port |
//! | [`stdio`] | pipes and terminals of a process |
//! | [`reaper`] | every exit status, every orphan |
//! | [`oom`], [`stats`] | what the kernel says about a container |
//! | [`sandbox`] | everything that exists in this guest |
//! | [`rpc`] | the agent API, wire-compatible with Kata's |

pub mod boot;
pub mod clock;
pub mod container;
pub mod disks;
pub mod entropy;
pub mod error;
pub mod ext4;
pub mod forward;
pub mod guest;
pub mod handshake;
pub mod hotplug;
pub mod huge_pages;
pub mod identity;
pub mod init;
pub mod kernel_command_line;
pub mod kernel_limits;
pub mod listener;
pub mod log;
pub mod mount_options;
pub mod network;
pub mod oom;
pub mod quiesce;
pub mod readiness;
pub mod reaper;
pub mod rpc;
pub mod sandbox;
pub mod stats;
pub mod stdio;
pub mod storage;
pub mod warm;
