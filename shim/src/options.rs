//! What containerd's file says of this runtime: a file of settings, or settings themselves. Both are the operator's word.
//!
//! containerd 1.7 and later tell it to the `start` command, all tell it with each task. What `start` hears is kept in the
//! bundle of the container it was called for: a pod made by the sandbox API has no task to be told with.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use thaw_protocol::shim::bootstrap::BootstrapParams;
use thaw_protocol::shim::runtimeoptions;
use thaw_protocol::shim::{Any, Message};

use crate::cgroup;
use crate::error::{Error, For, Result};

/// The name of the message in an `Any`, of containerd 1.6 and later, and of those before.
const KINDS: [&str; 2] = ["runtimeoptions.v1.Options", "cri.runtimeoptions.v1.Options"];
/// Most that is taken of what `start` is told, bytes.
const MOST: u64 = 1 << 20;
/// The file of a bundle it is kept in.
const KEPT: &str = "thaw-options";

/// What is said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Options {
    #[default]
    None,
    /// A file there is.
    File(PathBuf),
    /// TOML, within containerd's file.
    Text(String),
}

impl Options {
    /// What comes with a task; else what came to `start`, of whose bundle this is.
    pub fn of(told: Option<&Any>, bundle: &Path) -> Result<Options> {
        match told.filter(|told| !told.type_url.is_empty()) {
            Some(told) => Options::read(told),
            None => Options::kept(bundle),
        }
    }

    fn kept(bundle: &Path) -> Result<Options> {
        let path = bundle.join(KEPT);
        match std::fs::read(&path) {
            Ok(bytes) => {
                let told = Any::parse_from_bytes(&bytes).map_err(|e| Error::malformed(&path, e))?;
                Options::read(&told)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Options::None),
            Err(e) => Err(e).for_(|| format!("read {}", path.display())),
        }
    }

    /// Those of another kind, as runc's, say nothing.
    fn read(told: &Any) -> Result<Options> {
        if !KINDS.contains(&kind(told)) {
            return Ok(Options::None);
        }
        let wrong = |why: String| Error::Invalid(format!("the runtime's options: {why}"));
        let read =
            runtimeoptions::Options::parse_from_bytes(&told.value).map_err(|e| wrong(e.to_string()))?;
        if !read.config_path.is_empty() {
            return Ok(Options::File(read.config_path.into()));
        }
        match read.config_body.is_empty() {
            true => Ok(Options::None),
            false => String::from_utf8(read.config_body)
                .map(Options::Text)
                .map_err(|e| wrong(e.to_string())),
        }
    }
}

/// The name of the message that an `Any` is: its URL without whoever describes it.
pub fn kind(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// What `start` is told as its standard input. Nothing told is no error; nor is a terminal, which tells nothing.
pub fn told() -> Result<Option<Any>> {
    let input = std::io::stdin();
    if input.is_terminal() {
        return Ok(None);
    }
    let mut told = Vec::new();
    input
        .lock()
        .take(MOST + 1)
        .read_to_end(&mut told)
        .for_(|| "read the runtime's options".into())?;
    if told.len() as u64 > MOST {
        return Err(Error::Invalid(
            "the runtime's options are larger than 1 MiB".into(),
        ));
    }
    Ok(among(&told))
}

/// containerd up to 2.2 tells the options themselves, later ones what has them among its extensions. Of others nothing is said.
fn among(told: &[u8]) -> Option<Any> {
    let alone = Any::parse_from_bytes(told).ok();
    let extensions = BootstrapParams::parse_from_bytes(told)
        .unwrap_or_default()
        .extensions;
    let values = extensions.into_iter().filter_map(|e| e.value.into_option());
    let is_known = |any: &Any| KINDS.contains(&kind(any)) || kind(any) == cgroup::OPTIONS;
    alone.into_iter().chain(values).find(is_known)
}

/// Keeps what `start` was told, in the bundle.
pub fn keep(told: &Any, bundle: &Path) -> Result<()> {
    let path = bundle.join(KEPT);
    let bytes = told.write_to_bytes().map_err(|e| Error::malformed(&path, e))?;
    std::fs::write(&path, bytes).for_(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::shim::MessageField;
    use thaw_protocol::shim::bootstrap::Extension;

    fn any(kind: &str, path: &str, body: &str) -> Any {
        let options = runtimeoptions::Options {
            config_path: path.into(),
            config_body: body.into(),
            ..Default::default()
        };
        Any {
            type_url: kind.into(),
            value: options.write_to_bytes().unwrap(),
            ..Default::default()
        }
    }

    #[test]
    fn a_file_goes_before_text_and_a_task_before_what_was_kept() {
        let bundle = tempfile::tempdir().unwrap();
        let of = |told: Option<&Any>| Options::of(told, bundle.path());
        assert_eq!(of(None).unwrap(), Options::None);
        let kept = any(KINDS[0], "/kept.toml", "");
        keep(&kept, bundle.path()).unwrap();
        assert_eq!(of(None).unwrap(), Options::File("/kept.toml".into()));
        assert_eq!(of(Some(&Any::new())).unwrap(), Options::File("/kept.toml".into()));
        let both = any(&format!("types.containerd.io/{}", KINDS[0]), "/a.toml", "b = 1");
        assert_eq!(of(Some(&both)).unwrap(), Options::File("/a.toml".into()));
        let text = any(KINDS[1], "", "b = 1");
        assert_eq!(of(Some(&text)).unwrap(), Options::Text("b = 1".into()));
        let runc = any("containerd.runc.v1.Options", "/a.toml", "");
        assert_eq!(of(Some(&runc)).unwrap(), Options::None);
        let mut broken = both;
        broken.value = vec![0xff];
        assert!(of(Some(&broken)).is_err());
    }

    #[test]
    fn it_is_found_alone_and_among_what_later_containerds_tell() {
        let extension = |value| Extension {
            value: MessageField::some(value),
            ..Default::default()
        };
        let of_runc = any(cgroup::OPTIONS, "", "");
        for options in [any(KINDS[0], "/a.toml", ""), of_runc] {
            assert_eq!(among(&options.write_to_bytes().unwrap()), Some(options.clone()));
            let params = BootstrapParams {
                extensions: vec![extension(Any::new()), extension(options.clone())],
                ..Default::default()
            };
            // The container's id and namespace come first.
            let told = [&b"\x0a\x02id\x12\x02ns"[..], &params.write_to_bytes().unwrap()];
            assert_eq!(among(&told.concat()), Some(options));
        }
        for nothing in [&b""[..], b"{}", &[0xff; 64]] {
            assert_eq!(among(nothing), None);
        }
    }
}
