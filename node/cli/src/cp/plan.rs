//! What `thaw cp` makes of its two arguments, as `docker cp` does.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// A tar stream on stdin or stdout.
    Stream,
    /// A path of this host.
    Host(PathBuf),
    /// A path of a sandbox's container. It is absolute.
    Sandbox { sandbox: String, path: PathBuf },
}

impl End {
    /// Reads an argument. Paths of the host that contain a colon begin with `/` or `.`.
    pub fn parse(argument: &OsStr) -> Result<End, String> {
        let bytes = argument.as_bytes();
        if bytes == b"-" {
            return Ok(End::Stream);
        }
        let colon = bytes.iter().position(|byte| *byte == b':');
        let colon = colon.filter(|_| !bytes.starts_with(b"/") && !bytes.starts_with(b"."));
        let Some(colon) = colon else {
            return match bytes.is_empty() {
                true => Err("a path is empty".into()),
                false => Ok(End::Host(argument.into())),
            };
        };
        let sandbox = std::str::from_utf8(&bytes[..colon]).map_err(|_| "a sandbox's name is not UTF-8")?;
        if sandbox.is_empty() {
            return Err(format!(
                "{} names no sandbox before the colon: write SANDBOX:PATH, or ./ before a path of this host",
                argument.display()
            ));
        }
        let path = Path::new(OsStr::from_bytes(&bytes[colon + 1..]));
        Ok(End::Sandbox {
            sandbox: sandbox.into(),
            path: absolute(path),
        })
    }
}

/// A path of a container: relative ones begin at `/`, and `..` is resolved by name, as docker does. A `/` or `/.` at the end stays.
pub fn absolute(path: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(part) => clean.push(part),
            Component::ParentDir => drop(clean.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    let end = match path.as_os_str().as_bytes() {
        bytes if bytes.ends_with(b"/.") || bytes == b"." => "/.",
        bytes if bytes.ends_with(b"/") => "/",
        _ => "",
    };
    let mut whole = clean.into_os_string().into_vec();
    if whole == b"/" {
        whole.clear();
    }
    whole.extend(end.as_bytes());
    if whole.is_empty() {
        whole.push(b'/');
    }
    PathBuf::from(OsString::from_vec(whole))
}

/// What is copied.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    pub path: &'a Path,
    /// The last part of its path, with all links in front of it resolved.
    pub name: OsString,
    pub is_directory: bool,
}

/// Where the archive is unpacked, and the name of its first entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub directory: PathBuf,
    pub name: OsString,
}

/// Decides what the destination means. `there`: whether it is a directory; `None` if it does not exist.
pub fn plan(source: &Source<'_>, destination: &Path, there: Option<bool>) -> Result<Plan, String> {
    if asserts_directory(source.path) && !source.is_directory {
        return Err(format!("{} is not a directory", source.path.display()));
    }
    let shown = destination.display();
    match there {
        Some(true) => Ok(Plan {
            directory: destination.into(),
            name: match source.is_directory && is_contents(source.path) {
                true => ".".into(),
                false => source.name.clone(),
            },
        }),
        Some(false) if source.is_directory => {
            Err(format!("a directory cannot be copied onto the file {shown}"))
        }
        Some(false) if asserts_directory(destination) => Err(format!("{shown} is not a directory")),
        None if asserts_directory(destination) && !source.is_directory => {
            Err(format!("there is no directory {shown}"))
        }
        Some(false) | None => {
            let name = destination
                .file_name()
                .ok_or_else(|| format!("{shown} is not a name"))?;
            let directory = match destination.parent() {
                Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
                Some(parent) => parent,
                None => Path::new("/"),
            };
            Ok(Plan {
                directory: directory.into(),
                name: name.into(),
            })
        }
    }
}

/// Whether a path can only be a directory's.
pub fn asserts_directory(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/") || is_contents(path)
}

/// Whether a path means what is in a directory, rather than the directory.
fn is_contents(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes == b"." || bytes.ends_with(b"/.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_as_docker_reads_them() {
        let of = |argument: &str| End::parse(OsStr::new(argument));
        let sandbox = |path: &str| End::Sandbox {
            sandbox: "web".into(),
            path: path.into(),
        };
        assert_eq!(of("-"), Ok(End::Stream));
        for path in ["a", "./a:b", "/a:b", "../a:b", "dir/"] {
            assert_eq!(of(path), Ok(End::Host(path.into())));
        }
        for (argument, path) in [
            ("web:/etc/hosts", "/etc/hosts"),
            ("web:etc", "/etc"),
            ("web:", "/"),
            ("web:/etc/../../usr/./x/", "/usr/x/"),
            ("web:/etc/.", "/etc/."),
            ("web:.", "/."),
            ("web:a:b", "/a:b"),
        ] {
            assert_eq!(of(argument), Ok(sandbox(path)), "{argument}");
        }
        assert!(of("").is_err() && of(":/a").is_err());
        let odd = OsStr::from_bytes(b"web:/a\xff");
        let End::Sandbox { path, .. } = End::parse(odd).unwrap() else {
            panic!("{odd:?}");
        };
        assert_eq!(path.as_os_str().as_bytes(), b"/a\xff");
    }

    #[test]
    fn destinations_mean_what_docker_means() {
        // Source, whether it is a directory, destination, what is there; where it goes, under which name.
        for (from, is_directory, to, there, expected) in [
            ("f", false, "/d", Some(true), Ok(("/d", "f"))),
            ("f", false, "/d/", Some(true), Ok(("/d/", "f"))),
            ("f", false, "/d/g", Some(false), Ok(("/d", "g"))),
            ("f", false, "/d/g", None, Ok(("/d", "g"))),
            ("f", false, "g", None, Ok((".", "g"))),
            ("f", false, "/d/", None, Err("no directory")),
            ("f", false, "/g/", Some(false), Err("not a directory")),
            ("f/", false, "/d", Some(true), Err("not a directory")),
            ("f/.", false, "/d", Some(true), Err("not a directory")),
            ("s", true, "/d", Some(true), Ok(("/d", "s"))),
            ("s/", true, "/d", Some(true), Ok(("/d", "s"))),
            ("s/.", true, "/d", Some(true), Ok(("/d", "."))),
            (".", true, "/d", Some(true), Ok(("/d", "."))),
            ("s", true, "/d/new", None, Ok(("/d", "new"))),
            ("s/.", true, "/d/new/", None, Ok(("/d", "new"))),
            ("s", true, "/d/g", Some(false), Err("onto the file")),
        ] {
            let path = Path::new(from);
            let source = Source {
                path,
                name: path.file_name().unwrap_or(OsStr::new("here")).into(),
                is_directory,
            };
            match (plan(&source, Path::new(to), there), expected) {
                (Ok(plan), Ok((directory, name))) => {
                    assert_eq!(
                        (plan.directory, plan.name),
                        (directory.into(), name.into()),
                        "{from} {to}"
                    );
                }
                (Err(error), Err(part)) => assert!(error.contains(part), "{from} {to}: {error}"),
                (got, _) => panic!("{from} {to}: {got:?}"),
            }
        }
    }
}
