use axum::Router;
use proptest::prelude::*;

use super::*;
use crate::api::test_client::{JSON, ask, refused, routes, send, whole};

const PATH: &str = "/v1/sandboxes/web/files";

async fn with_file() -> Router {
    let (_fake, routes) = routes();
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
    send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    for name in ["a", "b", "c"] {
        let written = ask(
            "PUT",
            &format!("{PATH}?path=/{name}"),
            "application/octet-stream",
            "12345",
        );
        assert_eq!(send(&routes, written).await.status(), StatusCode::NO_CONTENT);
    }
    routes
}

async fn status(routes: &Router, method: &str, rest: &str, body: &str) -> u16 {
    let asked = ask(method, &format!("{PATH}{rest}"), JSON, body.to_owned());
    send(routes, asked).await.status().as_u16()
}

#[tokio::test]
async fn files_are_listed_page_by_page_and_looked_at() {
    let routes = with_file().await;
    let page = async |rest: &str| {
        let answer = send(
            &routes,
            ask("GET", &format!("{PATH}/list?path=/{rest}"), JSON, ""),
        )
        .await;
        serde_json::from_slice::<FileList>(&whole(answer).await).unwrap()
    };
    let first = page("&limit=2").await;
    let names: Vec<&str> = first.items.iter().map(|i| i.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    let second = page(&format!("&limit=2&continue={}", first.continue_token.unwrap())).await;
    assert_eq!((second.items.len(), second.continue_token), (1, None));
    let answer = send(&routes, ask("GET", &format!("{PATH}/stat?path=/a"), JSON, "")).await;
    let info: FileInfo = serde_json::from_slice(&whole(answer).await).unwrap();
    assert_eq!(
        (info.kind, info.mode.as_str(), info.size),
        (FileKind::File, "0640", 5)
    );
}

#[tokio::test]
async fn files_are_made_moved_and_removed() {
    let routes = with_file().await;
    assert_eq!(status(&routes, "POST", "/mkdir", r#"{"path":"/d"}"#).await, 204);
    assert_eq!(
        status(&routes, "POST", "/move", r#"{"from":"/a","to":"/z"}"#).await,
        204
    );
    assert_eq!(
        status(&routes, "POST", "/move", r#"{"from":"/a","to":"/z"}"#).await,
        404
    );
    assert_eq!(
        status(&routes, "DELETE", "?path=/z&recursive=true", "").await,
        204
    );
    assert_eq!(status(&routes, "GET", "/stat?path=/z", "").await, 404);
}

#[tokio::test]
async fn wrong_paths_and_parameters_are_refused() {
    let routes = with_file().await;
    for rest in [
        "/stat?path=a",
        "/stat?path=/../a",
        "/stat",
        "/list?path=/&limit=0",
        "/list?path=/&limit=1001",
        "/list?path=/&continue=%25",
    ] {
        let asked = ask("GET", &format!("{PATH}{rest}"), JSON, "");
        refused(&routes, asked, 400, "bad-parameter", rest).await;
    }
    for rest in ["?path=/", "?path=/a/..", "?path=/a&recursive=1x"] {
        let asked = ask("DELETE", &format!("{PATH}{rest}"), JSON, "");
        refused(&routes, asked, 400, "bad-parameter", rest).await;
    }
    for (rest, body) in [
        ("/mkdir", r#"{"path":"a"}"#),
        ("/mkdir", r#"{"path":"/"}"#),
        ("/mkdir", r#"{"path":"/a","mode":"9"}"#),
        ("/mkdir", r#"{"path":"/a\u0000"}"#),
        ("/move", r#"{"from":"/a","to":"b"}"#),
        ("/move", r#"{"from":"/a/../b","to":"/b"}"#),
    ] {
        let asked = ask("POST", &format!("{PATH}{rest}"), JSON, body);
        refused(&routes, asked, 422, "invalid-body", body).await;
    }
}

proptest! {
    #[test]
    fn any_answer_of_a_guest_is_told(name: Vec<u8>, target: Vec<u8>, mode: u32, size: u64) {
        let is_text = std::str::from_utf8(&name).is_ok();
        let told = file_info(GuestInfo { name, target, mode, size, ..Default::default() });
        prop_assert_eq!(told.mode.len(), 4);
        prop_assert!(is_text || told.encoding == Encoding::Base64);
        prop_assert!(serde_json::to_vec(&told).is_ok());
    }
}
