//! thawd's HTTP API, both ends. Types: [`thaw_protocol::api`].

pub mod client;
pub mod server;
