//! The crates of a tree: which file is which module, and which code only tests compile. A file is a test's if its path says so (below
//! `tests/`, or with a name that ends with `_test`), or if every module that leads to it is compiled for tests only.

use std::collections::{BTreeMap, BTreeSet};

use crate::scan::{PathUse, Scan, scan};
use crate::tree::Tree;

/// The names of the modules from a crate's root; empty for the root.
pub type ModulePath = Vec<String>;

#[derive(Default)]
pub struct House {
    pub files: BTreeMap<String, File>,
    pub crates: Vec<Crate>,
}

pub struct File {
    pub text: String,
    pub scan: Scan,
    pub is_test: bool,
}

/// A library or a program, with the modules that releases compile.
pub struct Crate {
    /// The file of its root.
    pub root: String,
    pub modules: BTreeMap<ModulePath, Vec<PathUse>>,
}

impl File {
    /// The lines outside tests, each with its number from 1.
    pub fn release_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self
            .text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line));
        lines.filter(|(number, _)| !self.is_test_line(*number))
    }

    pub fn is_test_line(&self, number: usize) -> bool {
        self.is_test || self.scan.test_lines.iter().any(|range| range.contains(&number))
    }
}

impl House {
    /// Fails if a Rust file cannot be read as tokens.
    pub fn build(tree: &Tree) -> Result<Self, String> {
        let mut house = Self::default();
        for (path, text) in tree.iter().filter(|(path, _)| path.ends_with(".rs")) {
            let scan = scan(text).map_err(|why| format!("{path}: {why}"))?;
            house.files.insert(
                path.clone(),
                File {
                    text: text.clone(),
                    scan,
                    is_test: is_test_path(path),
                },
            );
        }
        let mut reached = Reached::default();
        for root in roots(tree) {
            let mut modules = BTreeMap::new();
            house.reach(
                &root,
                &[],
                &Place::of_root(&root),
                false,
                &mut modules,
                &mut reached,
            );
            house.crates.push(Crate { root, modules });
        }
        for path in reached.by_tests.difference(&reached.by_releases) {
            if let Some(file) = house.files.get_mut(path) {
                file.is_test = true;
            }
        }
        Ok(house)
    }

    fn reach(
        &self,
        path: &str,
        module: &[String],
        place: &Place,
        for_tests: bool,
        modules: &mut BTreeMap<ModulePath, Vec<PathUse>>,
        reached: &mut Reached,
    ) {
        let Some(file) = self.files.get(path) else {
            return;
        };
        let for_tests = for_tests || file.is_test;
        let already = if for_tests {
            &mut reached.by_tests
        } else {
            &mut reached.by_releases
        };
        already.insert(path.to_owned());
        if !for_tests {
            modules.entry(module.to_vec()).or_default();
            for used in file.scan.paths.iter().filter(|used| !used.is_test) {
                let within = [module, &used.within].concat();
                modules.entry(within).or_default().push(used.clone());
            }
        }
        for item in &file.scan.modules {
            let Some((child, place)) = place.child(&self.files, &item.within, item.path.as_deref()) else {
                continue;
            };
            let module = [module, &item.within].concat();
            self.reach(
                &child,
                &module,
                &place,
                for_tests || item.is_test,
                modules,
                reached,
            );
        }
    }
}

#[derive(Default)]
struct Reached {
    by_tests: BTreeSet<String>,
    by_releases: BTreeSet<String>,
}

/// Where the modules of a file are looked for.
struct Place {
    /// The file's own directory: `#[path]` counts from here.
    directory: String,
    /// The file of `mod name;` is in here.
    children: String,
}

impl Place {
    fn of_root(path: &str) -> Self {
        let directory = directory(path).to_owned();
        Self {
            children: directory.clone(),
            directory,
        }
    }

    fn child(
        &self,
        files: &BTreeMap<String, File>,
        within: &[String],
        path: Option<&str>,
    ) -> Option<(String, Self)> {
        if let Some(path) = path {
            let outer = within[..within.len() - 1]
                .iter()
                .fold(self.directory.clone(), |at, name| join(&at, name));
            let path = join(&outer, path);
            let place = Self::of_root(&path);
            return files.contains_key(&path).then_some((path, place));
        }
        let stem = within.iter().fold(self.children.clone(), |at, name| {
            join(&at, name.trim_start_matches("r#"))
        });
        let file = format!("{stem}.rs");
        if files.contains_key(&file) {
            let place = Self {
                directory: directory(&file).to_owned(),
                children: stem,
            };
            return Some((file, place));
        }
        let file = format!("{stem}/mod.rs");
        files
            .contains_key(&file)
            .then(|| (file.clone(), Self::of_root(&file)))
    }
}

fn directory(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// Joins a relative path, whose `..` go up.
fn join(directory: &str, path: &str) -> String {
    let mut parts: Vec<&str> = directory.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The root files of every crate of the tree: those that Cargo finds by itself, and those that a manifest names.
fn roots(tree: &Tree) -> BTreeSet<String> {
    let mut roots = BTreeSet::new();
    let manifests = tree
        .iter()
        .filter(|(path, _)| *path == "Cargo.toml" || path.ends_with("/Cargo.toml"));
    for (manifest, text) in manifests {
        let package = directory(manifest);
        let is_root = |path: &str| {
            let Some(rest) = path
                .strip_prefix(package)
                .map(|rest| rest.trim_start_matches('/'))
            else {
                return false;
            };
            let parts: Vec<&str> = rest.split('/').collect();
            matches!(
                parts[..],
                ["build.rs"]
                    | ["src", "lib.rs" | "main.rs"]
                    | ["src", "bin", _]
                    | ["src", "bin", _, "main.rs"]
                    | ["tests" | "benches" | "examples", _]
                    | ["tests" | "benches" | "examples", _, "main.rs"]
            )
        };
        roots.extend(
            tree.keys()
                .filter(|path| path.ends_with(".rs") && is_root(path))
                .cloned(),
        );
        let named = text
            .lines()
            .filter_map(|line| line.strip_prefix("path = \"")?.strip_suffix('"'));
        roots.extend(
            named
                .map(|path| join(package, path))
                .filter(|path| tree.contains_key(path)),
        );
    }
    roots
}

fn is_test_path(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let below_tests = path
        .split('/')
        .rev()
        .skip(1)
        .any(|part| part == "tests" || part == "benches");
    below_tests || name.ends_with("_test.rs") || name == "tests.rs"
}

#[cfg(test)]
#[path = "house_test.rs"]
pub mod tests;
