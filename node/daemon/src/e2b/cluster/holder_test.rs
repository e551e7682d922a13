use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::e2b::cluster::test_nodes::{forget_b, nodes, paused_on_b, paused_on_b_as};
use crate::e2b::test_api::ids;
use crate::e2b::whole_id::{Tag, WholeId};

#[tokio::test]
async fn member_that_was_away_finds_who_has_its_sandbox() {
    let nodes = nodes(&[8, 8, 8]).await;
    let id = paused_on_b(&nodes).await;
    let path = |what: &str| format!("/sandboxes/{id}{what}");
    forget_b(&nodes);
    nodes[0].ask("POST", &path("/connect"), json!({})).await.ok(201);
    for node in [&nodes[0], &nodes[2]] {
        let members = node.api.service.members.as_ref().unwrap();
        members.reload(&node.config).unwrap();
    }
    for node in &nodes {
        let list = node.ask("GET", "/v2/sandboxes", Value::Null).await.ok(200);
        assert_eq!(ids(&list), [id.as_str()], "{}", node.name);
        assert_eq!(list[0]["state"], "running", "{}", node.name);
    }
    // It goes to b, which finds that it is claimed, and from there to a.
    nodes[2].ask("POST", &path("/connect"), json!({})).await.ok(200);
    for node in &nodes {
        let shown = node.ask("GET", &path(""), Value::Null).await.ok(200);
        assert_eq!(shown["state"], "running", "{}", node.name);
        let headers = [("e2b-sandbox-id", id.as_str())];
        node.api.send("POST", "/x", &headers, "").await.ok(200);
    }
    nodes[2].ask("DELETE", &path(""), Value::Null).await.ok(204);
    for node in &nodes {
        node.ask("GET", &path(""), Value::Null)
            .await
            .refused(404, "it is deleted");
    }
}

#[tokio::test]
async fn deletion_reaches_the_node_that_has_taken_over() {
    let nodes = nodes(&[8, 8]).await;
    let id = paused_on_b(&nodes).await;
    let path = format!("/sandboxes/{id}");
    forget_b(&nodes);
    let connect = format!("{path}/connect");
    nodes[0].ask("POST", &connect, json!({})).await.ok(201);
    nodes[1].ask("DELETE", &path, Value::Null).await.ok(204);
    for node in &nodes {
        let short = WholeId::parse(&id).unwrap().id;
        assert!(node.api.daemon.cache.get(&short).is_none(), "{}", node.name);
        node.ask("DELETE", &path, Value::Null)
            .await
            .refused(404, "it is deleted");
    }
}

#[tokio::test]
async fn request_to_a_port_finds_who_has_claimed_its_sandbox() {
    let nodes = nodes(&[8, 8]).await;
    let wakes = json!({"templateID": "base", "autoPause": true, "autoResume": {"enabled": true}});
    let id = paused_on_b_as(&nodes, wakes).await;
    forget_b(&nodes);
    let connect = format!("/sandboxes/{id}/connect");
    nodes[0].ask("POST", &connect, json!({})).await.ok(201);
    let headers = [("e2b-sandbox-id", id.as_str())];
    nodes[1].api.send("POST", "/x", &headers, "").await.ok(200);
}

#[tokio::test]
async fn searches_at_once_share_their_questions() {
    let nodes = nodes(&[8, 8]).await;
    let ids = (0..200).map(|number| format!("{number:012x}{}", Tag::of("gone")));
    let a = &nodes[0].api;
    let asked = ids.map(|id| async move {
        let headers = [("e2b-sandbox-id", id.as_str())];
        a.send("GET", "/x", &headers, "").await
    });
    for answer in join_all(asked).await {
        answer.refused(502, "no node has it");
    }
    let accepted = nodes[1].accepted();
    assert!((1..=4).contains(&accepted), "{accepted}");
}
