//! x86-64: the memory contents and registers that a PVH guest starts with.
//!
//! | module | contents |
//! |---|---|
//! | [`acpi`] | the hardware-reduced ACPI tables |
//! | [`pvh`] | start info, memory map, command line |
//! | [`registers`] | the boot vCPU's registers |

pub mod acpi;
pub mod pvh;
pub mod registers;
