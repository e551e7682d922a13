//! The node's image store: what sandboxes and misses need of `rootfs`, with Thaw's exit codes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thaw_protocol::control::{BlobRange, ImageSpec};
use thaw_rootfs::digest::Digest;
use thaw_rootfs::progress::{Progress, Silent};
use thaw_rootfs::reference::ImageRef;
use thaw_rootfs::source::Platform;
use thaw_rootfs::store::{Image, PullOptions, PullPolicy, Store};

use crate::exit::{ExitCode, Failure, is_full_somewhere};

/// The store. Clones share it.
#[derive(Clone, Debug)]
pub struct Images {
    store: Store,
}

/// When to ask the source for an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Pull {
    /// Only when it is not in the store.
    #[default]
    Missing,
    /// Each time; what the store has is not transferred again.
    Always,
    /// Never.
    Never,
}

/// An image's descriptors and what to say of them, for a VMM's root device.
#[derive(Debug)]
pub struct Exported {
    pub spec: ImageSpec,
    /// Metadata, then data and ready bitmap of each blob.
    pub descriptors: Vec<OwnedFd>,
}

impl Images {
    /// Opens the store, making it where it is missing.
    pub fn open(directory: &Path) -> Result<Images, Failure> {
        Ok(Images {
            store: Store::open(directory).map_err(failure)?,
        })
    }

    /// Makes sure an image is in the store.
    pub async fn pull(
        &self,
        reference: &str,
        pull: Pull,
        plain_http: bool,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, Failure> {
        let reference: ImageRef = reference.parse().map_err(failure)?;
        let policy = match pull {
            Pull::Missing => PullPolicy::Missing,
            Pull::Always => PullPolicy::Always,
            Pull::Never => PullPolicy::Never,
        };
        let options = PullOptions {
            policy,
            plain_http,
            ..Default::default()
        };
        self.store
            .pull(&reference, &Platform::linux_amd64(), &options, progress)
            .await
            .map_err(|e| match e {
                thaw_rootfs::Error::NotFound { .. } if pull == Pull::Never => Failure::new(
                    ExitCode::ImageNotStored,
                    format!("image {reference} is not in the store"),
                ),
                e => failure(e),
            })
    }

    /// The image of the lowest `count` layers of one, with its config but for the layers above.
    pub async fn lowest_layers(&self, image: &Image, count: usize) -> Result<Image, Failure> {
        let all = image.config.rootfs().diff_ids();
        if count == all.len() {
            return Ok(image.clone());
        }
        let gone = || {
            Failure::new(
                ExitCode::ImageNotStored,
                format!(
                    "the lowest {count} layers of image {} are not in the store",
                    image.digest
                ),
            )
            .remedy("pull it again")
        };
        let inspection = self.store.inspect(&image.digest).map_err(failure)?;
        let mut layers = Vec::new();
        for layer in inspection.layers.get(..count).ok_or_else(gone)? {
            layers.push(
                self.store
                    .stored_layer(&layer.key)
                    .map_err(failure)?
                    .ok_or_else(gone)?,
            );
        }
        let mut config = image.config.clone();
        let diff_ids = all.get(..count).ok_or_else(gone)?.to_vec();
        config.rootfs_mut().set_diff_ids(diff_ids);
        let reference: ImageRef = image.reference.parse().map_err(failure)?;
        self.store
            .assemble(&layers, &config, &reference, false)
            .await
            .map_err(failure)
    }

    /// Bytes of an image's layer, counted from the bottom, that are on this host.
    pub fn layer_bytes(&self, image: &Image, layer: usize) -> Result<u64, Failure> {
        use std::os::unix::fs::MetadataExt;
        let inspection = self.store.inspect(&image.digest).map_err(failure)?;
        let blob = inspection
            .layers
            .get(layer)
            .and_then(|layer| image.blobs.iter().find(|blob| blob.id == layer.key));
        Ok(blob
            .and_then(|blob| std::fs::metadata(&blob.data).ok())
            .map_or(0, |data| data.blocks() * 512))
    }

    /// Makes bytes of a blob's cache file ready.
    pub async fn fill(&self, blob: [u8; 32], offset: u64, length: u32) -> Result<(), String> {
        let diff_id = Digest::from(blob);
        self.store
            .fill(
                &diff_id,
                offset,
                length.into(),
                &PullOptions::default(),
                Arc::new(Silent),
            )
            .await
            .map_err(|e| e.to_string())
    }

    /// The images in the store.
    pub fn list(&self) -> Result<Vec<Image>, Failure> {
        self.store.images().map_err(failure)
    }

    /// The image with this manifest digest.
    pub fn by_digest(&self, digest: &str) -> Result<Option<Image>, Failure> {
        let digest: Digest = digest.parse().map_err(|_| {
            Failure::new(
                ExitCode::BadReference,
                format!("{digest:?} is not an image digest"),
            )
        })?;
        self.store.image(&digest).map_err(failure)
    }

    /// Removes the image a reference or a digest (or an unambiguous beginning of one) names. Returns its digest.
    pub fn remove(&self, wanted: &str) -> Result<String, Failure> {
        let hex = wanted.strip_prefix("sha256:").unwrap_or(wanted);
        let by_digest: Vec<_> = match hex.len() >= 6 && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            true => self
                .list()?
                .into_iter()
                .filter(|i| i.digest.hex().starts_with(hex))
                .collect(),
            false => Vec::new(),
        };
        let image = match by_digest.as_slice() {
            [one] => one.clone(),
            [] => {
                let reference: ImageRef = wanted.parse().map_err(failure)?;
                self.store.find(&reference).map_err(failure)?.ok_or_else(|| {
                    Failure::new(
                        ExitCode::ImageNotStored,
                        format!("no image {wanted} is in the store"),
                    )
                    .remedy("see `thaw image ls`")
                })?
            }
            _ => {
                return Err(Failure::new(
                    ExitCode::BadReference,
                    format!("more than one image begins with {wanted}"),
                ));
            }
        };
        self.store.remove(&image.digest).map_err(failure)?;
        Ok(image.digest.to_string())
    }
}

