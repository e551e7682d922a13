//! OCI layouts made in the test, so that each can be wrong in exactly one way.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// The media type of an uncompressed layer.
pub const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// One image with one uncompressed layer; change what should be wrong, then [`Layout::write`].
pub struct Layout {
    pub architecture: String,
    pub layer_media_type: String,
    pub layer: Vec<u8>,
    pub command: Vec<String>,
    /// The digest the configuration claims for the layer, when not the true one.
    pub diff_id: Option<String>,
    /// The bytes stored for the layer, when not those the manifest speaks of.
    pub stored_layer: Option<Vec<u8>>,
}

impl Layout {
    /// A right image around this layer.
    pub fn new(layer: Vec<u8>) -> Layout {
        Layout {
            architecture: "amd64".into(),
            layer_media_type: TAR.into(),
            layer,
            command: vec!["/bin/sh".into()],
            diff_id: None,
            stored_layer: None,
        }
    }

    /// Writes the layout into `folder` and gives the reference of its only image.
    pub fn write(&self, folder: &Path) -> String {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let layer_digest = hex(&self.layer);
        let stored = self.stored_layer.as_ref().unwrap_or(&self.layer);
        fs::write(blobs.join(&layer_digest), stored).unwrap();
        let diff_id = self.diff_id.clone().unwrap_or(format!("sha256:{layer_digest}"));
        let config = put(
            &blobs,
            &json!({
                "architecture": self.architecture, "os": "linux",
                "config": {"Cmd": self.command, "Env": ["PATH=/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            }),
            CONFIG,
        );
        let layer = json!({
            "mediaType": self.layer_media_type, "digest": format!("sha256:{layer_digest}"), "size": self.layer.len(),
        });
        let mut manifest = put(
            &blobs,
            &json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}),
            MANIFEST,
        );
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "latest"});
        let index = json!({"schemaVersion": 2, "manifests": [manifest]});
        fs::write(folder.join("index.json"), index.to_string()).unwrap();
        fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        format!("oci:{}:latest", folder.display())
    }
}

/// A tar of these files, mode 0755, contents as given.
pub fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        raw_name(&mut header, name);
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A tar with one hard link named `name` to `target`.
pub fn tar_with_link(name: &str, target: &str) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Link);
    header.set_size(0);
    raw_name(&mut header, name);
    header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, &[][..]).unwrap();
    builder.into_inner().unwrap()
}

/// Sets a name the tar crate itself would refuse.
fn raw_name(header: &mut tar::Header, name: &str) {
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
}

fn put(blobs: &Path, document: &Value, media_type: &str) -> Value {
    let bytes = document.to_string().into_bytes();
    let digest = hex(&bytes);
    fs::write(blobs.join(&digest), &bytes).unwrap();
    json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()})
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
