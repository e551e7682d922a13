//! A report as text: aligned columns for a terminal, Markdown for the README.

use crate::report::{Report, Row};

const HEAD: [&str; 8] = ["", "unit", "n", "p50", "p95", "p99", "min", "max"];

/// Aligned columns, machine and commit above, ratios below.
pub fn terminal(report: &Report) -> String {
    let rows: Vec<[String; 8]> = std::iter::once(HEAD.map(String::from))
        .chain(report.rows.iter().map(cells))
        .collect();
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut out = format!("{} · {} · {}\n", report.name, report.machine, report.commit);
    for row in &rows {
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            // Names and units read from the left, numbers line up at the right.
            if c < 2 {
                out += &format!("{cell}{pad}  ")
            } else {
                out += &format!("{pad}{cell}  ")
            }
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
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
    out += &format!("| {} |\n|---|---|{}\n", HEAD.join(" | "), "---:|".repeat(6));
    for row in &report.rows {
        out += &format!("| {} |\n", cells(row).join(" | "));
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
