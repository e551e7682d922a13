//! The log, on stderr.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging at `level`. An invalid level is reported and replaced by `warn`.
pub fn start(level: &str, json: bool) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|e| {
        eprintln!("thaw: --log-level {level}: {e}; warn is used");
        EnvFilter::new("warn")
    });
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colour);
    // A second start, as in tests, changes nothing.
    let _ = match json {
        true => builder.json().try_init(),
        false => builder.try_init(),
    };
}
