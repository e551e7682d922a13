//! The flags that say how an image is obtained.

use clap::Args;

use super::Pull;

/// How to obtain the image.
#[derive(Debug, Args)]
pub struct SourceArguments {
    /// When to pull from the registry
    #[arg(long, value_name = "WHEN", value_enum, default_value_t)]
    pub pull: Pull,
    /// Use HTTP without TLS for the registry
    #[arg(long)]
    pub plain_http: bool,
}
