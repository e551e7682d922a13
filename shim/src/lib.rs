//! containerd's shim for Thaw: tasks in microVMs, a pod in each.
//!
//! | module | noun |
//! |---|---|
//! | [`arguments`], [`start`], [`cgroup`], [`serve`], [`delete`], [`about`], [`features`] | what containerd runs this program for |
//! | [`service`], [`sandbox`] | containerd's task service, and its sandbox service |
//! | [`pod`], [`container`], [`process`] | what there is, and what is done to it |
//! | [`checkpoint`] | what a pod of one is made from again |
//! | [`machine`], [`sizing`], [`thawd`], [`agent`], [`pidfd`] | the pod's microVM, who makes it, who is in it |
//! | [`spec`], [`rootfs`], [`hooks`] | from a bundle to what the guest is to have |
//! | [`share`] | what of the host the guest has |
//! | [`options`], [`kata`] | what containerd's file says of the runtime; Kata's settings |
//! | [`stdio`] | a process's streams |
//! | [`events`], [`stats`] | what containerd is told |
//! | [`grouping`], [`address`] | which containers share a microVM, and where its shim listens |
//!
//! The shim is thin: it asks thawd for the microVM and the guest's agent for everything else, and knows nothing that is not in
//! the pod. docs/shim.md says what becomes of each part of a specification.

pub mod about;
pub mod address;
pub mod agent;
pub mod arguments;
pub mod cgroup;
pub mod checkpoint;
pub mod container;
pub mod delete;
pub mod error;
pub mod events;
pub mod features;
pub mod grouping;
pub mod hooks;
pub mod kata;
pub mod log;
pub mod machine;
pub mod memory;
pub mod options;
pub mod pidfd;
pub mod pod;
pub mod process;
pub mod rootfs;
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
