//! `tests/house/limits`: one line for each measure that has a limit, `NAME NUMBER`; `#` starts a comment. A measure without a line is
//! printed and never fails.

use std::collections::BTreeMap;

const HEAD: &str = "\
# The most that `make house` may measure: `tests/house/run --check` fails above it, and `tests/house/run --keep` lowers each to what is
# measured. Raise one by hand, in the commit that needs it, and say there why.
";

pub type Limits = BTreeMap<String, usize>;

/// Fails with the line that has another form.
pub fn parse(text: &str) -> Result<Limits, String> {
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim());
    let limit = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.trim().parse().ok()?))
    };
    lines
        .filter(|line| !line.is_empty())
        .map(|line| limit(line).ok_or_else(|| format!("no limit: {line}")))
        .collect()
}

/// Each limit lowered to what is measured; a measure that is new gets its first one.
pub fn lowered<'a>(limits: &Limits, measured: impl IntoIterator<Item = (&'a str, usize)>) -> Limits {
    let lower = |(name, now): (&str, usize)| {
        let limit = limits.get(name).map_or(now, |limit| now.min(*limit));
        (name.to_owned(), limit)
    };
    measured.into_iter().map(lower).collect()
}

pub fn render(limits: &Limits) -> String {
    let lines: String = limits
        .iter()
        .map(|(name, limit)| format!("{name} {limit}\n"))
        .collect();
    format!("{HEAD}{lines}")
}

#[cfg(test)]
#[path = "limits_test.rs"]
mod tests;
