//! Archives that `docker save`, `podman save` and `skopeo copy … docker-archive:` write: a tar with `manifest.json`,
//! which names a config and layers by their paths in the archive. Newer Docker puts an OCI layout into the same
//! archive; its `manifest.json` points into `blobs/sha256/`, so that both are read in the same way.
//!
//! The archive is not unpacked: its headers are read once by seeking, then members are read in place. Only a compressed
//! archive is expanded first, into a file without a name.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use oci_spec::image::ImageConfiguration;
use serde::Deserialize;
use thaw_imagefs::digest::Digest;

use crate::compression;
use crate::error::Error;
use crate::manifest::{MAX_CONFIG, MAX_MANIFEST, OCI_CONFIG, OCI_MANIFEST};

use super::resolve::diff_ids;
use super::section::{Section, read_limited};
use super::{Descriptor, LayerBody, LayerSource, Root, Source};

const MAX_MEMBERS: usize = 1 << 20;

enum Member {
    File {
        offset: u64,
        size: u64,
    },
    /// Older Docker stored a repeated layer as a link to the first copy.
    Link(String),
}

pub struct Archive {
    path: PathBuf,
    file: Arc<File>,
    members: HashMap<String, Member>,
    tag: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

impl Archive {
    pub fn open(path: PathBuf, tag: Option<String>, scratch: &Path) -> Result<Self, Error> {
        let file = File::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound {
                what: "the archive".into(),
                place: path.display().to_string(),
                advice: "check the path".into(),
            },
            _ => Error::io(&path, error),
        })?;
        if file.metadata().map_err(|error| Error::io(&path, error))?.is_dir() {
            return Err(Error::NotFound {
                what: "a file".into(),
                place: path.display().to_string(),
                advice: "for a directory, say oci:DIR".into(),
            });
        }
        let file = expand(&path, file, scratch)?;
        let members = members(&path, &file)?;
        Ok(Self {
            path,
            file: Arc::new(file),
            members,
            tag,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The image's layers in their stored form, by DiffID and, if known, by digest.
    pub(crate) fn sections(&self) -> Result<HashMap<Digest, Section>, Error> {
        let Root::Parts { layers, .. } = Self::root(self)? else {
            return Ok(HashMap::new());
        };
        let mut sections = HashMap::new();
        for layer in layers {
            let section = self.find(layer.member.as_deref().unwrap_or_default())?;
            for name in std::iter::once(layer.diff_id).chain(layer.digest) {
                sections.insert(name, section.clone());
            }
        }
        Ok(sections)
    }

    fn what(&self) -> String {
        self.path.display().to_string()
    }

    fn find(&self, name: &str) -> Result<Section, Error> {
        let mut name = clean(name);
        // One link leads to a file; a few more are followed in case, a circle is not.
        for _ in 0..8 {
            match self.members.get(&name) {
                Some(Member::File { offset, size }) => {
                    return Ok(Section {
                        file: self.file.clone(),
                        at: *offset,
                        end: offset + size,
                    });
                }
                Some(Member::Link(target)) => name = target.clone(),
                None => break,
            }
        }
        Err(Error::NotFound {
            what: format!("member {name:?}"),
            place: self.what(),
            advice: "the archive is incomplete or not made by docker save: save the image again".into(),
        })
    }

    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        read_limited(
            &format!("{name} in {}", self.what()),
            &self.path,
            self.find(name)?,
            limit,
        )
    }

    fn select(&self, mut entries: Vec<Entry>) -> Result<Entry, Error> {
        let tags: Vec<String> = entries
            .iter()
            .flat_map(|it| it.repo_tags.clone().unwrap_or_default())
            .collect();
        let not_found = |what: String| Error::NotFound {
            what,
            place: self.what(),
            advice: if tags.is_empty() {
                "leave the tag out".into()
            } else {
                format!("it has: {}", tags.join(", "))
            },
        };
        match &self.tag {
            None if entries.len() == 1 => Ok(entries.remove(0)),
            None if entries.is_empty() => {
                Err(Error::malformed(self.what(), "its manifest.json lists no image"))
            }
            None => Err(not_found(format!(
                "one image, but {} without saying which,",
                entries.len()
            ))),
            Some(wanted) => {
                let names_it = |tag: &String| {
                    tag == wanted
                        || tag
                            .strip_suffix(wanted.as_str())
                            .is_some_and(|rest| rest.ends_with([':', '/']))
                };
                let position = entries
                    .iter()
                    .position(|it| it.repo_tags.iter().flatten().any(names_it));
                position
                    .map(|at| entries.remove(at))
                    .ok_or_else(|| not_found(format!("tag {wanted:?}")))
            }
        }
    }

    /// The config, verified if its name is its digest.
    fn read_config(&self, name: &str) -> Result<Vec<u8>, Error> {
        let bytes = self.read(name, MAX_CONFIG)?;
        let got = Digest::of(&bytes);
        match digest_of_name(name) {
            Some(expected) if expected != got => Err(Error::DigestMismatch {
                what: format!("config in {}", self.what()),
                expected,
                got,
            }),
            _ => Ok(bytes),
        }
    }

    fn root(&self) -> Result<Root, Error> {
        let bytes = self.read("manifest.json", MAX_MANIFEST)?;
        let entries: Vec<Entry> = serde_json::from_slice(&bytes)
            .map_err(|error| Error::malformed(format!("manifest.json in {}", self.what()), error))?;
        let entry = self.select(entries)?;
        let config_bytes = self.read_config(&entry.config)?;
        let config: ImageConfiguration = serde_json::from_slice(&config_bytes)
            .map_err(|error| Error::malformed(format!("the image's config in {}", self.what()), error))?;
        let names = entry.layers.unwrap_or_default();
        let diff_ids = diff_ids(&config)?;
        if names.len() != diff_ids.len() {
            let problem = format!("{} DiffIDs for {} layers", diff_ids.len(), names.len());
            return Err(Error::malformed(self.what(), problem));
        }
        let mut layers = Vec::new();
        for (name, diff_id) in names.into_iter().zip(diff_ids) {
            let section = self.find(&name)?;
            // In an OCI layout inside the archive, the path is the digest of the stored bytes; other names prove nothing.
            let digest = name.strip_prefix("blobs/sha256/").and_then(Digest::from_hex);
            let size = Some(section.end - section.at);
            layers.push(LayerSource {
                diff_id,
                digest,
                size,
                urls: Vec::new(),
                member: Some(name),
            });
        }
        Ok(Root::Parts {
            manifest: manifest(&config_bytes, &layers)?,
            config: config_bytes,
            layers,
        })
    }
}

/// The manifest the archive does not have: the layers go by their DiffIDs, so that however the archive stores them, the
/// same image has the same identity.
fn manifest(config: &[u8], layers: &[LayerSource]) -> Result<Vec<u8>, Error> {
    let layers: Vec<_> = layers
        .iter()
        .map(|layer| Descriptor::new("application/vnd.oci.image.layer.v1.tar", layer.diff_id, 0))
        .collect();
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": Descriptor::of(OCI_CONFIG, config),
        "layers": layers,
    });
    serde_json::to_vec(&manifest).map_err(|error| Error::malformed("the image's manifest", error))
}

