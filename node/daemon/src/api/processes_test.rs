use axum::Router;

use super::*;
use crate::api::test_client::{JSON, ask, refused, routes, send, whole};

const PATH: &str = "/v1/sandboxes/web";

async fn with_sandbox() -> Router {
    let (_fake, routes) = routes();
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
    send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    routes
}

#[tokio::test]
async fn kept_process_is_started_listed_and_read_again() {
    let routes = with_sandbox().await;
    let body = r#"{"command":["cat"],"keep":true,"stdin":"x"}"#;
    let started = send(&routes, ask("POST", &format!("{PATH}/exec"), JSON, body)).await;
    assert_eq!(started.status(), StatusCode::CREATED);
    let started: KeptProcess = serde_json::from_slice(&whole(started).await).unwrap();
    assert!(started.keep && started.exit_code.is_none());
    let list = send(&routes, ask("GET", &format!("{PATH}/processes"), JSON, "")).await;
    let list: ProcessList = serde_json::from_slice(&whole(list).await).unwrap();
    assert_eq!((list.items[0].exit_code, list.items[0].pid), (Some(3), None));
    assert_eq!((list.items[1].exit_code, list.items[1].pid), (None, Some(7)));
    for (offset, expected) in [
        (0, vec![(Some(0), "hello"), (Some(10), "/wA="), (None, "")]),
        (3, vec![(Some(3), "lo"), (Some(10), "/wA="), (None, "")]),
        (12, vec![(None, "")]),
    ] {
        let path = format!("{PATH}/processes/output?process={}&offset={offset}", started.id);
        let lines = whole(send(&routes, ask("GET", &path, JSON, "")).await).await;
        let events = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let events: Vec<(Option<u64>, String)> = events
            .map(|line| match serde_json::from_slice(line).unwrap() {
                ExecEvent::Stdout(piece) | ExecEvent::Stderr(piece) => (piece.offset, piece.data),
                ExecEvent::Exit(exit) => {
                    assert_eq!(exit.exit_code, 3);
                    (None, String::new())
                }
                ExecEvent::Error(problem) => panic!("{problem:?}"),
            })
            .collect();
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(at, text)| (at, text.to_owned()))
            .collect();
        assert_eq!(events, expected, "{offset}");
    }
}

#[tokio::test]
async fn wrong_requests_about_processes_are_refused() {
    let routes = with_sandbox().await;
    let read = |process: &str| {
        ask(
            "GET",
            &format!("{PATH}/processes/output?process={process}"),
            JSON,
            "",
        )
    };
    refused(&routes, read("none"), 404, "process-not-found", "none").await;
    refused(&routes, read("y"), 409, "process-refused", "not kept").await;
    for (path, body) in [
        (
            "exec",
            r#"{"command":["cat"],"keep":true,"stream":true}"#.to_owned(),
        ),
        (
            "exec",
            format!(
                r#"{{"command":["cat"],"keep":true,"stdin":"{}"}}"#,
                "x".repeat(70_000)
            ),
        ),
        ("processes/signal", r#"{"process":"x","signal":65}"#.to_owned()),
        (
            "processes/input",
            r#"{"process":"x","data":"%","encoding":"base64"}"#.to_owned(),
        ),
    ] {
        let asked = ask("POST", &format!("{PATH}/{path}"), JSON, body);
        refused(&routes, asked, 422, "invalid-body", path).await;
    }
    let fed = ask(
        "POST",
        &format!("{PATH}/processes/input"),
        JSON,
        r#"{"process":"x","data":"a","eof":true}"#,
    );
    assert_eq!(send(&routes, fed).await.status(), StatusCode::NO_CONTENT);
}
