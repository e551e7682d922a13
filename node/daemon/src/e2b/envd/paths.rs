//! Paths as callers write them: absolute, relative to the user's home, or beginning with `~`.
//!
//! `.` and `..` are removed as text, as clients expect. What links do is the guest's matter, which resolves every path within the
//! container's root.

use std::sync::Arc;

use super::accounts::Accounts;
use super::failure::Failure;
use crate::api::check;
use crate::api::files::Files;

/// The user whose home relative paths begin in if a caller names none.
const DEFAULT_USER: &str = "root";
/// Longest path of a caller, bytes.
const MAX_PATH: usize = 4096;

/// The absolute path that a user of the container means.
///
/// # Errors
/// It is too long, has a NUL, or names another user's home.
pub async fn absolute(files: &Arc<dyn Files>, user: Option<&str>, path: &str) -> Result<String, Failure> {
    if path.len() > MAX_PATH {
        return Err(Failure::invalid(format!("path has at most {MAX_PATH} bytes")));
    }
    let path = match path.strip_prefix('~') {
        Some(below) if below.is_empty() || below.starts_with('/') => below.trim_start_matches('/'),
        Some(_) => {
            return Err(Failure::invalid(
                "path begins with ~ of another user; write the path in full",
            ));
        }
        None if path.starts_with('/') => return checked(path),
        None => path,
    };
    let accounts = Accounts::read(files).await;
    let home = accounts.home(user.unwrap_or(DEFAULT_USER));
    checked(&format!("{home}/{path}"))
}

/// A path without `.` and `..`.
fn checked(path: &str) -> Result<String, Failure> {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let path = format!("/{}", parts.join("/"));
    check::directory(&path)?;
    Ok(path)
}

/// The directory of an absolute path, and `/` of itself.
pub fn parent(path: &str) -> &str {
    match path.rfind('/') {
        None | Some(0) => "/",
        Some(at) => &path[..at],
    }
}

/// The last part of an absolute path.
pub fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// A path below a directory.
pub fn join(directory: &str, name: &str) -> String {
    format!("{}/{name}", directory.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_cleaned_as_text() {
        for (written, meant) in [
            ("/", "/"),
            ("/a/./b//c/", "/a/b/c"),
            ("/a/../../b", "/b"),
            ("/..", "/"),
        ] {
            assert_eq!(checked(written).unwrap(), meant, "{written}");
        }
        assert!(checked("/a\0").is_err() && checked(&"/a".repeat(600)).is_err());
        assert_eq!((parent("/a/b"), parent("/a"), parent("/")), ("/a", "/", "/"));
        assert_eq!(
            (name("/a/b"), join("/", "a"), join("/a", "b")),
            ("b", "/a".into(), "/a/b".into())
        );
    }
}
