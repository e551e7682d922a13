//! Errors of the image store and its sources, as errors of this crate.

use crate::error::{Error, ErrorKind, is_full_somewhere};

/// Converts an error of the image store. Its text contains its own remedy.
pub fn failure(error: thaw_images::Error) -> Error {
    use thaw_images::Error as E;
    let cause = match error.inner() {
        E::Unreadable { source, .. } => source.inner(),
        error => error,
    };
    let kind = match cause {
        E::BadReference { .. } => ErrorKind::BadReference,
        E::NotFound { .. } | E::RegistryNotFound { .. } => ErrorKind::ImageNotFound,
        E::DigestMismatch { .. } | E::ChunkDigest { .. } => ErrorKind::DigestMismatch,
        E::TruncatedLayer { .. } => ErrorKind::LayerTruncated,
        E::UnknownMediaType { .. } => ErrorKind::UnknownMediaType,
        E::WrongArchitecture { .. } => ErrorKind::WrongArchitecture,
        E::UnsafePath { .. } => ErrorKind::UnsafePath,
        E::RegistryUnreachable { .. } => ErrorKind::RegistryUnreachable,
        E::RegistryDenied { .. } | E::Credentials { .. } => ErrorKind::RegistryDenied,
        E::RegistryRateLimited { .. } => ErrorKind::RegistryRateLimited,
        E::RegistryFailed { .. } | E::Unreadable { .. } => ErrorKind::RegistryFailed,
        E::DiskFull { .. } => ErrorKind::DiskFull,
        E::Malformed { .. } | E::Merge(_) | E::Layer { .. } => ErrorKind::ImageMalformed,
        other if is_full_somewhere(other) => ErrorKind::DiskFull,
        E::InUse { .. } => ErrorKind::ImageInUse,
        E::Metadata(_) | E::Blob { .. } | E::Io { .. } | E::Cancelled | E::Shared(_) => ErrorKind::Runtime,
    };
    let message = error.to_string();
    match message.rsplit_once("; ") {
        Some((what, remedy)) => Error::new(kind, what).remedy(remedy),
        None => Error::new(kind, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_imagefs::digest::Digest;

    #[test]
    fn image_error_has_its_kind() {
        for (error, kind) in bad_images().into_iter().chain(failed_pulls()) {
            let shown = error.to_string();
            assert_eq!(failure(error).kind, kind, "{shown}");
        }
    }

    fn bad_images() -> Vec<(thaw_images::Error, ErrorKind)> {
        use thaw_images::Error as E;
        let layer = Digest::of(b"x");
        let text = String::new;
        vec![
            (
                E::DigestMismatch {
                    what: text(),
                    expected: layer,
                    got: layer,
                },
                ErrorKind::DigestMismatch,
            ),
            (
                E::TruncatedLayer {
                    what: text(),
                    expected: 2,
                    got: 1,
                },
                ErrorKind::LayerTruncated,
            ),
            (
                E::UnknownMediaType {
                    what: text(),
                    media_type: text(),
                    advice: text(),
                },
                ErrorKind::UnknownMediaType,
            ),
            (
                E::WrongArchitecture {
                    wanted: text(),
                    available: vec![],
                },
                ErrorKind::WrongArchitecture,
            ),
            (
                E::UnsafePath {
                    layer,
                    reason: text(),
                },
                ErrorKind::UnsafePath,
            ),
        ]
    }

    fn failed_pulls() -> Vec<(thaw_images::Error, ErrorKind)> {
        use thaw_images::Error as E;
        let text = String::new;
        vec![
            (
                E::RegistryNotFound {
                    registry: text(),
                    what: text(),
                },
                ErrorKind::ImageNotFound,
            ),
            (
                E::RegistryUnreachable {
                    registry: text(),
                    reason: text(),
                    advice: text(),
                },
                ErrorKind::RegistryUnreachable,
            ),
            (
                E::RegistryDenied {
                    registry: text(),
                    status: 401,
                    what: text(),
                    reason: text(),
                },
                ErrorKind::RegistryDenied,
            ),
            (
                E::RegistryRateLimited {
                    registry: text(),
                    what: text(),
                    retry_after: None,
                },
                ErrorKind::RegistryRateLimited,
            ),
            (
                E::RegistryFailed {
                    registry: text(),
                    status: 500,
                    what: text(),
                    reason: text(),
                    attempts: 3,
                },
                ErrorKind::RegistryFailed,
            ),
            (E::DiskFull { path: "/x".into() }, ErrorKind::DiskFull),
            (
                E::BadReference {
                    reference: text(),
                    problem: text(),
                },
                ErrorKind::BadReference,
            ),
        ]
    }

    #[test]
    fn a_message_that_says_what_to_do_is_not_told_twice() {
        let error = thaw_images::Error::DiskFull { path: "/x".into() };
        assert_eq!(
            failure(error).to_string(),
            "disk full at /x; free space there, or choose another store directory"
        );
    }
}
