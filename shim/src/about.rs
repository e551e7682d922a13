//! The `-info` flag: what this runtime is, which containerd 2 asks before there is any container.

use std::io::Write;

use thaw_protocol::shim::introspection::{RuntimeInfo, RuntimeVersion};
use thaw_protocol::shim::{Message, MessageField};

use crate::error::{Error, For, Result};
use crate::features;

/// The runtime's name in containerd's configuration.
pub const RUNTIME: &str = "io.containerd.thaw.v2";

/// Tells containerd.
pub fn print() -> Result<()> {
    let info = RuntimeInfo {
        name: RUNTIME.into(),
        version: MessageField::some(RuntimeVersion {
            version: env!("CARGO_PKG_VERSION").into(),
            ..Default::default()
        }),
        features: MessageField::some(features::any()),
        ..Default::default()
    };
    let bytes = info.write_to_bytes().map_err(|e| Error::Invalid(e.to_string()))?;
    let mut out = std::io::stdout().lock();
    out.write_all(&bytes)
        .and_then(|()| out.flush())
        .for_(|| "answer containerd".into())
}
