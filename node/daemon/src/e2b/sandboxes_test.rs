use serde_json::{Value, json};

use crate::api::scope::Wanted;
use crate::e2b::moment::now_s;
use crate::e2b::test_api::{ACME, Answer, Api};

/// Asks for something of a sandbox.
async fn of(api: &Api, id: &str, what: &str, body: Value) -> Answer {
    api.ask(ACME, "POST", &format!("/sandboxes/{id}/{what}"), body)
        .await
}

fn ends_in(api: &Api, id: &str) -> Option<u64> {
    let ends_at = api.daemon.cache.get(id).unwrap().ends_at;
    ends_at.map(|at| at.saturating_sub(now_s()))
}

fn state(api: &Api, id: &str) -> String {
    api.daemon.cache.get(id).unwrap().state.clone()
}

#[tokio::test]
async fn timeout_is_set_and_refreshes_only_extend_it() {
    let api = Api::new();
    let id = api.make(ACME, json!({"timeout": 100})).await;
    for (what, body, ends) in [
        ("timeout", json!({"timeout": 1000}), 1000),
        ("refreshes", json!({"duration": 500}), 1000),
        ("refreshes", Value::Null, 1000),
        ("refreshes", json!({"duration": 2000}), 2000),
        ("timeout", json!({"timeout": 50}), 50),
        ("refreshes", json!({"duration": null}), 50),
    ] {
        of(&api, &id, what, body.clone()).await.ok(204);
        let left = ends_in(&api, &id).unwrap();
        assert!((ends - 10..=ends).contains(&left), "{what} {body}: {left}");
    }
    for body in [
        json!({}),
        json!({"timeout": -1}),
        json!({"timeout": 4_294_967_296_u64}),
        json!({"timeout": null}),
    ] {
        of(&api, &id, "timeout", body.clone())
            .await
            .refused(400, &body.to_string());
    }
    let shown = api.shown(ACME, &id).await;
    let end = shown["endAt"].as_str().unwrap();
    assert!(
        end.len() == 24 && end.ends_with('Z') && *end > *shown["startedAt"].as_str().unwrap(),
        "{shown}"
    );
}

#[tokio::test]
async fn timeout_of_no_seconds_ends_the_sandbox() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    of(&api, &id, "timeout", json!({"timeout": 0})).await.ok(204);
    let gone = async {
        while api.daemon.cache.get(&id).is_some() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), gone)
        .await
        .unwrap();
    of(&api, &id, "timeout", json!({"timeout": 9}))
        .await
        .refused(404, "it is gone");
}

#[tokio::test]
async fn paused_sandbox_stays_until_it_is_resumed() {
    let api = Api::new();
    let id = api.make(ACME, json!({"timeout": 100})).await;
    of(&api, &id, "pause", json!({})).await.ok(204);
    let shown = api.shown(ACME, &id).await;
    assert_eq!(
        (&shown["state"], &shown["pauseMode"]),
        (&json!("paused"), &json!("full"))
    );
    assert_eq!(
        (ends_in(&api, &id), &shown["endAt"]),
        (None, &json!("9999-12-31T23:59:59Z"))
    );
    for what in ["pause", "timeout", "refreshes", "fork", "snapshots"] {
        let body = if what == "timeout" {
            json!({"timeout": 9})
        } else {
            json!({})
        };
        of(&api, &id, what, body).await.refused(409, what);
    }
    let resumed = of(&api, &id, "resume", json!({"timeout": 70, "autoPause": true}))
        .await
        .ok(201);
    assert_eq!(resumed["envdAccessToken"], api.service.tokens.access_token(&id));
    let shown = api.shown(ACME, &id).await;
    assert_eq!(
        (&shown["state"], &shown["lifecycle"]["onTimeout"]),
        (&json!("running"), &json!("pause"))
    );
    assert!(ends_in(&api, &id).is_some_and(|left| (60..=70).contains(&left)));
    of(&api, &id, "resume", json!({})).await.refused(409, "it runs");
}

