//! References to images: a directory, a file, or a place in a registry.
//!
//! Invariant: [`ImageRef`]'s text form parses back to the same reference.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use thaw_imagefs::digest::Digest;

use crate::error::Error;

/// Where an image is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ImageRef {
    /// `oci:DIR[:TAG]`: an OCI image layout directory. DIR ends at the first colon.
    Layout { directory: PathBuf, tag: Option<String> },
    /// `docker-archive:FILE[:TAG]`: a file written by `docker save`. FILE ends at the first colon; TAG may be `NAME:TAG`.
    Archive { file: PathBuf, tag: Option<String> },
    /// `[HOST[:PORT]/]NAME[:TAG][@DIGEST]`.
    Registry(RegistryRef),
}

/// A name in a registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegistryRef {
    /// `docker.io`, or host and optional port.
    pub registry: String,
    /// `library/busybox`: components joined by slashes.
    pub repository: String,
    /// `latest` if the reference has neither tag nor digest.
    pub tag: Option<String>,
    /// Wins over the tag.
    pub digest: Option<Digest>,
}

impl RegistryRef {
    /// Whether its registry is on this host's loopback, for which plain HTTP needs no option.
    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.registry)
    }
}

/// Only on loopback is plain HTTP safe by default.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The registry of names that do not contain one.
pub const DEFAULT_REGISTRY: &str = "docker.io";

const MAX_LENGTH: usize = 4096;

impl ImageRef {
    /// The reference with an absolute path, if it is local, so that it means the same from another directory.
    ///
    /// # Errors
    /// `Io` if the working directory is unknown.
    pub fn absolute(&self) -> Result<Self, Error> {
        let mut reference = self.clone();
        let path = match &mut reference {
            Self::Layout { directory, .. } => directory,
            Self::Archive { file, .. } => file,
            Self::Registry(_) => return Ok(reference),
        };
        *path = std::path::absolute(&*path).map_err(|error| Error::io(path, error))?;
        Ok(reference)
    }

    fn local(rest: &str) -> Result<(PathBuf, Option<String>), &'static str> {
        let (path, tag) = match rest.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (rest, None),
        };
        if path.is_empty() {
            return Err("the path is empty");
        }
        if tag.is_some_and(|tag| tag.is_empty() || tag.contains(char::is_whitespace)) {
            return Err("the tag is empty or has blanks in it");
        }
        Ok((path.into(), tag.map(str::to_owned)))
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("it is empty");
        }
        if text.len() > MAX_LENGTH {
            return Err("it is longer than 4096 bytes");
        }
        if text.contains(char::is_control) {
            return Err("it has control characters in it");
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            return Self::local(rest).map(|(directory, tag)| Self::Layout { directory, tag });
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            return Self::local(rest).map(|(file, tag)| Self::Archive { file, tag });
        }
        RegistryRef::parse(text).map(Self::Registry)
    }
}

impl FromStr for ImageRef {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::parse(text).map_err(|problem| Error::BadReference {
            reference: text.chars().take(200).collect(),
            problem: problem.into(),
        })
    }
}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, path, tag) = match self {
            Self::Layout { directory, tag } => ("oci", directory, tag),
            Self::Archive { file, tag } => ("docker-archive", file, tag),
            Self::Registry(reference) => return reference.fmt(f),
        };
        write!(f, "{kind}:{}", path.display())?;
        tag.iter().try_for_each(|tag| write!(f, ":{tag}"))
    }
}

impl RegistryRef {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                let digest = digest
                    .parse()
                    .map_err(|_| "after @ comes sha256: and 64 lower-case hex digits")?;
                (rest, Some(digest))
            }
            None => (text, None),
        };
        // A colon after the last slash starts a tag; one before it belongs to a port.
        let name_start = rest.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match rest[name_start..].split_once(':') {
            Some((last, tag)) => (&rest[..name_start + last.len()], Some(tag)),
            None => (rest, None),
        };
        if let Some(tag) = tag {
            check_tag(tag)?;
        }
        let (registry, path) = match name.split_once('/') {
            Some((first, path)) if first.contains(['.', ':']) || first == "localhost" => (first, path),
            _ => (DEFAULT_REGISTRY, name),
        };
        let registry = if registry == "index.docker.io" {
            DEFAULT_REGISTRY
        } else {
            registry
        };
        check_registry(registry)?;
        check_repository(path)?;
        let repository = if registry == DEFAULT_REGISTRY && !path.contains('/') {
            format!("library/{path}")
        } else {
            path.to_owned()
        };
        let tag = match (tag, &digest) {
            (None, None) => Some("latest".to_owned()),
            (tag, _) => tag.map(str::to_owned),
        };
        Ok(Self {
            registry: registry.to_owned(),
            repository,
            tag,
            digest,
        })
    }

    /// The part that identifies the manifest in the repository: the digest, or else the tag.
    pub fn version(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }
}

impl fmt::Display for RegistryRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

fn check_tag(tag: &str) -> Result<(), &'static str> {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let fits = tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || byte == b'.' || byte == b'-');
    if fits {
        Ok(())
    } else {
        Err("a tag has up to 128 letters, digits, '_', '.' and '-', and starts with none of the last two")
    }
}

fn check_registry(registry: &str) -> Result<(), &'static str> {
    const PROBLEM: &str = "a registry is a host name or address, and a port after a colon if need be";
    let (host, port) = match registry.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or(PROBLEM)?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_| PROBLEM)?;
            ("v6", rest)
        }
        None => registry.split_at(registry.find(':').unwrap_or(registry.len())),
    };
    let label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let port_fits = match port.strip_prefix(':') {
        Some(port) => {
            port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
        }
        None => port.is_empty(),
    };
    if host.split('.').all(label) && port_fits {
        Ok(())
    } else {
        Err(PROBLEM)
    }
}

/// Path components by the distribution specification: lower-case words joined by `.`, `_`, `__` or dashes.
fn check_repository(path: &str) -> Result<(), &'static str> {
    let component = |component: &str| {
        let bytes = component.as_bytes();

        bytes.first().is_some_and(word_of)
            && bytes.last().is_some_and(word_of)
            && bytes
                .split(word_of)
                .filter(|gap| !gap.is_empty())
                .all(|gap| matches!(gap, b"." | b"_" | b"__") || gap.iter().all(|byte| *byte == b'-'))
    };
    if path.len() > 255 {
        return Err("the name is longer than 255 bytes");
    }
    if path.split('/').all(component) {
        Ok(())
    } else if path.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Err("names are lower-case")
    } else {
        Err(
            "a name has lower-case letters and digits, joined by '.', '_', '__' or dashes, in parts joined by '/'",
        )
    }
}

fn word_of(byte: &u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

#[cfg(test)]
#[path = "reference_test.rs"]
mod tests;
