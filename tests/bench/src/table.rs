//! A report as text: aligned columns for a terminal, Markdown for `docs/benchmarks.md`.

use crate::image::pivot::Cells;
use crate::report::{Report, Row};

const HEAD: [&str; 8] = ["", "unit", "n", "p50", "p95", "p99", "min", "max"];

/// Aligned columns, machine and commit above, ratios below.
pub fn terminal(report: &Report) -> String {
    let mut out = format!("{} · {} · {}\n", report.name, report.machine, report.commit);
    for (rows, left) in tables(report) {
        let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
        for row in &rows {
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c] - cell.chars().count());
                // Names and units read from the left, numbers line up at the right.
                if c < left {
                    out += &format!("{cell}{pad}  ")
                } else {
                    out += &format!("{pad}{cell}  ")
                }
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
    }
    for (name, value) in &report.ratios {
        out += &format!("{name} = {value:.2}\n");
    }
    for note in &report.notes {
        out += &format!("{note}\n");
    }
    out
}

/// A Markdown table with the same content.
pub fn markdown(report: &Report) -> String {
    let mut out = format!("Machine: {}. Commit: `{}`.\n\n", report.machine, report.commit);
    for (number, (rows, left)) in tables(report).into_iter().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let rule = "---|".repeat(left) + &"---:|".repeat(rows[0].len() - left);
        out += &format!("| {} |\n|{rule}\n", rows[0].join(" | "));
        for row in &rows[1..] {
            out += &format!("| {} |\n", row.join(" | "));
        }
    }
    if !report.ratios.is_empty() {
        out.push('\n');
    }
    for (name, value) in &report.ratios {
        out += &format!("`{name}` = **{value:.2}**  \n");
    }
    if !report.notes.is_empty() {
        out.push('\n');
    }
    for note in &report.notes {
        out += &format!("- {note}\n");
    }
    out
}

/// The report's tables, head first, and how many of their columns are words.
fn tables(report: &Report) -> Vec<(Cells, usize)> {
    use crate::image::{BYTES, GUEST, STARTS};
    if [STARTS, GUEST, BYTES].contains(&report.name.as_str()) {
        let tables = crate::image::pivot::tables(report);
        return tables.into_iter().map(|table| (table, 1)).collect();
    }
    let rows = std::iter::once(HEAD.map(String::from)).chain(report.rows.iter().map(cells));
    vec![(rows.map(Vec::from).collect(), 2)]
}

fn cells(row: &Row) -> [String; 8] {
    let number = |v: f64| {
        if v.abs() < 10.0 {
            format!("{v:.2}")
        } else {
            format!("{v:.1}")
        }
    };
    [
        row.name.clone(),
        row.unit.clone(),
        row.n.to_string(),
        number(row.p50),
        number(row.p95),
        number(row.p99),
        number(row.min),
        number(row.max),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_ratios_follow() {
        let mut report = Report::new("t");
        report.sample("short", "ms", 1.0);
        report.sample("a longer name", "ms", 1234.0);
        report.ratio("r", "a longer name", "short").unwrap();
        report
            .write(&std::env::temp_dir().join("thaw-bench-table"))
            .unwrap();
        let text = terminal(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2].len(), lines[3].len());
        assert!(text.ends_with("r = 1234.00\n"));
        assert!(markdown(&report).contains("| short | ms | 1 | 1.00 |"));
    }
}
