//! `tests/skips`: lines of a test, the beginning of the reason it gives, and why CI accepts that, with tabs between.

/// A skip that CI accepts.
#[derive(Debug, PartialEq, Eq)]
pub struct Listed<'a> {
    /// `PROGRAM::TEST`; with a `*` at its end, all tests whose names begin so.
    pub test: &'a str,
    /// How the reason that the test gives begins.
    pub reason: &'a str,
    /// Why CI accepts it.
    pub why: &'a str,
}

/// The entries of the list; comments and empty lines are none.
///
/// # Panics
///
/// If a line has fewer than three parts, or an empty one.
pub fn parse(text: &str) -> Vec<Listed<'_>> {
    let entries = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    entries
        .map(|line| match line.splitn(3, '\t').collect::<Vec<_>>()[..] {
            [test, reason, why] if !test.is_empty() && !reason.is_empty() && !why.is_empty() => {
                Listed { test, reason, why }
            }
            _ => panic!("tests/skips: not `TEST<tab>REASON<tab>WHY`: {line:?}"),
        })
        .collect()
}

/// The entry that accepts a skip.
pub fn accepted<'a>(list: &'a [Listed<'a>], test: &str, reason: &str) -> Option<&'a Listed<'a>> {
    list.iter().find(|listed| {
        let named = match listed.test.strip_suffix('*') {
            Some(beginning) => test.starts_with(beginning),
            None => test == listed.test,
        };
        named && reason.starts_with(listed.reason)
    })
}
