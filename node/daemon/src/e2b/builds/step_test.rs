use serde_json::{Value, json};

use super::*;

fn read(steps: Value) -> Result<Vec<Step>, String> {
    let steps: Vec<NewStep> = serde_json::from_value(steps).map_err(|e| e.to_string())?;
    Step::all(&steps).map_err(|failure| match failure {
        Failure::Bad(why) => why,
        other => panic!("{other:?}"),
    })
}

fn one(step: Value) -> Result<Step, String> {
    read(json!([step])).map(|mut steps| steps.remove(0))
}

#[test]
fn steps_of_the_sdk_are_read() {
    let hash = "0a".repeat(32);
    let steps = read(json!([
        {"type": "RUN", "args": ["apt-get update", "root"], "force": false},
        {"type": "COPY", "args": ["./src/../app/main.py", "/app/", "", "0644"], "filesHash": hash, "forceUpload": true,
            "resolveSymlinks": true, "gzip": false},
        {"type": "ENV", "args": ["A", "1", "B", "x=y"]},
        {"type": "WORKDIR", "args": ["/app"]},
        {"type": "USER", "args": ["app:staff"]},
    ]));
    let steps = steps.unwrap();
    let copy = Copy {
        from: "app/main.py".into(),
        is_pattern: false,
        to: "/app/".into(),
        owner: None,
        mode: Some("0644".into()),
        files: hash,
    };
    assert_eq!(steps[1], Step::Copy(copy));
    assert_eq!(
        steps[0],
        Step::Run {
            command: "apt-get update".into(),
            user: Some("root".into())
        }
    );
    assert_eq!(steps[2].title(), "ENV A B", "a log has no values");
    assert_eq!(
        (steps[3].title().as_str(), steps[4].title().as_str()),
        ("WORKDIR /app", "USER app:staff")
    );
}

#[test]
fn source_is_what_precedes_its_pattern() {
    for (text, path, is_pattern) in [
        ("app", "app", false),
        (".", "", false),
        ("a/./b/..", "a", false),
        ("*.txt", "", true),
        ("src/**/*.py", "src", true),
        ("..hidden", "..hidden", false),
    ] {
        assert_eq!(source(text), Ok((path.into(), is_pattern)), "{text}");
    }
    for outside in ["/etc/passwd", "..", "a/../../b"] {
        assert!(source(outside).is_err(), "{outside}");
    }
}

#[test]
fn step_that_cannot_be_is_refused_with_its_number() {
    let hash = "0a".repeat(32);
    for (step, word) in [
        (json!({"type": "RUN", "args": []}), "command"),
        (json!({"type": "RUN", "args": ["a\u{0}"]}), "NUL"),
        (json!({"type": "RUN", "args": ["a", "b\nc"]}), "user"),
        (json!({"type": "ENV", "args": ["A"]}), "in turn"),
        (json!({"type": "ENV", "args": ["A=B", "x"]}), "name"),
        (json!({"type": "ENV", "args": []}), "no variable"),
        (json!({"type": "WORKDIR", "args": [""]}), "path"),
        (json!({"type": "USER", "args": [""]}), "empty"),
        (json!({"type": "USER", "args": ["a", "true"]}), "one user"),
        (json!({"type": "COPY", "args": ["a", "/a"]}), "filesHash"),
        (
            json!({"type": "COPY", "args": ["a", "/a"], "filesHash": "../../x"}),
            "filesHash",
        ),
        (
            json!({"type": "COPY", "args": ["../a", "/a"], "filesHash": hash}),
            "within",
        ),
        (
            json!({"type": "COPY", "args": ["a", ""], "filesHash": hash}),
            "destination",
        ),
        (
            json!({"type": "COPY", "args": ["a", "/a", "", "u+x"], "filesHash": hash}),
            "octal",
        ),
        (json!({"type": "VOLUME", "args": ["/a"]}), "a step is"),
    ] {
        let why = one(step.clone()).unwrap_err();
        assert!(why.starts_with("step 1 (") && why.contains(word), "{step}: {why}");
    }
    assert!(one(json!({"type": "RUN", "args": ["a"], "colour": 1})).is_err());
    let many = vec![json!({"type": "RUN", "args": ["true"]}); MAX_STEPS + 1];
    assert!(read(many.into()).unwrap_err().contains("at most"));
}
