//! Tests of refused requests: each gets a problem document, and no sandbox is created.

use thaw_protocol::api::Problem;

use super::*;

const CREATE: &str = "/v1/sandboxes";
const FREEZE: &str = "/v1/sandboxes/x/freeze";
const THAW: &str = "/v1/thaws";

/// A valid creation with additional fields.
fn with(fields: &str) -> String {
    GOOD.replace('}', &format!(",{fields}}}"))
}

/// Sends each request, and checks that its answer has this status and code.
async fn all_refused<'a>(
    status: u16,
    code: &str,
    requests: impl IntoIterator<Item = (&'a str, &'a str, String)>,
) {
    let (fake, routes) = routes();
    for (method, path, body) in requests {
        let shown = format!("{method} {path} {}", body.chars().take(60).collect::<String>());
        refused(&routes, ask(method, path, JSON, body), status, code, &shown).await;
    }
    assert_eq!((fake.made(), fake.living()), (0, 0));
}

/// The same for bodies that are posted to one path.
async fn bodies_refused(path: &str, status: u16, code: &str, bodies: impl IntoIterator<Item = String>) {
    let requests = bodies.into_iter().map(|body| ("POST", path, body));
    all_refused(status, code, requests).await;
}

/// The same for paths that are read.
async fn paths_refused(status: u16, code: &str, paths: &[&str]) {
    let requests = paths.iter().map(|path| ("GET", *path, String::new()));
    all_refused(status, code, requests).await;
}

