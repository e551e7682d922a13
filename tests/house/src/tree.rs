//! The text files of a source tree, of the working tree or of a commit.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

/// A file's text by its path below the root, in order.
pub type Tree = BTreeMap<String, String>;

/// The files that git tracks or would track, as they are on disk. Files that are not UTF-8 are left out.
pub fn working() -> Result<Tree, String> {
    let listed = git(&["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    let paths = listed.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    // A file that was deleted is listed until the deletion is staged.
    let read = |path: &str| Some((path.to_owned(), std::fs::read_to_string(path).ok()?));
    Ok(paths.filter_map(|path| read(&path)).collect())
}

/// The files of a commit; fails if the repository does not have it.
pub fn at_commit(commit: &str) -> Result<Tree, String> {
    let listed = git(&["ls-tree", "-r", "-z", "--format=%(objectname) %(path)", commit])?;
    let listed = String::from_utf8_lossy(&listed);
    let files: Vec<(&str, &str)> = listed
        .split('\0')
        .filter_map(|line| line.split_once(' '))
        .filter(|(_, path)| is_measured(path))
        .collect();
    let objects: String = files.iter().map(|(object, _)| format!("{object}\n")).collect();
    let texts = contents(objects)?;
    Ok(files
        .iter()
        .map(|(_, path)| (*path).to_owned())
        .zip(texts)
        .collect())
}

fn is_measured(path: &str) -> bool {
    path.ends_with(".rs") || path.ends_with("Cargo.toml")
}

/// The contents of objects, one name a line.
fn contents(objects: String) -> Result<Vec<String>, String> {
    let failed = |e: std::io::Error| format!("git cat-file: {e}");
    let mut child = Command::new("git")
        .args(["cat-file", "--batch"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let stdin = child.stdin.take();
    // A thread of its own: git writes before it has read every name.
    let writer = std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(objects.as_bytes())));
    let output = child.wait_with_output().map_err(failed)?;
    let _ = writer.join();
    parse_batch(&output.stdout).ok_or_else(|| "git cat-file: an answer of another form".to_owned())
}

/// Splits what `git cat-file --batch` prints: `NAME TYPE SIZE`, a newline, SIZE bytes, a newline.
fn parse_batch(mut rest: &[u8]) -> Option<Vec<String>> {
    let mut texts = Vec::new();
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let head = std::str::from_utf8(&rest[..end]).ok()?;
        let size: usize = head.rsplit(' ').next()?.parse().ok()?;
        let text = rest.get(end + 1..end + 1 + size)?;
        texts.push(String::from_utf8_lossy(text).into_owned());
        rest = rest.get(end + 2 + size..)?;
    }
    Some(texts)
}

fn git(arguments: &[&str]) -> Result<Vec<u8>, String> {
    let output = Command::new("git")
        .args(arguments)
        .output()
        .map_err(|e| format!("git: {e}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("git {}: {}", arguments[0], why.trim()));
    }
    Ok(output.stdout)
}

#[cfg(test)]
#[path = "tree_test.rs"]
mod tests;
