//! The table of `--timings`.

use thaw_sandbox::trace::Stage;

/// One line per stage: name, milliseconds, and a bar that shows when it was and how long.
pub(super) fn timing_table(stages: &[Stage]) -> String {
    const WIDTH: u64 = 40;
    let end = stages
        .iter()
        .map(|s| s.start_ns + s.duration_ns)
        .max()
        .unwrap_or(0)
        .max(1);
    let name_width = stages
        .iter()
        .map(|s| s.name.len())
        .max()
        .unwrap_or(0)
        .max("stage".len());
    let mut text = format!("{:<name_width$}  {:>9}  {:>9}\n", "stage", "at ms", "took ms");
    let milliseconds = |ns: u64| ns as f64 / 1e6;
    for stage in stages {
        let scaled = |ns: u64| (u128::from(ns) * u128::from(WIDTH) / u128::from(end)) as usize;
        let from = scaled(stage.start_ns);
        let to = scaled(stage.start_ns + stage.duration_ns).max(from + 1);
        text.push_str(&format!(
            "{:<name_width$}  {:>9.2}  {:>9.2}  {}{}\n",
            stage.name,
            milliseconds(stage.start_ns),
            milliseconds(stage.duration_ns),
            " ".repeat(from),
            "█".repeat(to - from),
        ));
    }
    text.push_str(&format!(
        "{:<name_width$}  {:>9}  {:>9.2}\n",
        "total",
        "",
        milliseconds(end)
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str, start_ms: u64, took_ms: u64) -> Stage {
        Stage {
            name: name.into(),
            start_ns: start_ms * 1_000_000,
            duration_ns: took_ms * 1_000_000,
        }
    }

    #[test]
    fn the_table_shows_when_and_how_long() {
        let table = timing_table(&[stage("image", 0, 50), stage("kernel", 50, 50)]);
        let lines: Vec<_> = table.lines().collect();
        assert!(
            lines[1].starts_with("image ") && lines[1].ends_with(&"█".repeat(20)),
            "{table}"
        );
        assert!(
            lines[2].contains(&format!("  {}{}", " ".repeat(20), "█".repeat(20))),
            "{table}"
        );
        assert!(
            lines[3].starts_with("total") && lines[3].ends_with("100.00"),
            "{table}"
        );
        assert!(timing_table(&[]).contains("total"));
    }
}
