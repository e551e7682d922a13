//! Typed KVM: a virtual machine, its vCPUs, and their saved state.
