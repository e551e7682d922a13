//! x86-64: what a PVH guest finds at its entry.
//!
//! | module | what |
//! |---|---|
//! | [`acpi`] | the hardware-reduced ACPI tables |
//! | [`pvh`] | start info, memory map, command line |
//! | [`registers`] | the boot vCPU's registers |

pub mod acpi;
pub mod pvh;
pub mod registers;
