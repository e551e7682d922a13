//! Work that blocks, kept off the threads that serve.

use crate::exit::{ExitCode, Failure};

/// Runs work that blocks on a thread for it.
///
/// # Errors
/// Those of the work, and [`ExitCode::Runtime`] if it panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))?
}
