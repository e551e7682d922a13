use axum::body::Body;
use axum::extract::Request;
use serde_json::{Value, json};

use super::test_nodes::{Node, beside, body, nodes};
use crate::api::test_client::{send, whole};
use crate::e2b::members::proof::Step;
use crate::e2b::test_api::{ACME, ACME_READ, OTHER, ids};
use crate::e2b::whole_id::{Tag, WholeId};

#[tokio::test]
async fn sandbox_is_reached_through_any_node() {
    let nodes = nodes(&[0, 8]).await;
    let [a, b] = nodes.as_slice() else { unreachable!() };
    let made = a
        .ask("POST", "/v2/sandboxes", json!({"templateID": "base"}))
        .await
        .ok(201);
    let id = made["sandboxID"].as_str().unwrap();
    assert!(b.has(id), "{id}");
    let token = a.api.service.tokens.access_token(&WholeId::parse(id).unwrap().id);
    assert_eq!(made["envdAccessToken"], token, "every node knows the token");
    for node in &nodes {
        let shown = node
            .ask("GET", &format!("/sandboxes/{id}"), Value::Null)
            .await
            .ok(200);
        assert_eq!(shown["sandboxID"], id);
        let path = format!("/v2/sandboxes/{id}/connect");
        let connected = node.ask("POST", &path, json!({"timeout": 60})).await.ok(200);
        assert_eq!(connected["sandboxID"], id);
        let theirs = node
            .api
            .ask(OTHER, "GET", &format!("/sandboxes/{id}"), Value::Null)
            .await;
        theirs.refused(404, "another tenant");
        let nobody = node
            .api
            .ask("nobody", "GET", &format!("/sandboxes/{id}"), Value::Null)
            .await;
        nobody.refused(401, "no key");
    }
    let path = format!("/sandboxes/{id}");
    a.api
        .ask(ACME_READ, "DELETE", &path, Value::Null)
        .await
        .refused(403, "role");
    a.ask("DELETE", &path, Value::Null).await.ok(204);
    b.ask("GET", &path, Value::Null).await.refused(404, "deleted");
}

#[tokio::test]
async fn grpc_is_passed_on_over_a_connection_of_its_own() {
    let nodes = nodes(&[8, 8]).await;
    let id = nodes[1].make_here().await;
    for (kind, accepted) in [
        ("text/plain", 1),
        ("application/grpc", 2),
        ("application/grpc", 2),
    ] {
        let request = Request::builder()
            .version(axum::http::Version::HTTP_2)
            .method("POST")
            .uri("http://a.example/x")
            .header("e2b-sandbox-id", &id)
            .header("content-type", kind);
        let answer = send(&nodes[0].api.routes, request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status(), 200, "{kind}");
        let of = format!("/x of {}", WholeId::parse(&id).unwrap().id);
        assert_eq!((whole(answer).await, nodes[1].accepted()), (of.into(), accepted));
    }
}

#[tokio::test]
async fn port_of_a_sandbox_is_reached_through_any_node() {
    let mut nodes = nodes(&[8, 8]).await;
    let id = nodes[1].make_here().await;
    let expected = format!("/x of {}", WholeId::parse(&id).unwrap().id);
    let host = format!("49983-{id}.sandboxes.example");
    for headers in [[("e2b-sandbox-id", id.as_str())], [("host", host.as_str())]] {
        for node in &nodes {
            let answer = node.api.send("POST", "/x", &headers, "").await;
            assert_eq!(answer.ok(200), expected, "{} {headers:?}", node.name);
        }
    }
    assert_eq!(nodes[1].accepted(), 1, "one connection for both");
    nodes[1].stop().await;
    let answer = nodes[0].api.send("POST", "/x", &[("host", &host)], "").await;
    let why = answer.refused(502, "the node is down");
    assert!(why.contains("node b does not answer"), "{why}");
    let path = format!("/sandboxes/{id}");
    nodes[0]
        .ask("GET", &path, Value::Null)
        .await
        .refused(502, "the node is down");
}

