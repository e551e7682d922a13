//! Images for tests, and a small registry that serves them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use flate2::write::GzEncoder;
use serde_json::{Value, json};

use thaw_imagefs::digest::Digest;

use crate::manifest::{OCI_CONFIG, OCI_INDEX, OCI_MANIFEST};

pub const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
pub const TAR_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
pub const TAR_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

/// A tar of regular files; names go in as they are, however unsafe.
pub fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_entry_type(tar::EntryType::Regular);
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Incompressible bytes, different for each seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    std::iter::repeat_with(|| next().to_le_bytes())
        .flatten()
        .take(length)
        .collect()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 1).unwrap()
}

/// A layer of a test. Its descriptor can be changed before the image is created.
#[derive(Clone)]
pub struct Layer {
    pub media_type: String,
    pub stored: Vec<u8>,
    pub diff_id: Digest,
}

impl Layer {
    pub fn new(media_type: &str, tar: &[u8]) -> Self {
        let stored = match media_type {
            it if it.ends_with("gzip") => gzip(tar),
            it if it.ends_with("zstd") => zstd(tar),
            _ => tar.to_vec(),
        };
        Self {
            media_type: media_type.into(),
            stored,
            diff_id: Digest::of(tar),
        }
    }
}

/// Content by digest.
#[derive(Clone, Default)]
pub struct Blobs(pub BTreeMap<Digest, Vec<u8>>);

impl Blobs {
    pub fn add(&mut self, bytes: Vec<u8>) -> Digest {
        let digest = Digest::of(&bytes);
        self.0.insert(digest, bytes);
        digest
    }

    pub fn descriptor(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let size = bytes.len();
        json!({"mediaType": media_type, "digest": self.add(bytes), "size": size})
    }

    pub fn config(architecture: &str, layers: &[Layer]) -> Vec<u8> {
        let diff_ids: Vec<_> = layers.iter().map(|layer| layer.diff_id).collect();
        let config = json!({"architecture": architecture, "os": "linux",
            "config": {"Cmd": ["/bin/true"], "Env": ["A=b"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids}, "created": "2026-01-01T00:00:00Z"});
        config.to_string().into_bytes()
    }

    /// An image; the descriptor of its manifest, with its platform.
    pub fn image(&mut self, architecture: &str, layers: &[Layer]) -> Value {
        let config = self.descriptor(OCI_CONFIG, Self::config(architecture, layers));
        let layers: Vec<_> = layers
            .iter()
            .map(|layer| self.descriptor(&layer.media_type, layer.stored.clone()))
            .collect();
        let manifest =
            json!({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers});
        let mut descriptor = self.descriptor(OCI_MANIFEST, manifest.to_string().into_bytes());
        descriptor["platform"] = json!({"os": "linux", "architecture": architecture});
        descriptor
    }

    pub fn index(&mut self, descriptors: &[Value]) -> Value {
        let index = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": descriptors});
        self.descriptor(OCI_INDEX, index.to_string().into_bytes())
    }

    /// Writes an image layout whose index lists these.
    pub fn write_layout(&self, directory: &Path, descriptors: &[Value]) {
        let blobs = directory.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        for (digest, bytes) in &self.0 {
            std::fs::write(blobs.join(digest.hex()), bytes).unwrap();
        }
        std::fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let index = json!({"schemaVersion": 2, "manifests": descriptors});
        std::fs::write(directory.join("index.json"), index.to_string()).unwrap();
    }
}

pub fn tagged(mut descriptor: Value, tag: &str) -> Value {
    descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
    descriptor
}

/// A client's request.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: String,
    /// The body as it came.
    pub bytes: Vec<u8>,
}

/// The answer to a request.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body sent before the connection is closed.
    pub cut: Option<usize>,
    /// Hold the connection open after the body.
    pub stall: bool,
}

impl Answer {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            cut: None,
            stall: false,
        }
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

/// An HTTP server on loopback that answers with `handler`.
pub struct Server {
    pub address: SocketAddr,
    pub asked: Arc<Mutex<Vec<Asked>>>,
    /// Connections so far.
    pub connections: Arc<AtomicUsize>,
}

impl Server {
    /// One request per connection.
    pub fn start(handler: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self::serving(false, handler)
    }

    /// Serves any number of requests per connection.
    pub fn keeping(handler: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self::serving(true, handler)
    }

