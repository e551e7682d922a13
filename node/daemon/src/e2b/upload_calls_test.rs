use serde_json::json;

use crate::e2b::test_api::{ACME, Api, OTHER};

#[tokio::test]
async fn upload_needs_a_url_that_the_node_signed() {
    let api = Api::new();
    let (template, _) = api.request_build(ACME, "web").await;
    let (hash, other) = ("a".repeat(64), "b".repeat(64));
    let path = format!("/templates/{template}/files/{hash}");
    let headers = [("x-api-key", ACME), ("host", "127.0.0.1:3000")];
    let link = api.send("GET", &path, &headers, "").await.ok(201);
    let url = link["url"].as_str().unwrap();
    let path = url.strip_prefix("http://127.0.0.1:3000").unwrap();
    let (_, query) = path.split_once('?').unwrap();
    let field = |name: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(found, _)| *found == name).unwrap().1.to_owned()
    };
    let old = super::now_s() - 1;
    let expired = api
        .service
        .tokens
        .upload_signature(&super::signed("acme", &hash, old));
    for wrong in [
        path.replace(&hash, &other),
        path.replace("tenant=acme", "tenant=other"),
        path.replace("tenant=acme", "tenant="),
        path.replace(&format!("expires={}", field("expires")), "expires=99999999999"),
        path.replace(&field("signature"), &"0".repeat(64)),
        format!("/template-uploads/{hash}"),
        format!("/template-uploads/{hash}?tenant=acme&expires={old}&signature={expired}"),
    ] {
        let answer = api.send("PUT", &wrong, &[("content-length", "1")], "x").await;
        answer.refused(403, &wrong);
    }
    let without = api.send("PUT", path, &[], "x").await;
    assert!(without.refused(400, "no length").contains("Content-Length"));
    let longer = api
        .send("PUT", path, &[("content-length", "4000000000")], "x")
        .await;
    longer.refused(413, "too long");
    assert_eq!(
        api.send("PUT", path, &[("content-length", "1")], "x")
            .await
            .status
            .as_u16(),
        200
    );
    // It is of the tenant.
    let (theirs, _) = api.request_build(OTHER, "web").await;
    let path = format!("/templates/{theirs}/files/{hash}");
    let headers = [("x-api-key", OTHER), ("host", "x")];
    assert_eq!(
        api.send("GET", &path, &headers, "").await.ok(201)["present"],
        json!(false)
    );
    let path = format!("/templates/{theirs}/files/x");
    api.send("GET", &path, &headers, "").await.refused(400, "no hash");
}
