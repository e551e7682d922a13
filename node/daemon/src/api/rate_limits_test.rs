//! Tests of rate limits over the API: set at creation, changed while the sandbox runs, and refused with the name of the invalid limit.

use axum::http::StatusCode;
use thaw_protocol::api::{CreatedSandbox, Problem, RateLimit, Sandbox};

use super::test_client::{JSON, ask, routes, send, whole};

async fn body<T: serde::de::DeserializeOwned>(answer: axum::http::Response<axum::body::Body>) -> T {
    serde_json::from_slice(&whole(answer).await).unwrap()
}

fn create(limits: &str) -> String {
    format!(r#"{{"image":"x","cpus":1,"memory_mib":128,"rate_limits":{limits}}}"#)
}

fn change(limits: &str) -> String {
    format!(r#"{{"rate_limits":{limits}}}"#)
}

#[tokio::test]
async fn limits_of_a_sandbox_are_shown_and_changed_part_by_part() {
    let (_fake, routes) = routes();
    let limits = r#"{"disk":{"bytes_per_s":1048576,"ops_per_s":10},"net_out":{"bytes_per_s":4096}}"#;
    let answer = send(&routes, ask("POST", "/v1/sandboxes", JSON, create(limits))).await;
    assert_eq!(answer.status(), StatusCode::CREATED);
    let made: CreatedSandbox = body(answer).await;
    let disk = RateLimit {
        bytes_per_s: Some(1 << 20),
        ops_per_s: Some(10),
        ..RateLimit::default()
    };
    assert_eq!(made.sandbox.rate_limits.disk, Some(disk));
    let path = format!("/v1/sandboxes/{}", made.sandbox.id);
    let limits = r#"{"net_out":{},"net_in":{"ops_per_s":5,"burst_ops":9}}"#;
    let answer = send(&routes, ask("PATCH", &path, JSON, change(limits))).await;
    assert_eq!(answer.status(), StatusCode::OK);
    let changed: Sandbox = body(answer).await;
    let limits = changed.rate_limits;
    assert_eq!(
        (limits.disk, limits.net_out),
        (Some(disk), None),
        "disk stays, net_out is lifted"
    );
    let net_in = limits.net_in.unwrap();
    assert_eq!((net_in.ops_per_s, net_in.burst_ops), (Some(5), Some(9)));
    assert!(changed.resource_version > made.sandbox.resource_version);
    let shown: Sandbox = body(send(&routes, ask("GET", &path, JSON, String::new())).await).await;
    assert_eq!(shown, changed);
    let none = send(&routes, ask("PATCH", "/v1/sandboxes/none", JSON, change("{}"))).await;
    assert_eq!(none.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn limits_that_cannot_be_are_refused_by_name() {
    let (fake, routes) = routes();
    let made: CreatedSandbox =
        body(send(&routes, ask("POST", "/v1/sandboxes", JSON, create("{}"))).await).await;
    let path = format!("/v1/sandboxes/{}", made.sandbox.id);
    let mut cases = Vec::new();
    for part in ["disk", "net_out", "net_in"] {
        for field in ["bytes_per_s", "ops_per_s", "burst_bytes", "once_ops"] {
            for value in ["0", "-1", "18446744073709551615", "1e30", "-1e30"] {
                let limits = format!(r#"{{"{part}":{{"{field}":{value}}}}}"#);
                cases.push((limits, format!("rate_limits.{part}.{field} is ")));
            }
        }
    }
    cases.push((
        r#"{"net_in":{"burst_bytes":4096}}"#.into(),
        "rate_limits.net_in.burst_bytes goes with bytes_per_s".into(),
    ));
    cases.push((r#"{"disk":{"bytes_per_s":"fast"}}"#.into(), "whole number".into()));
    cases.push((r#"{"disk":{"ops_per_s":1.5}}"#.into(), "whole number".into()));
    cases.push((r#"{"tape":{"ops_per_s":1}}"#.into(), "tape".into()));
    cases.push((r#"{"disk":{"iops":1}}"#.into(), "iops".into()));
    for (limits, said) in cases {
        for request in [
            ask("POST", "/v1/sandboxes", JSON, create(&limits)),
            ask("PATCH", &path, JSON, change(&limits)),
        ] {
            let answer = send(&routes, request).await;
            assert_eq!(answer.status(), StatusCode::UNPROCESSABLE_ENTITY, "{limits}");
            let problem: Problem = body(answer).await;
            assert_eq!(problem.code, "invalid-body");
            assert!(problem.detail.contains(&said), "{limits}: {}", problem.detail);
        }
    }
    assert_eq!(fake.made(), 1, "nothing was made");
    let shown: Sandbox = body(send(&routes, ask("GET", &path, JSON, String::new())).await).await;
    assert_eq!(shown, made.sandbox, "and nothing changed");
}
