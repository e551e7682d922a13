use super::*;

fn names(scan: &Scan) -> Vec<(&str, usize, bool)> {
    scan.functions
        .iter()
        .map(|f| (f.name.as_str(), f.lines, f.is_test))
        .collect()
}

#[test]
fn function_length_runs_from_fn_to_its_brace() {
    let found = scan("/// Doc.\n#[inline]\nfn a() {\n    // }\n    \"}\";\n}\nfn b();\n").unwrap();
    assert_eq!(names(&found), [("a", 4, false), ("b", 1, false)]);
    assert_eq!(found.functions[0].line, 3);
}

#[test]
fn tests_are_found_in_modules_and_macros() {
    let text = "#[test]\nfn a() {}\nmod m {\n#[tokio::test(flavor = \"x\")]\nasync fn b() {}\n}\n\
                proptest! {\n#[test]\nfn c(x in 0..1) {}\n}\n#[ignore]\nfn d(f: fn(u8)) {}\n";
    let found = scan(text).unwrap();
    assert_eq!(
        names(&found),
        [("a", 1, true), ("b", 1, true), ("c", 1, true), ("d", 1, false)]
    );
}

#[test]
fn test_only_items_are_told_from_those_of_a_release() {
    let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n}\n#[cfg(not(test))]\nfn b() {}\n\
                #[cfg(any(test, feature = \"testing\"))]\nfn c<A, B>() {\n}\nstruct S {\n#[cfg(test)]\nx: u8,\ny: u8 }\n\
                #[cfg(feature = \"testing\")]\nuse a::{b};\n";
    let found = scan(text).unwrap();
    assert_eq!(found.test_lines, [2..=4, 7..=9, 11..=12, 14..=15]);
}

#[test]
fn module_items_have_path_and_nesting() {
    let found = scan("mod a;\n#[cfg(test)]\n#[path = \"b_test.rs\"]\nmod b;\nmod c { mod d; }\n").unwrap();
    let modules: Vec<_> = found
        .modules
        .iter()
        .map(|m| (m.within.join("::"), m.path.clone(), m.is_test))
        .collect();
    let expected = [
        ("a".to_owned(), None, false),
        ("b".to_owned(), Some("b_test.rs".to_owned()), true),
        ("c::d".to_owned(), None, false),
    ];
    assert_eq!(modules, expected);
}

#[test]
fn paths_of_uses_and_expressions_are_found() {
    let text = "use crate::a::{self, B, c::{D as E, *}};\nfn f(x: super::T) { crate::g::h(self.y); }\npub(crate) use m::N;\n";
    let found = scan(text).unwrap();
    let paths: Vec<_> = found
        .paths
        .iter()
        .map(|p| (p.segments.join("::"), p.alias.clone().unwrap_or_default()))
        .collect();
    let expected = [
        ("crate::a", "a"),
        ("crate::a::B", "B"),
        ("crate::a::c::D", "E"),
        ("crate::a::c", "c"),
        ("super::T", ""),
        ("crate::g::h", ""),
        ("m::N", "N"),
    ];
    assert_eq!(
        paths,
        expected.map(|(path, alias)| (path.to_owned(), alias.to_owned()))
    );
}
