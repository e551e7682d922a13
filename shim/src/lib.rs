//! containerd's shim for Thaw: each pod is a microVM, and its containers are containerd's tasks.
//!
//! | module | contents |
//! |---|---|
//! | [`arguments`], [`start`], [`cgroup`], [`serve`], [`delete`], [`runtime_info`], [`features`] | the commands that containerd runs |
//! | [`service`], [`sandbox`] | containerd's task service and sandbox service |
//! | [`pod`], [`container`], [`process`] | the pod's state, and the operations on it |
//! | [`checkpoint`], [`thawed`] | checkpoints and snapshots of the node, from which a container is restored with its machine |
//! | [`machine`], [`sizing`], [`thawd`], [`agent`], [`pidfd`] | the pod's microVM, and clients of thawd and of the guest's agent |
//! | [`spec`], [`rootfs`], [`hooks`] | from a bundle to the guest's container |
//! | [`host_resource`], [`share`] | host directories and devices in the guest |
//! | [`options`], [`any`], [`kata`] | the runtime's options in containerd's configuration; Kata's settings |
//! | [`stdio`] | a process's streams |
//! | [`events`], [`stats`] | events and metrics for containerd |
//! | [`id`], [`role`], [`address`] | which containers share a microVM, and the address of its shim |
//!
//! The shim keeps only the state of its pod. It asks thawd for the microVM, and the guest's agent for
//! everything in it. docs/shim.md describes how each part of a specification is treated.

pub mod address;
pub mod agent;
pub mod any;
pub mod arguments;
pub mod cgroup;
pub mod checkpoint;
pub mod container;
pub mod delete;
pub mod error;
pub mod events;
pub mod features;
pub mod hooks;
pub mod host_resource;
pub mod id;
pub mod kata;
pub mod log;
pub mod machine;
pub mod options;
pub mod pidfd;
pub mod pod;
pub mod process;
pub mod role;
pub mod rootfs;
pub mod runtime_info;
pub mod sandbox;
pub mod serve;
pub mod service;
pub mod share;
pub mod sizing;
pub mod spec;
pub mod start;
pub mod stats;
pub mod stdio;
pub mod thawd;
pub mod thawed;
