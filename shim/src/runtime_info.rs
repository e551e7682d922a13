//! The `-info` flag: prints a description of this runtime. containerd 2 asks for it before it creates any
//! container.

use std::io::Write;

use thaw_protocol::shim::introspection::{RuntimeInfo, RuntimeVersion};
use thaw_protocol::shim::{Message, MessageField};

use crate::error::{Error, Result, WithContext};
use crate::features;

/// The runtime's name in containerd's configuration.
pub const RUNTIME: &str = "io.containerd.thaw.v2";

/// Writes the description to standard output for containerd.
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
        .with_context(|| "answer containerd".into())
}
