//! Formats the report as a table that fits the terminal.

use super::{Report, State};

const HEADINGS: [&str; 5] = ["CHECK", "STATE", "FOUND", "COSTS", "FIX"];
const GAP: usize = 2;

/// The table, at most `width` columns wide, coloured or not.
pub fn render(report: &Report, width: usize, colour: bool) -> String {
    let first = report
        .checks
        .iter()
        .map(|c| c.check.len())
        .max()
        .unwrap_or(0)
        .max(HEADINGS[0].len());
    let second = "missing".len();
    let rest = width.max(72).saturating_sub(first + second + 4 * GAP);
    let columns = [
        first,
        second,
        rest * 30 / 100,
        rest * 37 / 100,
        rest - rest * 30 / 100 - rest * 37 / 100,
    ];
    let mut text = row(&HEADINGS, &columns, None);
    for check in &report.checks {
        let (word, code) = match check.state {
            State::Ok => ("ok", "32"),
            State::Warn => ("warn", "33"),
            State::Missing => ("missing", "31"),
        };
        let cells = [check.check, word, &check.found, &check.cost, &check.fix];
        text.push_str(&row(&cells, &columns, colour.then_some(code)));
    }
    text.push('\n');
    text.push_str(match (report.ready, report.native) {
        (true, true) => "Ready: sandboxes run here.\n",
        (true, false) => {
            "Everything is here, but KVM is in software: Linux guests don't run at speed; use the lab \
             (tests/lab/run -- COMMAND).\n"
        }
        (false, _) => "Not ready: something essential is missing; see the lines marked missing.\n",
    });
    text
}

fn row(cells: &[&str; 5], columns: &[usize; 5], state_colour: Option<&str>) -> String {
    let wrapped: Vec<Vec<String>> = cells
        .iter()
        .zip(columns)
        .map(|(cell, width)| wrap(cell, *width))
        .collect();
    let height = wrapped.iter().map(Vec::len).max().unwrap_or(1).max(1);
    let mut text = String::new();
    for line in 0..height {
        let mut row = String::new();
        for (index, (lines, width)) in wrapped.iter().zip(columns).enumerate() {
            let cell = lines.get(line).map_or("", String::as_str);
            let padding = " ".repeat((width + GAP).saturating_sub(cell.chars().count()));
            match state_colour {
                Some(code) if index == 1 && !cell.is_empty() => {
                    row.push_str(&format!("\x1b[{code}m{cell}\x1b[0m{padding}"));
                }
                _ => row.push_str(&format!("{cell}{padding}")),
            }
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Breaks text at blanks so that no line is wider than `width`; a longer word is broken too.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let width = width.max(1);
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_ascii_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        let used = line.chars().count();
        if used > 0 && used + 1 + word.len() > width {
            lines.push(std::mem::take(&mut line));
        } else if used > 0 {
            line.push(' ');
        }
        while word.len() > width {
            let rest = word.split_off(width);
            lines.push(word.into_iter().collect());
            word = rest;
        }
        line.extend(word);
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::Check;
    use super::*;

    #[test]
    fn wrapping_keeps_every_word_within_the_width() {
        let lines = wrap("a bb ccc abcdefghij", 5);
        assert_eq!(lines, ["a bb", "ccc", "abcde", "fghij"]);
        assert!(wrap("", 5).is_empty());
    }

    #[test]
    fn the_table_fits_and_is_plain_without_colour() {
        let checks = vec![Check::warn(
            "something",
            "found ".repeat(20),
            "cost ".repeat(30),
            "fix ".repeat(9),
        )];
        let report = Report {
            ready: true,
            native: true,
            checks,
        };
        let plain = render(&report, 80, false);
        assert!(plain.lines().all(|l| l.chars().count() <= 80), "{plain}");
        assert!(!plain.contains('\x1b'));
        assert!(render(&report, 80, true).contains("\x1b[33mwarn\x1b[0m"));
    }
}
