//! What the store and its sources say, with Thaw's exit codes.

use crate::exit::{ExitCode, Failure, is_full_somewhere};

/// The store's errors say what to do themselves.
pub fn failure(error: thaw_images::Error) -> Failure {
    use thaw_images::Error as E;
    let cause = match error.inner() {
        E::Unreadable { source, .. } => source.inner(),
        error => error,
    };
    let code = match cause {
        E::BadReference { .. } => ExitCode::BadReference,
        E::NotFound { .. } | E::RegistryNotFound { .. } => ExitCode::ImageNotFound,
        E::DigestMismatch { .. } | E::ChunkDigest { .. } => ExitCode::DigestMismatch,
        E::TruncatedLayer { .. } => ExitCode::LayerTruncated,
        E::UnknownMediaType { .. } => ExitCode::UnknownMediaType,
        E::WrongArchitecture { .. } => ExitCode::WrongArchitecture,
        E::UnsafePath { .. } => ExitCode::UnsafePath,
        E::RegistryUnreachable { .. } => ExitCode::RegistryUnreachable,
        E::RegistryDenied { .. } | E::Credentials { .. } => ExitCode::RegistryDenied,
        E::RegistryRateLimited { .. } => ExitCode::RegistryRateLimited,
        E::RegistryFailed { .. } | E::Unreadable { .. } => ExitCode::RegistryFailed,
        E::DiskFull { .. } => ExitCode::DiskFull,
        E::Malformed { .. } | E::Merge(_) | E::Layer { .. } => ExitCode::ImageMalformed,
        other if is_full_somewhere(other) => ExitCode::DiskFull,
        E::InUse { .. } => ExitCode::ImageInUse,
        E::Metadata(_) | E::Blob { .. } | E::Io { .. } | E::Cancelled | E::Shared(_) => ExitCode::Runtime,
    };
    let message = error.to_string();
    match message.rsplit_once("; ") {
        Some((what, remedy)) => Failure::new(code, what).remedy(remedy),
        None => Failure::new(code, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_imagefs::digest::Digest;

    #[test]
    fn each_kind_of_bad_image_has_its_exit_code() {
        use thaw_images::Error as E;
        let layer = Digest::of(b"x");
        let text = String::new;
        let cases = [
            (
                E::DigestMismatch {
                    what: text(),
                    expected: layer,
                    got: layer,
                },
                74,
            ),
            (
                E::TruncatedLayer {
                    what: text(),
                    expected: 2,
                    got: 1,
                },
                75,
            ),
            (
                E::UnknownMediaType {
                    what: text(),
                    media_type: text(),
                    advice: text(),
                },
                76,
            ),
            (
                E::WrongArchitecture {
                    wanted: text(),
                    available: vec![],
                },
                77,
            ),
            (
                E::UnsafePath {
                    layer,
                    reason: text(),
                },
                78,
            ),
            (
                E::RegistryNotFound {
                    registry: text(),
                    what: text(),
                },
                80,
            ),
            (
                E::RegistryUnreachable {
                    registry: text(),
                    reason: text(),
                    advice: text(),
                },
                81,
            ),
            (
                E::RegistryDenied {
                    registry: text(),
                    status: 401,
                    what: text(),
                    reason: text(),
                },
                82,
            ),
            (
                E::RegistryRateLimited {
                    registry: text(),
                    what: text(),
                    retry_after: None,
                },
                83,
            ),
            (
                E::RegistryFailed {
                    registry: text(),
                    status: 500,
                    what: text(),
                    reason: text(),
                    attempts: 3,
                },
                84,
            ),
            (E::DiskFull { path: "/x".into() }, 73),
            (
                E::BadReference {
                    reference: text(),
                    problem: text(),
                },
                85,
            ),
        ];
        for (error, number) in cases {
            let shown = error.to_string();
            assert_eq!(failure(error).code.number(), number, "{shown}");
        }
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
