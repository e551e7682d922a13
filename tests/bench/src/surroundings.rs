//! What `tests/on-kvm` tells a benchmark of Linux guests: where its programs, its kernel, its images and its data are.

use std::path::PathBuf;

use thaw_tiny_node::{Linux, Place};

/// See the module.
#[derive(Clone, Debug)]
pub struct Surroundings {
    binaries: PathBuf,
    kernel: PathBuf,
    images: String,
    /// For data.
    directory: PathBuf,
}

impl Surroundings {
    /// As the environment of this process has them. `command` runs the benchmark through `tests/on-kvm`.
    ///
    /// # Errors
    /// The environment lacks one of them.
    pub fn read(command: &str) -> Result<Surroundings, String> {
        let said = |name: &str| {
            std::env::var(name).map_err(|_| format!("{name} is not set: run this through `{command}`"))
        };
        let data = std::env::var("THAW_DATA").map(PathBuf::from);
        let directory = data.ok().and_then(|data| Some(data.parent()?.to_owned()));
        Ok(Surroundings {
            binaries: said("THAW_BIN")?.into(),
            kernel: said("THAW_KERNEL")?.into(),
            images: said("THAW_TEST_IMAGES")?,
            directory: directory.unwrap_or_else(std::env::temp_dir),
        })
    }

    /// A test image, as a creation names it.
    pub fn image(&self, name: &str) -> String {
        format!("oci:{}:{name}", self.images)
    }

    /// A place whose sandboxes are of a test image.
    pub fn place(&self, image: &str) -> Place {
        let linux = Linux {
            kernel: self.kernel.clone(),
            guest_image: self.binaries.join("guest.erofs"),
            image: self.image(image),
        };
        Place::of_linux(&self.directory, &self.binaries, linux)
    }
}
