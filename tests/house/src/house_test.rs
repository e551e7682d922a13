use super::*;

pub fn house(files: &[(&str, &str)]) -> House {
    let tree = files
        .iter()
        .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
        .collect();
    House::build(&tree).unwrap()
}

const MANIFEST: (&str, &str) = ("a/Cargo.toml", "[package]\n");

#[test]
fn modules_are_found_beside_below_and_by_path() {
    let house = house(&[
        MANIFEST,
        (
            "a/src/lib.rs",
            "mod b;\nmod c;\n#[path = \"other.rs\"]\nmod d;\nmod e { mod f; }",
        ),
        ("a/src/b.rs", "mod g;"),
        ("a/src/b/g.rs", ""),
        ("a/src/c/mod.rs", "mod h;"),
        ("a/src/c/h.rs", ""),
        ("a/src/other.rs", "mod i;"),
        ("a/src/i.rs", ""),
        ("a/src/e/f.rs", "use super::x;"),
    ]);
    let modules: Vec<String> = house.crates[0]
        .modules
        .keys()
        .map(|path| path.join("::"))
        .collect();
    assert_eq!(modules, ["", "b", "b::g", "c", "c::h", "d", "d::i", "e::f"]);
}

#[test]
fn files_that_only_tests_compile_are_tests() {
    let house = house(&[
        MANIFEST,
        (
            "a/src/lib.rs",
            "#[cfg(test)]\nmod fake;\nmod b;\n#[cfg(test)]\n#[path = \"b_test.rs\"]\nmod tests;\n",
        ),
        ("a/src/fake.rs", "mod c;"),
        ("a/src/fake/c.rs", ""),
        (
            "a/src/b.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n}\nfn g() {}\n",
        ),
        ("a/src/b_test.rs", ""),
        ("a/tests/it.rs", ""),
    ]);
    let tests: Vec<&String> = house
        .files
        .iter()
        .filter(|(_, file)| file.is_test)
        .map(|(path, _)| path)
        .collect();
    assert_eq!(
        tests,
        [
            "a/src/b_test.rs",
            "a/src/fake.rs",
            "a/src/fake/c.rs",
            "a/tests/it.rs"
        ]
    );
    let lines: Vec<_> = house.files["a/src/b.rs"].release_lines().collect();
    assert_eq!(lines, [(1, "fn f() {}"), (5, "fn g() {}")]);
}

#[test]
fn programs_of_a_manifest_are_roots() {
    let house = house(&[
        ("Cargo.toml", "[workspace]\n"),
        ("a/Cargo.toml", "[[bin]]\npath = \"src/x/y.rs\"\n"),
        ("a/src/x/y.rs", ""),
        ("a/src/bin/z.rs", ""),
        ("a/src/bin/w/main.rs", ""),
        ("a/src/bin/w/part.rs", ""),
    ]);
    let roots: Vec<&str> = house.crates.iter().map(|one| one.root.as_str()).collect();
    assert_eq!(roots, ["a/src/bin/w/main.rs", "a/src/bin/z.rs", "a/src/x/y.rs"]);
}
