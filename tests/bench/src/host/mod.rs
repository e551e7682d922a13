//! What many VMMs that end together do to their host, and what one hostile guest does; with tiny guests.
//!
//! | module | noun |
//! |---|---|
//! | [`filters`] | the seccomp programs of one VMM |
//! | [`kill`] | the ways in which a crowd ends |
//! | [`node`] | a crowd that ends together with its thawd |
//! | [`health`] | what is left of it on the host |
//! | [`hostile`] | the memory and the log of one hostile guest |

pub mod filters;
pub mod health;
pub mod hostile;
pub mod kill;
pub mod neighbour;
pub mod node;
