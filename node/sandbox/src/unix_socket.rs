//! Unix sockets that this process listens on.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tokio::net::UnixListener;

use crate::error::Error;

/// Listens at a path, for this user alone. Replaces the socket of a dead thawd.
///
/// # Errors
/// Another process listens there, or the host refuses.
pub fn bind(socket: &Path) -> Result<UnixListener, Error> {
    let failed =
        |error: &std::io::Error| Error::system(format!("cannot listen on {}", socket.display()), error);
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory).map_err(|error| failed(&error))?;
    }
    if thaw_pools::vmm::is_served(socket) {
        return Err(failed(&std::io::ErrorKind::AddrInUse.into()));
    }
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).map_err(|error| failed(&error))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))
        .map_err(|error| failed(&error))?;
    Ok(listener)
}