#[tokio::test]
async fn forwarded_request_is_not_forwarded_again() {
    let nodes = nodes(&[8, 8]).await;
    let id = nodes[1].make_here().await;
    let to = |uri: String| Request::builder().uri(uri).header("x-api-key", ACME);
    for request in [
        to(format!("/sandboxes/{id}")),
        to("/x".into()).header("e2b-sandbox-id", &id),
    ] {
        let request = request.extension(Step::First).body(Body::empty()).unwrap();
        let answer = send(&nodes[0].api.routes, request).await;
        assert_eq!(answer.status(), 502);
        let answer = String::from_utf8(whole(answer).await.into()).unwrap();
        assert!(answer.contains("lists of nodes differ"), "{answer}");
    }
    let path = format!("/sandboxes/{id}");
    for mark in ["", "x", &"0".repeat(64)] {
        let headers = [("x-api-key", ACME), ("thaw-forwarded", mark)];
        for node in &nodes {
            let refused = node.api.send("GET", &path, &headers, "").await;
            refused.refused(403, mark);
        }
    }
    // A caller cannot remove the mark either.
    let headers = [("x-api-key", ACME), ("connection", "thaw-forwarded")];
    nodes[0].api.send("GET", &path, &headers, "").await.ok(200);
    // Nor what names the sandbox: without it the other node would take the request for one of this node.
    let host = format!("49983-{id}.sandboxes.example");
    let holder = format!("/thaw/holder?ids={id}");
    for named in [("e2b-sandbox-id", id.as_str()), ("host", host.as_str())] {
        let headers = [named, ("connection", named.0)];
        let answer = nodes[0].api.send("POST", &holder, &headers, "").await.ok(200);
        let of = format!("/thaw/holder of {}", WholeId::parse(&id).unwrap().id);
        assert_eq!(answer, of, "{}", named.0);
    }
    nodes[0]
        .ask("GET", "/thaw/room?template=base", Value::Null)
        .await
        .refused(404, "no node");
}

#[tokio::test]
async fn list_has_the_sandboxes_of_all_nodes_that_answer() {
    let mut nodes = nodes(&[8, 8, 8]).await;
    let mut made = Vec::new();
    for node in &nodes {
        made.extend([node.make_here().await, node.make_here().await]);
    }
    made.sort();
    made.reverse();
    for node in &nodes {
        for path in ["/v2/sandboxes", "/sandboxes"] {
            let list = node.ask("GET", path, Value::Null).await;
            assert!(!list.headers.contains_key("x-thaw-missing-nodes"));
            assert_eq!(ids(&list.ok(200)), made, "{path}");
        }
        let pages = node.api.pages(ACME, "/v2/sandboxes?limit=2").await;
        assert_eq!(pages.len(), 3);
        assert_eq!(pages.iter().flat_map(ids).collect::<Vec<_>>(), made);
        let pages = node.api.pages(ACME, "/v2/sandboxes?limit=5&order=asc").await;
        let ascending: Vec<_> = pages.iter().flat_map(ids).collect();
        assert!(ascending.iter().eq(made.iter().rev()), "{ascending:?}");
        assert_eq!(
            ids(&node
                .api
                .ask(OTHER, "GET", "/v2/sandboxes", Value::Null)
                .await
                .ok(200))
            .len(),
            0
        );
        node.ask("GET", "/v2/sandboxes?limit=0", Value::Null)
            .await
            .refused(400, "limit");
    }
    nodes[1].stop().await;
    let list = nodes[0].ask("GET", "/v2/sandboxes", Value::Null).await;
    assert_eq!(list.headers["x-thaw-missing-nodes"], "b");
    made.retain(|id| !nodes[1].has(id));
    assert_eq!(ids(&list.ok(200)), made);
}

#[tokio::test]
async fn sandbox_is_made_where_there_is_room_and_the_template() {
    let nodes = nodes(&[1, 2]).await;
    let make = async |at: &Node, template: &str| {
        let body = json!({"templateID": template});
        at.ask("POST", "/v2/sandboxes", body).await
    };
    let mut made = Vec::new();
    for _ in 0..3 {
        let one = make(&nodes[0], "base").await.ok(201);
        made.push(one["sandboxID"].as_str().unwrap().to_owned());
    }
    assert!(nodes[1].has(&made[0]), "b had more room");
    assert_eq!(made.iter().filter(|id| nodes[0].has(id)).count(), 1);
    make(&nodes[1], "base").await.refused(503, "both are full");
    make(&nodes[0], "nothing")
        .await
        .refused(404, "no node has the template");
    let on_b = made.iter().find(|id| nodes[1].has(id)).unwrap();
    let path = format!("/sandboxes/{on_b}/snapshots");
    nodes[0]
        .ask("POST", &path, json!({"name": "ready"}))
        .await
        .ok(201);
    for id in &made {
        nodes[1]
            .ask("DELETE", &format!("/sandboxes/{id}"), Value::Null)
            .await
            .ok(204);
    }
    for node in &nodes {
        let thawed = make(node, "ready").await.ok(201);
        assert!(
            nodes[1].has(thawed["sandboxID"].as_str().unwrap()),
            "only b has the snapshot"
        );
    }
    nodes[1].api.daemon.drain().await.unwrap();
    let last = make(&nodes[1], "base").await.ok(201);
    assert!(nodes[0].has(last["sandboxID"].as_str().unwrap()), "b drains");
}

