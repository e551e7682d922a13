use axum::Router;
use futures_util::stream;
use thaw_protocol::api::MAX_FILE;

use super::*;
use crate::api::fake::Fake;
use crate::api::files::{Files, PIECE, Upload};
use crate::api::test_client::{JSON, ask, refused, routes, send, whole};

const PATH: &str = "/v1/sandboxes/web/files";

async fn with_sandbox() -> (Arc<Fake>, Router) {
    let (fake, routes) = routes();
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
    let made = send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    assert_eq!(made.status(), StatusCode::CREATED);
    (fake, routes)
}

fn put(query: &str, body: impl Into<Stream>) -> axum::http::Request<Stream> {
    ask(
        "PUT",
        &format!("{PATH}?{query}"),
        "application/octet-stream",
        body,
    )
}

async fn get(routes: &Router, path: &str) -> Response {
    send(routes, ask("GET", &format!("{PATH}?path={path}"), JSON, "")).await
}

#[tokio::test]
async fn what_is_written_is_read() {
    let (fake, routes) = with_sandbox().await;
    let large: Vec<u8> = (0..3 * PIECE + 5).map(|n| n as u8).collect();
    for (path, file) in [
        ("/a/empty", vec![]),
        ("/a/small", b"small".to_vec()),
        ("/a/one%20piece", vec![1; PIECE]),
        ("/a/large", large.clone()),
        ("/proc/like", large.clone()),
    ] {
        // In pieces of different sizes.
        let pieces: Vec<_> = file
            .chunks(100_003)
            .map(|p| Ok::<_, std::io::Error>(Bytes::copy_from_slice(p)))
            .collect();
        let body = Stream::from_stream(stream::iter(pieces));
        let written = send(&routes, put(&format!("path={path}&mode=0600"), body)).await;
        assert_eq!(written.status(), StatusCode::NO_CONTENT, "{path}");
        let read = get(&routes, path).await;
        assert_eq!(
            (read.status(), &read.headers()[FILE_MODE]),
            (StatusCode::OK, &HeaderValue::from_static("0640"))
        );
        let length = read.headers().get("content-length").cloned();
        let says_nothing = path.starts_with("/proc") || file.is_empty();
        assert_eq!(length, (!says_nothing).then(|| file.len().into()), "{path}");
        assert!(whole(read).await == file, "{path}");
    }
    assert!(fake.files.uploads().borrow().is_empty());
}

#[tokio::test]
async fn what_breaks_off_or_has_no_room_leaves_nothing() {
    let (fake, routes) = with_sandbox().await;
    let broken = stream::iter([
        Ok(Bytes::from(vec![0; PIECE + 1])),
        Err(std::io::Error::other("gone")),
    ]);
    let asked = put("path=/a", Stream::from_stream(broken));
    refused(&routes, asked, 400, "malformed-request", "broken").await;
    let full = put("path=/full/a", vec![0; 2 * PIECE + 1]);
    refused(&routes, full, 507, "sandbox-full", "full").await;
    let mut uploads = fake.files.uploads();
    uploads.wait_for(|uploads| uploads.is_empty()).await.unwrap();
    refused(
        &routes,
        ask("GET", &format!("{PATH}?path=/a"), JSON, ""),
        404,
        "file-not-found",
        "/a",
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let (fake, routes) = with_sandbox().await;
    let slow =
        stream::iter([Ok::<_, std::io::Error>(Bytes::from(vec![0; PIECE + 1]))]).chain(stream::pending());
    refused(
        &routes,
        put("path=/a", Stream::from_stream(slow)),
        408,
        "request-too-slow",
        "slow",
    )
    .await;
    fake.files
        .uploads()
        .wait_for(|uploads| uploads.is_empty())
        .await
        .unwrap();
}

#[tokio::test]
async fn what_is_no_file_of_a_container_is_refused() {
    let (_fake, routes) = with_sandbox().await;
    let long = format!("path=/{}", "x".repeat(5000));
    for query in [
        "",
        "path=",
        "path=/",
        "path=//",
        "path=a",
        "path=../a",
        "path=/a/../b",
        "path=/..",
        "path=/%2e%2e/b",
        "path=/a/",
        "path=/a%00b",
        "path=/a&path=/b",
        "path=/a&owner=0",
        &long,
    ] {
        for method in ["GET", "PUT"] {
            let asked = ask(method, &format!("{PATH}?{query}"), JSON, "");
            refused(&routes, asked, 400, "bad-parameter", query).await;
        }
    }
    for mode in ["", "x", "-1", "+7", "8", "10000", "0x1"] {
        let asked = put(&format!("path=/a&mode={mode}"), "");
        refused(&routes, asked, 400, "bad-parameter", mode).await;
    }
    refused(
        &routes,
        ask("GET", "/v1/sandboxes/x/files?path=/a", JSON, ""),
        404,
        "sandbox-not-found",
        "x",
    )
    .await;
    refused(
        &routes,
        ask("POST", &format!("{PATH}?path=/a"), JSON, ""),
        405,
        "wrong-method",
        "POST",
    )
    .await;
    let mut huge = put("path=/a", "");
    huge.headers_mut().insert("content-length", (MAX_FILE + 1).into());
    refused(&routes, huge, 413, "body-too-large", "huge").await;
    send(&routes, ask("POST", "/v1/sandboxes/web/pause", JSON, "")).await;
    refused(&routes, put("path=/a", ""), 409, "sandbox-not-running", "paused").await;
}

#[tokio::test]
async fn archive_is_passed_through_as_it_is() {
    let (fake, routes) = with_sandbox().await;
    let archive: Vec<u8> = (0..2 * PIECE + 7).map(|n| n as u8).collect();
    let written = send(
        &routes,
        put("path=/&archive=tar&keep_owner=true", archive.clone()),
    )
    .await;
    assert_eq!(written.status(), StatusCode::NO_CONTENT);
    let read = get(&routes, "/&archive=tar").await;
    assert_eq!(read.headers()["content-type"], "application/x-tar");
    assert!(whole(read).await == archive);
    let missing = ask("GET", &format!("{PATH}?path=/none&archive=tar"), JSON, "");
    refused(&routes, missing, 404, "file-not-found", "none").await;
    // A guest that fails in the middle breaks the answer off.
    let upload = Upload {
        path: "/broken".into(),
        name: "u".into(),
        kind: UploadKind::Archive { keep_owner: false },
    };
    fake.files.write(&upload, 0, vec![1], true).await.unwrap();
    let broken = get(&routes, "/broken&archive=tar").await;
    let body = axum::body::to_bytes(broken.into_body(), 1 << 20).await;
    assert!(body.is_err());
}

#[tokio::test]
async fn archive_parameters_are_checked() {
    let (_fake, routes) = with_sandbox().await;
    for query in [
        "path=a&archive=tar",
        "path=/a/../b&archive=tar",
        "path=/a%00&archive=tar",
        "path=/a&archive=zip",
        "path=/a&follow=true&keep_owner=true",
    ] {
        for method in ["GET", "PUT"] {
            let asked = ask(method, &format!("{PATH}?{query}"), JSON, "");
            refused(&routes, asked, 400, "bad-parameter", query).await;
        }
    }
    for query in [
        "path=/a&keep_owner=true",
        "path=/a&archive=tar&mode=0600",
        "path=/a&follow=true",
    ] {
        refused(&routes, put(query, ""), 400, "bad-parameter", query).await;
    }
}
