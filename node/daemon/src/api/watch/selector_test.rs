use proptest::prelude::*;

use super::*;

fn labelled(pairs: &[(&str, &str)]) -> Sandbox {
    Sandbox {
        id: "a".into(),
        name: Some("web".into()),
        image: "oci:/a,b=c".into(),
        state: "running".into(),
        labels: pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        ..Default::default()
    }
}

fn wants(labels: &str, fields: &str) -> bool {
    let sandbox = labelled(&[("app", "web"), ("example.org/tier", "a"), ("empty", "")]);
    Selector::parse(Scope::node(), labels, fields)
        .unwrap()
        .wants(&sandbox)
}

#[test]
fn labels_are_selected_by_equality_and_by_sets() {
    for yes in [
        "",
        " ",
        "app",
        "app=web",
        "app == web",
        "app!=db",
        "other!=db",
        "!other",
        "! other",
        "app in (web)",
        "app in ( db , web ),example.org/tier=a",
        "app notin (db)",
        "other notin (db)",
        "empty=",
        "empty in (,x)",
    ] {
        assert!(wants(yes, ""), "{yes}");
    }
    for no in [
        "other",
        "app=db",
        "app!=web",
        "!app",
        "app in (db,x)",
        "app notin (web)",
        "app,other",
        "empty!=",
    ] {
        assert!(!wants(no, ""), "{no}");
    }
}

#[test]
fn fields_are_selected_by_equality_and_values_may_be_escaped() {
    for yes in [
        "name=web",
        "state==running,name!=x",
        r"image=oci:/a\,b=c",
        r"image=oci:/a\,b\=c,name=web",
    ] {
        assert!(wants("", yes), "{yes}");
    }
    for no in ["name=x", "name!=web", "state=paused", "image=oci:/a"] {
        assert!(!wants("", no), "{no}");
    }
}

#[test]
fn what_cannot_be_understood_is_refused() {
    for bad in [
        ",",
        "app,",
        "a b",
        "-a",
        "a=b c",
        "a in",
        "a in (b",
        "a in b)",
        "a of (b)",
        "a in (b) c",
        "a in (b),",
        "/a",
        "a//b",
        "x_y/a",
        "a=b=c",
        "!",
        "=",
        "ä",
        "a>1",
    ] {
        assert!(Selector::parse(Scope::node(), bad, "").is_err(), "{bad}");
    }
    for bad in ["name", "age=1", "=x", "name!x", r"name=x\", ",", "name=a,,"] {
        assert!(Selector::parse(Scope::node(), "", bad).is_err(), "{bad}");
    }
    let many = vec!["a"; MAX_REQUIREMENTS + 1].join(",");
    assert_eq!(
        Selector::parse(Scope::node(), &many, "").unwrap_err(),
        SelectorError::TooMany(MAX_REQUIREMENTS, "requirements")
    );
    let values: Vec<String> = (0..=MAX_VALUES).map(|i| i.to_string()).collect();
    let many = format!("a in ({})", values.join(","));
    assert_eq!(
        Selector::parse(Scope::node(), &many, "").unwrap_err(),
        SelectorError::TooMany(MAX_VALUES, "values")
    );
}

#[test]
fn labels_that_cannot_be_selected_by_are_refused() {
    let check = |k: &str, v: &str| check_labels(&[(k.into(), v.into())].into());
    assert!(check("example.org/a-b_c.d", "").is_ok());
    assert!(check(&"k".repeat(63), &"v".repeat(63)).is_ok());
    for (k, v) in [
        ("", "a"),
        ("a", "b c"),
        ("a/b/c", "d"),
        (&"k".repeat(64), "v"),
        ("a", &"v".repeat(64)),
        ("a", "-"),
    ] {
        assert!(check(k, v).is_err(), "{k}={v}");
    }
    let many = (0..=MAX_LABELS)
        .map(|i| (format!("l{i}"), String::new()))
        .collect();
    assert!(check_labels(&many).is_err());
}

proptest! {
    #[test]
    fn no_text_panics(labels in ".{0,80}", fields in ".{0,80}") {
        let _ = Selector::parse(Scope::node(), &labels, &fields);
    }

    #[test]
    fn a_label_that_was_taken_can_be_selected_by(k in "[a-z](/[a-z])?", v in "[a-zA-Z0-9._-]{0,5}") {
        let sandbox = labelled(&[(&k, &v)]);
        if check_labels(&sandbox.labels).is_ok() {
            let selector = Selector::parse(Scope::node(), &format!("{k}={v},{k} in ({v}),{k}"), "").unwrap();
            prop_assert!(selector.wants(&sandbox));
        }
    }
}
