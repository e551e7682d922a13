use axum::Router;
use axum::http::StatusCode;
use futures_util::poll;
use http_body_util::BodyExt;
use thaw_protocol::api::{CreatedSandbox, Piece, Sandbox};
use thaw_sandbox::journal::Journal;

use super::*;
use crate::api::fake::Fake;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;
use crate::api::scope::Scope;
use crate::api::test_client::{JSON, ask, read, refused, send, whole};
use crate::api::watch::{Selector, Watcher};

const PATH: &str = "/v1/sandboxes/web/logs";

/// A daemon with one sandbox that has a container, and its journal.
async fn with_container() -> (Arc<Fake>, Router, Arc<Daemon>, Arc<Journal>) {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon.clone(), Gate::new(Bounds::default()));
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web","container":{"command":["a","b"]}}"#;
    let made = send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    let status = made.status();
    let made = whole(made).await;
    assert_eq!(status, StatusCode::CREATED, "{made:?}");
    let _: CreatedSandbox = serde_json::from_slice(&made).unwrap();
    let journal = daemon.journal(&Wanted::on_node("web")).await.unwrap();
    (fake, routes, daemon, journal)
}

async fn logs(routes: &Router, query: &str) -> String {
    let response = send(routes, ask("GET", &format!("{PATH}{query}"), JSON, "")).await;
    assert_eq!(response.status(), StatusCode::OK, "{query}");
    String::from_utf8(whole(response).await.into()).unwrap()
}

#[tokio::test]
async fn output_is_given_as_it_came_by_stream_and_by_the_last_lines() {
    let (_fake, routes, _daemon, journal) = with_container().await;
    assert_eq!(logs(&routes, "").await, "");
    for (output, text) in [
        (Output::Stdout, "one\ntw"),
        (Output::Stderr, "bad\n"),
        (Output::Stdout, "o\nthree"),
    ] {
        journal.append(output, text.as_bytes()).unwrap();
    }
    assert_eq!(logs(&routes, "").await, "one\ntwbad\no\nthree");
    assert_eq!(logs(&routes, "?stream=stdout").await, "one\ntwo\nthree");
    assert_eq!(logs(&routes, "?stream=stderr").await, "bad\n");
    assert_eq!(logs(&routes, "?stream=stdout&tail=2").await, "two\nthree");
    assert_eq!(logs(&routes, "?stream=stdout&tail=0").await, "");
    assert_eq!(logs(&routes, "?stream=stderr&tail=1").await, "bad\n");
    assert_eq!(logs(&routes, "?tail=99&follow=0").await, "one\ntwbad\no\nthree");
    for _ in 0..40 {
        journal.append(Output::Stdout, &[b'x'; 100_000]).unwrap();
    }
    journal.append(Output::Stdout, b"\nend\n").unwrap();
    assert_eq!(logs(&routes, "?tail=1").await, "end\n");
    assert!(logs(&routes, "").await.len() > 1 << 20);
}

#[tokio::test]
async fn output_has_its_time_and_its_stream_if_asked() {
    let (_fake, routes, _daemon, journal) = with_container().await;
    journal.append(Output::Stdout, b"a\nb").unwrap();
    journal.append(Output::Stderr, b"\xff").unwrap();
    let later = journal.read(0).unwrap().frames[1].at + 1;
    journal.append(Output::Stdout, b"c\n").unwrap();
    let stamped = logs(&routes, "?timestamps=1&stream=stdout").await;
    let lines: Vec<_> = stamped
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    assert_eq!((lines.len(), lines[0].1, lines[1].1), (2, "a", "bc"));
    assert!(
        lines
            .iter()
            .all(|(time, _)| time.len() == 30 && parse_moment(time).is_some())
    );
    let since = format_moment(later);
    assert_eq!(logs(&routes, &format!("?since={since}")).await, "c\n");
    assert_eq!(logs(&routes, &format!("?since={since}&tail=5")).await, "c\n");
    assert_eq!(logs(&routes, "?since=2100-01-01T00:00:00Z").await, "");
    let events = logs(&routes, "?format=events").await;
    let events: Vec<LogEvent> = events
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let streams: Vec<_> = events.iter().map(|event| event.stream).collect();
    assert_eq!(streams, [LogStream::Stdout, LogStream::Stderr, LogStream::Stdout]);
    let bytes = Piece {
        data: "/w==".into(),
        encoding: thaw_protocol::api::Encoding::Base64,
        offset: None,
    };
    assert_eq!(events[1].piece, bytes);
}

