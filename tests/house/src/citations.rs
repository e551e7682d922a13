//! Documents and source files that comments name and that do not exist.

use std::collections::BTreeSet;

use crate::tree::Tree;

/// Names of documents that comments write without an ending.
const DOCUMENTS: [&str; 5] = ["DESIGN", "AUDIT", "STYLE", "ARCHITECTURE", "ROADMAP"];

/// Each as `FILE:LINE: NAME`.
pub fn missing(tree: &Tree) -> Vec<String> {
    // Every end of every path: a comment may name a file by its last parts.
    let ends: BTreeSet<&str> = tree
        .keys()
        .flat_map(|path| directories(path))
        .flat_map(ends)
        .collect();
    let exists = |name: &str| ends.contains(name) || ends.iter().any(|end| is_stem(end, name));
    let mut missing = Vec::new();
    for (path, text) in tree {
        let is_rust = path.ends_with(".rs");
        if !is_rust && !text.starts_with("#!") {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            let Some(comment) = comment(line, is_rust) else {
                continue;
            };
            let names = words(comment).filter(|word| is_name(word) && !exists(word));
            missing.extend(names.map(|name| format!("{path}:{}: {name}", index + 1)));
        }
    }
    missing
}

/// A path and the directories it is in.
fn directories(path: &str) -> impl Iterator<Item = &str> {
    let above = path.match_indices('/').map(|(at, _)| &path[..at]);
    std::iter::once(path).chain(above)
}

fn ends(path: &str) -> impl Iterator<Item = &str> {
    let later = path.match_indices('/').map(|(at, _)| &path[at + 1..]);
    std::iter::once(path).chain(later)
}

/// A comment may leave the ending of a document out.
fn is_stem(end: &str, name: &str) -> bool {
    end.strip_suffix(".md") == Some(name)
}

/// The text of a line that is nothing but a comment.
fn comment(line: &str, is_rust: bool) -> Option<&str> {
    let line = line.trim_start();
    if is_rust {
        line.strip_prefix("//")
    } else {
        line.strip_prefix("# ")
    }
}

/// The words of a text as a path may have them, without the full stop of a sentence.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let is_of_path = |c: char| c.is_ascii_alphanumeric() || "._-/*~$:".contains(c);
    let words = text.split(move |c| !is_of_path(c));
    words.map(|word| {
        word.trim_end_matches(['.', ':', '-', '/'])
            .split("::")
            .next()
            .unwrap_or(word)
    })
}

fn is_name(word: &str) -> bool {
    // Addresses, paths of hosts and patterns are not ours; nor is an ending alone.
    if word.contains("://") || word.starts_with(['/', '~', '$', '.']) || word.contains(['*', '$']) {
        return false;
    }
    let is_upper = |stem: &str| stem.len() > 2 && stem.chars().all(|c| c.is_ascii_uppercase());
    let is_document = word
        .strip_suffix(".md")
        .is_some_and(|stem| is_upper(stem) || word.contains('/'));
    // FILE.rs stands for any.
    let is_source = word
        .strip_suffix(".rs")
        .is_some_and(|stem| !stem.is_empty() && !is_upper(stem));
    is_document || is_source || DOCUMENTS.contains(&word) || word.starts_with("docs/")
}

#[cfg(test)]
#[path = "citations_test.rs"]
mod tests;