#[tokio::test]
async fn malformed_creations_are_refused() {
    let malformed = ["{", "", "\u{0}", &format!("{GOOD} x")].map(str::to_owned);
    bodies_refused(CREATE, 400, "malformed-request", malformed).await;
    let large = format!(r#"{{"image":"{}"}}"#, "x".repeat(MAX_BODY));
    bodies_refused(CREATE, 413, "body-too-large", [large]).await;
    let (_fake, routes) = routes();
    for (kind, body) in [("text/plain", GOOD), ("application/x-www-form-urlencoded", "a=b")] {
        let request = ask("POST", CREATE, kind, body);
        refused(&routes, request, 415, "wrong-media-type", kind).await;
    }
}

#[tokio::test]
async fn creations_with_invalid_values_are_refused() {
    let invalid = [
        "null".into(),
        "[]".into(),
        "[".repeat(100_000),
        GOOD.replace(":1,", ":\"1\","),
        GOOD.replace(":1,", ":0,"),
        GOOD.replace(":1,", ":300,"),
        GOOD.replace("128", "99999999"),
        with(r#""imagee":1"#),
        with(&format!(r#""command":["{}"]"#, "x".repeat(40_000))),
        with(r#""timeout_s":0"#),
        with(r#""timeout_s":-1"#),
        with(r#""labels":{"a b":"c"}"#),
        with(r#""memory_mode":"uffd""#),
        with(r#""record_to":"a/../b""#),
        with(r#""name":"""#),
        with(r#""container":{"settings":{"cap_add":["NET_MASTER"]}}"#),
        with(r#""container":{"settings":{"sysctl":{}}}"#),
        with(r#""container":{"settings":{"seccomp_profile":"{}"}}"#),
    ];
    bodies_refused(CREATE, 422, "invalid-body", invalid).await;
    bodies_refused(CREATE, 422, "memory-too-small", [GOOD.replace("128", "1")]).await;
    let missing = GOOD.replace("\"x\"", r#""missing""#);
    bodies_refused(CREATE, 404, "image-not-found", [missing]).await;
}

#[tokio::test]
async fn snapshots_that_are_not_there_are_refused() {
    bodies_refused(FREEZE, 422, "invalid-body", [r#"{"directory":"s"}"#.into()]).await;
    bodies_refused(FREEZE, 404, "sandbox-not-found", [r#"{"directory":"/s"}"#.into()]).await;
    bodies_refused(THAW, 422, "invalid-body", [r#"{"directory":"../s"}"#.into()]).await;
    bodies_refused(THAW, 404, "snapshot-not-found", [r#"{"directory":"/s"}"#.into()]).await;
}

#[tokio::test]
async fn unknown_routes_and_methods_are_refused() {
    let requests = [("PUT", CREATE, GOOD.into()), ("GET", THAW, String::new())];
    all_refused(405, "wrong-method", requests).await;
    paths_refused(404, "no-such-route", &["/v1/nothing", "/v1/sandboxes/../../etc"]).await;
}

#[tokio::test]
async fn sandboxes_that_cannot_exist_are_refused() {
    let unknown = ["/v1/sandboxes/x", "/v1/sandboxes/%2e%2e%2f"];
    paths_refused(404, "sandbox-not-found", &unknown).await;
    bodies_refused("/v1/sandboxes/x/pause", 404, "sandbox-not-found", [String::new()]).await;
    let unreadable = ["/v1/sandboxes/%ff", "/v1/sandboxes/%00"];
    paths_refused(400, "bad-parameter", &unreadable).await;
    let long = format!("/v1/sandboxes/{}", "x".repeat(300));
    all_refused(400, "bad-parameter", [("DELETE", long.as_str(), String::new())]).await;
}

#[tokio::test]
async fn bad_parameters_of_lists_and_watches_are_refused() {
    let bad = [
        "/v1/sandboxes?limit=0",
        "/v1/sandboxes?limit=x",
        "/v1/sandboxes?limit=1&limit=2",
        "/v1/sandboxes?unknown=1",
        "/v1/sandboxes?continue=x",
        "/v1/sandboxes?labelSelector=a%20b",
        "/v1/sandboxes?fieldSelector=age=1",
        "/v1/sandboxes?watch=maybe",
        "/v1/sandboxes?resourceVersion=1",
        "/v1/sandboxes?watch=1&limit=1",
    ];
    paths_refused(400, "bad-parameter", &bad).await;
    let gone = [
        "/v1/sandboxes?continue=MS5h",
        "/v1/sandboxes?watch=1&resourceVersion=1",
        "/v1/sandboxes?watch=1&resourceVersion=18446744073709551615",
    ];
    paths_refused(410, "resource-version-gone", &gone).await;
}

/// Posts each body, and checks that its refusal begins with this detail.
async fn details_begin<const N: usize>(path: &str, cases: [(String, &str); N]) {
    let (fake, routes) = routes();
    for (body, said) in cases {
        let answer = send(&routes, ask("POST", path, JSON, body.clone())).await;
        assert_eq!(answer.status(), StatusCode::UNPROCESSABLE_ENTITY, "{body}");
        let problem: Problem = serde_json::from_slice(&whole(answer).await).unwrap();
        assert_eq!(problem.code, "invalid-body", "{body}");
        assert!(problem.detail.starts_with(said), "{body}: {}", problem.detail);
    }
    assert_eq!((fake.made(), fake.living()), (0, 0));
}

#[tokio::test]
async fn invalid_body_names_field_value_and_what_is_allowed() {
    let cases = [
        ("[]".into(), "the body is not a JSON object"),
        (GOOD.replace(":1,", ":\"1\","), "cpus: invalid type: string"),
        (GOOD.replace(":1,", ":99,"), "cpus is 99; it may be 1 to 16"),
        (
            GOOD.replace("128", "99999999"),
            "memory_mib is 99999999; it may be 64 to 65536",
        ),
        (
            with(r#""labels":{"a b":"c"}"#),
            "labels: \"a b\" is no label name",
        ),
        (
            with(r#""timeout_s":0"#),
            "timeout_s is 0; it may be 1 to 4294967295",
        ),
        (
            with(r#""name":"""#),
            "name has 0 characters; it may have 1 to 253",
        ),
        (
            with(r#""record_to":"a/b""#),
            "record_to is \"a/b\", not an absolute path",
        ),
        (
            with(r#""publish":[{"address":"x","host":1,"guest":1}]"#),
            "publish: ",
        ),
        (
            with(r#""network_policy":{"egress":[{}]}"#),
            "network policy: rule 1 has either allow or deny",
        ),
    ];
    details_begin(CREATE, cases).await;
    let thaw = [(
        r#"{"snapshot":"registry.example/web:1","memory_mode":"populate"}"#.into(),
        "memory_mode is populate; it may be cow with a snapshot in a registry",
    )];
    details_begin(THAW, thaw).await;
    let signal = [(r#"{"signal":0}"#.into(), "signal is 0; it may be 1 to 64")];
    details_begin("/v1/sandboxes/x/stop", signal).await;
}

#[tokio::test]
async fn invalid_container_names_the_field_within_it() {
    let container = |fields: &str| with(&format!(r#""container":{{{fields}}}"#));
    let cases = [
        (
            container(r#""env":["A=1","B"]"#),
            "container.env[1] is not NAME=VALUE",
        ),
        (
            container(r#""stop_signal":65"#),
            "container.stop_signal is 65; it may be 1 to 64",
        ),
        (
            container(r#""stop_timeout_s":-2"#),
            "container.stop_timeout_s is -2; it may be -1 to 86400",
        ),
        (
            container(r#""restart":{"mode":"always","max_restarts":1}"#),
            "container.restart.max_restarts goes with the mode on-failure only",
        ),
        (
            container(r#""readiness":{"tcp":{"port":0}}"#),
            "container.readiness: port is 0; it may be 1 to 65535",
        ),
        (
            container(r#""settings":{"ulimits":["files=1"]}"#),
            "container.settings.ulimits: \"files\"",
        ),
    ];
    details_begin(CREATE, cases).await;
}