    fn serving(keep: bool, handler: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(AtomicUsize::new(0));
        let (log, handler, count) = (asked.clone(), Arc::new(handler), connections.clone());
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let (log, handler) = (log.clone(), handler.clone());
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::spawn(move || {
                    let connection = connection.unwrap();
                    let mut reader = BufReader::new(connection.try_clone().unwrap());
                    while serve(&connection, &mut reader, &log, &*handler, keep) {}
                });
            }
        });
        Self {
            address,
            asked,
            connections,
        }
    }

    /// A registry that has these blobs, manifests too, and one tag.
    pub fn registry(blobs: Blobs, tag: &str, manifest: Digest) -> Self {
        let tag = tag.to_owned();
        Self::start(move |asked| content(&blobs, &tag, manifest, asked))
    }

    pub fn count(&self, part: &str) -> usize {
        self.asked
            .lock()
            .unwrap()
            .iter()
            .filter(|asked| asked.path.contains(part))
            .count()
    }
}

/// The answers of a registry without authentication.
pub fn content(blobs: &Blobs, tag: &str, manifest: Digest, asked: &Asked) -> Answer {
    let path = asked.path.split('?').next().unwrap_or_default();
    let last = path.rsplit('/').next().unwrap_or_default();
    let digest = if last == tag {
        Some(manifest)
    } else {
        last.parse().ok()
    };
    let Some(bytes) = digest.and_then(|digest| blobs.0.get(&digest)) else {
        return Answer::new(
            404,
            r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#,
        );
    };
    let media_type = if asked.path.contains("/manifests/") {
        let document: Value = serde_json::from_slice(bytes).unwrap();
        document["mediaType"].as_str().unwrap_or(OCI_MANIFEST).to_owned()
    } else {
        "application/octet-stream".to_owned()
    };
    let range = asked.headers.get("range").and_then(|it| {
        let (from, last) = it.strip_prefix("bytes=")?.split_once('-')?;
        let last = if last.is_empty() {
            bytes.len() - 1
        } else {
            last.parse().ok()?
        };
        Some((from.parse().ok()?, last))
    });
    match range {
        Some((from, last)) if from <= last && last < bytes.len() => {
            let range = format!("bytes {from}-{last}/{}", bytes.len());
            Answer::new(206, &bytes[from..=last]).header("content-range", &range)
        }
        _ => Answer::new(200, &bytes[..]),
    }
    .header("content-type", &media_type)
}

/// Serves one request. Returns whether another may follow.
fn serve(
    mut connection: &TcpStream,
    reader: &mut BufReader<TcpStream>,
    log: &Mutex<Vec<Asked>>,
    handler: &dyn Fn(&Asked) -> Answer,
    keep: bool,
) -> bool {
    let mut line = String::new();
    if reader.read_line(&mut line).unwrap_or(0) == 0 {
        return false;
    }
    let mut words = line.split_whitespace();
    let mut asked = Asked {
        method: words.next().unwrap_or_default().into(),
        path: words.next().unwrap_or_default().into(),
        ..Asked::default()
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        asked.headers.insert(name.to_lowercase(), value.trim().into());
    }
    let length = asked
        .headers
        .get("content-length")
        .map_or(0, |it| it.parse().unwrap());
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).is_err() {
        return false;
    }
    asked.body = String::from_utf8_lossy(&body).into_owned();
    asked.bytes = body;
    log.lock().unwrap().push(asked.clone());
    let answer = handler(&asked);
    let mut text = format!(
        "HTTP/1.1 {} X\r\ncontent-length: {}\r\n",
        answer.status,
        answer.body.len()
    );
    if !keep {
        text += "connection: close\r\n";
    }
    for (name, value) in &answer.headers {
        text += &format!("{name}: {value}\r\n");
    }
    text += "\r\n";
    let mut bytes = text.into_bytes();
    let body = if asked.method == "HEAD" {
        &[][..]
    } else {
        &answer.body
    };
    bytes.extend_from_slice(&body[..answer.cut.unwrap_or(body.len())]);
    // A client that has seen enough may hang up.
    let written = connection.write_all(&bytes).is_ok();
    if answer.stall {
        let _ = connection.read(&mut [0]);
    }
    keep && written && answer.cut.is_none()
}
