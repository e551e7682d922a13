//! What to share: a mount as containerd and the OCI runtime specification write it, parsed for this host.
//!
//! Invariant: only options that are known here are passed on. Paths are opened here and file systems get the descriptors, so no part of a
//! path is read as an option. The guest handles the options for execution, devices and the set-user-ID bit; on this host no share has any
//! of them.

use std::path::PathBuf;

/// Most layers of an overlay that Linux takes.
const LAYERS: usize = 500;
/// Most bytes of one mount's type, source and options.
const MOST: usize = 256 << 10;

/// Options without effect on this host: the guest handles or ignores them.
const NOT_HERE: &[&str] = &[
    "rw",
    "defaults",
    "nofail",
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "exec",
    "noexec",
    "atime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "diratime",
    "async",
    "silent",
    "loud",
    "private",
    "rprivate",
    "rrw",
    "rsuid",
    "rnosuid",
    "rdev",
    "rnodev",
    "rexec",
    "rnoexec",
    "ratime",
    "rrelatime",
    "rstrictatime",
    "rdiratime",
    "nosymfollow",
    "symfollow",
    "iversion",
    "noiversion",
    "z",
    "Z",
];
/// Options of overlayfs that change how layers are merged, not which they are.
const OVERLAY: &[&str] = &[
    "index",
    "metacopy",
    "redirect_dir",
    "xino",
    "userxattr",
    "volatile",
    "nfs_export",
    "uuid",
    "verity",
    "default_permissions",
];
/// File systems that may be mounted from a block device or an image.
const OF_A_DEVICE: &[&str] = &["ext4", "ext3", "ext2", "xfs", "btrfs", "erofs", "squashfs"];
/// Options that these may have.
const OF_A_DEVICE_OPTIONS: &[&str] = &[
    "subvol",
    "subvolid",
    "nouuid",
    "discard",
    "nodiscard",
    "noload",
    "norecovery",
    "user_xattr",
    "acl",
    "noacl",
    "barrier",
    "nobarrier",
    "data",
    "dax",
    "cache_strategy",
    "domain_id",
    "fsoffset",
    "errors",
];

/// Why a mount cannot be shared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    #[error("the mount of {0:?} is not shared: it is longer than {MOST} bytes")]
    Long(String),
    #[error("{0:?} is not an absolute path of this host")]
    Path(String),
    #[error("a file system of type {0:?} cannot be shared: use a directory, an overlay, or one of {of}", of = OF_A_DEVICE.join(", "))]
    Type(String),
    #[error("mount option {option:?} of a {kind} is not one a share can have")]
    Option { kind: String, option: String },
    #[error("mounts a guest makes are never the host's: {0:?} cannot be had; use rslave or rprivate")]
    Shared(String),
    #[error("an overlay needs {0}")]
    Overlay(&'static str),
}

/// The files of a share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tree {
    /// A directory or a file of the host, with the mounts below it or without.
    Bind { path: PathBuf, recursive: bool },
    Overlay {
        /// Uppermost first.
        lower: Vec<PathBuf>,
        /// The directory for writes and its work directory; `None`: read-only.
        upper: Option<(PathBuf, PathBuf)>,
        options: Vec<FsOption>,
    },
    /// A file system on a block device, or in a file.
    Device {
        kind: String,
        path: PathBuf,
        options: Vec<FsOption>,
    },
}

/// The name of an option and its value, if it has one.
pub type FsOption = (String, Option<String>);

/// A share's files and options.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    pub tree: Tree,
    pub read_only: bool,
    /// The mounts below it are read-only too.
    pub read_only_below: bool,
    /// Reading does not change access times.
    pub no_access_times: bool,
    /// Mounts that the host adds below it later appear too.
    pub follows_host: bool,
}

