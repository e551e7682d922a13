//! The runtime's options in containerd's configuration: a settings file, or settings in place. Both come from
//! the operator.
//!
//! containerd 1.7 and later passes them to the `start` command, and every version passes them with each task.
//! The shim saves what `start` received in the bundle of the container it was started for, because a pod
//! created through the sandbox API has no task.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use thaw_protocol::shim::bootstrap::BootstrapParams;
use thaw_protocol::shim::runtimeoptions;
use thaw_protocol::shim::{Any, Message};

use crate::any::kind;
use crate::cgroup;
use crate::error::{Error, Result, WithContext};

/// The message's name in containerd 1.6 and later, and in earlier versions.
const KINDS: [&str; 2] = ["runtimeoptions.v1.Options", "cri.runtimeoptions.v1.Options"];
/// Most bytes read from the input of `start`.
const MAX_SIZE: u64 = 1 << 20;
/// The file in a bundle with the saved options.
const SAVED: &str = "thaw-options";

/// The runtime's options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Options {
    #[default]
    None,
    /// Path of a settings file.
    File(PathBuf),
    /// TOML text in containerd's configuration.
    Text(String),
}

impl Options {
    /// The options that came with a task, else those that `start` saved in this bundle.
    pub fn of(given: Option<&Any>, bundle: &Path) -> Result<Options> {
        match given.filter(|given| !given.type_url.is_empty()) {
            Some(given) => Options::read(given),
            None => Options::load(bundle),
        }
    }

    fn load(bundle: &Path) -> Result<Options> {
        let path = bundle.join(SAVED);
        match std::fs::read(&path) {
            Ok(bytes) => {
                let saved = Any::parse_from_bytes(&bytes).map_err(|e| Error::malformed(&path, e))?;
                Options::read(&saved)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Options::None),
            Err(e) => Err(e).with_context(|| format!("read {}", path.display())),
        }
    }

    /// Parses options. Those of another runtime, such as runc's, are ignored.
    fn read(given: &Any) -> Result<Options> {
        if !KINDS.contains(&kind(given)) {
            return Ok(Options::None);
        }
        let wrong = |why: String| Error::Invalid(format!("the runtime's options: {why}"));
        let read =
            runtimeoptions::Options::parse_from_bytes(&given.value).map_err(|e| wrong(e.to_string()))?;
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

/// Reads the options that containerd passes to `start` on standard input. `None` if there are none, or if the
/// input is a terminal.
pub fn from_stdin() -> Result<Option<Any>> {
    let input = std::io::stdin();
    if input.is_terminal() {
        return Ok(None);
    }
    let mut input_bytes = Vec::new();
    input
        .lock()
        .take(MAX_SIZE + 1)
        .read_to_end(&mut input_bytes)
        .with_context(|| "read the runtime's options".into())?;
    if input_bytes.len() as u64 > MAX_SIZE {
        return Err(Error::Invalid(
            "the runtime's options are larger than 1 MiB".into(),
        ));
    }
    Ok(find_options(&input_bytes))
}

/// Finds the options: containerd up to 2.2 passes them alone, later versions as one of several extensions.
fn find_options(input: &[u8]) -> Option<Any> {
    let alone = Any::parse_from_bytes(input).ok();
    let extensions = BootstrapParams::parse_from_bytes(input)
        .unwrap_or_default()
        .extensions;
    let values = extensions.into_iter().filter_map(|e| e.value.into_option());
    let is_known = |any: &Any| KINDS.contains(&kind(any)) || kind(any) == cgroup::OPTIONS;
    alone.into_iter().chain(values).find(is_known)
}

/// Saves the options that `start` received in the bundle.
pub fn save(options: &Any, bundle: &Path) -> Result<()> {
    let path = bundle.join(SAVED);
    let bytes = options.write_to_bytes().map_err(|e| Error::malformed(&path, e))?;
    std::fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))
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
    fn options_file_precedes_text_and_task_precedes_saved() {
        let bundle = tempfile::tempdir().unwrap();
        let of = |told: Option<&Any>| Options::of(told, bundle.path());
        assert_eq!(of(None).unwrap(), Options::None);
        let kept = any(KINDS[0], "/kept.toml", "");
        save(&kept, bundle.path()).unwrap();
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
    fn options_are_found_alone_and_among_extensions() {
        let extension = |value| Extension {
            value: MessageField::some(value),
            ..Default::default()
        };
        let of_runc = any(cgroup::OPTIONS, "", "");
        for options in [any(KINDS[0], "/a.toml", ""), of_runc] {
            assert_eq!(
                find_options(&options.write_to_bytes().unwrap()),
                Some(options.clone())
            );
            let params = BootstrapParams {
                extensions: vec![extension(Any::new()), extension(options.clone())],
                ..Default::default()
            };
            // The container's id and namespace precede them.
            let told = [&b"\x0a\x02id\x12\x02ns"[..], &params.write_to_bytes().unwrap()];
            assert_eq!(find_options(&told.concat()), Some(options));
        }
        for nothing in [&b""[..], b"{}", &[0xff; 64]] {
            assert_eq!(find_options(nothing), None);
        }
    }
}
