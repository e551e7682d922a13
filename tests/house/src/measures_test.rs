use super::*;
use crate::house::tests::house;

#[test]
fn release_lines_leave_tests_and_comments_out() {
    let text = "//! Doc.\n\nfn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
    let house = house(&[
        ("Cargo.toml", ""),
        ("src/lib.rs", text),
        ("tests/it.rs", "fn c() {}\n"),
    ]);
    assert_eq!(release_lines(&house), (3, 1));
}

#[test]
fn network_crates_are_told_by_whole_names() {
    let found: Vec<bool> = [
        "tokio v1.0",
        "tokio-util v0.7",
        "hickory-proto v1",
        "hyperfine v1",
        "rustls",
        "ring v0.17",
    ]
    .iter()
    .map(|name| is_of_network(name))
    .collect();
    assert_eq!(found, [true, true, true, false, true, false]);
}

#[test]
fn functions_files_and_names_over_the_limits_are_found() {
    let function = |lines: usize| format!("fn f() {{\n{}}}\n", "x();\n".repeat(lines - 2));
    let name = |length: usize| format!("#[test]\nfn {}() {{}}\n", "n".repeat(length));
    let house = house(&[
        ("a.rs", &format!("{}{}", function(80), name(60))),
        ("b.rs", &format!("{}{}", function(81), name(61))),
        ("c.rs", &"\n".repeat(500)),
        ("d.rs", &"\n".repeat(501)),
    ]);
    assert_eq!(long_functions(&house), ["b.rs:1: f: 81 lines"]);
    assert_eq!(long_files(&house), ["d.rs: 501 lines"]);
    assert_eq!(long_test_names(&house), [format!("b.rs:83: {}", "n".repeat(61))]);
}

#[test]
fn fakes_and_keys_of_a_release_are_found() {
    let key = "-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n";
    let code =
        "pub struct FakeClock;\n// struct Fake\n#[cfg(test)]\nmod fake_registry {}\nfn takes_fake() {}\n";
    let files = [
        ("Cargo.toml", ""),
        ("src/lib.rs", code),
        ("src/a.pem", key),
        ("tests/src/b.pem", key),
    ];
    let tree = files
        .iter()
        .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
        .collect();
    assert_eq!(
        fakes(&tree, &house(&files)),
        ["src/a.pem: a key", "src/lib.rs:1: pub struct FakeClock;"]
    );
}

#[test]
fn copies_in_tests_are_told_from_others() {
    let code = "a();\nb();\nc();\nd();\ne();\nf();\n";
    let one = format!("fn x() {{\n{code}}}\n");
    let house = house(&[("a.rs", &one), ("b.rs", &one), ("a_test.rs", &one)]);
    assert_eq!(copies(&house, false).len(), 2);
    assert_eq!(copies(&house, true).len(), 0);
}