#[tokio::test]
async fn who_follows_gets_what_comes_until_the_end() {
    let (_fake, routes, daemon, journal) = with_container().await;
    let path = format!("{PATH}?follow=1&stream=stdout&tail=1");
    let follow = async || send(&routes, ask("GET", &path, JSON, "")).await.into_body();
    journal.append(Output::Stdout, b"a\nb\n").unwrap();
    let mut body = follow().await;
    let next = async |body: &mut axum::body::Body| {
        let frame = body.frame().await?.unwrap().into_data().unwrap();
        Some(String::from_utf8(frame.into()).unwrap())
    };
    assert_eq!(next(&mut body).await.unwrap(), "b\n");
    {
        let mut waits = std::pin::pin!(next(&mut body));
        assert!(poll!(&mut waits).is_pending());
        journal.append(Output::Stderr, b"not this").unwrap();
        journal.append(Output::Stdout, b"c").unwrap();
        assert_eq!(waits.await.unwrap(), "c");
    }
    let mut other = follow().await;
    assert_eq!(next(&mut other).await.unwrap(), "c");
    journal.close();
    assert_eq!(next(&mut body).await, None);
    assert_eq!(next(&mut other).await, None);
    // A followed log ends when the server shuts down.
    let (_fake, routes, other_daemon, _journal) = with_container().await;
    let body = send(&routes, ask("GET", &format!("{PATH}?follow=true"), JSON, "")).await;
    other_daemon.end();
    assert!(whole(body).await.is_empty());
    drop(daemon);
}

#[tokio::test]
async fn the_end_of_a_container_is_shown() {
    let (fake, routes, daemon, _journal) = with_container().await;
    let shown: Sandbox = read(&routes, "/v1/sandboxes/web").await;
    assert_eq!(shown.exit_code, None);
    let all = Selector::parse(Scope::node(), "", "").unwrap();
    let mut changes = Watcher::start(daemon.cache.clone(), None, all).unwrap();
    fake.exit.send_replace(Some(7));
    changes.next().await.unwrap();
    let shown: Sandbox = read(&routes, "/v1/sandboxes/web").await;
    assert_eq!((shown.exit_code, shown.state.as_str()), (Some(7), "exited"));
    let exec = ask("POST", "/v1/sandboxes/web/exec", JSON, r#"{"command":["cat"]}"#);
    refused(&routes, exec, 409, "sandbox-not-running", "exited").await;
    for (what, state) in [("pause", "paused"), ("resume", "exited")] {
        send(
            &routes,
            ask("POST", &format!("/v1/sandboxes/web/{what}"), JSON, ""),
        )
        .await;
        let shown: Sandbox = read(&routes, "/v1/sandboxes/web").await;
        assert_eq!((shown.exit_code, shown.state.as_str()), (Some(7), state));
    }
    assert_eq!(logs(&routes, "").await, "");
}

#[tokio::test]
async fn a_sandbox_that_is_to_go_with_its_container_goes() {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon.clone(), Gate::new(Bounds::default()));
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web","container":{"on_exit":"delete"}}"#;
    send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    fake.exit.send_replace(Some(0));
    while fake.living() > 0 {
        tokio::task::yield_now().await;
    }
    refused(
        &routes,
        ask("GET", PATH, JSON, ""),
        404,
        "sandbox-not-found",
        "gone",
    )
    .await;
}

#[tokio::test]
async fn what_cannot_be_told_is_refused() {
    let (_fake, routes, _daemon, _journal) = with_container().await;
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"bare"}"#;
    send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    for (method, path, status, code) in [
        ("GET", "/v1/sandboxes/nobody/logs", 404, "sandbox-not-found"),
        ("GET", "/v1/sandboxes/bare/logs", 404, "output-not-kept"),
        ("POST", PATH, 405, "wrong-method"),
        ("GET", "/v1/sandboxes/web/logs?follow=2", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?tail=-1", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?tail=x", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?stream=stdin", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?since=x", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?timestamps=2", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?format=text", 400, "bad-parameter"),
        ("GET", "/v1/sandboxes/web/logs?until=1", 400, "bad-parameter"),
        ("POST", "/v1/sandboxes/nobody/monitor", 404, "sandbox-not-found"),
        (
            "GET",
            "/v1/sandboxes/web/logs?tail=1&tail=2",
            400,
            "bad-parameter",
        ),
    ] {
        refused(&routes, ask(method, path, JSON, ""), status, code, path).await;
    }
    let create = |container: &str| {
        let body = format!(r#"{{"image":"x","cpus":1,"memory_mib":128,"container":{container}}}"#);
        ask("POST", "/v1/sandboxes", JSON, body)
    };
    for container in [
        r#""sh""#,
        r#"{"cmd":["sh"]}"#,
        r#"{"command":[""]}"#,
        r#"{"command":["a\u0000"]}"#,
        r#"{"entrypoint":"\u0000"}"#,
        r#"{"env":["A"]}"#,
        r#"{"workdir":"here"}"#,
        r#"{"user":""}"#,
        r#"{"on_exit":"restart"}"#,
        r#"{},"command":["sh"]"#,
    ] {
        refused(&routes, create(container), 422, "invalid-body", container).await;
    }
}
