//! Code that depends on the processor architecture.

#[cfg(target_arch = "x86_64")]
pub mod x86_64;
