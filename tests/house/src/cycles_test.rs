use super::*;
use crate::house::tests::house;

/// The circles of a crate of these modules, as `PARENT: A B`.
fn found(files: &[(&str, &str)]) -> Vec<String> {
    let mut all = vec![("Cargo.toml", "")];
    all.extend(files);
    let circles = circles(&house(&all).crates[0]);
    circles
        .iter()
        .map(|(parent, circle)| format!("{}: {}", parent.join("::"), circle.join(" ")))
        .collect()
}

const ROOT: (&str, &str) = ("src/lib.rs", "mod a;\nmod b;\nmod c;\n");

#[test]
fn modules_that_use_each_other_are_a_circle() {
    let files = [
        ROOT,
        ("src/a.rs", "use crate::b::X;"),
        ("src/b.rs", "use super::c;"),
        ("src/c.rs", "fn f() { crate::a::g() }"),
    ];
    assert_eq!(found(&files), [": a b c"]);
}

#[test]
fn one_direction_is_no_circle() {
    let files = [
        ROOT,
        ("src/a.rs", "use crate::{b, c::Y};"),
        ("src/b.rs", "use crate::c;"),
        ("src/c.rs", "use std::a::b;"),
    ];
    assert_eq!(found(&files), [""; 0]);
}

#[test]
fn use_by_tests_alone_is_no_circle() {
    let files = [
        ROOT,
        ("src/a.rs", "use crate::b;"),
        ("src/b.rs", "#[cfg(test)]\nmod t { use crate::a; }"),
        ("src/c.rs", ""),
    ];
    assert_eq!(found(&files), [""; 0]);
}

#[test]
fn parent_and_child_may_use_each_other() {
    let files = [
        ROOT,
        ("src/a.rs", "mod d;\nuse d::D;"),
        ("src/a/d.rs", "use super::A;"),
        ("src/b.rs", ""),
        ("src/c.rs", ""),
    ];
    assert_eq!(found(&files), [""; 0]);
}

#[test]
fn deeper_modules_count_for_their_ancestor() {
    let files = [
        ROOT,
        ("src/a.rs", "mod d;\nmod e;"),
        ("src/a/d.rs", "use super::e::E; use crate::b::B;"),
        ("src/a/e.rs", "use crate::a::d;"),
        ("src/b.rs", "use crate::a::e;"),
        ("src/c.rs", ""),
    ];
    assert_eq!(found(&files), [": a b", "a: d e"]);
}

#[test]
fn re_exported_name_counts_for_its_module() {
    let root = (
        "src/lib.rs",
        "mod a;\nmod b;\npub use b::X;\npub use b::Z as Y;\n",
    );
    assert_eq!(
        found(&[root, ("src/a.rs", "use crate::X;"), ("src/b.rs", "use crate::a;")]),
        [": a b"]
    );
    assert_eq!(
        found(&[root, ("src/a.rs", "use crate::Y;"), ("src/b.rs", "use crate::a;")]),
        [": a b"]
    );
}

#[test]
fn re_exports_in_a_loop_end() {
    let root = ("src/lib.rs", "mod a;\nmod b;\n");
    assert_eq!(
        found(&[
            root,
            ("src/a.rs", "pub use crate::b::X;"),
            ("src/b.rs", "pub use crate::a::X;")
        ]),
        [": a b"]
    );
}
