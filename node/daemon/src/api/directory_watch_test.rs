use axum::Router;
use axum::http::StatusCode;
use http_body_util::BodyExt;
use proptest::prelude::*;
use thaw_protocol::api::Encoding;

use super::*;
use crate::api::fake::Fake;
use crate::api::test_client::{JSON, ask, refused, routes, send, whole};

const PATH: &str = "/v1/sandboxes/web/files/watch";

async fn with_sandbox() -> (Arc<Fake>, Router) {
    let (fake, routes) = routes();
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
    send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    (fake, routes)
}

async fn watch_of(routes: &Router, path: &str) -> Response {
    let answer = send(routes, ask("GET", &format!("{PATH}?path={path}"), JSON, "")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["content-type"], LINES);
    answer
}

fn events(lines: &[u8]) -> Vec<FileEvent> {
    let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

#[tokio::test]
async fn events_are_sent_until_the_watch_is_over() {
    let (_fake, routes) = with_sandbox().await;
    let lines = whole(watch_of(&routes, "/&recursive=true").await).await;
    let file = |name: &str, encoding| ChangedFile {
        name: name.into(),
        encoding,
    };
    let expected = [
        FileEvent::Create(file("a/b", Encoding::Utf8)),
        FileEvent::Rename(file("/w==", Encoding::Base64)),
        FileEvent::Overflow,
        FileEvent::Keepalive,
        FileEvent::End(WatchEnd {
            reason: "the directory was removed".into(),
        }),
    ];
    assert_eq!(events(&lines), expected);
    let first = lines.split(|byte| *byte == b'\n').next().unwrap();
    let expected = r#"{"type":"CREATE","object":{"name":"a/b","encoding":"utf-8"}}"#;
    assert_eq!(std::str::from_utf8(first).unwrap(), expected);
}

#[tokio::test]
async fn caller_that_leaves_ends_the_watch() {
    let (fake, routes) = with_sandbox().await;
    let mut open = fake.files.open_watches();
    let mut answer = watch_of(&routes, "/quiet").await;
    assert_eq!(open.borrow_and_update().len(), 1);
    let first = answer.body_mut().frame();
    assert!(futures_util::future::FutureExt::now_or_never(first).is_none());
    drop(answer);
    open.wait_for(std::collections::BTreeSet::is_empty).await.unwrap();
}

#[tokio::test]
async fn failed_watch_ends_with_the_problem() {
    let (_fake, routes) = with_sandbox().await;
    let lines = whole(watch_of(&routes, "/broken").await).await;
    let [FileEvent::Error(problem)] = &events(&lines)[..] else {
        panic!("{lines:?}");
    };
    assert_eq!(
        (problem.code.as_str(), problem.instance.as_str()),
        ("file-refused", PATH)
    );
}

#[tokio::test]
async fn wrong_watches_are_refused() {
    let (_fake, routes) = with_sandbox().await;
    for query in [
        "",
        "?path=a",
        "?path=/a/../b",
        "?path=/&recursive=x",
        "?path=/&x=1",
    ] {
        let asked = ask("GET", &format!("{PATH}{query}"), JSON, "");
        refused(&routes, asked, 400, "bad-parameter", query).await;
    }
    let asked = ask("GET", &format!("{PATH}?path=/none"), JSON, "");
    refused(&routes, asked, 404, "file-not-found", "none").await;
}

proptest! {
    #[test]
    fn any_answer_of_a_guest_gives_lines(
        kinds in proptest::collection::vec((any::<i32>(), any::<Vec<u8>>()), 0..5),
        ended: String,
    ) {
        let events = kinds.into_iter().map(|(kind, name)| GuestEvent {
            kind: thaw_protocol::agent::EnumOrUnknown::from_i32(kind % 9),
            name,
            ..Default::default()
        });
        let answer = NextEventsResponse { events: events.collect(), ended, ..Default::default() };
        let told = file_events(answer);
        prop_assert!(!told.is_empty());
        prop_assert_eq!(self::events(&lines(&told)), told);
    }
}
