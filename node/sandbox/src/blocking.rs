//! Runs blocking work on threads of its own, not on the threads that serve requests.

use crate::error::{Error, ErrorKind};

/// Runs blocking work on a separate thread.
///
/// # Errors
/// Errors of the work, and [`ErrorKind::Runtime`] if it panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?
}