#[tokio::test]
async fn repeated_creation_finds_the_sandbox_through_any_node() {
    let nodes = nodes(&[8, 8, 8]).await;
    for key in ["one", "two", "three"] {
        let mut made = Vec::new();
        for node in &nodes {
            let headers = [("x-api-key", ACME), ("idempotency-key", key)];
            let body = json!({"templateID": "base"}).to_string();
            let answer = node
                .api
                .send("POST", "/v2/sandboxes", &headers, &body)
                .await
                .ok(201);
            made.push(answer["sandboxID"].as_str().unwrap().to_owned());
        }
        made.dedup();
        assert_eq!(made.len(), 1, "{key}: {made:?}");
    }
}

#[tokio::test]
async fn answer_of_a_hostile_node_is_left_out() {
    let of = |name: &str| format!("0123456789ab{}", Tag::of(name));
    let lie = |id: &str| json!([{"sandboxID": id, "startedAt": "1970-01-01T00:00:01.000Z"}]).to_string();
    let endless = format!("HTTP/1.1 200 OK\r\n\r\n[{}", " ".repeat(17 << 20));
    for (what, answer) in [
        ("no id", body(&lie("web"))),
        ("no list", body("{}")),
        ("no JSON", body("<html>")),
        ("no HTTP", b"SSH-2.0\r\n".to_vec()),
        (
            "a redirect",
            b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n".to_vec(),
        ),
        ("too much", endless.into_bytes()),
        (
            "a long head",
            format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(1 << 20)).into_bytes(),
        ),
    ] {
        let api = beside(answer).await;
        let list = api.ask(ACME, "GET", "/v2/sandboxes", Value::Null).await;
        assert_eq!(list.headers["x-thaw-missing-nodes"], "b", "{what}");
        assert_eq!(list.ok(200), json!([]), "{what}");
        let made = api
            .ask(ACME, "POST", "/v2/sandboxes", json!({"templateID": "base"}))
            .await;
        let made = made.ok(201);
        assert!(
            made["sandboxID"]
                .as_str()
                .unwrap()
                .ends_with(&Tag::of("a").to_string()),
            "{what}"
        );
    }
    // It may add its own, and those that it may have taken over.
    for (name, count) in [("a", 1), ("b", 1), ("gone", 1)] {
        let api = beside(body(&lie(&of(name)))).await;
        let list = api.ask(ACME, "GET", "/v2/sandboxes", Value::Null).await;
        assert_eq!(ids(&list.ok(200)).len(), count, "{name}");
    }
}

#[tokio::test]
async fn creation_on_a_node_that_breaks_off_is_not_repeated() {
    let api = beside(body(r#"{"has_template": true}"#)).await;
    api.daemon.drain().await.unwrap();
    let make = json!({"templateID": "base"}).to_string();
    let (key, repeated) = (("x-api-key", ACME), ("idempotency-key", "one"));
    let id = format!("0123456789ab{}", Tag::of("b"));
    let of = |what: &str| format!("/sandboxes/{id}/{what}");
    // SDKs repeat what got 502.
    for (headers, path, body, status) in [
        (vec![key], "/v2/sandboxes".to_owned(), make.as_str(), 500),
        (
            vec![key, repeated],
            "/v2/sandboxes".to_owned(),
            make.as_str(),
            502,
        ),
        (vec![key], of("fork"), "{}", 500),
        (vec![key], of("snapshots"), "{}", 500),
        (vec![key], of("pause"), "{}", 502),
    ] {
        let answer = api.send("POST", &path, &headers, body).await;
        let why = answer.refused(status, &path);
        assert!(why.contains("the connection to node b broke"), "{why}");
    }
}

#[tokio::test(start_paused = true)]
async fn node_that_never_answers_delays_no_list_for_long() {
    let api = beside(Vec::new()).await;
    let list = api.ask(ACME, "GET", "/v2/sandboxes", Value::Null).await;
    assert_eq!(list.headers["x-thaw-missing-nodes"], "b");
    assert_eq!(list.ok(200), json!([]));
}
