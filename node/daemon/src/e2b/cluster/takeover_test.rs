use serde_json::{Value, json};

use super::*;
use crate::e2b::cluster::test_nodes::{forget_b, nodes, paused_on_b};
use crate::e2b::test_api::{ACME_READ, OTHER, ids};

#[tokio::test]
async fn paused_sandbox_of_a_node_that_is_gone_is_taken_over() {
    let mut nodes = nodes(&[8, 8, 8]).await;
    let id = paused_on_b(&nodes).await;
    let path = |what: &str| format!("/sandboxes/{id}{what}");
    nodes[1].stop().await;
    nodes[0]
        .ask("POST", &path("/connect"), json!({}))
        .await
        .refused(502, "b is a member");
    forget_b(&nodes);
    nodes[0]
        .ask("GET", &path(""), Value::Null)
        .await
        .refused(404, "nobody has it yet");
    let theirs = nodes[0]
        .api
        .ask(OTHER, "POST", &path("/connect"), json!({}))
        .await;
    theirs.refused(404, "another tenant");
    let connected = nodes[0].ask("POST", &path("/connect"), json!({})).await.ok(201);
    assert_eq!(connected["sandboxID"], id);
    for node in [&nodes[0], &nodes[2]] {
        let shown = node.ask("GET", &path(""), Value::Null).await.ok(200);
        assert_eq!(
            (&shown["sandboxID"], &shown["state"]),
            (&json!(id), &json!("running"))
        );
        assert_eq!(
            ids(&node.ask("GET", "/v2/sandboxes", Value::Null).await.ok(200)),
            [id.as_str()]
        );
        let answer = node
            .api
            .send("GET", "/x", &[("e2b-sandbox-id", id.as_str())], "")
            .await;
        assert_eq!(
            answer.ok(200),
            format!("/x of {}", WholeId::parse(&id).unwrap().id)
        );
    }
    // The node is back, and what it has is old.
    let connected = nodes[1].ask("POST", &path("/connect"), json!({})).await.ok(200);
    assert_eq!(connected["sandboxID"], id);
    let short = WholeId::parse(&id).unwrap().id;
    assert!(nodes[1].api.daemon.cache.get(&short).is_none());
    nodes[2].ask("DELETE", &path(""), Value::Null).await.ok(204);
    nodes[0]
        .ask("POST", &path("/connect"), json!({}))
        .await
        .refused(404, "it was deleted");
}

#[tokio::test]
async fn deleted_sandbox_of_a_node_that_is_gone_stays_deleted() {
    let mut nodes = nodes(&[8, 8, 8]).await;
    let id = paused_on_b(&nodes).await;
    let path = format!("/sandboxes/{id}");
    nodes[1].stop().await;
    forget_b(&nodes);
    for (key, status) in [(OTHER, 404), (ACME_READ, 403), ("nobody", 401)] {
        let refused = nodes[0].api.ask(key, "DELETE", &path, Value::Null).await;
        refused.refused(status, key);
    }
    nodes[0].ask("DELETE", &path, Value::Null).await.ok(204);
    for node in &nodes {
        node.ask("POST", &format!("{path}/connect"), json!({}))
            .await
            .refused(404, node.name);
        node.ask("DELETE", &path, Value::Null)
            .await
            .refused(404, "it was deleted");
    }
}

#[tokio::test]
async fn resumed_sandbox_cannot_be_taken_over() {
    let nodes = nodes(&[8, 8]).await;
    let id = paused_on_b(&nodes).await;
    let path = |what: &str| format!("/sandboxes/{id}{what}");
    nodes[1].ask("POST", &path("/resume"), json!({})).await.ok(201);
    forget_b(&nodes);
    nodes[0]
        .ask("POST", &path("/connect"), json!({}))
        .await
        .refused(404, "it runs on b");
}