/// The digest in a name `HEX.json` or `blobs/sha256/HEX`.
fn digest_of_name(name: &str) -> Option<Digest> {
    let name = clean(name);
    let last = name
        .strip_prefix("blobs/sha256/")
        .or_else(|| name.strip_suffix(".json"))?;
    Digest::from_hex(last)
}

/// A path without `.`, `..` and leading or doubled slashes; it is a key of a map, never a path of the host.
fn clean(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// A plain archive as it is, or a compressed one expanded.
fn expand(path: &Path, file: File, scratch: &Path) -> Result<File, Error> {
    let mut magic = [0; 4];
    let length = file
        .read_at(&mut magic, 0)
        .map_err(|error| Error::io(path, error))?;
    if compression::is_plain(&magic[..length]) {
        return Ok(file);
    }
    let mut expanded = tempfile::tempfile_in(scratch).map_err(|error| Error::io(scratch, error))?;
    let mut reader = compression::decoder(BufReader::with_capacity(1 << 20, file))
        .map_err(|error| Error::io(path, error))?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = reader
            .read(&mut buffer)
            .map_err(|error| match error.raw_os_error() {
                Some(_) => Error::io(path, error),
                None => Error::malformed(path.display().to_string(), error),
            })?;
        if length == 0 {
            io::Seek::rewind(&mut expanded).map_err(|error| Error::io(scratch, error))?;
            return Ok(expanded);
        }
        io::Write::write_all(&mut expanded, &buffer[..length]).map_err(|error| Error::io(scratch, error))?;
    }
}

fn members(path: &Path, file: &File) -> Result<HashMap<String, Member>, Error> {
    let what = || path.display().to_string();
    let size = file.metadata().map_err(|error| Error::io(path, error))?.len();
    let mut archive = tar::Archive::new(file);
    let mut members = HashMap::new();
    for entry in archive
        .entries_with_seek()
        .map_err(|error| Error::malformed(what(), error))?
    {
        let entry = entry.map_err(|error| Error::malformed(what(), error))?;
        let name = clean(&String::from_utf8_lossy(&entry.path_bytes()));
        let kind = entry.header().entry_type();
        let member = if kind.is_symlink() {
            let target = entry.link_name_bytes().unwrap_or_default();
            let directory = name.rsplit_once('/').map_or("", |(directory, _)| directory);
            Member::Link(clean(&format!(
                "{directory}/{}",
                String::from_utf8_lossy(&target)
            )))
        } else if kind.is_hard_link() {
            Member::Link(clean(&String::from_utf8_lossy(
                &entry.link_name_bytes().unwrap_or_default(),
            )))
        } else if kind.is_file() {
            let (offset, length) = (entry.raw_file_position(), entry.size());
            if offset.checked_add(length).is_none_or(|end| end > size) {
                let got = size.saturating_sub(offset);
                return Err(Error::TruncatedLayer {
                    what: format!("member {name:?} of {}", what()),
                    expected: length,
                    got,
                });
            }
            Member::File { offset, size: length }
        } else {
            continue;
        };
        if members.len() >= MAX_MEMBERS {
            return Err(Error::malformed(what(), "it has too many members"));
        }
        members.insert(name, member);
    }
    Ok(members)
}

#[async_trait]
impl Source for Archive {
    async fn root(&self) -> Result<Root, Error> {
        Self::root(self)
    }

    async fn manifest(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        Err(Error::malformed(
            self.what(),
            format!("it has no manifest {}", descriptor.digest),
        ))
    }

    async fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        Err(Error::malformed(
            self.what(),
            format!("it has no config {}", descriptor.digest),
        ))
    }

    async fn open(&self, layer: &LayerSource, _place: usize) -> Result<LayerBody, Error> {
        let member = layer.member.as_deref().unwrap_or_default();
        Ok(LayerBody::local(self.find(member)?, &self.path))
    }
}
