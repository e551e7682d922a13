//! The measures of a tree. Each is a number that should fall, and the places that make it.

use std::collections::BTreeSet;
use std::process::Command;

use crate::citations;
use crate::cycles;
use crate::duplicates;
use crate::house::{File, House};
use crate::tree::Tree;

const FUNCTION_LINES: usize = 80;
const FILE_LINES: usize = 500;
const TEST_NAME: usize = 60;
/// Crates that speak to a network: the process that runs a guest must not have them.
const NETWORK_CRATES: [&str; 5] = ["reqwest", "rustls", "hickory", "hyper", "tokio"];

pub struct Measure {
    pub name: &'static str,
    pub what: &'static str,
    pub places: Vec<String>,
}

/// All measures with a limit, in the order in which they are printed.
pub fn all(tree: &Tree, house: &House) -> Result<Vec<Measure>, String> {
    let crates = dependencies("thaw-vmm")?;
    let networks = crates
        .iter()
        .filter(|name| is_of_network(name))
        .cloned()
        .collect();
    let (copies, test_copies) = (copies(house, false), copies(house, true));
    let measure = |name, what, places| Measure { name, what, places };
    Ok(vec![
        measure("vmm-crates", "crates that thaw-vmm depends on", crates),
        measure(
            "vmm-network-crates",
            "of them reqwest, rustls, hickory, hyper, tokio",
            networks,
        ),
        measure(
            "module-circles",
            "modules in a circle with modules beside them",
            circles(house),
        ),
        measure("long-functions", "functions over 80 lines", long_functions(house)),
        measure("long-files", "files over 500 lines", long_files(house)),
        measure(
            "duplicates",
            "places outside tests that share 6 or more lines",
            copies,
        ),
        measure(
            "test-duplicates",
            "places in tests that share 6 or more lines",
            test_copies,
        ),
        measure(
            "long-test-names",
            "names of tests over 60 characters",
            long_test_names(house),
        ),
        measure(
            "missing-documents",
            "comments that name a file that does not exist",
            citations::missing(tree),
        ),
        measure(
            "fakes",
            "fakes and keys in the src/ of a release",
            fakes(tree, house),
        ),
    ])
}

/// Lines of Rust outside tests, and how many of them are neither empty nor comments.
pub fn release_lines(house: &House) -> (usize, usize) {
    let lines = house.files.values().flat_map(File::release_lines);
    lines.fold((0, 0), |(all, code), (_, line)| {
        let line = line.trim();
        let is_code = !line.is_empty() && !line.starts_with("//");
        (all + 1, code + usize::from(is_code))
    })
}

/// The crates that a package links, itself left out.
fn dependencies(package: &str) -> Result<Vec<String>, String> {
    let output = Command::new("cargo")
        .args([
            "tree",
            "--package",
            package,
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ])
        .output()
        .map_err(|e| format!("cargo tree: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "cargo tree: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    // `NAME vVERSION (PATH) (*)`; two versions are two crates.
    let name = |line: &str| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
    let names: BTreeSet<String> = printed
        .lines()
        .skip(1)
        .map(name)
        .filter(|name| !name.is_empty())
        .collect();
    Ok(names.into_iter().collect())
}

fn is_of_network(name: &str) -> bool {
    NETWORK_CRATES.iter().any(|network| {
        let rest = name.strip_prefix(network);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '-']))
    })
}

fn circles(house: &House) -> Vec<String> {
    let mut places = Vec::new();
    for one in &house.crates {
        for (parent, circle) in cycles::circles(one) {
            let within = if parent.is_empty() {
                String::new()
            } else {
                format!(" {}", parent.join("::"))
            };
            places.extend(
                circle
                    .iter()
                    .map(|name| format!("{}{within}: {name} in {}", one.root, circle.join(", "))),
            );
        }
    }
    places
}

fn long_functions(house: &House) -> Vec<String> {
    let functions = house
        .files
        .iter()
        .flat_map(|(path, file)| file.scan.functions.iter().map(move |f| (path, f)));
    let long = functions.filter(|(_, function)| function.lines > FUNCTION_LINES);
    long.map(|(path, function)| {
        format!(
            "{path}:{}: {}: {} lines",
            function.line, function.name, function.lines
        )
    })
    .collect()
}

fn long_files(house: &House) -> Vec<String> {
    let lengths = house
        .files
        .iter()
        .map(|(path, file)| (path, file.text.lines().count()));
    lengths
        .filter(|(_, lines)| *lines > FILE_LINES)
        .map(|(path, lines)| format!("{path}: {lines} lines"))
        .collect()
}

fn copies(house: &House, of_tests: bool) -> Vec<String> {
    let files = house.files.iter().map(|(path, file)| {
        let lines = file
            .text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line));
        (
            path.as_str(),
            lines
                .filter(|(number, _)| file.is_test_line(*number) == of_tests)
                .collect(),
        )
    });
    let found = duplicates::duplicates(files);
    found
        .iter()
        .map(|place| {
            format!(
                "{}:{}: {} lines as at {}",
                place.file, place.line, place.lines, place.other
            )
        })
        .collect()
}

fn long_test_names(house: &House) -> Vec<String> {
    let mut places = Vec::new();
    for (path, file) in &house.files {
        let long = file
            .scan
            .functions
            .iter()
            .filter(|f| f.is_test && f.name.chars().count() > TEST_NAME);
        places.extend(long.map(|f| format!("{path}:{}: {}", f.line, f.name)));
    }
    places
}

/// Keys anywhere below a `src/`, and what calls itself a fake or a mock in code of a release.
fn fakes(tree: &Tree, house: &House) -> Vec<String> {
    let is_of_release = |path: &str| path.split('/').any(|part| part == "src") && !path.starts_with("tests/");
    let keys = tree.iter().filter(|(path, text)| {
        let is_key = text
            .lines()
            .any(|line| line.starts_with("-----BEGIN") && line.ends_with("PRIVATE KEY-----"));
        is_of_release(path) && (is_key || path.ends_with(".key"))
    });
    let mut places: Vec<String> = keys.map(|(path, _)| format!("{path}: a key")).collect();
    for (path, file) in house.files.iter().filter(|(path, _)| is_of_release(path)) {
        let fakes = file.release_lines().filter(|(_, line)| declares_fake(line));
        places.extend(fakes.map(|(number, line)| format!("{path}:{number}: {}", line.trim())));
    }
    places
}

fn declares_fake(line: &str) -> bool {
    let mut words = line
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .skip_while(|word| !["struct", "enum", "trait", "fn", "mod"].contains(word));
    let name = words.nth(1).unwrap_or_default().to_lowercase();
    let is_comment = line.trim_start().starts_with("//");
    !is_comment && (name.starts_with("fake") || name.starts_with("mock"))
}

#[cfg(test)]
#[path = "measures_test.rs"]
mod tests;