/// Opens what a VMM needs to serve an image.
pub fn export(image: &Image, name: String) -> Result<Exported, Failure> {
    let open = |path: &Path| -> Result<OwnedFd, Failure> {
        let file =
            File::open(path).map_err(|e| Failure::system(format!("cannot open {}", path.display()), &e))?;
        Ok(file.into())
    };
    let mut descriptors = vec![open(&image.metadata)?];
    let mut blobs = Vec::new();
    for blob in &image.blobs {
        descriptors.push(open(&blob.data)?);
        descriptors.push(open(&blob.ready)?);
        blobs.push(BlobRange {
            address: blob.address,
            length: blob.length,
            digest: *blob.id.bytes(),
        });
    }
    Ok(Exported {
        spec: ImageSpec { name, blobs },
        descriptors,
    })
}

/// Bytes an image's files take.
pub fn size(image: &Image) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = image.blobs.iter().map(|b| &b.data).chain([&image.metadata]);
    files
        .filter_map(|path| std::fs::metadata(path).ok())
        .map(|m| m.blocks() * 512)
        .sum()
}

/// The store's errors say what to do themselves.
pub fn failure(error: thaw_rootfs::Error) -> Failure {
    use thaw_rootfs::Error as E;
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
        E::Metadata(_) | E::Blob { .. } | E::Io { .. } | E::InUse { .. } | E::Cancelled | E::Shared(_) => {
            ExitCode::Runtime
        }
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

    #[test]
    fn each_kind_of_bad_image_has_its_exit_code() {
        use thaw_rootfs::Error as E;
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
        let error = thaw_rootfs::Error::DiskFull { path: "/x".into() };
        assert_eq!(
            failure(error).to_string(),
            "disk full at /x; free space there, or choose another store directory"
        );
    }

    #[tokio::test]
    async fn an_image_never_pulled_is_told_from_one_that_does_not_exist() {
        let directory = tempfile::tempdir().unwrap();
        let images = Images::open(directory.path()).unwrap();
        let never = images
            .pull("registry.invalid/x", Pull::Never, false, Arc::new(Silent))
            .await
            .unwrap_err();
        assert_eq!(never.code, ExitCode::ImageNotStored);
        let absent = images
            .pull("oci:/nowhere", Pull::Missing, false, Arc::new(Silent))
            .await
            .unwrap_err();
        assert_eq!(absent.code, ExitCode::ImageNotFound);
        let bad = images
            .pull("No Such!", Pull::Missing, false, Arc::new(Silent))
            .await
            .unwrap_err();
        assert_eq!(bad.code, ExitCode::BadReference);
        assert_eq!(
            images.remove("busybox").unwrap_err().code,
            ExitCode::ImageNotStored
        );
    }
}