#[tokio::test]
async fn sandbox_stays_paused_if_its_resume_fails() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    of(&api, &id, "pause", json!({})).await.ok(204);
    let paused = api.fake.counts.paused.find(&id).unwrap();
    let elsewhere = paused.directory().join("elsewhere");
    std::fs::rename(paused.snapshot(), &elsewhere).unwrap();
    of(&api, &id, "resume", json!({}))
        .await
        .refused(404, "its snapshot is missing");
    assert_eq!(state(&api, &id), "paused");
    std::fs::rename(&elsewhere, paused.snapshot()).unwrap();
    of(&api, &id, "resume", json!({})).await.ok(201);
}

#[tokio::test]
async fn private_ports_stay_private_with_the_same_token() {
    let api = Api::new();
    let private = json!({"network": {"allowPublicTraffic": false}});
    let id = api.make(ACME, private.clone()).await;
    let token = json!(api.service.tokens.traffic_token(&id));
    assert_eq!(api.shown(ACME, &id).await["network"], private["network"]);
    let connected = of(&api, &id, "connect", json!({"timeout": 60})).await.ok(200);
    of(&api, &id, "pause", json!({})).await.ok(204);
    let resumed = of(&api, &id, "resume", json!({"timeout": 60})).await.ok(201);
    for reached in [connected, resumed] {
        assert_eq!(reached["trafficAccessToken"], token);
    }
    let forks = of(&api, &id, "fork", json!({"count": 1})).await.ok(201);
    let fork = &forks[0]["sandbox"];
    let clone = fork["sandboxID"].as_str().unwrap();
    assert_eq!(
        fork["trafficAccessToken"],
        api.service.tokens.traffic_token(clone)
    );
    assert!(fork["trafficAccessToken"] != token && api.notes(clone).is_private);
}

#[tokio::test]
async fn connection_resumes_a_paused_sandbox() {
    let api = Api::new();
    let id = api.make(ACME, json!({"timeout": 100})).await;
    for path in [
        format!("/sandboxes/{id}/connect"),
        format!("/v2/sandboxes/{id}/connect"),
    ] {
        let connect = async |body| api.ask(ACME, "POST", &path, body).await;
        connect(json!({"timeout": 50})).await.ok(200);
        assert!(
            ends_in(&api, &id).unwrap() > 80,
            "a connection does not shorten the timeout"
        );
        connect(json!({"memory": false})).await.ok(200);
        api.daemon.pause(&Wanted::on_node(&id)).await.unwrap();
        connect(json!({"memory": false})).await.refused(501, "a boot");
        assert_eq!(state(&api, &id), "paused");
        let made = connect(json!({"timeout": 1000})).await.ok(201);
        assert_eq!((&made["sandboxID"], &made["alias"]), (&json!(id), &json!("base")));
        assert_eq!(state(&api, &id), "running");
        assert!(ends_in(&api, &id).unwrap() > 900);
    }
}

#[tokio::test]
async fn pause_that_this_node_cannot_do_is_refused() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    of(&api, &id, "pause", json!({"memory": false}))
        .await
        .refused(501, "files only");
    of(&api, &id, "pause", json!({"requireHealthyGuest": true}))
        .await
        .refused(501, "a health check");
    assert_eq!(state(&api, &id), "running");
    of(
        &api,
        &id,
        "pause",
        json!({"memory": true, "requireHealthyGuest": false}),
    )
    .await
    .ok(204);
}

#[tokio::test]
async fn network_of_a_running_sandbox_is_replaced() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let path = format!("/sandboxes/{id}/network");
    let put = async |body| api.ask(ACME, "PUT", &path, body).await;
    put(json!({"allowOut": ["192.0.2.7"], "allow_internet_access": false}))
        .await
        .ok(204);
    let shown = api.shown(ACME, &id).await;
    assert_eq!(
        shown["network"],
        json!({"allowOut": ["192.0.2.7"], "denyOut": ["0.0.0.0/0"]})
    );
    assert_eq!(shown["allowInternetAccess"], false);
    put(json!({"rules": {"a.example": []}}))
        .await
        .refused(501, "rules");
    put(json!({"allowOut": ["a.example"]}))
        .await
        .refused(400, "a name");
    put(json!({})).await.ok(204);
    let shown = api.shown(ACME, &id).await;
    assert_eq!(
        (shown.get("network"), &shown["allowInternetAccess"]),
        (None, &Value::Null)
    );
}

