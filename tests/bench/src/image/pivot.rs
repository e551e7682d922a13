//! The report as tables people can read: images by forms, what was done by file systems. Cells are medians.

use crate::image::guest::Subject;
use crate::image::starts::{Form, SUBJECTS, fetched, row};
use crate::report::{Report, Row};

/// What is done with an image, in the order of the table.
const HOWS: [&str; 4] = ["cold", "no prefetch", "prefetched", "warm"];
/// What is done in a guest.
const WHATS: [&str; 12] = [
    "find, cold",
    "find, warm",
    "tar, cold",
    "tar, warm",
    "sequential 4 KiB, cold",
    "sequential 4 KiB, warm",
    "sequential 128 KiB, cold",
    "sequential 128 KiB, warm",
    "random 4 KiB, cold",
    "random 4 KiB, warm",
    "random 128 KiB, cold",
    "random 128 KiB, warm",
];

/// A table: its first row is the head.
pub type Cells = Vec<Vec<String>>;

/// Starts, file systems, and the rest.
pub fn tables(report: &Report) -> Vec<Cells> {
    let found = |name: &str| report.rows.iter().find(|r| r.name == name);
    let mut starts = vec![head("start, ms (MiB fetched)", Form::ALL.map(Form::name))];
    for (subject, how) in SUBJECTS.iter().flat_map(|s| HOWS.map(|how| (s, how))) {
        let cells = Form::ALL.map(|form| {
            let name = row(subject.name, form, how);
            let bytes = found(&fetched(&name));
            match (found(&name), bytes) {
                (Some(ms), Some(bytes)) => format!("{:.0} ({:.1})", ms.p50, bytes.p50),
                _ => "–".into(),
            }
        });
        push(&mut starts, format!("{}, {how}", subject.name), cells);
    }
    let mut guest = vec![head("in a guest, ms", Subject::ALL.map(Subject::name))];
    for what in WHATS {
        let cells = Subject::ALL.map(|subject| match found(&format!("{}: {what}", subject.name())) {
            Some(row) => format!("{:.1}", row.p50),
            None => "–".into(),
        });
        push(&mut guest, what.into(), cells);
    }
    let mut rest = vec![head("bytes", ["MiB"])];
    for row in report.rows.iter().filter(|row| {
        !row.name.contains(": ") || row.name.contains(" stored: ") || row.name.contains(" pushed: ")
    }) {
        push(&mut rest, row.name.clone(), [format!("{:.2}", row.p50)]);
    }
    [starts, guest, rest]
        .into_iter()
        .filter(|table| table.len() > 1)
        .collect()
}

/// The rows a picture shows: the large image's cold starts.
pub fn pictured(row: &Row) -> bool {
    let shown = Form::ALL.map(|form| self::row(SUBJECTS[0].name, form, "cold"));
    shown.contains(&row.name)
}

fn head<const N: usize>(first: &str, names: [&str; N]) -> Vec<String> {
    std::iter::once(first).chain(names).map(String::from).collect()
}

fn push<const N: usize>(table: &mut Cells, name: String, cells: [String; N]) {
    // What was not measured at all has no row.
    if cells.iter().any(|cell| cell != "–") {
        table.push(std::iter::once(name).chain(cells).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pivot_puts_each_measure_in_its_row_and_column() {
        let mut report = Report::new("image");
        let cold = row("padded", Form::Soci, "cold");
        report.sample(&cold, "ms", 12.4);
        report.sample(&fetched(&cold), "MiB", 3.25);
        report.sample("virtio-fs: find, cold", "ms", 7.0);
        report.sample("five images stored: chunks", "MiB", 100.0);
        report.summarise();
        let tables = tables(&report);
        assert_eq!(tables.len(), 3);
        let column = tables[0][0]
            .iter()
            .position(|name| name == "SOCI index")
            .unwrap_or(0);
        assert_eq!(
            (tables[0][1][0].as_str(), tables[0][1][column].as_str()),
            ("padded, cold", "12 (3.2)")
        );
        assert_eq!((tables[0].len(), tables[1].len(), tables[2].len()), (2, 2, 2));
        assert_eq!(tables[2][1], ["five images stored: chunks", "100.00"]);
    }
}