impl Source {
    /// Parses a mount's type, source and options.
    ///
    /// # Errors
    /// Why it cannot be shared.
    pub fn parse(kind: &str, source: &str, options: &[String]) -> Result<Source, SourceError> {
        let said = source.len() + options.iter().map(|o| o.len() + 1).sum::<usize>();
        if said > MOST {
            return Err(SourceError::Long(source.chars().take(64).collect()));
        }
        let words = || {
            options
                .iter()
                .flat_map(|o| o.split(','))
                .filter(|o| !o.is_empty())
        };
        let bind = words().any(|o| o == "bind");
        let recursive = words().any(|o| o == "rbind");
        let mut parsed = Source {
            tree: Tree::Bind {
                path: PathBuf::new(),
                recursive,
            },
            read_only: false,
            read_only_below: false,
            no_access_times: false,
            follows_host: false,
        };
        let mut rest: Vec<FsOption> = Vec::new();
        for word in words() {
            match word {
                "ro" | "rro" => (parsed.read_only, parsed.read_only_below) = (true, word == "rro"),
                "rw" => (parsed.read_only, parsed.read_only_below) = (false, false),
                "noatime" | "nodiratime" | "rnoatime" | "rnodiratime" => parsed.no_access_times = true,
                "slave" | "rslave" => parsed.follows_host = true,
                "shared" | "rshared" => return Err(SourceError::Shared(word.into())),
                "bind" | "rbind" => {}
                known if NOT_HERE.contains(&known) || known.starts_with("x-") => {}
                other => rest.push(match other.split_once('=') {
                    Some((name, value)) => (name.into(), Some(value.into())),
                    None => (other.into(), None),
                }),
            }
        }
        parsed.tree = match kind {
            _ if bind || recursive || kind == "bind" => bound(source, recursive || !bind, rest)?,
            "overlay" => overlay(rest)?,
            kind if OF_A_DEVICE.contains(&kind) => device(kind, source, rest)?,
            other => return Err(SourceError::Type(other.into())),
        };
        Ok(parsed)
    }
}

fn absolute(path: &str) -> Result<PathBuf, SourceError> {
    match path.starts_with('/') && path.len() < 4096 && !path.contains('\0') {
        true => Ok(PathBuf::from(path)),
        false => Err(SourceError::Path(path.into())),
    }
}

fn unknown(kind: &str, (name, value): &FsOption) -> SourceError {
    SourceError::Option {
        kind: kind.into(),
        option: match value {
            Some(value) => format!("{name}={value}"),
            None => name.clone(),
        },
    }
}

fn bound(source: &str, recursive: bool, rest: Vec<FsOption>) -> Result<Tree, SourceError> {
    match rest.first() {
        Some(option) => Err(unknown("bind", option)),
        None => Ok(Tree::Bind {
            path: absolute(source)?,
            recursive,
        }),
    }
}

fn overlay(rest: Vec<FsOption>) -> Result<Tree, SourceError> {
    let (mut lower, mut upper, mut work, mut options) = (Vec::new(), None, None, Vec::new());
    for option in rest {
        match (option.0.as_str(), &option.1) {
            ("lowerdir", Some(layers)) => {
                lower = colons(layers)
                    .iter()
                    .map(|l| absolute(l))
                    .collect::<Result<_, _>>()?
            }
            ("lowerdir+", Some(layer)) => lower.push(absolute(layer)?),
            ("upperdir", Some(path)) => upper = Some(absolute(path)?),
            ("workdir", Some(path)) => work = Some(absolute(path)?),
            (name, _) if OVERLAY.contains(&name) && is_plain(&option) => options.push(option),
            _ => return Err(unknown("overlay", &option)),
        }
    }
    if lower.is_empty() || lower.len() > LAYERS {
        return Err(SourceError::Overlay("lowerdir, of 1 to 500 layers"));
    }
    let upper = match (upper, work) {
        (Some(upper), Some(work)) => Some((upper, work)),
        (None, None) if lower.len() > 1 => None,
        (None, None) => return Err(SourceError::Overlay("two layers, or an upperdir")),
        _ => return Err(SourceError::Overlay("both upperdir and workdir, or neither")),
    };
    Ok(Tree::Overlay {
        lower,
        upper,
        options,
    })
}

fn device(kind: &str, source: &str, rest: Vec<FsOption>) -> Result<Tree, SourceError> {
    // `loop` only says that the source is a file.
    let options: Vec<FsOption> = rest.into_iter().filter(|(name, _)| name != "loop").collect();
    let bad = |option: &&FsOption| !OF_A_DEVICE_OPTIONS.contains(&option.0.as_str()) || !is_plain(option);
    match options.iter().find(bad) {
        Some(option) => Err(unknown(kind, option)),
        None => Ok(Tree::Device {
            kind: kind.into(),
            path: absolute(source)?,
            options,
        }),
    }
}

/// Whether an option's value is a plain word: not several options, and not a path.
fn is_plain((_, value): &FsOption) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    value
        .as_ref()
        .is_none_or(|value| value.len() <= 128 && value.bytes().all(plain))
}

/// Splits at colons, except escaped ones: overlayfs writes a colon of a name with a backslash.
fn colons(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        let Some(last) = parts.last_mut() else { break };
        match character {
            ':' => parts.push(String::new()),
            '\\' => last.extend(characters.next()),
            other => last.push(other),
        }
    }
    parts
}

#[cfg(test)]
#[path = "source_test.rs"]
mod tests;
