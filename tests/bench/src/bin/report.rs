//! `make bench-report`: renders every `target/bench/NAME.json` into `docs/benchmarks.md`, between `<!-- bench:NAME -->` and
//! `<!-- /bench:NAME -->`, and keeps the file and its picture in `docs/bench`. A result that may not be shown
//! (`provenance.rs` says which) is refused: it changes nothing, and the program exits 1 after it rendered the others. Then it
//! renders the README's table of ratios from what `docs/bench` keeps.
//! `make bench-report CHECK=1` (`bench-report --check`) renders nothing and looks at the results in `docs/bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use thaw_bench::{Report, headlines, provenance, svg, table};

const MEASURED: &str = "target/bench";
const KEPT: &str = "docs/bench";
/// Has a section for each benchmark.
const DOCUMENT: &str = "docs/benchmarks.md";
/// Has the table of ratios, between the markers of [`HEADLINES`].
const FRONT_PAGE: &str = "README.md";
const HEADLINES: &str = "headlines";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.as_slice() {
        [] => render(),
        [flag] if flag == "--check" => check(),
        _ => Err("usage: bench-report [--check]".into()),
    };
    match done {
        Ok(refused) if refused.is_empty() => ExitCode::SUCCESS,
        Ok(refused) => {
            for why in refused {
                eprintln!("bench-report: REFUSED: {why}");
            }
            ExitCode::FAILURE
        }
        Err(why) => {
            eprintln!("bench-report: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Renders the results that may be shown; says what is wrong with each of the others.
fn render() -> Result<Vec<String>, String> {
    let mut document = read(Path::new(DOCUMENT))?;
    let kept = Path::new(KEPT);
    std::fs::create_dir_all(kept).map_err(|e| format!("{KEPT}: {e}"))?;
    let mut refused = Vec::new();
    let results = results(Path::new(MEASURED))?;
    if results.is_empty() {
        return Err(format!("nothing in {MEASURED} yet: run `make bench-boot` first"));
    }
    for path in results {
        let report = report(&path)?;
        if let Some(why) = refusal(&path, &report) {
            refused.push(why);
            continue;
        }
        document = with_section(&document, &report)?;
        for file in [
            format!("{}.json", report.name),
            format!("{}.samples.json", report.name),
        ] {
            std::fs::copy(Path::new(MEASURED).join(&file), kept.join(&file))
                .map_err(|e| format!("{file}: {e}"))?;
        }
        let picture = kept.join(format!("{}.svg", report.name));
        std::fs::write(&picture, svg::draw(&shown(report.clone())))
            .map_err(|e| format!("{}: {e}", picture.display()))?;
        println!("{}: rendered", report.name);
    }
    let front_page = with_headlines(&read(Path::new(FRONT_PAGE))?, kept)?;
    for (path, text) in [(DOCUMENT, document), (FRONT_PAGE, front_page)] {
        std::fs::write(path, text).map_err(|e| format!("{path}: {e}"))?;
    }
    Ok(refused)
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn report(path: &Path) -> Result<Report, String> {
    Report::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// `document` with the section of `report` rendered.
fn with_section(document: &str, report: &Report) -> Result<String, String> {
    between(document, &report.name, &section(&shown(report.clone())))
        .ok_or(format!("{DOCUMENT} has no <!-- bench:{} -->", report.name))
}

/// `front_page` with the table of ratios rendered from the results in the directory `kept`.
fn with_headlines(front_page: &str, kept: &Path) -> Result<String, String> {
    let reports: Vec<Report> = results(kept)?
        .iter()
        .map(|path| report(path))
        .collect::<Result<_, _>>()?;
    between(front_page, HEADLINES, &headlines::markdown(&reports)?)
        .ok_or(format!("{FRONT_PAGE} has no <!-- bench:{HEADLINES} -->"))
}

/// What is wrong with the results that the tables of both documents were rendered from.
fn check() -> Result<Vec<String>, String> {
    let mut refused = Vec::new();
    for path in results(Path::new(KEPT))? {
        let report = report(&path)?;
        match refusal(&path, &report) {
            Some(why) => refused.push(why),
            None => println!("{}: good", path.display()),
        }
    }
    Ok(refused)
}

/// The summaries in `directory`, by name; none where there is no such directory.
fn results(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(format!("{}: {e}", directory.display())),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", directory.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".json") && !name.ends_with(".samples.json") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Why the result in `path` may not be shown, and the command that measures it again; `None` if it may.
fn refusal(path: &Path, report: &Report) -> Option<String> {
    let found = provenance::refusals(report, provenance::behind_head);
    let said: Vec<String> = found.iter().map(|refusal| refusal.to_string()).collect();
    (!said.is_empty()).then(|| {
        format!(
            "{} (commit {}): {}. Measure it again on a clean commit: {}",
            path.display(),
            report.commit,
            said.join("; "),
            provenance::command(&report.name)
        )
    })
}

/// What is shown of `report`: no stages of creations, and of VMMs killed at once the largest number alone. A note says where the other
/// rows are.
fn shown(mut report: Report) -> Report {
    let largest = report.rows.iter().filter_map(|row| killed(&row.name)).max();
    let is_detail = |name: &str| name.contains(": stage ") || killed(name).is_some_and(|n| Some(n) < largest);
    let all = report.rows.len();
    report.rows.retain(|row| !is_detail(&row.name));
    if report.rows.len() < all {
        report.note(format!("The other rows are in docs/bench/{}.json.", report.name));
    }
    report
}

/// How many VMMs were killed at once, in a row's name: the number in `start, before 200 were killed` and in `200 killed: …`.
fn killed(name: &str) -> Option<usize> {
    name.contains("killed")
        .then(|| name.split(' ').find_map(|word| word.parse().ok()))?
}

fn section(report: &Report) -> String {
    format!(
        "{}\n![{name}](bench/{name}.svg)\n",
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
        let report = shown(report);
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
        assert_eq!(shown(report.clone()).notes.len(), 1);
    }

    #[test]
    fn refusal_names_the_file_its_faults_and_the_command() {
        let mut report = Report::new("image-guest");
        report.commit = "fff-dirty".into();
        report.profile = Some("debug".into());
        let path = Path::new("target/bench/image-guest.json");
        assert_eq!(
            refusal(path, &report).unwrap(),
            "target/bench/image-guest.json (commit fff-dirty): the tree had changes that are in no commit; its commit is not \
             in the history of this one; it is of a debug build. Measure it again on a clean commit: make bench-image"
        );
    }

    #[test]
    fn results_are_the_summaries_of_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b.json", "b.samples.json", "b.svg", "a.json"] {
            std::fs::write(directory.path().join(name), "").unwrap();
        }
        let found = results(directory.path()).unwrap();
        assert_eq!(
            found,
            ["a.json", "b.json"].map(|name| directory.path().join(name))
        );
        assert!(results(&directory.path().join("none")).unwrap().is_empty());
    }

    /// So that no number in them was typed, and none is of another result than `docs/bench` keeps.
    #[test]
    fn documents_show_the_kept_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let kept = root.join(KEPT);
        let (document, front_page) = (
            read(&root.join(DOCUMENT)).unwrap(),
            read(&root.join(FRONT_PAGE)).unwrap(),
        );
        let mut rendered = document.clone();
        for path in results(&kept).unwrap() {
            rendered = with_section(&rendered, &report(&path).unwrap()).unwrap();
        }
        let front_rendered = with_headlines(&front_page, &kept).unwrap();
        if std::env::var_os("THAW_WRITE_DOCS").is_some() {
            std::fs::write(root.join(DOCUMENT), &rendered).unwrap();
            std::fs::write(root.join(FRONT_PAGE), &front_rendered).unwrap();
            return;
        }
        for (path, is, renders) in [
            (DOCUMENT, document, rendered),
            (FRONT_PAGE, front_page, front_rendered),
        ] {
            let differs = is
                .lines()
                .zip(renders.lines())
                .find(|(is, renders)| is != renders);
            assert!(
                is == renders,
                "{path} is stale, at {differs:?}: run the tests with THAW_WRITE_DOCS=1"
            );
        }
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
