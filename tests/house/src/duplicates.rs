//! Places that share lines. Lines are compared without their indentation; empty lines, comments, attributes, imports and lines of
//! punctuation alone are skipped, as two places that share only those share no idea.

use std::collections::HashMap;

/// How many lines in a row two places must share.
pub const SHARED: usize = 6;

/// A run of lines that also stands elsewhere.
#[derive(Debug, PartialEq)]
pub struct Place {
    pub file: String,
    /// Of its first line, from 1.
    pub line: usize,
    pub lines: usize,
    /// Another place that starts with the same lines.
    pub other: String,
}

/// `files` are names and lines with their numbers.
pub fn duplicates<'a>(files: impl IntoIterator<Item = (&'a str, Vec<(usize, &'a str)>)>) -> Vec<Place> {
    let files: Vec<(&str, Vec<(usize, &str)>)> = files
        .into_iter()
        .map(|(name, lines)| (name, significant(lines)))
        .collect();
    let mut windows: HashMap<Vec<&str>, Vec<(usize, usize)>> = HashMap::new();
    for (file, (_, lines)) in files.iter().enumerate() {
        for (at, window) in lines.windows(SHARED).enumerate() {
            let key = window.iter().map(|(_, line)| *line).collect();
            windows.entry(key).or_default().push((file, at));
        }
    }
    let other_of = |file: usize, at: usize| {
        let key: Vec<&str> = files[file]
            .1
            .get(at..at + SHARED)?
            .iter()
            .map(|(_, line)| *line)
            .collect();
        // Not a run that overlaps with itself, such as a table of equal rows.
        windows[&key]
            .iter()
            .find(|(f, a)| *f != file || a.abs_diff(at) >= SHARED)
    };
    let mut places = Vec::new();
    for (file, (name, lines)) in files.iter().enumerate() {
        let mut at = 0;
        while at < lines.len() {
            let Some(&(other, there)) = other_of(file, at) else {
                at += 1;
                continue;
            };
            let first = at;
            while other_of(file, at + 1).is_some() {
                at += 1;
            }
            let other = format!("{}:{}", files[other].0, files[other].1[there].0);
            places.push(Place {
                file: (*name).to_owned(),
                line: lines[first].0,
                lines: at + SHARED - first,
                other,
            });
            at += SHARED;
        }
    }
    places
}

fn significant(lines: Vec<(usize, &str)>) -> Vec<(usize, &str)> {
    let trimmed = lines.into_iter().map(|(number, line)| (number, line.trim()));
    trimmed.filter(|(_, line)| is_significant(line)).collect()
}

fn is_significant(line: &str) -> bool {
    let starts = ["//", "#", "use ", "pub use ", "mod ", "pub mod "];
    line.contains(char::is_alphanumeric) && !starts.iter().any(|start| line.starts_with(start))
}

#[cfg(test)]
#[path = "duplicates_test.rs"]
mod tests;
