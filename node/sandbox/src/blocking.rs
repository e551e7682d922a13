//! Work that blocks, kept off the threads that serve.

use crate::error::{Error, ErrorKind};

/// Runs work that blocks on a thread for it.
///
/// # Errors
/// Those of the work, and [`ErrorKind::Runtime`] if it panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?
}
