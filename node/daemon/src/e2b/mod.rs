//! What clients of E2B speak to.
//!
//! | module | noun |
//! |---|---|
//! | [`route`] | the sandbox that a request is for |
//! | [`envd`] | the in-sandbox protocol: processes and files of a sandbox |

pub mod envd;
pub mod route;
