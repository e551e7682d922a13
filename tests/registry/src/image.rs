//! OCI layouts: reading images, and writing images made of others.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const NAME: &str = "org.opencontainers.image.ref.name";
/// The media type of an uncompressed layer; a compression is added to it.
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A layout on disk.
#[derive(Clone, Debug)]
pub struct Layout {
    folder: PathBuf,
}

/// An image of a layout: its configuration, and its layers from the base up.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    pub config: Value,
    pub layers: Vec<Layer>,
}

/// A stored layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// `mediaType`, `digest`, `size`, `annotations`.
    pub descriptor: Value,
    /// Digest of its tar.
    pub diff_id: String,
}

impl Layout {
    /// One that may not exist yet.
    pub fn at(folder: &Path) -> Layout {
        Layout {
            folder: folder.into(),
        }
    }

    /// `thaw`'s reference of one of its images.
    pub fn reference(&self, tag: &str) -> String {
        format!("oci:{}:{tag}", self.folder.display())
    }

    /// Whether an image is there.
    pub fn has(&self, tag: &str) -> bool {
        self.descriptors().iter().any(|entry| tag_of(entry) == tag)
    }

    /// The image with this tag; of an index, its first.
    pub fn image(&self, tag: &str) -> Image {
        let descriptors = self.descriptors();
        let found = descriptors.iter().find(|entry| tag_of(entry) == tag);
        let found = found.unwrap_or_else(|| panic!("no {tag} in {}", self.folder.display()));
        let mut manifest = self.document(found);
        if manifest.get("manifests").is_some() {
            manifest = self.document(&manifest["manifests"][0]);
        }
        let config = self.document(&manifest["config"]);
        let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap();
        let layers = manifest["layers"].as_array().unwrap().iter().zip(diff_ids);
        let layers = layers
            .map(|(descriptor, diff_id)| Layer {
                descriptor: descriptor.clone(),
                diff_id: diff_id.as_str().unwrap().into(),
            })
            .collect();
        Image { config, layers }
    }

    /// Where a blob is.
    pub fn path(&self, descriptor: &Value) -> PathBuf {
        let digest = descriptor["digest"].as_str().unwrap();
        self.folder.join("blobs").join(digest.replace(':', "/"))
    }

    /// A layer's tar.
    pub fn tar(&self, layer: &Layer) -> Vec<u8> {
        let stored = fs::File::open(self.path(&layer.descriptor)).unwrap();
        let media_type = layer.descriptor["mediaType"].as_str().unwrap();
        let mut tar = Vec::new();
        match media_type.rsplit_once(['+', '.']) {
            Some((_, "gzip")) => flate2::read::MultiGzDecoder::new(stored).read_to_end(&mut tar),
            Some((_, "zstd")) => zstd::Decoder::new(stored).unwrap().read_to_end(&mut tar),
            _ => { stored }.read_to_end(&mut tar),
        }
        .unwrap();
        tar
    }

    /// Stores a layer in the form it has in another layout.
    pub fn take(&self, from: &Layout, layer: &Layer) -> Layer {
        let to = self.path(&layer.descriptor);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        if !to.exists() {
            fs::copy(from.path(&layer.descriptor), to).unwrap();
        }
        layer.clone()
    }

    /// Stores a layer's tar, in this stored form of it.
    pub fn layer(&self, tar: &[u8], stored: &[u8], media_type: &str, annotations: Value) -> Layer {
        let mut descriptor = self.put(stored, media_type);
        if annotations.as_object().is_some_and(|a| !a.is_empty()) {
            descriptor["annotations"] = annotations;
        }
        Layer {
            descriptor,
            diff_id: digest(tar),
        }
    }

    /// Stores a layer's tar, gzip compressed by one stream.
    pub fn gzip_layer(&self, tar: &[u8]) -> Layer {
        self.layer(tar, &gzip(tar), &format!("{LAYER}+gzip"), Value::Null)
    }

    /// Stores an image of layers stored here, with the other's configuration, and tags it.
    pub fn write(&self, tag: &str, like: &Image, layers: &[Layer]) {
        let mut config = like.config.clone();
        let diff_ids: Vec<_> = layers.iter().map(|l| &l.diff_id).collect();
        config["rootfs"] = json!({"type": "layers", "diff_ids": diff_ids});
        if let Some(whole) = config.as_object_mut() {
            // It would have to speak of these layers.
            whole.remove("history");
        }
        let config = self.put(config.to_string().as_bytes(), CONFIG);
        let descriptors: Vec<_> = layers.iter().map(|l| &l.descriptor).collect();
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": descriptors});
        let mut entry = self.put(manifest.to_string().as_bytes(), MANIFEST);
        entry["platform"] = json!({"architecture": "amd64", "os": "linux"});
        entry["annotations"] = json!({ NAME: tag });
        let mut entries = self.descriptors();
        entries.retain(|other| tag_of(other) != tag);
        entries.push(entry);
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries});
        fs::write(self.folder.join("index.json"), index.to_string()).unwrap();
        fs::write(
            self.folder.join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
    }

    fn put(&self, bytes: &[u8], media_type: &str) -> Value {
        let descriptor = json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()});
        let path = self.path(&descriptor);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        descriptor
    }

    fn descriptors(&self) -> Vec<Value> {
        let Ok(text) = fs::read(self.folder.join("index.json")) else {
            return Vec::new();
        };
        let index: Value = serde_json::from_slice(&text).unwrap();
        index["manifests"].as_array().unwrap().clone()
    }

    fn document(&self, descriptor: &Value) -> Value {
        serde_json::from_slice(&fs::read(self.path(descriptor)).unwrap()).unwrap()
    }
}

fn tag_of(entry: &Value) -> &str {
    entry["annotations"][NAME].as_str().unwrap_or_default()
}

/// `sha256:` and the digest in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// One gzip member.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::read::GzEncoder::new(bytes, flate2::Compression::new(6));
    let mut out = Vec::new();
    encoder.read_to_end(&mut out).unwrap();
    out
}