#[tokio::test]
async fn forks_are_like_their_original() {
    let api = Api::new();
    let id = api
        .make(
            ACME,
            json!({"metadata": {"a": "b"}, "envVars": {"E": "1"}, "autoPause": true}),
        )
        .await;
    let forks = of(&api, &id, "fork", json!({"count": 3, "timeout": 90}))
        .await
        .ok(201);
    let forks = forks.as_array().unwrap();
    assert_eq!((forks.len(), api.fake.living()), (3, 4));
    for fork in forks {
        let fork = &fork["sandbox"];
        let clone = fork["sandboxID"].as_str().unwrap();
        assert_eq!(fork["envdAccessToken"], api.service.tokens.access_token(clone));
        assert_eq!(api.notes(clone), api.notes(&id));
        let shown = api.shown(ACME, clone).await;
        assert_eq!(
            (&shown["metadata"], &shown["lifecycle"]["onTimeout"]),
            (&json!({"a": "b"}), &json!("pause"))
        );
        assert!(ends_in(&api, clone).is_some_and(|left| (80..=90).contains(&left)));
    }
    for count in [json!(0), json!(33), json!(256), json!("1")] {
        of(&api, &id, "fork", json!({"count": count}))
            .await
            .refused(400, &count.to_string());
    }
}

#[tokio::test]
async fn deleted_sandbox_is_gone() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let path = format!("/sandboxes/{id}");
    api.ask(ACME, "DELETE", &path, Value::Null).await.ok(204);
    for method in ["GET", "DELETE"] {
        api.ask(ACME, method, &path, Value::Null)
            .await
            .refused(404, method);
    }
    assert_eq!(api.fake.living(), 0);
}

#[tokio::test]
async fn metrics_are_of_now() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let metrics = async |query: &str| {
        let path = format!("/sandboxes/{id}/metrics{query}");
        api.ask(ACME, "GET", &path, Value::Null).await
    };
    let all = metrics("").await.ok(200);
    assert_eq!(
        (all.as_array().unwrap().len(), &all[0]["memTotal"]),
        (1, &json!(128 << 20))
    );
    for field in [
        "timestamp",
        "timestampUnix",
        "cpuCount",
        "cpuUsedPct",
        "memUsed",
        "memCache",
        "diskUsed",
        "diskTotal",
    ] {
        assert!(!all[0][field].is_null(), "{field}");
    }
    assert_eq!(metrics("?start=0&end=1").await.ok(200), json!([]));
    metrics("?start=yesterday").await.refused(400, "no number");
    metrics("?step=1").await.refused(400, "unknown");
}

#[tokio::test]
async fn logs_are_what_the_container_wrote() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let journal = api.daemon.journal(&Wanted::on_node(&id)).await.unwrap();
    let (out, err) = (
        thaw_sandbox::agent_client::Output::Stdout,
        thaw_sandbox::agent_client::Output::Stderr,
    );
    journal.append(out, b"one\ntw").unwrap();
    journal.append(err, b"oh\n").unwrap();
    journal.append(out, b"o\nthree").unwrap();
    let logs = async |path: &str| {
        api.ask(ACME, "GET", &format!("{path}/sandboxes/{id}/logs"), Value::Null)
            .await
            .ok(200)
    };
    let first = logs("").await;
    let texts = |entries: &Value, name: &str| {
        let texts = entries
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry[name].as_str().unwrap().to_owned());
        texts.collect::<Vec<_>>()
    };
    assert_eq!(texts(&first["logs"], "line"), ["one", "oh", "two", "three"]);
    assert_eq!(first["logEntries"][1]["level"], "error");
    assert_eq!(
        texts(&logs("/v2").await["logs"], "message"),
        ["one", "oh", "two", "three"]
    );
    let second = async |query: &str| {
        let path = format!("/v2/sandboxes/{id}/logs?{query}");
        api.ask(ACME, "GET", &path, Value::Null).await
    };
    for (query, expected) in [
        ("direction=backward&limit=2", vec!["three", "two"]),
        ("level=warn", vec!["oh"]),
        ("search=t&limit=1", vec!["two"]),
        ("cursor=99999999999999", vec![]),
        ("cursor=1&direction=backward", vec![]),
    ] {
        assert_eq!(
            texts(&second(query).await.ok(200)["logs"], "message"),
            expected,
            "{query}"
        );
    }
    for wrong in ["direction=up", "level=loud", "limit=x", "since=1"] {
        second(wrong).await.refused(400, wrong);
    }
}
