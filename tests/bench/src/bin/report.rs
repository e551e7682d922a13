//! `make bench-report`: renders every `target/bench/NAME.json` into the README, between `<!-- bench:NAME -->` and
//! `<!-- /bench:NAME -->`, and keeps the file and its picture in `docs/bench`.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::{Report, svg, table};

fn main() -> ExitCode {
    match render() {
        Ok(0) => {
            eprintln!("bench-report: nothing in target/bench yet: run `make bench-boot` first");
            ExitCode::FAILURE
        }
        Ok(_) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench-report: {why}");
            ExitCode::FAILURE
        }
    }
}

fn render() -> Result<usize, String> {
    let readme_path = Path::new("README.md");
    let mut readme = std::fs::read_to_string(readme_path).map_err(|e| format!("README.md: {e}"))?;
    let kept = Path::new("docs/bench");
    std::fs::create_dir_all(kept).map_err(|e| format!("docs/bench: {e}"))?;
    let mut rendered = 0;
    for entry in std::fs::read_dir("target/bench").into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !name.ends_with(".json") || name.ends_with(".samples.json") {
            continue;
        }
        let mut report = Report::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        leave_out_details(&mut report);
        readme = between(&readme, &report.name, &section(&report))
            .ok_or(format!("README.md has no <!-- bench:{} -->", report.name))?;
        for file in [
            format!("{}.json", report.name),
            format!("{}.samples.json", report.name),
        ] {
            std::fs::copy(Path::new("target/bench").join(&file), kept.join(&file))
                .map_err(|e| format!("{file}: {e}"))?;
        }
        let picture = kept.join(format!("{}.svg", report.name));
        std::fs::write(&picture, svg::draw(&report)).map_err(|e| format!("{}: {e}", picture.display()))?;
        println!("{}: rendered", report.name);
        rendered += 1;
    }
    std::fs::write(readme_path, readme).map_err(|e| format!("README.md: {e}"))?;
    Ok(rendered)
}

/// A report of many stages, or of crowds of several sizes, is too long for a README: it shows no stages and the largest crowd alone.
/// The others are in the file that is kept, and that is said.
fn leave_out_details(report: &mut Report) {
    let largest = report.rows.iter().filter_map(|row| killed(&row.name)).max();
    let is_detail = |name: &str| name.contains(": stage ") || killed(name).is_some_and(|n| Some(n) < largest);
    let all = report.rows.len();
    report.rows.retain(|row| !is_detail(&row.name));
    if report.rows.len() < all {
        report.note(format!("The other rows are in docs/bench/{}.json.", report.name));
    }
}

/// How many VMMs were killed at once, in a row's name: the number in `start, before 200 were killed` and in `200 killed: …`.
fn killed(name: &str) -> Option<usize> {
    name.contains("killed")
        .then(|| name.split(' ').find_map(|word| word.parse().ok()))?
}

fn section(report: &Report) -> String {
    format!(
        "{}\n![{name}](docs/bench/{name}.svg)\n",
        table::markdown(report),
        name = report.name
    )
}

/// `text` with what stands between the markers of `name` replaced; none when they are not there.
fn between(text: &str, name: &str, section: &str) -> Option<String> {
    let (open, close) = (
        format!("<!-- bench:{name} -->\n"),
        format!("<!-- /bench:{name} -->"),
    );
    let start = text.find(&open)? + open.len();
    let end = start + text[start..].find(&close)?;
    Some(format!("{}{section}{}", &text[..start], &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_and_smaller_crowds_are_left_out_and_that_is_said() {
        let mut report = Report::new("x");
        for name in [
            "1 at once: create",
            "1 at once: stage thaw",
            "start, before 200 were killed",
            "start, before 1000 were killed",
            "200 killed by cgroup.kill: until none is left",
            "1000 killed: until none is left",
        ] {
            report.sample(name, "ms", 1.0);
        }
        report.summarise();
        leave_out_details(&mut report);
        let names: Vec<_> = report.rows.iter().map(|row| &row.name).collect();
        assert_eq!(
            names,
            [
                "1 at once: create",
                "start, before 1000 were killed",
                "1000 killed: until none is left"
            ]
        );
        assert_eq!(report.notes, ["The other rows are in docs/bench/x.json."]);
        leave_out_details(&mut report);
        assert_eq!(report.notes.len(), 1);
    }

    #[test]
    fn only_what_stands_between_the_markers_changes() {
        let text = "a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nb\n";
        assert_eq!(
            between(text, "x", "new\n").as_deref(),
            Some("a\n<!-- bench:x -->\nnew\n<!-- /bench:x -->\nb\n")
        );
        assert_eq!(between(text, "y", "new\n"), None);
    }
}
