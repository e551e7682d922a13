//! What many VMMs that end together do to their host, with tiny guests.

//!
//! | module | noun |
//! |---|---|
//! | [`filters`] | the seccomp programs of one VMM |
//! | [`kill`] | the ways in which a crowd ends |
//! | [`node`] | a crowd that ends together with its thawd |
//! | [`health`] | what is left of it on the host |

pub mod filters;
pub mod health;
pub mod kill;
pub mod node;
