//! Names of entries: which are valid, and the meaning of those with a whiteout prefix (OCI image-spec, layer.md).

use super::LayerError;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// AUFS's own files; other runtimes leave them out as well.
const AUFS: &[u8] = b".wh..wh.";

/// Longest component (Linux's NAME_MAX).
const MAX_NAME: usize = 255;
/// Longest path: more than Linux can resolve in steps, and a bound for hostile paths.
const MAX_PATH: usize = 64 << 10;

/// The defect of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flaw {
    why: &'static str,
    /// Whether it looks like an attempt to leave the tree.
    is_escape: bool,
}

impl Flaw {
    pub fn into_error(self, offset: u64, name: &[u8]) -> LayerError {
        match self.is_escape {
            true => LayerError::unsafe_path(offset, name, self.why),
            false => LayerError::bad_header(offset, name, self.why),
        }
    }
}

const fn escape(why: &'static str) -> Flaw {
    Flaw { why, is_escape: true }
}

const fn malformed(why: &'static str) -> Flaw {
    Flaw {
        why,
        is_escape: false,
    }
}

/// Joins a name's components with single slashes, without `.`; the root becomes the empty path.
pub fn clean(name: &[u8]) -> Result<Vec<u8>, Flaw> {
    if name.is_empty() {
        return Err(malformed("the name is empty"));
    }
    if name.starts_with(b"/") {
        return Err(escape("it is absolute"));
    }
    if name.len() > MAX_PATH {
        return Err(malformed("the path is longer than 64 KiB"));
    }
    let mut path = Vec::with_capacity(name.len());
    for component in name.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => continue,
            b".." => return Err(escape("it has a '..' component")),
            _ if component.contains(&0) => return Err(malformed("the name has a NUL")),
            _ if component.len() > MAX_NAME => return Err(malformed("a name is longer than 255 bytes")),
            _ => {}
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(component);
    }
    Ok(path)
}

/// The meaning of an entry's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Path(Vec<u8>),
    /// The path it hides.
    Whiteout(Vec<u8>),
    /// The directory that is opaque.
    Opaque(Vec<u8>),
}

impl Place {
    /// `None` for AUFS's own entries.
    pub fn of(name: &[u8]) -> Result<Option<Place>, Flaw> {
        let path = clean(name)?;
        let split = path
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(0, |slash| slash + 1);
        let (parent, base) = path.split_at(split);
        if parent
            .split(|byte| *byte == b'/')
            .any(|component| component.starts_with(AUFS))
        {
            return Ok(None);
        }
        if base == OPAQUE {
            return Ok(Some(Place::Opaque(
                parent.strip_suffix(b"/").unwrap_or(parent).to_vec(),
            )));
        }
        if base.starts_with(AUFS) {
            return Ok(None);
        }
        match base.strip_prefix(WHITEOUT) {
            None => Ok(Some(Place::Path(path))),
            Some(b"") => Err(malformed("a whiteout without a name")),
            Some(b"." | b"..") => Err(escape("it is a whiteout of '.' or '..'")),
            Some(hidden) => Ok(Some(Place::Whiteout([parent, hidden].concat()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, path) in [
            (&b"a"[..], &b"a"[..]),
            (b"./a//b/./c/", b"a/b/c"),
            (b"./", b""),
            (b"a\xff\n", b"a\xff\n"),
            (b"...", b"..."),
            (&[b'x'; 255], &[b'x'; 255]),
        ] {
            assert_eq!(clean(name).as_deref(), Ok(path));
        }
        for name in [&b"/etc"[..], b"..", b"a/../b", b"a/..", b"//"] {
            assert!(clean(name).unwrap_err().is_escape, "{name:?}");
        }
        for name in [&b""[..], &[b'x'; 256], b"a\0b"] {
            assert!(!clean(name).unwrap_err().is_escape, "{name:?}");
        }
    }

    #[test]
    fn whiteouts() {
        let of = |name: &[u8]| Place::of(name).unwrap();
        assert_eq!(of(b"a/.wh.b"), Some(Place::Whiteout(b"a/b".to_vec())));
        assert_eq!(of(b".wh.b"), Some(Place::Whiteout(b"b".to_vec())));
        assert_eq!(of(b"./a/.wh..wh..opq"), Some(Place::Opaque(b"a".to_vec())));
        assert_eq!(of(b".wh..wh..opq"), Some(Place::Opaque(b"".to_vec())));
        assert_eq!(of(b".wh..wh.plnk/1.2"), None);
        assert_eq!(of(b".wh..wh.aufs"), None);
        assert_eq!(of(b"a/.wh"), Some(Place::Path(b"a/.wh".to_vec())));
        for name in [&b".wh."[..], b".wh..", b"x/.wh..."] {
            assert!(Place::of(name).is_err(), "{name:?}");
        }
    }
}
