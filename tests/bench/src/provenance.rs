//! Whether a result may be shown in the documents. Invariant: what is shown was measured by a release build of a clean commit that
//! is in the history and at most [`MOST_COMMITS`] behind it.

use std::fmt;
use std::process::Command;

use crate::Report;

/// A result older than this is measured again before it is shown.
pub const MOST_COMMITS: usize = 200;

/// Why a result may not be shown.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The tree had changes that no commit has.
    Dirty,
    /// The result names no commit, or one that HEAD does not descend from.
    UnknownCommit,
    /// Its programs were built without optimisation.
    DebugBuild,
    /// The result does not say how its programs were built.
    UnknownBuild,
    /// So many commits were made since.
    Old(usize),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Refusal::Dirty => write!(f, "the tree had changes that are in no commit"),
            Refusal::UnknownCommit => write!(f, "its commit is not in the history of this one"),
            Refusal::DebugBuild => write!(f, "it is of a debug build"),
            Refusal::UnknownBuild => write!(f, "it does not say whether it is of a release build"),
            Refusal::Old(commits) => write!(f, "it is {commits} commits old, {MOST_COMMITS} are allowed"),
        }
    }
}

/// All that is wrong with `report`. `behind` tells how many commits a commit is behind HEAD; `None` if HEAD does not descend
/// from it.
pub fn refusals(report: &Report, behind: impl Fn(&str) -> Option<usize>) -> Vec<Refusal> {
    let mut found = Vec::new();
    let (commit, dirty) = match report.commit.strip_suffix("-dirty") {
        Some(commit) => (commit, true),
        None => (report.commit.as_str(), false),
    };
    if dirty {
        found.push(Refusal::Dirty);
    }
    let named = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit());
    match named.then(|| behind(commit)).flatten() {
        None => found.push(Refusal::UnknownCommit),
        Some(commits) if commits > MOST_COMMITS => found.push(Refusal::Old(commits)),
        Some(_) => {}
    }
    match report.profile.as_deref() {
        Some("release") => {}
        Some(_) => found.push(Refusal::DebugBuild),
        None => found.push(Refusal::UnknownBuild),
    }
    found
}

/// How many commits git says `commit` is behind HEAD; `None` if HEAD does not descend from it.
pub fn behind_head(commit: &str) -> Option<usize> {
    let git = |arguments: &[&str]| Command::new("git").args(arguments).output().ok();
    let is_ancestor = git(&["merge-base", "--is-ancestor", commit, "HEAD"])?;
    if !is_ancestor.status.success() {
        return None;
    }
    let counted = git(&["rev-list", "--count", &format!("{commit}..HEAD")])?;
    String::from_utf8(counted.stdout).ok()?.trim().parse().ok()
}

/// The command that measures the benchmark `name` again.
pub fn command(name: &str) -> String {
    // `create-linux`, `snapshot-java`, `image-guest` and `image-bytes` are parts of what is before the hyphen.
    format!("make bench-{}", name.split('-').next().unwrap_or(name))
}

#[cfg(test)]
#[path = "provenance_test.rs"]
mod tests;
